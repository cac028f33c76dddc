"""Who tests with whom: rounds of pairs that follow the topology, within leaf switches first, then across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

Pairs: TypeAlias = list[tuple[str, str]]
_Player = TypeVar("_Player")


def plan(leaves: Sequence[Sequence[str]]) -> list[Pairs]:
    """Rounds of pairs; each node is in at most one pair of a round.

    `leaves`: the nodes of each leaf switch. For n nodes there are log2(n) rounds, rounded up. A round leaves out one
    node where n is odd, and none else. A round across leaf switches pairs nodes of one leaf switch only where that
    has more than half of all.
    """
    leaves = sorted((list(leaf) for leaf in leaves if leaf), key=len, reverse=True)
    count = sum(map(len, leaves))
    if count < 2:
        return []
    total = (count - 1).bit_length()
    within = (len(leaves[0]) - 1).bit_length()
    if len(leaves) > 1:
        within = min(within, total - 1) if total > 1 else 0
    return [
        *(_within(leaves, turn) for turn in range(within)),
        *(_across(leaves, turn) for turn in range(total - within)),
    ]


def _tournament(players: Sequence[_Player], turn: int) -> tuple[list[tuple[_Player, _Player]], list[_Player]]:
    """The pairs of one turn of a round robin, and who is left over; another turn has other pairs."""
    odd = len(players) % 2
    ring = list(players[1 - odd :])
    start = turn % max(1, len(ring))
    ring = ring[start:] + ring[:start]
    seats = ring if odd else [*players[:1], *ring]
    left = [seats.pop(0)] if odd else []
    half = len(seats) // 2
    return list(zip(seats[:half], reversed(seats[half:]), strict=True)), left


def _within(leaves: Sequence[Sequence[str]], turn: int) -> Pairs:
    """Pairs within leaf switches; nodes that are left over are paired with each other."""
    pairs: Pairs = []
    over: list[str] = []
    for leaf in leaves:
        found, left = _tournament(leaf, turn)
        pairs += found
        over += left
    found, _ = _tournament(over, turn)
    return pairs + found


def _across(leaves: Sequence[Sequence[str]], turn: int) -> Pairs:
    """Pairs of leaf switches meet, another choice each turn; the first half of all nodes tests with the second."""
    met, left = _tournament(leaves, turn)
    shift = turn // max(1, len(leaves) - 1) + 1
    order = [
        *(node for one, _ in met for node in one),
        *(node for leaf in left for node in leaf),
        *(node for _, other in met for node in _turned(other, shift * turn)),
    ]
    if len(order) % 2:
        order.pop(turn % len(order))
    half = len(order) // 2
    return list(zip(order[:half], order[half:], strict=True))


def _turned(leaf: Sequence[str], turn: int) -> list[str]:
    start = turn % len(leaf)
    return [*leaf[start:], *leaf[:start]]
