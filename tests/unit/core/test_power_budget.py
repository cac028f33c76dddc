from __future__ import annotations

from typing import Any

import pytest

from sluice.core.backfill import CONSERVATIVE, EASY, Backfill, PendingJob, RunningJob
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import Part, Request, commit
from sluice.core.power import WEEK_S, Budget, Hours, Power

NOW = 100 * WEEK_S


def nodes(count: int) -> Cluster:
    cluster = Cluster(count)
    shape = cluster.add_shape(NodeShape(tuple(GpuShape("A", 1000) for _ in range(4))))
    for _ in range(count):
        cluster.add_node(shape, 64000, 64000)
    return cluster


def job(gpus: int, watts: int, limit_s: int = 60, **more: Any) -> PendingJob:
    return PendingJob(Request(gpus=gpus, cpus_milli=1000), limit_s, watts=watts, **more)


def planned(
    cluster: Cluster, power: Power | None, *jobs: PendingJob, running: tuple[RunningJob, ...] = ()
) -> list[Any]:
    backfill = Backfill(8)
    backfill.set_power(power)
    return [start and (start.start_s - NOW, start.watts) for start in backfill.plan(cluster, NOW, running, jobs)]


def test_a_job_waits_for_watts_and_reserves_them() -> None:
    """The large job waits until the running one's watts are free; a long small one would delay it, a short one not."""
    cluster = nodes(4)
    running = RunningJob(commit(cluster, [Part(0, 15, 0, 1000, 10)]), NOW + 100, watts=200)
    jobs = [job(4, 300, 50), job(1, 200, 101), job(1, 200, 100)]
    assert planned(cluster, Power(4, [Budget(1300)]), *jobs, running=(running,)) == [(100, 300), (150, 200), (0, 200)]
    assert planned(cluster, None, *jobs, running=(running,)) == [(0, 0)] * 3


def test_a_job_starts_with_fewer_watts_than_it_wants() -> None:
    cluster, power = nodes(4), Power(4, [Budget(1000)])
    assert planned(cluster, power, job(4, 400, least_watts=200), job(1, 400)) == [(0, 250), (60, 400)]
    assert planned(cluster, power, job(4, 400, least_watts=251), job(1, 400)) == [None, (0, 400)]


def test_rows_and_hours() -> None:
    """A row without watts is passed over for the next; at night there is more."""
    cluster = nodes(4)
    rows = [Budget(500, nodes=frozenset({0, 1})), Budget(900, (Hours(0, 3600, 100),), nodes=frozenset({2, 3}))]
    power, backfill = Power(4, rows), Backfill(4)
    backfill.set_power(power)
    plan = backfill.plan(cluster, NOW, [], [job(1, 400), job(2, 400)], EASY)
    assert [start and (start.start_s - NOW, start.parts[0].node, start.waits_for_power) for start in plan] == [
        (0, 0, None),
        (3600, 2, 0),
    ]
    assert power.watts(1, NOW) == 100 and power.watts(1, NOW + 3600) == 900
    assert power.left(0)[:2] == [(NOW, 100), (NOW + 60, 500)]


def test_each_budget_counts_its_own_jobs() -> None:
    """A tenant's budget holds up that tenant only; guaranteed jobs start with what is left."""
    cluster, power = nodes(4), Power(4, [Budget(10_000), Budget(500), Budget(800, base_watts=400)])
    alone, tenant = job(2, 300, power_budgets=1), job(2, 300, power_budgets=3)
    assert planned(cluster, power, tenant, alone) == [None, (0, 300)]
    assert planned(
        cluster, power, job(2, 300, power_budgets=4), job(2, 300, power_budgets=4, power_guaranteed=True)
    ) == [
        None,
        (0, 200),
    ]


def test_several_nodes_take_rows_that_have_watts() -> None:
    cluster = nodes(6)
    rows = [Budget(700, nodes=frozenset({2 * row, 2 * row + 1})) for row in range(3)]
    wide = PendingJob(Request(gpus=2, nodes_min=3, cpus_milli=1000), 60, watts=300)
    backfill = Backfill(6)
    backfill.set_power(Power(6, rows))
    (start,) = backfill.plan(cluster, NOW, [], [wide], CONSERVATIVE)
    assert start and [part.node for part in start.parts] == [0, 2, 4]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(CoreError, match="times must ascend"):
        Power(4, [Budget(5, (Hours(5, 4, 1),))])
    with pytest.raises(CoreError, match="at least 5"):
        planned(nodes(1), Power(8, [Budget(5)]), job(1, 4, least_watts=5))
    with pytest.raises(CoreError, match="made for 1"):
        planned(nodes(2), Power(1, [Budget(5)]), job(1, 4))
