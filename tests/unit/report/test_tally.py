"""Sums, histograms, and the spans that jobs are counted in."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.exchange.pool_costs import MOST_NODES, PoolCosts
from sluice.report.count import Counter, Span, gpu_type, tally
from sluice.report.fields import efficiency, wasted_gpu_s
from sluice.report.fleet import Fleet, NodeGpus
from sluice.report.summaries import JobUse
from sluice.report.tally import SUMS, Histogram, Key, Tally, bucket_of, group, value_of
from sluice.slurm.allocations import Allocation

FLEET = Fleet({"n1": NodeGpus("h100", {"h100": 8}, 8, 8 * 81_920)})
JOB = Allocation(
    id=17, label="17", name="train", user="alice", account="physics", qos="normal", partition="main",
    state="COMPLETED", exit_code="0:0", submit=900, eligible=950, start=1000, end=1600, elapsed_s=600, limit_s=3600,
    node_count=1, nodes="n1", requested="cpu=4,mem=8G,gres/gpu=2",
    allocated="cpu=4,mem=8G,gres/gpu=2,gres/gpu:h100=2,node=1", admin_comment="",
)  # fmt: skip


@given(st.integers(0, 10**9))
def test_a_bucket_holds_its_values_within_a_64th(seconds: int) -> None:
    found = value_of(bucket_of(seconds))
    assert seconds <= found <= seconds * (1 + 1 / 64) + 1


@given(st.lists(st.integers(0, 10**7), min_size=1), st.floats(0, 100))
def test_percentiles_are_at_most_a_64th_too_high(values: list[int], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rank = max(1, -(-len(values) * percent // 100))
    truth = sorted(values)[int(min(rank, len(values))) - 1]
    found = histogram.percentile(percent)
    assert found is not None
    assert truth <= found <= truth * (1 + 1 / 64) + 1


def test_nothing_has_no_percentile() -> None:
    assert Histogram().percentile(50) is None
    assert Histogram().mean() is None


def test_histograms_add_up() -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for number in range(1000):
        (one if number % 3 else other).add(number * 7)
        both.add(number * 7)
    one.merge(other)
    assert one.counts == both.counts


def test_a_job_within_the_span() -> None:
    found = tally(JOB, Span(0, 5000), None, FLEET)
    assert found is not None
    assert (found.ran, found.started, found.ended, found.completed) == (1, 1, 1, 1)
    assert (found.wall_s, found.gpu_s, found.cpu_s, found.memory_mib_s) == (600, 1200, 2400, 600 * 8192)
    assert found.waits.percentile(50) == 50
    assert (found.limit_s, found.limited_s) == (3600, 600)
    assert (found.device_s, found.busy_s, found.measured_jobs) == (0, 0, 0)


def test_spans_add_up_to_the_whole() -> None:
    """Cut anywhere, the parts of a span give what the span gives, to the second."""
    chance = random.Random(5)
    jobs = []
    for number in range(300):
        start = chance.randrange(0, 10_000)
        end = start + chance.choice([0, 1, 50, 5000, chance.randrange(0, 9000)])
        jobs.append(replace(JOB, id=number, eligible=start, start=start, end=end, elapsed_s=end - start))
    whole, parts = Counter(FLEET), Counter(FLEET)
    cuts = [0, 1234, 5000, 5001, 9999, 25_000]
    for job in jobs:
        whole.add(job, Span(0, 25_000), None)
        for place, (begin, end) in enumerate(pairwise(cuts)):
            parts.add(job, Span(begin, end), None, first=place == 0)
    (expected,), (found,) = whole.cells.values(), parts.cells.values()
    assert {name: getattr(found, name) for name in SUMS} == {name: getattr(expected, name) for name in SUMS}
    assert found.waits.counts == expected.waits.counts


@pytest.mark.parametrize(
    ("job", "span"),
    [
        (JOB, Span(0, 1000)),  # starts as the span ends
        (JOB, Span(1601, 9000)),
        (replace(JOB, start=None, state="CANCELLED", end=1600), Span(0, 1600)),
    ],
)
def test_not_in_the_span(job: Allocation, span: Span) -> None:
    assert tally(job, span, None, FLEET) is None


def test_cancelled_before_it_started_uses_nothing() -> None:
    found = tally(replace(JOB, start=None, state="CANCELLED", allocated=""), Span(0, 5000), None, FLEET)
    assert found is not None
    assert (found.ended, found.cancelled, found.ran, found.gpu_s) == (1, 1, 0, 0)


def test_a_running_job_counts_until_the_span_ends() -> None:
    found = tally(replace(JOB, end=None, state="RUNNING", elapsed_s=0), Span(0, 1100), None, FLEET)
    assert found is not None
    assert (found.wall_s, found.ended, found.gpu_s) == (100, 0, 200)


def test_suspended_time_does_not_count() -> None:
    found = tally(replace(JOB, elapsed_s=400), Span(0, 5000), None, FLEET)
    assert found is not None
    assert found.wall_s == 400


def test_shares_count_as_parts_of_their_nodes_gpu() -> None:
    found = tally(replace(JOB, allocated="cpu=1,gres/shard=10240,node=1"), Span(0, 5000), None, FLEET)
    assert found is not None
    assert (found.gpu_s, found.shard_mib_s, found.shared_gpu_s) == (0, 600 * 10240, 75)


def test_unknown_energy_is_not_an_amount() -> None:
    found = tally(replace(JOB, allocated="cpu=1,energy=18446744073709551614"), Span(0, 5000), None, FLEET)
    assert found is not None
    assert found.energy_j == 0


def test_measured_use() -> None:
    use = JobUse(device_s=1200, busy_s=300, idle_s=60, energy_j=7.2e6, asked_mib=81920, peak_mib=20480)
    found = tally(JOB, Span(1300, 5000), use, FLEET)  # the second half
    assert found is not None
    assert (found.device_s, found.busy_s, found.gpu_energy_j, found.idle_s) == (600, 150, 3.6e6, 30)
    assert efficiency(found) == 25
    assert wasted_gpu_s(found) == 450
    assert found.peak_mib_s / found.asked_mib_s == 0.25


def test_unmeasured_is_unknown_and_not_zero() -> None:
    found = tally(JOB, Span(0, 5000), JobUse(rung="watchdog"), FLEET)
    assert found is not None
    assert (efficiency(found), wasted_gpu_s(found), found.measured_gpu_s) == (None, None, 0)


def test_groups_and_documents() -> None:
    counter = Counter(FLEET)
    for user in ("alice", "bob", "alice"):
        counter.add(replace(JOB, user=user), Span(0, 5000), None)
    grouped = group(counter.cells.items(), ["user"])
    assert {name: made.gpu_s for (name,), made in grouped.items()} == {"alice": 2400, "bob": 1200}
    made = grouped["alice",]
    again = Tally()
    again.add_document(made.document())
    assert {name: getattr(again, name) for name in SUMS} == {name: getattr(made, name) for name in SUMS}
    assert again.waits.counts == made.waits.counts


def test_what_a_job_had_of_a_node_that_was_deleted_is_known_from_its_pool() -> None:
    pool = PoolCosts()
    pool.remember("n2", f"gpu:h100:8,shard:{8 * 81_920}")
    fleet = Fleet.of((), {"p": pool})
    shares = replace(JOB, nodes="n2", allocated=f"cpu=4,gres/shard={81_920 // 2}")
    found = tally(shares, Span(0, 5000), None, fleet)
    assert found is not None
    assert found.shared_gpu_s == 300
    assert gpu_type(shares, fleet) == "h100"
    assert fleet.types_of(["h100"]) == {"h100"}
    assert fleet.types() == {}, "it is no capacity"


def test_the_gpus_of_nodes_that_had_no_machine_for_longest_are_forgotten() -> None:
    pool = PoolCosts()
    for number in [*range(MOST_NODES), 0, MOST_NODES]:
        pool.remember(f"n{number}", "gpu:h100:8")
    assert len(pool.gres) == MOST_NODES
    assert {"n0", "n1"} & set(pool.gres) == {"n0"}


def test_jobs_of_several_nodes_are_shared_out() -> None:
    fleet = Fleet({name: FLEET.nodes["n1"] for name in ("n1", "n2")})
    counter = Counter(fleet, by_node=True)
    counter.add(replace(JOB, nodes="n[1-2]", node_count=2), Span(0, 5000), None)
    assert {key.node: made.gpu_s for key, made in counter.cells.items()} == {"n1": 600, "n2": 600}
    assert Key("physics", "alice", "main", "normal", "COMPLETED", "h100", "n1") in counter.cells
