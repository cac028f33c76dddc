"""Limits over gateways of several hosts: gates of their own, one book, and a network that delays, doubles and loses."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.core.gate import Gate, Kind, Refused, Shape
from sluice.exchange.serving import (
    LEASE_S,
    LeaseAnswer,
    LeaseGrant,
    LeaseReport,
    LeaseRow,
    Limit,
    SubjectKind,
    parse,
    render,
)
from sluice.serve.gateway.claims import Claims, Names
from sluice.serve.gateway.directory import subject
from sluice.serve.gateway.leases import Leases, Need, State, limit_of
from sluice.serve.gateway.parts import Parts, Waiting
from sluice.serve.replicad.claims import CLAIM_US
from sluice.serve.replicad.leases import FRESH_S, HOLD_US, UNIT, Authority, Book

S = 1_000_000
_FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
_SEEDS = 300 if _FULL else 6
_SHAPE = Shape(workers=1, subjects=16, services=4, replicas=4, tickets=256, prefixes=8)
_TENANT: tuple[SubjectKind, str] = ("tenant", "t")
_SERVICE = subject("service", "m")


@dataclass
class Held:
    """A request that waits for the authority's word, as `sluice.serve.gateway.parts` has it."""

    tokens: int
    used: int
    lasts: int
    until: int
    tries: int = 0
    asks_at: int = 0


@dataclass
class Host:
    """A gateway's host: its gate, its part, and a clock of its own."""

    world: World
    number: int
    offset: int
    drift: float
    open: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Tickets that run: when they end, the ticket, tokens reserved and used."""
    outlived: set[int] = field(default_factory=set)
    """Tickets."""
    held: list[Held] = field(default_factory=list)
    holds: bool = False
    heard_since: int | None = None
    """When its lease began that was renewed since."""
    alive: bool = True
    cut_off: bool = False

    def __post_init__(self) -> None:
        self.gate = Gate.create(mmap.mmap(-1, _SHAPE.size()), _SHAPE)
        self.worker = self.gate.join(1, 1)
        self.gate.set_replica(7, _SERVICE, 10_000)
        self.gate.share(Kind.TENANT, subject(*_TENANT), limit_of(self.world.limit))
        names = itertools.count()
        self.leases = Leases(
            self.gate, lambda: f"{self.number}-{next(names)}-{self.world.random.random()}", lambda *_: self.world.limit
        )
        self.waiting = False

    def clock(self) -> int:
        return int(self.world.now * self.drift) + self.offset

    def request(self, tokens: int, used: int, lasts: int, held: Held | None = None) -> bool:
        """A request comes; whether it is let in."""
        now = self.clock()
        self.sweep(now)
        answer = self.gate.admit(
            self.worker, now, key=0, user=0, tenant=subject(*_TENANT), service=_SERVICE, tokens=tokens
        )
        if isinstance(answer, Refused):
            if answer.part and held is None:
                self.leases.need([Need(*_TENANT, 1, tokens, tokens)], now)
                if self.holds:
                    self.held.append(Held(tokens, used, lasts, self.world.now + 5 * S))
            return False
        self.gate.turn(self.worker, now)
        self.open.append((self.world.now + lasts, answer, tokens, used))
        return True

    def sweep(self, now: int) -> None:
        """Requests that outlive their lease run on, and nobody else can know of them."""
        before = self.leases.state
        self.leases.sweep(now)
        if before is not self.leases.state:
            self.outlived |= {one[1] for one in self.open}
            self.heard_since = None

    def running(self) -> int:
        """Requests that a lease covers now."""
        covered = self.alive and self.clock() < self.leases.until
        return sum(one[1] not in self.outlived for one in self.open) if covered else 0

    def is_heard(self) -> bool:
        """So long that all others know it, or have no lease."""
        since, now = self.heard_since, self.world.now
        return self.alive and since is not None and now - since > 4 * S and self.clock() < self.leases.until

    def end_those_due(self) -> None:
        for one in [one for one in self.open if one[0] <= self.world.now]:
            self.open.remove(one)
            self.gate.settle(one[1], self.clock(), 0, one[3])
            self.world.ended(one[2], one[3])

    def tick(self) -> None:
        """What the parent does every 10 ms."""
        now = self.clock()
        self.sweep(now)
        if self.waiting and now - self.sent < S:
            return
        if self.leases.due(now):
            self.waiting, self.sent = True, now
            self.world.send(self, self.leases.report(now))

    sent = 0

    def hear(self, text: bytes) -> None:
        answer = parse(LeaseAnswer, text)
        self.leases.take(answer, self.clock())
        self.waiting = False
        if self.leases.state is State.LEASED and self.heard_since is None:
            self.heard_since = self.world.now
        soon = _TENANT in self.leases.soon
        for one in [one for one in self.held if one.asks_at <= self.world.now]:
            one.tries += not (soon and self.world.now < one.until)
            if one.tries >= 3 or self.world.admit(self, one.tokens, one.used, one.lasts, one):
                self.held.remove(one)
                continue
            one.asks_at = self.world.now + 20_000 * (one.tries == 0)
            self.world.later(
                one.asks_at - self.world.now, lambda: self.leases.need([Need(*_TENANT, 1, 1, 1)], self.clock())
            )


class World:
    """Hosts, an authority, the time, and what one bucket for all would have left."""

    def __init__(
        self, seed: int, limit: Limit, hosts: int, *, lose: float = 0.0, double: float = 0.0, holds: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.limit, self.lose, self.double = limit, lose, double
        self.now = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.books = itertools.count()
        self.book = self.new_book({})
        self.down = False
        self.level = [(limit.requests_per_minute or 0) * UNIT, (limit.tokens_per_minute or 0) * UNIT]
        self.level_at = 0
        self.admitted = 0
        self.over = 0
        self.hosts = [
            Host(self, number, self.random.randrange(10**12), 1 + self.random.uniform(-0.004, 0.004), holds=holds)
            for number in range(hosts)
        ]

    def new_book(self, levels: dict[Any, list[int]] | None) -> Book:
        book = Book(f"e{next(self.books)}", self.now if levels is not None else self.now + HOLD_US + S, levels)
        book.set_limits({_TENANT: self.limit})
        book.without = "refuse"
        return book

    def later(self, delay: int, work: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.count), work))

    def delay(self) -> int:
        return self.random.choice((500, 1000, 3000, 3000, 10_000, 200_000 if self.lose else 3000))

    def send(self, host: Host, report: LeaseReport) -> None:
        text = render(report)
        for _ in range(1 + (self.random.random() < self.double)):
            if self.random.random() >= self.lose and not host.cut_off:
                self.later(self.delay(), lambda: self.at_book(host, text))

    def at_book(self, host: Host, text: bytes) -> None:
        if self.down:
            return
        answer = self.book.answer(parse(LeaseReport, text), self.now)
        if answer is None or self.random.random() < self.lose or host.cut_off:
            return
        for _ in range(1 + (self.random.random() < self.double)):
            self.later(self.delay(), lambda: host.hear(render(answer)) if host.alive and not host.cut_off else None)

    # ---- the one bucket ----

    def refill(self) -> None:
        rates = self.limit.requests_per_minute or 0, self.limit.tokens_per_minute or 0
        for i in (0, 1):
            self.level[i] = min(rates[i] * UNIT, self.level[i] + (self.now - self.level_at) * rates[i])
        self.level_at = self.now

    def admit(self, host: Host, tokens: int, used: int, lasts: int, held: Held | None = None) -> bool:
        self.refill()
        if not host.request(tokens, used, lasts, held):
            return False
        self.admitted += 1
        self.level[0] -= UNIT
        self.level[1] -= tokens * UNIT
        if self.limit.requests_per_minute is not None:
            self.over += self.level[0] < 0
        if self.limit.tokens_per_minute is not None:
            self.over += self.level[1] < 0
        running = sum(one.running() for one in self.hosts)
        if self.limit.concurrent is not None:
            self.over += running > self.limit.concurrent
            counted = [one for one in self.hosts if one.is_heard()]
            self.over += host in counted and sum(len(one.open) for one in counted) > self.limit.concurrent
        return True

    def ended(self, reserved: int, used: int) -> None:
        self.refill()
        self.level[1] = min((self.limit.tokens_per_minute or 0) * UNIT, self.level[1] + (reserved - used) * UNIT)

    def run(self, seconds: float, each: Callable[[], object], step: int = 10_000) -> None:
        until = self.now + int(seconds * S)
        while self.now < until:
            for host in self.hosts:
                if host.alive:
                    host.end_those_due()
            each()
            for host in self.hosts:
                if host.alive:
                    host.tick()
            self.now += step
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()


@pytest.mark.parametrize("limit", [Limit(600), Limit(None, 60_000), Limit(1200, 120_000, 16)], ids=str)
def test_one_gateway_with_all_the_traffic_uses_the_limit(limit: Limit) -> None:
    world = World(1, limit, 3)

    def traffic() -> None:
        while world.admit(world.hosts[0], 100, 100, 200_000):
            pass

    world.run(5, lambda: None)
    world.run(60, traffic)
    most = min((limit.requests_per_minute or 10**9) * 2, (limit.tokens_per_minute or 10**12) * 2 // 100)
    assert world.over == 0
    assert world.admitted >= most * 0.99


def test_demand_that_moves_is_followed() -> None:
    world = World(2, Limit(600, None, 8), 2)
    world.run(5, lambda: None)
    for host in (*world.hosts, *world.hosts):
        before, begun = world.admitted, world.now

        def traffic(host: Host = host) -> None:
            while world.admit(host, 1, 1, 300_000):
                pass

        world.run(3, traffic)
        before, begun = world.admitted, world.now
        world.run(30 if _FULL else 10, traffic)
        assert world.admitted - before >= (world.now - begun) / S * 10 * 0.99
    assert world.over == 0


def test_two_gateways_share_what_both_ask_for() -> None:
    world = World(3, Limit(None, None, 10), 2)
    mine = {host.number: 0 for host in world.hosts}

    def traffic() -> None:
        for host in world.hosts:
            while world.admit(host, 1, 1, 400_000):
                mine[host.number] += 1

    world.run(5, lambda: world.admit(world.hosts[0], 1, 1, 400_000))
    world.run(20, traffic)
    assert world.over == 0
    assert min(mine.values()) > 0.3 * sum(mine.values())


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_nothing_is_let_in_over_the_limit_whatever_the_network_does(seed: int) -> None:
    chance = random.Random(seed)
    limit = Limit(
        chance.choice((None, 60, 600, 6000)), chance.choice((None, 6000, 600_000)), chance.choice((None, 1, 4, 30))
    )
    world = World(seed, limit, chance.randint(1, 4), lose=chance.choice((0, 0.05, 0.3)), double=chance.choice((0, 0.3)))

    def traffic() -> None:
        for host in world.hosts:
            if host.alive:
                for _ in range(chance.randint(0, 8)):
                    world.admit(host, 100, chance.randint(0, 100), chance.randint(0, 2 * S))

    def trouble() -> None:
        host = chance.choice(world.hosts)
        what = chance.randint(0, 5)
        if what == 0:  # killed, with all that it had; another gateway comes
            host.alive = False
            world.hosts.append(Host(world, len(world.hosts), chance.randrange(10**12), 1.0))
        elif what == 1:
            host.cut_off = not host.cut_off
        elif what == 2:  # another controller leads
            world.book = world.new_book(None)
        elif what == 3:
            world.down = not world.down
        elif what == 4:  # suspended: nothing happens there, and its clock goes on
            host.alive, other = False, host
            world.later(int(chance.uniform(0.1, 8) * S), lambda: setattr(other, "alive", True))
        else:  # its clock jumps, as after a suspend that nobody saw
            host.offset += int(chance.uniform(0.1, 20) * S)

    for _ in range(12):
        world.run(chance.uniform(0.5, 6), traffic, 20_000)
        trouble()
    assert world.over == 0
    for host in world.hosts:
        host.gate.audit()


def test_what_a_request_that_outlived_its_lease_did_not_use_is_nobodys() -> None:
    """It came back to a bucket that was full, and is not there a second time when its gateway is heard again."""
    world = World(3, Limit(None, 6000), 2)
    first, second = world.hosts
    world.run(3, lambda: None)
    world.run(0.5, lambda: world.admitted or world.admit(first, 6000, 0, 100 * S))
    first.cut_off = True
    world.run(105, lambda: None)
    assert world.admitted == 1 and not first.open
    world.run(2, lambda: world.admit(second, 100, 100, 1))
    assert 60 < world.admitted < 65
    first.cut_off = False
    world.run(10, lambda: [world.admit(one, 100, 100, 1) for one in world.hosts])
    assert world.over == 0 and 68 <= world.admitted <= 78


def test_requests_that_outlive_leases_are_bounded_and_count_when_their_gateway_is_heard_again() -> None:
    world = World(6, Limit(None, None, 4), 3)

    def ask(*hosts: Host) -> Callable[[], object]:
        return lambda: [world.admit(one, 1, 1, 600 * S) for one in hosts]

    def running() -> list[int]:
        return [len(one.open) for one in world.hosts]

    first, second, third = world.hosts
    world.run(2, ask(first))
    first.cut_off = True
    world.run(6, ask(*world.hosts))
    assert len(first.open) == 4 and sum(running()) == 8
    second.cut_off = True
    world.run(6, ask(*world.hosts))
    assert sum(running()) <= 12, "a limit more for each that is cut off"
    first.cut_off = second.cut_off = False
    before = running()
    world.run(6, ask(*world.hosts))
    assert running() == before, "they count"
    for _ in range(sum(before)):
        host = next(one for one in world.hosts if one.open)
        host.open[0] = (world.now, *host.open[0][1:])
        world.run(2, ask(*world.hosts))
        assert sum(running()) >= min(4, sum(before) - 1)
        if sum(running()) == 4:
            break
    assert sum(running()) == 4 and world.over == 0
    for one in world.hosts:
        one.open = [(world.now, *rest) for _, *rest in one.open]
    world.run(3, lambda: world.admit(third, 1, 1, S // 10))
    assert world.admitted > 30, "and nothing is held for ever"


def test_a_host_whose_clock_stood_still_uses_what_it_had_once() -> None:
    world = World(13, Limit(600, None, 4), 2)
    first, second = world.hosts
    world.run(3, lambda: world.admit(first, 1, 1, S // 2))
    had = first.gate.subject(Kind.TENANT, subject(*_TENANT), first.clock())
    first.alive = False
    world.run(10, lambda: world.admit(second, 1, 1, 60 * S))
    assert len(second.open) == 4
    first.alive, first.offset = True, first.offset - 10 * S
    first.end_those_due()
    used = 0
    while first.request(1, 1, 60 * S):
        used += 1
    assert used <= min(4, had.requests_left or 0)
    world.run(4, lambda: world.admit(first, 1, 1, 60 * S))
    assert len(first.open) == used, "nothing more when it is heard"


def test_without_an_authority_a_gateway_goes_on_with_its_share() -> None:
    world = World(4, Limit(600, None, 7), 3)
    world.book.without = "share"
    world.run(3, lambda: [world.admit(one, 1, 1, S) for one in world.hosts])
    world.down = True
    world.run(LEASE_S + 1, lambda: None)
    assert all(one.leases.state is State.SHARE for one in world.hosts)
    world.run(2, lambda: None)
    begun = {one.number: 0 for one in world.hosts}
    for host in world.hosts:
        while host.request(1, 1, 60 * S):
            begun[host.number] += 1
    assert sorted(begun.values()) == [2, 2, 3]
    world.down = False
    world.run(5, lambda: None)
    assert all(one.leases.state is State.LEASED for one in world.hosts)
    assert not any(host.request(1, 1, S) for host in world.hosts)


def test_a_gateway_that_vanishes_gives_back_what_it_had_when_its_lease_is_over() -> None:
    world = World(5, Limit(None, None, 4), 2)
    first, second = world.hosts
    world.run(2, lambda: world.admit(first, 1, 1, 600 * S))
    assert len(first.open) == 4
    first.alive = False
    first.open.clear()
    world.run(LEASE_S - 0.6, lambda: world.admit(second, 1, 1, 600 * S))
    assert not second.open
    world.run(2, lambda: world.admit(second, 1, 1, 600 * S))
    assert len(second.open) == 4


def ask(authority: Authority, now: float, number: int, holder: str = "g") -> LeaseAnswer:
    """For all that there is."""
    have, need = (0, 0, 0, 0), (10, 0, 0, 0)
    return authority.answer(LeaseReport(holder, number, number - 1, (LeaseRow(*_TENANT, have, (0, 0), 0, need),)), now)


def test_a_new_authority_gives_nothing_away_twice(tmp_path: Path) -> None:
    def start() -> Authority:
        made = Authority(tmp_path / "leases.json")
        made.set_policy({_TENANT: Limit(60)}, "share")
        return made

    first = start()
    with pytest.raises(SluiceError, match="no controller leads"):
        ask(first, 10.0, 1)
    first.lead(math.inf, 10.0, alone=True)
    assert ask(first, 10.0, 1).rows[0].give[0] == 10
    first.end(11.0)

    second = start()  # it ended well: what is left is known, and its leases are over after a while
    second.lead(math.inf, 12.0, alone=True)
    assert not ask(second, 12.0, 1).granted
    later = ask(second, 12.0 + HOLD_US / 1e6, 2)
    assert later.granted and later.rows[0].give[0] == 10

    third = start()  # the second one was killed: all may have been given away
    third.lead(math.inf, 20.0, alone=True)
    ready = 20.0 + HOLD_US / 1e6
    assert ask(third, ready, 1).rows[0].retry_us == S
    assert ask(third, ready + 10.01, 2).rows[0].give[0] == 10

    other = start()  # another controller leads, and may not know yet that this one does
    other.lead(math.inf, 40.0, alone=False)
    assert not ask(other, 40.0 + FRESH_S, 1).granted
    ready = 40.0 + FRESH_S + HOLD_US / 1e6
    assert ask(other, ready, 2).granted
    other.lead(0.0, ready, alone=False)
    with pytest.raises(SluiceError, match="no controller leads"):
        ask(other, ready, 3)


def test_limits_that_change_and_gateways_that_leave() -> None:
    world = World(7, Limit(None, None, 6), 2)
    first, second = world.hosts
    world.run(2, lambda: world.admit(first, 1, 1, 600 * S))
    assert len(first.open) == 6
    world.limit = Limit(None, None, 8)
    world.book.set_limits({_TENANT: world.limit})
    for host in world.hosts:
        host.leases.changed()
    world.run(2, lambda: world.admit(second, 1, 1, 600 * S))
    assert (len(first.open), len(second.open)) == (6, 2)
    world.book.answer(first.leases.leave(), world.now)
    first.alive = False
    world.run(0.2, lambda: world.admit(second, 1, 1, 600 * S))
    assert len(second.open) == 8


@pytest.mark.parametrize(
    ("hosts", "concurrent", "queued"), [(3, 1, None), (3, 2, None), (3, 1, 2), (4, 6, None)]
)  # fmt: skip
def test_no_gateway_keeps_the_places_that_another_one_needs(hosts: int, concurrent: int, queued: int | None) -> None:
    world = World(46 if hosts == 4 else 9, Limit(None, None, concurrent, queued), hosts)
    ran = [0] * hosts

    def ask() -> None:
        for number, host in enumerate(world.hosts):
            ran[number] += world.admit(host, 1, 1, S // 2)
        assert sum(len(host.open) for host in world.hosts) <= concurrent

    seconds = 60 if _FULL else 20
    world.run(seconds, ask)
    assert min(ran) > seconds / 6, ran


@pytest.mark.parametrize("seed", range(150) if _FULL else (1, 2))
def test_places_that_cannot_be_divided_are_used_and_go_around(seed: int) -> None:
    """Any number of places and gateways, each with more requests than there are places."""
    chance = random.Random(seed)
    hosts, limit = chance.randint(2, 5), chance.choice((1, 1, 2, 3, 5, 7, 11))
    lasts = chance.choice((S // 20, S // 2, 2 * S))
    world = World(seed, Limit(None, None, limit), hosts)
    ran, busy, ticks = [0] * hosts, 0, 0

    def ask() -> None:
        nonlocal busy, ticks
        for number, host in enumerate(world.hosts):
            while world.admit(host, 1, 1, chance.randint(1, lasts)):
                ran[number] += 1
        running = sum(len(host.open) for host in world.hosts)
        assert running <= limit
        busy, ticks = busy + running, ticks + 1

    world.run(2, lambda: None)
    world.run(8 * hosts + 8, ask)
    assert busy >= 0.99 * ticks * limit, busy / ticks / limit
    assert min(ran) > 0.2 * sum(ran) / hosts, ran


def test_the_only_place_is_where_the_request_is() -> None:
    """One client that asks one gateway after the other, and waits for each answer, is never refused."""
    world = World(11, Limit(None, None, 1), 2, holds=True)
    world.run(2, lambda: None)
    waited = []
    for number in range(40):
        host, begun = world.hosts[number % 2], world.now
        if not world.admit(host, 1, 1, S // 5):
            while not host.open:
                assert host.held, f"request {number} is refused"
                world.run(0.01, lambda: None)
        waited.append(world.now - begun)
        while host.open:
            world.run(0.01, lambda: None)
    assert max(waited) < S and sorted(waited)[20] <= S // 10, waited


def test_one_gateway_alone_is_told_that_no_place_will_come() -> None:
    world = World(14, Limit(None, None, 1, 1), 1, holds=True)
    (host,) = world.hosts
    world.run(2, lambda: None)
    world.run(3, lambda: world.admit(host, 1, 1, 60 * S))
    world.run(0.3, lambda: None)
    assert len(host.open) == 1 and not host.leases.soon and not host.held, "each is refused within 0.3 s"


@pytest.mark.parametrize("limit", [1, 3])
def test_who_asks_seldom_gets_its_part_from_who_asks_always(limit: int) -> None:
    world = World(12, Limit(None, None, limit), 2, holds=True)
    always, seldom = world.hosts
    always.holds = False
    world.run(10, lambda: world.admit(always, 1, 1, S // 2))
    got, times = 0, 20 if _FULL else 5
    for _ in range(times):
        world.admit(seldom, 1, 1, 60 * S)
        world.run(5.5, lambda: world.admit(always, 1, 1, S // 2))
        got += len(seldom.open)
        seldom.open, done = [], seldom.open
        for one in done:
            seldom.gate.settle(one[1], seldom.clock(), 0, 1)
    assert got == times


def test_what_was_given_of_a_limit_that_is_lowered_is_no_debt_of_the_lower_one() -> None:
    book = Book("e", 0, {})
    book.set_limits({_TENANT: Limit(6000)})

    def retry_us(number: int, have: int, balance: int, need: int) -> tuple[int, int]:
        row = LeaseRow(*_TENANT, (have, 0, 0, 0), (balance, 0), need=(need, 0, 0, 0))
        answer = book.answer(LeaseReport("g", number, number - 1, (row,)), number * S)
        assert answer is not None
        return answer.rows[0].give[0], answer.rows[0].retry_us

    assert retry_us(1, 0, 0, 5000)[0] == 5000
    book.set_limits({_TENANT: Limit(60)})
    retry_us(2, 5000, 5000, 0)
    assert retry_us(3, 0, 5000, 1) == (0, S)


def test_a_need_that_comes_while_its_subject_is_given_up_is_no_debt() -> None:
    """The authority forgets the subject; a gateway that went on with its sums would owe all that it ever used."""
    world = World(8, Limit(600), 1)
    [host] = world.hosts
    world.run(10, lambda: world.admit(host, 1, 1, S // 10))
    used = world.admitted
    world.events.clear()
    host.waiting = False
    last = host.leases.report(host.clock())
    while not any(row.last for row in last.rows):
        answer = world.book.answer(last, world.now)
        assert answer is not None
        host.leases.take(answer, host.clock())
        world.now += S // 2
        host.end_those_due()
        last = host.leases.report(host.clock())
    answer = world.book.answer(last, world.now)
    assert answer is not None
    assert not host.request(1, 1, S)  # while the answer is on its way
    host.leases.take(answer, host.clock())
    world.run(2, lambda: world.admit(host, 1, 1, S))
    assert world.admitted >= used + 10


def test_what_an_earlier_answer_refused_is_not_said_again() -> None:
    world = World(9, Limit(60), 1)
    [host] = world.hosts
    world.run(1, lambda: None)

    def exchange(name: str, requests: int) -> None:
        host.leases.need([Need("tenant", name, requests, 1, 1)], host.clock())
        answer = world.book.answer(host.leases.report(host.clock()), world.now)
        assert answer is not None
        host.leases.take(answer, host.clock())

    world.book.set_limits({_TENANT: world.limit, ("tenant", "u"): Limit(60)})
    exchange("t", 60)
    while host.request(1, 1, S):
        pass
    exchange("t", 1)
    assert set(host.leases.retry) == {_TENANT}
    exchange("u", 1)
    assert not host.leases.retry


def test_what_gateways_had_of_a_limit_is_void_when_it_is_removed() -> None:
    world = World(10, Limit(600, None, 4), 2)
    first, second = world.hosts
    world.run(2, lambda: world.admit(first, 1, 1, S // 10))
    limit, world.limit = world.limit, None  # type: ignore[assignment]
    world.book.set_limits({})
    for host in world.hosts:
        host.leases.changed()
    first.end_those_due()
    world.limit = limit
    world.book.set_limits({_TENANT: limit})
    second.gate.share(Kind.TENANT, subject(*_TENANT), limit_of(limit))
    world.run(1, lambda: world.admit(second, 1, 1, 600 * S))
    assert len(second.open) == 4


def test_an_authority_whose_daemon_hangs_gives_nothing_after_what_it_saw_last(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "leases.json")
    authority.set_policy({_TENANT: Limit(600)}, "share")
    authority.lead(16.0, 10.0, alone=True)
    assert ask(authority, 15.9, 1).granted
    with pytest.raises(SluiceError, match="no controller leads"):
        ask(authority, 16.0, 2)
    # another one may have led since: what this one gave away is not all
    authority.lead(36.0, 30.0, alone=False)
    assert not ask(authority, 30.0, 3).granted


def test_a_name_is_one_gateways_until_it_is_dead_and_a_bill_is_known_to_all() -> None:
    book = Book("e", 0, {})
    numbers = itertools.count(1)

    def report(gateway: str, now: int, **said: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        answer = book.answer(LeaseReport(gateway, next(numbers), 0, gateway=gateway, **said), now)
        assert answer is not None
        return answer.held, answer.billed

    assert report("a", 0, claims=("x", "y")) == ((), ())
    assert report("b", S // 2, claims=("x", "z")) == (("x",), ())
    assert report("a", S, claims=("x",)) == ((), ())  # said again
    assert report("b", 2 * S, claims=("x",)) == (("x",), ())
    assert report("b", S + CLAIM_US + 1, claims=("x",)) == ((), ())  # the other one is not heard
    assert report("a", 3 * S, claims=("x",), ended=(("x", False),)) == (("x",), ())
    assert report("b", 3 * S, ended=(("x", True), ("z", False))) == ((), ())
    assert report("a", 3 * S, claims=("x", "z")) == ((), ("x",))
    assert report("a", 3 * S, ended=(("y", True),), leaves=True) == ((), ())
    assert report("b", 3 * S, claims=("z", "y")) == ((), ("y",))


def test_names_that_nobody_answers_for_are_free_and_are_claimed_when_somebody_does() -> None:
    told: list[dict[str, Any]] = []

    class Child:
        def tell(self, message: dict[str, Any]) -> None:
            told.append(message)

    child, other, sent = Child(), Child(), []
    claims = Claims("g", lambda: sent.append(1))
    claims.claim(child, 1, "x")
    claims.claim(other, 2, "x")
    assert told == [{"claim": 2, "verdict": "held"}] and claims.due and sent == [1]
    empty = LeaseReport("h", 1, 0)
    claims.take(claims.of_report(empty), None)
    assert told[1:] == [{"claim": 1, "verdict": "free"}] and not claims.due
    report = claims.of_report(empty)
    assert (report.gateway, report.claims) == ("g", ("x",))
    claims.take(report, LeaseAnswer("e", 1, True, 1, 0, "share", held=("x",)))  # it runs, and nothing can be done
    assert claims.of_report(empty).claims == () and len(told) == 2
    claims.claim(child, 3, "y")
    report = claims.of_report(empty)
    claims.take(report, LeaseAnswer("f", 1, True, 1, 0, "share", billed=("y",)))
    assert told[2:] == [{"claim": 3, "verdict": "billed"}] and claims.of_report(empty).claims == ("x",)
    claims.end(other, "x", billed=True)  # not its own
    claims.gone(child, lambda name: name == "x")
    for _ in range(2):  # until somebody has heard it
        report = claims.of_report(empty)
        assert report.ended == (("x", True),)
        claims.take(report, None)
    claims.take(report, LeaseAnswer("f", 1, True, 1, 0, "share"))
    assert claims.of_report(empty).ended == ()


def test_a_name_is_free_after_a_request_that_went_on_before_its_parent_had_an_answer() -> None:
    """A worker waits a few seconds for it; with very many names, or a parent that hung, it comes later."""
    told: list[dict[str, Any]] = []

    class Child:
        def tell(self, message: dict[str, Any]) -> None:
            told.append(message)

    child, claims = Child(), Claims("g", lambda: None)
    empty = LeaseReport("h", 1, 0)
    claims.claim(child, 1, "x")
    report = claims.of_report(empty)
    claims.end(child, "x", billed=True)
    claims.take(report, LeaseAnswer("e", 1, True, 1, 0, "share"))
    assert told == [] and not claims.due
    report = claims.of_report(empty)
    assert (report.claims, report.ended) == ((), (("x", True),))
    claims.claim(child, 2, "x")
    claims.take(claims.of_report(empty), LeaseAnswer("e", 2, True, 1, 0, "share"))
    assert told == [{"claim": 2, "verdict": "free"}]


def test_where_nobody_answers_all_requests_with_names_go_on_at_once() -> None:
    told: list[dict[str, Any]] = []

    class Child:
        def tell(self, message: dict[str, Any]) -> None:
            told.append(message)

    child, claims = Child(), Claims("g", lambda: None)
    for number in range(500):
        claims.claim(child, number, f"{number}")
    claims.take(claims.of_report(LeaseReport("h", 1, 0)), None)
    assert len(told) == 500 and {one["verdict"] for one in told} == {"free"} and not claims.due
    assert claims.of_report(LeaseReport("h", 2, 0)).claims


def test_few_requests_wait_for_one_name() -> None:
    """Each asks the parent four times a second, and is not counted by any limit."""

    class Call:
        over, deadline = False, time.monotonic() + 60

        def claimed(self, verdict: str) -> None:
            verdicts.append(verdict)

    class Worker:
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        def tell(self, message: dict[str, Any]) -> None:
            asked.append(message["claim"])

    async def work() -> None:
        names = Names(Worker())
        for _ in range(100):
            names.claim(Call(), "x")
        for number in asked[:]:
            names.told({"claim": number, "verdict": "held"})
        assert verdicts == ["held"] * 92
        await asyncio.sleep(0.4)
        for number in asked[100:]:
            names.told({"claim": number, "verdict": "free"})
        assert verdicts[92:] == ["free"] * 8

    asked: list[int] = []
    verdicts: list[str] = []
    asyncio.run(work())


# ---- a worker's requests that wait for more ----


@dataclass(eq=False)
class Caller:
    """A request that the gate refuses for want of `by`, until `fits`."""

    parts: Parts
    by: tuple[str, str] = _TENANT
    limited: list[tuple[str, str]] = field(default_factory=lambda: [_TENANT])
    deadline: float = math.inf
    reserved: int = 1
    fits: bool = False
    over: bool = False
    ended: str = ""
    tries: int = 0

    def enter_again(self, waiting: Waiting | None) -> None:
        self.tries += 1
        if self.fits:
            self.ended = "let in"
        elif not self.parts.ask(self, waiting, self.by):
            self.ended = "refused"


class Asking:
    """A worker and its parent, who says the same each time, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.loop: Any = self
        self.tell: Any = self._tell
        self.answer: dict[str, Any] = {"known": True, "retry": [], "soon": [list(_TENANT)]}
        self.asked = 0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        monkeypatch.setattr("sluice.serve.gateway.parts.time", self)
        self.parts = Parts(self)

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, what: Callable[..., object], *given: object) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), lambda: what(*given)))

    def call_soon(self, what: Callable[[], object]) -> None:
        self.call_later(0.0, what)

    def _tell(self, message: dict[str, Any]) -> None:
        self.asked += 1
        self.call_later(0.002, self.parts.told, {"parts": message["need"], **self.answer})

    def comes(self, **given: Any) -> Caller:
        one = Caller(self.parts, **given)
        one.enter_again(None)
        return one

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until
        self.parts.sweep(until)


def test_few_requests_wait_for_a_place_and_after_one_in_vain_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands that are over a limit cost the gate and the parent no more than a few."""
    asking = Asking(monkeypatch)
    many = [asking.comes() for _ in range(2000)]
    asking.run(0.5)
    assert sum(not one.ended for one in many) == 8
    asking.run(4.9)
    assert all(one.ended == "refused" for one in many)
    assert sum(one.tries for one in many) < 2000 * 2 + 8 * 5.2 / 0.02
    more = [asking.comes() for _ in range(20)]
    asking.run(1)
    (one,) = [one for one in more if not one.ended]
    one.fits, asking.answer["soon"] = True, []
    asking.run(0.1)
    assert one.ended == "let in"
    first = asking.comes()
    asking.run(0.1)
    assert first.ended == "refused", "a limit that nobody else has places of is no reason to wait"
    asking.answer["soon"] = [list(_TENANT)]
    more = [asking.comes() for _ in range(20)]
    asking.run(1)
    assert sum(not one.ended for one in more) == 8, "there was a place meanwhile"
    for one in more:
        one.over = True
    asking.run(0.1)
    before = asking.asked
    more = [asking.comes(deadline=asking.now + 0.05) for _ in range(8)]
    asking.run(0.5)
    assert all(one.ended == "refused" for one in more) and asking.asked - before < 8 * 6
    more = [asking.comes() for _ in range(20)]
    asking.run(1)
    assert sum(not one.ended for one in more) == 8, "who is in a hurry has not asked in vain"


def test_nobody_waits_for_a_place_that_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch)
    key = ("key", "k")
    one = asking.comes(by=key, limited=[_TENANT, key])
    asking.run(0.1)
    assert one.ended == "refused", "the places of its key are all in use"
    asking.answer["retry"] = [[*key, 30 * S]]
    one = asking.comes(limited=[_TENANT, key])
    asking.run(0.1)
    assert one.ended == "refused"
    assert asking.parts.retry_after(one) == pytest.approx(30, abs=0.2)


def test_a_new_worker_of_an_old_parent_and_a_parent_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload starts workers of the new version below a parent of the old one."""
    asking = Asking(monkeypatch)
    asking.answer = {"known": True, "retry": []}
    one = asking.comes()
    asking.run(0.1)
    assert one.ended == "refused"
    asking.answer = {"known": True, "retry": [], "soon": [list(_TENANT)]}
    more = [asking.comes() for _ in range(3)]
    asking.run(0.2)
    asking.answer["known"] = False
    asking.run(9.6)
    assert not any(one.ended for one in more)
    asking.run(1)
    assert all(one.ended == "refused" for one in more)


def test_a_replicad_of_before_and_one_of_after_are_understood() -> None:
    """A replicad of another version may lead, or pass an answer on."""
    grant = LeaseGrant(*_TENANT, (1, 2, 3, 4), soon=True, scarce=True)
    document = json.loads(render(LeaseAnswer("e", 1, True, 2, 0, "share", (grant,))))
    del document["rows"][0]["soon"], document["rows"][0]["scarce"]
    document["rows"][0]["of_a_later_one"] = 1
    (found,) = parse(LeaseAnswer, json.dumps(document).encode()).rows
    assert found == replace(grant, soon=False, scarce=False)
