"""Slurm's hostlist expressions, by ClusterShell."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.base.errors import UsageError


def expand(expression: str) -> list[str]:
    """``n[1-3]`` as ``["n1", "n2", "n3"]``, in the expression's own order. Raises UsageError when malformed."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return [str(name) for name in NodeSet(expression, resolver=None)] if expression else []
    except NodeSetException as error:
        raise UsageError(
            f"hostlist {expression!r}: {error}", remedy="write it as in Slurm, e.g. node[01-04,07]"
        ) from error


def fold(names: Iterable[str]) -> str:
    """The shortest expression for the names, e.g. ``n[1-3]``."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names), resolver=None))


def unbroken(expression: str) -> list[tuple[str, int]]:
    """Its parts without a comma, and their numbers of names: ``n[1-3]`` and ``n7`` of ``n[1-3,7]``."""
    from ClusterShell.NodeSet import NodeSet

    return [(str(part), len(part)) for part in NodeSet(expression, resolver=None).contiguous()]
