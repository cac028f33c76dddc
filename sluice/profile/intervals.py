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
        (start, end), (other_start, other_end) = one[i], other[j]
        common = (end if end < other_end else other_end) - (start if start > other_start else other_start)
        if common > 0:
            total += common
        if end < other_end:
            i += 1
        else:
            j += 1
    return total


def without(span: tuple[int, int], gaps: Spans) -> Spans:
    """The parts of it that are in no gap."""
    (start, end), found = span, []
    for gap_start, gap_end in gaps:
        found.append((start, min(end, gap_start)))
        start = max(start, gap_end)
    return union([*found, (start, end)])


def length(spans: Spans) -> int:
    """Of all of them."""
    return sum(end - start for start, end in spans)
