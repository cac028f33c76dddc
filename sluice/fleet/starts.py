"""When jobs that wait will start, as far as anybody can know: what Slurm plans, begin times, and the ends of the jobs
that they depend on, also of those that wait themselves. Members of a gang start when the last of them may.

Pure, but for what it learns of run times.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.base.hostlist import expand
from sluice.core.order import Predictor
from sluice.fleet.ahead import PlannedStart
from sluice.slurm.answers import Job, task_count

MOST_DEPENDENCIES = 100
"""Jobs that one waits for; of one that waits for more nothing is foreseen."""
_AFTER = re.compile(r"after(?:ok|any):(\d+)(?:_(\d+|\*))?\(unfulfilled\)")
_SINGLETON = "singleton(unfulfilled)"
_GANG = re.compile(
    r"Gang[ _](?P<name>[^:]{1,64}):[ _](?:waits[ _]for[ _]room[ _]for[ _](?P<ready>\d+)[ _]members"
    r"|\d+[ _]of[ _](?P<blocked>\d+)[ _]members[ _]held,[ _]dependent[ _]or[ _]not[ _]eligible[ _]yet)"
)
"""As slurm_plugin/planner/gang.c words it."""
_QUANTILE = 75  # of runs, that were no longer than predicted
_KEYS = 8192
_FOREVER_S = 10**12


class RunTimes:
    """How long jobs of a user and name run, learnt from those that were seen to end."""

    def __init__(self) -> None:
        self._predictor = Predictor(_KEYS, _QUANTILE)
        self._running: dict[str, Job] = {}

    def see(self, jobs: Sequence[Job], wall: float) -> None:
        """All jobs that Slurm has now, `wall` by its clock."""
        states = {job.own_name: job.state for job in jobs}
        for name, job in self._running.items():
            if states.get(name, "COMPLETING") == "COMPLETING" and job.start_time is not None:
                self._predictor.record([_key(job)], max(1, round(wall - job.start_time)))
        self._running = {job.own_name: job for job in jobs if job.state == "RUNNING"}

    def left(self, job: Job, elapsed_s: float = 0.0) -> float:
        """Seconds for which it will run: its limit's, without two runs to learn from; infinite where it has none."""
        limit_s = max(0, job.time_limit_s or 0)
        left_s = self._predictor.predict([_key(job)], limit_s, max(0, round(elapsed_s)))
        return float(left_s) if left_s < _FOREVER_S else math.inf


def _key(job: Job) -> int:
    return int.from_bytes(hashlib.blake2b(f"{job.uid}\0{job.name}".encode(), digest_size=8).digest(), "big")


class _Gang(NamedTuple):
    """One gang: jobs that start together."""

    name: str
    ready: bool  # it waits for room alone
    members: tuple[tuple[Job, int], ...]  # and how many tasks of each


@dataclass(frozen=True, slots=True)
class _SameName:
    """Jobs of one user and name, by id."""

    begun: list[Job] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)


def planned_starts(
    jobs: Sequence[Job], chosen: Mapping[int, str], run_times: RunTimes, wall: float
) -> Iterator[PlannedStart]:
    """Starts of jobs that wait, by Slurm's clock. `chosen`: the nodes that Slurm's backfill has chosen, by job; `wall`:
    now.

    Of a job that only waits for its begin time or for the end of others, the nodes are chosen then: as many of its
    partition as it fills, where it names one alone. Of others without nodes nothing is asked for: the planner has them
    on nodes that are there.
    """
    outlook = _Outlook(jobs, chosen, run_times, wall)
    for job in jobs:
        if job.state == "PENDING" and job.id not in outlook.gang_of:
            yield from outlook.of_job(job)
    for gang in outlook.gangs:
        yield from outlook.of_gang(gang)


class _Outlook:
    """What is known of starts and ends, each worked out once."""

    def __init__(self, jobs: Sequence[Job], chosen: Mapping[int, str], run_times: RunTimes, wall: float) -> None:
        self._chosen, self._run_times, self._wall = chosen, run_times, wall
        self._by_name: dict[str, list[Job]] = {}
        self._same_name: defaultdict[tuple[int, str], _SameName] = defaultdict(_SameName)
        for job in sorted(jobs, key=_id):
            for name in {job.own_name, str(job.array_id or job.id)}:
                self._by_name.setdefault(name, []).append(job)
            same = self._same_name[job.uid, job.name]
            (same.waiting if job.state == "PENDING" else same.begun).append(job)
        self.gangs = list(_gangs(jobs))
        self.gang_of = {member.id: gang for gang in self.gangs for member, _ in gang.members}
        self._starts: dict[int, float | None] = {}

    def of_job(self, job: Job) -> Iterator[PlannedStart]:
        """A job's, where it is known what it takes."""
        nodes = self._chosen.get(job.id, "")
        at = job.start_time if nodes else self._start(job) if _waits_only(job) else None
        if at is None:
            return
        if nodes:
            until = at + self._run_times.left(job)
            yield PlannedStart(at, frozenset(expand(nodes)), account=job.account, until=until, job=job.id)
        elif _may_be_counted(job):
            yield self._counted(job, at)

    def of_gang(self, gang: _Gang) -> Iterator[PlannedStart]:
        """Those of its members, at one time."""
        at = self._start(gang.members[0][0])
        if at is None or not all(_may_be_counted(member) for member, _ in gang.members):
            return
        for member, tasks in gang.members:
            for _ in range(tasks):
                yield self._counted(member, at, gang.name)

    def _counted(self, job: Job, at: float, gang: str = "") -> PlannedStart:
        gpus = job.tres.get("gres/gpu", 0)
        after = job.dependency if _waits_for_others(job) else ""
        return PlannedStart(
            at, frozenset(), job.node_count, job.partition, gpus, job.cpus, job.account,
            at + self._run_times.left(job), job.id, gang, _names(after),
        )  # fmt: skip

    # ---- times ----

    def _start(self, job: Job) -> float | None:
        """When a job that waits may start; None: nobody knows. Chains are as long as users like: no recursion."""
        path, on_path = [(job, iter(self._before(job)))], {self._first(job)}
        while path and job.id not in self._starts:
            one, others = path[-1]
            before = next((other for other in others if self._is_open(other, on_path)), None)
            if before is not None:
                path.append((before, iter(self._before(before))))
                on_path.add(self._first(before))
                continue
            path.pop()
            on_path.discard(self._first(one))
            self._know(one)
        return self._starts[job.id]

    def _first(self, job: Job) -> int:
        """By which a job is known, one of a gang by the gang's first member."""
        gang = self.gang_of.get(job.id)
        return job.id if gang is None else gang.members[0][0].id

    def _is_open(self, job: Job, on_path: Collection[int]) -> bool:
        """Whether its start is still to be worked out; jobs that wait for each other never start."""
        return job.id not in self._starts and self._first(job) not in on_path

    def _know(self, job: Job) -> None:
        gang = self.gang_of.get(job.id)
        if gang is None:
            self._starts[job.id] = self._own_start(job)
            return
        times = [self._own_start(member, ready=gang.ready) for member, _ in gang.members]
        known = [at for at in times if at is not None]
        for member, _ in gang.members:
            self._starts[member.id] = max(known) if len(known) == len(times) else None

    def _before(self, job: Job) -> list[Job]:
        """Jobs that wait themselves whose starts a job's start follows."""
        gang = self.gang_of.get(job.id)
        members = [job] if gang is None else [member for member, _ in gang.members]
        return [one for member in members for one in self._depends_on(member) or () if one.state == "PENDING"]

    def _own_start(self, job: Job, *, ready: bool = True) -> float | None:
        """Its own, whatever the others of its gang wait for. `ready`: it waits for no more than room."""
        if _waits_for_others(job):
            others = self._depends_on(job)
            ends = [self._end(one) for one in others or ()]
            known = [at for at in ends if at is not None]
            return max([*known, self._begin(job)]) if others is not None and len(known) == len(ends) else None
        if not ready:
            return self._begin(job)
        return None if job.reason.startswith("JobHeld") else job.start_time

    def _begin(self, job: Job) -> float:
        """It does not begin before."""
        return max(self._wall, job.start_time or 0.0)

    def _end(self, job: Job) -> float | None:
        if job.state == "COMPLETING":
            return self._wall
        if job.state in ("RUNNING", "CONFIGURING"):
            elapsed = self._wall - job.start_time if job.start_time is not None else 0.0
            at = self._wall + self._run_times.left(job, elapsed)
            at = min(at, math.inf if job.end_time is None else job.end_time)
        elif job.state == "PENDING" and (start := self._starts.get(job.id)) is not None:
            at = max(start, self._wall) + self._run_times.left(job)
        else:
            return None
        return at if at < math.inf else None

    def _depends_on(self, job: Job) -> list[Job] | None:
        """Jobs whose ends a job waits for; None: it is not known when it may start."""
        found: list[Job] = []
        for word in job.dependency.split(","):
            if len(found) > MOST_DEPENDENCIES:
                return None
            if word == _SINGLETON:
                found += self._same_before(job)
                continue
            match = _AFTER.fullmatch(word)
            name = "" if match is None else match[1] if match[2] in (None, "*") else f"{match[1]}_{match[2]}"
            if name not in self._by_name:
                return None
            found += self._by_name[name]
        return found if len(found) <= MOST_DEPENDENCIES else None

    def _same_before(self, job: Job) -> list[Job]:
        """Jobs of the same name and user that a singleton waits for: what runs, and what waits before it, back to
        another singleton, which waits for all others."""
        same = self._same_name[job.uid, job.name]
        found = same.begun[: MOST_DEPENDENCIES + 1]
        for place in range(bisect_left(same.waiting, job.id, key=_id) - 1, -1, -1):
            other = same.waiting[place]
            found.append(other)
            if len(found) > MOST_DEPENDENCIES or _SINGLETON in other.dependency.split(","):
                break
        return found


def _id(job: Job) -> int:
    return job.id


def _waits_for_others(job: Job) -> bool:
    return "unfulfilled" in job.dependency


def _waits_only(job: Job) -> bool:
    """For no more than its begin time, or for others."""
    return job.reason in ("BeginTime", "Dependency")


def _may_be_counted(job: Job) -> bool:
    return "," not in job.partition and not job.reservation


def _names(dependency: str) -> str:
    """The jobs of a dependency, as people write them; the first ones."""
    words = [word.partition("(")[0].partition(":")[2] or word.partition("(")[0] for word in dependency.split(",")]
    return ", ".join(word for word in words[:3] if word) + (", ..." if len(words) > 3 else "")


def _gangs(jobs: Iterable[Job]) -> Iterator[_Gang]:
    """Those of which all members wait, by the reasons that slurmctld's planner gives them; as in gang.c the first by
    job id are one gang, and the next ones the next.
    """
    members: dict[tuple[int, str, int], list[tuple[Job, bool]]] = {}
    for job in sorted(jobs, key=_id):
        match = _GANG.fullmatch(job.reason) if job.state == "PENDING" else None
        if match is not None:
            key = job.uid, match["name"], int(match["ready"] or match["blocked"])
            members.setdefault(key, []).append((job, match["ready"] is not None))
    for (uid, name, count), found in members.items():
        taken: list[tuple[Job, int]] = []
        present, ready = 0, True
        for job, waits_for_room in found:
            tasks = min(task_count(job.array_tasks), count - present)
            taken.append((job, tasks))
            present, ready = present + tasks, ready and waits_for_room
            if present == count:
                yield _Gang(f"{uid}:{name}:{count}:{taken[0][0].id}", ready, tuple(taken))
                taken, present, ready = [], 0, True
