"""What a history of jobs would have cost and waited with the policy's pools: three ways to have the same nodes.

`always-on`: all nodes run all the time. `power-saving`: Slurm's own, a node boots when a job is given to it and goes
after SuspendTime without one. `fleet`: sluice.fleet.ahead decides, as in fleetd. All else is the same: the core's
backfill plans at each arrival, end and boot, nodes that are there go first, and a job that is given a node that is not
there waits for it. A machine is paid from when it is asked for until it is let go.

While a shape of a pool is out of stock in a zone, nothing of it is launched there. `fleet` asks for the next zone and
shape at once; where all are out, it asks again for `give_back_within`, then gives all nodes of the job back, which
waits again, and the pool's absent nodes are no choice for a back-off that doubles. Slurm itself asks once, for the
first shape in the first zone: after `boot_within` the node is DOWN, taken to be until there is stock again, and its job
waits again.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from policy.pools import Pool
from sluice.core.backfill import Backfill, PendingJob, RunningJob, Start
from sluice.core.cluster import Cluster, NodeState
from sluice.core.placement import Policy, Verdict, commit, explain, release
from sluice.fleet.ahead import MARGIN_S, Decision, NodeStage, PlannedStart, PoolNode, PoolTimes, decide, predicted_boot
from sluice.simulate.cluster_file import ClusterNode
from sluice.simulate.metrics import HOUR, mean, percentile
from sluice.simulate.simulation import Assumptions, build_cluster, estimate, trace_requests
from sluice.simulate.traces import MICROSECOND, Trace

Way = Literal["always-on", "power-saving", "fleet"]
WAYS: tuple[Way, ...] = ("always-on", "power-saving", "fleet")
DEPTH = 50
"""Jobs of the queue that are planned, the first in order of submission."""
OFF_S = 30
"""For which Slurm starts nothing on a node that it called off (SuspendTimeout)."""
_DOUBLED = 3  # times that a back-off is doubled, as in fleetd
_BOOTS = 20  # of which the next one is predicted
_SPREAD = 0.2  # a boot takes up to so much longer or shorter than usual


@dataclass(frozen=True)
class Booting:
    """How long a machine takes from when it is asked for until its node registers, in seconds."""

    usual_s: float = 180.0
    seed: int = 1


@dataclass(frozen=True)
class StockOut:
    """A time of the history, in seconds, in which the provider launches nothing for a pool: of one shape or all of
    them, in one zone or in all.
    """

    pool: str
    begin: float
    end: float
    shape: str = ""
    zone: str = ""


@dataclass(frozen=True)
class Relations:
    """Which jobs of a history wait for others, by their numbers in it; histories themselves do not say."""

    after: Mapping[int, int] = field(default_factory=dict)
    """Of a job, an earlier one whose end it waits for."""
    gangs: Mapping[int, int] = field(default_factory=dict)
    """Of a job, its gang, from 1 on: neighbours that are submitted at once start together."""


@dataclass(frozen=True)
class Figures:
    """What came of a way to have the nodes. Costs are of the pools' nodes alone."""

    way: Way
    jobs: int
    rejected: int
    cost: float
    node_hours: float
    busy_percent: float
    """Of the hours that are paid, those in which a node had a job."""
    wait_mean_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    boot_wait_mean_s: float
    """The part of the wait for which the job had its nodes and they booted."""
    boots: int
    hidden_percent: float
    """Of the time that nodes booted which had a job then, what no job waited for."""
    foreseen_boots: int
    """Those for a job that the plan knew of for at least the boot before it was given its nodes."""
    foreseen_hidden_percent: float
    wasted_boots: int
    """Nodes that were let go before any job came."""
    given_back: int
    """How often a job was given a node that could not be had, and waited again."""


@dataclass
class _Node:
    pool: int  # -1: not of a pool
    price: float = 0.0
    zone: str = ""
    state: Literal["off", "boots", "on"] = "off"
    jobs: int = 0
    idle_since: float = 0.0
    asked: float | None = None
    ready: float = 0.0
    locked: float = -math.inf  # it is ending: nothing starts there until then
    busy_since: float = 0.0
    used: bool = False  # a job came since the boot
    ends: dict[int, float] = field(default_factory=dict)  # its jobs, when each ends at the latest
    parts: dict[int, float] = field(default_factory=dict)  # ... and what each takes of it


@dataclass(frozen=True)
class _Place:
    """A shape in a zone."""

    zone: str
    price: float
    outs: tuple[StockOut, ...]

    def out_until(self, now: float) -> float:
        return max((one.end for one in self.outs if one.begin <= now < one.end), default=now)


@dataclass
class _Pool:
    name: str
    times: PoolTimes
    prior_s: float
    nodes: list[int]
    places: list[_Place]  # in order of preference
    patience_s: float  # for which a job keeps its nodes where one of them cannot be had
    back_off_s: float
    boots: list[float] = field(default_factory=list)
    refused: int = 0  # in a row
    closed: float = -math.inf  # its absent nodes are no choice until then


@dataclass
class _Sums:
    cost: float = 0.0
    paid_s: float = 0.0
    busy_s: float = 0.0
    boot_s: float = 0.0
    waited_s: float = 0.0
    boots: int = 0
    foreseen: int = 0
    foreseen_boot_s: float = 0.0
    foreseen_waited_s: float = 0.0
    wasted: int = 0
    given_back: int = 0


def fixed_nodes(nodes: Sequence[ClusterNode], pools: dict[str, Pool]) -> list[ClusterNode]:
    """Those of a cluster that are no pool's."""
    names = {name for pool in pools.values() for name in pool.names}
    return [node for node in nodes if node.name not in names]


def pool_nodes(pools: dict[str, Pool]) -> list[ClusterNode]:
    """The nodes of pools as a cluster has them; a shape's price is the first one's."""
    found = []
    for pool in pools.values():
        gpus = sum(pool.shapes[0].gpus.values())
        cpus, memory = min(one.cpus for one in pool.shapes), min(one.memory for one in pool.shapes)
        model = next(iter(pool.shapes[0].gpus), "")
        found += [ClusterNode(name, gpus, model, cpus * 1000, memory, pool.shapes[0].gpu_memory) for name in pool.names]
    return found


def _places(pool: Pool, outs: Sequence[StockOut]) -> list[_Place]:
    return [
        _Place(zone, shape.price, tuple(
            one for one in outs if one.shape in ("", shape.name) and one.zone in ("", zone)
        ))
        for shape in pool.shapes
        for zone in pool.zones or [""]
    ]  # fmt: skip


class Replay:
    """A history on nodes that are always there and on pools, in one way."""

    def __init__(
        self,
        trace: Trace,
        fixed: Sequence[ClusterNode],
        pools: dict[str, Pool],
        way: Way,
        booting: Booting,
        assumed: Assumptions | None = None,
        stock_outs: Sequence[StockOut] = (),
        relations: Relations | None = None,
    ) -> None:
        nodes = [*fixed, *pool_nodes(pools)]
        assumed = assumed or Assumptions()
        self._way = way
        self._booting = booting
        self._chance = random.Random(booting.seed)  # noqa: S311 - a model, no secret
        self._cluster: Cluster = build_cluster(nodes, len(trace.jobs), milli=trace.share_unit == "milli")
        self._requests, self._numbers = trace_requests(trace, nodes, self._cluster)
        verdicts = [explain(self._cluster, Policy.FIRST_FIT, request).verdict for request in self._requests]
        self._never = {number for number, verdict in enumerate(verdicts) if verdict == Verdict.NEVER}
        self._read_jobs(trace, assumed)
        self._nodes = [_Node(-1, state="on") for _ in fixed]
        self._pools: list[_Pool] = []
        for name, pool in pools.items():
            self._add(name, pool, [one for one in stock_outs if one.pool == name])
        self._backfill = Backfill(len(nodes), max_jobs=DEPTH)
        self._queue: list[int] = []
        self._running: dict[int, tuple[int, float]] = {}  # by job: its allocation, and when it ends at the latest
        self._due: list[tuple[float, int, int]] = []  # when, what (0 arrival, 1 end, 2 look, 3 given back), which job
        self._looks: set[float] = set()
        self._planned: dict[int, Start] = {}
        self._foreseen: dict[int, float] = {}  # jobs that were planned for a later start, since when
        self._starts: dict[int, float] = {}
        self._given: dict[int, float] = {}
        self._relations = relations or Relations()
        self._held: dict[int, int] = {}  # jobs that wait for the end of others
        self._ended: set[int] = set()
        self._eligible: dict[int, float] = {}
        self._lacking: dict[int, list[int]] = {}  # by job that holds nodes: those that cannot be had
        self._rejected = 0
        self._sums = _Sums()
        self.now = 0.0

    def _read_jobs(self, trace: Trace, assumed: Assumptions) -> None:
        """What is asked of each job again and again; times in seconds."""
        chance = random.Random(assumed.seed)  # noqa: S311 - noise, not a secret
        self._submit = [job.submit / MICROSECOND for job in trace.jobs]
        self._gpus = [job.gpus for job in trace.jobs]
        self._cpus = [job.cpus_milli // 1000 for job in trace.jobs]
        self._run = [job.run / MICROSECOND for job in trace.jobs]
        self._limit = [max(1, math.ceil(estimate(job, assumed, chance) / MICROSECOND)) for job in trace.jobs]

    def _add(self, name: str, pool: Pool, outs: list[StockOut]) -> None:
        at = range(len(self._nodes), len(self._nodes) + len(pool.names))
        first = pool.shapes[0]
        times = PoolTimes(pool.idle, pool.least, pool.spare, sum(first.gpus.values()), first.cpus, pool.ahead)
        patience = pool.give_back_within if self._way == "fleet" else pool.boot_within
        places = _places(pool, outs)[: None if self._way == "fleet" else 1]
        self._pools.append(_Pool(name, times, pool.boot_within, list(at), places, patience, pool.back_off))
        self._nodes += [_Node(len(self._pools) - 1, pool.shapes[0].price) for _ in at]

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Figures:
        """All of it."""
        for job, at in enumerate(self._submit):
            self._at(at, 0, job)
        for pool in self._pools:
            for node in pool.nodes if self._way == "always-on" else pool.nodes[: pool.times.least]:
                self._nodes[node].state = "on"
        ended = 0
        while len(self._starts) + self._rejected < len(self._submit) or self._running:
            self.now = self._due[0][0]
            changed = self._boot() or self._unlock()
            while self._due and self._due[0][0] <= self.now:
                _, what, job = heapq.heappop(self._due)
                if what == 0 and self._numbers[job] in self._never:
                    self._rejected += 1
                elif what == 0:
                    self._arrive(job)
                elif what == 1:
                    ended += 1
                    self._end(job)
                elif what == 3:
                    self._give_back(job)
                changed = changed or what != 2
            self._looks.discard(self.now)
            if changed:
                self._plan()
            self._decide()
            progress(ended)
        return self._figures()

    def _arrive(self, job: int) -> None:
        before = self._relations.after.get(job)
        if before is not None and before not in self._ended and self._numbers[before] not in self._never:
            self._held[job] = before
            return
        self._eligible[job] = self.now
        bisect.insort(self._queue, job, key=lambda one: (self._submit[one], one))

    def _at(self, when: float, what: int, job: int = 0) -> None:
        heapq.heappush(self._due, (when, what, job))

    def _look_at(self, when: float) -> None:
        if when > self.now and when not in self._looks and when < math.inf:
            self._looks.add(when)
            self._at(when, 2)

    # ---- nodes ----

    def _place(self, index: int) -> tuple[float, _Place]:
        """Where the node is launched first, and when there is stock; now: there is."""
        places = self._pools[self._nodes[index].pool].places
        return min(((one.out_until(self.now), one) for one in places), key=lambda found: found[0])

    def _out_until(self, index: int) -> float:
        return self._place(index)[0]

    def _ask(self, index: int) -> None:
        node = self._nodes[index]
        until, place = self._place(index)
        node.price, node.zone = place.price, place.zone
        spread = self._chance.uniform(1 - _SPREAD, 1 + _SPREAD)
        node.state, node.asked, node.used = "boots", until, False
        node.ready = node.asked + self._booting.usual_s * spread
        self._pools[node.pool].refused = 0
        self._sums.boots += 1
        self._look_at(node.ready)

    def _boot(self) -> bool:
        booted = [node for node in self._nodes if node.state == "boots" and node.ready <= self.now]
        for node in booted:
            node.state, node.idle_since = "on", self.now
            pool = self._pools[node.pool]
            pool.boots = [*pool.boots, node.ready - (node.asked or 0.0)][-_BOOTS:]
        return bool(booted)

    def _unlock(self) -> bool:
        """Nodes that have ended may be given again."""
        ended = [index for index, node in enumerate(self._nodes) if -math.inf < node.locked <= self.now]
        for index in ended:
            self._nodes[index].locked = -math.inf
            self._cluster.set_state(index, NodeState.UP)
        return bool(ended)

    def _off(self, index: int) -> None:
        node = self._nodes[index]
        node.state = "off"
        self._lock(index, max(self.now + OFF_S, self._pools[node.pool].closed))
        self._pay(node)
        self._sums.wasted += not node.used

    def _lock(self, index: int, until: float) -> None:
        """Nothing starts there before."""
        if until <= self.now:
            return
        node = self._nodes[index]
        node.locked = max(node.locked, until)
        self._cluster.set_state(index, NodeState.DOWN)
        self._look_at(node.locked)

    def _pay(self, node: _Node) -> None:
        paid = max(0.0, self.now - (node.asked or 0.0))  # one that there was no stock for is asked for later
        self._sums.paid_s += paid
        self._sums.cost += paid / HOUR * node.price

    # ---- jobs ----

    def _plan(self) -> None:
        """Start what can start now, and plan the rest; reservations of the last plan are held, as the planner's are."""
        self._order()
        planned: dict[int, Start] = {}
        first = self._first()
        now = math.floor(self.now)
        running = [RunningJob(one, max(now + 1, math.ceil(end))) for one, end in self._running.values()]
        pending = [
            PendingJob(
                self._requests[self._numbers[job]], self._limit[job], self._relations.gangs.get(job, 0),
                held=self._planned.get(job),
            )
            for job in first
        ]  # fmt: skip
        for job, start in zip(first, self._backfill.plan(self._cluster, now, running, pending), strict=True):
            if start is None:
                continue  # beyond the core's horizon
            if start.start_s <= now:
                self._queue.remove(job)
                self._start(job, start)
            else:
                planned[job] = start
                self._foreseen.setdefault(job, self.now)
        self._planned = planned

    def _first(self) -> list[int]:
        """As many jobs as are planned; no part of a gang."""
        found = self._queue[:DEPTH]
        gang = self._relations.gangs.get(self._queue[DEPTH]) if len(self._queue) > DEPTH else None
        while gang is not None and found and self._relations.gangs.get(found[-1]) == gang:
            found.pop()
        return found

    def _order(self) -> None:
        """Nodes that are there go first, then those that boot."""
        rank = {"on": 0, "boots": 1, "off": 2}
        ordered = sorted(range(len(self._nodes)), key=lambda index: (rank[self._nodes[index].state], index))
        places = [0] * len(ordered)
        for number, index in enumerate(ordered):
            places[index] = number
        self._cluster.set_order(places)

    def _start(self, job: int, start: Start) -> None:
        allocation = commit(self._cluster, start.parts)
        nodes = [part.node for part in start.parts]
        lacking = [index for index in nodes if self._nodes[index].state == "off" and self._is_refused(index)]
        for index in nodes:
            if self._nodes[index].state == "off" and index not in lacking:
                self._ask(index)
        if lacking:
            self._hold(job, allocation, nodes, lacking)
            return
        for index in nodes:
            node = self._nodes[index]
            if not node.used and node.asked is not None:
                self._first_job(node, node.ready - node.asked, self._foreseen.get(job, self.now))
            node.used = True
            if not node.jobs:
                node.busy_since = self.now
        ready = max([self.now, *(self._nodes[index].ready for index in nodes)])
        self._given[job], self._starts[job] = self.now, ready
        self._take(job, allocation, nodes, ready + self._limit[job])
        self._at(ready + self._run[job], 1, job)

    def _take(self, job: int, allocation: int, nodes: list[int], end: float) -> None:
        """The job has the nodes, until `end` at the latest."""
        for index in nodes:
            self._nodes[index].jobs += 1
            self._nodes[index].ends[job] = end
            self._nodes[index].parts[job] = self._part(job, index, len(nodes))
        self._running[job] = allocation, end

    def _part(self, job: int, index: int, nodes: int) -> float:
        """What a job of so many nodes takes of one, by its GPUs."""
        gpus = self._pools[self._nodes[index].pool].times.gpus
        return min(1.0, self._gpus[job] / nodes / gpus) if gpus else 1.0

    def _is_refused(self, index: int) -> bool:
        """Whether a job that is given the node now does not get it."""
        until = self._out_until(index)
        patience = self._pools[self._nodes[index].pool].patience_s if self._way == "fleet" else 0.0
        return until > self.now + patience

    def _hold(self, job: int, allocation: int, nodes: list[int], lacking: list[int]) -> None:
        """A job keeps its nodes for a while, though some of them cannot be had."""
        end = self.now + max(self._pools[self._nodes[index].pool].patience_s for index in lacking)
        self._take(job, allocation, nodes, end)
        self._lacking[job] = lacking
        self._at(end, 3, job)

    def _give_back(self, job: int) -> None:
        """... and waits again. The pools that had nothing are no choice for a while."""
        release(self._cluster, self._running.pop(job)[0])
        self._sums.given_back += 1
        for pool in {self._nodes[index].pool for index in self._lacking[job]}:
            self._close(self._pools[pool])
        for index, node in enumerate(self._nodes):
            if node.ends.pop(job, None) is None:
                continue
            del node.parts[job]
            node.jobs -= 1
            if index in self._lacking[job] and self._way != "fleet":
                self._lock(index, self._out_until(index))
            elif not node.jobs and node.state != "off":
                node.idle_since = self.now
                if self._way == "fleet" and node.pool >= 0:
                    self._off(index)
        del self._lacking[job]
        bisect.insort(self._queue, job, key=lambda one: (self._submit[one], one))

    def _close(self, pool: _Pool) -> None:
        if self._way != "fleet":
            return
        pool.closed = self.now + pool.back_off_s * 2 ** min(pool.refused, _DOUBLED)
        pool.refused += 1
        for index in pool.nodes:
            if self._nodes[index].state == "off":
                self._lock(index, pool.closed)

    def _first_job(self, node: _Node, boot: float, foreseen: float) -> None:
        """A job comes to a node that was asked for; the plan has known of it since `foreseen`."""
        waited = min(boot, max(0.0, node.ready - self.now))
        self._sums.waited_s += waited
        self._sums.boot_s += boot
        if self.now - foreseen >= boot:
            self._sums.foreseen += 1
            self._sums.foreseen_boot_s += boot
            self._sums.foreseen_waited_s += waited

    def _end(self, job: int) -> None:
        release(self._cluster, self._running.pop(job)[0])
        self._ended.add(job)
        for next_ in [one for one, before in self._held.items() if before == job]:
            del self._held[next_]
            self._arrive(next_)
        for node in self._nodes:
            if node.ends.pop(job, None) is not None:
                del node.parts[job]
                node.jobs -= 1
                if not node.jobs:
                    node.idle_since = self.now
                    self._sums.busy_s += (self.now - node.busy_since) if node.pool >= 0 else 0.0

    # ---- what is asked for and let go ----

    def _decide(self) -> None:
        if self._way == "always-on":
            return
        starts = [
            PlannedStart(
                start.start_s, frozenset(str(part.node) for part in start.parts),
                until=start.start_s + self._limit[job],
            )
            for job, start in self._planned.items()
        ]  # fmt: skip
        starts += self._held_starts()
        for pool in self._pools:
            decision = self._decision(pool, starts)
            for index in map(int, decision.ask):
                if (until := self._out_until(index)) > self.now:
                    self._look_at(until)
                else:
                    self._ask(index)
            for name in decision.let_go:
                self._off(int(name))
            for index in pool.nodes:
                node = self._nodes[index]
                if node.state == "on" and not node.jobs:
                    self._look_at(node.idle_since + pool.times.idle_s)

    def _held_starts(self) -> list[PlannedStart]:
        """Of jobs that depend on others, as far as their ends are known, in the first pool."""
        ends = {job: end for job, (_, end) in self._running.items()}
        ends |= {job: start.start_s + self._limit[job] for job, start in self._planned.items()}
        found = []
        for job in sorted(self._held):  # each waits for an earlier one
            at = ends.get(self._held[job])
            if at is None:
                continue
            ends[job] = at + self._limit[job]
            self._foreseen.setdefault(job, self.now)
            request, pool = self._requests[self._numbers[job]], self._pools[0]
            gpus = self._gpus[job]
            count = max(request.nodes_min, -(-gpus // pool.times.gpus) if pool.times.gpus else 1, 1)
            cpus = max(1, self._cpus[job])
            found.append(PlannedStart(at, frozenset(), count, pool.name, gpus, cpus, until=ends[job], job=job))
        return found

    def _decision(self, pool: _Pool, starts: list[PlannedStart]) -> Decision:
        nodes = [self._pool_node(index) for index in pool.nodes]
        if self._way == "power-saving":  # Slurm has no plan for nodes that are off
            return decide(self.now, nodes, (), replace(pool.times, spare=0), 0.0)
        boot = predicted_boot(pool.boots, pool.prior_s)
        starts = [one for one in starts if one.partition in ("", pool.name)]
        soon = [start.at - boot - MARGIN_S for start in starts if start.at - boot - MARGIN_S > self.now]
        self._look_at(min(soon, default=math.inf))
        return decide(self.now, nodes, starts, pool.times, boot)

    def _pool_node(self, index: int) -> PoolNode:
        node = self._nodes[index]
        idle = node.idle_since if node.state == "on" and not node.jobs else None
        state: NodeStage = "other" if node.locked > self.now else node.state
        room = max(0.0, 1 - sum(node.parts.values())) if node.parts else 0.0
        ends = max(node.ends.values(), default=math.inf)
        return PoolNode(str(index), state, idle, ends, room=room, price=node.price, zone=node.zone)

    def _figures(self) -> Figures:
        for node in self._nodes:
            if node.pool >= 0 and node.state != "off":
                self._pay(node)
        sums = self._sums
        waits = sorted(start - self._eligible[job] for job, start in self._starts.items())
        return Figures(
            way=self._way,
            jobs=len(self._starts),
            rejected=self._rejected,
            cost=sums.cost,
            node_hours=sums.paid_s / HOUR,
            busy_percent=_percent(sums.busy_s, sums.paid_s),
            wait_mean_s=mean(waits),
            wait_p50_s=percentile(waits, 50),
            wait_p95_s=percentile(waits, 95),
            wait_p99_s=percentile(waits, 99),
            boot_wait_mean_s=mean([start - self._given[job] for job, start in self._starts.items()]),
            boots=sums.boots,
            hidden_percent=_percent(sums.boot_s - sums.waited_s, sums.boot_s),
            foreseen_boots=sums.foreseen,
            foreseen_hidden_percent=_percent(sums.foreseen_boot_s - sums.foreseen_waited_s, sums.foreseen_boot_s),
            wasted_boots=sums.wasted,
            given_back=sums.given_back,
        )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
