"""Sums of what jobs used within a span of time, that can be added up, kept and shown in any grouping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sluice.base.errors import SluiceError

EXACT_S = 128
_PARTS = 64  # of a doubling: a percentile is at most 1/64 too high


class Key(NamedTuple):
    """What reports group and filter by."""

    account: str
    user: str
    partition: str
    qos: str
    state: str
    gpu_type: str  # GRES type; "a+b" where a job had several; empty: no GPU
    node: str = ""  # only where nodes are asked for


class Histogram:
    """Whole seconds, exact up to EXACT_S and then in steps of 1.6 percent, so that histograms can be added."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def add(self, seconds: int) -> None:
        """One more."""
        bucket = bucket_of(seconds)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        """All of another."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def percentile(self, percent: float) -> int | None:
        """The smallest value that so many percent do not exceed; None of nothing."""
        wanted = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return value_of(bucket)
        return None

    def mean(self) -> float | None:
        """By the buckets' values."""
        total = self.count
        return sum(value_of(bucket) * count for bucket, count in self.counts.items()) / total if total else None


def bucket_of(seconds: int) -> int:
    """The bucket of a value."""
    if seconds < EXACT_S:
        return max(0, seconds)
    power = seconds.bit_length() - 1
    return EXACT_S + (power - 7) * _PARTS + ((seconds - (1 << power)) * _PARTS >> power)


def value_of(bucket: int) -> int:
    """The largest value of a bucket."""
    if bucket < EXACT_S:
        return bucket
    power, part = divmod(bucket - EXACT_S, _PARTS)
    base = 1 << (power + 7)
    return base + ((part + 1) * base + _PARTS - 1) // _PARTS - 1


SUMS = (
    "ran", "started", "ended", "completed", "failed", "cancelled", "timeout", "pending",
    "wall_s", "cpu_s", "memory_mib_s", "gpu_s", "shard_mib_s", "shared_gpu_s", "energy_j",
    "limit_s", "limited_s",
    "measured_jobs", "measured_gpu_s", "device_s", "busy_s", "idle_s", "gpu_energy_j", "throttled_s",
    "asked_mib_s", "peak_mib_s", "refused",
)  # fmt: skip
"""What is added up. ``ran``: jobs that ran in the span; ``limited_s``: run time of ended jobs that had a limit, and
``limit_s`` those limits; ``measured_gpu_s``: the part of ``gpu_s + shared_gpu_s`` that was measured; ``device_s``:
seconds of whole devices that were measured and ``busy_s`` those times their utilisation by the job."""


@dataclass(slots=True)
class Tally:
    """The sums of one key. Seconds, MiB, joules."""

    ran: int = 0
    started: int = 0
    ended: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    timeout: int = 0
    pending: int = 0
    wall_s: float = 0
    cpu_s: float = 0
    memory_mib_s: float = 0
    gpu_s: float = 0
    shard_mib_s: float = 0
    shared_gpu_s: float = 0
    energy_j: float = 0
    limit_s: float = 0
    limited_s: float = 0
    measured_jobs: int = 0
    measured_gpu_s: float = 0
    device_s: float = 0
    busy_s: float = 0
    idle_s: float = 0
    gpu_energy_j: float = 0
    throttled_s: float = 0
    asked_mib_s: float = 0
    peak_mib_s: float = 0
    refused: int = 0
    waits: Histogram = field(default_factory=Histogram)

    def add(self, other: Tally) -> None:
        """All sums of another."""
        for name in SUMS:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)
        if other.waits.counts:
            self.waits.merge(other.waits)

    def document(self) -> dict[str, Any]:
        """For a file; what is 0 is left out."""
        values: dict[str, Any] = {name: value for name in SUMS if (value := getattr(self, name))}
        if self.waits.counts:
            values["waits"] = {str(bucket): count for bucket, count in self.waits.counts.items()}
        return values

    def add_document(self, values: Mapping[str, Any]) -> None:
        """What `document` gave of another. Raises SluiceError for what is not a tally."""
        try:
            for name, value in values.items():
                if name == "waits":
                    counts = self.waits.counts
                    for bucket, count in value.items():
                        place = int(bucket)
                        counts[place] = counts.get(place, 0) + int(count)
                elif name in _SUMS:
                    setattr(self, name, getattr(self, name) + value)
                else:
                    raise ValueError(f"{name!r} is not known")
        except (AttributeError, TypeError, ValueError) as error:
            raise SluiceError(f"not a tally: {error}") from error


_SUMS = frozenset(SUMS)


def group(cells: Iterable[tuple[Key, Tally]], by: Iterable[str]) -> dict[tuple[str, ...], Tally]:
    """Cells added up by some of the key's fields."""
    names = tuple(by)
    found: dict[tuple[str, ...], Tally] = {}
    for key, tally in cells:
        place = tuple(getattr(key, name) for name in names)
        into = found.get(place)
        if into is None:
            into = found[place] = Tally()
        into.add(tally)
    return found
