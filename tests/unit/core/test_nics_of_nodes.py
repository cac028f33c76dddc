"""Nodes compared by their GPUs near NICs: random clusters in use, each placement compared with all that there are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape, NodeState
from sluice.core.errors import CoreError
from sluice.core.placement import (
    Layout,
    Part,
    Placement,
    Policy,
    Preference,
    Reason,
    Request,
    RequestFlag,
    commit,
    explain,
    place,
    read_allocation,
    release,
    resize,
    start,
)

POLICIES = [policy for policy in Policy if policy not in (Policy.ROUND_ROBIN, Policy.GPU_CLUSTERING)]
DGX = NicGroups((0, 1, 2, 3), (0, 1, 2, 3))


class Site:
    """A cluster with what its nodes are made of."""

    def __init__(self, shapes: list[NodeShape]) -> None:
        self.shapes = shapes
        self.cluster = Cluster(len(shapes))
        for shape in shapes:
            self.cluster.add_node(self.cluster.add_shape(shape), 8000, 1000)

    def most_pairs(self, node: int, request: Request, gpus: int) -> int:
        """Of `gpus` GPUs of the node and the NICs for them; -1: it has not so many free."""
        shape, view = self.shapes[node], self.cluster.node(node)
        models = {self.cluster.add_model(gpu.model): gpu.model for gpu in shape.gpus}
        accepted = {name for model, name in models.items() if not request.models or request.models >> model & 1}
        idle = tuple(i for i, gpu in enumerate(shape.gpus) if view.gpus_idle >> i & 1 and gpu.model in accepted)
        nics, wanted = shape.nics, request.nics + gpus * request.nics_per_gpu
        if view.state != NodeState.UP or view.cpus_milli_free < request.cpus_milli or len(idle) < gpus or nics is None:
            return -1
        kinds = nics.kinds or (0,) * len(nics.nics)
        free = tuple(
            i
            for i, kind in enumerate(kinds)
            if view.nics_free >> i & 1 and (not request.nic_kinds or request.nic_kinds >> kind & 1)
        )
        return most_pairs(nics.gpus, nics.nics, idle, free, gpus, wanted) if len(free) >= wanted else -1


@cache
def most_pairs(
    gpu_groups: tuple[int, ...],
    nic_groups: tuple[int, ...],
    idle: tuple[int, ...],
    free: tuple[int, ...],
    gpus: int,
    nics: int,
) -> int:
    """Over all choices of so many GPUs and NICs; each choice is matched along augmenting paths."""
    return max(
        matched([gpu_groups[i] for i in some], [nic_groups[i] for i in others])
        for some in combinations(idle, gpus)
        for others in combinations(free, nics)
    )


def matched(gpus: list[int], nics: list[int]) -> int:
    """Pairs of one group, where each of the fewer is in as many as it takes, rounded up."""
    left = [group for group in gpus for _ in range(max(1, -(-len(nics) // len(gpus))))]
    seats = [group for group in nics for _ in range(max(1, -(-len(gpus) // len(nics))))]
    taken: dict[int, int] = {}

    def find(which: int, seen: set[int]) -> bool:
        for seat, group in enumerate(seats):
            if group == left[which] and seat not in seen:
                seen.add(seat)
                if seat not in taken or find(taken[seat], seen):
                    taken[seat] = which
                    return True
        return False

    return sum(find(which, set()) for which in range(len(left)))


def random_shape(draw: random.Random, *, mixed: bool) -> NodeShape:
    count, groups, nics = draw.choice([1, 2, 4, 4]), draw.choice([2, 3, 4]), draw.choice([1, 2, 4, 5])
    models = ["a", "b"] if mixed and draw.random() < 0.5 else [draw.choice("ab")]
    kinds = draw.choice([(0,) * nics, (1,) * nics, tuple(draw.randrange(2) for _ in range(nics))]) if mixed else ()
    found = NicGroups(
        tuple(draw.randrange(groups) for _ in range(count)), tuple(draw.randrange(groups) for _ in range(nics)), kinds
    )
    return NodeShape(
        tuple(GpuShape(draw.choice(models), 1000, link_domain=i % 2) for i in range(count)),
        nics=found if draw.random() < 0.9 else None,
    )


def random_site(draw: random.Random) -> Site:
    """Some of it in use, by jobs with GPUs, with NICs, or with both."""
    mixed = draw.random() < 0.4
    kinds = [random_shape(draw, mixed=mixed) for _ in range(draw.randint(1, 3))]
    site = Site([draw.choice(kinds) for _ in range(draw.randint(1, 6))])
    for node, shape in enumerate(site.shapes):
        gpus = sum(1 << i for i in range(len(shape.gpus)) if draw.random() < 0.4)
        nics = sum(1 << i for i in range(len(shape.nics.nics) if shape.nics else 0) if draw.random() < 0.3)
        if gpus or nics:
            commit(site.cluster, [Part(node, gpus, cpus_milli=1000, nics=nics)])
        if draw.random() < 0.1:
            site.cluster.set_state(node, NodeState.DRAINED)
    if draw.random() < 0.3:
        ranks = list(range(len(site.shapes)))
        draw.shuffle(ranks)
        site.cluster.set_order(ranks)
    return site


def random_request(draw: random.Random, site: Site) -> Request:
    gpus = draw.choice([1, 1, 2, 2, 3, 4])
    per_gpu = draw.random() < 0.3
    nics = draw.choice([gpus, gpus, gpus, 1, 2, 4])
    allowed = frozenset(node for node in range(len(site.shapes)) if draw.random() < 0.8)
    return Request(
        gpus=gpus,
        cpus_milli=draw.choice([0, 1000, 7500]),
        nics=0 if per_gpu else nics,
        nics_per_gpu=draw.choice([1, 1, 2]) if per_gpu else 0,
        models=site.cluster.models(["a"]) if draw.random() < 0.2 else 0,
        nic_kinds=1 if draw.random() < 0.15 else 0,
        layout=draw.choice([Layout.POLICY] * 4 + [Layout.PACK, Layout.SPREAD]),
        allowed=allowed or None if draw.random() < 0.5 else None,
    )


def placed(cluster: Cluster, policy: Policy, request: Request) -> Placement | None:
    try:
        return place(cluster, policy, request)
    except CoreError:  # never
        return None


def test_no_node_has_more_pairs(full_scale: bool) -> None:
    """The node has as many pairs as any; of those with as many it is the policy's; its GPUs and NICs have them."""
    draw = random.Random(22)
    elsewhere = 0
    for _ in range(20_000 if full_scale else 2500):
        site, policy = random_site(draw), draw.choice(POLICIES)
        request = random_request(draw, site)
        nodes = range(len(site.shapes)) if request.allowed is None else sorted(request.allowed)
        pairs = {node: site.most_pairs(node, request, request.gpus) for node in nodes}
        most = max(pairs.values(), default=-1)
        found = placed(site.cluster, policy, request)
        assert (found is None) == (most < 0), (policy, request, pairs)
        if found is None:
            continue
        (part,) = found.parts
        groups = site.shapes[part.node].nics
        assert groups is not None
        wanted = request.nics + request.gpus * request.nics_per_gpu
        assert (part.gpus.bit_count(), part.nics.bit_count()) == (request.gpus, wanted)
        near = matched([groups.gpus[i] for i in bits(part.gpus)], [groups.nics[i] for i in bits(part.nics)])
        assert found.nic_pairs == near == most, (policy, request, pairs, found)
        without = replace(request, nics=0, nics_per_gpu=0, nic_kinds=0)
        best = frozenset(node for node, count in pairs.items() if count == most)
        chosen = place(site.cluster, policy, replace(without, allowed=best))
        assert chosen is not None
        assert chosen.parts[0].node == part.node
        own = place(site.cluster, policy, without)
        elsewhere += own is not None and own.parts[0].node != part.node
        commit(site.cluster, found.parts)
        site.cluster.check()
    assert elsewhere > 100


def test_the_index_follows_a_churn(full_scale: bool) -> None:
    """More kinds of requests than are remembered, while parts come and go and nodes change their state."""
    draw = random.Random(24)
    kinds = [random_shape(draw, mixed=True) for _ in range(3)]
    site = Site([draw.choice(kinds) for _ in range(12)])
    asked, held, missed = set[Request](), list[int](), 0
    for _ in range(20_000 if full_scale else 1500):
        request = replace(random_request(draw, site), cpus_milli=0)
        asked.add(replace(request, allowed=None, layout=Layout.POLICY))
        nodes = range(len(site.shapes)) if request.allowed is None else request.allowed
        most = max((site.most_pairs(node, request, request.gpus) for node in nodes), default=-1)
        found = placed(site.cluster, Policy.SLUICE, request)
        assert (-1 if found is None else found.nic_pairs) == most, request
        missed += found is None
        if found is not None and draw.random() < 0.7:
            held.append(commit(site.cluster, found.parts))
        while held and draw.random() < 0.4:
            release(site.cluster, held.pop(draw.randrange(len(held))))
        site.cluster.set_state(draw.randrange(12), NodeState.DRAINED if draw.random() < 0.1 else NodeState.UP)
        site.cluster.check()
    assert len(asked) > 30
    assert 50 < missed < 1000 or full_scale


def bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def test_gangs_take_nodes_with_their_pairs() -> None:
    """Wherever so many nodes have all pairs, the gang gets such nodes; GPUs in total, too."""
    draw = random.Random(23)
    complete = totals = 0
    for _ in range(1500):
        site = random_site(draw)
        gpus, count = draw.choice([1, 2, 2]), draw.choice([2, 3])
        each = [site.most_pairs(node, Request(gpus=gpus, nics=gpus), gpus) for node in range(len(site.shapes))]
        gang = placed(site.cluster, Policy.SLUICE, Request(gpus=gpus, nics=gpus, nodes_min=count, nodes_max=count))
        assert (gang is None) == (sum(pairs >= 0 for pairs in each) < count)
        if sum(pairs == gpus for pairs in each) >= count:
            assert gang is not None
            assert gang.nic_pairs == gpus * count
            complete += 1
        everywhere = [max_paired(site, node) for node in range(len(site.shapes))]
        total = Request(gpus=4, nics_per_gpu=1, nodes_min=1, nodes_max=3, flags=RequestFlag.GPUS_TOTAL)
        if sum(sorted(everywhere)[-3:]) >= 4:
            found = place(site.cluster, Policy.SLUICE, total)
            assert found is not None
            assert found.nic_pairs == 4
            assert all(part.gpus.bit_count() == part.nics.bit_count() for part in found.parts)
            totals += 1
    assert complete > 100
    assert totals > 100


def max_paired(site: Site, node: int) -> int:
    return max((gpus for gpus in range(1, 5) if site.most_pairs(node, Request(nics=gpus), gpus) == gpus), default=0)


def test_the_users_own_wish_comes_first() -> None:
    """A job that prefers GPUs of one link domain gets them, and then pairs."""
    links = tuple(GpuShape("a", 1000, link_domain=i // 2) for i in range(4))
    site = Site([NodeShape(links, nics=DGX)] * 2)
    commit(site.cluster, [Part(0, 0b0101)])
    commit(site.cluster, [Part(1, 0b0011, nics=0b1100)])
    request = Request(gpus=2, nics=2)
    free = place(site.cluster, Policy.SLUICE, request)
    linked = place(site.cluster, Policy.SLUICE, replace(request, one_link_domain=Preference.PREFERRED))
    assert free == Placement((Part(0, 0b1010, nics=0b1010),), free.score if free else 0, 2)
    assert linked == Placement((Part(1, 0b1100, nics=0b0011),), linked.score if linked else 0, 0)


def test_nics_alone_are_near_no_idle_gpu() -> None:
    site = Site([NodeShape((GpuShape("a", 1000),) * 4, nics=DGX)])
    commit(site.cluster, [Part(0, 0b0100)])
    found = place(site.cluster, Policy.SLUICE, Request(nics=1))
    assert found is not None
    assert found.parts == (Part(0, nics=0b0100),)


def test_nics_are_held_and_given_back() -> None:
    site = Site([NodeShape((GpuShape("a", 1000),) * 4, nics=DGX)])
    first = start(site.cluster, Policy.SLUICE, Request(gpus=3, nics=3, cpus_milli=1000))
    assert first is not None
    (part,) = first.placement.parts
    assert read_allocation(site.cluster, first.id) == (part,)
    assert site.cluster.node(0).nics_free == 0b1000
    assert place(site.cluster, Policy.SLUICE, Request(gpus=1, nics=2)) is None
    why = explain(site.cluster, Policy.SLUICE, Request(gpus=1, nics=2))
    assert why.by_reason == {Reason.NICS_BUSY: 1}
    assert Reason.NICS_BUSY.text == "GPUs free, too few RDMA NICs free"
    assert explain(site.cluster, Policy.SLUICE, Request(gpus=1, nics=5)).by_reason == {Reason.NICS: 1}
    resize(site.cluster, first.id, replace(part, cpus_milli=2000))
    with pytest.raises(CoreError, match="keeps the GPUs"):
        resize(site.cluster, first.id, replace(part, nics=1))
    site.cluster.check()
    release(site.cluster, first.id)
    site.cluster.check()
    assert site.cluster.node(0).nics_free == 0b1111
    assert explain(site.cluster, Policy.SLUICE, Request(gpus=2, nics=2)).terms["nic_pairs"] == 2


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(0, 0b1, nics=0b10000), "NICs 0x10 asked, it has 0xf"),
        (Part(0, 0b10, nics=0b11), "NICs 0x1 are in use"),
        (Part(1, 0b10, nics=0b1), "NICs 0x1 asked, it has 0x0"),
    ],
)
def test_parts_that_are_refused(part: Part, words: str) -> None:
    site = Site([NodeShape((GpuShape("a", 1000),) * 4, nics=nics) for nics in (DGX, None)])
    commit(site.cluster, [Part(0, nics=0b1)])
    with pytest.raises(CoreError, match=words):
        commit(site.cluster, [part])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(gpus=1, nics=33), "nics 33: must be 0 to 32"),
        (Request(gpus=1, nics=-1), "nics -1: must be 0 to 32"),
        (Request(gpus=4, nics_per_gpu=9), "nics of a node with its GPUs' part 36: must be 0 to 32"),
        (Request(nics=1, nics_per_gpu=1), "nics_per_gpu is set, but gpus is 0"),
        (Request(gpus=1, nic_kinds=1), "nic_kinds is set, but no NIC is asked"),
    ],
)
def test_requests_that_are_refused(request_: Request, words: str) -> None:
    site = Site([NodeShape((GpuShape("a", 1000),) * 4, nics=DGX)])
    with pytest.raises(CoreError, match=words):
        place(site.cluster, Policy.SLUICE, request_)


@pytest.mark.parametrize(
    ("nics", "words"),
    [
        (NicGroups((0,), (0,)), "groups of 1 GPUs for a node with 4"),
        (NicGroups((0,) * 4, (48,)), "NIC 0: group 48 must be below 48"),
        (NicGroups((0,) * 4, (0,), (64,)), "NIC 0: kind 64 must be below 64"),
        (NicGroups((0,) * 4, (0,) * 33), "33 NICs: a node has at most 32"),
    ],
)
def test_shapes_that_are_refused(nics: NicGroups, words: str) -> None:
    with pytest.raises(CoreError, match=words):
        Site([NodeShape((GpuShape("a", 1000),) * 4, nics=nics)])
