"""Segments: each lies below one leaf switch, and the job as near together as any choice of whole segments allows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from sluice.core.backfill import CONSERVATIVE, Backfill, PendingJob
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import Layout, Policy, Preference, Request, RequestFlag, place, start
from sluice.core.power import Budget, Power

TOP = 3


class Site:
    """A cluster below a random tree: leaf switches below pods, some of them below one spine."""

    def __init__(self, draw: random.Random) -> None:
        self.paths: list[tuple[int, ...]] = []  # of each leaf switch, itself first
        nodes = [draw.randint(0, 7) for _ in range(draw.randint(1, 5))]
        unknown = draw.choice([0, 0, 3])
        self.cluster = Cluster(64, max_allocations=64)
        shape = self.cluster.add_shape(NodeShape((GpuShape("H100", 81920),)))
        spine = self.cluster.add_switch()
        pods = [self.cluster.add_switch(spine), self.cluster.add_switch(spine), self.cluster.add_switch()]
        self.leaf_of: dict[int, int] = {}  # of each node, an index of `paths`; nodes whose place is unknown have none
        order = [leaf for leaf, count in enumerate(nodes) for _ in range(count)] + [-1] * unknown
        draw.shuffle(order)
        switches = {}
        for leaf in range(len(nodes)):
            pod = draw.choice(pods)
            switches[leaf] = self.cluster.add_switch(pod)
            self.paths.append((switches[leaf], pod, *([spine] if pod != pods[2] else [])))
        for leaf in order:
            node = self.cluster.add_node(shape, 8000, 65536, switches.get(leaf, 0))
            if leaf >= 0:
                self.leaf_of[node] = leaf
        self.free = set(range(len(order)))
        for node in list(self.free):
            if draw.random() < 0.25:
                assert start(self.cluster, Policy.FIRST_FIT, Request(gpus=1, allowed=frozenset([node])))
                self.free.discard(node)

    def counts(self, nodes: set[int]) -> Counter[int]:
        """Of the nodes, how many are below each leaf switch."""
        return Counter(self.leaf_of.get(node, -1) for node in nodes)

    def common(self, leaves: list[int]) -> tuple[int, int]:
        """Height of the lowest switch above all these leaf switches, and how many switches just below it are used."""
        for height in range(TOP):
            above = {self.paths[leaf][height] if len(self.paths[leaf]) > height else None for leaf in leaves}
            if len(above) == 1 and None not in above:
                return height, len({self.paths[leaf][height - 1] for leaf in leaves}) if height else 0
        return TOP, len({self.paths[leaf][-1] for leaf in leaves})

    def choices(self, wanted: int, segment: int) -> Iterator[dict[int, int]]:
        """All ways to take so many nodes of the leaf switches, in whole segments."""
        free = self.counts(self.free)
        ways = [range(0, free[leaf] + 1, segment) for leaf in range(len(self.paths))]
        for taken in product(*ways):
            if sum(taken) == wanted:
                yield {leaf: count for leaf, count in enumerate(taken) if count}


@pytest.mark.parametrize("policy", [Policy.SLUICE, Policy.FIRST_FIT, Policy.FGD, Policy.RANDOM])
def test_as_near_as_any_choice_of_whole_segments(policy: Policy, full_scale: bool) -> None:
    placed = refused = 0
    for seed in range(4000 if full_scale else 250):
        draw = random.Random(f"{policy}-{seed}")
        site = Site(draw)
        segment = draw.randint(2, 4)
        wanted = segment * draw.randint(1, 4)
        request = Request(gpus=1, nodes_min=wanted, segment=segment, layout=draw.choice(list(Layout)))
        possible = [site.common(list(choice)) for choice in site.choices(wanted, segment)]
        try:
            found = place(site.cluster, policy, request)
        except CoreError:
            found = None
        assert (found is not None) == bool(possible), seed
        if found is None:
            refused += 1
            continue
        placed += 1
        nodes = {part.node for part in found.parts}
        assert nodes <= site.free
        counts = site.counts(nodes)
        assert -1 not in counts
        assert all(count % segment == 0 for count in counts.values()), (seed, counts)
        assert site.common(list(counts)) == min(possible), (seed, counts)
    assert placed > 50
    assert refused > 50


@pytest.mark.parametrize("segment", [2, 3])
def test_the_plan_keeps_segments_whole(segment: int, full_scale: bool) -> None:
    planned = 0
    for seed in range(1000 if full_scale else 100):
        draw = random.Random(seed)
        site = Site(draw)
        everything = len(site.leaf_of)
        jobs = [
            PendingJob(Request(gpus=1, nodes_min=segment * draw.randint(1, 3), segment=segment), draw.randint(1, 50))
            for _ in range(6)
        ]
        if not everything:
            continue
        backfill = Backfill(64, max_jobs=8, max_running=64, max_planned=256)
        for job, begun in zip(jobs, backfill.plan(site.cluster, 0, [], jobs, CONSERVATIVE), strict=True):
            if begun is None:
                continue
            planned += 1
            counts = site.counts({part.node for part in begun.parts})
            assert len(begun.parts) == job.request.nodes_min
            assert -1 not in counts
            assert all(count % segment == 0 for count in counts.values()), (seed, counts)
    assert planned > 100


@pytest.mark.parametrize("policy", [Policy.SLUICE, Policy.RANDOM])
def test_spread_over_leaf_switches_as_evenly_as_any_choice(policy: Policy, full_scale: bool) -> None:
    """The fewest from the fullest leaf switch, then from the next: of all choices below the allowed switch."""
    placed = several = 0
    for seed in range(4000 if full_scale else 250):
        draw = random.Random(f"spread-{policy}-{seed}")
        site = Site(draw)
        segment = draw.choice([0, 0, 2])
        wanted = max(segment, 1) * draw.randint(1, 4)
        level = draw.choice([None, None, 1, 2])
        request = Request(
            gpus=1,
            nodes_min=wanted,
            segment=segment,
            one_switch=Preference.ANY if level is None else Preference.REQUIRED,
            switch_level=level or 0,
            switch_layout=Layout.SPREAD,
        )
        shapes = [
            sorted(choice.values(), reverse=True)
            for choice in site.choices(wanted, max(segment, 1))
            if level is None or site.common(list(choice))[0] <= level
        ]
        try:
            found = place(site.cluster, policy, request)
        except CoreError:
            found = None
        unknown = site.counts(site.free)[-1]
        if level is None and segment == 0 and unknown:
            assert found is not None or len(site.free) < wanted
            continue  # nodes whose place is unknown count as one leaf switch
        assert (found is not None) == bool(shapes), seed
        if found is None or wanted == 1:
            continue
        counts = site.counts({part.node for part in found.parts})
        taken = sorted(counts.values(), reverse=True)
        placed += 1
        several += len(taken) > 1
        assert level is None or site.common(list(counts))[0] <= level, (seed, counts)
        assert all(count % max(segment, 1) == 0 for count in counts.values())
        if level is None:
            assert taken == min(shapes), (seed, counts)
        else:  # below the one with most leaf switches that have nodes
            assert taken in shapes
    assert placed > 80
    assert several > 50


def test_spread_is_of_known_shares() -> None:
    cluster = blocks(4, 4)
    with pytest.raises(CoreError, match="switch_layout with GPUs in total"):
        place(
            cluster,
            Policy.SLUICE,
            Request(gpus=5, nodes_min=2, nodes_max=4, flags=RequestFlag.GPUS_TOTAL, switch_layout=Layout.SPREAD),
        )
    found = place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=4, switch_layout=Layout.SPREAD))
    assert found is not None
    assert [part.node // 4 for part in found.parts] == [0, 0, 1, 1]
    near = place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=4))
    assert near is not None
    assert [part.node // 4 for part in near.parts] == [0, 0, 0, 0]


def blocks(*sizes: int) -> Cluster:
    """Blocks of so many nodes, below no common switch."""
    cluster = Cluster(64, max_allocations=8)
    shape = cluster.add_shape(NodeShape((GpuShape("B200", 81920),)))
    for size in sizes:
        block = cluster.add_switch()
        for _ in range(size):
            cluster.add_node(shape, 8000, 65536, block)
    return cluster


def test_three_segments_of_twelve_are_in_three_blocks() -> None:
    """Not 17 + 17 + 2, as topology/block was seen to allocate."""
    cluster = blocks(18, 18, 18)
    assert start(cluster, Policy.SLUICE, Request(gpus=1, allowed=frozenset([0])))
    assert start(cluster, Policy.SLUICE, Request(gpus=1, allowed=frozenset([18])))
    found = place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=36, segment=12))
    assert found is not None
    assert Counter(part.node // 18 for part in found.parts) == {0: 12, 1: 12, 2: 12}
    assert place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=36, segment=18)) is None
    assert place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=36)) is not None


def test_one_switch_and_segments() -> None:
    cluster = blocks(4, 6)
    found = place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=6, segment=2, one_switch=Preference.REQUIRED))
    assert found is not None
    assert {part.node for part in found.parts} == set(range(4, 10))
    with pytest.raises(CoreError):
        place(cluster, Policy.SLUICE, Request(gpus=1, nodes_min=8, segment=2, one_switch=Preference.REQUIRED))


def test_nodes_in_no_whole_segment_use_no_watts() -> None:
    """The first block's only node, which is no segment, would leave too few for the second block."""
    backfill, job = Backfill(4), PendingJob(Request(gpus=1, nodes_min=2, segment=2), 60, watts=300)
    backfill.set_power(Power(4, [Budget(600)]))
    (begun,) = backfill.plan(blocks(1, 2), 0, [], [job], CONSERVATIVE)
    assert begun is not None
    assert begun.start_s == 0
    assert [part.node for part in begun.parts] == [1, 2]
