"""GPUs over the last hours, services over the last day: kept by this server as the snapshot passes, and by nobody
else."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

STEP_S = 30.0
_STEPS = 240  # two hours
_UNKNOWN = -1
SERVICE_STEP_S = 120.0
_SERVICE_STEPS = 720  # a day
_OF_SERVICE = ("ready", "waiting", "in_flight", "tokens_per_minute")
_MOST_POINTS = 200_000  # of all services together


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


class ServiceSeries:
    """All services by name; of a service that is not there any more nothing is kept."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[Any, ...]]] = {}
        self._last = 0.0

    def note(self, now: float, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep how the services are now, unless that was done within the last step."""
        if 0 <= now - self._last < SERVICE_STEP_S:
            return
        self._last = now
        steps = max(1, min(_SERVICE_STEPS, _MOST_POINTS // max(1, len(rows))))
        self._kept = {name: self._kept.get(name) or deque(maxlen=steps) for name in rows}
        for name, row in rows.items():
            self._kept[name].append((now, *(row[key] for key in _OF_SERVICE)))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The moments of a service, the oldest first."""
        return [dict(zip(("time", *_OF_SERVICE), one, strict=True)) for one in self._kept.get(name, ())]
