"""Limits that gateways of several hosts share: who has which part of them. The book has no clock and no network.

A bucket of requests or tokens is here, and refills here. A gateway gets some of it, and may use that once; what it has
left counts as if it were here still, so that all together never hold more than a full bucket. Of counts (requests at
once, requests that wait) a gateway has some as its own until it gives them back. A gateway's report replaces what is
known of it, so that lost, late and doubled messages do no harm: it says how much it has and how much it was given in
all, from which follows what it gave back, and which answer it never got.

A gateway that is not heard for LEASE_S uses nothing more; a little later, what it had is free again. A new book does
not know what an earlier one gave away: it gives nothing until that is over, and its buckets begin empty then.

Requests may outlive the lease by which they were let in: a stream goes on while its gateway is not heard. This holds
always: (1) each request was let in while its gateway had a place, and requests and tokens of a bucket, for it, which
nobody else had then; these are used up, and what it does not use of its tokens while it is not heard is lost. (2) While
a gateway is not heard, those that it runs are at most the places that it had, so that with N gateways of which M are
cut off one after the other, at most M + 1 times the limit run at once. (3) When it is heard again they count, and as
long as that makes more than the limit, nobody gets a place, and places that are not used are taken back: by the next
report of each gateway, nothing is let in until those that run are fewer than the limit.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.serving import (
    LEASE_S,
    LeaseAnswer,
    LeaseGrant,
    LeaseReport,
    LeaseRow,
    Limit,
    SubjectKind,
    WithoutAuthority,
)
from sluice.serve.replicad.claims import Claims

UNIT: Final = 60_000_000
"""A bucket is counted in so many parts of a request or token, so that a rate a minute is one a microsecond."""
HOLD_US: Final = int(LEASE_S * 1.01e6) + 100_000
"""How long a gateway's lease is kept after its report came: clocks differ by less than one in a hundred."""
MOST_HOLDERS: Final = 64
_MOST_SUBJECTS: Final = 200_000
_TIDY_US: Final = 10_000_000
_ASKS_US: Final = 500_000  # for so long who asked for a place in vain is taken to wait for it: it asks each 20 ms
_SCARCE_US: Final = 60_000_000
_TURN_US: Final = 4_000_000  # of a place that cannot be divided; a change of hands takes some 20 ms
_NEVER: Final = 1 << 62
FRESH_S: Final = 6.0
"""For so long a controller may act on what it saw last of who leads."""

Subject = tuple[SubjectKind, str]


@dataclass(slots=True, eq=False)
class _Turn:
    """Of a count: who has one place more than an even part has it for a while."""

    unmet_us: int = -_SCARCE_US
    """When its part was needed and not there, the latest time, ..."""
    waits_us: int = _NEVER
    """...and since when."""
    since_us: int = 0
    """When it got more than its even part."""

    def waits(self, now: int) -> bool:
        """Whether it asks again and again."""
        return now - self.unmet_us < _ASKS_US

    def is_over(self, now: int) -> bool:
        """Of the place above its even part."""
        return now - self.since_us > _TURN_US

    def miss(self, now: int) -> None:
        """There was not what it needs."""
        if not self.waits(now):
            self.waits_us = now
        self.unmet_us = now


@dataclass(slots=True, eq=False)
class _Hold:
    """What a gateway has of a subject, at most."""

    have: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    balance: tuple[int, int] = (0, 0)
    over: int = 0
    peak: int = 0
    """The most tokens that there were since its last report, here and at gateways, in UNITs."""
    turns: tuple[_Turn, _Turn] = field(default_factory=lambda: (_Turn(), _Turn()))
    """Of places at once and in the queue."""
    last: int = 0
    """The report that said that it is not named again."""


@dataclass(slots=True)
class _Shared:
    """A subject whose limits are shared."""

    at: int
    level: list[int]
    """Of requests and tokens, in UNITs: below 0, a debt."""
    holds: dict[str, _Hold] = field(default_factory=dict)
    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Of what gateways have."""


@dataclass(slots=True)
class _Holder:
    host: str
    number: int
    until: int
    subjects: set[Subject] = field(default_factory=set)
    gone: set[Subject] = field(default_factory=set)
    """Those that it does not name again."""


def amounts_of(limit: Limit) -> tuple[int | None, int | None, int | None, int | None]:
    """In the order of all messages."""
    return limit.requests_per_minute, limit.tokens_per_minute, limit.concurrent, limit.queued


class Book:
    """Who has what. Times are microseconds of one clock that goes on in suspend."""

    def __init__(self, epoch: str, grants_from: int, levels: Mapping[Subject, list[int]] | None = None) -> None:
        """`levels`: what an earlier book left that is known to have no gateway any more; other buckets are full then.
        None: nothing is known, and all are empty at `grants_from`."""
        self.epoch = epoch
        self.without: WithoutAuthority = "share"
        self._from = grants_from
        self._levels = levels
        self._limits: Mapping[Subject, Limit] = {}
        self._subjects: dict[Subject, _Shared] = {}
        self._holders: dict[str, _Holder] = {}
        self._tidied = grants_from
        self._claims = Claims()

    def set_limits(self, limits: Mapping[Subject, Limit]) -> None:
        """By kind and name; name "*": each one that has none of its own."""
        self._limits = limits
        for subject, shared in self._subjects.items():
            if self._limit(subject) is None:  # gateways name it no more, so what they had is free if it is back
                shared.sums = [0, 0, 0, 0]
                for hold in shared.holds.values():
                    hold.have = [0, 0, 0, 0]

    def answer(self, report: LeaseReport, now: int) -> LeaseAnswer | None:
        """What a gateway gets; None: a report that came too late, or there is no room for another gateway."""
        self._expire(now)
        holder = self._holders.get(report.holder)
        if report.leaves:
            self._claims.take(report, now)
            if holder is not None:
                self._drop(report.holder, now)
            return LeaseAnswer(self.epoch, report.number, False, len(self._holders), 0, self.without)
        if holder is None:
            if len(self._holders) >= MOST_HOLDERS:
                return None
            holder = self._holders[report.holder] = _Holder(report.host, 0, 0)
        if report.number <= holder.number:
            return None
        holder.number, holder.until = report.number, now + HOLD_US
        self._forget(report, holder)
        granted = now >= self._from
        given = [self._row(row, report, holder, now, granted) for row in report.rows]
        held, billed = self._claims.take(report, now)
        names = sorted(self._holders)
        return LeaseAnswer(
            self.epoch, report.number, granted, len(names), names.index(report.holder), self.without,
            tuple(one for one in given if one is not None), held, billed,
            len({one.host for one in self._holders.values()}),
        )  # fmt: skip

    def left(self, now: int) -> dict[Subject, list[int]]:
        """What is left of buckets that are not full, where all gateways have what they were given."""
        found = {}
        for subject, shared in self._subjects.items():
            self._refill(subject, shared, now)
            if not self._is_full(subject, shared):
                found[subject] = list(shared.level)
        return found

    # ---- gateways ----

    def _expire(self, now: int) -> None:
        for name in [name for name, one in self._holders.items() if now >= one.until]:
            self._drop(name, now)
        if now - self._tidied > _TIDY_US:
            self._tidied = now
            for subject, shared in list(self._subjects.items()):
                self._refill(subject, shared, now)
                if not shared.holds and self._is_full(subject, shared):
                    del self._subjects[subject]

    def _drop(self, name: str, now: int) -> None:
        """A gateway has nothing any more."""
        for subject in self._holders.pop(name).subjects:
            shared = self._subjects[subject]
            self._refill(subject, shared, now)
            for i, amount in enumerate(shared.holds.pop(name).have):
                shared.sums[i] -= amount

    def _forget(self, report: LeaseReport, holder: _Holder) -> None:
        """What it said that it does not name again, where it knows that this was heard."""
        for subject in [one for one in holder.gone if self._subjects[one].holds[report.holder].last <= report.answered]:
            del self._subjects[subject].holds[report.holder]
            holder.subjects.discard(subject)
            holder.gone.discard(subject)

    # ---- subjects ----

    def _limit(self, subject: Subject) -> Limit | None:
        return self._limits.get(subject) or self._limits.get((subject[0], "*"))

    def _shared(self, subject: Subject, limit: Limit, now: int) -> _Shared | None:
        found = self._subjects.get(subject)
        if found is not None or len(self._subjects) >= _MOST_SUBJECTS:
            return found
        since = max(now - self._from, 0)
        level = []
        for i, amount in enumerate(amounts_of(limit)[:2]):
            full = (amount or 0) * UNIT
            if self._levels is None:
                level.append(min(full, since * (amount or 0)))
            else:
                kept = self._levels.get(subject)
                level.append(full if kept is None else min(full, kept[i] + since * (amount or 0)))
        made = self._subjects[subject] = _Shared(now, level)
        return made

    def _refill(self, subject: Subject, shared: _Shared, now: int) -> None:
        """Up to now. What gateways have left is in no other place: with it there is never more than a full bucket."""
        limit = self._limit(subject)
        elapsed, shared.at = max(now - max(shared.at, self._from), 0), now
        for i, rate in enumerate(amounts_of(limit)[:2] if limit is not None else ()):
            if rate is not None:
                # of a limit that was lowered, what gateways had of the higher one is no debt
                full = max(rate - shared.sums[i], 0) * UNIT
                shared.level[i] = min(shared.level[i] + elapsed * rate, full)
        for hold in shared.holds.values():
            hold.peak = max(hold.peak, shared.level[1] + shared.sums[1] * UNIT)

    def _is_full(self, subject: Subject, shared: _Shared) -> bool:
        limit = self._limit(subject)
        rates = amounts_of(limit)[:2] if limit is not None else ()
        return all(rate is None or shared.level[i] >= rate * UNIT for i, rate in enumerate(rates))

    def _row(self, row: LeaseRow, report: LeaseReport, holder: _Holder, now: int, granted: bool) -> LeaseGrant | None:
        subject = (row.kind, row.name)
        limit = self._limit(subject)
        shared = None if limit is None else self._shared(subject, limit, now)
        if limit is None or shared is None:
            return None
        self._refill(subject, shared, now)
        # what a gateway that was not heard has to give back came at some time: the bucket may have been full
        hold = shared.holds.setdefault(report.holder, _Hold(over=row.over))
        holder.subjects.add(subject)
        room = (limit.tokens_per_minute or 0) * UNIT - hold.peak
        for i, amount in enumerate(row.have):
            shared.sums[i] += amount - hold.have[i]
            hold.have[i] = amount
        for i in (0, 1):
            shared.level[i] += (hold.balance[i] - row.balance[i]) * UNIT
        # it came back at some time since the last report: at its fullest, the bucket had room for no more than this
        shared.level[1] += max(min((row.over - hold.over) * UNIT, room), 0)
        hold.over, hold.peak = row.over, shared.level[1] + shared.sums[1] * UNIT
        hold.balance, hold.last = row.balance, report.number if row.last else 0
        (holder.gone.add if row.last else holder.gone.discard)(subject)
        self._refill(subject, shared, now)  # what came back fills the bucket, and no more
        if not granted:
            return LeaseGrant(row.kind, row.name, (0, 0, row.have[2], row.have[3]))
        return self._grant(row, amounts_of(limit), shared, hold, report.holder, now)

    # ---- grants ----

    def _grant(
        self, row: LeaseRow, limits: tuple[int | None, ...], shared: _Shared, hold: _Hold, name: str, now: int
    ) -> LeaseGrant:
        given, waits = [0, 0], [0, 0]
        for i in (0, 1):
            rate = limits[i]
            if rate is not None:
                given[i], waits[i] = _of_bucket(row, i, rate, shared.level[i])
                shared.level[i] -= given[i] * UNIT
                hold.have[i] += given[i]
                shared.sums[i] += given[i]
        hold.balance = row.balance[0] + given[0], row.balance[1] + given[1]
        counts = [_count(row, i, limits[i], shared, hold, now) for i in (2, 3)]
        numbers = given[0], given[1], counts[0].most, counts[1].most
        soon, scarce = any(one.soon for one in counts), any(one.scarce for one in counts)
        return LeaseGrant(row.kind, row.name, numbers, max(waits), soon, scarce)


class _Count(NamedTuple):
    """What a gateway's count may reach, and what a LeaseGrant says next to it."""

    most: int
    soon: bool = False
    scarce: bool = False


def _count(row: LeaseRow, i: int, limit: int | None, shared: _Shared, hold: _Hold, now: int) -> _Count:
    """Each gateway that needs places has an even part. What is left over when all have theirs goes around, one place
    more for each for a while, who waits the longest first. Who has more than that gives way: it gets no more requests
    until those above have ended."""
    if limit is None:
        return _Count(0)
    turn, have = hold.turns[i - 2], hold.have[i]
    if (excess := shared.sums[i] - limit) > 0:
        return _Count(max(have - excess, 0), scarce=True)
    rest = [one for one in shared.holds.values() if one is not hold]
    waiting = [one for one in rest if one.turns[i - 2].waits(now)]
    scarce = any(now - one.turns[i - 2].unmet_us < _SCARCE_US for one in rest)
    even, odd = _even(limit, len(waiting) + 1, [one.have[i] for one in rest if one not in waiting])
    if waiting and have > (most := even + (odd > 0 and not turn.is_over(now))):
        return _Count(most, scarce=True)
    more = min(row.need[i], _free(limit - shared.sums[i], i, even, odd, hold, waiting, now))
    missed = row.need[i] > more and have + more < even + (odd > 0)
    if more and have <= (even if waiting else 0) < have + more:
        turn.since_us = now
    if missed:
        turn.miss(now)
    elif more:
        turn.unmet_us, turn.waits_us = min(turn.unmet_us, now - _ASKS_US), _NEVER
    hold.have[i] += more
    shared.sums[i] += more
    return _Count(hold.have[i], missed, scarce)


def _free(room: int, i: int, even: int, odd: int, hold: _Hold, waiting: list[_Hold], now: int) -> int:
    """How many of the places that nobody has a gateway may take: none that another one waits for."""
    room = max(room, 0)
    if not waiting:
        return room
    first = min(room, max(even - hold.have[i], 0))
    turn = hold.turns[i - 2]
    since = turn.waits_us if turn.waits(now) else now
    theirs = sum(max(even - one.have[i], 0) + (one.turns[i - 2].waits_us < since) for one in waiting)
    return first + (odd > 0 and hold.have[i] + first == even and room - first > theirs)


def _even(limit: int, needy: int, others: list[int]) -> tuple[int, int]:
    """What each that needs more may have, and how many are left over: others keep what they have, if it is no more."""
    parts = needy + len(others)
    for has in sorted(others):
        if has * parts > limit:
            break
        limit, parts = limit - has, parts - 1
    return divmod(limit, parts)


def _of_bucket(row: LeaseRow, i: int, rate: int, level: int) -> tuple[int, int]:
    """How much is given of a level, and after how long there is enough, where there is not."""
    have = max(row.have[i], 0)
    there = max(level, 0) // UNIT
    need = max(row.need[i] - have, 0)
    least = min(need, max((row.least if i == 1 else 1) - have, 1)) if need else 0
    if least > there:
        return 0, -(-(least * UNIT - level) // rate) if rate else 0
    first = min(need, there)
    # half of the rest at most, so that a gateway which comes later finds some
    return first + max(min(row.want[i] - have, (there - first) // 2), 0), 0


class Authority:
    """The book of the replicad whose controller leads. Thread-safe; times are seconds of the boot's clock.

    `path`: where it keeps what a book leaves that ends in good order, for the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._book: Book | None = None
        self._until = 0.0
        self._limits: Mapping[Subject, Limit] = {}
        self._without: WithoutAuthority = "share"

    def set_policy(self, limits: Mapping[Subject, Limit], without: WithoutAuthority) -> None:
        """What is shared, and what gateways do without an answer."""
        with self._lock:
            self._limits, self._without = limits, without
            if self._book is not None:
                self._book.set_limits(limits)
                self._book.without = without

    def lead(self, until: float, now: float, *, alone: bool) -> None:
        """Until when this one is the authority as far as is known, also if it is not said again: the caller may hang.
        `alone`: no other controller could have been before. Raises OSError where the file cannot be written: then it
        is not."""
        with self._lock:
            if now >= self._until:
                self._book = None
            self._until = until
            if now >= until:
                self._book = None
            if self._book is not None or now >= until:
                return
            # an earlier one's leases are over by then, also if it does not know yet that another leads
            wait = HOLD_US / 1e6 + (0.0 if alone else FRESH_S)
            levels: dict[Subject, list[int]] | None = {}
            if not alone or self._path.exists():
                levels = self._read_levels() if alone else None
                now += wait
            self._write({"left": None})
            self._book = Book(secrets.token_hex(8), int(now * 1e6), levels)
            self._book.set_limits(self._limits)
            self._book.without = self._without

    def answer(self, report: LeaseReport, now: float) -> LeaseAnswer:
        """Raises SluiceError where this is not the authority, or the report is not one to answer."""
        with self._lock:
            if self._book is None or now >= self._until:
                raise SluiceError("leases: no controller leads, as far as is known here", remedy="see: sluice failover")
            answer = self._book.answer(report, int(now * 1e6))
        if answer is None:
            raise SluiceError("leases: the report came too late, or there are too many gateways", remedy="ask again")
        return answer

    def end(self, now: float) -> None:
        """In good order: the next one goes on with what is left. Raises OSError."""
        with self._lock:
            book, self._book = self._book, None
        if book is not None:
            left = [[kind, name, *level] for (kind, name), level in book.left(int(now * 1e6)).items()]
            self._write({"left": left})

    def _read_levels(self) -> dict[Subject, list[int]] | None:
        """Of a book that ended well; None: nothing is known."""
        try:
            found = json.loads(self._path.read_bytes())["left"]
            return {(kind, name): [int(requests), int(tokens)] for kind, name, requests, tokens in found}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, document: dict[str, Any]) -> None:
        write_atomic(self._path, json.dumps(document) + "\n", mode=0o640, follow_links=False)
