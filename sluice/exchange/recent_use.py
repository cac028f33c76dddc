"""What was used lately of each service, and by each user and tenant, from the gateways' records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sluice.exchange.requests import Added, RequestRecord, files_of, recent_requests

_RATE_MINUTES = 5
_KEPT_MINUTES = 60
_UNJUDGED = frozenset({"refused-limit", "cancelled"})


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """Of one service: rates of the last five minutes, and the deadline's part of the last hour."""

    requests_per_minute: int
    tokens_per_minute: int
    deadline_met_percent: float | None


@dataclass(frozen=True, slots=True)
class CallerUse:
    """Of a user or tenant, over all services: rates of the last five minutes."""

    requests_per_minute: int
    tokens_per_minute: int


@dataclass(slots=True)
class _Minute:
    requests: int = 0
    tokens: int = 0
    met: int = 0
    missed: int = 0


class RecentUse:
    """The last hour of a folder of records, each read once: at first the ends of the files, later what was added.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._added: Added | None = None
        self._minutes: dict[str, dict[int, _Minute]] = {}
        self._callers: dict[str, dict[int, _Minute]] = {}  # by kind and name, as of limits: user/alice

    def look(self, deadlines: Mapping[str, float], now: float | None = None) -> dict[str, ServiceUse]:
        """The use of these services, each with its seconds until the first token. Raises OSError."""
        at = time.time() if now is None else now
        for record, times in self._records(at):
            if record.service in deadlines:
                self._count(record, deadlines[record.service], times)
            for caller in (f"user/{record.user}", f"tenant/{record.tenant}"):
                _add(self._callers.setdefault(caller, {}), record, times)
        return {name: self._use(self._minutes.get(name, {}), at) for name in deadlines}

    def callers(self, now: float | None = None) -> dict[str, CallerUse]:
        """The use of each user and tenant that called in the last minutes, as of the last `look`."""
        at = time.time() if now is None else now
        first = int(at // 60) - _RATE_MINUTES
        lately = {
            name: {begun: one for begun, one in minutes.items() if begun >= first}
            for name, minutes in self._callers.items()
        }
        self._callers = {name: minutes for name, minutes in lately.items() if minutes}
        return {name: CallerUse(*_rates(minutes.values(), at)) for name, minutes in self._callers.items()}

    def _records(self, now: float) -> Iterator[tuple[RequestRecord, int]]:
        """What is new; -1: it is replaced."""
        self.folder.stat()  # a host without records knows nothing, not that nothing was used
        start = now - 60 * _KEPT_MINUTES
        first = datetime.fromtimestamp(start, UTC).date()
        paths = [path for day, path in files_of(self.folder) if day >= first]
        if self._added is None:
            ends = {path: path.stat().st_size for path in paths}
            known = recent_requests(self.folder, start, now + 1)
            self._added = Added(known, ends)
            yield from ((record, 1) for record in known)
        for record, bill in self._added.read(paths):
            yield record, 1
            if bill is not None:
                yield bill, -1

    def _count(self, record: RequestRecord, deadline_s: float, times: int) -> None:
        one = _add(self._minutes.setdefault(record.service, {}), record, times)
        first_s = record.total_s if record.outcome == "ok" else None  # an embedding has no first token
        first_s = first_s if record.first_token_s is None else record.first_token_s
        if first_s is not None and first_s <= deadline_s:
            one.met += times
        elif first_s is not None or record.outcome not in _UNJUDGED:
            one.missed += times

    @staticmethod
    def _use(minutes: dict[int, _Minute], now: float) -> ServiceUse:
        this = int(now // 60)
        for old in [one for one in minutes if one < this - _KEPT_MINUTES]:
            del minutes[old]
        lately = [one for begun, one in minutes.items() if begun >= this - _RATE_MINUTES]
        met, missed = sum(one.met for one in minutes.values()), sum(one.missed for one in minutes.values())
        return ServiceUse(
            *_rates(lately, now),
            round(100 * met / (met + missed), 1) if met + missed else None,
        )


def _add(minutes: dict[int, _Minute], record: RequestRecord, times: int) -> _Minute:
    one = minutes.setdefault(int(record.ended // 60), _Minute())
    one.requests += times
    one.tokens += times * (record.prompt_tokens + record.completion_tokens)
    return one


def _rates(lately: Iterable[_Minute], now: float) -> tuple[int, int]:
    """Requests and tokens a minute."""
    minutes, covered = list(lately), _RATE_MINUTES + now % 60 / 60
    return round(sum(one.requests for one in minutes) / covered), round(sum(one.tokens for one in minutes) / covered)
