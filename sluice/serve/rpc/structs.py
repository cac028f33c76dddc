"""google.protobuf.Struct and JSON's values, in both directions. Whole numbers stay whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2

_MOST_DEPTH = 32
_MOST_WHOLE = 1 << 53  # a double has all whole numbers below


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Its values. Raises ValueError for what JSON cannot have, and for what is nested too deeply."""
    return {name: _value(value, 1) for name, value in struct.fields.items()}


def _value(value: struct_pb2.Value, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise ValueError(f"options: nested more than {_MOST_DEPTH} deep")
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise ValueError(f"options: {number} is not a number of JSON")
        return int(number) if number.is_integer() and abs(number) <= _MOST_WHOLE else number
    if kind == "struct_value":
        return {name: _value(one, depth + 1) for name, one in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_value(one, depth + 1) for one in value.list_value.values]
    if kind in ("string_value", "bool_value"):
        return getattr(value, kind)
    return None


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """A Struct of values of JSON."""
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct
