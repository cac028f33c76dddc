"""Preemption from Python; the choice itself is checked against every subset in native/tests/test_preemption.c."""

from __future__ import annotations

import pytest

from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import Policy, Request, start
from sluice.core.preemption import Candidate, Preemption


@pytest.fixture
def full_cluster() -> tuple[Cluster, list[int]]:
    """Two nodes of four GPUs, each run by one job of two GPUs and two of one."""
    cluster = Cluster(max_nodes=2)
    shape = cluster.add_shape(NodeShape(tuple(GpuShape("H100", 81559) for _ in range(4))))
    for _ in range(2):
        cluster.add_node(shape, 64000, 512000)
    sizes = [2, 1, 1, 2, 1, 1]
    return cluster, [start(cluster, Policy.FIRST_FIT, Request(gpus=size)).id for size in sizes]


def test_the_least_work_is_lost(full_cluster):
    cluster, allocations = full_cluster
    jobs = [Candidate(allocation, started_s=10 * index) for index, allocation in enumerate(allocations)]
    victims = Preemption(cluster, 16).plan(Policy.SLUICE, Request(gpus=2), jobs, tier=1, now_s=100)
    assert victims is not None
    assert victims.indexes == (4, 5)  # 110 GPU-seconds lost; job 3 would lose 140
    assert [(part.node, part.gpus) for part in victims.placement.parts] == [(1, 0b1100)]
    assert start(cluster, Policy.SLUICE, Request(gpus=1)) is None  # nothing was changed


def test_a_job_that_saves_before_it_goes_loses_only_that(full_cluster):
    cluster, allocations = full_cluster
    jobs = [Candidate(allocation, started_s=10 * index, restart_s=5) for index, allocation in enumerate(allocations)]
    jobs[3] = Candidate(allocations[3], started_s=0, save_s=30, restart_s=5)
    victims = Preemption(cluster, 16).plan(Policy.SLUICE, Request(gpus=2), jobs, tier=1, now_s=100)
    assert victims is not None and victims.indexes == (3,)  # 70 GPU-seconds; jobs 4 and 5 would lose 120


def test_nobody_may_go(full_cluster):
    cluster, allocations = full_cluster
    jobs = [Candidate(allocation, started_s=0, tier=5) for allocation in allocations]
    assert Preemption(cluster, 16).plan(Policy.SLUICE, Request(gpus=1), jobs, tier=5, now_s=100) is None


def test_refusals_name_the_candidate(full_cluster):
    cluster, allocations = full_cluster
    preemption = Preemption(cluster, 16)
    with pytest.raises(CoreError, match="candidate 0: started 200 s"):
        preemption.plan(Policy.SLUICE, Request(gpus=1), [Candidate(allocations[0], started_s=200)], tier=1, now_s=100)
    with pytest.raises(CoreError, match="both are allocation"):
        preemption.plan(Policy.SLUICE, Request(gpus=1), [Candidate(allocations[0], 0)] * 2, tier=1, now_s=100)
