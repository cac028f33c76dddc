"""What a job used of its GPUs: from the nodes' records, or from the summary of them in the job's AdminComment.

The only reader of both. What is missing is None or left out: a job that was not measured has no utilisation, not 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.exchange.admin_comment import parse
from sluice.exchange.job_runs import Began, nearest, runs_of
from sluice.exchange.record import JobRecord
from sluice.exchange.running import now_of
from sluice.report.slowest import Slowest, slowest

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU of a job on one node. Memory in MiB, utilisation in percent, time in seconds."""

    node: str
    index: int
    uuid: str
    model: str
    total_mib: int
    asked_mib: int | None  # None: the whole GPU
    limit_mib: int | None
    rung: str
    peak_mib: int
    refused: int
    seconds: float | None = None  # measured
    utilisation: Mapping[str, float] = field(default_factory=dict)  # mean, p50, p95, peak
    memory_mean_mib: float | None = None
    energy_j: float | None = None
    idle_s: float | None = None
    throttled_s: float | None = None
    errors: int | None = None
    now_percent: float | None = None  # of a running job, since its node's previous report
    now_mib: int | None = None
    now_watts: float | None = None
    now_throttled_percent: float | None = None


@dataclass(frozen=True, slots=True)
class JobUse:
    """A job on all its nodes. None: not known."""

    device_s: float = 0  # measured, summed over its GPUs
    busy_s: float | None = None  # the same times utilisation (0 to 1)
    idle_s: float | None = None
    energy_j: float | None = None
    throttled_s: float | None = None
    asked_mib: int | None = None  # of each GPU
    peak_mib: int | None = None  # the largest of a GPU
    refused: int = 0
    rung: str = ""
    gpus: tuple[GpuUse, ...] = ()
    reported_at: float | None = None  # of a running job: when its node last reported it
    saved_at: float | None = None  # when all its nodes had said that the job has saved its state
    events: tuple[dict[str, Any], ...] = ()  # limits hit and the like, with "node", "time", "action"
    bindings: tuple[dict[str, Any], ...] = ()  # of tasks, with "node" and "tasks": prolog_epilog/binding.py
    nics: tuple[dict[str, Any], ...] = ()  # "node", "nic", "shared", "counts": prolog_epilog/nics.py
    slowest: Slowest | None = None  # of a running job: the GPU that others wait for


def of_records(records: Iterable[JobRecord]) -> JobUse:
    """One job from the records of its nodes."""
    gpus: list[GpuUse] = []
    events: list[dict[str, Any]] = []
    bindings: list[dict[str, Any]] = []
    nics: list[dict[str, Any]] = []
    sums: dict[str, float] = {}
    reported: list[float] = []
    saved: list[float | None] = []
    for record in records:
        saved.append(record.saved)
        usage = record.usage if isinstance(record.usage, dict) else {}
        for name in ("gs", "us", "is", "ej", "ts"):
            value = _number(usage.get(name))
            if value is not None:
                sums[name] = sums.get(name, 0) + value
        at = _number(usage.get("at"))
        reported += [] if at is None else [at]
        nics += _nics(record.node, usage.get("nics"))
        measured = usage.get("gpus")
        for grant in record.grants:
            found = measured.get(grant.uuid) if isinstance(measured, dict) else None
            gpus.append(_gpu(record.node, grant, found if isinstance(found, dict) else {}))
        for event in record.events:
            if event.action in ("refuse", "warn", "end", "stray"):
                events.append({"node": record.node, "time": event.time, "action": event.action, **event.detail})
            elif event.action == "binding":
                bindings.append({"node": record.node, "tasks": event.times, **event.detail})
    known = [at for at in saved if at is not None]
    saved_at = min(known) if known and len(known) == len(saved) else None
    return replace(
        _sum(gpus, events, sums),
        reported_at=min(reported, default=None),
        saved_at=saved_at,
        bindings=tuple(bindings),
        nics=tuple(nics),
        slowest=slowest(gpus),
    )


def _nics(node: str, said: object) -> list[dict[str, Any]]:
    """The interfaces of a job on a node, and what they counted for it."""
    return [
        {
            "node": node,
            "nic": str(nic),
            "shared": use.get("shared") is True,
            "counts": {
                str(name): int(count) for name, value in use.items() if name != "shared" and (count := _number(value))
            },
        }
        for nic, use in (said.items() if isinstance(said, Mapping) else ())
        if isinstance(use, Mapping)
    ]


def _gpu(node: str, grant: Any, measured: Mapping[str, Any]) -> GpuUse:
    memory = measured.get("memory")
    mean = _number(memory.get("mean")) if isinstance(memory, Mapping) else None
    peak = _number(memory.get("peak")) if isinstance(memory, Mapping) else None
    utilisation = measured.get("utilisation")
    shown = utilisation if isinstance(utilisation, Mapping) else {}
    errors = measured.get("errors")
    count = sum(v for v in errors.values() if isinstance(v, int)) if isinstance(errors, Mapping) else _number(errors)
    now_percent, now_mib = now_of(measured)
    now = measured.get("now")
    more = now if isinstance(now, Mapping) else {}
    return GpuUse(
        node=node,
        index=grant.index,
        uuid=grant.uuid,
        model=grant.model,
        total_mib=grant.total // _MIB,
        asked_mib=None if grant.asked is None else grant.asked // _MIB,
        limit_mib=None if grant.limit is None else grant.limit // _MIB,
        rung=grant.rung,
        peak_mib=int(max(grant.peak, peak or 0)) // _MIB,
        refused=grant.refused,
        seconds=_number(measured.get("seconds")),
        utilisation={
            name: value for name in ("mean", "p50", "p95", "peak") if (value := _number(shown.get(name))) is not None
        },
        memory_mean_mib=None if mean is None else mean / _MIB,
        energy_j=_number(measured.get("energy_j")),
        idle_s=_number(measured.get("idle_s")),
        throttled_s=_number(measured.get("throttled_s")),
        errors=None if count is None else int(count),
        now_percent=now_percent,
        now_mib=now_mib,
        now_watts=_number(more.get("watts")),
        now_throttled_percent=_number(more.get("throttled")),
    )


def _sum(gpus: list[GpuUse], events: list[dict[str, Any]], sums: Mapping[str, float]) -> JobUse:
    """`sums`: what the nodes added up themselves, which goes before our own sums of single GPUs."""
    timed = [gpu for gpu in gpus if gpu.seconds and "mean" in gpu.utilisation]
    busy = sum((gpu.seconds or 0) * gpu.utilisation["mean"] / 100 for gpu in timed) if timed else None
    asked = [gpu.asked_mib if gpu.asked_mib is not None else gpu.total_mib for gpu in gpus]
    return JobUse(
        device_s=sums.get("gs", sum(gpu.seconds or 0 for gpu in timed)),
        busy_s=sums.get("us", busy),
        idle_s=sums.get("is", _total(gpu.idle_s for gpu in gpus)),
        energy_j=sums.get("ej", _total(gpu.energy_j for gpu in gpus)),
        throttled_s=sums.get("ts", _total(gpu.throttled_s for gpu in gpus)),
        asked_mib=max(asked, default=None),
        peak_mib=max((gpu.peak_mib for gpu in gpus), default=None),
        refused=sum(gpu.refused for gpu in gpus),
        rung=gpus[0].rung if gpus else "",
        gpus=tuple(gpus),
        events=tuple(events),
    )


def of_comment(text: str) -> JobUse | None:
    """The summary in a job's AdminComment, which its user can read as well; None where there is none."""
    said = parse(text) if "sluice:" in text else None
    if said is None or said.get("v") != "1":
        return None

    def number(name: str) -> float | None:
        word = said.get(name, "")
        return float(word) if re.fullmatch(r"\d{1,18}(\.\d{1,9})?", word) else None

    asked, peak = number("asked"), number("peak")
    return JobUse(
        device_s=number("gs") or 0,
        busy_s=number("us"),
        idle_s=number("is"),
        energy_j=number("ej"),
        throttled_s=number("ts"),
        asked_mib=None if asked is None else int(asked),
        peak_mib=None if peak is None else int(peak),
        refused=int(number("refused") or 0),
        rung=said.get("rung", "")[:40],
    )


class Uses:
    """The uses of the jobs of a span, by job; a job that ran several times has several."""

    def __init__(self, records: Iterable[JobRecord] = ()) -> None:
        by_job: dict[int, list[JobRecord]] = {}
        for record in records:
            by_job.setdefault(record.job, []).append(record)
        self._uses = {
            job: [(Began.of(run), of_records(run)) for run in runs_of(found)] for job, found in by_job.items()
        }

    def find(self, job: int, start: int | None, end: int | None = None, comment: str = "") -> JobUse | None:
        """The use of the job's run from `start` to `end` (None: it runs)."""
        found = None if start is None else nearest(self._uses.get(job, ()), start, end)
        return found or (of_comment(comment) if comment else None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e18 else None


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
