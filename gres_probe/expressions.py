"""A small language of conditions over named fields: a small part of Python's syntax.

Comparisons (chained ones too), ``and``, ``or``, ``not``, ``in``, arithmetic on numbers, constants, lists of constants
and field names. No calls, no attributes, no indexing, no powers; strings can be compared only. A field that is unknown
(None) makes every comparison false except ``== None`` and ``!= None``, and so does comparing a word with a number.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping

from sluice.base.errors import SluiceError

Value = str | int | float | bool | None
Fields = Mapping[str, Value]
Condition = Callable[[Fields], bool]
_Term = Callable[[Fields], object]

_MOST_CHARACTERS = 1000
_DEEPEST = 40
_LARGEST = 1e15

_ORDER: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Lt: operator.lt,  # type: ignore[dict-item]  # only called on operands that can be compared
    ast.LtE: operator.le,  # type: ignore[dict-item]
    ast.Gt: operator.gt,  # type: ignore[dict-item]
    ast.GtE: operator.ge,  # type: ignore[dict-item]
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def compile_condition(text: str, fields: Collection[str], *, source: str) -> Condition:
    """A function of the fields of one object that returns whether the condition holds.

    `fields` are the names that may be used; `source` names the origin in errors. Raises SluiceError for anything that
    is not allowed. The function never raises and takes time proportional to the text's length.
    """
    if len(text) > _MOST_CHARACTERS:
        raise SluiceError(f"{source}: more than {_MOST_CHARACTERS} characters", remedy="write a shorter expression")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        term = _compile(tree.body, frozenset(fields), source, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SluiceError(f"{source}: {text[:80]!r} is not an expression", remedy="e.g. memory_gib >= 80") from error
    return lambda values: bool(term(values))


def _compile(node: ast.expr, fields: frozenset[str], source: str, depth: int) -> _Term:
    if depth > _DEEPEST:
        raise SluiceError(f"{source}: nested more than {_DEEPEST} deep", remedy="write a simpler expression")

    def inner(child: ast.expr) -> _Term:
        return _compile(child, fields, source, depth + 1)

    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return lambda values: value
        case ast.Name(id=name):
            if name not in fields:
                raise SluiceError(f"{source}: no field {name!r}", remedy=f"choose from {', '.join(sorted(fields))}")
            return lambda values: values.get(name)
        case ast.BoolOp(op=ast.And(), values=children):
            terms = [inner(child) for child in children]
            return lambda values: all(term(values) for term in terms)
        case ast.BoolOp(op=ast.Or(), values=children):
            terms = [inner(child) for child in children]
            return lambda values: any(term(values) for term in terms)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            negated = inner(operand)
            return lambda values: not negated(values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = inner(operand)
            return lambda values: _calculate(operator.sub, 0, number(values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            calculate, first, second = _ARITHMETIC[type(op)], inner(left), inner(right)
            return lambda values: _calculate(calculate, first(values), second(values))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            members = [inner(element) for element in elements]
            return lambda values: [member(values) for member in members]
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [inner(left), *(inner(other) for other in comparators)]
            tests = [_comparison(op, source) for op in ops]
            return lambda values: all(
                test(operands[place](values), operands[place + 1](values)) for place, test in enumerate(tests)
            )
    raise SluiceError(
        f"{source}: {ast.unparse(node)[:60]!r} is not allowed",
        remedy="use fields, constants, comparisons, and, or, not, in, + - * / // %",
    )


def _calculate(calculate: Callable[[float, float], float], first: object, second: object) -> float | None:
    """Arithmetic on numbers; None where an operand is unknown or not a number, or there is no result."""
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    try:
        result = calculate(first, second)
    except (ZeroDivisionError, OverflowError):
        return None
    return result if abs(result) <= _LARGEST else None


def _comparison(op: ast.cmpop, source: str) -> Callable[[object, object], bool]:
    match op:
        case ast.Eq() | ast.Is():
            return operator.eq
        case ast.NotEq() | ast.IsNot():
            return operator.ne
        case ast.In():
            return lambda value, among: isinstance(among, list) and value in among
        case ast.NotIn():
            return lambda value, among: isinstance(among, list) and value not in among
    compare = _ORDER.get(type(op))
    if compare is None:
        raise SluiceError(f"{source}: a comparison that is not allowed")

    def ordered(first: object, second: object) -> bool:
        numbers = isinstance(first, int | float) and isinstance(second, int | float)
        return (numbers or (isinstance(first, str) and isinstance(second, str))) and compare(first, second)

    return ordered
