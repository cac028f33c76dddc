"""The daily pattern of a service's need: replicas that were needed in each quarter of an hour, of the last weeks.

What is needed soon is the middle of what the same quarter needed on the last days of its kind (working days, weekends):
one day that was unlike the others does not count, and what is usual is there before it is asked for. Kept on disk, in
one file that is replaced as a whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic

QUARTER_S = 900
_QUARTERS = 96
_DAYS = 35
_ALIKE = 5  # days of its kind that are looked at
_LEAST_DAYS = 3  # of which so many must be known
_MOST_SERVICES = 2000
VERSION = 1


@dataclass(frozen=True, slots=True)
class Quarter:
    """One of a day, by local time. `day`: days since 1970-01-01, of the local calendar."""

    day: int
    number: int

    @property
    def weekend(self) -> bool:
        """Saturday or Sunday."""
        return (self.day + 3) % 7 >= 5  # 1970-01-01 was a Thursday


def quarter_of(moment: float) -> Quarter:
    """By this host's time zone."""
    local = time.localtime(moment)
    seconds = int(moment) + local.tm_gmtoff
    return Quarter(seconds // 86_400, seconds % 86_400 // QUARTER_S)


@dataclass(slots=True)
class Pattern:
    """Of one service: by day the replicas that each quarter needed at most; -1: not known."""

    days: dict[int, list[int]] = field(default_factory=dict)

    def record(self, quarter: Quarter, needed: int) -> bool:
        """Note a need; whether that changed anything."""
        mine = self.days.setdefault(quarter.day, [-1] * _QUARTERS)
        if needed <= mine[quarter.number]:
            return False
        mine[quarter.number] = needed
        for day in sorted(self.days)[:-_DAYS]:
            del self.days[day]
        return True

    def usual(self, quarter: Quarter) -> int:
        """What a quarter needs as a rule; 0 where too little is known."""
        alike = (day for day in sorted(self.days, reverse=True) if day < quarter.day)
        same = [self.days[day][quarter.number] for day in alike if Quarter(day, 0).weekend == quarter.weekend]
        known = [count for count in same[:_ALIKE] if count >= 0]
        return median_low(known) if len(known) >= _LEAST_DAYS else 0

    def ahead(self, now: float, seconds: float) -> int:
        """The most that is usual from now until `seconds` later."""
        return max((self.usual(one) for one in _quarters(now, seconds)), default=0)


def _quarters(now: float, seconds: float) -> Iterator[Quarter]:
    moment = now
    while moment < now + seconds:
        yield quarter_of(moment)
        moment += QUARTER_S
    yield quarter_of(now + seconds)


class Patterns:
    """Those of all services, and their file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.of: dict[str, Pattern] = {}
        self._changed = False

    def load(self) -> None:
        """Read the file; one that is damaged or not there is none. Raises SluiceError where it may not be read."""
        try:
            document = json.loads(self.path.read_bytes())
            found = _parse(document)
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="it is the daemon's user's") from error
        self.of = found

    def record(self, service: str, now: float, needed: int) -> None:
        """Note what a service needs now."""
        if service not in self.of and len(self.of) >= _MOST_SERVICES:
            return
        self._changed |= self.of.setdefault(service, Pattern()).record(quarter_of(now), needed)

    def save(self, services: Mapping[str, object]) -> None:
        """Write the file where something changed, of these services alone. Raises OSError."""
        for name in [name for name in self.of if name not in services]:
            with suppress(KeyError):
                del self.of[name]
            self._changed = True
        if not self._changed:
            return
        days = {name: {str(day): row for day, row in one.days.items()} for name, one in self.of.items()}
        text = json.dumps({"version": VERSION, "services": days}, separators=(",", ":"))
        write_atomic(self.path, text + "\n", mode=0o600, follow_links=False)
        self._changed = False


def _parse(document: Mapping[str, Mapping[str, Mapping[str, list[int]]]]) -> dict[str, Pattern]:
    found = {}
    for name, days in document["services"].items():
        rows = {int(day): [int(count) for count in row] for day, row in days.items()}
        found[name] = Pattern({day: row for day, row in rows.items() if len(row) == _QUARTERS})
    return found
