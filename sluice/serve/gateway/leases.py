"""This gateway's parts of limits that gateways of several hosts share, as its parent keeps them: no clock, no network.

What is given goes into the gate (`Gate.give`), where workers use it. Of what nobody uses, a report gives back what is
not expected to be used until the next one. While no authority answers, what was given holds for LEASE_S from the last
report that was answered; then each limit is this gateway's share of it, or nothing is let in, as the policy says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sluice.core.gate import Gate, Kept, Kind, Limit, Part
from sluice.exchange.serving import (
    LEASE_S,
    MOST_LEASE_ROWS,
    NO_LIMIT,
    LeaseAnswer,
    LeaseGrant,
    LeaseReport,
    LeaseRow,
    SubjectKind,
    WithoutAuthority,
)
from sluice.exchange.serving import Limit as Amounts
from sluice.serve.gateway.directory import subject

KINDS: Final[Mapping[SubjectKind, Kind]] = {
    "key": Kind.KEY,
    "user": Kind.USER,
    "tenant": Kind.TENANT,
    "service": Kind.SERVICE,
}
PERIOD_US: Final = 500_000
"""Between two reports of all."""
_LEASE_US: Final = int(LEASE_S * 1e6)
_ALL: Final = 2**31 - 1
_IDLE_US: Final = 20_000
_FADES: Final = 0.7  # what is expected of a subject that nobody uses, from one report to the next

log = logging.getLogger("sluice.gateway")


class State(Enum):
    """Where the gate's limits come from."""

    NONE = "none"  # nobody has given any: what is limited is not let in
    LEASED = "leased"
    SHARE = "share"  # a fixed share of each, without an authority


@dataclass(frozen=True, slots=True)
class Need:
    """What requests of a worker wait for: how many they are, their tokens, and the fewest tokens of one."""

    kind: SubjectKind
    name: str
    requests: int
    tokens: int
    least: int


@dataclass(slots=True)
class _Mine:
    """A subject of which this gateway has, or needs, something."""

    number: int
    balance: list[int] = field(default_factory=lambda: [0, 0])
    over: int = 0
    before: list[int] = field(default_factory=lambda: [0, 0])
    """What was left of requests and tokens when the latest answer was applied."""
    at: int = 0
    used: list[int] = field(default_factory=lambda: [0, 0])
    """Since then."""
    want: list[float] = field(default_factory=lambda: [0.0, 0.0])
    open: float = 0.0
    waiting: float = 0.0
    need: Need | None = None
    last: int = 0
    """The report that said that there is nothing more."""
    counts: tuple[int, int] = (0, 0)
    """What places at once and in the queue it has, as the authority knows, ..."""
    most: tuple[int, int] = (0, 0)
    """...and what they may reach: less, where it gives way."""
    idle_at: int = 0
    """Since when some of them are not used."""


def limit_of(amounts: Amounts) -> Limit:
    """As the gate has it."""
    return Limit(amounts.requests_per_minute, amounts.tokens_per_minute, amounts.concurrent, amounts.queued)


def share_of(limit: Limit, gateways: int, part: int) -> Limit:
    """One gateway's share of a limit: those of all together are the limit."""
    amounts = [None if amount is None else amount // gateways + (part < amount % gateways) for amount in limit[:4]]
    return Limit(*amounts)


class Leases:
    """The parts. Times are microseconds of the gate's clock."""

    def __init__(self, gate: Gate, name: Callable[[], str], find: Callable[[SubjectKind, str], Amounts | None]) -> None:
        """`name`: makes a name that nobody else has; `find`: the limits of a subject."""
        self._gate, self._name, self._find = gate, name, find
        self.state = State.NONE
        self.epoch = ""
        self.until = 0
        """Of the lease."""
        self.retry: dict[tuple[SubjectKind, str], int] = {}
        """Of what the latest answer did not give: after how long there is enough."""
        self.soon: set[tuple[SubjectKind, str]] = set()
        """What the latest answer did not give, and others will give back: worth asking again."""
        self._scarce: set[tuple[SubjectKind, str]] = set()
        """Of which others lack places: none is kept that is not used."""
        self._holder = name()
        self._number = self._answered = 0
        self._sent_at = 0
        self._gateways, self._part = 1, 0
        self._without: WithoutAuthority = "refuse"
        self._mine: dict[tuple[SubjectKind, str], _Mine] = {}
        self._rest: list[tuple[SubjectKind, str]] = []  # of all, what was not in a report yet
        self._needed: list[tuple[SubjectKind, str]] = []
        self._all_at = -PERIOD_US

    # ---- what workers need ----

    def need(self, needs: Iterable[Need], now: int) -> None:
        """Requests wait for these. With a share of all limits it is there at once, or not at all."""
        for one in needs:
            key = one.kind, one.name
            amounts = self._find(one.kind, one.name)
            if amounts is None:
                continue
            mine = self._mine.get(key)
            if mine is None:
                mine = self._mine[key] = _Mine(subject(one.kind, one.name), at=now)
                if self.state is State.SHARE:
                    self._set_share(key, mine, amounts)
                else:
                    self._gate.share(KINDS[one.kind], mine.number, limit_of(amounts))
            if mine.need is None:
                self._needed.append(key)
                mine.need = one
            else:
                was = mine.need
                mine.need = Need(
                    one.kind, one.name, was.requests + one.requests, was.tokens + one.tokens, min(was.least, one.least)
                )

    def changed(self) -> None:
        """Limits have changed."""
        for key, mine in list(self._mine.items()):
            amounts = self._find(*key)
            if amounts is None:
                self._drop(key)
                self._gate.set_limit(KINDS[key[0]], mine.number, Limit())
            elif self.state is State.SHARE:
                self._set_share(key, mine, amounts)
            else:
                self._gate.share(KINDS[key[0]], mine.number, limit_of(amounts))

    # ---- reports ----

    def due(self, now: int) -> bool:
        """Whether a report is to be sent now."""
        self._needed += [key for key in self._scarce if self._gives_back(key, now) and key not in self._needed]
        return bool(self._needed or self._rest) or now - self._all_at >= PERIOD_US

    @property
    def watched(self) -> int:
        """Of how many subjects places are to be given back as soon as they are not used."""
        return len(self._scarce)

    def _gives_back(self, key: tuple[SubjectKind, str], now: int) -> bool:
        """At once where it gives way; what it was just given, and between two requests, a moment later."""
        mine = self._mine[key]
        found = self._gate.subject(KINDS[key[0]], mine.number, now)
        if found.open >= mine.counts[0] and found.waiting >= mine.counts[1]:
            mine.idle_at = now
        return now - mine.idle_at >= (_IDLE_US if mine.counts == mine.most else 1)

    def report(self, now: int) -> LeaseReport:
        """What is needed first, then all, a piece in each report."""
        if now - self._all_at >= PERIOD_US:
            self._all_at, self._rest = now, list(self._mine)
        keys = self._needed[:MOST_LEASE_ROWS]
        self._needed = self._needed[len(keys) :]
        while self._rest and len(keys) < MOST_LEASE_ROWS:
            key = self._rest.pop()
            if key in self._mine and key not in keys:
                keys.append(key)
        self.retry.clear()
        self.soon.clear()
        self._number += 1
        self._sent_at = now
        rows = tuple(self._row(key, self._mine[key], now) for key in keys if key in self._mine)
        return LeaseReport(self._holder, self._number, self._answered, rows)

    def leave(self) -> LeaseReport:
        """The last report of all: what this gateway had is free."""
        self._number += 1
        return LeaseReport(self._holder, self._number, self._answered, leaves=True)

    def _row(self, key: tuple[SubjectKind, str], mine: _Mine, now: int) -> LeaseRow:
        need, mine.need = mine.need, None
        if self.state is State.SHARE:
            found = self._gate.subject(KINDS[key[0]], mine.number, now)
            counts = max(found.open, found.limit.concurrent or 0), max(found.waiting, found.limit.queued or 0)
            return LeaseRow(*key, (0, 0, *counts), (0, 0))
        kept = self._keep(key, mine, need, now)
        have = self._have(key, kept)
        mine.counts = have[2], have[3]
        wants = int(mine.want[0] * 1.5 + 0.5), int(mine.want[1] * 1.5 + 0.5)
        expected = *wants, mine.open, mine.waiting
        mine.last = self._number if need is None and not any((*have, kept.open, *expected)) else 0
        needs, least = (0, 0, 0, 0), 0
        if need is not None:
            places = max(kept.open + need.requests - kept.part.concurrent, 0)
            queued = max(kept.waiting + need.requests - kept.part.queued, 0)
            needs, least = (need.requests, need.tokens, places, queued), need.least
        balance = mine.balance[0], mine.balance[1]
        return LeaseRow(*key, have, balance, mine.over, needs, least, wants, mine.last > 0)

    def _keep(self, key: tuple[SubjectKind, str], mine: _Mine, need: Need | None, now: int) -> Kept:
        """Give back what will not be used soon."""
        wants = [int(one * 1.5 + 0.5) for one in (*mine.want, mine.open, mine.waiting)]
        if key in self._scarce:
            wants[2:] = 0, 0
        if need is not None:
            wants = [
                max(wants[0], need.requests), max(wants[1], need.tokens), wants[2] + need.requests,
                wants[3] + need.requests,
            ]  # fmt: skip
        most = Part(*(min(one, _ALL) for one in wants))
        if self.state is State.NONE:
            most = Part()
        kept = self._gate.keep(KINDS[key[0]], mine.number, now, most)
        left = self._have(key, kept)
        mine.over += kept.tokens_over
        backs = kept.requests_back, kept.tokens_back
        share = (now - mine.at) / PERIOD_US
        mine.open, mine.waiting = max(mine.open, kept.open), max(mine.waiting, kept.waiting)
        for i in (0, 1):
            mine.used[i] += max(mine.before[i] - left[i] - backs[i] - i * kept.tokens_over, 0)
            mine.balance[i] -= backs[i]
            mine.before[i] = left[i]
        if share >= 0.5:
            for i in (0, 1):
                mine.want[i] = _faded(mine.want[i], mine.used[i] / share, share)
            mine.open = _faded(mine.open, kept.open, share)
            mine.waiting = _faded(mine.waiting, kept.waiting, share)
            mine.at, mine.used = now, [0, 0]
        return kept

    def _have(self, key: tuple[SubjectKind, str], kept: Kept) -> tuple[int, int, int, int]:
        """What it has of the limits that there are."""
        limits = limit_of(self._find(*key) or NO_LIMIT)[:4]
        found = [0 if limit is None else max(amount, 0) for limit, amount in zip(limits, kept.part, strict=True)]
        return found[0], found[1], found[2], found[3]

    # ---- answers ----

    def take(self, answer: LeaseAnswer, now: int) -> None:
        """The answer to the latest report, once; others are not looked at."""
        if answer.number != self._number or answer.number == self._answered:
            return
        if self.epoch and answer.epoch != self.epoch:
            self._begin_again(answer.epoch)
            return
        self.epoch, self._answered = answer.epoch, answer.number
        if not answer.granted:
            return
        self._gateways, self._part, self._without = answer.gateways, answer.part, answer.without
        self.until = self._sent_at + _LEASE_US
        if now >= self.until:
            return
        if self.state is State.SHARE:
            self._end_share(now)
            return
        self.state = State.LEASED
        self._gate.parts_until(self.until)
        for one in answer.rows:
            self._give(one, now)
        for key in [key for key, one in self._mine.items() if one.last == answer.number]:
            self._forget(key)

    def _forget(self, key: tuple[SubjectKind, str]) -> None:
        """The authority does, as it was told: what is needed by now begins there without anything."""
        mine = self._mine[key]
        if mine.need is None:
            self._drop(key)
        else:
            mine.balance, mine.over, mine.last = [0, 0], 0, 0

    def _drop(self, key: tuple[SubjectKind, str]) -> None:
        del self._mine[key]
        self._scarce.discard(key)

    def _give(self, grant: LeaseGrant, now: int) -> None:
        key = grant.kind, grant.name
        mine = self._mine.get(key)
        if mine is None:
            return
        self._gate.give(KINDS[grant.kind], mine.number, now, Part(*grant.give))
        for i in (0, 1):
            mine.balance[i] += grant.give[i]
            mine.before[i] += grant.give[i]
        mine.most = grant.give[2], grant.give[3]
        mine.counts = max(mine.counts[0], mine.most[0]), max(mine.counts[1], mine.most[1])
        mine.idle_at = now
        if grant.retry_us:
            self.retry[key] = grant.retry_us
        (self.soon.add if grant.soon else self.soon.discard)(key)
        (self._scarce.add if grant.scarce else self._scarce.discard)(key)

    def _begin_again(self, epoch: str) -> None:
        """Another authority, or another name: nothing that was given before is known there. What this gateway has holds
        as long as it was to hold."""
        self.epoch = epoch
        self._holder, self._number, self._answered = self._name(), 0, 0
        self._all_at = -PERIOD_US
        self._scarce.clear()
        for mine in self._mine.values():
            mine.balance, mine.over = [0, 0], 0

    # ---- without an authority ----

    def sweep(self, now: int) -> None:
        """What was given is over, where it was not renewed."""
        if self.state is not State.LEASED or now < self.until:
            return
        self._begin_again("")
        if self._without == "share":
            self.state = State.SHARE
            for key, mine in self._mine.items():
                amounts = self._find(*key)
                if amounts is not None:
                    self._set_share(key, mine, amounts)
            log.warning(
                "no controller answers for limits: this gateway goes on with its share, one of %d", self._gateways
            )
            return
        self.state = State.NONE
        log.warning("no controller answers for limits: requests that have limits wait")
        for key, mine in self._mine.items():
            self._void(key, mine, now)

    def _set_share(self, key: tuple[SubjectKind, str], mine: _Mine, amounts: Amounts) -> None:
        self._gate.set_limit(KINDS[key[0]], mine.number, share_of(limit_of(amounts), self._gateways, self._part))

    def _end_share(self, now: int) -> None:
        """There is an authority again: what is left of the share is not taken along."""
        self.state = State.LEASED
        self._gate.parts_until(self.until)
        for key, mine in self._mine.items():
            amounts = self._find(*key)
            if amounts is not None:
                self._gate.share(KINDS[key[0]], mine.number, limit_of(amounts), convert=True)
                self._void(key, mine, now)
        self._all_at = -PERIOD_US
        log.warning("a controller answers for limits again")

    def _void(self, key: tuple[SubjectKind, str], mine: _Mine, now: int) -> None:
        self._gate.keep(KINDS[key[0]], mine.number, now, Part())
        mine.balance, mine.before, mine.over = [0, 0], [0, 0], 0


def _faded(before: float, now: float, share: float) -> float:
    """What is expected, from what was expected and what came."""
    found = max(now, before * _FADES**share)
    return found if found >= 0.5 else 0.0
