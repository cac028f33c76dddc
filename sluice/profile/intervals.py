"""Spans of time as sorted lists of (start, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """When at least one of them is."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        elif end > start:
            found.append((start, end))
    return found


def both(one: Spans, other: Spans) -> int:
    """How long both are."""
    total = i = j = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Spans) -> int:
    """Of all of them."""
    return sum(end - start for start, end in spans)
