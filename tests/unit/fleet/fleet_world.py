"""A model of Slurm, of a hostile provider and of fleetd's process, with one source of chance."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

from policy.pool_nodes import PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.base.hostlist import expand
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.driver import Failure, Machine
from sluice.fleet.journal import DamagedError, Memory, parse_journal, render_journal, without_journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.state import FRESH_S, pool_named
from sluice.fleet.views import (
    Act,
    Changed,
    JobAct,
    LaunchAct,
    Launched,
    ListAct,
    Listed,
    NodeAct,
    Result,
    SlurmJob,
    SlurmNode,
    SlurmView,
    TerminateAct,
    Terminated,
    Want,
)

_expand = cache(expand)
IDLE_S = 60.0
RESUME_TIMEOUT_S = 4000.0
SLURMD_TIMEOUT_S = 300.0
HOSTILE_S = 900.0
ENDED_S = 400.0  # until a machine that is not wanted is gone, once nothing is hostile any more
LATEST_S = 45.0  # until a request takes effect, or never does
MOST_S = 40_000.0

POLICY = PoolsPolicy(
    cluster="model",
    pools={
        "a": PoolPolicy(
            driver="model", nodes="a[1-4]", shapes=(ShapePolicy(name="big"), ShapePolicy(name="old")),
            zones=("x", "y"), partition="a", idle_s=40, boot_s=200, give_back_s=40, back_off_s=30,
        ),
        "b": PoolPolicy(
            driver="model", nodes="b[1-3]", shapes=(ShapePolicy(name="big"),), partition="b", least=0, boot_s=200,
            idle_s=100, give_back_s=0, back_off_s=20,
        ),
        "c": PoolPolicy(
            driver="model", nodes="c[1-4]", shapes=(ShapePolicy(name="big"),), partition="c", boot_s=200, idle_s=40,
            give_back_s=10, back_off_s=20, node_conf="Weight=1", made="sluice-made-1",
        ),
    },
)  # fmt: skip


class Killed(BaseException):
    """SIGKILL."""


@dataclass
class Box:
    """A machine of the provider's."""

    id: str
    token: str
    node: str
    pool: str
    region: str
    shape: str
    zone: str
    launched: float
    boots: float | None  # when its slurmd registers; None: it dies before
    made: str  # what its slurmd says of a dynamic node
    odd_gpus: bool
    dies: float | None
    noticed: bool = False  # its end is said 120 s before
    said: bool = False  # its slurmd has registered, known to slurmctld or not
    ended: float | None = None


@dataclass
class Node:
    """A node in Slurm."""

    want: Want = "off"
    since: float = 0.0
    drained: bool = False
    reason: str = ""
    job: int | None = None
    made: str = ""
    created: float = 0.0


@dataclass
class Job:
    """A job: it wants `nodes` nodes of one of its pools, at once with its gang and when the job `after` is over."""

    id: int
    nodes: int
    pools: tuple[str, ...]
    run_s: float
    at: float
    state: str = "pending"
    begins: float = 0.0
    has: tuple[str, ...] = ()
    ends: float = 0.0
    gang: str = ""
    after: int = 0


@dataclass(order=True)
class _Due:
    at: float
    number: int
    do: Callable[[], None] = field(compare=False)


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.ahead = 0.0  # of the fleet's clock before the world's
        self.boxes: list[Box] = []
        self.policy = POLICY
        self.nodes = {node: Node() for name in ("a", "b") for node in _expand(POLICY.pools[name].nodes)}
        self.deleted: dict[str, Node] = {}
        self.full_until = 0.0  # slurmctld has no room for more nodes
        self.jobs: dict[int, Job] = {}
        self.saved = b""
        self.known = PoolsPolicy()
        self.due: list[_Due] = []
        self.numbers = 0
        self.life = 0  # of fleetd's process; answers to an earlier one are lost
        self.kills = 0
        self.empty_before: dict[str, bool] = {}
        self.problems: list[str] = []
        self.refused: dict[int, LaunchAct] = {}
        self.stock: dict[tuple[str, str, str], float] = {}  # no capacity until
        for number in range(self.chance.randint(1, 6)):
            pools = self.chance.choice((("a",), ("b",), ("c",), ("a", "b"), ("b", "a"), ("c", "a"), ("b", "c")))
            most = min(len(_expand(POLICY.pools[pool].nodes)) for pool in pools)
            self.jobs[number + 1] = Job(
                number + 1, self.chance.randint(1, most), pools, self.chance.choice((5.0, 60.0, 400.0)),
                self.now + self.chance.uniform(0, 600),
            )  # fmt: skip
        self._make_gang()
        self._make_chain()
        self.takeover = self.now + self.chance.uniform(0, HOSTILE_S) if self.chance.random() < 0.15 else None
        changes = self.chance.randint(0, 3)
        self.steady = not changes  # the policy has always the same pools
        for _ in range(changes):
            self.after(self.chance.uniform(0, HOSTILE_S), lambda: self._change_policy())
        self.keeper = self._new_keeper()

    @property
    def hostile(self) -> bool:
        return self.now < 1000.0 + HOSTILE_S

    @property
    def clock(self) -> float:
        """The fleet's."""
        return self.now + self.ahead

    def _make_gang(self) -> None:
        """Members of one or two pools, which start together or not at all."""
        if self.chance.random() < 0.5:
            return
        at = self.now + self.chance.uniform(0, 600)
        pools = self.chance.choice((("a", "a"), ("a", "b"), ("b", "b", "b"), ("a", "c"), ("a", "a", "b", "b")))
        for pool in pools:
            number = len(self.jobs) + 1
            nodes = self.chance.randint(1, 2) if len(set(pools)) == len(pools) else 1
            self.jobs[number] = Job(number, nodes, (pool,), self.chance.choice((5.0, 60.0)), at, gang="gang")

    def _make_chain(self) -> None:
        """Jobs of which each waits for the end of one before, perhaps of a gang's member."""
        before = self.chance.choice((0, *self.jobs))
        for _ in range(self.chance.randint(0, 3) if before else 0):
            number = len(self.jobs) + 1
            pool = self.chance.choice("abc")
            most = len(_expand(POLICY.pools[pool].nodes))
            run_s = self.chance.choice((5.0, 60.0, 400.0))
            self.jobs[number] = Job(number, self.chance.randint(1, most), (pool,), run_s, self.now, after=before)
            before = number

    # ---- the journal ----

    def load_pools(self) -> PoolsPolicy:
        return self.known

    def save_pools(self, known: PoolsPolicy) -> None:
        self.known = known

    def load(self) -> Memory:
        if not self.saved:
            return without_journal(self.known)
        try:
            return parse_journal(self.saved, source="model")
        except DamagedError:
            memory = without_journal(self.known)
            memory.origin = "lost"
            return memory

    def _perhaps_lose_journal(self) -> None:
        """It is gone or damaged, or its whole folder is, which then knows pools no more that left the policy."""
        chance = self.chance.random() if self.hostile else 1.0
        if chance < 0.1:
            self.saved = b""
        elif chance < 0.2:
            self.saved = self.saved[: self.chance.randrange(len(self.saved) + 1)]
        elif chance < 0.25 and self.steady:
            self.saved, self.known = b"", PoolsPolicy()

    def save(self, memory: Memory) -> None:
        self._perhaps_killed()
        self.saved = render_journal(memory)
        self._perhaps_killed()

    def _perhaps_killed(self) -> None:
        if self.hostile and self.chance.random() < 0.04:
            raise Killed

    def _new_keeper(self) -> Keeper:
        self.life += 1
        if self.life > 1 and self.chance.random() < 0.3:  # the clock was set while nothing ran
            jump = self.chance.choice((-3600.0, 3600.0, 86_400.0))
            last = self.load().clock
            self.ahead = max(self.clock + jump, last) - self.now
        keeper = Keeper(self, new_token=self._token)
        keeper.set_policy(self.policy)
        return keeper

    def _change_policy(self) -> None:
        """An operator has other nodes in the dynamic pool, promises something else of them, or gives it up; pool a is
        in another region.
        """
        pools = {name: pool for name, pool in POLICY.pools.items() if name != "c"}
        region = {"region": self.chance.choice(("1", "2"))}
        pools["a"] = POLICY.pools["a"].model_copy(update={"settings": region})
        if self.chance.random() < 0.8:
            version = self.chance.randint(1, 2)
            pools["c"] = POLICY.pools["c"].model_copy(
                update={
                    "nodes": self.chance.choice(("c[1-4]", "c[1-2]", "c[3-6]")),
                    "node_conf": f"Weight={version}", "made": f"sluice-made-{version}",
                }
            )  # fmt: skip
        self.policy = PoolsPolicy(cluster="model", pools=pools)
        self.keeper.set_policy(self.policy)

    def _token(self) -> str:
        self.numbers += 1
        return f"token-{self.numbers}"

    # ---- time ----

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.numbers += 1
        heapq.heappush(self.due, _Due(self.now + seconds, self.numbers, do))

    def run(self) -> None:
        """Until all jobs are through and nothing runs any more."""
        while self.now < MOST_S:
            self._slurm()
            try:
                self._fleet()
            except Killed:
                self.kills += 1
                self._perhaps_lose_journal()
                self.keeper = self._new_keeper()
            self._check()
            if self.problems or (not self.hostile and self._settled()):
                return
            self.now += self.chance.uniform(1, 8) if self.hostile or self._busy() else 20.0
            while self.due and self.due[0].at <= self.now:
                heapq.heappop(self.due).do()
        self.problems.append("not settled: " + "; ".join(self._story()))

    def _busy(self) -> bool:
        return bool(self.due)

    def _settled(self) -> bool:
        return (
            not self.keeper.memory.launches
            and not any(one.ended is None for one in self.boxes)
            and all(one.state == "done" for one in self.jobs.values() if self._can_run(one))
            and set(self.keeper.pools()) == set(self.policy.pools)
            and self._as_in_policy()
        )

    def _as_in_policy(self) -> bool:
        """The dynamic nodes are those of the policy, made of its parameters unless a person has to return them."""
        pool = self.policy.pools.get("c")
        dynamic = {name: one for name, one in self.nodes.items() if one.made}
        return set(dynamic) == set(_expand(pool.nodes) if pool else ()) and all(
            _out(one) or (pool is not None and one.made == pool.made) for one in dynamic.values()
        )

    def _can_run(self, job: Job) -> bool:
        """Nodes whose machines had other GPUs are out until an operator returns them; what waits for a job that cannot
        run, waits."""
        if job.after and not self._can_run(self.jobs[job.after]):
            return False
        usable = Counter(
            name for name, pool in self.policy.pools.items() for node in _expand(pool.nodes)
            if node not in self.nodes or not _out(self.nodes[node])
        )  # fmt: skip
        if job.gang:
            wanted: Counter[str] = Counter()
            for one in self._gang(job):
                wanted[one.pools[0]] += one.nodes
            return wanted <= usable
        return any(usable[pool] >= job.nodes for pool in job.pools)

    def _gang(self, job: Job) -> list[Job]:
        """The members of its gang that start with it; from its start on a member is a job like any other."""
        if not job.gang:
            return [job]
        return [one for one in self.jobs.values() if one.gang == job.gang]

    def _story(self) -> list[str]:
        return [
            *(f"job {one.id} {one.state} {one.has}" for one in self.jobs.values() if one.state != "done"),
            *(f"box {one.id} of {one.node}" for one in self.boxes if one.ended is None),
            *(
                f"{name} {one.want} {one.reason}"
                for name, one in self.nodes.items()
                if one.want != "off" or one.drained
            ),
            *(f"launch {one.token} {one.node} {one.stage}" for one in self.keeper.memory.launches.values()),
        ]

    # ---- fleetd ----

    def _fleet(self) -> None:
        if not (self.hostile and self.chance.random() < 0.2):  # else slurmctld does not answer
            self.keeper.see(self._view())
        for act in self.keeper.step(self.clock):
            if isinstance(act, TerminateAct):
                self._check_end(act)
            self._perhaps_killed()
            self._do(act)
            self._perhaps_killed()

    def _view(self) -> SlurmView:
        nodes = {
            name: SlurmNode(one.want, one.drained, one.reason, made=one.made) for name, one in self.nodes.items()
        }  # fmt: skip
        jobs = {
            one.id: SlurmJob(one.id, one.state == "configuring", frozenset(one.has), one.begins > self.now)
            for one in self.jobs.values()
            if one.state in ("configuring", "running") or (one.state == "pending" and one.begins > self.now)
        }
        return SlurmView(self.clock, nodes, jobs, tuple(self._starts()))

    def _starts(self) -> Iterator[PlannedStart]:
        """What the plan says of jobs that wait; where there is trouble, it is wrong."""
        for job in self.jobs.values():
            foreseen = job.id % 2 or job.gang or job.after
            if job.state == "pending" and len(job.pools) == 1 and foreseen:
                wrong = self.chance.uniform(-300, 300) if self.hostile and self.chance.random() < 0.3 else 0.0
                due = max(self._due(one) for one in self._gang(job)) + self.ahead + wrong
                yield PlannedStart(
                    due, count=job.nodes, partition=job.pools[0], until=due + job.run_s, job=job.id, gang=job.gang
                )

    def _due(self, job: Job) -> float:
        """When a job that waits may start, as far as anybody knows."""
        before = self.jobs.get(job.after)
        if before is None or before.state == "done":
            return max(job.at, job.begins)
        return before.ends if before.state == "running" else max(self._due(before), self.now) + before.run_s

    def _do(self, act: Act) -> None:
        if isinstance(act, NodeAct | JobAct):
            self._change(act)
            self._answer(Changed(act))
            return
        if self.hostile and self.chance.random() < 0.1:
            return  # the request is lost
        late = self.chance.uniform(0, LATEST_S) if self.hostile and self.chance.random() < 0.2 else 0.5
        began, region = self.clock, self._region(act.pool)
        self.after(late, lambda: self._carry_out(act, began, region))
        if self.hostile and self.chance.random() < 0.1:  # the request arrives twice
            self.after(self.chance.uniform(0, LATEST_S), lambda: self._carry_out(act, began, region))

    def _region(self, pool: str) -> str:
        return str(self.keeper.pools()[pool].settings.get("region", "1"))

    def _carry_out(self, act: LaunchAct | TerminateAct | ListAct, began: float, region: str) -> None:
        if isinstance(act, LaunchAct):
            if id(act) not in self.refused:  # of a request that arrives twice, not one is refused and one carried out
                self._answer(self._launch(act, region))
        elif isinstance(act, TerminateAct):
            self._answer(self._terminate(act, region))
        else:
            self._answer(self._list(act, began, region))

    def _answer(self, result: Result) -> None:
        life = self.life
        if self.hostile and self.chance.random() < 0.1 and not isinstance(result, Changed):
            return
        for _ in range(2 if self.hostile and self.chance.random() < 0.05 else 1):
            late = self.chance.uniform(0, 300) if self.hostile and self.chance.random() < 0.1 else 0.0
            self.after(late, lambda: self.keeper.take(result, self.clock) if self.life == life else None)

    # ---- the provider ----

    def _launch(self, act: LaunchAct, region: str) -> Launched:
        order = act.order
        for box in self.boxes:
            if box.token == order.token:
                return Launched(order.token, self._machine(box))
        if act.pool == "b" and any(one.node == order.node and one.ended is None for one in self.boxes):
            return Launched(order.token, None, "broken", "it is on")  # machines of one's own: one for each node
        if act.pool == "b" and self.hostile and self.chance.random() < 0.1:
            if self.chance.random() < 0.5:
                self._make(act, region)
            self.refused[id(act)] = act
            return Launched(order.token, None, "broken", "504")
        if failure := self._refusal(act):
            self.refused[id(act)] = act
            return Launched(order.token, None, failure, "refused")
        return self._make(act, region)

    def _refusal(self, act: LaunchAct) -> Failure | None:
        order = act.order
        place = act.pool, order.shape, order.zone
        if self.hostile:
            chance = self.chance.random()
            if chance < 0.05:
                return "throttled"
            if chance < 0.1:
                return "unknown"
            if chance < 0.12:
                return "credentials"
            if chance < 0.15:
                return "quota"
            if chance < 0.35:
                self.stock[place] = self.now + self.chance.uniform(10, 600)
        return "no_capacity" if self.stock.get(place, 0.0) > self.now else None

    def _make(self, act: LaunchAct, region: str) -> Launched:
        order, pool = act.order, pool_named(act.pool)
        self.numbers += 1
        fails = self.hostile and self.chance.random() < 0.15
        box = Box(
            f"m{self.numbers}", order.token, order.node, pool, region, order.shape, order.zone, self.now,
            None if fails else self.now + self.chance.uniform(20, 120),
            self.policy.pools[pool].made if pool in self.policy.pools else "",
            self.hostile and self.chance.random() < 0.02,
            self.now + self.chance.uniform(100, 900) if self.hostile and self.chance.random() < 0.1 else None,
            self.chance.random() < 0.5,
        )  # fmt: skip
        self.boxes.append(box)
        return Launched(order.token, self._machine(box))

    def _terminate(self, act: TerminateAct, region: str) -> Terminated:
        if self.hostile and self.chance.random() < 0.1:
            return Terminated(act.pool, act.machine, "broken" if act.pool == "b" else "unknown", "503")
        for box in self.boxes:
            if box.id == act.machine and box.region == region and box.ended is None:
                box.ended = self.now
        return Terminated(act.pool, act.machine)

    def _list(self, act: ListAct, began: float, region: str) -> Listed:
        if self.hostile and self.chance.random() < 0.1:
            return Listed(act.pool, began, None, self.chance.choice(("unknown", "throttled")), "503")
        empty = self.hostile and self.chance.random() < 0.1 and not self.empty_before.get(act.pool)
        self.empty_before[act.pool] = empty
        seen = [
            self._machine(one) for one in self.boxes
            if (one.pool, one.region) == (pool_named(act.pool), region)
            and not empty and (one.ended is None or self.now - one.ended < 100)
            and (not self.hostile or self.now - one.launched > 10 or self.chance.random() < 0.5)
        ]  # fmt: skip
        return Listed(act.pool, began, tuple(seen))

    def _machine(self, box: Box) -> Machine:
        notice = "spot" if box.noticed and box.dies is not None and self.now >= box.dies - 120 else ""
        return Machine(box.id, box.token, box.node, box.shape, box.zone, ending=box.ended is not None, notice=notice)

    # ---- Slurm ----

    def _slurm(self) -> None:
        for box in self.boxes:
            if box.ended is None and box.dies is not None and box.dies <= self.now:
                box.ended = box.dies
        if self.takeover is not None and self.takeover <= self.now:
            self.takeover = None
            self._forget_nodes()
            self._forget_boots()
        for box in self.boxes:
            if box.ended is None and _booted(box, self.now) and not box.said:
                box.said = True
                if box.made:  # `slurmd -Z` creates its node where slurmctld does not know it
                    self.nodes.setdefault(box.node, Node("on", self.now, made=box.made, created=self.now))
        for name, node in self.nodes.items():
            alive = next((one for one in self.boxes if one.node == name and one.ended is None), None)
            self._register(node, alive)
            lasts = self.now - node.since
            silent = node.want == "on" and alive is None and lasts > SLURMD_TIMEOUT_S
            if silent or (node.want == "up" and lasts > RESUME_TIMEOUT_S):
                self._set(name, "down")
            elif node.want == "on" and node.job is None and lasts > IDLE_S:
                self._set(name, "off")
        for job in self.jobs.values():
            if job.state == "configuring" and all(self.nodes[one].want == "on" for one in job.has):
                job.state, job.ends = "running", self.now + job.run_s
            elif job.state == "running" and self.now >= job.ends:
                self._leave(job, "done")
            elif job.state == "pending" and max(job.at, job.begins) <= self.now and self._depends_on_none(job):
                self._start(job)

    def _depends_on_none(self, job: Job) -> bool:
        return not job.after or self.jobs[job.after].state == "done"

    def _forget_boots(self) -> None:
        """A controller that takes over knows the jobs and not that their nodes boot; it may take long to notice."""
        for node in self.nodes.values():
            if node.want == "up" and node.job is not None:
                node.want, node.since = "due", self.now
                self.after(self.chance.uniform(0, 3000), partial(self._power_up, node))

    def _forget_nodes(self) -> None:
        """... nor what was created and deleted since its state was saved."""
        for name, node in list(self.nodes.items()):
            if node.made and self.now - node.created < LATEST_S:
                if node.job is not None:
                    self._leave(self.jobs[node.job], "pending")
                del self.nodes[name]
        for name, node in self.deleted.items():
            if self.now - node.since < LATEST_S:
                self.nodes.setdefault(name, node)

    def _register(self, node: Node, box: Box | None) -> None:
        if box is not None and _booted(box, self.now) and node.since <= box.launched and node.want == "up":
            node.want, node.since = ("invalid" if box.odd_gpus else "on"), self.now

    def _start(self, job: Job) -> None:
        """On one of its pools; of a gang all members or none."""
        taken: dict[int, list[str]] = {}
        for one in self._gang(job):
            used = {name for names in taken.values() for name in names}
            for pool in one.pools:
                free = [name for name in self._free(pool) if name not in used]
                if len(free) >= one.nodes:
                    taken[one.id] = free[: one.nodes]
                    break
            else:
                return
        for number, names in taken.items():
            self._give(self.jobs[number], names)

    def _free(self, pool: str) -> list[str]:
        return [
            name for name, one in self.nodes.items()
            if name[0] == pool and one.want in ("off", "on") and one.job is None and not one.drained
        ]  # fmt: skip

    def _give(self, job: Job, names: list[str]) -> None:
        job.has, job.state, job.gang = tuple(names), "configuring", ""
        for name in names:
            node = self.nodes[name]
            node.job = job.id
            if node.want == "off":
                node.want, node.since = "up", self.now

    def _leave(self, job: Job, state: str, begins: float = 0.0) -> None:
        for name in job.has:
            self.nodes[name].job = None
            if self.nodes[name].want == "on":
                self.nodes[name].since = self.now
        job.has, job.state, job.begins = (), state, begins

    def _set(self, name: str, want: Want) -> None:
        node = self.nodes[name]
        if node.job is not None:
            self._leave(self.jobs[node.job], "pending")
        node.want, node.since = want, self.now

    def _change(self, act: NodeAct | JobAct) -> None:
        if self.hostile and self.chance.random() < 0.1:
            return
        if isinstance(act, JobAct):
            job = self.jobs[act.job]
            if act.change == "requeue" and job.state in ("configuring", "running"):
                self._leave(job, "pending", self.now + 120)
            elif act.change == "release":
                job.begins = 0.0
            return
        if act.change == "make_again":
            for name in act.nodes:
                if name in self.nodes:
                    self._delete(name, self.nodes[name])
        if act.change in ("create", "make_again"):
            self._create(act)
            return
        for name in act.nodes:
            if (node := self.nodes.get(name)) is None:
                continue
            if act.change == "delete":
                self._delete(name, node)
            elif act.change == "power_down_force" or (act.change == "power_down" and node.job is None):
                self._set(name, "off")
            elif act.change == "power_up" and node.want == "off":
                self._set(name, "due")
                self.after(self.chance.uniform(0, 10), partial(self._power_up, node))
            elif act.change == "drain":
                node.drained, node.reason = True, act.text
            elif act.change == "undrain":
                node.drained, node.reason = False, ""

    def _create(self, act: NodeAct) -> None:
        """All of them, or none."""
        if self.hostile and self.chance.random() < 0.1:
            self.full_until = self.now + self.chance.uniform(10, 600)
        if self.full_until <= self.now and not any(name in self.nodes for name in act.nodes):
            made = f"sluice-made-{act.text.removeprefix('Weight=')}"
            self.nodes |= {name: Node("off", self.now, made=made, created=self.now) for name in act.nodes}

    def _delete(self, name: str, node: Node) -> None:
        if any(one.node == name and one.ended is None for one in self.boxes):
            self.problems.append(f"{name}: to be deleted while its machine runs")
        if node.job is None and node.made:
            node.since = self.now
            self.deleted[name] = self.nodes.pop(name)

    def _power_up(self, node: Node) -> None:
        """Power saving gets to it, from time to time."""
        if node.want == "due":
            node.want, node.since = "up", self.now

    # ---- what must hold ----

    def _check_end(self, act: TerminateAct) -> None:
        """A node that leaves its pool keeps its machine under a job, and so does one whose launch nobody knows; views
        may be old.
        """
        if not any(launch.machine == act.machine for launch in self.keeper.memory.launches.values()):
            self._check_unknown_end(act)
        for launch in self.keeper.memory.launches.values():
            decided = launch.machine == act.machine and launch.since == self.clock and launch.why == "no_pool"
            number = self.nodes[launch.node].job if decided and launch.node in self.nodes else None
            if number is None or self.jobs[number].state != "running":
                continue
            if self.jobs[number].ends - self.jobs[number].run_s < self.now - FRESH_S:
                self.problems.append(f"{act.machine}: ended while job {number} runs on {launch.node}")

    def _check_unknown_end(self, act: TerminateAct) -> None:
        box = next(one for one in self.boxes if one.id == act.machine)
        node = self.nodes.get(box.node)
        job = self.jobs[node.job] if node is not None and node.job is not None else None
        if box.ended is not None or job is None or job.state != "running":
            return
        if job.ends - job.run_s < self.now - FRESH_S:
            self.problems.append(f"{act.machine}: without a launch, and ended while job {job.id} runs there")

    def _check(self) -> None:
        alive: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for box in self.boxes:
            tokens[box.token] = tokens.get(box.token, 0) + 1
            if box.ended is None:
                alive[box.node] = alive.get(box.node, 0) + 1
        self.problems += [f"{node}: {count} machines at once" for node, count in alive.items() if count > 1]
        self.problems += [f"{token}: launched {count} times" for token, count in tokens.items() if count > 1]
        for box in self.boxes:
            node = self.nodes.get(box.node, Node())
            least = POLICY.pools[box.pool].boot_s + ENDED_S
            if box.ended is None and node.want == "due" and self.now - max(node.since, 1000.0 + HOSTILE_S) > least:
                self.problems.append(f"{box.id}: its node {box.node} has been due since {node.since:.0f}")
        for one in self.keeper.status().nodes:
            odd = one.slurm in ("up", "down", "invalid") or one.pool not in self.policy.pools
            if odd and one.difference == "none":
                self.problems.append(f"{one.node}: is {one.slurm} in Slurm, and no reason is named: {one}")


def _booted(box: Box, now: float) -> bool:
    return box.boots is not None and box.boots <= now


def _out(node: Node) -> bool:
    """Whether a person has to return it."""
    return node.drained and "returned" in node.reason
