from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.core import lib
from sluice.core.backfill import CONSERVATIVE, EASY, HORIZON_S, Backfill, PendingJob, RunningJob, Start
from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape, NodeState
from sluice.core.errors import CoreError
from sluice.core.placement import Layout, Part, Preference, Request, RequestFlag, commit

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import backfill as reference

NOW = 1_000_000


def one_gpu_nodes(count: int) -> Cluster:
    cluster = Cluster(count)
    shape = cluster.add_shape(NodeShape((GpuShape("A", 1000),)))
    for _ in range(count):
        cluster.add_node(shape, 8000, 8000)
    return cluster


def run(cluster: Cluster, node: int, end_s: int, share: int = 0) -> RunningJob:
    return RunningJob(commit(cluster, [Part(node, 1, share, 1000, 10)]), end_s)


def whole(nodes: int = 1) -> Request:
    return Request(gpus=1, nodes_min=nodes, cpus_milli=1000)


def test_easy_and_conservative() -> None:
    """A wide job waits; a short one goes ahead of it; a long one must not, and gets its own reservation or none."""
    cluster = one_gpu_nodes(2)
    running = [run(cluster, 0, NOW + 100)]
    wide, short, long = PendingJob(whole(2), 50), PendingJob(whole(), 100), PendingJob(whole(), 101)
    plan = Backfill(2).plan(cluster, NOW, running, [wide, long, short])
    assert [start and start.start_s - NOW for start in plan] == [100, 150, 0]
    assert [[part.node for part in start.parts] for start in plan if start] == [[0, 1], [0], [1]]
    plan = Backfill(2).plan(cluster, NOW, running, [wide, long, short], EASY)
    assert [start and start.start_s - NOW for start in plan] == [100, None, 0]
    plan = Backfill(2).plan(cluster, NOW, running, [wide, long, short], 0)
    assert [start and start.start_s - NOW for start in plan] == [None, 0, None]


def test_compute_is_planned_as_memory_is() -> None:
    """60 percent waits until the 60 percent in use are free; 40 percent, or none, does not."""
    cluster = one_gpu_nodes(1)

    def claim(percent: int) -> Request:
        return Request(gpus=1, gpu_memory_mib=10, gpu_compute_percent=percent)

    running = [RunningJob(commit(cluster, [Part(0, 1, 10, gpu_compute_percent=60)]), NOW + 100)]
    jobs = [PendingJob(claim(percent), 50) for percent in (60, 0, 41, 40)]
    plan = Backfill(1).plan(cluster, NOW, running, jobs)
    assert [start and start.start_s - NOW for start in plan] == [100, 0, 150, 0]
    held = [replace(job, held=start) for job, start in zip(jobs, plan, strict=True)]
    assert Backfill(1).plan(cluster, NOW, running, held) == plan


def test_group_starts_together() -> None:
    cluster = one_gpu_nodes(3)
    running = [run(cluster, 0, NOW + 10), run(cluster, 1, NOW + 20)]
    jobs = [PendingJob(whole(), 5, group=7), PendingJob(whole(2), 9, group=7), PendingJob(whole(), 20, group=8)]
    plan = Backfill(3).plan(cluster, NOW, running, jobs)
    assert [start and start.start_s - NOW for start in plan] == [20, 20, 0]


def test_overdue_and_endless() -> None:
    cluster = one_gpu_nodes(2)
    running = [run(cluster, 0, NOW - 500)]
    run(cluster, 1, 0)  # not among the running jobs: never released
    plan = Backfill(2).plan(cluster, NOW, running, [PendingJob(whole(), HORIZON_S), PendingJob(whole(), 1)])
    assert plan == [Start(NOW + 1, (Part(0, 1, 0, 1000, 0),)), None]
    endless = [running[0], replace(running[0], allocation=running[0].allocation)]
    with pytest.raises(CoreError, match="named twice"):
        Backfill(2).plan(cluster, NOW, endless, [])


def test_reservation_never_slips() -> None:
    """An early end lets the first job move; planned again, the second would slip, but it keeps its reservation."""
    cluster = one_gpu_nodes(2)
    running = [run(cluster, 0, NOW + 100), run(cluster, 1, NOW + 60)]
    jobs = [PendingJob(whole(), 50), PendingJob(whole(2), 10), PendingJob(whole(), 10)]
    backfill = Backfill(2)
    plan = backfill.plan(cluster, NOW, running, jobs)
    assert [start and start.start_s - NOW for start in plan] == [60, 110, 100]
    newcomer = PendingJob(whole(2), 500)
    held = [replace(job, held=start) for job, start in zip(jobs, plan, strict=True)]
    later = backfill.plan(cluster, NOW + 10, running, [newcomer, *held])
    assert [start and start.start_s - NOW for start in later] == [120, 60, 110, 100]
    # A reservation on a node that was lost is planned again.
    cluster.set_state(1, NodeState.DOWN)
    lost = backfill.plan(cluster, NOW + 10, running, held)
    assert [start and start.start_s - NOW for start in lost] == [110, None, 100]


def test_refusals() -> None:
    cluster = one_gpu_nodes(2)
    backfill = Backfill(2, max_jobs=2, max_running=1, max_planned=2)
    for jobs, message, code in [
        ([PendingJob(whole(), 0)], "job 0: limit_s 0", lib.SLUICE_ERROR_RANGE),
        ([PendingJob(whole(), HORIZON_S + 1)], "limit_s 2147483647", lib.SLUICE_ERROR_RANGE),
        ([PendingJob(whole(), 1), PendingJob(Request(gpus=-1), 1)], "job 1: gpus -1", lib.SLUICE_ERROR_RANGE),
        ([PendingJob(whole(), 1)] * 3, "3 jobs: the backfill was made for 2", lib.SLUICE_ERROR_CAPACITY),
        ([PendingJob(whole(2), 1)] * 2, "more than 2 planned parts", lib.SLUICE_ERROR_CAPACITY),
    ]:
        with pytest.raises(CoreError, match=message) as error:
            backfill.plan(cluster, NOW, [], jobs)
        assert error.value.code == code
    running = [run(cluster, 0, NOW + 1), run(cluster, 1, NOW + 1)]
    with pytest.raises(CoreError, match="more than 1 running parts"):
        backfill.plan(cluster, NOW, running, [])
    with pytest.raises(CoreError, match="allocation"):
        backfill.plan(cluster, NOW, [RunningJob(99 << 32, 5)], [])
    with pytest.raises(CoreError, match="now_s -1"):
        backfill.plan(cluster, -1, [], [])
    with pytest.raises(CoreError, match="0 nodes"):
        Backfill(0)
    with pytest.raises(CoreError, match="3 nodes: the backfill was made for 2"):
        backfill.plan(one_gpu_nodes(3), NOW, [], [])
    assert backfill.plan(cluster, NOW, [], []) == []


# ---- against the reference ----


def random_nics(draw: random.Random, planes: random.Random, gpus: int) -> NicGroups | None:
    nics = draw.randint(1, 4)
    kinds = tuple(draw.randrange(2) for _ in range(nics))
    groups = NicGroups(
        tuple(draw.randrange(3) for _ in range(gpus)),
        tuple(draw.randrange(4) for _ in range(nics)),
        kinds,
        tuple(planes.choice([0, 1, 1, 2, 2, 3]) for _ in range(nics)),
    )
    return groups if draw.random() < 0.9 else None


def random_tree(draw: random.Random, cluster: Cluster) -> tuple[dict[int, tuple[int, int]], dict[int, set[int]]]:
    """Of each leaf switch the two above it; of each switch the leaf switches below."""
    top = cluster.add_switch()
    middle = [cluster.add_switch(top) for _ in range(draw.randint(1, 2))]
    above = {cluster.add_switch(parent): (parent, top) for parent in middle for _ in range(draw.randint(1, 2))}
    below: dict[int, set[int]] = {leaf: {leaf} for leaf in above}
    for leaf, parents in above.items():
        for parent in parents:
            below.setdefault(parent, set()).add(leaf)
    return above, below


def random_case(
    draw: random.Random, planes: random.Random
) -> tuple[Cluster, list[reference.Node], list[RunningJob], list[tuple[Part, int]], dict[int, set[int]]]:
    count = draw.randint(1, 7)
    cluster = Cluster(count, max_switches=12)
    reference.MODEL_IDS.clear()
    shapes = []
    for model in ("A", "B", "C")[: draw.randint(1, 3)]:
        reference.MODEL_IDS[model] = cluster.add_model(model)
        gpus = tuple(
            GpuShape(
                model,
                draw.choice([100, 100, 40]),
                capability=draw.choice([0, 7, 9]),
                link_domain=i // 2,
                numa_node=i // 3,
                near_nic=draw.random() < 0.5,
            )
            for i in range(draw.choice([0, 1, 2, 4, 4, 5]))
        )
        shapes.append(NodeShape(gpus, nics=random_nics(draw, planes, len(gpus))))
    ids = [cluster.add_shape(shape) for shape in shapes]
    above, below = random_tree(draw, cluster)
    leaves = [*above, 0]
    ranks = draw.sample(range(count), count)
    nodes, running, held = [], [], []
    for node in range(count):
        which, cpus, memory, leaf = (
            draw.randrange(len(ids)),
            draw.choice([4, 8]),
            draw.choice([8, 16]),
            draw.choice(leaves),
        )
        cluster.add_node(ids[which], cpus, memory, leaf)
        path = ((leaf, 0), (above[leaf][0], 1), (above[leaf][1], 2)) if leaf else ()
        healthy = [draw.random() < 0.95 for _ in shapes[which].gpus]
        nodes.append(reference.Node(shapes[which], cpus, memory, ranks[node], path, healthy=tuple(healthy)))
        sizes, nics = [gpu.memory_mib for gpu in shapes[which].gpus], shapes[which].nics
        for _ in range(draw.randint(0, 4)):
            taken = draw.sample(range(len(sizes)), draw.randint(0, min(2, len(sizes))))
            share = draw.choice([0, 10, 30]) if taken else 0
            part = Part(
                node,
                sum(1 << gpu for gpu in taken),
                share,
                draw.randint(0, 3),
                draw.randint(0, 4),
                draw.random() < 0.05,
                draw.choice([0, 0, 20, 60]) if taken else 0,
                draw.getrandbits(len(nics.nics)) & draw.getrandbits(4) * draw.randint(0, 1) if nics else 0,
            )
            try:
                allocation = commit(cluster, [part])
            except CoreError:
                continue
            end = draw.randint(-3, 30)
            if draw.random() < 0.9:
                running.append(RunningJob(allocation, NOW + end))
            held.append((part, end if running and running[-1].allocation == allocation else reference.FOREVER))
    for node, row in enumerate(nodes):
        for gpu, healthy_gpu in enumerate(row.healthy):
            cluster.set_health(node, gpu, healthy_gpu)
        if draw.random() < 0.1:
            row.state = draw.choice([NodeState.DRAINED, NodeState.DOWN])
            cluster.set_state(node, row.state)
    cluster.set_order(ranks)
    return cluster, nodes, running, held, below


def random_request(draw: random.Random, nodes: int) -> Request:
    gpus = draw.choice([0, 1, 1, 1, 2, 3])
    nodes_min = 4 if draw.random() < 0.04 else draw.choice([0, 1, 1, 1, 2, min(3, nodes)])
    flags = RequestFlag.EXCLUSIVE if draw.random() < 0.07 else RequestFlag.NONE

    def preference(share: float) -> Preference:
        return Preference.REQUIRED if gpus and draw.random() < share else Preference.ANY

    if gpus and draw.random() < 0.15:
        flags |= RequestFlag.GPUS_TOTAL
        gpus = draw.randint(max(nodes_min, 1), 6)
    share = draw.choice([0, 0, 10, 25, 60]) if gpus else 0
    if share and draw.random() < 0.1:
        flags |= RequestFlag.GPU_MEMORY_SUM
        share *= gpus
    whole = [part for part in (1, 2, 3) if max(nodes_min, 1) % part == 0]
    segment = draw.choice(whole) if RequestFlag.GPUS_TOTAL not in flags else 0
    level, one_switch = draw.randint(0, 2), draw.random() < 0.15
    limited = one_switch and level and RequestFlag.GPUS_TOTAL not in flags and draw.random() < 0.8
    with_nics = draw.choice([0, 0, 0, 0, 0, 0, 1, 2])
    return Request(
        segment=0 if limited else segment,
        lower_switches=draw.randint(1, 2) if limited else 0,
        nics=0 if gpus and draw.random() < 0.3 else with_nics,
        nics_per_gpu=draw.randint(0, 1) if gpus and draw.random() < 0.2 else 0,
        gpus=gpus,
        gpu_memory_mib=share,
        cpus_milli=draw.randint(0 if gpus else 1, 4),
        host_memory_mib=draw.randint(0, 6),
        nodes_min=nodes_min,
        nodes_max=max(nodes_min, 1) + draw.randint(0, 2) if RequestFlag.GPUS_TOTAL in flags else 0,
        cpus_milli_per_gpu=draw.choice([0, 0, 1]) if gpus else 0,
        host_memory_mib_per_gpu=draw.choice([0, 0, 1]) if gpus else 0,
        gpu_compute_percent=draw.choice([0, 0, 15, 40, 60, 100]) if gpus else 0,
        models=draw.randint(0, (1 << len(reference.MODEL_IDS)) - 1) if gpus and draw.random() < 0.3 else 0,
        capability_min=7 if gpus and draw.random() < 0.1 else 0,
        gpu_memory_mib_min=50 if gpus and draw.random() < 0.1 else 0,
        one_link_domain=preference(0.1),
        one_numa_node=preference(0.1),
        near_nic=preference(0.05),
        one_switch=Preference.REQUIRED if one_switch else Preference.ANY,
        switch_level=level,
        flags=flags,
        allowed=frozenset(draw.sample(range(nodes), draw.randint(1, nodes))) if draw.random() < 0.15 else None,
    )


def relative(start: Start | None) -> Start | None:
    return start and Start(start.start_s - NOW, start.parts)


def short_queue(draw: random.Random, nodes: int) -> list[PendingJob]:
    """Jobs that are all different, some in groups."""
    jobs: list[PendingJob] = []
    while len(jobs) < draw.randint(3, 12):
        request = random_request(draw, nodes)
        group = len(jobs) + 1 if draw.random() < 0.2 else 0
        jobs += [PendingJob(request, draw.randint(1, 20), group)]
        if group:
            jobs += [PendingJob(random_request(draw, nodes), draw.randint(1, 20), group)]
    return jobs


def long_queue(draw: random.Random, nodes: int) -> list[PendingJob]:
    """So many jobs of few kinds of request that results are shared between them, and that nodes change often."""
    requests = [random_request(draw, nodes) for _ in range(2)]
    requests = [replace(request, nodes_min=0, nodes_max=0, segment=0, flags=RequestFlag.NONE) for request in requests]
    return [PendingJob(draw.choice(requests), draw.randint(1, 80)) for _ in range(80)]


def check_case(
    seed: int, backfill: Backfill, queue_of: Callable[[random.Random, int], list[PendingJob]]
) -> list[Start | None]:
    draw, planes = random.Random(seed), random.Random(seed + 1)
    cluster, nodes, running, held, below = random_case(draw, planes)
    jobs = [
        replace(job, request=replace(job.request, nic_planes=planes.choice(list(Layout))))
        for job in queue_of(draw, len(nodes))
    ]
    reservations = draw.choice([0, EASY, 3, CONSERVATIVE, CONSERVATIVE])
    plan = [relative(start) for start in backfill.plan(cluster, NOW, running, jobs, reservations)]
    assert plan == reference.Reference(nodes, held, below).plan(jobs, reservations), f"seed {seed}"

    # The same again with reservations, among new jobs: nothing slips.
    bound = [replace(job, held=start) for job, start in zip(jobs, plan, strict=True)]
    whole_groups = [
        job if all(other.held for other in bound if other.group == job.group and job.group) else replace(job, held=None)
        for job in bound
    ]
    queue = [PendingJob(random_request(draw, len(nodes)), draw.randint(1, 20)), *whole_groups]
    absolute = [replace(job, held=Start(job.held.start_s + NOW, job.held.parts)) if job.held else job for job in queue]
    again = [relative(start) for start in backfill.plan(cluster, NOW, running, absolute)]
    assert again == reference.Reference(nodes, held, below).plan(queue, CONSERVATIVE), f"seed {seed}, held"
    for job, start in zip(queue, again, strict=True):
        assert job.held is None or (start is not None and start.start_s <= job.held.start_s), f"seed {seed}"
    return plan


def test_against_the_reference(full_scale: bool) -> None:
    backfill = Backfill(7, max_jobs=64)
    planned = [check_case(seed, backfill, short_queue) for seed in range(10_000 if full_scale else 1000)]
    starts = [start for plan in planned for start in plan]
    assert sum(start is None for start in starts) < 0.6 * len(starts)
    assert sum(start is not None and start.start_s > 0 for start in starts) > 0.15 * len(starts)
    assert any(start and len(start.parts) > 1 for start in starts)


def test_long_queues_against_the_reference(full_scale: bool) -> None:
    backfill = Backfill(7, max_jobs=128)
    planned = [check_case(seed, backfill, long_queue) for seed in range(200 if full_scale else 12)]
    busy = [plan for plan in planned if sum(start is not None and start.start_s > 0 for start in plan) > 40]
    assert len(busy) > 0.15 * len(planned)
