"""GPUs near NICs: random nodes, each choice compared with all that there are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape
from sluice.core.errors import CoreError
from sluice.core.placement import Part, choose_nics, commit

DGX_H100 = NicGroups((0, 1, 2, 3, 4, 5, 6, 7), (0, 8, 1, 2, 3, 4, 9, 5, 6, 7))  # two of ten NICs are near no GPU


def one_node(*gpus: GpuShape) -> Cluster:
    cluster = Cluster(1)
    cluster.add_node(cluster.add_shape(NodeShape(gpus)), 64_000, 1 << 20)
    return cluster


def bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def count_pairs(groups: NicGroups, gpus: tuple[int, ...], nics: tuple[int, ...]) -> int:
    """The most pairs: each GPU and NIC is there as often as it may be in one, and they are matched along augmenting
    paths. That one GPU and one NIC could be matched twice makes no difference: either is there only once."""
    seats = [nic for nic in nics for _ in range(-(-len(gpus) // len(nics)))]
    taken: dict[int, int] = {}

    def find(gpu: int, seen: set[int]) -> bool:
        for seat, nic in enumerate(seats):
            if groups.gpus[gpu] == groups.nics[nic] and seat not in seen:
                seen.add(seat)
                if seat not in taken or find(taken[seat], seen):
                    taken[seat] = gpu
                    return True
        return False

    return sum(find(gpu, set()) for gpu in gpus for _ in range(-(-len(nics) // len(gpus))))


def random_case(draw: random.Random) -> tuple[list[GpuShape], NicGroups]:
    count, models = draw.choice([2, 4, 4, 6]), draw.choice([1, 1, 1, 2])
    domains, groups = draw.choice([1, 2, count]), draw.choice([2, 3, 4])
    gpus = [
        GpuShape(f"model-{draw.randrange(models)}", 1000, link_domain=index * domains // count)
        for index in range(count)
    ]
    nics = draw.choice([1, 2, 4, 5])
    return gpus, NicGroups(
        tuple(draw.randrange(groups) for _ in range(count)), tuple(draw.randrange(groups) for _ in range(nics))
    )


def test_no_choice_has_more_pairs() -> None:
    draw = random.Random(22)
    exchanged = kept_apart = 0
    for _ in range(3000):
        gpus, groups = random_case(draw)
        cluster = one_node(*gpus)
        idle = [gpu for gpu in range(len(gpus)) if draw.random() < 0.7]
        if busy := [gpu for gpu in range(len(gpus)) if gpu not in idle]:
            commit(cluster, [Part(0, sum(1 << gpu for gpu in busy))])
        free = [nic for nic in range(len(groups.nics)) if draw.random() < 0.8]
        if not idle or not free:
            continue
        own = tuple(sorted(draw.sample(idle, draw.randint(1, len(idle)))))
        nics, keep = draw.randint(1, len(free)), draw.random() < 0.2
        part = Part(0, sum(1 << gpu for gpu in own), cpus_milli=1000)
        found = choose_nics(cluster, groups, part, sum(1 << nic for nic in free), nics, keep_gpus=keep)

        kinds = {gpus[gpu].model for gpu in own}
        others = [gpu for gpu in idle if {gpus[gpu].model} == kinds] if len(kinds) == 1 and not keep else list(own)
        sets = {chosen: max(count_pairs(groups, chosen, some) for some in combinations(free, nics))
                for chosen in combinations(others, len(own))}  # fmt: skip
        chosen, chosen_nics = tuple(bits(found.part.gpus)), tuple(bits(found.nics))
        assert set(chosen_nics) <= set(free)
        assert len(chosen_nics) == nics
        assert found.pairs == count_pairs(groups, chosen, chosen_nics) == max(sets.values())
        best = [one for one, pairs in sets.items() if pairs == found.pairs]
        linked = [one for one in best if len({gpus[gpu].link_domain for gpu in one}) == 1]
        assert chosen == own if own in best else chosen in (linked or best)
        assert found.part == Part(0, found.part.gpus, cpus_milli=1000)
        exchanged += chosen != own
        kept_apart += chosen not in linked and len(best) > 1
    assert exchanged > 300
    assert kept_apart > 20


def test_nics_near_no_gpu_are_given_to_those_who_ask_for_more() -> None:
    """The second NIC of a job with one GPU is one that no other GPU has near."""
    cluster = one_node(*[GpuShape("h100", 81920)] * 8)
    found = choose_nics(cluster, DGX_H100, Part(0, 0b1), 0x3FF, 2)
    assert (found.part.gpus, bits(found.nics), found.pairs) == (1, [0, 1], 1)
    assert bits(choose_nics(cluster, DGX_H100, Part(0, 0b11), 0x3FF, 3).nics) == [0, 1, 2]


def test_gpus_follow_the_nics_that_are_free() -> None:
    """Interfaces of the first half of the node are taken by jobs that hold no GPU."""
    cluster = one_node(*[GpuShape("h100", 81920)] * 8)
    found = choose_nics(cluster, DGX_H100, Part(0, 0b1111), 0b1111100000, 4)
    assert (bits(found.part.gpus), bits(found.nics), found.pairs) == ([4, 5, 6, 7], [5, 7, 8, 9], 4)
    kept = choose_nics(cluster, DGX_H100, Part(0, 0b1111), 0b1111100000, 2, keep_gpus=True)
    assert (kept.part.gpus, bits(kept.nics), kept.pairs) == (0b1111, [5, 6], 0)


def test_shares_keep_their_gpu() -> None:
    cluster = one_node(*[GpuShape("h100", 81920)] * 8)
    shared = Part(0, 0b1, gpu_memory_mib=1000)
    found = choose_nics(cluster, DGX_H100, shared, 0b1111111110, 1)
    assert (found.part, found.pairs) == (shared, 0)
    assert choose_nics(cluster, DGX_H100, shared, 0x3FF, 1).pairs == 1


@pytest.mark.parametrize(
    ("part", "groups", "free", "nics", "words"),
    [
        (Part(1, 1), DGX_H100, 1, 1, "node 1 is not known"),
        (Part(0, 0), DGX_H100, 1, 1, "GPUs 0: must be some of the node's 8"),
        (Part(0, 256), DGX_H100, 1, 1, "GPUs 0x100: must be some of the node's 8"),
        (Part(0, 1), NicGroups((0,), (0,)), 1, 1, "groups of 1 GPUs for a node with 8"),
        (Part(0, 1), NicGroups((0,) * 7 + (48,), (0,)), 1, 1, "GPU 7: group 48 must be below 48"),
        (Part(0, 1), NicGroups((0,) * 8, (0, 255)), 1, 1, "NIC 1: group 255 must be below 48"),
        (Part(0, 1), NicGroups((0,) * 8, (0,)), 2, 1, "free NICs 0x2: there are 1"),
        (Part(0, 1), DGX_H100, 1, 0, "0 NICs asked: must be 1 to 32"),
        (Part(0, 1), DGX_H100, 1, 33, "33 NICs asked: must be 1 to 32"),
        (Part(0, 1), DGX_H100, 0b101, 3, "3 NICs asked, 2 are free"),
    ],
)
def test_what_is_refused(part: Part, groups: NicGroups, free: int, nics: int, words: str) -> None:
    cluster = one_node(*[GpuShape("h100", 81920)] * 8)
    with pytest.raises(CoreError) as refused:
        choose_nics(cluster, groups, part, free, nics)
    assert words in str(refused.value)
