"""What controllers read of a policy about power: the section `power_control` of sluice.node.json."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sluice.base.hostlist import expand

_WEEK_MIN = 7 * 24 * 60


class ControlBudget(BaseModel):
    """A budget: of nodes, or of the jobs of some accounts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    nodes: str = ""
    """A hostlist; `*`: all; empty: of accounts."""
    accounts: tuple[str, ...] = ()
    watts: Annotated[int, Field(ge=0)]
    hours: tuple[tuple[int, int, int], ...] = ()
    """First minute of the week, minute after the last, watts; Monday 00:00 local time is 0."""

    def watts_at(self, now: float) -> tuple[int, int | None]:
        """The watts of a moment, and the minute of the week of the next change; None: they never change."""
        minute = minute_of_week(now)
        starts = sorted({edge % _WEEK_MIN for begin, end, _ in self.hours for edge in (begin, end)})
        change = next((one for one in starts if one > minute), starts[0] if starts else None)
        return next((watts for begin, end, watts in self.hours if begin <= minute < end), self.watts), change

    def has_node(self, node: str) -> bool:
        """Whether a node is one of its."""
        return self.nodes == "*" or node in _expanded(self.nodes)


class ControlGpu(BaseModel):
    """GPUs of a class, in watts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    idle: int = 0
    least: int
    default: int


class ControlPower(BaseModel):
    """How budgets are kept. Without the section there are none."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    price_kwh: float = 0.0
    budgets: tuple[ControlBudget, ...] = ()
    classes: dict[str, ControlGpu] = {}
    """By GRES type."""
    lower_first: tuple[str, ...] = ()
    """QOS, the first gives way first."""
    guaranteed: tuple[str, ...] = ()
    """QOS whose jobs are never stopped."""
    lowest_percent: Annotated[int, Field(ge=1, le=100)] = 60
    """Of the default limit: no cap goes below to keep a budget."""
    cancel: bool = False
    """Jobs that give way are cancelled, not requeued: `scheduling.preemption.mode`."""


def minute_of_week(now: float) -> int:
    """Of local time; Monday 00:00 is 0."""
    local = time.localtime(now)
    return (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min


@lru_cache(maxsize=128)
def _expanded(nodes: str) -> frozenset[str]:
    return frozenset(expand(nodes)) if nodes else frozenset()
