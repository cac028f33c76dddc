"""What is done of a pool as a whole: nodes that jobs cannot have are given back, others come and go by the plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from policy.pool_nodes import PoolPolicy
from sluice.fleet.ahead import (
    MARGIN_S,
    Decision,
    NodeStage,
    PlannedStart,
    PoolNode,
    PoolTimes,
    decide,
    predicted_boot,
)
from sluice.fleet.state import SLURM_AGAIN_S, State
from sluice.fleet.views import HELD_REASON, POOL_REASON, JobAct, SlurmNode, SlurmView

_ROUNDS = 4  # in which gangs of several pools are found that one of these has not its part of
_RELEASE_S = 600.0  # a requeued job may complete for minutes first, as its machine is gone


class Pools:
    """All pools of the policy."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._idle: dict[str, float] = {}  # nodes that are on without a job, since when this process has seen it
        self._due: dict[str, dict[object, float]] = {}  # by pool: jobs that were to start, at first when
        self._partial: dict[str, float] = {}  # nodes launched for starts that cannot be had whole, since when

    def create_and_delete(self, view: SlurmView) -> None:
        """Nodes of dynamic pools are those of the policy, made of what it promises. One that would lose its drain is
        made again when it is returned.
        """
        for name, pool in self._state.policy.pools.items():
            missing = [
                node for node in self._state.names[name]
                if node not in view.nodes and not self._state.asked_lately("make_again", node)
            ]  # fmt: skip
            if pool.node_conf and missing:
                self._state.change(tuple(missing), "create", pool.node_conf)
        outdated: list[str] = []
        for node, seen in view.nodes.items():
            if not seen.made:
                continue
            pool_of = self._state.pool_of.get(node)
            free = seen.want == "off" and node not in self._state.by_node and not self._state.jobs_on(node)
            free = free and not self._state.may_have_machine(node, seen.pool)
            if pool_of is None:
                self._retire(node, seen, free=free)
            elif free and self._state.policy.pools[pool_of].made != seen.made and not _drained_by_others(seen):
                outdated.append(node)
        self._make_again(outdated)

    def _make_again(self, nodes: Iterable[str]) -> None:
        """One at a time, so that Slurm does not find a partition without nodes, and that other changes do not wait
        behind hundreds; none where slurm.conf has the node now.
        """
        for node in nodes:
            conf = self._state.policy.pools[self._state.pool_of[node]].node_conf
            if not conf:
                self._state.change((node,), "delete")
            elif not self._state.under_way("make_again"):
                self._state.change((node,), "make_again", conf)

    def _retire(self, node: str, seen: SlurmNode, *, free: bool) -> None:
        """The policy does not have a dynamic node any more: jobs that run on it end first, and those for which it would
        have to be launched, or launched again as Slurm has refused what has registered, start elsewhere. Slurm deletes
        none that a job or a reservation has.
        """
        reason = f"{POOL_REASON}not in the policy any more"
        if free:
            self._state.change((node,), "delete")
            return
        if not seen.drained:
            self._state.change((node,), "drain", reason)
        jobs = self._state.jobs_on(node)
        if seen.want in ("due", "up", "invalid"):
            for job in jobs:
                self._state.requeue(job)
            self._state.change((node,), "power_down_force", reason)
        elif not jobs and seen.want != "off":
            self._state.change((node,), "power_down", reason)

    def give_back(self, view: SlurmView) -> None:
        """Jobs for which a node cannot be had: all their nodes are given back, and they are requeued."""
        for node, hold in list(self._state.memory.holds.items()):
            pool_name = self._state.pool_of.get(node)
            seen = view.nodes.get(node)
            if pool_name is None or seen is None or seen.want != "up":
                continue
            if (
                hold.until is not None
                and self._state.now - hold.since < self._state.policy.pools[pool_name].give_back_s
            ):
                continue
            jobs = self._state.jobs_on(node)
            back = {node}
            for job in jobs:
                self._state.requeue(job)
                back |= {one for one in view.jobs[job].nodes if one in self._state.pool_of and self._alone(one, jobs)}
            # `power_down_force` also takes the jobs from nodes whose machine is there.
            self._state.change(tuple(sorted(back)), "power_down_force", f"{POOL_REASON}{hold.kind.replace('_', ' ')}")

    def _alone(self, node: str, jobs: Collection[int]) -> bool:
        """Whether no other jobs are on the node."""
        return all(one in jobs for one in self._state.jobs_on(node))

    def release(self, view: SlurmView) -> None:
        """Slurm lets a requeued job wait for two minutes; it may start at once."""
        for job, since in list(self._state.memory.requeued.items()):
            seen = view.jobs.get(job)
            if seen is not None and seen.pending_until:
                self._state.do(("job", "release", str(job)), JobAct(job, "release", seen.name), again=SLURM_AGAIN_S)
            elif view.at > since + _RELEASE_S:
                del self._state.memory.requeued[job]
                self._state.dirty = True

    def keep_least(self, view: SlurmView) -> None:
        """As many nodes as the policy wants always."""
        for name, pool in self._state.policy.pools.items():
            if not pool.least or self._state.closed(name) is not None:
                continue
            wants = {node: view.nodes.get(node, SlurmNode("unknown")) for node in self._state.names[name]}
            missing = pool.least - sum(one.want in ("due", "up", "on") for one in wants.values())
            off = [
                node for node, one in wants.items()
                if one.want == "off" and not one.drained and node not in self._state.by_node
            ]  # fmt: skip
            if missing > 0 and off:
                self._state.change(tuple(off[:missing]), "power_up")

    def follow_plan(self, view: SlurmView) -> None:
        """Ask for nodes so early that they are there when the plan needs them, and let go those that nobody needs."""
        self._state.foreseen = {}
        for name, decision in self._decisions(view).items():
            self._state.foreseen[name] = decision.foreseen
            if decision.ask:
                self._state.change(decision.ask, "power_up")
            if decision.let_go:
                self._state.change(decision.let_go, "power_down", f"{POOL_REASON}idle")
            self._give_back_partial(name, decision.partial, view)

    def _decisions(self, view: SlurmView) -> dict[str, Decision]:
        """Of each pool. A gang that is in several of them is asked for in none if one of them has not its part."""
        shared = _shared_gangs(view, self._state.policy.pools.values())
        torn: set[str] = set()
        for _ in range(_ROUNDS):
            found = {
                name: self._decide(name, pool, view, torn) for name, pool in self._state.policy.pools.items()
            }  # fmt: skip
            more = frozenset[str]().union(*(one.torn for one in found.values())) & shared - torn
            if not more:
                return found
            torn |= more
        return {name: self._decide(name, pool, view, shared) for name, pool in self._state.policy.pools.items()}

    def _give_back_partial(self, name: str, partial: Collection[str], view: SlurmView) -> None:
        """Machines that were launched ahead of a start, of which the others cannot be had, wait no longer for it than
        those of a job do."""
        for node in self._state.names[name]:
            if node not in partial:
                self._partial.pop(node, None)
                continue
            since = self._partial.setdefault(node, self._state.now)
            if self._state.now - since >= self._state.policy.pools[name].give_back_s:
                boots = view.nodes[node].want != "on"  # a job that comes to another one meanwhile keeps it
                reason = f"{POOL_REASON}not all nodes of a start can be had"
                self._state.change((node,), "power_down_force" if boots else "power_down", reason)

    def _decide(self, name: str, pool: PoolPolicy, view: SlurmView, torn: Collection[str]) -> Decision:
        closed = self._state.closed(name) is not None
        boot_s = predicted_boot(self._state.memory.boots.get(f"{name}|{pool.shapes[0].name}", []), pool.boot_s)
        starts = [one for one in view.starts if one.partition in ("", pool.partition)]
        starts = self._without_stale(name, starts, pool.idle_s, boot_s)
        nodes = [self._pool_node(node, view, closed=closed) for node in self._state.names[name]]
        times = PoolTimes(pool.idle_s, pool.least, pool.spare, pool.gpus, pool.cpus, pool.ahead)
        return decide(self._state.now, nodes, starts, times, boot_s, torn)

    def _without_stale(
        self, name: str, starts: Iterable[PlannedStart], idle_s: float, boot_s: float
    ) -> list[PlannedStart]:
        """Without those that are put off again and again: a start for which nodes would be there by now, and idle for
        longer than they may, is no plan any more until it is foreseen for later than a boot.
        """
        before, found = self._due.get(name, {}), []
        self._due[name] = due = dict[object, float]()
        for one in starts:
            key = one.gang or one.job
            if key and one.at <= self._state.now + boot_s + MARGIN_S:
                due[key] = min(one.at, due.get(key, one.at), before.get(key, one.at))
                if due[key] < self._state.now - idle_s:
                    continue
            found.append(one)
        return found

    def _pool_node(self, node: str, view: SlurmView, *, closed: bool) -> PoolNode:
        seen = view.nodes.get(node, SlurmNode("unknown"))
        launch = self._state.by_node.get(node)
        jobs = self._state.jobs_on(node)
        if seen.want == "on" and not jobs:
            self._idle.setdefault(node, view.at)
        else:
            self._idle.pop(node, None)
        state: NodeStage = "other"
        if seen.want == "on":
            state = "on"
        elif seen.want in ("due", "up") and node not in self._state.memory.holds:
            state = "boots"
        elif seen.want == "off" and launch is None and not seen.drained and not closed:
            state = "off"
        return PoolNode(
            node, state, self._idle.get(node), max((view.jobs[job].ends for job in jobs), default=math.inf),
            stays=seen.drained or seen.reserved, room=seen.room if jobs else 0.0,
            unused=launch is not None and not launch.used, price=launch.price if launch else 0.0,
            zone=launch.zone if launch else "",
        )  # fmt: skip

    def open_and_close(self, view: SlurmView) -> None:
        """While a pool can have no machine, or a node, Slurm plans none of its absent nodes, and jobs go elsewhere."""
        for name, nodes in self._state.names.items():
            closed = self._state.closed(name)
            seen = [(node, view.nodes[node]) for node in nodes if node in view.nodes]
            broken = {node for node, _ in seen if self._state.waits(f"{name}|{node}") is not None}
            left = {one.node for one in self._state.memory.launches.values() if one.leaves}
            ours = [
                node for node, one in seen
                if one.drained and not _drained_by_others(one) and node not in broken | left
            ]  # fmt: skip
            held = [
                node for node, one in seen
                if node in self._state.memory.holds and self._state.memory.holds[node].until is None and not one.drained
                and one.want == "off"
            ]  # fmt: skip
            for node in held:
                self._state.change((node,), "drain", f"{HELD_REASON}{self._state.memory.holds[node].text}"[:200])
            if apart := [node for node, one in seen if node in broken and one.want == "off" and not one.drained]:
                self._state.change(tuple(apart), "drain", f"{POOL_REASON}broken, asked again later")
            if closed is None:
                if ours:
                    self._state.change(tuple(ours), "undrain")
                continue
            absent = [node for node, one in seen if one.want == "off" and not one.drained and node not in held]
            if absent:
                words = closed.kind.replace("_", " ")
                self._state.change(tuple(absent), "drain", f"{POOL_REASON}{words}, asked again later")


def _shared_gangs(view: SlurmView, pools: Collection[PoolPolicy]) -> frozenset[str]:
    """Gangs with members in several pools."""
    partitions = {pool.partition for pool in pools}
    of_gang: dict[str, set[str]] = {}
    for one in view.starts:
        if one.gang and one.partition in partitions:
            of_gang.setdefault(one.gang, set()).add(one.partition)
    return frozenset(gang for gang, found in of_gang.items() if len(found) > 1)


def _drained_by_others(seen: SlurmNode) -> bool:
    """Whether a node is drained until somebody returns it."""
    return seen.drained and not seen.reason.startswith(POOL_REASON)
