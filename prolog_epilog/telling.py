"""Tells the controllers' daemon how this node's GPUs are, for its alerts; only while a rule of the policy asks for it.

Fed by the samples that the agent takes anyway. Nothing is kept: what a controller does not get is not told later.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.node import NodePolicyFile
from prolog_epilog.accounting import Tick
from prolog_epilog.courier import VERSION, ask, controllers, port
from prolog_epilog.readings import Reading, readings_of
from prolog_epilog.state import State
from prolog_epilog.watching import Watch, Watcher

PERIOD_S = 5.0
_FRESH_S = 60.0
_DAMAGED = (TypeError, ValueError, KeyError, AttributeError)

Send = Callable[[dict[str, Any]], object]


def send(request: dict[str, Any]) -> object:
    """To the controllers. Raises SluiceError."""
    return ask(controllers(), port(), json.dumps(request).encode())


@dataclass
class _Work:
    """One job on one GPU since the last telling."""

    seconds: float = 0.0
    busy_s: float = 0.0
    unknown: bool = False


class Telling:
    """The latest readings, and what jobs did since the last telling."""

    def __init__(self, state: State, watcher: Watcher, policy: Path, give: Send = send) -> None:
        self._state = state
        self._watcher = watcher
        self._policy = NodePolicyFile(policy)
        self._give = give
        self._lock = threading.Lock()
        self._readings: dict[str, tuple[float, Reading]] = {}
        self._errors: dict[str, tuple[int, int]] = {}  # uuid -> the counters' last sum, and XID events since the start
        self._work: dict[tuple[str, int], _Work] = {}
        self._next = 0.0

    def on_sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """A reader of samples (`Watcher.on_sample`): keeps what the driver told of whole GPUs."""
        if not isinstance(answer.get("full"), dict):
            return
        try:
            readings = readings_of(answer)
        except _DAMAGED:
            readings = _sound(answer["full"])
        with self._lock:
            for uuid, reading in readings.items():
                self._readings[uuid] = time.monotonic(), reading
                _, xids = self._errors.get(uuid, (0, 0))
                self._errors[uuid] = _uncorrected(reading), xids + len(reading.xids)

    def on_tick(self, tick: Tick) -> None:
        """A reader of the accounting's ticks."""
        with self._lock:
            for job, interval in tick.intervals.items():
                work = self._work.setdefault((tick.uuid, job), _Work())
                work.seconds += interval.seconds
                if interval.utilisation is None:
                    work.unknown = True
                else:
                    work.busy_s += interval.utilisation * interval.seconds

    def run(self) -> None:
        """A duty of the agent. Raises SluiceError when no controller takes it."""
        settings = self._policy.current().alerts
        if not settings.readings:
            self._work.clear()
            return
        now = time.monotonic()
        if now < self._next:
            return
        for watch in self._watcher.watches.values():
            watch.full = True
            watch.wanted.set()
        self._next = now + settings.interval
        gpus = self.document(now)
        if gpus:
            self._give({"version": VERSION, "do": "readings", "node": self._state.node, "gpus": gpus})

    def document(self, now: float) -> list[dict[str, Any]]:
        """What is told, and forgotten of jobs."""
        with self._lock:
            work, self._work = self._work, {}
            jobs: dict[str, dict[str, float | None]] = {}
            for (uuid, job), one in work.items():
                known = one.seconds > 0 and not one.unknown
                jobs.setdefault(uuid, {})[str(job)] = round(100 * one.busy_s / one.seconds, 2) if known else None
            readings = {uuid: one for uuid, (at, one) in self._readings.items() if now - at < _FRESH_S}
            errors = {uuid: sum(counts) for uuid, counts in self._errors.items()}
        found = []
        for device in self._state.devices:
            reading = readings.get(device.uuid)
            if reading is None and device.uuid not in jobs:
                continue
            found.append(
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "temperature_c": reading.temperature_c if reading else None,
                    "utilisation_percent": reading.utilisation_percent if reading else None,
                    "memory_percent": _memory(reading) if reading else None,
                    "errors": errors.get(device.uuid),
                    "jobs": jobs.get(device.uuid, {}),
                }
            )
        return found


def _sound(full: dict[str, Any]) -> dict[str, Reading]:
    """The readings that make sense; of the others the accounting says so."""
    found = {}
    for uuid, fields in full.items():
        with suppress(*_DAMAGED):
            found[uuid] = Reading.from_dict(fields)
    return found


def _uncorrected(reading: Reading) -> int:
    return sum(count for count in (reading.ecc_uncorrected, reading.ras_uncorrected) if count)


def _memory(reading: Reading) -> float | None:
    if not reading.memory_total_bytes or reading.memory_used_bytes is None:
        return None
    return round(100 * reading.memory_used_bytes / reading.memory_total_bytes, 2)
