"""Which nodes of a pool to ask for before their jobs are due, and which idle ones to let go.

Pure: no clock, no Slurm. The fleet's daemon and `sluice simulate` decide by this one module.

Nothing is asked for that the plan does not need: a planned start names its nodes, or says how many of the pool it
takes, of which those count that are there or come free by then. So a plan that changes costs at most the idle time.
For jobs that no plan foresees, the policy may have idle nodes kept, which cost what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

_PERMILLE = 900  # of the boots so far, that were no longer than predicted
_KNOWN = 5  # boots from which on the policy's own bound is not taken for the usual time
_ROUNDING = 1e-6
MARGIN_S = 10.0
"""Added to the boot: from the decision until a machine is asked for, and from its registration until Slurm sees it."""

NodeStage = Literal["off", "boots", "on", "other"]
"""`other`: it neither serves a job nor can be asked for now (drained, ending)."""


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """A start that the plan has: on these nodes, or on `count` of a partition where Slurm chooses them later, of which
    it takes so many GPUs and CPUs in all.
    """

    at: float
    nodes: frozenset[str] = frozenset()
    count: int = 0
    partition: str = ""
    gpus: int = 0
    cpus: int = 0
    account: str = ""

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
class Decision:
    """Nodes of one pool: those to be asked for, those to be let go."""

    ask: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()


def predicted_boot(boots: Sequence[float], prior_s: float) -> float:
    """Time from a request until a node is there that nine of ten boots keep to. Until five boots are known, the
    policy's bound `prior_s`: too early costs idle time, too late a job's wait.
    """
    if len(boots) < _KNOWN:
        return prior_s
    ordered = sorted(boots)
    return ordered[-(-len(ordered) * _PERMILLE // 1000) - 1]


def decide(
    now: float, nodes: Sequence[PoolNode], starts: Iterable[PlannedStart], times: PoolTimes, boot_s: float
) -> Decision:
    """What to do now. `boot_s`: the predicted time from a request until a node is there.

    A start that is overdue for longer than nodes idle is no plan any more: its job was held, or nobody plans.
    """
    first, last = now - times.idle_s, now + boot_s + MARGIN_S
    due = sorted((one for one in starts if first <= one.at <= last), key=lambda one: one.at)
    wanted = set().union(*(one.nodes for one in due))
    ask = [node.name for node in nodes if node.state == "off" and node.name in wanted]
    spare = [node for node in _by_worth(nodes) if node.name not in wanted]
    kept = set(wanted)
    # After the plan's starts, one that is always due: the spare nodes.
    for at, count in [*_counts(_bounded(due, times), times), (now, times.spare)]:
        if not count:
            continue
        if not any(node.state == "off" or _serves(node, now) for node in spare):
            break  # nothing is left to ask for or to keep, however many jobs wait
        served = [node for node in spare if _serves(node, at)][:count]
        lacking = [node for node in spare if node.state == "off"][: count - len(served)]
        kept.update(node.name for node in served)
        ask += [node.name for node in lacking]
        taken = {node.name for node in (*served, *lacking)}
        spare = [node for node in spare if node.name not in taken]
    return Decision(tuple(ask), _let_go(now, nodes, kept, times))


def _bounded(due: Iterable[PlannedStart], times: PoolTimes) -> Iterator[PlannedStart]:
    """The same, of each account as much as the policy allows: the first ones, the last of them perhaps in part."""
    taken: dict[str, float] = {}
    for one in due:
        if times.ahead is None or not one.count:
            yield one
            continue
        before, count = taken.get(one.account, 0.0), min(one.count, times.ahead)
        if before + one.nodes_worth(times) > times.ahead + _ROUNDING:
            count = min(count, math.floor(times.ahead - before + _ROUNDING))
        allowed = replace(one, count=count)
        taken[one.account] = before + allowed.nodes_worth(times)
        if count:
            yield allowed


def _counts(due: Iterable[PlannedStart], times: PoolTimes) -> Iterable[tuple[float, int]]:
    """Nodes that each start takes besides those of the ones before: jobs of parts of a node share it."""
    worth, given = 0.0, 0
    for one in due:
        worth += one.nodes_worth(times)
        more = max(math.ceil(worth - _ROUNDING), one.count, given) - given
        given += more
        yield one.at, more


def _serves(node: PoolNode, at: float) -> bool:
    """Whether a start then may find the node there and free."""
    if node.state == "boots":
        return node.ends == math.inf  # no job waits for it
    return node.state == "on" and (node.idle_since is not None or node.ends <= at)


def _let_go(now: float, nodes: Sequence[PoolNode], kept: set[str], times: PoolTimes) -> tuple[str, ...]:
    there = sum(node.state in ("on", "boots") for node in nodes)
    idle = [
        node.name
        for node in reversed(_by_worth(nodes))
        if node.state == "on"
        and node.idle_since is not None
        and now - node.idle_since >= times.idle_s
        and not node.stays
        and node.name not in kept
    ]
    return tuple(idle[: max(0, there - times.least)])


def _by_worth(nodes: Sequence[PoolNode]) -> list[PoolNode]:
    """Nodes to be kept first: the cheapest, and of those the ones in the zones that have most of the pool, so that what
    stays is in few zones and jobs of several nodes still fit into one.
    """
    sizes: dict[str, int] = {}
    for node in nodes:
        if node.state in ("on", "boots"):
            sizes[node.zone] = sizes.get(node.zone, 0) + 1
    return sorted(nodes, key=lambda node: (node.price, -sizes.get(node.zone, 0), node.zone))
