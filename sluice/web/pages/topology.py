"""A node's topology as a drawing: where boxes are and which lines join them. The template makes SVG of it.

GPUs are in a row, those of a NUMA node in one frame, NICs below. GPUs that all reach each other over equal links hang
on one bar, as behind NVSwitch; other links are lines of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

GPU_W, GPU_H, NIC_H = 84, 60, 26
_GAP, _EDGE, _PAD = 12, 12, 10
_BAR_Y, _BAR_H, _GPU_Y, _NIC_Y = 14, 22, 84, 196
_MOST = 64  # GPUs that are drawn; the table has all
_FABRIC = {"NV": "NVLink", "XGMI": "xGMI", "XE": "Xe Link"}
_NEAR = ("PIX", "PXB", "PHB")


@dataclass(frozen=True, slots=True)
class Box:
    """Something at a place."""

    x: int
    y: int
    width: int
    height: int
    label: str
    index: int = -1

    @property
    def middle(self) -> int:
        """Of its width."""
        return self.x + self.width // 2

    @property
    def end(self) -> int:
        """Its lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Line:
    """From one place to another; `kind`: fabric or pci."""

    x1: int
    y1: int
    x2: int
    y2: int
    kind: str
    label: str = ""


@dataclass(slots=True)
class Drawing:
    """All of it, in the order in which it is painted."""

    width: int
    height: int
    frames: list[Box] = field(default_factory=list)
    bars: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    gpus: list[Box] = field(default_factory=list)
    nics: list[Box] = field(default_factory=list)
    said: list[tuple[str, list[str]]] = field(default_factory=list)
    """The links for those who do not see the drawing: of what kind, and the GPUs that they join, each with each."""


def link_text(link: Mapping[str, Any]) -> str:
    """A link as `sluice topo` writes it."""
    return f"{link['type']}{link['width'] or ''}" if link["type"] == "NV" else str(link["type"])


def draw(inventory: Mapping[str, Any]) -> Drawing | None:
    """A node's inventory drawn; None where it has no GPUs, or more than can be drawn."""
    gpus = inventory["gpus"]
    if not 0 < len(gpus) <= _MOST:
        return None
    order = sorted(range(len(gpus)), key=lambda at: (_numa(gpus[at]), at))
    drawing = Drawing(0, 0)
    boxes: dict[int, Box] = {}
    x, before = _EDGE + _PAD, None
    for at in order:
        numa = _numa(gpus[at])
        if before is not None:
            x += GPU_W + (_GAP if numa == before else _GAP + 2 * _PAD)
        boxes[at] = Box(x, _GPU_Y, GPU_W, GPU_H, f"GPU {gpus[at]['index']}", at)
        before = numa
    drawing.gpus = [boxes[at] for at in range(len(gpus))]
    drawing.width = x + GPU_W + _PAD + _EDGE
    _place_nics(drawing, inventory, boxes)
    drawing.height = _NIC_Y + NIC_H + 2 * _PAD + 14 if drawing.nics else _GPU_Y + GPU_H + 2 * _PAD + 14
    for numa in dict.fromkeys(_numa(gpus[at]) for at in order):
        mine = [boxes[at] for at in order if _numa(gpus[at]) == numa]
        left, right = mine[0].x - _PAD, mine[-1].x + GPU_W + _PAD
        label = f"NUMA {numa}" if numa >= 0 else ""
        drawing.frames.append(Box(left, _GPU_Y - _PAD, right - left, drawing.height - _GPU_Y + _PAD - 6, label))
    _join_gpus(drawing, inventory, boxes)
    return drawing


def _numa(device: Mapping[str, Any]) -> int:
    return -1 if device["numa_node"] is None else int(device["numa_node"])


def _place_nics(drawing: Drawing, inventory: Mapping[str, Any], boxes: Mapping[int, Box]) -> None:
    """A NIC is below the GPU that it is nearest to, several next to each other."""
    below: dict[int, list[int]] = {}
    for number, nic in enumerate(inventory["nics"]):
        links = nic["links"][: len(boxes)]
        near = [at for word in (*_NEAR, "NODE") for at, link in enumerate(links) if link["type"] == word]
        free = next((at for at in near if at not in below), near[0] if near else number % len(boxes))
        below.setdefault(free, []).append(number)
    for at, numbers in below.items():
        width = (GPU_W - 4 * (len(numbers) - 1)) // len(numbers)
        for place, number in enumerate(numbers):
            nic = inventory["nics"][number]
            box = Box(boxes[at].x + place * (width + 4), _NIC_Y, width, NIC_H, nic["name"], number)
            drawing.nics.append(box)
            for gpu, link in enumerate(nic["links"][: len(boxes)]):
                if link["type"] in _NEAR[:2]:
                    drawing.lines.append(
                        Line(boxes[gpu].middle, boxes[gpu].end, box.middle, box.y, "pci", link["type"])
                    )


def _join_gpus(drawing: Drawing, inventory: Mapping[str, Any], boxes: Mapping[int, Box]) -> None:
    links, names = inventory["links"], [f"GPU {gpu['index']}" for gpu in inventory["gpus"]]
    pairs: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for one, other in combinations(range(len(links)), 2):
        link = links[one][other]
        if link["type"] in _FABRIC:
            pairs.setdefault((link["type"], link["width"]), set()).add((one, other))
    for (kind, width), joined in pairs.items():
        label = f"{_FABRIC[kind]} x{width}" if kind == "NV" else _FABRIC[kind]
        for group in _cliques(joined):
            if len(group) > 2:
                ends = sorted(boxes[at].x for at in group)
                y = _BAR_Y + 4 * (len(drawing.bars) % 4)
                drawing.bars.append(Box(ends[0], y, ends[-1] + GPU_W - ends[0], _BAR_H, label))
                drawing.lines += [
                    Line(boxes[at].middle, y + _BAR_H, boxes[at].middle, _GPU_Y, "fabric") for at in group
                ]
                drawing.said.append((label, [names[at] for at in group]))
                joined = {pair for pair in joined if not set(pair) <= set(group)}
        for one, other in sorted(joined):
            drawing.lines.append(Line(boxes[one].middle, _GPU_Y, boxes[other].middle, _GPU_Y, "fabric", label))
            drawing.said.append((label, [names[one], names[other]]))


def _cliques(pairs: set[tuple[int, int]]) -> list[Sequence[int]]:
    """Disjoint groups in which each is joined with each, the largest that are found greedily."""
    near: dict[int, set[int]] = {}
    for one, other in pairs:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
    found: list[Sequence[int]] = []
    left = set(near)
    while left:
        group: list[int] = []
        for at in sorted(left, key=lambda at: (-len(near[at] & left), at)):
            if all(at in near[one] for one in group):
                group.append(at)
        found.append(sorted(group))
        left -= set(group)
    return found
