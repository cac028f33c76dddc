"""NICs of one plane, or spread over planes: random clusters in use, each placement compared with all that there are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from sluice.core.backfill import Backfill, PendingJob, RunningJob, Start
from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import (
    Layout,
    Part,
    Placement,
    Policy,
    Preference,
    Request,
    RequestFlag,
    commit,
    explain,
    place,
    release,
)
from sluice.core.power import Budget, Power
from tests.unit.core.test_nics_of_nodes import Site, bits, matched

PLANES = 3
BACKFILL = Backfill(4, max_jobs=2, max_running=8)


def random_site(
    draw: random.Random,
    *,
    known: bool = True,
    nics_of_node: Sequence[int] = (2, 4, 5),
    running: list[RunningJob] | None = None,
) -> Site:
    """In use; `running`: what is in use ends, and is added to it."""
    shapes = []
    for _ in range(draw.randint(1, 2)):
        gpus, nics, groups = draw.choice([2, 4, 4]), draw.choice(nics_of_node), draw.choice([2, 3, 4])
        found = NicGroups(
            tuple(draw.randrange(groups) for _ in range(gpus)),
            tuple(draw.randrange(groups) for _ in range(nics)),
            planes=tuple(draw.randint(draw.choice([0, 1, 1]), PLANES) if known else 0 for _ in range(nics)),
        )
        links = tuple(GpuShape("a", 1000, link_domain=i // 2) for i in range(gpus))
        shapes.append(NodeShape(links, nics=found))
    site = Site([draw.choice(shapes) for _ in range(draw.randint(1, 4))])
    for node, shape in enumerate(site.shapes):
        gpus = sum(1 << i for i in range(len(shape.gpus)) if draw.random() < 0.3)
        nics = sum(1 << i for i in range(len(shape.nics.nics) if shape.nics else 0) if draw.random() < 0.25)
        if gpus or nics:
            allocation = commit(site.cluster, [Part(node, gpus, nics=nics)])
            if running is not None:
                running.append(RunningJob(allocation, draw.randint(1, 30)))
    return site


def groups_of(site: Site, node: int) -> NicGroups:
    nics = site.shapes[node].nics
    assert nics is not None
    return nics


def choices(
    site: Site, node: int, gpus: Iterable[int] | None, request: Request, plane: int = 0
) -> list[tuple[int, tuple[int, ...]]]:
    """The pairs and the planes of each choice of so many idle GPUs (or of these), and so many free NICs."""
    view, groups = site.cluster.node(node), groups_of(site, node)
    free = [i for i in bits(view.nics_free) if not plane or groups.planes[i] == plane]
    some = combinations(bits(view.gpus_idle), request.gpus) if gpus is None else [tuple(gpus)]
    return [
        (
            matched([groups.gpus[i] for i in chosen], [groups.nics[i] for i in nics]) if chosen and nics else 0,
            tuple(groups.planes[i] for i in nics),
        )
        for chosen in some
        for nics in combinations(free, request.nics)
    ]


def unevenness(planes: Iterable[int]) -> tuple[int, int]:
    """NICs of which it is not known, and the squares of how many are in each plane."""
    counts = Counter(planes)
    return counts.pop(0, 0), sum(count * count for count in counts.values())


def planes_of(site: Site, part: Part) -> list[int]:
    return [groups_of(site, part.node).planes[nic] for nic in bits(part.nics)]


def pairs_of(site: Site, part: Part) -> int:
    groups = groups_of(site, part.node)
    return matched([groups.gpus[i] for i in bits(part.gpus)], [groups.nics[i] for i in bits(part.nics)])


def placed(cluster: Cluster, request: Request, policy: Policy = Policy.SLUICE) -> Placement | None:
    try:
        return place(cluster, policy, request)
    except CoreError:  # never
        return None


def random_request(draw: random.Random) -> Request:
    gpus = draw.choice([0, 1, 2, 2, 3])
    return Request(
        gpus=gpus,
        nics=draw.choice([gpus or 1, gpus or 2, 1, 2, 3]),
        one_link_domain=draw.choice([Preference.ANY] * 4 + [Preference.PREFERRED]) if gpus else Preference.ANY,
    )


def test_spread_over_planes_as_evenly_as_any_choice(full_scale: bool) -> None:
    """No pair is lost, the node stays; nothing is more even, but now and then where more than 10 are free."""
    draw = random.Random(61)
    changed = even = worse = 0
    for turn in range(12_000 if full_scale else 1500):
        many = turn % 30 == 0
        site = random_site(draw, nics_of_node=(14, 16) if many else (2, 4, 5))
        request, policy = random_request(draw), draw.choice(list(Policy))
        plain = placed(site.cluster, request, policy)
        found = placed(site.cluster, replace(request, nic_planes=Layout.SPREAD), policy)
        assert (found is None) == (plain is None)
        if found is None or plain is None:
            continue
        (part,), (before,) = found.parts, plain.parts
        assert (part.node, part.gpus.bit_count(), part.nics.bit_count()) == (before.node, request.gpus, request.nics)
        assert found.nic_pairs == plain.nic_pairs == (pairs_of(site, part) if request.gpus else 0)
        kept = bits(before.gpus) if request.one_link_domain else None
        best = min(
            unevenness(planes) for pairs, planes in choices(site, part.node, kept, request) if pairs == plain.nic_pairs
        )
        mine = unevenness(planes_of(site, part))
        changed += part.nics != before.nics
        assert mine >= best
        assert mine == best or many, request
        even += mine == best
        worse += mine != best
        commit(site.cluster, found.parts)
        site.cluster.check()
    assert changed > 100
    assert worse * 100 <= even, (worse, even)


def test_all_in_one_plane_wherever_there_is_room(full_scale: bool) -> None:
    """Of one node: in a plane as long as any has room, with as many pairs as any plane has; else as without it."""
    draw = random.Random(62)
    held = apart = 0
    for _ in range(12_000 if full_scale else 1500):
        site, policy = random_site(draw), draw.choice(list(Policy))
        request = replace(random_request(draw), one_link_domain=Preference.ANY)
        plain = placed(site.cluster, request, policy)
        found = placed(site.cluster, replace(request, nic_planes=Layout.PACK), policy)
        most = max(
            (
                pairs
                for node in range(len(site.shapes))
                for plane in range(1, PLANES + 1)
                for pairs, _ in choices(site, node, None, request, plane)
            ),
            default=-1,
        )
        if most < 0:
            assert found == plain
            apart += found is not None
            continue
        assert found is not None
        (part,) = found.parts
        (plane,) = set(planes_of(site, part))
        assert plane > 0
        assert found.nic_pairs == most == (pairs_of(site, part) if request.gpus else 0)
        held += plain is not None and set(planes_of(site, plain.parts[0])) != {plane}
        commit(site.cluster, found.parts)
        site.cluster.check()
    assert held > 100
    assert apart > 100


def test_a_gang_is_in_one_plane() -> None:
    """All nodes in the same one; GPUs in total and per-GPU NICs, too."""
    draw = random.Random(63)
    together = totals = 0
    for _ in range(1000):
        site, gpus, count = random_site(draw), draw.choice([1, 2]), draw.choice([2, 3])
        request = Request(gpus=gpus, nics=1, nodes_min=count, nic_planes=Layout.PACK)
        room = [
            sum(bool(choices(site, node, None, request, plane)) for node in range(len(site.shapes)))
            for plane in range(1, PLANES + 1)
        ]
        found = placed(site.cluster, request)
        if max(room) >= count:
            assert found is not None
            assert len({plane for part in found.parts for plane in planes_of(site, part)} | {0}) == 2
            together += 1
        total = Request(gpus=3, nics_per_gpu=1, nodes_max=3, flags=RequestFlag.GPUS_TOTAL, nic_planes=Layout.PACK)
        most = max(
            sum(
                min(
                    site.cluster.node(node).gpus_idle.bit_count(),
                    sum(groups_of(site, node).planes[nic] == plane for nic in bits(site.cluster.node(node).nics_free)),
                )
                for node in range(len(site.shapes))
            )
            for plane in range(1, PLANES + 1)
        )
        found = placed(site.cluster, total) if len(site.shapes) <= 3 and most >= 3 else None
        if found is not None:
            assert len({plane for part in found.parts for plane in planes_of(site, part)} | {0}) == 2
            totals += 1
    assert together > 100
    assert totals > 100


def reserved(site: Site, running: Sequence[RunningJob], request: Request) -> Start | None:
    (start,) = BACKFILL.plan(site.cluster, 0, running, [PendingJob(request, 100)])
    return start


def test_a_reserved_start_is_in_one_plane_wherever_one_has_room_then(full_scale: bool) -> None:
    """No later than without planes; in one where so many nodes have room in it when the job starts, else in any."""
    draw = random.Random(65)
    moved = apart = 0
    for _ in range(12_000 if full_scale else 2000):
        running: list[RunningJob] = []
        site = random_site(draw, running=running)
        gpus, count = draw.choice([0, 1, 2]), draw.choice([1, 1, 2, 3])
        request = Request(gpus=gpus, nics=draw.choice([1, 2, 3]), nodes_min=count)
        plain = reserved(site, running, request)
        found = reserved(site, running, replace(request, nic_planes=Layout.PACK))
        assert (found and found.start_s) == (plain and plain.start_s)
        if found is None or plain is None:
            continue
        for ended in running:
            if ended.end_s <= found.start_s:
                release(site.cluster, ended.allocation)
        room = [
            sum(bool(choices(site, node, None, request, plane)) for node in range(len(site.shapes))) >= count
            for plane in range(1, PLANES + 1)
        ]
        planes = {plane for part in found.parts for plane in planes_of(site, part)}
        if any(room):
            assert planes == {1 + room.index(True)}
            moved += found.start_s > 0 and planes != {p for part in plain.parts for p in planes_of(site, part)}
        else:
            assert found == plain
            apart += found.start_s > 0
        commit(site.cluster, found.parts)  # it fits then
    assert moved > 40
    assert apart > 100


def test_a_reserved_start_is_spread_over_planes() -> None:
    """On the nodes and with the GPUs of any start, as evenly as can be without a loss of pairs with these."""
    draw = random.Random(66)
    changed = 0
    for _ in range(1500):
        running: list[RunningJob] = []
        site = random_site(draw, running=running)
        request = replace(random_request(draw), one_link_domain=Preference.ANY)
        plain = reserved(site, running, request)
        found = reserved(site, running, replace(request, nic_planes=Layout.SPREAD))
        assert (found is None) == (plain is None)
        if found is None or plain is None:
            continue
        (part,), (before,) = found.parts, plain.parts
        assert replace(found, parts=(replace(part, nics=before.nics),)) == plain
        for ended in running:
            if ended.end_s <= found.start_s:
                release(site.cluster, ended.allocation)
        offered = choices(site, part.node, bits(part.gpus), request)
        most = max(pairs for pairs, _ in offered)
        assert (pairs_of(site, part) if request.gpus else 0) == most
        assert unevenness(planes_of(site, part)) == min(unevenness(some) for pairs, some in offered if pairs == most)
        changed += found.start_s > 0 and part.nics != before.nics
    assert changed > 20


def test_gangs_in_planes_start_no_later_than_others() -> None:
    """The first takes one plane on another node; where that leaves no room for the second, it takes any."""
    first, second = NicGroups((0,), (1, 2), planes=(1, 2)), NicGroups((0,), (1, 2), planes=(1, 1))
    site = Site([NodeShape((GpuShape("a", 1000),), nics=nics) for nics in (first, second)])
    wide = Request(gpus=1, nics=2, nic_planes=Layout.PACK)
    jobs = [PendingJob(wide, 10, group=1), PendingJob(replace(wide, allowed=frozenset({1})), 10, group=1)]
    starts = BACKFILL.plan(site.cluster, 0, [], jobs)
    assert [start and (start.start_s, start.parts[0].node) for start in starts] == [(0, 0), (0, 1)]
    alone = BACKFILL.plan(site.cluster, 0, [], jobs[:1])
    assert [start and start.parts[0].node for start in alone] == [1]


def test_a_plane_of_a_node_without_watts_is_no_room() -> None:
    several, one = NicGroups((0,), (1, 2), planes=(1, 2)), NicGroups((0,), (1, 2), planes=(2, 2))
    site = Site([NodeShape((GpuShape("a", 1000),), nics=nics) for nics in (several, one, one)])
    backfill = Backfill(4)
    backfill.set_power(Power(3, [Budget(100, nodes=frozenset({1}))]))
    request = Request(gpus=1, nics=2, nic_planes=Layout.PACK)
    starts = backfill.plan(site.cluster, 0, [], [PendingJob(request, 10, watts=300)] * 2)
    assert [start and (start.start_s, start.parts[0].node) for start in starts] == [(0, 2), (0, 0)]


@pytest.mark.parametrize("layout", [Layout.PACK, Layout.SPREAD])
def test_nothing_changes_where_planes_are_not_known(layout: Layout) -> None:
    draw = random.Random(64)
    for _ in range(300):
        site, request = random_site(draw, known=False), random_request(draw)
        assert placed(site.cluster, replace(request, nic_planes=layout)) == placed(site.cluster, request)


def test_what_is_said_of_planes() -> None:
    """In how many planes a node's NICs are, at most; and what is no plane."""
    rails = NicGroups((0, 1, 2, 3), (0, 1, 2, 3), planes=(1, 1, 2, 2))
    site = Site([NodeShape((GpuShape("a", 1000),) * 4, nics=rails)] * 2)
    request = Request(gpus=2, nics=2, nodes_min=2)
    for layout, planes in ((Layout.PACK, 1), (Layout.SPREAD, 2)):
        assert explain(site.cluster, Policy.SLUICE, replace(request, nic_planes=layout)).terms["nic_planes"] == planes
    assert "nic_planes" not in explain(site.cluster, Policy.SLUICE, Request(gpus=2)).terms
    with pytest.raises(CoreError, match="NIC 1: plane 33 must be 0 to 32"):
        Site([NodeShape((GpuShape("a", 1000),), nics=NicGroups((0,), (0, 1), planes=(1, 33)))])
