"""Which records are of one run of a job, and which of its runs Slurm's accounting speaks of.

Slurm runs a requeued job again under its number: accounting has a row for each run, and each node of a run has a record
of it. Nodes are told which run it is by a count, and since Slurm 23.02 by its start; without these, as of records of
earlier versions, times alone tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prolog_epilog.record import JobRecord

Found = TypeVar("Found")
_NEAR_S = 120.0  # a node begins a job's record so long after Slurm's start at most
_EARLY_S = 5.0  # clocks of nodes and controllers differ
_CLOCK_S = 60.0  # more than that between two measures of a time, and the clock was set meanwhile


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
    """When a run began: by Slurm's own word, else by its nodes' clocks, which may have been set while it ran."""

    times: tuple[float, ...] = ()
    again: bool = False  # the job had run before

    @classmethod
    def of(cls, run: Sequence[JobRecord]) -> Began:
        """Of a run's records."""
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
    runs: Iterable[tuple[Began, Found]], start: float, end: float | None, *, early: float = _EARLY_S,
    late: float = _NEAR_S,
) -> Found | None:  # fmt: skip
    """What belongs to the run that accounting has from `start` to `end` (None: it runs); None where nothing does.

    `early`, `late`: by how much its records may begin before Slurm's start, and after it.
    """
    fitting = [(off, found) for began, found in runs if (off := began.off(start, end, early, late)) is not None]
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def start_of(record: JobRecord) -> float:
    """When a job's time on its node began, in seconds since 1970.

    By Slurm's own word; else so long before the record's end as the clock says that nobody sets: where the node's other
    clock was set meanwhile, its last word counts, as it was set for being wrong.
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
    # Of an agent that noted no length, what it measured tells of a clock that was set back.
    gpus = record.usage.get("gpus") if isinstance(record.usage, dict) else None
    uses = gpus.values() if isinstance(gpus, dict) else ()
    measured = max((float(one.get("seconds", 0)) for one in uses), default=0.0)
    return begin, begin + measured if measured > record.ended - begin + _CLOCK_S else record.ended
