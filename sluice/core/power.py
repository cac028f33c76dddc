"""Power budgets of the core (``sluice/core.h``, section power budgets): watts that a plan books over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.core._core import ffi, lib
from sluice.core.errors import check, new_error_text

WEEK_S: int = lib.SLUICE_POWER_WEEK_S
MAX_BUDGETS: int = lib.SLUICE_POWER_MAX_BUDGETS
_MAX_SEGMENTS = 4096


@dataclass(frozen=True)
class Hours:
    """Part of a week, in seconds from its beginning, with another budget."""

    from_s: int
    to_s: int
    watts: int


@dataclass(frozen=True)
class Budget:
    """A budget; `nodes` None: of all nodes."""

    watts: int
    hours: tuple[Hours, ...] = ()
    nodes: frozenset[int] | None = None
    base_watts: int = 0
    """Drawn there whatever runs, and kept for guaranteed jobs."""
    lowered_watts: int = 0
    lowered_until_s: int = 0
    """0: not lowered."""


class Power:
    """Budgets for clusters of up to `max_nodes` nodes, for `Backfill.set_power`; `week_s`: when a week began."""

    def __init__(self, max_nodes: int, budgets: Sequence[Budget] = (), week_s: int = 0) -> None:
        self.max_nodes, self.count = max_nodes, 0
        handle, text = ffi.new("struct sluice_power **"), new_error_text()
        check(lib.sluice_power_new(max_nodes, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_power_free)
        self.set(budgets, week_s)

    def set(self, budgets: Sequence[Budget], week_s: int = 0) -> None:
        """The budgets of plans from now on."""
        keep: list[Any] = []
        c_budgets, text = ffi.new("struct sluice_power_budget[]", max(len(budgets), 1)), new_error_text()
        for c_budget, budget in zip(c_budgets, budgets, strict=False):
            c_budget.watts, c_budget.base_watts = budget.watts, budget.base_watts
            c_budget.lowered_watts, c_budget.lowered_until_s = budget.lowered_watts, budget.lowered_until_s
            if budget.hours:
                keep.append(ffi.new("struct sluice_power_hours[]", [(h.from_s, h.to_s, h.watts) for h in budget.hours]))
                c_budget.hours, c_budget.hour_count = keep[-1], len(budget.hours)
            if budget.nodes is not None:
                words = [0] * ((max(budget.nodes, default=0)) // 64 + 1)
                for node in budget.nodes:
                    words[node // 64] |= 1 << node % 64
                keep.append(ffi.new("uint64_t[]", words))
                c_budget.nodes, c_budget.node_words = keep[-1], len(words)
        check(lib.sluice_power_set(self.handle, c_budgets, len(budgets), week_s, text), text)
        self.count = len(budgets)

    def watts(self, budget: int, at_s: int) -> int:
        """A budget at a time, what is drawn anyway included."""
        return int(lib.sluice_power_watts(self.handle, budget, at_s))

    def left(self, budget: int) -> list[tuple[int, int]]:
        """What the last plan left of a budget: from when on, and how many watts."""
        starts, watts = ffi.new("int64_t[]", _MAX_SEGMENTS), ffi.new("int64_t[]", _MAX_SEGMENTS)
        count = lib.sluice_power_profile(self.handle, budget, _MAX_SEGMENTS, starts, watts)
        return [(int(starts[i]), int(watts[i])) for i in range(count)]
