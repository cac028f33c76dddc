"""What people see of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from copy import deepcopy

from policy.pool_nodes import PoolPolicy
from sluice.base.hostlist import fold
from sluice.exchange.fleet import DIFFERENCES, AheadStatus, Difference, FleetStatus, NodeStatus, PoolStatus, Shortage
from sluice.exchange.pool_costs import PoolCosts
from sluice.fleet.journal import Launch
from sluice.fleet.state import FRESH_S, State, pool_named
from sluice.fleet.views import POOL_REASON, SlurmNode

_MOST_AHEAD = 1000


class Shown:
    """The fleet as it is published."""

    def __init__(self, state: State, host: str) -> None:
        self._state = state
        self._host = host

    def costs(self) -> dict[str, PoolCosts]:
        """Of all machines until now, by pool and day."""
        found = deepcopy(self._state.memory.costs)
        for launch in self._state.memory.launches.values():
            self._state.book(found, launch)
        return found

    def status(self) -> FleetStatus:
        """All of it."""
        view = self._state.view
        leaving = [] if view is None else [node for node, seen in view.nodes.items() if seen.made]
        names = dict.fromkeys([*self._state.pool_of, *self._state.by_node, *leaving])
        nodes = [self._node_status(node) for node in names]
        return FleetStatus(
            at=self._state.now,
            host=self._host,
            slurm_at=None if view is None else view.at,
            pools={name: self._pool_status(name, pool, nodes) for name, pool in self._state.pools.items()},
            nodes=nodes,
            history=list(self._state.memory.history),
            ahead=self._ahead(),
        )

    def _ahead(self) -> list[AheadStatus]:
        """Of jobs that wait, the first ones of each account, so that many of one hide none of another."""
        account_of = {  # tasks of one job that start together are one
            AheadStatus(
                one.start.job, name, one.start.at, one.start.count or len(one.start.nodes), one.outlook,
                one.start.after, bool(one.start.gang),
            ): one.start.account
            for name, foreseen in self._state.foreseen.items()
            for one in foreseen
            if one.start.job and (one.start.count or self._has_a_node(name, one.start.nodes))
        }  # fmt: skip
        places: Counter[str] = Counter()
        found: list[tuple[int, float, AheadStatus]] = []
        for one, account in sorted(account_of.items(), key=lambda item: item[0].at):
            places[account] += 1
            found.append((places[account], one.at, one))
        found.sort(key=lambda item: item[:2])
        return [one for *_, one in found[:_MOST_AHEAD]]

    def _has_a_node(self, pool: str, nodes: Iterable[str]) -> bool:
        return any(self._state.pool_of.get(node) == pool for node in nodes)

    def _node_status(self, node: str) -> NodeStatus:
        seen = (
            SlurmNode("unknown") if self._state.view is None else self._state.view.nodes.get(node, SlurmNode("unknown"))
        )
        launch = self._state.by_node.get(node)
        difference, text, again = self._difference(node, seen, launch)
        pool = pool_named(launch.pool) if launch is not None else self._state.pool_of.get(node, seen.pool)
        jobs = tuple(sorted(self._state.jobs_on(node)))
        if launch is None:
            hold = self._state.memory.holds.get(node)
            since = None if hold is None else hold.since
            return NodeStatus(
                node, pool, seen.want, difference=difference, text=text, again=again, since=since, jobs=jobs
            )
        return NodeStatus(
            node, pool, seen.want, launch.stage, launch.machine, launch.shape, launch.zone, launch.since, difference,
            text, again, jobs,
        )  # fmt: skip

    def _difference(self, node: str, seen: SlurmNode, launch: Launch | None) -> tuple[Difference, str, float | None]:
        """Its name, the words, and when it is tried again."""
        hold = self._state.memory.holds.get(node)
        if self._state.view is None or self._state.now - self._state.view.at > FRESH_S:
            return "slurm_silent", "", None
        if node not in self._state.pool_of and (launch is None or launch.stage != "terminating"):
            return "no_pool", self._state.denied.get(node, ""), None
        if launch is not None:
            return self._difference_of_launch(launch, seen)
        if hold is not None:
            return hold.kind, hold.text, hold.until
        if seen.want == "unknown":
            return "not_in_slurm", self._state.denied.get(node, ""), None
        if seen.want == "down":
            return ("down" if seen.by_slurm else "down_by_operator"), seen.reason, None
        pool = self._state.pool_of[node]
        lists = self._state.lists.get(pool)
        if lists is not None and any(lists.known[one].node == node for one in lists.odd if one in lists.known):
            return "unknown_machine", "", None
        if seen.want in ("due", "up", "on"):
            if self._state.searched(pool):
                return "searched", "", None
            if lists is not None and lists.suspect:
                return "empty_list", "", None
            pause = self._state.waits(pool)
            if pause is not None:
                return pause.kind, pause.text, pause.until
            return ("no_machine" if seen.want == "on" else "boots"), "", None
        broken = self._state.waits(f"{pool}|{node}")
        if broken is not None:
            return broken.kind, broken.text, broken.until
        closed = self._state.closed(pool)
        if seen.drained and seen.reason.startswith(POOL_REASON) and closed is not None:
            return "pool_closed", closed.text, closed.until
        return "none", "", None

    def _difference_of_launch(self, launch: Launch, seen: SlurmNode) -> tuple[Difference, str, float | None]:
        if launch.stage == "terminating":
            return ("ending" if launch.why == "not_wanted" else launch.why), launch.text, None
        if launch.stage == "asked":
            if launch.refused is not None:
                return launch.refused, launch.text, None
            return ("boots" if launch.sent <= launch.asked else "unanswered"), launch.text, None
        if launch.notice:
            return "notice", launch.notice, None
        if launch.at_risk:
            return "at_risk", launch.at_risk, None
        if launch.stage == "launched":
            return "boots", "", None
        return ("none" if seen.want == "on" else "down"), "", None

    def _pool_status(self, name: str, pool: PoolPolicy, nodes: list[NodeStatus]) -> PoolStatus:
        mine = [one for one in nodes if one.pool == name]
        launches = [one for one in self._state.memory.launches.values() if one.pool == name]
        left = name in self._state.left
        closed = None if left else self._state.closed(name)
        boots = sorted(
            boot for key, times in self._state.memory.boots.items() if key.split("|")[0] == name for boot in times
        )
        held = [one for one in mine if one.node in self._state.memory.holds]
        none_since = [
            self._state.memory.holds[one.node].since for one in held if one.difference in ("no_capacity", "quota")
        ]
        if closed is not None and closed.kind in ("no_capacity", "quota"):
            none_since.append(closed.since)
        counts = self._state.memory.counts.get(name, {})
        return PoolStatus(
            driver=pool.driver,
            nodes=pool.nodes,
            most=0 if left else len(self._state.names[name]),
            least=0 if left else pool.least,
            partition=pool.partition,
            on=sum(one.stage == "registered" for one in launches),
            launching=sum(one.stage in ("asked", "launched") for one in launches),
            ending=sum(one.stage == "terminating" for one in launches),
            held=len(held),
            cost_hour=round(sum(one.price for one in launches if one.machine), 4),
            closed_until=None if closed is None else closed.until,
            closed_for="none" if closed is None else closed.kind,
            without_capacity_since=min(none_since, default=None),
            boot_s=boots[len(boots) // 2] if boots else None,
            problem=self._problem(name) or _unpriced(launches),
            launches=counts.get("launches", 0),
            failures={kind: counts[kind] for kind in DIFFERENCES if kind in counts},
            oldest_wait_since=min(
                (self._state.wanted[one.node] for one in mine if one.node in self._state.wanted), default=None
            ),
            shortages=self._shortages(name, pool),
        )

    def _problem(self, name: str) -> str:
        """What keeps a pool from being asked, and that the policy does not have it any more."""
        lists, pause = self._state.lists.get(name), self._state.waits(name)
        problem = (lists.failed if lists is not None else "") or ("" if pause is None else pause.text)
        if name not in self._state.left:
            return problem
        what = "pool" if pool_named(name) == name else "driver or settings"
        words = f"{what} not in the policy any more, asked for machines until there is none"
        return f"{words}{problem and ': '}{problem}"

    def _shortages(self, name: str, pool: PoolPolicy) -> list[Shortage]:
        """What is remembered until a launch of the shape in the zone comes to something."""
        known = self._state.memory.back_offs
        return [
            Shortage(shape.name, zone, one.kind, one.text, one.since, one.times, one.until)
            for shape in pool.shapes
            for zone in pool.zones
            if (one := known.get(f"{name}|{shape.name}|{zone}")) is not None
        ]


def _unpriced(launches: Collection[Launch]) -> str:
    nodes = [one.node for one in launches if one.machine and one.unpriced]
    return f"cost_hour is without {fold(nodes)}: the policy has no price of their shape" if nodes else ""
