"""Schedules small enough to be computed by hand, and what must be true of every replay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError
from sluice.core.order import Factor, FairShare, OrderPolicy
from sluice.core.placement import Policy, Request
from sluice.core.replay import Backfill, Preemption, ReplayConfig, Replayed, ReplayJob, State, replay


def cluster_of(nodes: int, gpus: int) -> Cluster:
    cluster = Cluster(nodes)
    shape = cluster.add_shape(NodeShape(tuple(GpuShape("a", 1000) for _ in range(gpus))))
    for _ in range(nodes):
        cluster.add_node(shape, 10**6, 10**6)
    return cluster


def job(submit: int, run: int, gpus: int = 1, estimate: int = 0, **more: Any) -> ReplayJob:
    """A job of up to 4 GPUs on one node; request number = GPUs - 1."""
    return ReplayJob(submit, run, estimate or max(1, run), gpus - 1, gpus * 1000, **more)


REQUESTS = [Request(gpus=gpus) for gpus in (1, 2, 3, 4)]


def run(
    jobs: list[ReplayJob], *, nodes: int = 1, gpus: int = 4, fairshare: FairShare | None = None, **config: Any
) -> Replayed:
    return replay(cluster_of(nodes, gpus), ReplayConfig(**config), REQUESTS, jobs, fairshare=fairshare)


def starts(replayed: Replayed) -> list[int]:
    return [outcome.start for outcome in replayed.outcomes]


def ends(replayed: Replayed) -> list[int]:
    return [outcome.end for outcome in replayed.outcomes]


def weighted(*factors: Factor, **more: Any) -> OrderPolicy:
    return OrderPolicy(dict.fromkeys(factors, 1000), **more)


# A job of three GPUs is in the wide one's way until 10; then come two small ones: until 14, and until 10.
HELD = [job(0, 10, 3), job(1, 5, 4), job(2, 12, 1), job(3, 7, 1)]


@pytest.mark.parametrize(
    ("backfill", "expected"),
    [
        (Backfill.STRICT, [0, 10, 15, 15]),  # nobody overtakes the wide job
        (Backfill.EASY, [0, 10, 15, 3]),  # only a job that is out of its way at 10
        (Backfill.CONSERVATIVE, [0, 10, 15, 3]),
        (Backfill.GREEDY, [0, 17, 2, 10]),  # any job that fits, and the wide job waits longer
    ],
)
def test_backfill(backfill: Backfill, expected: list[int]) -> None:
    assert starts(run(HELD, backfill=backfill)) == expected


def test_easy_lets_a_long_job_by_where_it_does_not_delay_the_reservation() -> None:
    # The wide job is reserved node 0 from 10 on; a long job may take the other node, which is never needed.
    jobs = [job(0, 10, 3), job(0, 50, 2), job(1, 5, 4), job(2, 100, 2)]
    assert starts(run(jobs, nodes=2, backfill=Backfill.EASY)) == [0, 0, 10, 2]


def test_easy_reserves_by_the_estimate_and_starts_when_there_is_room() -> None:
    # Expected until 100, so that a job of 50 may go ahead; but the first one ends at 10 already.
    jobs = [job(0, 10, 3, estimate=100), job(1, 5, 4), job(2, 50, 1)]
    assert starts(run(jobs, backfill=Backfill.EASY)) == [0, 52, 2]


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (Factor.SERVICE, [0, 15, 10, 19]),  # 16, 10, 20 GPU-ticks; two of the four GPUs stay idle at first
        (Factor.TIME, [0, 10, 14, 19]),  # 4, 5, 5 ticks
        (Factor.SIZE, [0, 10, 19, 14]),  # 4, 2, 4 GPUs
    ],
)
def test_order_of_what_waits(factor: Factor, expected: list[int]) -> None:
    jobs = [job(0, 10, 4), job(1, 4, 4), job(2, 5, 2), job(3, 5, 4)]
    order = weighted(factor, size_full_gpus=4)
    got = starts(run(jobs, order=order, backfill=Backfill.STRICT))
    assert got == expected


def test_least_laxity_first() -> None:
    # At 10 the laxities are 100-10-5, 30-10-5 and none.
    jobs = [job(0, 10, 4), job(1, 5, 4, deadline=100), job(2, 5, 4, deadline=30), job(3, 5, 4)]
    order = weighted(Factor.DEADLINE, laxity_horizon_s=1000)
    assert starts(run(jobs, order=order)) == [0, 15, 10, 20]


def test_fair_share_lets_the_other_tenant_go_first() -> None:
    tree = FairShare(3)
    heavy, light = tree.add(0, 1), tree.add(0, 1)
    jobs = [job(0, 10, 4, account=heavy), job(1, 5, 4, account=heavy), job(2, 5, 4, account=light)]
    order = weighted(Factor.FAIR_SHARE)
    assert starts(run(jobs, order=order, fairshare=tree)) == [0, 15, 10]


def test_starvation_bound() -> None:
    # Short jobs keep coming; the long one, submitted first, has waited 20 at time 21.
    jobs = [job(0, 6, 4), job(1, 50, 4), *(job(2 + 5 * number, 5, 4) for number in range(8))]
    jobs.sort(key=lambda one: one.submit)
    bounded = run(jobs, order=weighted(Factor.TIME, starvation_s=20))
    assert bounded.outcomes[1].start == 21
    assert run(jobs, order=weighted(Factor.TIME)).outcomes[1].start == 46


def test_preemption_by_order_is_shortest_remaining_first() -> None:
    # The short job interrupts at 2 and pays nothing; the long one goes on at 5 with 8 left.
    replayed = run(
        [job(0, 10, 4), job(2, 3, 4)],
        order=weighted(Factor.TIME),
        backfill=Backfill.GREEDY,
        preemption=Preemption.ORDER,
    )
    assert ends(replayed) == [13, 5]
    assert replayed.outcomes[0].preemptions == 1 and replayed.outcomes[0].busy == 10


def test_restart_is_paid_at_each_start() -> None:
    # 2 to start, 10 of work; interrupted at 4 with 8 left by a job of 1 + 3; then 2 again.
    jobs = [job(0, 10, 4, restart=2), job(4, 3, 4, restart=1)]
    replayed = run(jobs, order=weighted(Factor.TIME), backfill=Backfill.GREEDY, preemption=Preemption.ORDER)
    assert ends(replayed) == [4 + 4 + 2 + 8, 8]


def test_restart_at_each_decision_is_paid_by_all_that_ran_up_to_it() -> None:
    # Two jobs side by side: the second one's arrival at 5 makes a decision, which costs the first one 2 of its 5.
    jobs = [job(0, 10, 2, restart=2), job(5, 3, 2, restart=1)]
    replayed = run(
        jobs,
        order=weighted(Factor.TIME),
        backfill=Backfill.GREEDY,
        preemption=Preemption.ORDER,
        restart_each_decision=True,
    )
    # The first: 3 done at 5, 1 more by the decision at 8 (3 - 2), then the 6 that are left.
    assert ends(replayed) == [14, 8]


@pytest.mark.parametrize(("checkpoint", "end"), [(0, 13), (4, 16), (-1, 20)])
def test_a_preempted_job_keeps_its_last_checkpoint(checkpoint: int, end: int) -> None:
    # Interrupted after 7 of 10 by a job of 3: keeps 7, 4 or nothing.
    replayed = run([job(0, 10, 4, tier=0), job(7, 3, 4, tier=1)], preemption=Preemption.TIERS, checkpoint=checkpoint)
    assert ends(replayed) == [end, 10]


def test_a_lower_tier_never_preempts() -> None:
    replayed = run([job(0, 10, 4, tier=1), job(1, 3, 4, tier=0)], preemption=Preemption.TIERS)
    assert starts(replayed) == [0, 10]


def test_guard_starts_the_longest_job_in_time() -> None:
    # Two GPUs, work for 1,000 in short jobs, and one of 100. Least service first begins with it when all else is done.
    jobs = [job(0, 100, 1), *(job(0, 5, 1) for _ in range(400))]
    config = {"order": weighted(Factor.SERVICE), "backfill": Backfill.GREEDY, "preemption": Preemption.ORDER}
    assert max(ends(run(jobs, nodes=2, gpus=1, **config))) == 1100
    assert max(ends(run(jobs, nodes=2, gpus=1, **config, guarded=True, guard_margin_permille=300))) < 1060


def test_an_interval_collects_decisions() -> None:
    replayed = run([job(0, 5, 4), job(1, 5, 4), job(2, 5, 1)], interval=10)
    assert starts(replayed) == [0, 10, 20]


def test_what_fits_nowhere_is_rejected() -> None:
    replayed = run([job(0, 5, 4), job(0, 5, 1)], gpus=2)
    assert [outcome.state for outcome in replayed.outcomes] == [State.REJECTED, State.ENDED]


def test_samples_say_what_was_held() -> None:
    replayed = run([job(0, 10, 3), job(5, 10, 2)], sample_interval=5)
    assert [(sample.at, sample.gpus_milli, sample.pending) for sample in replayed.samples] == [
        (0, 3000, 0),
        (5, 3000, 1),
        (10, 2000, 0),
        (15, 2000, 0),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"submit": -1}, "job 1"),
        ({"estimate": 0}, "estimate at least 1"),
        ({"request": 9}, "request 9 of 4"),
        ({"submit": 0}, "sort by submission"),
    ],
)
def test_bad_jobs_are_named(change: dict[str, int], words: str) -> None:
    second = job(7, 5)
    for name, value in change.items():
        setattr(second, name, value)
    with pytest.raises(CoreError, match=words):
        run([job(5, 5), second])


def test_contradicting_policies_are_refused() -> None:
    with pytest.raises(CoreError, match="EASY"):
        run([job(0, 1)], backfill=Backfill.EASY, preemption=Preemption.ORDER)


# Two jobs on one node, of which the first ends at 10, and one on the other: a wide one fits nowhere before 100.
SPREAD = [(0, 100, 2), (0, 10, 2), (0, 100, 2), (1, 5, 4)]
MOVES = {"move_wait": 5, "move_cost": 3, "move_factor_permille": 1000, "moves_per_job": 1, "moves_per_hour": 8}


@pytest.mark.parametrize(
    ("change", "movable", "start", "end", "moves"),
    [
        ({}, 1, 10, 103, 1),  # moved at 10, and it does nothing for 3
        ({}, 0, 100, 100, 0),
        ({"move_wait": 20}, 1, 100, 100, 0),  # nothing happens at 21
        ({"move_wait": 0}, 1, 100, 100, 0),
        ({"move_factor_permille": 60_000}, 1, 100, 100, 0),  # it gains 90 on 4 GPUs, at the cost of 3 on 2
        ({"move_factor_permille": 59_999}, 1, 10, 103, 1),
        ({"moves_per_job": 0}, 1, 100, 100, 0),
        ({"moves_per_hour": 0}, 1, 100, 100, 0),
    ],
)
def test_a_job_is_moved_for_the_first_that_cannot_start(
    change: dict[str, int], movable: int, start: int, end: int, moves: int
) -> None:
    jobs = [job(*one, movable=movable) for one in SPREAD]
    replayed = run(jobs, nodes=2, backfill=Backfill.EASY, **{**MOVES, **change})
    assert (replayed.outcomes[3].start, replayed.outcomes[0].end, replayed.outcomes[0].moves) == (start, end, moves)
    assert [one.moves for one in replayed.outcomes[1:]] == [0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"backfill": Backfill.CONSERVATIVE},
        {"preemption": Preemption.ORDER, "backfill": Backfill.GREEDY},
        {"move_cost": 0},
        {"move_factor_permille": 0},
        {"moves_per_hour": 65},
        {"move_wait": -1},
    ],
)
def test_moves_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CoreError, match="moves"):
        run([job(0, 1)], **{**MOVES, **change})


JOBS = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 30),
        st.integers(1, 4),
        st.integers(1, 60),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(0, 80),
    ),
    min_size=1,
    max_size=30,
)
CONFIGS = st.fixed_dictionaries(
    {
        "placement": st.sampled_from(list(Policy)),
        "order": st.sampled_from(
            [OrderPolicy(), weighted(Factor.SERVICE), weighted(Factor.AGE, Factor.TIME, starvation_s=30)]
        ),
        "learn": st.booleans(),
        "guarded": st.booleans(),
        "interval": st.sampled_from([0, 7]),
        "depth": st.sampled_from([0, 2]),
        "checkpoint": st.sampled_from([0, 3, -1]),
        "sample_interval": st.just(1),
    }
)
MODES = st.sampled_from(
    [
        (backfill, preemption)
        for backfill in Backfill
        for preemption in Preemption
        if preemption != Preemption.ORDER or backfill in {Backfill.STRICT, Backfill.GREEDY}
    ]
)


@settings(max_examples=150)
@given(JOBS, CONFIGS, MODES, st.booleans())
def test_conservation(
    drawn: list[tuple[int, ...]], config: dict[str, Any], mode: tuple[Backfill, Preemption], moving: bool
) -> None:
    """Every job ends once, not before its work is done; no GPU is held twice; the same input gives the same output."""
    jobs = [
        job(submit, work, gpus, estimate, restart=restart, tier=tier, deadline=deadline, movable=tier)
        for submit, work, gpus, estimate, restart, tier, deadline in sorted(drawn)
    ]
    backfill, preemption = mode
    cluster = cluster_of(2, 4)
    config = {**config, "backfill": backfill, "preemption": preemption}
    if moving and backfill != Backfill.CONSERVATIVE and preemption != Preemption.ORDER:
        config |= {**MOVES, "move_wait": 1, "move_factor_permille": 1}
    replayed = replay(cluster, ReplayConfig(**config), REQUESTS, jobs)
    cluster.check()
    assert cluster.totals().allocations == 0
    for one, outcome in zip(jobs, replayed.outcomes, strict=True):
        assert outcome.state == State.ENDED
        assert one.submit <= outcome.start <= outcome.end
        assert outcome.busy >= one.run + one.restart
        assert outcome.end - outcome.start >= outcome.busy
        if not outcome.preemptions:
            paid = one.run + one.restart + 3 * outcome.moves
            assert outcome.busy == paid == outcome.end - outcome.start
        assert outcome.moves <= one.movable
    held = sum(outcome.busy * one.gpus_milli for one, outcome in zip(jobs, replayed.outcomes, strict=True))
    span = max(ends(replayed)) - min(one.submit for one in jobs)
    assert held <= span * 8000
    if max(ends(replayed)) - jobs[0].submit < 1000:  # samples have not been thinned: one a tick
        assert all(sample.gpus_milli <= 8000 for sample in replayed.samples)
        assert sum(sample.gpus_milli for sample in replayed.samples) == held
    assert replay(cluster_of(2, 4), ReplayConfig(**config), REQUESTS, jobs) == replayed


@settings(max_examples=100)
@given(JOBS)
def test_easy_never_delays_the_first_in_line(drawn: list[tuple[int, ...]]) -> None:
    """With exact estimates the first job that waits starts as early as in strict order."""
    jobs = [job(0, work, gpus) for _, work, gpus, *_ in drawn]
    strict, easy = (run(jobs, backfill=backfill) for backfill in (Backfill.STRICT, Backfill.EASY))
    first_blocked = next((index for index, start in enumerate(starts(strict)) if start > 0), None)
    if first_blocked is not None:
        assert easy.outcomes[first_blocked].start <= strict.outcomes[first_blocked].start
