"""A small world in simulated time: Slurm, root's helper and replicas, around the real keeper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policy.service_jobs import ServicePolicy, ServicesPolicy
from sluice.exchange.acts import ActError
from sluice.exchange.launches import LaunchRequest
from sluice.exchange.serving import Abilities, Demand, Heartbeat, Load, Orders, State, Weights
from sluice.exchange.snapshot import Snapshot
from sluice.serve.replicad import keeper as keeper_module
from sluice.serve.replicad.journal import Journal
from sluice.serve.replicad.keeper import Keeper, Result
from sluice.serve.replicad.pattern import Patterns
from sluice.serve.replicad.slurm_view import ENDED, ReplicaJob, View

BEGIN = 1_750_000_000.0
STEP = 0.25
USERS = {"alice": 2001, "bob": 2002}


@dataclass
class Job:
    """One of the world's."""

    id: int
    service: str
    launch: str
    user: str
    submitted: float
    state: str = "PENDING"
    reason: str = "Resources"
    node: str = ""
    started: float = 0.0
    over: float = 0.0
    lent: bool = False
    grace_s: float | None = None  # it is preempted: its time ends so long after its start
    notice: bool = False  # Slurm has sent SIGTERM
    drains: bool = False
    load: int = 0
    orders: str = "go on"
    silent: bool = False  # its heartbeats are lost
    start_s: float = 2.0


@dataclass
class World:
    """`now` goes on by `run`. What replicas do: `start_s` until they are ready, `fails`: why they do not become it."""

    folder: Path
    policy: ServicesPolicy
    now: float = BEGIN
    jobs: list[Job] = field(default_factory=list)
    free: int = 100
    queue_s: float = 0.0
    start_s: float = 2.0
    fails: str = ""
    refuses: str = ""
    unsure: bool = False  # root's helper does not know what became of a launch, which was done
    leave: dict[str, str] = field(default_factory=dict)
    maintenance: dict[str, float] = field(default_factory=dict)
    leads: bool = True
    hangs: bool = False  # the controllers' daemon gives no view
    need: dict[str, Demand] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    most_living: int = 0
    least_ready: int = 1000
    keeper: Keeper = field(init=False)
    _next: int = 100

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A keeper that has just started, on what the one before left on disk."""
        patterns = Patterns(self.folder / "patterns.json")
        patterns.load()
        self.keeper = Keeper("ctl1", Journal(self.folder / "launches.json"), patterns, self, Snapshot(), now=self.now)

    # ---- root's helper ----

    def ask(self, request: LaunchRequest) -> None:
        do, service, launch = request.do, request.service, request.launch
        self.asked.append((do, launch))
        mine = next((job for job in self.jobs if job.launch == launch), None)
        if do == "end_replica":
            if mine is not None and mine.state not in ENDED:
                self.over(mine, "CANCELLED")
            self.keeper.result(Result(do, service, launch, {"job_id": mine.id if mine else None, "living": bool(mine)}))
            return
        if self.refuses:
            self.keeper.result(Result(do, service, launch, None, ActError(422, self.refuses)))
            return
        if mine is None:
            self._next += 1
            user = self.policy.services[service].user
            mine = Job(self._next, service, launch, user, self.now, lent=request.lent, start_s=self.start_s)
            self.jobs.append(mine)
        if self.unsure:
            self.keeper.result(Result(do, service, launch, None, ActError(503, "no answer", retry_after=1)))
        else:
            self.keeper.result(Result(do, service, launch, {"job_id": mine.id, "user": mine.user}))

    def over(self, job: Job, state: str) -> None:
        job.state, job.over = state, self.now

    # ---- time ----

    def run(self, seconds: float, each: Callable[[], Any] = lambda: None) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += STEP
            self._slurm()
            self._replicas()
            self.keeper.set_policy(self.policy, {})
            if abs(self.now % 1.0) < STEP and not self.hangs:
                self.keeper.see(self.view())
            self.keeper.demand(self.need.values(), self.now)
            self.keeper.step(self.now)
            self.most_living = max(self.most_living, len(self.living()))
            self.least_ready = min(self.least_ready, len(self.ready()))
            each()

    def _slurm(self) -> None:
        for job in self.jobs:
            policy = self.policy.services.get(job.service)
            if job.state == "PENDING" and self.now >= job.submitted + self.queue_s:
                used = sum(one.state == "RUNNING" for one in self.jobs)
                if used < self.free:
                    job.state, job.started, job.node = "RUNNING", self.now, f"n{job.id}"
            elif job.state == "RUNNING" and policy is not None and self.now > job.started + self.lasts(job):
                self.over(job, "TIMEOUT" if job.grace_s is None else "PREEMPTED")

    def lasts(self, job: Job) -> float:
        policy = self.policy.services.get(job.service)
        return job.grace_s or (policy.walltime_s if policy is not None else 3600.0)

    def preempt(self, job: Job, grace: float, *, notice: bool = True) -> None:
        """For another job, after a grace time; `notice`: with a signal."""
        job.grace_s, job.notice = self.now - job.started + grace, notice
        self.free -= 1

    def _replicas(self) -> None:
        for job in self.jobs:
            if job.state != "RUNNING" or job.silent:
                continue
            state = State.READY if self.now >= job.started + job.start_s else State.STARTING
            if self.fails:
                state = State.FAILED
            if job.drains or job.orders == "drain":
                state = State.DRAINING
            if self.now % 1.0 < STEP and self.keeper.expected(job.launch) is not None:
                job.orders = self.say(job, state).do

    def say(self, job: Job, state: State, weights: Weights | None = None) -> Orders:
        beat = Heartbeat(
            job.service, job.launch, job.id, job.node, 4711, "ab" * 32, "cd" * 32, state, Abilities(), 4,
            Load(running=job.load), None, why=self.fails or ("Slurm ends the job" if job.notice else ""),
            weights=weights,
        )  # fmt: skip
        return self.keeper.hear(beat, self.now)

    def view(self) -> View:
        rows = {}
        for job in self.jobs:
            if job.over and self.now > job.over + 300:
                continue
            running = job.state == "RUNNING"
            rows[job.launch] = ReplicaJob(
                job.id, job.service, job.launch, job.user, job.state, job.reason, (job.node,) if job.node else (),
                job.submitted, job.started if running else None, job.started + self.lasts(job) if running else None,
                job.lent,
            )  # fmt: skip
        return View(self.now, "ctl1", self.leads, rows, dict(self.leave), dict(self.maintenance))

    # ---- what is seen ----

    def asks(self, service: str = "words", **words: Any) -> None:
        """What gateways need from now on."""
        usual: dict[str, Any] = {"waiting": 0, "oldest_s": 0.0, "in_flight": 0, "tokens_in_flight": 0, "delay_s": 0.0}
        self.need[service] = Demand(service, "gw:1", **{**usual, **words})

    def living(self, service: str = "words") -> list[Job]:
        return [job for job in self.jobs if job.service == service and job.state not in ENDED]

    def ready(self, service: str = "words") -> list[Job]:
        """Those that gateways may choose."""
        found = []
        for job in self.living(service):
            row = self.keeper.snapshot.get("replicas", job.launch)
            if row is not None and row["state"] == "ready":
                found.append(job)
        return found

    def why(self, service: str = "words") -> str:
        return str(self.keeper.snapshot.get("services", service)["why"])

    def eta(self, service: str = "words") -> float | None:
        found: float | None = self.keeper.snapshot.get("services", service)["eta_s"]
        return found


def policy_of(**words: Any) -> ServicesPolicy:
    """One service, `words`."""
    usual: dict[str, Any] = {
        "name": "words", "tenant": "physics", "user": "alice", "engine": "openai", "least": 0, "most": 3, "slots": 4,
        "idle_s": 60.0, "walltime_s": 3600, "ready_s": 30.0, "drain_s": 20.0, "queue_delay_s": 1.0,
    }  # fmt: skip
    return ServicesPolicy(services={"words": ServicePolicy(**{**usual, **words})})


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """A function: ``make_world(**words of the service)``."""
    monkeypatch.setattr(keeper_module, "uid_of", USERS.get)
    return lambda **words: World(tmp_path, policy_of(**words))
