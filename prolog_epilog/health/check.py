"""What a check is: a measurement, and how its values become findings over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from health.facts import GpuFacts, NodeFacts
from policy.health import NodeHealth


class Status(Enum):
    """Of one check on one GPU or node."""

    OK = "ok"
    FOUND = "found"
    UNKNOWN = "unknown"  # the vendor, the model or the driver does not tell
    SKIPPED = "skipped"  # it does not apply here


@dataclass(frozen=True, slots=True)
class Measured:
    """A value in the check's unit, and what else a person should know of it."""

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
    anew: bool = False  # its window begins anew when the detail is another, e.g. another job


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A check of the node."""

    measure: Callable[[NodeFacts, NodeHealth], Answer]
    text: str
    kind: Kind = "level"
    below: bool = False
    anew: bool = False


def told(value: float | bool | None, detail: str = "") -> Answer:
    """A value that the driver may not have told."""
    return Status.UNKNOWN if value is None else Measured(float(value), detail)
