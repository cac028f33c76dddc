"""Limits over gateways of several hosts: gates of their own, one book, and a network that delays, doubles and loses."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.core.gate import Gate, Kind, Refused, Shape
from sluice.exchange.serving import LEASE_S, LeaseAnswer, LeaseReport, LeaseRow, Limit, SubjectKind, parse, render
from sluice.serve.gateway.claims import Claims, Names
from sluice.serve.gateway.directory import subject
from sluice.serve.gateway.leases import Leases, Need, State, limit_of
from sluice.serve.replicad.claims import CLAIM_US
from sluice.serve.replicad.leases import FRESH_S, HOLD_US, UNIT, Authority, Book

S = 1_000_000
_SEEDS = 300 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 12
_SHAPE = Shape(workers=1, subjects=16, services=4, replicas=4, tickets=256, prefixes=8)
_TENANT: tuple[SubjectKind, str] = ("tenant", "t")
_SERVICE = subject("service", "m")


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

    def request(self, tokens: int, used: int, lasts: int) -> bool:
        """A request comes; whether it is let in."""
        now = self.clock()
        self.sweep(now)
        answer = self.gate.admit(
            self.worker, now, key=0, user=0, tenant=subject(*_TENANT), service=_SERVICE, tokens=tokens
        )
        if isinstance(answer, Refused):
            if answer.part:
                self.leases.need([Need(*_TENANT, 1, tokens, tokens)], now)
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

    def running(self) -> int:
        """Requests that a lease covers now."""
        covered = self.alive and self.clock() < self.leases.until
        return sum(one[1] not in self.outlived for one in self.open) if covered else 0

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


class World:
    """Hosts, an authority, the time, and what one bucket for all would have left."""

    def __init__(self, seed: int, limit: Limit, hosts: int, *, lose: float = 0.0, double: float = 0.0) -> None:
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
            Host(self, number, self.random.randrange(10**12), 1 + self.random.uniform(-0.004, 0.004))
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

    def admit(self, host: Host, tokens: int, used: int, lasts: int) -> bool:
        self.refill()
        if not host.request(tokens, used, lasts):
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
                    host.tick()
            each()
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
        world.run(30, traffic)
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

    for _ in range(12):
        world.run(chance.uniform(0.5, 6), traffic, 20_000)
        trouble()
    assert world.over == 0
    for host in world.hosts:
        host.gate.audit()


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

    world.run(60, ask)
    assert min(ran) > 10, ran


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
