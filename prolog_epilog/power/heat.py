"""GPUs that slow down by heat: how far their caps are lowered. Has no clock; times are those of the samples."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policy.node_power import NodeThermal

_COOL_TIMES = 6  # as long without heat for a step back, as with it for a step down
_LONGEST_S = 5.0  # between two samples that are taken as one time


@dataclass
class Heat:
    """A GPU that slows down by heat: how many steps its cap is lowered. Times by the samples' clock."""

    steps: int = 0
    hot_s: float = 0.0
    cool_s: float = 0.0
    at: float | None = None

    def look(self, hot: bool, now: float, policy: NodeThermal) -> bool:
        """A sample; whether the steps have changed."""
        passed = 0.0 if self.at is None else max(0.0, min(now - self.at, _LONGEST_S))
        self.at = now
        self.hot_s = self.hot_s + passed if hot else max(0.0, self.hot_s - passed)
        self.cool_s = 0.0 if hot else self.cool_s + passed
        if self.hot_s >= policy.after_s and self.percent(policy) > policy.least_percent:
            self.steps += 1
        elif self.steps and self.cool_s >= _COOL_TIMES * policy.after_s:
            self.steps -= 1
        else:
            return False
        self.hot_s = self.cool_s = 0.0
        return True

    def percent(self, policy: NodeThermal) -> int:
        """Of the cap that it would have, now."""
        return max(policy.least_percent, 100 - self.steps * policy.lower_percent)


class Heats:
    """By UUID of the physical GPU. Thread-safe: samples come in the vendors' threads, which wait for nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heats: dict[str, Heat] = {}

    def load(self, steps: Mapping[str, int]) -> None:
        """What an earlier agent left."""
        with self._lock:
            self._heats = {uuid: Heat(count) for uuid, count in steps.items()}

    def look(self, hot: Mapping[str, bool], now: float, policy: NodeThermal) -> dict[str, int]:
        """A sample; where the steps have changed, the percent of the cap that is left."""
        changed = {}
        with self._lock:
            for uuid, is_hot in hot.items():
                heat = self._heats.setdefault(uuid, Heat())
                if heat.look(is_hot, now, policy):
                    changed[uuid] = heat.percent(policy)
        return changed

    def keep(self, uuids: Collection[str]) -> None:
        """Forget all others: without a job there is no heat of ours."""
        with self._lock:
            self._heats = {uuid: heat for uuid, heat in self._heats.items() if uuid in uuids}

    def steps(self) -> dict[str, int]:
        """Of the GPUs that are lowered."""
        with self._lock:
            return {uuid: heat.steps for uuid, heat in self._heats.items() if heat.steps}

    def percent(self, policy: NodeThermal) -> dict[str, int]:
        """The same, of the cap that each would have."""
        with self._lock:
            return {uuid: heat.percent(policy) for uuid, heat in self._heats.items() if heat.steps}
