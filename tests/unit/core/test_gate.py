from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.core import ffi, lib
from sluice.core.errors import CoreError
from sluice.core.gate import (
    ALIGNMENT,
    Gate,
    Kind,
    Limit,
    Part,
    Reason,
    Refused,
    Settled,
    Shape,
    Standing,
    Time,
    Turn,
    Use,
)
from sluice.core.layout import layout_of

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import gate as reference

SHAPE = Shape(workers=8, subjects=64, services=4, replicas=8, tickets=512, prefixes=256)
KEY, USER, TENANT, SERVICE = 1, 2, 3, 4


def new_gate(shape: Shape = SHAPE) -> Gate:
    return Gate.create(mmap.mmap(-1, shape.size()), shape)


def ask(gate: Gate, worker: int, now_us: int, tokens: int = 10, **options: int) -> int | Refused:
    return gate.admit(worker, now_us, key=KEY, user=USER, tenant=TENANT, service=SERVICE, tokens=tokens, **options)


def admit(gate: Gate, worker: int, now_us: int, tokens: int = 10, **options: int) -> int:
    answer = ask(gate, worker, now_us, tokens, **options)
    assert isinstance(answer, int)
    return answer


def test_a_struct_that_python_packs_is_as_the_header_has_it() -> None:
    members = "ticket", "replica", "tag", "slot", "prefix_blocks"
    found = ffi.new("struct sluice_gate_turn *", {"ticket": 1, "replica": 2, "tag": [3, 4], "slot": 5})
    assert layout_of("sluice_gate_turn", members).unpack(ffi.buffer(found)) == (1, 2, 3, 4, 5, 0)
    for wrong in (members[:-1], (*members, "more"), (members[1], members[0], *members[2:])):
        with pytest.raises(SluiceError, match=r"struct sluice_gate_turn has ticket, .*make build"):
            layout_of("sluice_gate_turn", wrong)
    with pytest.raises(SluiceError, match="reason is enum sluice_gate_reason"):
        layout_of(
            "sluice_gate_answer", ("ticket", "reason"), ("kind", "limit", "used", "retry_after_us", "part", "reserved")
        )


def test_each_word_of_a_request_arrives_in_its_place() -> None:
    """In the gate's own structs, as a wrong place of one of them might change nothing else that is looked at."""
    gate = new_gate()
    worker = gate.join(77, 5)
    gate.set_replica(0xABC, SERVICE, 1)
    gate.admit(
        worker, 100, key=11, user=12, tenant=13, service=SERVICE, tokens=21, prompt_tokens=7, priority=6,
        deadline_us=1 << 40, prefix=[31, 32, 33], tag=2 << 64 | 1, may_start=True,
    )  # fmt: skip
    request = gate._request
    assert [*request.subjects] == [11, 12, 13, SERVICE] and [*request.tag] == [1, 2]
    assert (request.tokens, request.prompt_tokens, request.deadline_us) == (21, 7, 1 << 40)
    assert (request.priority, request.needs_replica, request.prefix_count, request.reserved) == (6, 0, 3, 0)
    assert [*request.prefix[0:4]] == [31, 32, 33, 0]


def test_life_of_a_request() -> None:
    gate = new_gate()
    worker = gate.join(77, 5, seat=3)
    assert Gate.seat(worker) == 3
    gate.set_limit(Kind.TENANT, TENANT, Limit(tokens=1000, concurrent=2))
    assert gate.set_replica(0xABC, SERVICE, 1) == 0
    tag = 5 << 64 | 6
    ticket = admit(gate, worker, 100, 400, prompt_tokens=100, tag=tag, priority=7)
    waiting = admit(gate, worker, 101, 300)
    assert ask(gate, worker, 102) == Refused(Kind.TENANT, Reason.CONCURRENT, 2, 2, 0, False)
    assert gate.turn(worker, 103) == [Turn(ticket, 0xABC, 0, tag, 0)]
    service = gate.service(SERVICE)
    assert (service.waiting, service.in_flight, service.tokens_waiting, service.tokens_in_flight) == (1, 1, 300, 400)
    assert (service.oldest_us, service.slots, service.usable) == (101, 1, 1)
    gate.progress(ticket, 20)
    assert gate.left(77, 5) == [
        Settled(ticket, tag, KEY, USER, TENANT, SERVICE, 0xABC, 400, 100, 20, 100, 103, 103),
    ]
    settled = gate.settle(ticket, 200, 90, 30)
    assert settled == Settled(ticket, tag, KEY, USER, TENANT, SERVICE, 0xABC, 400, 90, 30, 100, 103, 200)
    tenant = gate.subject(Kind.TENANT, TENANT, 200)
    assert (tenant.open, tenant.waiting, tenant.tokens, tenant.tokens_left, tenant.refused) == (1, 1, 300, 580, 1)
    assert (tenant.requests_left, tenant.limit.concurrent, tenant.limit.tokens_burst) == (None, 2, 1000)
    assert [turn.ticket for turn in gate.turn(worker, 201)] == [waiting]
    gate.again(waiting, 202, avoid=0xABC)
    gate.remove_replica(0xABC)
    assert gate.turn(worker, 203) == [] == gate.replicas()
    settled = gate.abandon(waiting, 204)
    assert (settled.prompt_tokens, settled.completion_tokens, settled.replica) == (0, 0, 0xABC)
    with pytest.raises(CoreError, match="it has ended"):
        gate.abandon(waiting, 204)
    gate.audit()


def test_parts_of_a_limit() -> None:
    """What a gate has of limits that it shares: it does not refill, and holds for a time."""
    gate = new_gate()
    worker = gate.join(77, 5)
    gate.set_replica(0xABC, SERVICE, 9)
    gate.share(Kind.TENANT, TENANT, Limit(requests=600, tokens=1000, concurrent=8))
    refused = ask(gate, worker, 0)
    assert isinstance(refused, Refused) and refused.part and refused.what is Reason.NO_PART
    gate.parts_until(1_000_000)
    assert ask(gate, worker, 0) == Refused(Kind.TENANT, Reason.REQUESTS, 600, 600, 0, False, True)
    gate.give(Kind.TENANT, TENANT, 0, Part(3, 200, 2))
    first, second = admit(gate, worker, 1, 100), admit(gate, worker, 1, 60)
    assert ask(gate, worker, 900_000) == Refused(Kind.TENANT, Reason.CONCURRENT, 8, 2, 0, False, True)
    assert ask(gate, worker, 900_000, 1001) == Refused(Kind.TENANT, Reason.TOKENS, 1000, 960, 0, True, True)
    # 40 tokens are left: what a ticket did not use goes there, and what is beyond that goes back
    kept = gate.keep(Kind.TENANT, TENANT, 900_000, Part(0, 40, 1))
    assert (kept.part, kept.requests_back, kept.tokens_back, kept.open) == (Part(0, 40, 2, 2), 1, 0, 2)
    admit_more = ask(gate, worker, 900_000, 30)
    assert isinstance(admit_more, Refused)
    gate.settle(first, 900_001, 10, 20)
    kept = gate.keep(Kind.TENANT, TENANT, 900_001, Part(0, 40, 1))
    assert (kept.part.tokens, kept.tokens_over, kept.open) == (40, 70, 1)
    gate.settle(second, 900_002, 100, 50)  # more than it had reserved
    kept = gate.keep(Kind.TENANT, TENANT, 900_002, Part())
    assert (kept.part, kept.tokens_back, kept.tokens_over) == (Part(), -50, 0)
    gate.give(Kind.TENANT, TENANT, 900_002, Part(1, 100, 1))
    late = ask(gate, worker, 1_000_000)
    assert isinstance(late, Refused) and late.what is Reason.NO_PART
    # limits of its own again: it keeps what it has, and refills
    gate.set_limit(Kind.TENANT, TENANT, Limit(requests=600, tokens=1000, concurrent=4))
    assert isinstance(ask(gate, worker, 1_000_001, 100), int)
    assert not isinstance(ask(gate, worker, 1_000_002, 100), int)
    assert isinstance(ask(gate, worker, 7_000_002, 100), int)
    gate.share(Kind.TENANT, TENANT, Limit(requests=600), convert=False)
    assert gate.subject(Kind.TENANT, TENANT, 7_000_002).limit.concurrent == 4
    with pytest.raises(CoreError, match="has no limits that are shared"):
        gate.give(Kind.TENANT, TENANT, 7_000_002, Part())
    gate.audit()


def test_refusals_say_how_long() -> None:
    gate = new_gate()
    worker = gate.join(77, 5)
    gate.set_limit(Kind.KEY, KEY, Limit(tokens=600))
    assert ask(gate, worker, 0, 601) == Refused(Kind.KEY, Reason.TOKENS, 600, 0, 0, True)
    admit(gate, worker, 0, 600)
    assert ask(gate, worker, 0, 3) == Refused(Kind.KEY, Reason.TOKENS, 600, 600, 300_000, False)
    assert isinstance(ask(gate, worker, 299_999, 3), Refused)
    admit(gate, worker, 300_000, 3)
    gate.set_limit(Kind.KEY, KEY, Limit())
    admit(gate, worker, 300_000, 601)
    refused = ask(gate, worker, 0, may_start=False)
    assert isinstance(refused, Refused)
    assert refused.what == Reason.NO_REPLICAS


def test_deadlines_and_wakes() -> None:
    gate = new_gate()
    first, second = gate.join(77, 5), gate.join(78, 5)
    late = admit(gate, first, 0, deadline_us=100)
    admit(gate, first, 0, deadline_us=300)
    assert gate.expired(second, 200) == []
    assert gate.next_deadline_us == 300
    assert gate.wakes() == 1 << Gate.seat(first)
    assert gate.expired(first, 200) == [late]
    assert gate.wakes() == 0
    gate.abandon(late, 200)
    gate.set_replica(9, SERVICE, 1)
    assert gate.turn(second, 200) == []
    assert gate.wakes() == 1 << Gate.seat(first)
    assert len(gate.turn(first, 200)) == 1
    gate.audit()


def test_more_turns_than_one_call_fetches() -> None:
    gate = new_gate()
    worker = gate.join(77, 5)
    tickets = [admit(gate, worker, 0) for _ in range(SHAPE.tickets)]
    refused = ask(gate, worker, 0)
    assert refused == Refused(Kind.SERVICE, Reason.FULL, SHAPE.tickets, SHAPE.tickets, 0, False)
    gate.set_replica(9, SERVICE, SHAPE.tickets)
    assert [turn.ticket for turn in gate.turn(worker, 0)] == tickets
    assert len(gate.reap(77, 5, 0)) == SHAPE.tickets
    assert gate.workers() == []
    gate.audit()


def test_bad_regions_and_arguments() -> None:
    with pytest.raises(CoreError, match="65 workers"):
        Shape(workers=65).size()
    assert SHAPE.size() % ALIGNMENT == 0
    with pytest.raises(CoreError, match="holds no gate"):
        Gate(mmap.mmap(-1, SHAPE.size()))
    with pytest.raises(CoreError, match="needs"):
        Gate.format(mmap.mmap(-1, SHAPE.size() - 4096), SHAPE)
    gate = new_gate()
    assert gate.shape == SHAPE
    with pytest.raises(CoreError, match="join first") as error:
        gate.turn(64, 0)
    assert error.value.code == lib.SLUICE_ERROR_UNKNOWN
    worker = gate.join(77, 5)
    with pytest.raises(CoreError, match="is in the gate already"):
        gate.join(77, 5)
    with pytest.raises(CoreError, match="at most 2147483647"):
        ask(gate, worker, 0, 2**31)
    with pytest.raises(OverflowError):
        ask(gate, worker, -1)


# ---- the reference ----


class Pair:
    """The core and the reference, given the same calls; each answer is compared."""

    def __init__(self, seed: int, *, steady: bool = False) -> None:
        self.steady = steady  # replicas stay, so that it is seen which of them are slow
        self.random = random.Random(seed)
        shape = Shape(workers=3, subjects=64, services=4, replicas=6, tickets=24, prefixes=16)
        self.core, self.plain = new_gate(shape), reference.Reference(24, 16)
        self.workers = [self.core.join(10 + i, 1, seat=i) for i in range(3)]
        self.now = 1000
        self.open: dict[int, int] = {}  # ticket: worker
        self.refused: set[Reason] = set()
        self.turns = self.with_prefix = 0
        self.standings: set[tuple[Standing, Standing]] = set()

    def step(self) -> None:
        self.now += (
            self.random.choice([0, 0, 500_000, 3_000_000])
            if self.steady
            else (
                90_000_000 if self.random.random() < 0.02 else self.random.choice([0, 0, 1, 500, 500, 20_000, 400_000])
            )
        )
        choices: list[tuple[float, Callable[[], None]]] = [
            (12, self.admit),
            (6, self.fetch),
            (6, self.end),
            (12 if self.steady else 4, self.took),
            (2, self.again),
            (0.5, self.set),
            (0.2 if self.steady else 2, self.replica),
        ]
        self.random.choices([act for _, act in choices], [weight for weight, _ in choices])[0]()
        self.compare()

    def admit(self) -> None:
        worker = self.random.choice(self.workers)
        subjects = (
            self.random.randrange(4),
            self.random.randrange(4),
            self.random.randrange(1, 5),
            self.random.randrange(1, 4),
        )
        tokens = self.random.choice([0, 1, 50, 700, 5000, 60_000])
        prompt, priority = tokens // 3, self.random.choice([0, 0, 1, 7])
        deadline = self.random.choice([0, self.now + 1000, self.now + 3_000_000])
        prefix = tuple(block * 10 + self.random.randrange(2) for block in range(1, self.random.randrange(1, 5)))
        may_start, tag = self.random.random() < 0.9, self.random.getrandbits(128)
        key, user, tenant, service = subjects
        answer = self.core.admit(
            worker,
            self.now,
            key=key,
            user=user,
            tenant=tenant,
            service=service,
            tokens=tokens,
            prompt_tokens=prompt,
            priority=priority,
            deadline_us=deadline,
            prefix=prefix,
            may_start=may_start,
            tag=tag,
        )
        ticket = answer if isinstance(answer, int) else 0
        expected = self.plain.admit(
            ticket, worker, self.now, subjects, tokens, prompt, priority, deadline, prefix, may_start, tag
        )
        assert expected == (answer if isinstance(answer, Refused) else None)
        if isinstance(answer, Refused):
            self.refused.add(answer.what)
        else:
            self.open[answer] = worker

    def fetch(self) -> None:
        worker = self.random.choice(self.workers)
        turns = self.core.turn(worker, self.now)
        assert turns == self.plain.turn(worker, self.now)
        self.turns += len(turns)
        self.with_prefix += sum(turn.prefix_blocks > 0 for turn in turns)
        for turn in turns:
            completion = self.random.randrange(3)
            self.core.progress(turn.ticket, completion)
            self.plain.tickets[turn.ticket].completion = completion
        expired = self.core.expired(worker, self.now)
        assert expired == self.plain.expired(worker, self.now)
        for ticket in expired:
            assert self.core.abandon(ticket, self.now) == self.plain.abandon(ticket, self.now)
            del self.open[ticket]

    def end(self) -> None:
        if not self.open:
            return
        ticket = self.random.choice(list(self.open))
        del self.open[ticket]
        if self.random.random() < 0.3:
            assert self.core.abandon(ticket, self.now) == self.plain.abandon(ticket, self.now)
            return
        prompt, completion = self.random.choice([0, 5, 4000]), self.random.choice([0, 30, 9000])
        settled = self.core.settle(ticket, self.now, prompt, completion)
        assert settled == self.plain.end(ticket, self.now, prompt, completion)

    def again(self) -> None:
        has_replica = [t for t in self.open if self.plain.tickets[t].replica]
        if not has_replica:
            return
        ticket = self.random.choice(has_replica)
        avoid = self.random.choice([0, self.plain.tickets[ticket].replica_name])
        deadline = self.random.choice([None, 0, self.now + 1000])
        self.core.again(ticket, self.now, avoid, deadline)
        self.plain.again(ticket, self.now, avoid, deadline)

    def took(self) -> None:
        has_replica = [t for t in self.open if self.plain.tickets[t].replica]
        if not has_replica:
            return
        ticket = self.random.choice(has_replica)
        replica = self.plain.tickets[ticket].replica
        assert replica is not None
        usual = 200_000 if replica.name in (2, 3) and self.now // 200_000_000 % 3 < 2 else 12_000
        time, so_far = self.random.choice([*Time, *[Time.TOKEN] * 4]), self.random.random() < 0.2
        for _ in range(self.random.randrange(9)):
            us, tokens = int(usual * 2 ** self.random.gauss(0, 1)), self.random.choice([0, 5, 60])
            before = replica.standing
            changed = self.core.took(ticket, self.now, time, us, tokens=tokens, so_far=so_far)
            plain = self.plain.took(ticket, self.now, time, us, tokens, so_far)
            assert (changed is None) == (plain is None)
            if changed is not None and plain is not None:
                assert (changed.name, changed.standing, changed.standing_us, changed.slow) == (
                    plain.name, plain.standing, plain.standing_us, plain.slow[0]
                )  # fmt: skip
                self.standings.add((before, changed.standing))

    def set(self) -> None:
        amount = lambda *amounts: self.random.choice([*[None] * 8, *amounts])  # noqa: E731
        kind, subject = self.random.choice(list(Kind)), self.random.randrange(1, 5)
        limit = Limit(
            amount(0, 1, 60, 3000), amount(0, 60, 90_000), amount(0, 2, 9), amount(0, 1, 3), amount(2), amount(100_000)
        )
        if self.random.random() < 0.5:
            limit = Limit()
        self.core.set_limit(kind, subject, limit)
        self.plain.set_limit(kind, subject, limit)
        tenant, weight = self.random.randrange(1, 5), self.random.choice([1, 2, 7])
        self.core.set_weight(tenant, weight)
        self.plain.weights[tenant] = weight

    def replica(self) -> None:
        name = self.random.randrange(1, 7)
        if self.random.random() < 0.2:
            if name in self.plain.replicas:
                self.core.remove_replica(name)
                self.plain.remove_replica(name)
            return
        slots, use = self.random.randrange(6), self.random.choice([Use.USABLE, Use.USABLE, Use.LAST, Use.NO])
        service = 1 + name % 3
        slot = self.core.set_replica(name, service, slots, use)
        assert slot == self.plain.set_replica(name, service, slots, use)

    def compare(self) -> None:
        self.core.audit()
        wakes = {worker for worker in self.workers if self.core.wakes() >> Gate.seat(worker) & 1}
        assert wakes == self.plain.wakes()
        service = self.random.randrange(1, 4)
        waiting = self.plain.open(Kind.SERVICE, service, "waiting")
        figures = self.core.service(service)
        assert figures.waiting == len(waiting)
        assert figures.out == len(self.plain.outs(service))
        assert figures.oldest_us == min((t.since for t in waiting), default=0)
        kind, id_ = self.random.choice(list(Kind)), self.random.randrange(1, 5)
        subject, plain = self.core.subject(kind, id_, self.now), self.plain.subjects.get((kind, id_))
        bucket, now = plain.tokens if plain else None, max(self.now, self.plain.now)
        assert subject.tokens_left == (bucket.at(now) // reference.MINUTE_US if bucket else None)
        assert (subject.open, subject.tokens) == (
            len(self.plain.open(kind, id_)),
            sum(t.tokens for t in self.plain.open(kind, id_)),
        )


def test_as_the_reference() -> None:
    """Random calls: every answer and every figure is the same, and every reason to refuse occurs."""
    refused: set[Reason] = set()
    turns = with_prefix = 0
    for seed in range(1000 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 40):
        pair = Pair(seed)
        for _ in range(800):
            pair.step()
        refused |= pair.refused
        turns += pair.turns
        with_prefix += pair.with_prefix
    assert refused == set(Reason) - {Reason.NO_PART}  # of gates that share limits: test_parts_of_a_limit
    assert turns > 2000
    assert with_prefix > 200


def test_slow_replicas_as_the_reference() -> None:
    """Which are out, for how long, and who gets requests on trial."""
    standings: set[tuple[Standing, Standing]] = set()
    for seed in range(300 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 12):
        pair = Pair(seed, steady=True)
        for name in range(1, 7):
            pair.core.set_replica(name, 1 + name % 3, 5)
            pair.plain.set_replica(name, 1 + name % 3, 5, Use.USABLE)
        for _ in range(800):
            pair.step()
        standings |= pair.standings
    out, trial = Standing.OUT, Standing.TRIAL
    assert standings == {(Standing.IN, out), (trial, out), (trial, Standing.IN)}


# ---- real processes ----


TICK_US, TICKS, CLIENTS = 10_000, 200, 64


def serve(region: mmap.mmap, clock: Any, done: Any, admitted: Any, number: int) -> None:
    """A worker with so many clients, each of which asks at every tick of the clock unless it was told to wait."""
    gate = Gate(region)
    worker, waits_until = gate.join(os.getpid(), 1), [0] * CLIENTS
    for tick in range(1, TICKS + 1):
        while clock.value < tick * TICK_US:
            time.sleep(0)
        now_us = clock.value
        for client in range(CLIENTS):
            if now_us < waits_until[client]:
                continue
            answer = ask(gate, worker, now_us, 100)
            if isinstance(answer, Refused):
                assert answer.what == Reason.TOKENS
                assert 0 < answer.retry_after_us <= 2000
                waits_until[client] = now_us + answer.retry_after_us
            else:
                admitted[number] += 1
                gate.settle(answer, now_us, 0, 100)
        done[number] = tick


def test_four_processes_hammer_one_limit() -> None:
    """256 clients share 60,000 requests and 3,000,000 tokens a minute in four processes: exactly the limit is admitted.

    The clock goes on when all have asked, so what is admitted does not depend on how busy the machine is.
    """
    region, context = mmap.mmap(-1, SHAPE.size()), get_context("fork")
    clock, done, admitted = context.RawValue("Q", 0), context.RawArray("Q", 4), context.RawArray("Q", 4)
    gate = Gate.create(region, SHAPE)
    gate.set_limit(
        Kind.TENANT, TENANT, Limit(requests=60_000, tokens=3_000_000, requests_burst=100_000, tokens_burst=10_000)
    )
    workers = [
        context.Process(target=serve, args=(region, clock, done, admitted, number), daemon=True) for number in range(4)
    ]
    for worker in workers:
        worker.start()
    for tick in range(1, TICKS + 1):
        clock.value = tick * TICK_US
        while min(done) < tick:
            assert all(worker.exitcode in (None, 0) for worker in workers)
            time.sleep(0)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sum(admitted) == 100 + 5 * TICKS - 5  # the bucket, and what each tick adds while it is not full
    assert sum(number > 0 for number in admitted) >= 2
    tenant = gate.subject(Kind.TENANT, TENANT, 0)
    assert tenant.tokens_left == tenant.open == tenant.tokens == 0
    gate.audit()


def live(region: mmap.mmap, seed: int) -> None:
    """Admits, streams, settles and abandons for ever, all at random."""
    gate, rng = Gate(region), random.Random(seed)
    worker = gate.join(os.getpid(), 1)
    flying: list[int] = []
    while True:
        now_us = time.monotonic_ns() // 1000
        for _ in range(rng.randrange(4)):
            ask(gate, worker, now_us, rng.randrange(200), deadline_us=now_us + rng.randrange(1, 3000))
        for ticket in gate.expired(worker, now_us):
            gate.abandon(ticket, now_us)
        flying += [turn.ticket for turn in gate.turn(worker, now_us)]
        for ticket in flying:
            gate.progress(ticket, rng.randrange(1, 100))
        rng.shuffle(flying)
        for ticket in flying[3:]:
            gate.settle(ticket, now_us, 3, rng.randrange(200))
        del flying[3:]


def test_killed_workers_leave_nothing() -> None:
    region = mmap.mmap(-1, SHAPE.size())
    gate, rng = Gate.create(region, SHAPE), random.Random(1)
    gate.set_limit(Kind.TENANT, TENANT, Limit(concurrent=40, queued=30, tokens=2**31 - 1))
    gate.set_replica(9, SERVICE, 12)
    context, left = get_context("fork"), 0

    def start(seed: int) -> int:
        process = context.Process(target=live, args=(region, seed), daemon=True)
        process.start()
        assert process.pid
        processes[process.pid] = process
        return process.pid

    processes: dict[int, BaseProcess] = {}
    pids = [start(seed) for seed in range(4)]
    kills = 200 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 25
    for number in range(kills + 4):
        time.sleep(rng.random() * 0.05)
        victim = pids.pop(0)
        os.kill(victim, signal.SIGKILL)
        processes[victim].join(60)
        assert processes[victim].exitcode == -signal.SIGKILL
        gate.audit()
        bills = {bill.ticket for bill in gate.left(victim, 1)}  # the others go on: more of its tickets may get turns
        reaped = gate.reap(victim, 1, time.monotonic_ns() // 1000)
        assert bills <= {bill.ticket for bill in reaped}
        assert all(bill.replica == 9 and bill.tenant == TENANT for bill in reaped)
        left += len(reaped)
        gate.audit()
        tenant = gate.subject(Kind.TENANT, TENANT, 0)
        assert tenant.open <= 40
        assert gate.service(SERVICE).in_flight <= 12
        if number < kills:
            pids.append(start(100 + number))
    assert left > 0
    assert gate.workers() == []
    tenant, service = gate.subject(Kind.TENANT, TENANT, 0), gate.service(SERVICE)
    assert (tenant.open, tenant.waiting, tenant.tokens) == (0, 0, 0)
    assert (service.waiting, service.in_flight, service.tokens_in_flight) == (0, 0, 0)
    assert gate.wakes() == 0
