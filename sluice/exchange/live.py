"""What nodes last reported of their GPUs: the controller's side of `prolog_epilog.live_reports`, in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError

LIVE_FILE = "sluice.live.json"
"""Below StateSaveLocation, readable by SlurmUser only: the latest readings for `sluice top`."""
FRESH_S = 90.0
"""Older readings are dropped, unless their node reports less often."""
_PERIODS = 2.5
_SELDOM_S = 3600.0
_MOST_NODES = 20_000
_MOST_GPUS = 256
_MOST_BYTES = 64 << 20
_FUTURE_S = 60.0  # by which clocks of controllers may differ


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. None: not known."""

    node: str
    index: int
    uuid: str
    temperature_c: float | None = None
    utilisation_percent: float | None = None
    memory_percent: float | None = None
    errors: int | None = None  # uncorrected errors and XID events since the agent started
    jobs: Mapping[int, float | None] = field(default_factory=dict)  # job -> percent since the reading before
    memory_used: int | None = None  # bytes
    memory_total: int | None = None
    job_memory: Mapping[int, int] = field(default_factory=dict)  # job -> bytes

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.node} GPU {self.index}"


class Readings:
    """The latest of each node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, tuple[float, list[GpuReading]]] = {}  # until when it is fresh

    def take(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A handler of the inbox. Raises SluiceError for what is not a node's report."""
        node, gpus = request.get("node"), request.get("gpus")
        if not isinstance(node, str) or not 0 < len(node) <= 64 or not isinstance(gpus, list) or len(gpus) > _MOST_GPUS:
            raise SluiceError("readings: not a node's")
        found = [_reading(node, one) for one in gpus]
        now = time.monotonic()
        fresh_s = max(FRESH_S, _PERIODS * min(_number(request.get("period")) or 0.0, _SELDOM_S))
        with self._lock:
            self._nodes[node] = now + fresh_s, found
            if len(self._nodes) > _MOST_NODES:
                self._nodes = {name: one for name, one in self._nodes.items() if now < one[0]}
        return {}

    def fresh(self) -> list[GpuReading]:
        """The GPUs of the nodes that reported them recently."""
        now = time.monotonic()
        with self._lock:
            return [gpu for until, gpus in self._nodes.values() if now < until for gpu in gpus]


def _reading(node: str, one: object) -> GpuReading:
    if not isinstance(one, dict) or not isinstance(one.get("index"), int):
        raise SluiceError("readings: a GPU without a number")
    errors = _number(one.get("errors"))
    return GpuReading(
        node,
        one["index"],
        str(one.get("uuid", ""))[:80],
        _number(one.get("temperature_c")),
        _number(one.get("utilisation_percent")),
        _number(one.get("memory_percent")),
        None if errors is None else int(errors),
        _by_job(one.get("jobs")),
        _bytes(one.get("memory_used_bytes")),
        _bytes(one.get("memory_total_bytes")),
        {job: int(size) for job, size in _by_job(one.get("job_memory")).items() if size is not None and size >= 0},
    )


def _by_job(values: object) -> dict[int, float | None]:
    return {
        int(job): _number(value)
        for job, value in (values.items() if isinstance(values, dict) else ())
        if str(job).isascii() and str(job).isdecimal() and len(str(job)) <= 10
    }


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e6 < value < 1e15 else None


def _bytes(value: object) -> int | None:
    number = _number(value)
    return None if number is None or number < 0 else int(number)


@dataclass(frozen=True, slots=True)
class GpuNow:
    """A GPU now. None: not known."""

    percent: float | None = None
    used_mib: int | None = None
    total_mib: int | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class JobNow:
    """A job on one of its GPUs now."""

    node: str
    index: int
    percent: float | None = None  # of the GPU's time that is the job's
    used_mib: int | None = None


@dataclass
class Live:
    """What nodes reported recently."""

    gpus: dict[str, dict[int, GpuNow]] = field(default_factory=dict)  # node -> number -> GPU
    jobs: dict[int, list[JobNow]] = field(default_factory=dict)


def latest(gpus: Iterable[GpuReading]) -> Live:
    """The same of readings in memory."""
    found = Live()
    for gpu in gpus:
        now = GpuNow(gpu.utilisation_percent, _mib(gpu.memory_used), _mib(gpu.memory_total), gpu.temperature_c)
        found.gpus.setdefault(gpu.node, {})[gpu.index] = now
        for job, percent in gpu.jobs.items():
            found.jobs.setdefault(job, []).append(JobNow(gpu.node, gpu.index, percent, _mib(gpu.job_memory.get(job))))
    return found


def live(gpus: Iterable[GpuReading], now: float) -> dict[str, Any]:
    """The document of `LIVE_FILE`."""
    nodes: dict[str, dict[str, list[Any]]] = {}
    jobs: dict[str, list[list[Any]]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, {})[str(gpu.index)] = [
            gpu.utilisation_percent,
            _mib(gpu.memory_used),
            _mib(gpu.memory_total),
            gpu.temperature_c,
        ]
        for job, percent in gpu.jobs.items():
            jobs.setdefault(str(job), []).append([gpu.node, gpu.index, percent, _mib(gpu.job_memory.get(job))])
    return {"version": 2, "at": round(now), "nodes": nodes, "jobs": jobs}


def _mib(size: int | None) -> int | None:
    return None if size is None else size >> 20


def read_live(path: Path, now: float) -> Live:
    """The content of the file; empty where no node reports, or the caller may not read it."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
        if document["version"] != 2 or not -_FUTURE_S < now - document["at"] < FRESH_S:
            return Live()
        gpus = {
            str(name): {
                int(index): GpuNow(_number(one[0]), _bytes(one[1]), _bytes(one[2]), _number(one[3]))
                for index, one in found.items()
            }
            for name, found in document["nodes"].items()
        }
        jobs = {
            int(job): [JobNow(str(one[0]), int(one[1]), _number(one[2]), _bytes(one[3])) for one in found]
            for job, found in document["jobs"].items()
        }
        return Live(gpus, jobs)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return Live()
