"""YAML files written by people, checked against a pydantic model, with errors that name file, line and place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.base.errors import UsageError

if TYPE_CHECKING:
    import yaml
    from pydantic import BaseModel

    ModelType = TypeVar("ModelType", bound=BaseModel)

_MAX_BYTES = 16 * 1024 * 1024
_MOST_REPEATED = 1_000_000


def load_document(path: Path, model: type[ModelType], *, remedy: str) -> ModelType:
    """Read the YAML file and validate it.

    Raises UsageError for a file that cannot be read, is not YAML or does not fit the model; `remedy` names the
    reference is.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES} bytes", remedy=remedy)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}", remedy=remedy) from error
    return parse_document(text, model, source=str(path), remedy=remedy)


def parse_document(text: str, model: type[ModelType], *, source: str, remedy: str) -> ModelType:
    """Like `load_document`, from text; `source` names its origin in errors."""
    from pydantic import ValidationError

    root, document = compose_document(text, source=source, remedy=remedy)
    try:
        return model.model_validate({} if document is None else document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            message = "not a mapping of keys to values"
        shown = repr(first["input"]) if isinstance(first["input"], str | int | float | bool | None) else ""
        words = [f"{source}:{line_of(root, first['loc'])}", place, f"{message}{f', got {shown}' if shown else ''}"]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UsageError(": ".join(word for word in words if word) + more, remedy=remedy) from error


def compose_document(text: str, *, source: str, remedy: str) -> tuple[yaml.Node | None, Any]:
    """The YAML tree, for `line_of`, and the values. Raises UsageError for what is not YAML, and for repeated keys."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = yaml.compose(text, Loader=loader)
        _refuse_repeats(root, source, remedy)
        _refuse_duplicates(root, source, remedy)
        return root, yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise UsageError(f"{place}: not YAML: {getattr(error, 'problem', None) or error}", remedy=remedy) from error
    except ValueError as error:  # PyYAML lets a date like 2027-13-01, or a number of 5,000 digits, through to Python
        line, value = _unreadable(root)
        raise UsageError(f"{source}:{line}: {value!r}: {error}", remedy=remedy) from error
    except RecursionError as error:
        raise UsageError(f"{source}: nested too deeply", remedy=remedy) from error


def _unreadable(node: yaml.Node | None) -> tuple[int, str]:
    """Line and text of the first scalar that is not a valid value."""
    import yaml

    loader = yaml.SafeLoader("")
    for scalar in _scalars(node):
        try:
            loader.construct_object(scalar)
        except ValueError:
            return int(scalar.start_mark.line) + 1, str(scalar.value)[:80]
    return 1, ""


def _scalars(node: yaml.Node | None) -> Iterator[yaml.Node]:
    import yaml

    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key)
            yield from _scalars(value)


def _refuse_repeats(root: yaml.Node | None, source: str, remedy: str) -> None:
    """A short text of aliases of aliases would be a document that no memory holds."""
    sizes: dict[int, int] = {}
    if root is not None and _size(root, sizes) > len(sizes) + _MOST_REPEATED:
        raise UsageError(f"{source}: its aliases repeat more than {_MOST_REPEATED:,} values", remedy=remedy)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values a node has, those of an alias each time that it is used."""
    if (known := sizes.get(id(node))) is not None:
        return known
    sizes[id(node)] = 1  # where it is in itself
    pairs = node.value if isinstance(node.value, list) else ()
    parts = (part for one in pairs for part in (one if isinstance(one, tuple) else (one,)))
    sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


def _refuse_duplicates(node: yaml.Node | None, source: str, remedy: str) -> None:
    """A repeated key would silently replace the first one's value."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise UsageError(
                    f"{source}:{key.start_mark.line + 1}: {key.value}: given twice in one mapping", remedy=remedy
                )
            if isinstance(key.value, str):
                seen.add(key.value)
            _refuse_duplicates(value, source, remedy)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, source, remedy)


def line_of(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Line of the innermost part of `location` that is in the file."""
    import yaml

    here: Any = node
    line = 1 if node is None else int(node.start_mark.line) + 1
    for part in location:
        if isinstance(here, yaml.MappingNode):
            found = next(((key, value) for key, value in here.value if key.value == str(part)), None)
            if found is None:
                continue
            line, here = int(found[0].start_mark.line) + 1, found[1]
        elif isinstance(here, yaml.SequenceNode) and isinstance(part, int) and part < len(here.value):
            here = here.value[part]
            line = int(here.start_mark.line) + 1
    return line
