"""Slurm's hostlist expressions, by ClusterShell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from sluice.base.errors import UsageError

MOST_NAMES = 1 << 18
"""Of one expression; Slurm has at most 65,533 nodes."""
_MOST_RANGES = 4  # in brackets, of one name: Slurm knows one, and several of a system with more dimensions
_NAME = re.compile(r"(?:[^,!&^\[\]]|\[[^\[\]]*\])+")
_RANGES = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(-?\d+)-(-?\d+)")
_NO_DIGITS = re.compile(r"[\s_+]")  # int() takes them


def expand(expression: str) -> list[str]:
    """``n[1-3]`` as ``["n1", "n2", "n3"]``, in the expression's own order. Raises UsageError when malformed, or for
    more names than `MOST_NAMES`."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    if not _is_bounded(expression):
        raise UsageError(f"hostlist {expression[:80]!r}: too many names", remedy=f"write {MOST_NAMES} at most")
    try:
        return [str(name) for name in NodeSet(expression, resolver=None)] if expression else []
    except NodeSetException as error:
        raise UsageError(
            f"hostlist {expression[:80]!r}: {str(error)[:200]}", remedy="write it as in Slurm, e.g. node[01-04,07]"
        ) from error


def _is_bounded(expression: str) -> bool:
    """Whether there are not too many names; without making them, as ``[1-9999][1-9999][1-9999]`` are 10^12."""
    total = 0
    for name in _NAME.findall(expression):
        ranges = _RANGES.findall(name)
        names = 1
        for one in ranges:
            names *= sum(map(_length, one.split(",")))
        total += names
        if len(ranges) > _MOST_RANGES or total > MOST_NAMES:
            return False
    return True


def _length(text: str) -> int:
    """Of a range such as 3-9; 1 for what is none."""
    match = _RANGE.match(_NO_DIGITS.sub("", text))
    if match is None:
        return 1
    if max(len(match[1]), len(match[2])) > 18:
        return MOST_NAMES + 1
    return max(1, int(match[2]) - int(match[1]) + 1)


def fold(names: Iterable[str]) -> str:
    """The shortest expression for the names, e.g. ``n[1-3]``."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names), resolver=None))


def hosts(names: Collection[str]) -> str:
    """The names folded where every Slurm can read it: brackets at the end of a name only."""
    folded = fold(names)
    return ",".join(names) if re.search(r"\][^,]", folded) else folded


def unbroken(expression: str) -> list[tuple[str, int]]:
    """Its parts without a comma, and their numbers of names: ``n[1-3]`` and ``n7`` of ``n[1-3,7]``."""
    from ClusterShell.NodeSet import NodeSet

    return [(str(part), len(part)) for part in NodeSet(expression, resolver=None).contiguous()]
