"""Idle nodes that stand by for preflights: a few of each kind ask often whether they are needed, all others seldom.

Nobody can reach an agent, so a node that is to take part within seconds has to ask. How many ask often is bounded for
the whole site; which nodes are idle is what Slurm says, and the node itself once more before each test.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gres_probe.machine import natural
from sluice.slurm.answers import Node

CALL_S = 5.0
"""Of a preflight's bound, that must be left when idle nodes are asked: they join, and are measured with."""
_MOST_PARTNERS = 2  # of one preflight
_OFTEN_S = 1.0
_SOON_S = 5.0  # where Slurm has not said yet that the node is idle
_MOST_OFTEN = 64  # of all
_OFTEN_OF_LEAF = 2  # with the same GPUs
_SELDOM_S = 60.0
_NODE_S = 0.02  # so that those that do not stand by ask no more than fifty times a second, however many there are
_HEARD_S = 10.0  # one that was not heard for longer does not stand by any more; busy machines ask late
_PLAIN = frozenset({"planned", "cloud", "dynamic_norm"})


@dataclass(frozen=True, slots=True)
class _Standing:
    heard: float
    types: frozenset[str]
    leaf: str


class Spares:
    """Nodes that said that they have no job. Times are of the monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._standing: dict[str, _Standing] = {}  # those that ask often
        self._idle: frozenset[str] = frozenset()  # by Slurm

    def seen(self, node: str, types: Iterable[str], leaf: str, now: float) -> float:
        """A node says that it is idle; in how many seconds it is to ask again."""
        self._heard[node] = now
        self._standing.pop(node, None)
        self._standing = {name: one for name, one in self._standing.items() if now - one.heard < _HEARD_S}
        mine = _Standing(now, frozenset(types), leaf)
        alike = sum((one.types, one.leaf) == (mine.types, leaf) for one in self._standing.values())
        all_s = _NODE_S * len(self._heard)
        if alike >= _OFTEN_OF_LEAF or len(self._standing) >= _MOST_OFTEN:
            return max(_SELDOM_S, all_s)
        if node not in self._idle:  # or never, as in a maintenance of the whole site
            return max(_SOON_S, all_s)
        self._standing[node] = mine
        return _OFTEN_S

    def choose(
        self, types: Collection[str], leaves: Collection[str], avoid: Collection[str], now: float
    ) -> tuple[str, ...]:
        """Nodes that take part in a preflight: with GPUs of these types, those below these leaf switches first."""
        found = [
            name
            for name, one in self._standing.items()
            if now - one.heard < _HEARD_S and name in self._idle and name not in avoid and one.types.issuperset(types)
        ]
        found.sort(key=lambda name: (self._standing[name].leaf not in leaves, natural(name)))
        return tuple(found[:_MOST_PARTNERS])

    def watch(self, nodes: Iterable[Node], now: float) -> None:
        """What Slurm says of all nodes; those that have not asked for long are forgotten."""
        self._idle = frozenset(one.name for one in nodes if one.state == "idle" and one.flags <= _PLAIN)
        longest = 2 * max(_SELDOM_S, _NODE_S * len(self._heard))
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard < longest}
