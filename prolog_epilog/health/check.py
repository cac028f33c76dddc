"""What a check is: a measurement, and how its values become findings over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from policy.health import NodeHealth
from prolog_epilog.health.facts import GpuFacts, NodeFacts


class Status(Enum):
    """Of one check on one GPU or node."""

    OK = "ok"
    FOUND = "found"
    UNKNOWN = "unknown"  # the vendor, the model or the driver does not report it
    SKIPPED = "skipped"  # it does not apply here


@dataclass(frozen=True, slots=True)
class Measured:
    """A value in the check's unit, and details for a person."""

    value: float
    detail: str = ""


Answer = Measured | Literal[Status.UNKNOWN, Status.SKIPPED]

Kind = Literal["level", "growth", "share"]
"""level: the value itself, for as long as the window; growth: how much a counter grew within the window; share: in
percent, how much of the window the value was not 0."""


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """A check of a GPU. `below`: values below the threshold are findings, not those from it on."""

    measure: Callable[[GpuFacts, NodeFacts, NodeHealth], Answer]
    text: str  # {value}, {threshold}, {window}, {detail}
    kind: Kind = "level"
    below: bool = False
    vendors: tuple[str, ...] = ("nvidia", "amd", "intel")
    per_detail: bool = False  # its window starts again when the detail changes, e.g. another job


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A check of the node."""

    measure: Callable[[NodeFacts, NodeHealth], Answer]
    text: str
    kind: Kind = "level"
    below: bool = False
    per_detail: bool = False


def reported(value: float | bool | None, detail: str = "") -> Answer:
    """A value that the driver may not have reported."""
    return Status.UNKNOWN if value is None else Measured(float(value), detail)
