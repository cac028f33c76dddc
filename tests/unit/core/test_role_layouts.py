"""Roles of an allocation: random nodes, each layout compared with all that there are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest

from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import Part, lay_out_roles

Where = Callable[[int, int], object]  # the domain of a node's GPU


def bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def cluster_of(*nodes: tuple[Sequence[GpuShape], int], switches: int = 0) -> Cluster:
    """Nodes of GPUs, each below a leaf switch; 0: its place is not known."""
    cluster = Cluster(max(len(nodes), 1), max_switches=max(switches, 1))
    for _ in range(switches):
        cluster.add_switch()
    for gpus, leaf in nodes:
        cluster.add_node(cluster.add_shape(NodeShape(tuple(gpus))), 64_000, 1 << 20, leaf)
    return cluster


def gpus_of(*places: tuple[int, int]) -> list[GpuShape]:
    return [GpuShape("H100", 81920, link_domain=link, numa_node=numa) for link, numa in places]


def layout(cluster: Cluster, parts: list[Part], wanted: Sequence[int]) -> list[set[tuple[int, int]]]:
    """Of each role its (node, GPU); all are given once, and as many as wanted."""
    roles: list[set[tuple[int, int]]] = [set() for _ in wanted]
    for part, masks in zip(parts, lay_out_roles(cluster, parts, wanted), strict=True):
        assert sum(masks) == part.gpus  # masks of one part do not overlap
        assert sum(mask.bit_count() for mask in masks) == part.gpus.bit_count()
        for role, mask in enumerate(masks):
            roles[role] |= {(part.node, gpu) for gpu in bits(mask)}
    assert [len(role) for role in roles] == list(wanted)
    return roles


def pairs(roles: list[set[tuple[int, int]]], where: Where) -> int:
    """Pairs of a role and a domain that it has GPUs in."""
    return sum(len({where(*gpu) for gpu in role}) for role in roles)


def splits(total: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to take `total` of what there is room for."""
    if not room:
        if total == 0:
            yield ()
        return
    for here in range(min(total, room[0]) + 1):
        for rest in splits(total - here, room[1:]):
            yield (here, *rest)


def fewest(sizes: Sequence[int], wanted: Sequence[int]) -> int:
    """Of all ways to divide domains of these sizes among roles, the fewest pairs."""

    @cache
    def best(role: int, room: tuple[int, ...]) -> int:
        if role == len(wanted):
            return 0
        return min(
            sum(map(bool, taken)) + best(role + 1, tuple(have - take for have, take in zip(room, taken, strict=True)))
            for taken in splits(wanted[role], room)
        )

    return best(0, tuple(sizes))


def divide(draw: random.Random, total: int, parts: int) -> list[int]:
    cuts = sorted(draw.sample(range(1, total), parts - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]


@pytest.mark.parametrize("roles", [2, 3, 4])
def test_as_few_nodes_as_any_layout(roles: int) -> None:
    """Two roles: never more than the best; more roles: at most one more each, and mostly none."""
    draw, best, cases = random.Random(2200 + roles), 0, 60
    for _ in range(cases):
        sizes = [draw.randint(1, 6) for _ in range(draw.randint(2, 5))]
        wanted = divide(draw, max(sum(sizes), roles), roles) if sum(sizes) >= roles else None
        if wanted is None:
            cases -= 1
            continue
        cluster = cluster_of(*((gpus_of(*[(0, 0)] * size), 0) for size in sizes))
        parts = [Part(node, gpus=(1 << size) - 1) for node, size in enumerate(sizes)]
        found = pairs(layout(cluster, parts, wanted), lambda node, _: node)
        least = fewest(sizes, wanted)
        assert least <= found <= least + (roles - 1 if roles > 2 else 0), (sizes, wanted)
        best += found == least
    assert best >= cases * (1 if roles == 2 else 0.9), best


def test_level_by_level() -> None:
    """Two roles on nodes of several leaf switches: fewest leaf switches, and in each leaf switch fewest nodes, and in
    each node fewest link domains for what the wider levels leave."""
    draw = random.Random(2205)
    for _ in range(150):
        nodes = []
        for _ in range(draw.randint(2, 5)):
            count, links = draw.choice([2, 4, 8]), draw.choice([1, 2])
            nodes.append(
                (gpus_of(*[(gpu * links // count, gpu * 2 // count) for gpu in range(count)]), draw.randint(0, 2))
            )
        cluster = cluster_of(*nodes, switches=2)
        parts = [
            Part(node, gpus=mask) for node, (gpus, _) in enumerate(nodes) if (mask := draw.randrange(1 << len(gpus)))
        ]
        total = sum(part.gpus.bit_count() for part in parts)
        if total < 2:
            continue
        roles = layout(cluster, parts, divide(draw, total, 2))

        def leaf(node: int, _: int) -> object:
            return nodes[node][1] or ("alone", node)  # noqa: B023 - called in this round

        def node_of(node: int, _: int) -> object:
            return node

        def link(node: int, gpu: int) -> object:
            return nodes[node][0][gpu].link_domain  # noqa: B023 - likewise

        everything = roles[0] | roles[1]
        assert pairs(roles, leaf) == fewest_of(everything, roles, leaf)
        for outer, inner in ((leaf, node_of), (node_of, link)):
            for domain in {outer(*gpu) for gpu in everything}:
                here = [{gpu for gpu in role if outer(*gpu) == domain} for role in roles]
                assert pairs(here, inner) == fewest_of(here[0] | here[1], here, inner)


def fewest_of(gpus: set[tuple[int, int]], roles: list[set[tuple[int, int]]], where: Where) -> int:
    domains = [where(*gpu) for gpu in gpus]
    return fewest([domains.count(domain) for domain in set(domains)], [len(role) for role in roles])


def test_numa_nodes_where_links_do_not_part() -> None:
    eight = [(0, gpu // 4) for gpu in range(8)]  # one NVSwitch, two sockets
    cluster = cluster_of((gpus_of(*eight), 0))
    assert lay_out_roles(cluster, [Part(0, gpus=0xFF)], [4, 4]) == [(0x0F, 0xF0)]
    bridges = [(gpu // 2, gpu % 4 // 2) for gpu in range(8)]  # pairs that are linked; NUMA nodes 0 0 1 1 0 0 1 1
    cluster = cluster_of((gpus_of(*bridges), 0))
    assert lay_out_roles(cluster, [Part(0, gpus=0xFF)], [4, 4]) == [(0x33, 0xCC)]


def test_the_same_again_and_bad_input() -> None:
    cluster = cluster_of(*((gpus_of(*[(0, 0)] * 4), 0) for _ in range(3)))
    parts = [Part(node, gpus=0xF) for node in range(3)]
    assert lay_out_roles(cluster, parts, [5, 7]) == lay_out_roles(cluster, parts, [5, 7])
    assert lay_out_roles(cluster, [], []) == []
    for wrong, why in (
        ((parts, [5, 6]), "11 GPUs wanted of 12"),
        ((parts, [1] * 9), "9, at most 8"),
        (([Part(3, gpus=1)], [1]), "no node 3"),
        (([Part(0, gpus=16)], [1]), "no such GPUs"),
    ):
        with pytest.raises(CoreError, match=why):
            lay_out_roles(cluster, *wrong)


@pytest.mark.parametrize(
    ("each", "wanted"),
    [
        (8, [1001, 1500, 1595]),
        (2, [2047, 2049]),  # no nodes have as many GPUs together as a role wants
        (1, [4089, 1, 1, 1, 1, 1, 1, 1]),
        (1, [512] * 8),
    ],
)
def test_a_large_job_is_laid_out_at_once(each: int, wanted: list[int]) -> None:
    """4,096 GPUs: slurmctld holds its locks for as long, and some ms are what it takes."""
    nodes = 4096 // each
    cluster = cluster_of(*((gpus_of(*[(0, gpu // 4) for gpu in range(each)]), 0) for _ in range(nodes)))
    parts = [Part(node, gpus=(1 << each) - 1) for node in range(nodes)]
    took = []
    for _ in range(3):
        began = time.thread_time()
        masks = lay_out_roles(cluster, parts, wanted)
        took.append(time.thread_time() - began)
    assert min(took) < 0.1, took
    assert sum(bool(mask) for of_part in masks for mask in of_part) <= nodes + len(wanted) - 1
