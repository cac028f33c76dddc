"""What the live view shows: one look at the cluster, and what changed since the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policy.live import gpus_in_use, gpus_of
from sluice.base.errors import SluiceError
from sluice.base.events import read
from sluice.base.text import one_line
from sluice.exchange.live import GpuNow, JobNow, Live
from sluice.report.fleet import hosts
from sluice.slurm import SlurmClient
from sluice.slurm.answers import Job, Node

_MOST_EVENTS = 500
_WORD = {"whole": "#", "shared": "+", "free": "."}


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One node."""

    name: str
    state: str
    gpu_type: str
    gpus: int
    whole: frozenset[int]  # numbers of GPUs that a job has alone
    shared: frozenset[int]
    gpus_allocated: int
    shards: int  # MiB
    shards_allocated: int
    cpus: int
    cpus_allocated: int
    reason: str
    now: Mapping[int, GpuNow] = field(default_factory=dict)  # of its GPUs, where it is known

    @property
    def percent(self) -> float | None:
        """Mean utilisation of its GPUs, where it is known."""
        return _mean(gpu.percent for gpu in self.now.values())

    def use(self, gpu: int) -> str:
        """What jobs have of a GPU: whole, shared or free."""
        return "whole" if gpu in self.whole else "shared" if gpu in self.shared else "free"

    @property
    def picture(self) -> str:
        """A letter a GPU: ``#`` whole, ``+`` shared, ``.`` free."""
        return "".join(_WORD[self.use(gpu)] for gpu in range(self.gpus))


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job."""

    id: str
    name: str
    user: str
    account: str
    partition: str
    state: str
    reason: str
    gpus: int
    gpu_mem_mib: int
    nodes: str
    since: int | None  # start, or submission while it waits
    limit_s: int | None
    priority: int
    now: tuple[JobNow, ...] = ()  # on each of its GPUs, where it is known
    number: int = 0

    @property
    def percent(self) -> float | None:
        """Of its GPUs' time that is its, where it is known."""
        return _mean(one.percent for one in self.now)

    @property
    def used_mib(self) -> int | None:
        """Memory on all its GPUs, where it is known."""
        known = [one.used_mib for one in self.now if one.used_mib is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One GPU."""

    node: str
    index: int
    gpu_type: str
    use: str
    now: GpuNow
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TenantLine:
    """One account."""

    name: str
    running: int
    pending: int
    gpus: int
    gpu_mem_mib: int
    gpus_wanted: int  # of its waiting jobs
    users: int


@dataclass(frozen=True, slots=True)
class EventLine:
    """Something that happened."""

    time: float
    what: str


@dataclass
class Look:
    """The cluster at one moment."""

    at: float = 0.0
    nodes: list[NodeLine] = field(default_factory=list)
    jobs: list[JobLine] = field(default_factory=list)
    tenants: list[TenantLine] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    problem: str = ""

    def devices(self) -> list[DeviceLine]:
        """Each GPU, with the jobs that are known to have it."""
        on: dict[tuple[str, int], list[int]] = {}
        for job in self.jobs:
            for one in job.now:
                on.setdefault((one.node, one.index), []).append(job.number)
        return [
            DeviceLine(
                node.name,
                gpu,
                node.gpu_type,
                node.use(gpu),
                node.now.get(gpu, GpuNow()),
                tuple(sorted(on.get((node.name, gpu), ()))),
            )
            for node in self.nodes
            for gpu in range(node.gpus)
        ]


def _mean(percents: Iterable[float | None]) -> float | None:
    known = [one for one in percents if one is not None]
    return sum(known) / len(known) if known else None


def node_line(node: Node, now: Mapping[int, GpuNow] | None = None) -> NodeLine:
    """A node as it is shown."""
    types, shards = gpus_of(node)
    whole, shared = gpus_in_use(node.gres_used, "gpu"), gpus_in_use(node.gres_used, "shard")
    flags = {"drain": "drain", "not_responding": "down*", "fail": "fail", "maintenance": "maint"}
    state = next((word for flag, word in flags.items() if flag in node.flags), node.state)
    return NodeLine(
        name=one_line(node.name),
        state=state,
        gpu_type=one_line("+".join(sorted(filter(None, types)))),
        gpus=sum(types.values()),
        whole=whole - shared,
        shared=shared,
        gpus_allocated=node.tres_allocated.get("gres/gpu", 0),
        shards=shards,
        shards_allocated=node.tres_allocated.get("gres/shard", 0),
        cpus=node.cpus,
        cpus_allocated=node.cpus_allocated,
        reason=one_line(node.reason),
        now=now or {},
    )


def job_line(job: Job, now: Iterable[JobNow] = ()) -> JobLine:
    """A job as it is shown."""
    label = f"{job.array_id}_{job.array_tasks}" if job.array_id is not None and job.array_tasks else str(job.id)
    return JobLine(
        id=one_line(label, limit=24),
        name=one_line(job.name),
        user=one_line(job.user),
        account=one_line(job.account),
        partition=one_line(job.partition),
        state=job.state,
        reason=one_line(job.reason),
        gpus=job.tres.get("gres/gpu", 0),
        gpu_mem_mib=job.tres.get("gres/shard", 0),
        nodes=one_line(job.nodes),
        since=job.start_time if job.state != "PENDING" else job.submit_time,
        limit_s=job.time_limit_s,
        priority=job.priority,
        now=tuple(now),
        number=job.id,
    )


def tenant_lines(jobs: Iterable[JobLine]) -> list[TenantLine]:
    """Tenants that have jobs."""
    by: dict[str, list[JobLine]] = {}
    for job in jobs:
        by.setdefault(job.account, []).append(job)
    found = []
    for name, theirs in by.items():
        running = [job for job in theirs if job.state != "PENDING"]
        pending = [job for job in theirs if job.state == "PENDING"]
        found.append(
            TenantLine(
                name,
                len(running),
                len(pending),
                sum(job.gpus for job in running),
                sum(job.gpu_mem_mib for job in running),
                sum(job.gpus for job in pending),
                len({job.user for job in theirs}),
            )
        )
    return found


def changes(before: Look, after: Look) -> list[EventLine]:
    """What one look shows that the one before did not."""
    if not before.at:
        return []
    found: list[EventLine] = []
    was = {job.id: job for job in before.jobs}
    now = {job.id: job for job in after.jobs}
    for name, job in now.items():
        if name not in was:
            found.append(EventLine(after.at, f"job {name} of {job.user} ({job.account}) {job.state.lower()}"))
        elif was[name].state != job.state:
            where = f" on {job.nodes}" if job.nodes else ""
            found.append(EventLine(after.at, f"job {name} of {job.user}: {job.state.lower()}{where}"))
    found += [EventLine(after.at, f"job {name} of {job.user} is over") for name, job in was.items() if name not in now]
    states = {node.name: node.state for node in before.nodes}
    for node in after.nodes:
        if node.name in states and _up(states[node.name]) != _up(node.state):
            found.append(EventLine(after.at, f"node {node.name}: {node.state} {node.reason}".rstrip()))
    return found


def _up(state: str) -> str:
    return "up" if state in ("idle", "mixed", "allocated", "completing") else state


class Cluster:
    """Looks at the cluster as the invoking user may; what cannot be asked is reported in `Look.problem`."""

    def __init__(
        self,
        client: SlurmClient,
        events: Path,
        clock: Callable[[], float] = time.time,
        live: Callable[[float], Live] = lambda _: Live(),
    ) -> None:
        """`events`: a file of the controllers' daemon, which may be missing or unreadable. `live`: nodes' reports."""
        self.client = client
        self.live = live
        self.events_file = events
        self.clock = clock
        self._last = Look()
        self._seen: list[EventLine] = []
        self._seq = 0

    def look(self) -> Look:
        """One look; three commands of Slurm at most."""
        look = Look(at=self.clock())
        try:
            now = self.live(look.at)
            look.nodes = [node_line(node, now.gpus.get(node.name)) for node in self.client.nodes()]
            look.jobs = [job_line(job, now.jobs.get(job.id, ())) for job in self.client.jobs()]
        except SluiceError as error:
            look.problem = one_line(str(error))
            look.nodes, look.jobs = self._last.nodes, self._last.jobs
        look.tenants = tenant_lines(look.jobs)
        if not look.problem:
            self._seen += changes(self._last, look)
        self._seen += self._written()
        self._seen = sorted(self._seen, key=lambda event: event.time)[-_MOST_EVENTS:]
        look.events = list(self._seen)
        self._last = look
        return look

    def _written(self) -> list[EventLine]:
        """Events of the controller, where this user may read them."""
        try:
            events = read(self.events_file, self._seq)
        except (OSError, SluiceError):
            return []
        if events:
            self._seq = events[-1].seq
        return [EventLine(event.time, _words(event.kind, event.fields)) for event in events]


def _words(kind: str, fields: Mapping[str, object]) -> str:
    return one_line(" ".join([kind, *(f"{name}={value}" for name, value in fields.items())]), limit=300)


def on_node(jobs: Iterable[JobLine], node: str) -> list[JobLine]:
    """The jobs that have something of a node."""
    return [job for job in jobs if node in hosts(job.nodes)]
