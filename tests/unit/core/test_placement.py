"""Every published policy, and gangs, against the plain reference, on random clusters, requests and histories."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from sluice.core._core import lib
from sluice.core.cluster import Cluster, GpuShape, NodeShape, NodeState
from sluice.core.errors import CoreError
from sluice.core.placement import (
    Layout,
    Part,
    Policy,
    Preference,
    Reason,
    Request,
    RequestFlag,
    Verdict,
    check_request,
    commit,
    explain,
    place,
    read_allocation,
    release,
    resize,
    set_workload,
    start,
    start_group,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
from placement import Node, Reference

MODELS = ["A100", "H100", "L40S"]
POLICIES = list(Policy)


def random_shape(draw: random.Random) -> NodeShape:
    count = draw.choice([0, 1, 2, 4, 8, 8, 16])
    mixed = draw.random() < 0.3
    model, memory = draw.choice(MODELS), draw.choice([1000, 40960])
    domains = draw.choice([1, 2, 4])
    gpus = tuple(
        GpuShape(
            draw.choice(MODELS) if mixed else model,
            draw.choice([1000, 16384, 40960]) if mixed else memory,
            capability=draw.choice([0, 800, 900]) if mixed else 800,
            link_domain=index * domains // count,
            numa_node=draw.randrange(2) if mixed else index * 2 // count,
            near_nic=draw.random() < 0.6,
        )
        for index in range(count)
    )
    links = [[0] * count for _ in range(count)]
    if draw.random() < 0.5:
        for i in range(count):
            for j in range(i):
                links[i][j] = links[j][i] = draw.choice([0, 1, 2, 12])
    return NodeShape(gpus, tuple(map(tuple, links)))


class Pair:
    """A cluster of the core, with its reference."""

    def __init__(self, draw: random.Random) -> None:
        count = draw.randint(1, 30)
        self.draw = draw
        self.core = Cluster(count, max_switches=60)
        ids = {name: self.core.add_model(name) for name in MODELS}
        leaves, parents, heights = self.random_switches()
        self.reference = Reference(ids, heights)
        shapes = [random_shape(draw) for _ in range(draw.randint(1, 3))]
        sizes = [(draw.choice([8000, 64000, 128000]), draw.choice([65536, 524288])) for _ in range(2)]
        ranks = list(range(count))
        draw.shuffle(ranks)
        ordered = draw.random() < 0.5
        for number in range(count):
            shape, (cpus, memory) = draw.choice(shapes), draw.choice(sizes)
            leaf = draw.choice(leaves) if leaves else 0
            self.core.add_node(self.core.add_shape(shape), cpus, memory, leaf)
            path = []
            switch = leaf
            while switch:
                path.append(switch)
                switch = parents[switch]
            rank = ranks[number] if ordered else number
            self.reference.nodes.append(Node(shape, cpus, memory, tuple(path), rank))
        if ordered:
            self.core.set_order(ranks)
        workload = [(self.random_shape_request(), draw.randint(1, 50)) for _ in range(draw.randint(0, 8))]
        set_workload(self.core, workload)
        self.reference.workload = workload
        self.held: dict[int, tuple[Part, ...]] = {}

    def random_switches(self) -> tuple[list[int], dict[int, int], dict[int, int]]:
        """Leaf switches (and 0, for unknown), parents and heights of a random forest."""
        draw, parents, depth = self.draw, {0: 0}, {0: 0}
        parent_ids = [0]
        for _ in range(draw.choice([0, 2, 6, 12])):
            parent = draw.choice(parent_ids)
            switch = self.core.add_switch(parent)
            parents[switch], depth[switch] = parent, depth[parent] + 1
            if depth[switch] < 4 and draw.random() < 0.5:
                parent_ids.append(switch)
        leaves = [switch for switch in parents if switch and switch not in parents.values()]
        heights = dict.fromkeys(parents, 0)
        for leaf in leaves:
            height, switch = 0, leaf
            while switch:
                heights[switch] = max(heights[switch], height)
                height, switch = height + 1, parents[switch]
        return leaves + ([0] if draw.random() < 0.3 else []), parents, heights

    def random_shape_request(self) -> Request:
        draw = self.draw
        gpus = draw.choice([0, 1, 1, 1, 2, 4, 8])
        share = draw.choice([0, 0, 100, 500, 999, 8192]) if gpus else 0
        return Request(
            gpus=gpus,
            gpu_memory_mib=share,
            cpus_milli=draw.choice([0, 1000, 4000, 32000]) if gpus else draw.choice([1000, 32000]),
            models=draw.choice([0, 0, 1, 3, 6]) if gpus else 0,
            capability_min=draw.choice([0, 0, 0, 850]) if gpus else 0,
            gpu_memory_mib_min=draw.choice([0, 0, 0, 16384]) if gpus else 0,
            gpu_compute_percent=draw.choice([0, 0, 0, 10, 40, 60, 100]) if gpus else 0,
        )

    def random_request(self) -> Request:
        draw = self.draw
        request = replace(
            self.random_shape_request(),
            host_memory_mib=draw.choice([0, 1024, 131072]),
            seed=draw.getrandbits(64),
            layout=draw.choice([Layout.POLICY, Layout.POLICY, Layout.PACK, Layout.SPREAD]),
        )
        if draw.random() < 0.1:
            request = replace(request, flags=RequestFlag.EXCLUSIVE)
        if draw.random() < 0.2:
            count = len(self.reference.nodes)
            request = replace(request, allowed=frozenset(draw.sample(range(count), draw.randint(0, count))))
        if request.gpus and draw.random() < 0.3:
            link, numa, nic = (draw.choice(list(Preference)) for _ in range(3))
            request = replace(request, one_link_domain=link, one_numa_node=numa, near_nic=nic)
        if request.gpus and draw.random() < 0.3:
            request = replace(request, cpus_milli_per_gpu=draw.choice([0, 500, 4000]), host_memory_mib_per_gpu=2048)
        if draw.random() < 0.5:
            nodes_min = draw.randint(1, 6)
            request = replace(
                request,
                nodes_min=nodes_min,
                nodes_max=draw.choice([0, nodes_min, nodes_min + draw.randint(0, 6)]),
                one_switch=draw.choice(list(Preference)),
                switch_level=draw.randrange(4),
            )
            if draw.random() < 0.3:
                segment = draw.randint(1, 3)
                return replace(request, nodes_min=nodes_min * segment, nodes_max=0, segment=segment)
            if request.gpus and draw.random() < 0.5:
                nodes_max = request.nodes_max or nodes_min
                gpus = draw.randint(nodes_min, nodes_max * draw.choice([1, 4, 16]))
                request = replace(request, gpus=gpus, flags=request.flags | RequestFlag.GPUS_TOTAL)
        if request.gpu_memory_mib and draw.random() < 0.2:
            flags = request.flags | RequestFlag.GPU_MEMORY_SUM
            request = replace(request, gpu_memory_mib=request.gpu_memory_mib * request.gpus, flags=flags)
        return request

    def disturb(self) -> None:
        """Something else changes: a release, a resize, a node's state, a GPU's health or load."""
        draw, event = self.draw, self.draw.randrange(8)
        number = draw.randrange(len(self.reference.nodes))
        node = self.reference.nodes[number]
        gpu = draw.randrange(len(node.shape.gpus)) if node.shape.gpus else None
        if event <= 2 and self.held:
            allocation = draw.choice(list(self.held))
            release(self.core, allocation)
            for part in self.held.pop(allocation):
                self.reference.nodes[part.node].parts.remove(part)
        elif event == 3:
            node.state = draw.choice([NodeState.UP, NodeState.UP, NodeState.DRAINED, NodeState.DOWN])
            self.core.set_state(number, node.state)
        elif event == 4 and gpu is not None:
            node.healthy[gpu] = draw.random() < 0.7
            self.core.set_health(number, gpu, node.healthy[gpu])
        elif event == 5 and gpu is not None:
            node.utilisation[gpu] = draw.choice([0, 10, 50, 100])
            self.core.set_utilisation(number, gpu, node.utilisation[gpu])
        elif event == 6:
            used = node.cpus - node.cpus_free, node.memory - node.memory_free
            node.cpus, node.memory = used[0] + draw.choice([0, 8000, 64000]), used[1] + draw.choice([0, 65536])
            self.core.resize_node(number, node.cpus, node.memory)
        elif event == 7 and self.held:
            allocation = draw.choice(list(self.held))
            old = draw.choice(self.held[allocation])
            new = replace(
                old,
                cpus_milli=old.cpus_milli // 2,
                gpu_memory_mib=(old.gpu_memory_mib + 1) // 2,
                gpu_compute_percent=old.gpu_compute_percent // 2,
            )
            resize(self.core, allocation, new)
            self.held[allocation] = tuple(new if part == old else part for part in self.held[allocation])
            parts = self.reference.nodes[old.node].parts
            parts[parts.index(old)] = new

    def decide(self) -> None:
        """One decision, compared in full, and committed half of the time."""
        policy, request = self.draw.choice(POLICIES), self.random_request()
        verdict, expected = self.reference.place(policy, request)
        explained = explain(self.core, policy, request)
        assert (explained.verdict, explained.placement) == (verdict, expected), (policy, request)
        assert explained.by_reason == self.reference.explain(policy, request)
        assert sum(explained.by_reason.values()) == explained.nodes == len(self.reference.nodes)
        if expected is None:
            if verdict == Verdict.NO_PLACE:
                assert place(self.core, policy, request) is None
            else:
                with pytest.raises(CoreError) as refusal:
                    place(self.core, policy, request)
                assert refusal.value.code == lib.SLUICE_ERROR_NEVER
            return
        assert place(self.core, policy, request) == expected
        if self.draw.random() < 0.6:
            allocation = start(self.core, policy, request)
            assert allocation is not None
            assert allocation.placement == expected
            assert read_allocation(self.core, allocation.id) == expected.parts
            self.held[allocation.id] = expected.parts
            for part in expected.parts:
                self.reference.nodes[part.node].parts.append(part)
            self.reference.last = expected.parts[-1].node


@pytest.mark.parametrize("block", range(8))
def test_decisions_are_the_references(block, full_scale):
    for seed in range(1000 if full_scale else 25):
        pair = Pair(random.Random(block * 1_000_000 + seed))
        for _ in range(40):
            pair.decide()
            pair.disturb()
        pair.core.check()


def nodes(count: int, gpus: int = 8, memory: int = 81920, cpus: int = 64000) -> Cluster:
    cluster = Cluster(count, max_allocations=64)
    shape = cluster.add_shape(NodeShape(tuple(GpuShape("H100", memory) for _ in range(gpus))))
    for _ in range(count):
        cluster.add_node(shape, cpus, 524288)
    return cluster


def test_a_refused_call_changes_nothing():
    cluster = nodes(4)
    first = start(cluster, Policy.FIRST_FIT, Request(gpus=8))
    before = [cluster.node(n) for n in range(4)], cluster.totals()
    for parts, code in [
        ([], lib.SLUICE_ERROR_INVALID),
        ([Part(4)], lib.SLUICE_ERROR_UNKNOWN),
        ([Part(1, gpus=1), Part(1, gpus=2)], lib.SLUICE_ERROR_DUPLICATE),
        ([Part(1, gpus=1), Part(0, gpus=1)], lib.SLUICE_ERROR_CAPACITY),
        ([Part(1, gpus=256)], lib.SLUICE_ERROR_UNKNOWN),
        ([Part(1, gpus=1, gpu_memory_mib=81921)], lib.SLUICE_ERROR_CAPACITY),
        ([Part(1, gpus=1, gpu_memory_mib=-1)], lib.SLUICE_ERROR_RANGE),
        ([Part(1, gpu_memory_mib=1)], lib.SLUICE_ERROR_INVALID),
        ([Part(1, gpus=1, gpu_memory_mib=1, gpu_compute_percent=101)], lib.SLUICE_ERROR_RANGE),
        ([Part(1, gpu_compute_percent=1)], lib.SLUICE_ERROR_RANGE),
        ([Part(1, cpus_milli=64001)], lib.SLUICE_ERROR_CAPACITY),
        ([Part(1, cpus_milli=2**62)], lib.SLUICE_ERROR_RANGE),
        ([Part(1, host_memory_mib=-5)], lib.SLUICE_ERROR_RANGE),
        ([Part(0, exclusive=True)], lib.SLUICE_ERROR_CAPACITY),
    ]:
        with pytest.raises(CoreError) as refusal:
            commit(cluster, parts)
        assert refusal.value.code == code, parts
    with pytest.raises(CoreError, match="not known"):
        release(cluster, first.id + 1)
    release(cluster, first.id)
    with pytest.raises(CoreError, match="released already"):
        release(cluster, first.id)
    again = start(cluster, Policy.FIRST_FIT, Request(gpus=8))
    assert again.id != first.id
    assert ([cluster.node(n) for n in range(4)], cluster.totals()) == before
    cluster.check()


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Request(), "asks for nothing"),
        (Request(gpus=-1), "gpus -1"),
        (Request(gpus=17), "gpus 17"),
        (Request(gpus=1, cpus_milli=-1), "cpus_milli -1"),
        (Request(gpus=1, host_memory_mib=2**62), "host_memory_mib"),
        (Request(gpus=16, cpus_milli_per_gpu=10**9), "with its GPUs' part"),
        (Request(gpus=1, nodes_min=3, nodes_max=2), "nodes_min 3"),
        (Request(gpus=1, nodes_min=2**40), "nodes_min"),
        (Request(gpus=1, models=1 << 63), "GPU model 63"),
        (Request(gpus=1, allowed=frozenset([0, 99])), "node 99"),
        (Request(cpus_milli=1, gpu_memory_mib=1), "gpu_memory_mib is set"),
        (Request(cpus_milli=1, near_nic=Preference.REQUIRED), "near_nic is set"),
        (Request(gpus=2, gpu_memory_mib=5, flags=RequestFlag.GPU_MEMORY_SUM), "ask for 6"),
        (Request(gpus=2, flags=RequestFlag.GPU_MEMORY_SUM), "whole GPUs"),
        (Request(gpus=2, nodes_min=3, nodes_max=4, flags=RequestFlag.GPUS_TOTAL), "at least one"),
        (Request(gpus=65, nodes_min=1, nodes_max=4, flags=RequestFlag.GPUS_TOTAL), "at most 16"),
        (Request(gpus=1, switch_level=16), "switch_level 16"),
        (Request(gpus=1, nodes_min=3, segment=2), "nodes_min 3 is no multiple of segment 2"),
        (Request(gpus=1, segment=2), "nodes_min 1 is no multiple"),
        (Request(gpus=1, segment=-1), "segment -1"),
        (Request(gpus=8, nodes_min=2, nodes_max=4, segment=2, flags=RequestFlag.GPUS_TOTAL), "GPUs in total"),
        (Request(gpus=1, gpu_memory_mib=1, gpu_compute_percent=101), "gpu_compute_percent 101"),
        (Request(gpus=1, gpu_compute_percent=-1), "gpu_compute_percent -1"),
        (Request(cpus_milli=1, gpu_compute_percent=50), "gpu_compute_percent is set"),
    ],
)
def test_malformed_requests(request_, word):
    cluster = nodes(3)
    with pytest.raises(CoreError, match=word):
        check_request(cluster, request_)
    with pytest.raises(CoreError, match=word):
        place(cluster, Policy.FIRST_FIT, request_)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_gives_no_more_compute_than_it_has(policy):
    cluster = nodes(1, gpus=2)
    claims = {percent: Request(gpus=1, gpu_memory_mib=1024, gpu_compute_percent=percent) for percent in (0, 40, 41, 60)}
    first, second = (start(cluster, policy, claims[60]) for _ in range(2))
    assert {first.placement.parts[0].gpus, second.placement.parts[0].gpus} == {1, 2}
    assert place(cluster, policy, claims[41]) is None
    assert explain(cluster, policy, claims[41]).by_reason == {Reason.GPU_COMPUTE: 1}
    assert start(cluster, policy, claims[40]) is not None
    assert start(cluster, policy, claims[0]) is not None  # claims none: competes for what is left
    assert sorted(cluster.node(0).gpu_compute_free) == [0, 40]
    cluster.check()
    release(cluster, first.id)
    assert start(cluster, policy, claims[60]).placement.parts == first.placement.parts
    cluster.check()


def test_a_whole_gpu_that_claims_half_of_its_compute_is_held_whole():
    cluster = nodes(1, gpus=1)
    assert start(cluster, Policy.SLUICE, Request(gpus=1, gpu_compute_percent=50)) is not None
    assert explain(cluster, Policy.SLUICE, Request(gpus=1, gpu_memory_mib=1, gpu_compute_percent=50)).by_reason == {
        Reason.GPU_BUSY: 1
    }


def test_a_group_starts_together_or_not_at_all():
    cluster = nodes(4)
    before = cluster.totals()
    group = [Request(gpus=1, gpu_memory_mib=1000), Request(gpus=8, nodes_min=3), Request(gpus=4)]
    started = start_group(cluster, Policy.BEST_FIT, group)
    assert [len(allocation.placement.parts) for allocation in started] == [1, 3, 1]
    assert start_group(cluster, Policy.BEST_FIT, [Request(gpus=1), Request(gpus=4)]) is None
    cluster.check()
    for allocation in started:
        release(cluster, allocation.id)
    assert cluster.totals() == before
    with pytest.raises(CoreError, match="request 1") as refusal:
        start_group(cluster, Policy.BEST_FIT, [Request(gpus=1), Request(gpus=9)])
    assert refusal.value.code == lib.SLUICE_ERROR_NEVER
    assert cluster.totals() == before


def test_no_other_choice_of_nodes_is_more_compact():
    """Against every set of nodes: level of the lowest common switch, and how many switches just below it are used."""
    draw = random.Random(7)
    for _ in range(60):
        cluster = Cluster(10, max_switches=20)
        shape = cluster.add_shape(NodeShape((GpuShape("H100", 1000),) * 8))
        pods = [cluster.add_switch() for _ in range(draw.randint(1, 3))]
        racks = [(cluster.add_switch(pod), pod) for pod in pods for _ in range(draw.randint(1, 3))]
        places = [draw.choice(racks) for _ in range(10)]
        for number, (rack, _) in enumerate(places):
            cluster.add_node(shape, 64000, 1000, rack)
            if draw.random() < 0.3:
                cluster.set_state(number, NodeState.DRAINED)

        def spread_of(numbers, places=places):
            used = [places[number] for number in numbers]
            if len({rack for rack, _ in used}) == 1:
                return 0, 1
            if len({pod for _, pod in used}) == 1:
                return 1, len({rack for rack, _ in used})
            return 2, len({pod for _, pod in used})

        up = [number for number in range(10) if cluster.node(number).state == NodeState.UP]
        for count in range(2, len(up) + 1):
            placed = place(cluster, draw.choice(list(Policy)), Request(gpus=8, nodes_min=count))
            assert spread_of([part.node for part in placed.parts]) == min(map(spread_of, combinations(up, count)))


def test_an_explanation_counts_each_node_once():
    cluster = nodes(6)
    cluster.set_state(0, NodeState.DRAINED)
    cluster.set_health(1, 3, False)
    start(cluster, Policy.FIRST_FIT, Request(gpus=8, allowed=frozenset([2])))
    start(cluster, Policy.FIRST_FIT, Request(cpus_milli=60000, allowed=frozenset([3])))
    explained = explain(cluster, Policy.BEST_FIT, Request(gpus=8, cpus_milli=8000, nodes_min=3))
    assert explained.verdict == Verdict.NO_PLACE
    assert explained.by_reason == {
        Reason.STATE: 1,
        Reason.HEALTH: 1,
        Reason.GPU_BUSY: 1,
        Reason.CPUS: 1,
        Reason.GANG: 2,
    }
    assert explain(cluster, Policy.BEST_FIT, Request(gpus=8, nodes_min=7)).verdict == Verdict.NEVER


def test_policies_have_names():
    assert [Policy.from_name(policy.label) for policy in Policy] == list(Policy)
    with pytest.raises(CoreError, match="gpu-packing"):
        Policy.from_name("fastest")
    assert all(reason.text != "unknown reason" for reason in Reason)
