"""Reports this node's GPUs, and what its running jobs have used until now, to the controllers' daemon.

GPUs: as often as a rule of the policy asks for it; else, like the jobs, every `monitoring.running` while there
are jobs. Fed by the samples that the agent takes anyway. Nothing is kept: what a controller does not get is not sent
later.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policy.node import NodePolicyFile
from prolog_epilog.accounting import Tick
from prolog_epilog.state import State
from prolog_epilog.watching import Watch, Watcher
from sluice.base.clock import uptime
from sluice.base.duties import NotYet
from sluice.exchange.courier import MAX_REQUEST, VERSION, AnswerError
from sluice.exchange.readings import Reading, readings_of
from sluice.exchange.record import JobRecord

PERIOD_S = 5.0
_ANSWER_S = 1.0  # for the drivers
_FRESH_S = 60.0
_MOST_JOBS = 1024
_SHOWN_EVENTS = ("refuse", "warn", "end", "stray")
_DAMAGED = (TypeError, ValueError, KeyError, AttributeError)

Send = Callable[[dict[str, Any]], object]
"""Sends a request to the controllers. Raises SluiceError."""


@dataclass
class _Work:
    """One job on one GPU since the last report."""

    seconds: float = 0.0
    busy_s: float = 0.0
    unknown: bool = False
    energy_mj: float | None = 0.0  # None: not known of some of the time
    throttled_s: float = 0.0
    memory: int = 0  # bytes, at the last sample

    @property
    def percent(self) -> float | None:
        """Utilisation of the GPU; None where it is not known."""
        return round(100 * self.busy_s / self.seconds, 2) if self.seconds > 0 and not self.unknown else None

    @property
    def watts(self) -> float | None:
        """The job's part of the GPU's power; None where it is not known."""
        if self.seconds <= 0 or self.energy_mj is None:
            return None
        return round(self.energy_mj / 1000 / self.seconds, 1)

    @property
    def throttled_percent(self) -> float | None:
        """The part of the time in which power, heat or the hardware slowed the GPU down."""
        return round(100 * self.throttled_s / self.seconds, 2) if self.seconds > 0 else None


Sums = Callable[[JobRecord], dict[str, Any]]
"""What a running job has used until now, as `JobRecord.usage`."""
Saved = Callable[[JobRecord], float | None]
"""When a running job last said that it has saved its state."""


class LiveReports:
    """The latest readings, and what jobs did since the last report."""

    def __init__(self, state: State, watcher: Watcher, policy: Path, sums: Sums, saved: Saved, give: Send) -> None:
        self._sums = sums
        self._saved = saved
        self._state = state
        self._watcher = watcher
        self._policy = NodePolicyFile(policy)
        self._give = give
        self._lock = threading.Lock()
        self._readings: dict[str, tuple[float, Reading]] = {}
        self._errors: dict[str, tuple[int, int]] = {}  # uuid -> the counters' last sum, and XID events since the start
        self._work: dict[tuple[str, int], _Work] = {}
        self._now: dict[tuple[str, int], _Work] = {}  # as last reported
        self._sent = self._sent_running = -math.inf
        self._asked = False

    def on_sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """A reader of samples (`Watcher.on_sample`): keeps what the driver reported of whole GPUs."""
        if not isinstance(answer.get("full"), dict):
            return
        try:
            readings = readings_of(answer)
        except _DAMAGED:
            readings = _valid(answer["full"])
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
                work.memory = interval.memory
                work.throttled_s += interval.seconds if interval.throttled else 0.0
                if interval.energy_mj is None or work.energy_mj is None:
                    work.energy_mj = None
                else:
                    work.energy_mj += interval.energy_mj
                if interval.utilisation is None:
                    work.unknown = True
                else:
                    work.busy_s += interval.utilisation * interval.seconds

    def run(self) -> float | None:
        """A duty of the agent: asks the drivers, and reports a second later.

        Seconds until it is to be called again, or None when it has reported. Raises SluiceError when no controller
        accepts it.
        """
        policy = self._policy.current()
        alerts, running = policy.alerts, policy.metrics.running
        with self._state.lock:
            jobs = list(self._state.records.values()) if running else []
        if not alerts.readings and not jobs:
            self._asked = False
            with self._lock:
                self._work.clear()
            return NotYet(PERIOD_S)
        now = time.monotonic()
        period = min(alerts.interval if alerts.readings else running, running or alerts.interval)
        due = jobs and now >= self._sent_running + running
        if not self._asked and not due and now < self._sent + period:
            return NotYet(PERIOD_S)
        if not self._asked:
            for watch in self._watcher.watches.values():
                watch.full = True
                watch.wanted.set()
            self._asked = True
            return NotYet(_ANSWER_S)
        self._asked, self._sent = False, now
        gpus = self.document(now)
        if gpus:
            head = {"version": VERSION, "node": self._state.node, "period": period}
            self._give({**head, "do": "readings", "gpus": gpus})
        if due:
            self._sent_running = now
            self._send_running(jobs[:_MOST_JOBS], running)
        return None

    def _send_running(self, jobs: list[JobRecord], period: float) -> None:
        """Send all jobs, in as many requests as needed. Raises SluiceError after the last, if one was not accepted."""
        refused = None
        for number, texts in enumerate(_batches(self._running(jobs), MAX_REQUEST // 2)):
            try:
                self._give(
                    {
                        "version": VERSION,
                        "do": "running",
                        "node": self._state.node,
                        "period": period,
                        "more": number > 0,
                        "records": [json.loads(text) for text in texts],
                    }
                )
            except AnswerError as error:
                refused = error
        if refused is not None:
            raise refused

    def _running(self, jobs: list[JobRecord]) -> Iterator[str]:
        """The records until now, with what each job does now on each GPU (`now`)."""
        for record in jobs:
            usage = self._sums(record)
            for uuid, use in usage["gpus"].items():
                work = self._now.get((uuid, record.job))
                if work is not None:
                    use["now"] = {
                        "utilisation": work.percent,
                        "memory": work.memory,
                        "watts": work.watts,
                        "throttled": work.throttled_percent,
                    }
            usage["at"], saved = round(time.time(), 1), self._saved(record)
            with self._state.lock:
                fields = asdict(record)
                events = [asdict(event) for event in record.latest(_SHOWN_EVENTS)]
            fields["ran_s"], fields["saved"] = record.ran(uptime()), saved
            yield json.dumps({**fields, "usage": usage, "events": events})

    def document(self, now: float) -> list[dict[str, Any]]:
        """The GPUs' part of a report; starts a new period for jobs."""
        with self._lock:
            self._now, self._work = self._work, {}
            jobs: dict[str, dict[str, float | None]] = {}
            memory: dict[str, dict[str, int]] = {}
            for (uuid, job), one in self._now.items():
                jobs.setdefault(uuid, {})[str(job)] = one.percent
                memory.setdefault(uuid, {})[str(job)] = one.memory
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
                    "memory_used_bytes": reading.memory_used_bytes if reading else None,
                    "memory_total_bytes": reading.memory_total_bytes if reading else None,
                    "errors": errors.get(device.uuid),
                    "jobs": jobs.get(device.uuid, {}),
                    "job_memory": memory.get(device.uuid, {}),
                }
            )
        return found


def _batches(texts: Iterator[str], most: int) -> Iterator[list[str]]:
    """Texts in lists of at most `most` characters, without any that is longer, so that it blocks no other."""
    batch: list[str] = []
    size = 0
    for text in (one for one in texts if len(one) <= most):
        if batch and size + len(text) > most:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _valid(full: dict[str, Any]) -> dict[str, Reading]:
    """The valid readings; the accounting logs the others."""
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
