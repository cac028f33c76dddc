"""Structs of C that are written and read whole, as bytes: member by member takes cffi many times as long."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from sluice.base.errors import SluiceError
from sluice.core._core import ffi

_CODES = {"uint64_t": "Q", "uint32_t": "I"}


def layout_of(name: str, members: Sequence[str], rest: Sequence[str] = ()) -> Struct:
    """Of ``struct name``, the values of `members`, an array's one after the other; `rest`: what it has after them.

    Raises SluiceError where the header has other members, or in another order.
    """
    fields = ffi.typeof(f"struct {name}").fields
    found = [member for member, _ in fields]
    if found != [*members, *rest]:
        raise SluiceError(
            f"struct {name} has {', '.join(found)}: not what Python packs ({', '.join([*members, *rest])})",
            remedy="build the core of this version of Sluice again (make build)",
        )
    return Struct("@" + "".join(_code(name, member, field.type) for member, field in fields[: len(members)]))


def _code(name: str, member: str, kind: ffi.CType) -> str:
    item, count = (kind.item, str(kind.length)) if kind.kind == "array" else (kind, "")
    code = _CODES.get(item.cname)
    if code is None:
        raise SluiceError(f"struct {name}: {member} is {item.cname}: only {', '.join(_CODES)} are packed")
    return count + code
