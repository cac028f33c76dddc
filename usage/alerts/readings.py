"""What nodes last told of their GPUs: the controller's side of `prolog_epilog.telling`, in memory."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_base.errors import SluiceError
from usage.controllerd import Site

LIVE_FILE = "sluice.live.json"
"""Below StateSaveLocation, SlurmUser's alone: the latest readings for `sluice top`."""
FRESH_S = 90.0
"""What is older is not known any more."""
_MOST_NODES = 20_000
_MOST_GPUS = 256
_MOST_BYTES = 64 << 20
_FUTURE_S = 60.0  # by which clocks of controllers may differ


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. None: not told."""

    node: str
    index: int
    uuid: str
    temperature_c: float | None = None
    utilisation_percent: float | None = None
    memory_percent: float | None = None
    errors: int | None = None  # uncorrected errors and XID events since the agent started
    jobs: Mapping[int, float | None] = field(default_factory=dict)  # job -> percent since the reading before

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"{self.node} GPU {self.index}"


class Readings:
    """The latest of each node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, tuple[float, list[GpuReading]]] = {}

    def take(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A handler of the inbox. Raises SluiceError for what is not a node's telling."""
        node, gpus = request.get("node"), request.get("gpus")
        if not isinstance(node, str) or not 0 < len(node) <= 64 or not isinstance(gpus, list) or len(gpus) > _MOST_GPUS:
            raise SluiceError("readings: not a node's")
        found = [_reading(node, one) for one in gpus]
        now = time.monotonic()
        with self._lock:
            self._nodes[node] = now, found
            if len(self._nodes) > _MOST_NODES:
                self._nodes = {name: one for name, one in self._nodes.items() if now - one[0] < FRESH_S}
        return {}

    def fresh(self) -> list[GpuReading]:
        """The GPUs of the nodes that told of them lately."""
        now = time.monotonic()
        with self._lock:
            return [gpu for at, gpus in self._nodes.values() if now - at < FRESH_S for gpu in gpus]


def _reading(node: str, one: object) -> GpuReading:
    if not isinstance(one, dict) or not isinstance(one.get("index"), int):
        raise SluiceError("readings: a GPU without a number")
    jobs = one.get("jobs")
    shown = {
        int(job): _number(percent)
        for job, percent in (jobs.items() if isinstance(jobs, dict) else ())
        if str(job).isascii() and str(job).isdecimal() and len(str(job)) <= 10
    }
    errors = _number(one.get("errors"))
    return GpuReading(
        node, one["index"], str(one.get("uuid", ""))[:80], _number(one.get("temperature_c")),
        _number(one.get("utilisation_percent")), _number(one.get("memory_percent")),
        None if errors is None else int(errors), shown,
    )  # fmt: skip


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e6 < value < 1e15 else None


def live(gpus: Iterable[GpuReading], now: float) -> dict[str, Any]:
    """The document of `LIVE_FILE`: percent of each node's GPUs by number, and of each job over its GPUs."""
    nodes: dict[str, dict[str, float]] = {}
    jobs: dict[str, list[float]] = {}
    for gpu in gpus:
        if gpu.utilisation_percent is not None:
            nodes.setdefault(gpu.node, {})[str(gpu.index)] = gpu.utilisation_percent
        for job, percent in gpu.jobs.items():
            if percent is not None:
                jobs.setdefault(str(job), []).append(percent)
    means = {job: round(sum(percents) / len(percents), 1) for job, percents in jobs.items()}
    return {"version": 1, "at": round(now), "nodes": nodes, "jobs": means}


def read_live(path: Path, now: float) -> tuple[dict[str, float], dict[int, float]]:
    """Percent of nodes (mean over their GPUs) and of jobs; empty where nobody tells, or the caller may not know."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MOST_BYTES))
        if told["version"] != 1 or not -_FUTURE_S < now - told["at"] < FRESH_S:
            return {}, {}
        nodes = {str(name): sum(gpus.values()) / len(gpus) for name, gpus in told["nodes"].items() if gpus}
        return nodes, {int(job): float(percent) for job, percent in told["jobs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, {}


_of_site: weakref.WeakKeyDictionary[Site, Readings] = weakref.WeakKeyDictionary()


def readings_of(site: Site) -> Readings:
    """Those of this daemon."""
    found = _of_site.get(site)
    if found is None:
        found = _of_site[site] = Readings()
    return found
