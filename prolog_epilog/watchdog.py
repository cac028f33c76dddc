"""What the watchdog finds in a sample: a decision, without any act of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prolog_epilog.owners import MEASURES_AS, Owner
from prolog_epilog.sampling import Usage
from sluice.exchange.record import JobRecord

WARN_PERMILLE = 900
OUTSIDE = "outside"
"""The step of what a job's user runs outside of every job, e.g. by ssh: it counts to the job."""
FIRST_USER = 1000
"""Below are root and the system's services."""


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
    user: str = ""  # of a process of no registered job: a name or number


@dataclass(frozen=True, slots=True)
class Stranger:
    """A holder of a device's memory without a registered job: the policy says what happens."""

    kind: str  # "job": one without GPUs, or from before the agent; "user": outside of jobs; "unknown"
    job: int  # 0: none
    step: str
    user: str  # a name or number; empty: not known
    uuid: str
    charged: int
    pids: tuple[int, ...]  # those that have most first


@dataclass
class Judgement:
    """The actions to take."""

    acts: list[Act] = field(default_factory=list)
    strangers: list[Stranger] = field(default_factory=list)


@dataclass
class _Held:
    total: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    pids: dict[int, tuple[str, int]] = field(default_factory=dict)


def judge(usage: Usage, records: Mapping[int, JobRecord], owner_of: Callable[[int], Owner | None]) -> Judgement:
    """Note each job's peak on each device in its record, and return the actions to take.

    When a job is over its limit, its step with most memory is ended; if it is then still over it, the next one.
    """
    jobs: dict[tuple[int, str], _Held] = {}
    strange: dict[tuple[str, int, str, str, str], _Held] = {}
    for uuid, pid, size in usage:
        owner = owner_of(pid)
        if owner is None or _is_systems(owner, records):
            continue
        found = _job_of(owner, uuid, records)
        if found is None:
            job, step = (owner.place.job, owner.place.step) if owner.place else (0, "")
            user = owner.name or ("" if owner.uid is None else str(owner.uid))
            kind = "job" if job else "user" if user else "unknown"
            one = strange.setdefault((kind, job, step, user, uuid), _Held())
        else:
            job, step = found
            one = jobs.setdefault((job, uuid), _Held())
        one.total += size
        if pid > 0:  # else what many processes have together
            one.steps[step] = one.steps.get(step, 0) + size
            one.pids[pid] = (step, size)
    acts = [act for (job, uuid), one in jobs.items() for act in _acts(records[job], uuid, one)]
    return Judgement(acts, [Stranger(*key, one.total, _pids(one, key[2])) for key, one in strange.items()])


def _acts(record: JobRecord, uuid: str, held: _Held) -> Iterable[Act]:
    grant = record.grant_of(uuid)
    limit = 0 if grant is None else grant.limit  # what was not granted may not be used
    if grant is not None:
        grant.peak = max(grant.peak, held.total)
    if limit is None:
        return
    step = max(held.steps, key=lambda name: held.steps[name], default="")
    if held.total > limit:
        yield Act("end", record.job, step, uuid, held.total, limit, _pids(held, step))
    elif grant is not None and not grant.warned and held.total * 1000 >= limit * WARN_PERMILLE:
        yield Act("warn", record.job, step, uuid, held.total, limit, _pids(held, step))


def _pids(held: _Held, step: str) -> tuple[int, ...]:
    """The processes of a step, those that have most first."""
    return tuple(sorted((pid for pid, (of, _) in held.pids.items() if of == step), key=lambda pid: -held.pids[pid][1]))


def _is_systems(owner: Owner, records: Mapping[int, JobRecord]) -> bool:
    """Whether it is root's, a service's or slurmstepd, or is about to end."""
    if owner.place is not None:
        return owner.place.stepd and owner.uid == 0
    if owner.ending or owner.uid == 0:
        return True
    users = {record.uid for record in records.values()}
    services = owner.uid is not None and (owner.uid < FIRST_USER or owner.uid == MEASURES_AS)
    return services and owner.uid not in users


def _job_of(owner: Owner, uuid: str, records: Mapping[int, JobRecord]) -> tuple[int, str] | None:
    """The registered job, and its step, to which a process counts."""
    place = owner.place
    record = None if place is None else records.get(place.job)
    if place is not None and place.uid is not None and record is not None and place.uid != record.uid:
        record = None  # another job of that number: its cgroup shows its user
    if place is not None and record is not None and (owner.uid in (0, None) or owner.is_user(record.uid, record.user)):
        return record.job, place.step
    if place is None or record is not None:  # outside of jobs, or another user's in a job
        theirs = _users_job(owner, uuid, records)
        if theirs is not None:
            return theirs, OUTSIDE
    return None if place is None or record is None else (record.job, place.step)


def _users_job(owner: Owner, uuid: str, records: Mapping[int, JobRecord]) -> int | None:
    """The job to which processes of its user outside of all jobs count: one with that device before any other."""
    jobs = [record for record in records.values() if owner.uid and owner.is_user(record.uid, record.user)]
    found = next((one for one in jobs if one.grant_of(uuid) is not None), jobs[0] if jobs else None)
    return None if found is None else found.job
