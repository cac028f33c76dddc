"""Rate limits: budgets of owners that refill with time, and lines of a log."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_PORTION_S = 0.5

Owner = tuple[Hashable, ...]
"""Who does something, from the widest to the narrowest, e.g. a network and one of its hosts."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A burst, and a rate per second after it."""

    burst: int
    per_second: float


class Budgets:
    """How much each owner has spent of some rates: that of all together, and of each part of an owner.

    Budgets refill every half second, for all owners at the same moment, so that a thread that waits for many
    owners is not woken for each. Not thread-safe.
    """

    def __init__(self, *rates: Rate) -> None:
        self._rates = rates
        self._until: dict[Owner, float] = {}  # when the budget is full again

    def wait(self, owner: Owner, now: float, paid: int = 0) -> float:
        """Seconds until the owner may take one more; 0: now. `paid`: so many of the rates do not count."""
        short = max(
            (
                self._until.get(part, 0.0) - _portion(now) - (rate.burst - 1) / rate.per_second
                for part, rate in self._parts(owner, paid)
            ),
            default=0.0,
        )
        return 0.0 if short < 1e-6 else _portion(now) + math.ceil(short / _PORTION_S) * _PORTION_S - now

    def take(self, owner: Owner, now: float, paid: int = 0) -> None:
        """Take one."""
        for part, rate in self._parts(owner, paid):
            self._until[part] = max(self._until.get(part, 0.0), _portion(now)) + 1 / rate.per_second

    def forget(self, now: float) -> None:
        """Drop those who have earned all again."""
        for owner in [owner for owner, until in self._until.items() if until <= _portion(now)]:
            del self._until[owner]

    def _parts(self, owner: Owner, paid: int) -> Sequence[tuple[Owner, Rate]]:
        return [(owner[:part], self._rates[part]) for part in range(paid, min(len(owner) + 1, len(self._rates)))]


def _portion(now: float) -> float:
    return now - now % _PORTION_S


class Lines:
    """Which lines of a log are written: a few of each owner's, then one a minute. Thread-safe."""

    def __init__(self, of_all: int, of_each: int) -> None:
        self._budgets = Budgets(Rate(of_all, 1.0), Rate(of_each, 1 / 60))
        self._lock = threading.Lock()
        self._left_out = 0

    def left_out(self, owner: Owner) -> int | None:
        """How many were left out since the last one was written; None: this one is left out, too."""
        now = time.monotonic()
        with self._lock:
            if self._budgets.wait(owner, now) > 0:
                self._left_out += 1
                return None
            self._budgets.forget(now)
            self._budgets.take(owner, now)
            count, self._left_out = self._left_out, 0
            return count


class FewLines(logging.Filter):
    """Of lines that others can cause: a few with each format, then one a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = Lines(256, 16)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        count = self._lines.left_out((record.msg,))
        if count:
            record.msg = f"{record.msg} ({count} lines were left out)"
        return count is not None
