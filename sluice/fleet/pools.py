"""What is done of a pool as a whole: nodes that jobs cannot have are given back, others come and go by the plan."""

from __future__ import annotations

import math
from collections.abc import Collection

from policy.pool_nodes import PoolPolicy
from sluice.fleet.ahead import Decision, NodeStage, PoolNode, PoolTimes, decide, predicted_boot
from sluice.fleet.state import SLURM_AGAIN_S, State
from sluice.fleet.views import HELD_REASON, POOL_REASON, JobAct, SlurmNode, SlurmView

_RELEASE_S = 600.0  # a requeued job may complete for minutes first, as its machine is gone


class Pools:
    """All pools of the policy."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._idle: dict[str, float] = {}  # nodes that are on without a job, since when this process has seen it

    def create_and_delete(self, view: SlurmView) -> None:
        """Nodes of dynamic pools are those of the policy, made of what it promises. One that would be created again at
        once, and so lose its drain, is deleted when it is returned.
        """
        for name, pool in self._state.policy.pools.items():
            missing = [node for node in self._state.names[name] if node not in view.nodes]
            if pool.node_conf and missing:
                self._state.change(tuple(missing), "create", pool.node_conf)
        for node, seen in view.nodes.items():
            if not seen.made:
                continue
            pool_of = self._state.pool_of.get(node)
            free = seen.want == "off" and node not in self._state.by_node and not self._state.jobs_on(node)
            if pool_of is None:
                self._retire(node, seen, free=free)
            elif free and self._state.policy.pools[pool_of].made != seen.made and not _drained_by_others(seen):
                self._state.change((node,), "delete")

    def _retire(self, node: str, seen: SlurmNode, *, free: bool) -> None:
        """The policy does not have a dynamic node any more: jobs that run on it end first, and those for which it would
        have to be launched start elsewhere. Slurm deletes none that a job or a reservation has.
        """
        reason = f"{POOL_REASON}not in the policy any more"
        if free:
            self._state.change((node,), "delete")
            return
        if not seen.drained:
            self._state.change((node,), "drain", reason)
        jobs = self._state.jobs_on(node)
        if seen.want in ("due", "up"):
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
        for name, pool in self._state.policy.pools.items():
            decision = self._decide(name, pool, view)
            if decision.ask and self._state.closed(name) is None:
                self._state.change(decision.ask, "power_up")
            if decision.let_go:
                self._state.change(decision.let_go, "power_down", f"{POOL_REASON}idle")

    def _decide(self, name: str, pool: PoolPolicy, view: SlurmView) -> Decision:
        starts = [one for one in view.starts if one.partition in ("", pool.partition)]
        boots = self._state.memory.boots.get(f"{name}|{pool.shapes[0].name}", [])
        nodes = [self._pool_node(node, view) for node in self._state.names[name]]
        times = PoolTimes(pool.idle_s, pool.least, pool.spare, pool.gpus, pool.cpus, pool.ahead)
        return decide(self._state.now, nodes, starts, times, predicted_boot(boots, pool.boot_s))

    def _pool_node(self, node: str, view: SlurmView) -> PoolNode:
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
        elif seen.want in ("due", "up"):
            state = "boots"
        elif seen.want == "off" and launch is None and not seen.drained:
            state = "off"
        return PoolNode(
            node, state, self._idle.get(node), max((view.jobs[job].ends for job in jobs), default=math.inf),
            stays=seen.drained or seen.reserved, price=launch.price if launch else 0.0,
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


def _drained_by_others(seen: SlurmNode) -> bool:
    """Whether a node is drained until somebody returns it."""
    return seen.drained and not seen.reason.startswith(POOL_REASON)
