"""Which records belong to one run of a job, and which of its runs is the one in Slurm's accounting.

Slurm runs a requeued job again under its number: accounting has a row for each run, and each node of a run has a record
of it. Nodes get the run as a count, and since Slurm 23.02 by its start; without these, as in records of
earlier versions, only times identify it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sluice.exchange.record import JobRecord

Found = TypeVar("Found")
_NEAR_S = 120.0  # a node begins a job's record at most this long after Slurm's start
_EARLY_S = 5.0  # clocks of nodes and controllers differ
_CLOCK_S = 60.0  # more than that between two measures of a time, and the clock was set in between


def runs_of(records: Iterable[JobRecord]) -> list[list[JobRecord]]:
    """The records of one job, run by run."""
    runs: list[list[JobRecord]] = []
    nodes: list[set[str]] = []
    for record in sorted(records, key=lambda one: one.started):
        for run, names in zip(runs, nodes, strict=True):
            if record.node not in names and _together(run[0], record):
                run.append(record)
                names.add(record.node)
                break
        else:
            runs.append([record])
            nodes.append({record.node})
    return runs


def _together(one: JobRecord, other: JobRecord) -> bool:
    """Whether records of two nodes are of one run."""
    if None not in (one.restarts, other.restarts) and one.restarts != other.restarts:
        return False
    if one.begun is not None and other.begun is not None:
        return one.begun == other.begun
    return abs(one.started - other.started) <= _NEAR_S


@dataclass(frozen=True, slots=True)
class Began:
    """When a run began: from Slurm, else by its nodes' clocks, which may have been set while it ran."""

    times: tuple[float, ...] = ()
    again: bool = False  # the job had run before

    @classmethod
    def of(cls, run: Sequence[JobRecord]) -> Began:
        """The span of a run's records."""
        again = any(record.restarts for record in run)
        if any(record.begun is not None for record in run):
            return cls((min(record.begun for record in run if record.begun is not None),), again)
        return cls((min(record.started for record in run), min(map(start_of, run))), again)

    def off(self, start: float, end: float | None, early: float, late: float) -> float | None:
        """By how many seconds it differs from a run that accounting has from `start` to `end`; None: it is another."""
        fitting = [at for at in self.times if -early <= at - start <= late]
        if self.again and end is not None:  # else a run without records would get those of the next one
            fitting = [at for at in fitting if at <= end + _EARLY_S]
        return min((abs(at - start) for at in fitting), default=None)


def nearest(
    runs: Iterable[tuple[Began, Found]],
    start: float,
    end: float | None,
    *,
    early: float = _EARLY_S,
    late: float = _NEAR_S,
) -> Found | None:
    """What belongs to the run that accounting has from `start` to `end` (None: it runs); None where nothing does.

    `early`, `late`: how long before and after Slurm's start its records may begin.
    """
    fitting = [(off, found) for began, found in runs if (off := began.off(start, end, early, late)) is not None]
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def start_of(record: JobRecord) -> float:
    """When a job's time on its node began, in seconds since 1970.

    From Slurm; else the record's end less the length by the monotonic clock: where the node's other
    clock was set in between, its last value counts, as it was set because it was wrong.
    """
    if record.begun is not None:
        return record.begun
    usage = record.usage if isinstance(record.usage, dict) else {}
    until = usage.get("at") if record.ended is None else record.ended
    if record.ran_s is None or not isinstance(until, int | float):
        return record.started
    return until - record.ran_s


def from_to(record: JobRecord, now: float) -> tuple[float, float]:
    """From when to when a job's time on its node counts, in seconds since 1970; one that runs, until `now`."""
    begin = start_of(record)
    if record.ended is None:
        return begin, now
    if record.ran_s is not None:
        return begin, begin + record.ran_s
    # With a record without a length, what was measured shows whether the clock was set back.
    gpus = record.usage.get("gpus") if isinstance(record.usage, dict) else None
    uses = gpus.values() if isinstance(gpus, dict) else ()
    measured = max((float(one.get("seconds", 0)) for one in uses), default=0.0)
    return begin, begin + measured if measured > record.ended - begin + _CLOCK_S else record.ended
