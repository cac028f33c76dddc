"""NICs and segments of one request: random trees in use, each placement compared with all that there are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from sluice.core.backfill import CONSERVATIVE, Backfill, PendingJob
from sluice.core.cluster import Cluster, NodeState
from sluice.core.placement import Layout, Part, Policy, Preference, Request, Verdict, commit, explain
from sluice.core.power import Budget, Power
from tests.unit.core.test_nics_of_nodes import Site, bits, matched, placed, random_shape

NOWHERE = -1


class Tree(Site):
    """Idle nodes with GPUs and NICs on leaf switches, which are in pods; the place of some is unknown."""

    def __init__(self, draw: random.Random) -> None:
        mixed = draw.random() < 0.3
        kinds = [random_shape(draw, mixed=mixed) for _ in range(draw.randint(1, 2))]
        leaves = [draw.randint(0, 5) for _ in range(draw.randint(1, 3))]
        self.leaf_of = [leaf for leaf, count in enumerate(leaves) for _ in range(count)]
        self.leaf_of += [NOWHERE] * draw.choice([0, 0, 2])
        draw.shuffle(self.leaf_of)
        self.shapes = [draw.choice(kinds) for _ in self.leaf_of]
        self.cluster = Cluster(32, max_allocations=64)
        pods = [self.cluster.add_switch() for _ in range(2)]
        self.pod_of = [draw.randrange(2) for _ in leaves]
        switches = [self.cluster.add_switch(pods[pod]) for pod in self.pod_of]
        for shape, leaf in zip(self.shapes, self.leaf_of, strict=True):
            self.cluster.add_node(self.cluster.add_shape(shape), 8000, 1000, 0 if leaf == NOWHERE else switches[leaf])

    def use(self, draw: random.Random) -> None:
        for node, shape in enumerate(self.shapes):
            gpus = sum(1 << i for i in range(len(shape.gpus)) if draw.random() < 0.15)
            nics = sum(1 << i for i in range(len(shape.nics.nics) if shape.nics else 0) if draw.random() < 0.15)
            if gpus or nics:
                commit(self.cluster, [Part(node, gpus, cpus_milli=500, nics=nics)])
            if draw.random() < 0.05:
                self.cluster.set_state(node, NodeState.DRAINED)

    def pairs(self, request: Request) -> dict[int, int]:
        """Of each node that can take a share of the request, the most pairs."""
        nodes = range(len(self.shapes)) if request.allowed is None else request.allowed
        most = {node: self.most_pairs(node, request, request.gpus) for node in nodes}
        return {node: count for node, count in most.items() if count >= 0}

    def keeps(self, request: Request, nodes: tuple[int, ...]) -> bool:
        """Are these nodes whole segments, and below one switch where that is required?"""
        leaves = Counter(self.leaf_of[node] for node in nodes)
        if NOWHERE in leaves or any(count % request.segment for count in leaves.values()):
            return False
        if request.one_switch != Preference.REQUIRED:
            return True
        return len(leaves if request.switch_level == 0 else {self.pod_of[leaf] for leaf in leaves}) == 1

    def choices(self, request: Request) -> Iterator[tuple[int, ...]]:
        """All placements on as few nodes as the request accepts: a larger one has one of these in it."""
        every = combinations(sorted(self.pairs(request)), request.nodes_min)
        return (nodes for nodes in every if self.keeps(request, nodes))


def random_request(draw: random.Random, tree: Tree) -> Request:
    gpus, segment = draw.choice([1, 1, 2]), draw.choice([2, 2, 3])
    nodes = segment * draw.choice([1, 2, 2])
    per_gpu = draw.random() < 0.4
    allowed = frozenset(node for node in range(len(tree.shapes)) if draw.random() < 0.9)
    return Request(
        gpus=gpus,
        cpus_milli=draw.choice([0, 1000]),
        nodes_min=nodes,
        nodes_max=nodes + draw.choice([0, 0, 1, segment, segment + 1]),
        segment=segment,
        nics=0 if per_gpu else draw.choice([gpus, gpus, 1, 2]),
        nics_per_gpu=draw.choice([1, 1, 2]) if per_gpu else 0,
        nic_kinds=1 if draw.random() < 0.1 else 0,
        models=tree.cluster.models(["a"]) if draw.random() < 0.1 else 0,
        one_switch=draw.choice([Preference.ANY, Preference.PREFERRED, Preference.REQUIRED]),
        switch_level=draw.choice([0, 1]),
        one_link_domain=draw.choice([Preference.ANY] * 4 + [Preference.PREFERRED]),
        layout=draw.choice(list(Layout)),
        allowed=allowed if allowed and draw.random() < 0.3 else None,
    )


@pytest.mark.parametrize("policy", [Policy.SLUICE, Policy.FIRST_FIT, Policy.FGD, Policy.RANDOM])
def test_whole_segments_with_their_nics_wherever_there_are_any(policy: Policy, full_scale: bool) -> None:
    """One after the other until none is left: the fewest pairs of any of its nodes are as many as can be."""
    verdicts = Counter[Verdict]()
    for seed in range(4000 if full_scale else 250):
        draw = random.Random(f"{policy}-{seed}")
        tree = Tree(draw)
        request = random_request(draw, tree)
        ever = any(tree.choices(request))
        tree.use(draw)
        verdict = Verdict.PLACED
        while verdict == Verdict.PLACED:
            pairs, choices = tree.pairs(request), list(tree.choices(request))
            found = explain(tree.cluster, policy, request)
            verdict = found.verdict
            expected = Verdict.PLACED if choices else Verdict.NO_PLACE if ever else Verdict.NEVER
            assert verdict == expected, (seed, request)
            verdicts[verdict] += 1
            if found.placement is None:
                continue
            parts = found.placement.parts
            nodes = tuple(part.node for part in parts)
            assert set(nodes) <= set(pairs), (seed, request)
            assert request.nodes_min <= len(nodes) <= request.nodes_max, (seed, request)
            assert tree.keeps(request, nodes), (seed, request, nodes)
            near = [near_of(tree, request, part) for part in parts]
            assert found.placement.nic_pairs == sum(near), (seed, request)
            if request.one_link_domain == Preference.ANY:
                assert near == [pairs[node] for node in nodes], (seed, request)
                assert min(near) == max(min(pairs[node] for node in choice) for choice in choices), (seed, request)
            commit(tree.cluster, parts)  # refuses GPUs and NICs that are in use
            tree.cluster.check()
    assert min(verdicts[verdict] for verdict in Verdict) > 50, verdicts


def near_of(tree: Tree, request: Request, part: Part) -> int:
    """Pairs of a part, which must have all that is asked for each node."""
    groups = tree.shapes[part.node].nics
    assert groups is not None
    wanted = request.nics + request.gpus * request.nics_per_gpu
    assert (part.gpus.bit_count(), part.nics.bit_count()) == (request.gpus, wanted), request
    return matched([groups.gpus[i] for i in bits(part.gpus)], [groups.nics[i] for i in bits(part.nics)])


def test_the_plan_keeps_segments_whole_and_counts_nics(full_scale: bool) -> None:
    """The first job has a start wherever there are whole segments of nodes with its NICs, and needs no more watts than
    its own nodes draw; no NIC is planned for two jobs at once, nor one that is in use."""
    planned = 0
    for seed in range(1000 if full_scale else 150):
        draw = random.Random(seed)
        tree = Tree(draw)
        tree.use(draw)
        if not tree.shapes:
            continue
        asked = [replace(random_request(draw, tree), one_link_domain=Preference.ANY) for _ in range(3)]
        jobs = [PendingJob(request, draw.randint(1, 50)) for request in asked]
        backfill = Backfill(32, max_jobs=8, max_running=64, max_planned=256)
        starts = backfill.plan(tree.cluster, 0, [], jobs, CONSERVATIVE)
        first = asked[0]
        assert (starts[0] is not None) == (placed(tree.cluster, Policy.FIRST_FIT, first) is not None), seed
        backfill.set_power(Power(32, [Budget(first.gpus * first.nodes_min)]))
        (powered,) = backfill.plan(tree.cluster, 0, [], [replace(jobs[0], watts=1)], CONSERVATIVE)
        assert (powered and powered.parts) == (starts[0] and starts[0].parts), seed
        taken: list[tuple[int, int, int, int]] = []
        for job, begun in zip(jobs, starts, strict=True):
            if begun is None:
                continue
            planned += 1
            request, end = job.request, begun.start_s + job.limit_s
            assert len(begun.parts) == request.nodes_min
            assert tree.keeps(request, tuple(part.node for part in begun.parts)), (seed, request)
            for part in begun.parts:
                assert part.nics.bit_count() == request.nics + request.gpus * request.nics_per_gpu
                assert part.nics & ~tree.cluster.node(part.node).nics_free == 0
                at_once = [
                    nics
                    for node, start, stop, nics in taken
                    if node == part.node and start < end > begun.start_s < stop
                ]
                assert not any(part.nics & nics for nics in at_once), seed
                taken.append((part.node, begun.start_s, end, part.nics))
    assert planned > 50
