"""Counts the jobs of a span of time into tallies: the one place where figures of reports are made."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.report.fleet import Fleet, hosts
from sluice.report.summaries import JobUse
from sluice.report.tally import SUMS, Key, Tally
from sluice.slurm.allocations import Allocation, tres_of
from sluice.slurm.answers import UNLIMITED

_COUNTED = {"COMPLETED": "completed", "CANCELLED": "cancelled", "TIMEOUT": "timeout", "DEADLINE": "timeout"}
_NOT_FAILED = frozenset({"COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "REQUEUED", "RESIZING"})


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` up to `end`, not included; seconds since 1970."""

    start: int
    end: int


def gpu_type(job: Allocation, fleet: Fleet) -> str:
    """The GRES type of the job's GPUs; of shards and untyped GPUs that of its node."""
    tres = tres_of(job.allocated or job.requested)
    types = sorted(name.removeprefix("gres/gpu:") for name in tres if name.startswith("gres/gpu:"))
    if types:
        return "+".join(types)
    if not tres.get("gres/gpu") and not tres.get("gres/shard"):
        return ""
    node = fleet.of_job(job.nodes)
    return node.gpu_type if node else ""


class Counter:
    """Adds jobs to cells. `by_node`: for each of their nodes; `nodes_alone`: by that and nothing else."""

    def __init__(self, fleet: Fleet, *, by_node: bool = False, nodes_alone: bool = False) -> None:
        self.fleet = fleet
        self.by_node = by_node or nodes_alone
        self.nodes_alone = nodes_alone
        self.cells: dict[Key, Tally] = {}

    def add(self, job: Allocation, span: Span, use: JobUse | None, *, first: bool = True) -> None:
        """What the job used within the span. A running job is taken to run to the span's end.

        `first`: the span is the first of a report's; in later ones a job that runs on is not counted once more.
        """
        made = tally(job, span, use, self.fleet)
        if made is None:
            return
        if not first:
            made.ran = made.started
        kind = gpu_type(job, self.fleet)
        nodes = hosts(job.nodes) if self.by_node else ("",)
        for node in nodes or ("",):
            key = Key(job.account, job.user, job.partition, job.qos, job.state, kind, node)
            if self.nodes_alone:
                key = Key("", "", "", "", "", "", node)
            into = self.cells.get(key)
            if into is None:
                into = self.cells[key] = Tally()
            into.add(made if len(nodes) <= 1 else _share(made, len(nodes)))


def tally(job: Allocation, span: Span, use: JobUse | None, fleet: Fleet) -> Tally | None:
    """One job in one span; None where it neither ran, waited nor ended in it."""
    found = Tally()
    if job.state == "PENDING":
        found.pending = 1
        return found
    begin, finish = job.start, job.end
    if begin is None:
        if finish is None or not span.start <= finish < span.end:
            return None
        _ended(found, job)  # cancelled while it waited
        return found
    end = span.end if finish is None else finish
    seconds = min(end, span.end) - max(begin, span.start)
    if seconds < 0 or (seconds == 0 and not span.start <= begin < span.end):
        if finish is None or not span.start <= finish < span.end:
            return None
        _ended(found, job)  # in the span's first second: its time is of the span before
        return found
    whole = end - begin
    # Suspended time does not count; where such a job goes beyond the span it is spread evenly.
    run = seconds if finish is None or job.elapsed_s >= whole or not whole else seconds * job.elapsed_s / whole
    tres = tres_of(job.allocated)
    found.ran = 1
    found.wall_s = run
    found.cpu_s = run * tres.get("cpu", 0)
    found.memory_mib_s = run * tres.get("mem", 0)
    found.gpu_s = run * tres.get("gres/gpu", 0)
    part = seconds / whole if whole else 1.0
    found.energy_j = tres.get("energy", 0) * part
    shards = tres.get("gres/shard", 0)
    if shards:
        found.shard_mib_s = run * shards
        node = fleet.of_job(job.nodes)
        if node is not None and node.mib_per_gpu:
            found.shared_gpu_s = run * shards / node.mib_per_gpu
    if span.start <= begin < span.end:
        found.started = 1
        wait = job.wait_s
        if wait is not None:
            found.waits.add(wait)
    if finish is not None and span.start <= finish < span.end:
        _ended(found, job)
    if use is not None:
        _used(found, use, run, part, shards, tres.get("gres/gpu", 0))
    return found


def _ended(found: Tally, job: Allocation) -> None:
    found.ended = 1
    if job.start is not None and job.limit_s is not None and job.limit_s != UNLIMITED:
        found.limit_s, found.limited_s = job.limit_s, job.elapsed_s
    name = _COUNTED.get(job.state)
    if name is not None:
        setattr(found, name, 1)
    elif job.state not in _NOT_FAILED:
        found.failed = 1


def _used(found: Tally, use: JobUse, run: float, part: float, shards: int, gpus: int) -> None:
    """The job's measured use, in proportion to its time in the span."""
    found.refused = use.refused if found.ended else 0
    found.gpu_energy_j = (use.energy_j or 0) * part
    found.throttled_s = (use.throttled_s or 0) * part
    found.idle_s = (use.idle_s or 0) * part
    if use.busy_s is not None and use.device_s > 0:
        found.measured_jobs = 1
        held = run * (gpus or (max(1, round(shards / use.asked_mib)) if shards and use.asked_mib else 1))
        measured = min(1.0, use.device_s * part / held) if held else 1.0
        found.measured_gpu_s = (found.gpu_s + found.shared_gpu_s) * measured
        found.device_s = use.device_s * part
        found.busy_s = use.busy_s * part
    if use.asked_mib and use.peak_mib is not None:
        count = gpus or (max(1, round(shards / use.asked_mib)) if shards else 0)
        found.asked_mib_s = run * count * use.asked_mib
        found.peak_mib_s = run * count * min(use.peak_mib, use.asked_mib)


def _share(whole: Tally, nodes: int) -> Tally:
    """An even part of a job for each of its nodes; as a job it counts on each."""
    part = Tally()
    for name in SUMS:
        value = getattr(whole, name)
        setattr(part, name, value / nodes if name.endswith(("_s", "_j")) and name != "limit_s" else value)
    part.waits = whole.waits
    return part
