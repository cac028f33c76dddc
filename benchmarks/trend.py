"""Whether a series of readings grows: its slope by least squares, with an error that holds for correlated readings.

Readings of a daemon come seconds apart, and what disturbs one disturbs the next ones. The usual error of a slope
assumes that they are independent, and would find a leak in every slow wave. Here readings are first averaged over
blocks: 48 in the series, or 8 in a life if that is more. Then n blocks whose residuals have the correlation r from one
to the next count as n (1 - r) / (1 + r) independent ones (Santer et al., J. Geophys. Res. 105:7337, 2000), r being
corrected for what the fit takes away of it in a short series, (2 + 4 r) / n.

A daemon that was started again begins at another level: each of its lives has an intercept of its own, and all have
one slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

import numpy as np

from sluice.base.errors import SluiceError

LEAST_SAMPLES = 30
BLOCKS = 48
BLOCKS_OF_A_LIFE = 8
ROUNDING = 1e-12
"""Residuals below this share of the series are no noise."""
SIGNIFICANT = 3.0
"""So many errors above the bound is a leak."""


class TooShortError(SluiceError):
    """Too few readings for a slope."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of a series; `life` names the process, or processes, that it was read from."""

    hours: float
    value: float
    life: str = ""


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope with its standard error, both in units an hour."""

    slope: float
    error: float
    samples: int
    hours: float
    mean: float

    def exceeds(self, bound: float) -> bool:
        """Whether the slope is above `bound` for certain."""
        return self.slope - SIGNIFICANT * self.error > bound


def trend(readings: Sequence[Reading], *, warm_up_hours: float = 0.0) -> Trend:
    """The slope of readings in order of time, without the first hours of each life. Raises TooShortError."""
    kept = _warm(readings, warm_up_hours)
    if len(kept) < LEAST_SAMPLES:
        raise TooShortError(
            f"{len(kept)} readings after the warm-up: a slope needs {LEAST_SAMPLES}", remedy="run for longer"
        )
    blocks = _blocks(kept)
    hours = np.array([one.hours for one in blocks])
    values = np.array([one.value for one in blocks])
    lives = [one.life for one in blocks]
    x, y = _centred(hours, lives), _centred(values, lives)
    spread = float(x @ x)
    if spread == 0:
        raise TooShortError("each life has one block of readings", remedy="run for longer")
    slope = float(x @ y) / spread
    residuals = y - slope * x
    exact = float(residuals @ residuals) <= ROUNDING * float(y @ y)
    independent = len(blocks) * (1.0 if exact else _independent_share(residuals))
    free = independent - len(set(lives)) - 1
    if free <= 0:
        raise TooShortError(
            f"{len(kept)} readings are worth {independent:.1f} independent ones", remedy="run for longer"
        )
    error = sqrt(float(residuals @ residuals) / free / spread)
    return Trend(slope, error, len(kept), kept[-1].hours - kept[0].hours, fmean(one.value for one in kept))


def _warm(readings: Sequence[Reading], warm_up_hours: float) -> list[Reading]:
    began: dict[str, float] = {}
    for one in readings:
        began.setdefault(one.life, one.hours)
    return [one for one in readings if one.hours >= began[one.life] + warm_up_hours]


def _blocks(readings: Sequence[Reading]) -> list[Reading]:
    """Means over equal times, of one life each."""
    first, last = readings[0].hours, readings[-1].hours
    lives = len({one.life for one in readings})
    width = (last - first) / max(BLOCKS, BLOCKS_OF_A_LIFE * lives) or 1.0
    found: dict[tuple[int, str], list[Reading]] = {}
    for one in readings:
        found.setdefault((int((one.hours - first) / width), one.life), []).append(one)
    return [
        Reading(fmean(one.hours for one in block), fmean(one.value for one in block), life)
        for (_, life), block in found.items()
    ]


def _centred(values: np.ndarray, lives: Sequence[str]) -> np.ndarray:
    """Each value less the mean of its life."""
    _, place = np.unique(lives, return_inverse=True)
    centred: np.ndarray = values - (np.bincount(place, values) / np.bincount(place))[place]
    return centred


def _independent_share(residuals: np.ndarray) -> float:
    """How many independent readings one reading is worth."""
    found = float(residuals[1:] @ residuals[:-1]) / float(residuals @ residuals)
    correlation = max(0.0, found + (2 + 4 * found) / len(residuals))
    return max(0.0, (1 - correlation) / (1 + correlation))
