"""The replica's spec, read without pydantic: its import takes longer than all else until the engine is started."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields
from typing import Any, Final, get_args

from sluice.base.errors import UsageError
from sluice.exchange.serving import MOST_MESSAGE, DataPath, EngineName, ReplicaSpec

MEMBER = "--member"
"""Argument of sluice-replica on the other nodes of a replica over several."""
MEMBERS: Final = 1
"""Version of what the first node tells them and gives them: another one is refused."""
_REMEDY = "start replicas through sluice replicad, and run one version of Sluice everywhere"
_KINDS = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (int, float),
    "EngineName": (str,),
    "DataPath": (str,),
    "tuple[str, ...]": (list,),
}


def parse_spec(text: str) -> ReplicaSpec:
    """The spec of JSON, each field checked. Raises UsageError."""
    if len(text) > 16 * MOST_MESSAGE:
        raise UsageError(f"the replica's spec has {len(text)} characters", remedy=_REMEDY)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the replica's spec: not JSON: {error}", remedy=_REMEDY) from error
    if not isinstance(document, dict):
        raise UsageError("the replica's spec: not an object", remedy=_REMEDY)
    spec = ReplicaSpec(**{field.name: _value(document, field) for field in fields(ReplicaSpec)})
    if spec.engine not in get_args(EngineName):
        raise UsageError(f"the replica's spec: engine {spec.engine[:40]!r}: not known", remedy=_REMEDY)
    if spec.data_path not in get_args(DataPath):
        raise UsageError(f"the replica's spec: data_path {spec.data_path[:40]!r}: not known", remedy=_REMEDY)
    if spec.slots < 1 or spec.ready_s <= 0 or spec.drain_s < 0 or spec.nodes < 1 or spec.broadcast < 0:
        raise UsageError("the replica's spec: slots, ready_s, drain_s, nodes or broadcast is too small", remedy=_REMEDY)
    return spec


def check_member(document: dict[str, Any]) -> None:
    """Whether this node's Sluice does what the first node's asks for: all of it, and nothing in another way. Raises
    UsageError."""
    unknown = sorted(document["spec"].keys() - {field.name for field in fields(ReplicaSpec)})
    if document.get("members") == MEMBERS and not unknown:
        return
    why = f"the spec has {', '.join(unknown)[:80]}" if unknown else f"members {document.get('members')!s:.20}"
    raise UsageError(
        f"the first node runs another Sluice ({why}; here: members {MEMBERS})",
        remedy="install one version of Sluice on all nodes of the service; its next replica is started by itself",
    )


def _value(document: dict[str, Any], field: Field[Any]) -> Any:
    name, kind = field.name, str(field.type)
    if name not in document and field.default is not MISSING:  # a replicad before this version
        return field.default
    if name not in document:
        raise UsageError(f"the replica's spec: {name}: missing", remedy=_REMEDY)
    value = document[name]
    words = isinstance(value, list) and not all(isinstance(one, str) for one in value)
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool) or words:
        raise UsageError(f"the replica's spec: {name}: {str(value)[:80]!r} is no {kind}", remedy=_REMEDY)
    return tuple(value) if isinstance(value, list) else value
