"""Decisions alone, and against queues in simulated time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from sluice.serve.replicad.scale import Decision, Memory, Need, Phase, Replica, Spec, decide, needed_now

SPEC = Spec("words", least=0, most=8, slots=4, idle_s=120.0, ready_s=120.0, drain_s=30.0, queue_delay_s=1.0)
NOW = 1_750_000_000.0


def decided(
    replicas: list[Replica],
    need: Need = Need(),  # noqa: B008
    memory: Memory = Memory(),  # noqa: B008
    ahead: int = 0,
    **words: object,
) -> Decision:
    return decide(NOW, replace(SPEC, **words), need, ahead, replicas, memory, may_launch=True)  # type: ignore[arg-type]


def ready(name: str, **words: object) -> Replica:
    return replace(Replica(name, Phase.READY, NOW - 100, started=NOW - 90, ends=NOW + 86400), **words)  # type: ignore[arg-type]


def test_equal_inputs_give_equal_decisions() -> None:
    replicas = [ready("a"), ready("b", load=3), Replica("c", Phase.PENDING, NOW - 5)]
    need = Need(waiting=7, oldest_s=2.0, in_flight=8, tokens=900, delay_s=1.5)
    assert decided(replicas, need) == decided(list(reversed(replicas)), need) == decided(replicas, need)


@pytest.mark.parametrize(
    ("need", "count", "wanted"),
    [
        (Need(), 0, 0),
        (Need(waiting=1), 0, 1),
        (Need(waiting=100), 0, 7),  # 100 requests are four rounds of 7 replicas of 4 slots
        (Need(in_flight=4), 1, 1),
        (Need(in_flight=5), 2, 2),
        (Need(waiting=1, in_flight=4, oldest_s=0.5), 1, 1),  # within the target
        (Need(waiting=1, in_flight=4, oldest_s=1.5), 1, 2),
        (Need(waiting=1, in_flight=4, delay_s=1.5), 1, 2),
        (Need(waiting=100, in_flight=8, oldest_s=60), 2, 4),  # no more than twice what is there
        (Need(waiting=0, in_flight=2, delay_s=60), 1, 1),  # nobody waits, and there is room: the delay is of before
    ],
)
def test_what_is_needed(need: Need, count: int, wanted: int) -> None:
    assert needed_now(SPEC, need, count) == wanted


def test_tokens_in_flight_count_where_there_is_a_target() -> None:
    need = Need(in_flight=4, tokens=100_000)
    assert needed_now(SPEC, need, 1) == 1
    assert needed_now(replace(SPEC, tokens_in_flight=40_000), replace(need, in_flight=12), 1) == 3
    assert needed_now(replace(SPEC, tokens_in_flight=40_000), need, 1) == 1, "one long request is not made shorter"


def test_the_order_in_which_they_go() -> None:
    replicas = [ready("busy", load=3), ready("free"), Replica("starts", Phase.STARTING, NOW - 3, started=NOW - 2)]
    memory = Memory()
    found = decided(replicas, Need(in_flight=5), memory)
    assert (dict(found.end), found.drain) == ({"starts": "it is not needed"}, ())
    found = decided(replicas, Need(in_flight=1), memory)
    assert set(found.end) == {"starts"} and found.drain == ("free",)


def test_all_above_the_guaranteed_ones_are_on_lent_resources() -> None:
    busy = Need(in_flight=16)
    for replicas, launch, lent in (
        ([], 2, 0),  # what is needed first
        ([ready("own"), ready("two")], 2, 2),
        ([ready("own"), ready("two"), ready("a", lent=True)], 1, 1),
        ([ready("a", lent=True), ready("b", lent=True), ready("c", lent=True)], 2, 0),  # these do the work of others
        ([ready("own"), ready("old", leaves="node n1 is drained"), ready("a", lent=True)], 2, 1),
    ):
        found = decided(replicas, busy if replicas else Need(), least=2, guaranteed=2, most=4)
        assert (found.launch, found.lent) == (launch, lent), replicas
        assert not found.drain


def test_a_lent_one_does_a_guaranteed_ones_work_until_that_is_ready() -> None:
    lent, own = ready("lent", lent=True), Replica("own", Phase.STARTING, NOW - 3, started=NOW - 2)
    words = {"least": 1, "guaranteed": 1, "most": 3}
    found = decided([lent, own], **words)
    assert (found.launch, found.drain, dict(found.end)) == (0, (), {})
    found = decided([replace(lent, load=3), replace(own, phase=Phase.READY)], Need(in_flight=3), **words)
    assert found.drain == ("lent",), "though it has more to do"


def test_what_is_taken_back_goes_as_soon_as_another_one_is_ready() -> None:
    lent = ready("lent", lent=True, taken=True, leaves="Slurm ends the job", ends=NOW + 30)
    words = {"least": 0, "guaranteed": 0, "most": 3}
    alone = decided([lent], Need(in_flight=12), **words)
    assert alone.drain == () and alone.launch == 3
    assert decided([lent, ready("b", lent=True)], Need(in_flight=12), **words).drain == ("lent",)
    assert decided([replace(lent, ends=NOW + 5)], Need(in_flight=12), **words).drain == ("lent",), "its time is over"


def test_ahead_of_what_is_usual() -> None:
    assert decided([], ahead=3).launch == 3
    assert decided([], ahead=30).launch == SPEC.most
    assert decided([], ahead=3, paused=True).launch == 0


def test_one_at_a_time_after_a_failure_and_not_before_its_time() -> None:
    failed = Memory().with_failure(NOW - 1, "no")
    assert decided([], Need(waiting=50), failed).launch == 0
    failed = replace(failed, failed=NOW - 6)
    assert decided([], Need(waiting=50), failed).launch == 1
    assert decided([Replica("a", Phase.PENDING, NOW - 5)], Need(waiting=50), failed).launch == 0


def test_never_more_living_than_the_most_and_one() -> None:
    rng = random.Random(7)
    phases = list(Phase)
    for _ in range(3000):
        count = rng.randrange(12)
        replicas = [
            Replica(
                f"{number}", rng.choice(phases), NOW - rng.random() * 1000, started=NOW - rng.random() * 500,
                ends=NOW + rng.random() * 300, leaves=rng.choice(["", "", "drained"]),
                lost=rng.choice([None, None, NOW - 5]), drained=rng.choice([None, NOW - 3]),
            )
            for number in range(count)
        ]  # fmt: skip
        most = rng.randrange(1, 9)
        spec = replace(SPEC, most=most, least=rng.randrange(most + 1), paused=rng.random() < 0.1)
        need = Need(rng.randrange(50), rng.random() * 5, rng.randrange(50), rng.randrange(9999), rng.random() * 5)
        found = decide(NOW, spec, need, rng.randrange(4), replicas, Memory(), may_launch=True)
        assert found.launch == 0 or found.launch + count <= most + 1
        assert found.wanted <= most and (spec.paused or found.wanted >= spec.least)
        names = {one.launch: one for one in replicas}
        assert all(names[one].phase is Phase.READY for one in found.drain) and not set(found.drain) & set(found.end)
        serving = [one for one in replicas if one.phase is Phase.READY and one.lost is None]
        stays = [one for one in serving if one.launch not in found.drain and one.launch not in found.end]
        over = [one for one in serving if one.ends is not None and one.ends < NOW + 10]
        assert len(stays) >= min(found.wanted, len(serving)) - len(over), "no more drain than can be spared"


# ---- a small queue ----


@dataclass
class Queue:
    """Requests that arrive, wait, and take a replica's slot for a while; a second at a time."""

    spec: Spec
    start_s: int = 30
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = NOW
    waiting: deque[float] = field(default_factory=deque)
    busy: list[float] = field(default_factory=list)
    replicas: dict[str, tuple[float, bool]] = field(default_factory=dict)  # ready at, drains
    memory: Memory = field(default_factory=Memory)
    waits: list[float] = field(default_factory=list)
    lately: deque[tuple[float, float]] = field(default_factory=deque)
    spent: float = 0.0
    changes: int = 0
    number: int = 0

    def run(self, seconds: int, rate: float, service_s: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for _ in range(self._arrivals(rate)):
                self.waiting.append(self.now)
            self.busy = [end for end in self.busy if end > self.now]
            slots = sum(at <= self.now for at, _ in self.replicas.values()) * self.spec.slots
            while self.waiting and len(self.busy) < slots:
                wait = self.now - self.waiting.popleft()
                self.waits.append(wait)
                self.lately.append((self.now, wait))
                self.busy.append(self.now + self.rng.expovariate(1 / service_s))
            while self.lately and self.lately[0][0] < self.now - 10:
                self.lately.popleft()
            self._decide()
            self.spent += len(self.replicas)

    def _arrivals(self, rate: float) -> int:
        count, left = 0, self.rng.expovariate(rate) if rate else 2.0
        while left < 1.0:
            count += 1
            left += self.rng.expovariate(rate)
        return count

    def _decide(self) -> None:
        recent = sorted(wait for _, wait in self.lately)
        need = Need(
            len(self.waiting), self.now - self.waiting[0] if self.waiting else 0.0, len(self.busy), 0,
            recent[int(0.95 * (len(recent) - 1))] if recent else 0.0,
        )  # fmt: skip
        seen = [
            Replica(
                name, Phase.READY if at <= self.now else Phase.STARTING, at - self.start_s, started=at - self.start_s
            )
            for name, (at, _) in self.replicas.items()
        ]
        found = decide(self.now, self.spec, need, 0, seen, self.memory, may_launch=True)
        self.memory = found.memory
        for name in (*found.drain, *found.end):
            del self.replicas[name]
            self.changes += 1
        for _ in range(found.launch):
            self.number += 1
            self.changes += 1
            self.replicas[f"{self.number:06}"] = self.now + self.start_s, False

    def late(self, seconds: float) -> float:
        """Share of requests that waited longer."""
        return sum(wait > seconds for wait in self.waits) / max(1, len(self.waits))


def test_a_steady_load_gets_what_it_needs_and_no_more() -> None:
    queue = Queue(SPEC)
    queue.run(600, rate=4.0, service_s=3.0)  # 12 slots busy: three replicas are full
    queue.waits.clear()
    queue.spent = queue.changes = 0
    queue.run(3600, rate=4.0, service_s=3.0)
    assert queue.late(2.0) < 0.01
    assert queue.spent / 3600 <= 6.5, "replicas, where four to five are needed for its peaks"
    assert queue.changes <= 20, "in an hour"


def test_a_step_is_followed_and_given_back() -> None:
    queue = Queue(SPEC)
    queue.run(600, rate=0.3, service_s=3.0)
    assert len(queue.replicas) <= 2
    queue.run(300, rate=6.0, service_s=3.0)
    queue.waits.clear()
    queue.run(300, rate=6.0, service_s=3.0)
    assert queue.late(2.0) < 0.02
    queue.run(600, rate=0.3, service_s=3.0)
    assert len(queue.replicas) <= 2
    queue.run(600, rate=0.0, service_s=3.0)
    assert not queue.replicas


def test_rare_requests_do_not_make_it_flap() -> None:
    queue = Queue(replace(SPEC, idle_s=300.0))
    queue.run(4 * 3600, rate=1 / 60, service_s=3.0)
    assert queue.changes <= 40 and len(queue.replicas) <= 1


def test_overload_stops_at_the_most() -> None:
    queue = Queue(replace(SPEC, most=3))
    queue.run(600, rate=20.0, service_s=3.0)
    assert len(queue.replicas) == 3 and queue.changes == 3
