"""What the watchdog does about a sample: a decision, without any act of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prolog_epilog.cgroups import Place, uid_of
from prolog_epilog.record import JobRecord
from prolog_epilog.sampling import Usage

WARN_PERMILLE = 900
OUTSIDE = "outside"
"""The step of what a job's user runs outside of every job, e.g. by ssh: it counts to the job."""


@dataclass(frozen=True, slots=True)
class Act:
    """Warn a job about a device, or end a step of it."""

    action: str  # "warn" or "end"
    job: int
    step: str
    uuid: str
    charged: int
    limit: int
    pids: tuple[int, ...]  # of the step, on this device; those that have most first


@dataclass
class _Held:
    total: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    pids: dict[int, tuple[str, int]] = field(default_factory=dict)


def judge(
    usage: Usage,
    records: dict[int, JobRecord],
    place_of: Callable[[int], Place | None],
    uid_of: Callable[[int], int | None] = uid_of,
) -> Iterable[Act]:
    """Note each job's peak on each device in its record, and say what is to be done.

    `place_of` and `uid_of` are those of `cgroups`. Over its limit, the step that has most is ended; if others are over
    it without that one, they are next time.
    """
    held: dict[tuple[int, str], _Held] = {}
    for uuid, pid, size in usage:
        place = place_of(pid) or _outside(uid_of(pid), uuid, records)
        if place is None or place.job not in records:
            continue
        one = held.setdefault((place.job, uuid), _Held())
        one.total += size
        one.steps[place.step] = one.steps.get(place.step, 0) + size
        one.pids[pid] = (place.step, size)
    for (job, uuid), one in held.items():
        grant = records[job].grant_of(uuid)
        limit = 0 if grant is None else grant.limit  # what was not granted may not be used
        if grant is not None:
            grant.peak = max(grant.peak, one.total)
        if limit is None:
            continue
        step = max(one.steps, key=lambda name: one.steps[name])
        pids = sorted((pid for pid, (of, _) in one.pids.items() if of == step), key=lambda pid: -one.pids[pid][1])
        if one.total > limit:
            yield Act("end", job, step, uuid, one.total, limit, tuple(pids))
        elif grant is not None and not grant.warned and one.total * 1000 >= limit * WARN_PERMILLE:
            yield Act("warn", job, step, uuid, one.total, limit, tuple(pids))


def _outside(uid: int | None, uuid: str, records: dict[int, JobRecord]) -> Place | None:
    """The job to which a process outside of all jobs counts: one of its user's, best with that device; not root's."""
    jobs = [record for record in records.values() if uid and record.uid == uid]
    found = next((one for one in jobs if one.grant_of(uuid) is not None), jobs[0] if jobs else None)
    return None if found is None else Place(found.job, OUTSIDE)
