"""Which nodes of a pool to ask for before their jobs are due, and which idle ones to let go.

Pure: no clock, no Slurm. The fleet's daemon and `sluice simulate` decide by this one module.

Nothing is asked for that the plan does not need: a planned start names its nodes, or says how many of the pool it
takes, of which those count that are there or come free by then, also from starts that are over by then. All nodes of a
start are asked for or none, and so are those of a gang. So a plan that changes costs at most the idle time.
For jobs that no plan foresees, the policy may have idle nodes kept, which cost what they cost.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sluice.exchange.fleet import Outlook

_PERMILLE = 900  # of the boots so far, that were no longer than predicted
_KNOWN = 5  # boots from which on the policy's own bound is not taken for the usual time
_ROUNDING = 1e-6
_TORN = ("no_room", "bound")
MARGIN_S = 10.0
"""Added to the boot: from the decision until a machine is asked for, and from its registration until Slurm sees it."""

NodeStage = Literal["off", "boots", "on", "other"]
"""`other`: it neither serves a job nor can be asked for now (drained, ending, held)."""


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """A start that is foreseen: on these nodes, or on `count` of a partition where Slurm chooses them later, of which
    it takes so many GPUs and CPUs in all.
    """

    at: float
    nodes: frozenset[str] = frozenset()
    count: int = 0
    partition: str = ""
    gpus: int = 0
    cpus: int = 0
    account: str = ""
    until: float = math.inf
    """When it is over, as far as that is foreseen: from then on its nodes serve other starts."""
    job: int = 0
    gang: str = ""
    """Which starts come together or not at all; empty: it is alone."""
    after: str = ""
    """The jobs whose ends it waits for."""

    def nodes_worth(self, times: PoolTimes) -> float:
        """What it takes of nodes, jobs of parts of one as parts; all of them where its size is not known."""
        parts = [self.gpus / times.gpus if times.gpus else 0.0, self.cpus / times.cpus if times.cpus else 0.0]
        return min(self.count, max(parts)) if any(parts) else self.count


@dataclass(frozen=True, slots=True)
class PoolNode:
    """A node of the pool."""

    name: str
    state: NodeStage
    idle_since: float | None = None
    """Of one that is on without a job."""
    ends: float = math.inf
    """When the last job that it has or waits for ends at the latest."""
    stays: bool = False
    """It is not let go: a reservation, a question of health, a person."""
    room: float = 0.0
    """The part of it that its jobs leave free, of one that has some."""
    unused: bool = False
    """No job has been there since it was launched."""
    price: float = 0.0
    zone: str = ""


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """What the policy says of a pool."""

    idle_s: float
    least: int = 0
    spare: int = 0
    gpus: int = 0
    """Of a node, as `cpus`; 0: none, or not known."""
    cpus: int = 0
    ahead: int | None = None
    """Nodes at most for starts of one account that do not name theirs."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A start of the pool and what is done for it."""

    start: PlannedStart
    outlook: Outlook


@dataclass(frozen=True, slots=True)
class Decision:
    """Nodes of one pool: those to be asked for, those to be let go, and those that were launched for starts of which
    not all nodes can be had.
    """

    ask: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    foreseen: tuple[Foreseen, ...] = ()

    @property
    def torn(self) -> frozenset[str]:
        """Gangs that do not start, as this pool has not the nodes of some of their members."""
        return frozenset(one.start.gang for one in self.foreseen if one.start.gang and one.outlook in _TORN)


def predicted_boot(boots: Sequence[float], prior_s: float) -> float:
    """Time from a request until a node is there that nine of ten boots keep to. Until five boots are known, the
    policy's bound `prior_s`: too early costs idle time, too late a job's wait.
    """
    if len(boots) < _KNOWN:
        return prior_s
    ordered = sorted(boots)
    return ordered[-(-len(ordered) * _PERMILLE // 1000) - 1]


def decide(
    now: float,
    nodes: Sequence[PoolNode],
    starts: Iterable[PlannedStart],
    times: PoolTimes,
    boot_s: float,
    torn: Collection[str] = (),
) -> Decision:
    """What to do now. `boot_s`: the predicted time from a request until a node is there; `torn`: gangs that another
    pool has not the nodes of.

    A start that is overdue for longer than nodes idle is no plan any more: its job was held, or nobody plans.
    """
    walk = _Walk(now, nodes, times)
    first, last = now - times.idle_s, now + boot_s + MARGIN_S
    foreseen: list[Foreseen] = []
    for unit in _units(_overdue(one, now) for one in starts if one.at >= first):
        outlook: Outlook = "later"
        if unit[0].at <= last:
            outlook = "no_room" if unit[0].gang in torn else walk.take(unit)
        foreseen += [Foreseen(one, outlook) for one in unit]
    walk.keep_spare()
    let_go = _let_go(now, nodes, walk.kept, times)
    partial: tuple[str, ...] = ()
    if any(one.outlook == "no_room" for one in foreseen):
        partial = _partial(nodes, {*walk.kept, *let_go})[: max(0, _there(nodes) - times.least - len(let_go))]
    return Decision(tuple(dict.fromkeys(walk.asked)), let_go, partial, tuple(foreseen))


def _overdue(start: PlannedStart, now: float) -> PlannedStart:
    """One that should have begun ends so much later."""
    return replace(start, until=start.until + now - start.at) if start.at < now else start


def _units(starts: Iterable[PlannedStart]) -> list[tuple[PlannedStart, ...]]:
    """What starts together, the first ones first; those that name their nodes before others, which do not get them."""
    units: dict[object, list[PlannedStart]] = {}
    for number, one in enumerate(starts):
        units.setdefault(one.gang or number, []).append(one)
    found = [tuple(unit) for unit in units.values()]
    return sorted(found, key=lambda unit: (not unit[0].nodes, unit[0].at))


class _Takers:
    """Starts that have nodes at a time: how many they need together, as jobs of parts of a node share it."""

    def __init__(self, times: PoolTimes) -> None:
        self._times = times
        self._worth = 0.0
        self._ends: list[tuple[float, float]] = []  # when one is over, and what it takes of nodes
        self._counts: list[tuple[int, float]] = []  # nodes of each, negative; and when it is over

    def forget(self, at: float) -> None:
        """Those that are over then."""
        while self._ends and self._ends[0][0] <= at:
            self._worth -= heapq.heappop(self._ends)[1]
        while self._counts and self._counts[0][1] <= at:
            heapq.heappop(self._counts)

    def needed(self, more: Sequence[PlannedStart]) -> int:
        """Nodes for those that are there and for `more`."""
        worth = self._worth + sum(one.nodes_worth(self._times) for one in more)
        most = max((one.count for one in more), default=0)
        return max(math.ceil(worth - _ROUNDING), most, -self._counts[0][0] if self._counts else 0)

    def add(self, more: Iterable[PlannedStart]) -> None:
        """They have nodes."""
        for one in more:
            worth = one.nodes_worth(self._times)
            self._worth += worth
            heapq.heappush(self._ends, (one.until, worth))
            heapq.heappush(self._counts, (-one.count, one.until))


class _Walk:
    """The nodes of a pool, as starts take them one after another."""

    def __init__(self, now: float, nodes: Sequence[PoolNode], times: PoolTimes) -> None:
        self.asked: list[str] = []
        self.kept: set[str] = set()
        self._now, self._times = now, times
        self._nodes = {node.name: node for node in nodes}
        self._spare = {node.name: node for node in _by_worth(nodes)}  # what no start has
        self._free = sorted(_free_from(node) for node in nodes)
        self._off = sum(node.state == "off" for node in nodes)
        self._rooms = sorted(node.room for node in nodes if node.state == "on" and node.room and not node.stays)
        self._planned = 0  # nodes that starts have which do not name theirs
        self._takers = _Takers(times)
        self._of_account: dict[str, _Takers] = {}

    def take(self, unit: Sequence[PlannedStart]) -> Outlook:
        """All nodes of a unit, or none."""
        named = frozenset[str]().union(*(one.nodes for one in unit))
        counted = [one for one in unit if one.count]
        if not self._may_have(named):
            return "no_room"
        if not counted:
            self._give([self._nodes[name] for name in named if name in self._nodes])
            return "asked"
        counted, rooms = self._without_parts(counted)
        self._takers.forget(unit[0].at)
        if self._times.ahead is not None and not self._within_bounds(counted, self._times.ahead):
            return "bound"
        more = max(0, self._takers.needed(counted) - self._planned)
        if bisect_right(self._free, unit[0].at) + self._off < more:
            return "no_room"
        self._rooms = rooms
        self._give(self._first(unit[0].at, more))
        self._planned += more
        self._takers.add(counted)
        for one in counted:
            self._of_account.setdefault(one.account, _Takers(self._times)).add([one])
        return "asked"

    def _without_parts(self, counted: Sequence[PlannedStart]) -> tuple[list[PlannedStart], list[float]]:
        """Those that need a node in addition to the ones that have jobs, and what the others leave free of these."""
        rest, rooms = [], list(self._rooms)
        for one in counted:
            worth = one.nodes_worth(self._times)
            place = bisect_left(rooms, worth - _ROUNDING)  # the fullest node that it fits on
            if one.count == 1 and worth < 1 and place < len(rooms):
                insort(rooms, rooms.pop(place) - worth)
            else:
                rest.append(one)
        return rest, rooms

    def keep_spare(self) -> None:
        """Idle nodes for what no start foresees, as many as there can be."""
        self._give(self._first(self._now, self._times.spare))

    def _may_have(self, named: Iterable[str]) -> bool:
        return not any(name in self._nodes and self._nodes[name].state == "other" for name in named)

    def _within_bounds(self, counted: Sequence[PlannedStart], most: int) -> bool:
        for account in {one.account for one in counted}:
            takers = self._of_account.setdefault(account, _Takers(self._times))
            takers.forget(counted[0].at)
            if takers.needed([one for one in counted if one.account == account]) > most:
                return False
        return True

    def _first(self, at: float, count: int) -> list[PoolNode]:
        """So many nodes, those that are there by then before those that are off."""
        if not count:
            return []
        serving = [node for node in self._spare.values() if _serves(node, at)][:count]
        off = [node for node in self._spare.values() if node.state == "off"]
        return serving + off[: count - len(serving)]

    def _give(self, nodes: Iterable[PoolNode]) -> None:
        for node in nodes:
            self.kept.add(node.name)
            if node.state == "off":
                self.asked.append(node.name)
            if self._spare.pop(node.name, None) is not None:
                self._off -= node.state == "off"
                self._free.pop(bisect_right(self._free, _free_from(node)) - 1)


def _free_from(node: PoolNode) -> float:
    """From when on a start may find the node there and free."""
    if node.state == "boots" and node.ends == math.inf:  # no job waits for it
        return -math.inf
    if node.state == "on":
        return -math.inf if node.idle_since is not None else node.ends
    return math.inf


def _serves(node: PoolNode, at: float) -> bool:
    """Whether a start then may find the node there and free."""
    return _free_from(node) <= at


def _partial(nodes: Sequence[PoolNode], kept: Collection[str]) -> tuple[str, ...]:
    """Those that are there or boot and that no job has had, and no start will."""
    waits = (node for node in nodes if node.unused and not node.stays and node.name not in kept)
    return tuple(node.name for node in waits if _free_from(node) == -math.inf)


def _let_go(now: float, nodes: Sequence[PoolNode], kept: set[str], times: PoolTimes) -> tuple[str, ...]:
    idle = [
        node.name
        for node in reversed(_by_worth(nodes))
        if node.state == "on"
        and node.idle_since is not None
        and now - node.idle_since >= times.idle_s
        and not node.stays
        and node.name not in kept
    ]
    return tuple(idle[: max(0, _there(nodes) - times.least)])


def _there(nodes: Sequence[PoolNode]) -> int:
    return sum(node.state in ("on", "boots") for node in nodes)


def _by_worth(nodes: Sequence[PoolNode]) -> list[PoolNode]:
    """Nodes to be kept first: the cheapest, and of those the ones in the zones that have most of the pool, so that what
    stays is in few zones and jobs of several nodes still fit into one.
    """
    sizes: dict[str, int] = {}
    for node in nodes:
        if node.state in ("on", "boots"):
            sizes[node.zone] = sizes.get(node.zone, 0) + 1
    return sorted(nodes, key=lambda node: (node.price, -sizes.get(node.zone, 0), node.zone))
