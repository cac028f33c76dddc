"""The use of each GPU over the last hours, kept by this server as the snapshot passes: nobody else keeps it by time."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

STEP_S = 30.0
_STEPS = 240  # two hours
_UNKNOWN = -1


class _Gpu:
    """Percent and MiB, a ring of steps."""

    __slots__ = ("mib", "percent")

    def __init__(self) -> None:
        self.percent = array("b", [_UNKNOWN]) * _STEPS
        self.mib = array("i", [_UNKNOWN]) * _STEPS


class Series:
    """All GPUs, by the keys of the snapshot's rows: about a kilobyte each."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_STEPS)
        self._gpus: dict[str, _Gpu] = {}
        self._step = 0

    def note(self, now: float, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what the GPUs do now, unless that was done within the last step."""
        if self._times and 0 <= now - self._times[-1] < STEP_S:
            return
        self._times.append(now)
        self._step = (self._step + 1) % _STEPS
        for key in self._gpus.keys() - rows.keys():
            del self._gpus[key]
        for key, row in rows.items():
            one = self._gpus.setdefault(key, _Gpu())
            percent, mib = row["utilisation_percent"], row["memory_used_mib"]
            one.percent[self._step] = _UNKNOWN if percent is None else max(0, min(100, round(percent)))
            one.mib[self._step] = _UNKNOWN if mib is None else max(0, min(mib, 2**31 - 1))

    def since(self, start: float, keys: Iterable[str]) -> tuple[list[float], dict[str, tuple[list[Any], list[Any]]]]:
        """The times since then, the oldest first, and percent and MiB of these GPUs at each."""
        times = [time for time in self._times if time >= start]
        places = [(self._step - age) % _STEPS for age in reversed(range(len(times)))]

        def values(ring: array[int]) -> list[Any]:
            return [None if ring[place] == _UNKNOWN else ring[place] for place in places]

        found = {key: (values(one.percent), values(one.mib)) for key in keys if (one := self._gpus.get(key))}
        return times, found
