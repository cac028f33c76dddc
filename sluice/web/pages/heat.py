"""GPUs as a heat map: a drawing for each rack, a row for each node, a cell for each GPU.

Cells of one look that are next to each other are one dashed line, so that the map of 8,192 GPUs stays small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.report.fleet import hosts

_LEVELS = 5
_LABELLED = 64
"""So many nodes have their names next to their rows."""
_OF_RACK = 16
_LABEL = 92
LOOKS = ("free", *(str(level) for level in range(_LEVELS)), "off", "out")


@dataclass
class Rack:
    """A drawing. `paths`: of each look its lines; `crosses`: on GPUs that are out, so that it is not colour alone."""

    name: str
    nodes: list[str]
    width: int
    height: int
    pitch: int
    left: int
    paths: dict[str, str] = field(default_factory=dict)
    crosses: str = ""


def look_of(gpu: Mapping[str, Any]) -> str:
    """How a GPU looks: `free`, a level of use from 0, `off` (no new jobs), `out` (of service)."""
    if gpu["health"] == "out":
        return "out"
    if gpu["use"] == "free":
        return "free" if gpu["available"] else "off"
    percent = gpu["utilisation_percent"]
    return "1" if percent is None else str(min(_LEVELS - 1, max(0, int(percent * _LEVELS // 100))))


def natural(name: str) -> list[tuple[int, int, str]]:
    """For sorting: gpu9 before gpu10."""
    return [(1, int(one[:18]), "") if one.isdecimal() else (0, 0, one) for one in re.split(r"(\d+)", name) if one]


def rack_names(nodes: Iterable[Mapping[str, Any]], switches: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The rack of each node by its features, else its switch; else of each kind of GPU so many in a group."""
    found = {node: one["name"] for one in switches if one["level"] == 0 for node in hosts(one["nodes"])}
    groups: dict[str, list[str]] = {}
    for node in nodes:
        named = next((one for one in node["features"] if re.match(r"(rack|switch|row)[-_.]?\w", one)), None)
        if named is not None:
            found[node["name"]] = named
        elif node["name"] not in found:
            groups.setdefault(" ".join(node["gpu_types"]), []).append(node["name"])
    for names in groups.values():
        names.sort(key=natural)
        for at in range(0, len(names), _OF_RACK):
            some = names[at : at + _OF_RACK]
            found |= dict.fromkeys(some, some[0] if len(some) == 1 else f"{some[0]} \u2013 {some[-1]}")
    return found


def draw(gpus: Iterable[Mapping[str, Any]], racks: Mapping[str, str]) -> list[Rack]:
    """The drawings of these GPUs."""
    rows: dict[str, dict[int, str]] = {}
    for gpu in gpus:
        rows.setdefault(gpu["node"], {})[gpu["index"]] = look_of(gpu)
    members: dict[str, list[str]] = {}
    for node in rows:
        members.setdefault(racks.get(node, ""), []).append(node)
    large = len(rows) <= _LABELLED
    return [
        _rack(name, sorted(nodes, key=natural), rows, large=large)
        for name, nodes in sorted(members.items(), key=lambda one: natural(one[0]))
    ]


def _rack(name: str, nodes: list[str], rows: Mapping[str, Mapping[int, str]], *, large: bool) -> Rack:
    pitch, left = (24, _LABEL) if large else (10, 0)
    gap = pitch // 5
    most = 1 + max(max(rows[node]) for node in nodes)
    made = Rack(name, nodes, left + most * pitch, len(nodes) * pitch, pitch, left)
    lines: dict[str, list[str]] = {}
    crosses = []
    arm = pitch // 5
    for row, node in enumerate(nodes):
        middle = row * pitch + (pitch - gap) // 2
        for look, begin, length in _runs(rows[node]):
            lines.setdefault(look, []).append(f"M{left + begin * pitch} {middle}h{length * pitch - gap}")
            for at in range(begin, begin + length) if look == "out" else ():
                x = left + at * pitch + (pitch - gap) // 2 - arm
                crosses.append(f"M{x} {middle - arm}l{2 * arm} {2 * arm}m0-{2 * arm}l-{2 * arm} {2 * arm}")
    made.paths = {look: "".join(lines[look]) for look in LOOKS if look in lines}
    made.crosses = "".join(crosses)
    return made


def _runs(row: Mapping[int, str]) -> Iterable[tuple[str, int, int]]:
    """GPUs of one look that are next to each other: the look, the first, and how many."""
    begin, length, look = 0, 0, ""
    for index in sorted(row):
        if length and look == row[index] and index == begin + length:
            length += 1
            continue
        if length:
            yield look, begin, length
        begin, length, look = index, 1, row[index]
    if length:
        yield look, begin, length
