"""Blocks of topology/block: what Slurm's own rules accept, of every set of nodes that the core chooses.

`accepts` is eval_nodes_block.c of Slurm 24.11.5 and 26.05.3 (equal in this) for one weight of nodes, step by step, for
candidates that are exactly the nodes chosen.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from sluice.core import ffi, lib
from sluice.core.backfill import CONSERVATIVE, Backfill, PendingJob, RunningJob
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import CoreError, check, new_error_text
from sluice.core.placement import Part, Placement, Policy, Preference, Request, commit, place


def levels_of(sizes: list[int]) -> list[int]:
    """As _read_topo_file: the bits of block_levels."""
    return sorted({round(math.log2(size // sizes[0])) for size in sizes})


def rule(base_count: int, wanted: int, sizes: list[int]) -> tuple[int, int, int | None]:
    """Base blocks in the block that a job must be in, and in a lower one; and how many of the latter, None: any."""
    levels = levels_of(sizes)
    raw = math.ceil(math.log2(-(-wanted // sizes[0])))
    low = max((level for level in levels if level <= raw - 1), default=0) if raw > 0 else 0
    high = next((level for level in levels if level >= raw), -1)
    per_low, most_low = 1 << low, -(-wanted // ((1 << low) * sizes[0]))
    per_block = base_count if high < 0 else 1 << high
    return per_block, per_low, most_low if per_block != per_low * most_low else None


def accepts(on_base: list[int], wanted: int, sizes: list[int]) -> bool:
    """Would topology/block start a job of `wanted` nodes on just these: so many of each base block?"""
    base_count = len(on_base)
    per_block, per_low, most = rule(base_count, wanted, sizes)
    on_low = [sum(on_base[first : first + per_low]) for first in range(0, base_count, per_low)]
    for first in range(0, base_count, per_block):
        inside = range(first, min(first + per_block, base_count))
        lows = sorted((on_low[low] for low in sorted({i // per_low for i in inside})), reverse=True)
        available = sum(lows[:most]) if most is not None else sum(on_base[i] for i in inside)
        if available >= wanted:
            return fill(on_base, on_low, inside, wanted, per_low, most)
    return False


def fill(on_base: list[int], on_low: list[int], inside: range, left: int, per_low: int, most: int | None) -> bool:
    """The loop over base blocks, with _choose_best_bblock."""
    required: set[int] = set()
    while True:
        before, best, best_fit, best_same = left, -1, False, True
        for i in inside:
            if i in required:
                continue
            fits, same = on_base[i] >= left, False
            if most is not None and (best < 0 or best // per_low != i // per_low):
                same = any(j // per_low == i // per_low for j in required)
                if best < 0 or (same and not best_same):
                    best, best_fit, best_same = i, fits, same
                    continue
                if not same and best_same:
                    continue
                mine, other = on_low[i // per_low], on_low[best // per_low]
                if (mine >= left) != (other >= left):
                    if mine >= left:
                        best, best_fit, best_same = i, fits, same
                    continue
                if mine != other:
                    if (mine < other) == (mine >= left):
                        best, best_fit, best_same = i, fits, same
                    continue
            if (
                best < 0
                or (fits and not best_fit)
                or (not fits and not best_fit and on_base[i] >= on_base[best])
                or (fits and on_base[i] <= on_base[best])
            ):
                best, best_fit = i, fits
        if best < 0 or (most is not None and most <= 0 and not best_same):
            return False
        required.add(best)
        left -= on_base[best]
        if left <= 0:
            return True
        if most is not None and not best_same:
            most -= 1
        if left == before:  # a base block without candidates: it stops
            return False


def by_order(on_base: list[int], wanted: int, sizes: list[int]) -> bool:
    """Of two lower blocks that give as many nodes one has a base block that gives none: which is taken last?"""
    _, per_low, most = rule(len(on_base), wanted, sizes)
    lows = [on_base[first : first + per_low] for first in range(0, len(on_base), per_low)]
    return most is not None and any(
        sum(low) and 0 in low and sum(sum(low) == sum(other) for other in lows) > 1 for low in lows
    )


def blocks_of(sizes: list[int], base_blocks: int) -> Any:
    blocks, text = ffi.new("struct sluice_blocks *"), new_error_text()
    check(lib.sluice_blocks_make(sizes, len(sizes), base_blocks, blocks, text), text)
    return blocks


def asked(blocks: Any, nodes: int) -> Request:
    """A request for so many nodes, of a GPU each."""
    made = ffi.new("struct sluice_request *")
    lib.sluice_blocks_ask(blocks, nodes, made)
    return Request(
        gpus=1,
        nodes_min=nodes,
        one_switch=Preference(made.one_switch),
        switch_level=made.switch_level,
        lower_switches=made.lower_switches,
    )


class Site:
    """A cluster of blocks, some of its nodes in use until a time."""

    def __init__(self, draw: random.Random) -> None:
        base = draw.randint(1, 3)
        levels = draw.choice([[0], [0, 1], [0, 2], [0, 1, 2], [0, 1, 3], [0, 3], [0, 2, 3], [0, 1, 2, 3, 4]])
        self.sizes = [base << level for level in levels]
        self.nodes = [base + draw.choice([0, 0, 0, 1]) for _ in range(draw.randint(1, 7))]
        self.blocks = blocks_of(self.sizes, len(self.nodes))
        self.cluster = Cluster(64, max_switches=64, max_allocations=64)
        shape = self.cluster.add_shape(NodeShape((GpuShape("B200", 81920),)))
        self.block_of: list[int] = []
        self.running: list[RunningJob] = []
        above = [0] * (self.blocks.levels + 1)
        for block, count in enumerate(self.nodes):
            for level in reversed(range(self.blocks.levels)):
                if block % self.blocks.size[level] == 0:
                    above[level] = self.cluster.add_switch(above[level + 1])
            for _ in range(count):
                self.cluster.add_node(shape, 8000, 65536, above[0])
                self.block_of.append(block)
        self.free = [0] * len(self.nodes)
        use = draw.choice([0.2, 0.5])
        for node, block in enumerate(self.block_of):
            if draw.random() < use:
                self.running.append(RunningJob(commit(self.cluster, [Part(node, 1)]), draw.randint(1, 4)))
            else:
                self.free[block] += 1

    def on_base(self, parts: tuple[Part, ...]) -> list[int]:
        found = Counter(self.block_of[part.node] for part in parts)
        return [found[block] for block in range(len(self.nodes))]

    def possible(self, wanted: int) -> bool:
        """Is there a set that topology/block accepts, of all that are free, and not by the order of equal blocks?"""
        ways = (list(way) for way in product(*(range(count + 1) for count in self.free)) if sum(way) == wanted)
        return any(accepts(way, wanted, self.sizes) and not by_order(way, wanted, self.sizes) for way in ways)


def found_in(cluster: Cluster, policy: Policy, request: Request) -> Placement | None:
    try:
        return place(cluster, policy, request)
    except CoreError as error:
        assert error.code == lib.SLUICE_ERROR_NEVER
        return None


@pytest.mark.parametrize("policy", [Policy.SLUICE, Policy.RANDOM])
def test_slurm_accepts_all_that_is_chosen_and_nothing_it_accepts_is_missed(policy: Policy, full_scale: bool) -> None:
    chosen = limited = refused = 0
    for seed in range(3000 if full_scale else 150):
        draw = random.Random(f"blocks-{seed}")
        site = Site(draw)
        wanted = draw.randint(2, max(2, sum(site.free)))
        request = asked(site.blocks, wanted)
        found = found_in(site.cluster, policy, request)
        assert (found is not None) == site.possible(wanted), (seed, site.sizes, site.free, wanted)
        refused += found is None
        if found is not None:
            chosen += 1
            limited += request.lower_switches > 0 and len({site.block_of[part.node] for part in found.parts}) > 1
            assert len(found.parts) == wanted
            assert accepts(site.on_base(found.parts), wanted, site.sizes), (seed, site.sizes, found.parts)
    assert min(chosen, limited, refused) > 15, (chosen, limited, refused)


def test_slurm_accepts_all_that_is_planned(full_scale: bool) -> None:
    """And the first job starts at the first moment at which Slurm has a set that it accepts."""
    planned = 0
    for seed in range(2000 if full_scale else 120):
        draw = random.Random(f"planned-{seed}")
        site = Site(draw)
        sizes = [draw.randint(2, max(2, len(site.block_of))) for _ in range(3)]
        jobs = [PendingJob(asked(site.blocks, wanted), draw.randint(1, 9)) for wanted in sizes]
        backfill = Backfill(64, max_jobs=8, max_running=64, max_planned=256)
        starts = backfill.plan(site.cluster, 0, site.running, jobs, CONSERVATIVE)
        ends = {part: job.end_s for part, job in zip(used(site), site.running, strict=True)}
        first = next((moment for moment in range(6) if free_at(site, ends, moment).possible(sizes[0])), None)
        assert (starts[0] and starts[0].start_s) == first, (seed, site.sizes, site.nodes)
        for wanted, start in zip(sizes, starts, strict=True):
            if start is not None:
                planned += 1
                assert len(start.parts) == wanted
                assert accepts(site.on_base(start.parts), wanted, site.sizes), (seed, site.sizes, start.parts)
    assert planned > 100


def used(site: Site) -> list[int]:
    return [node for node in range(len(site.block_of)) if not site.cluster.node(node).gpus_idle]


def free_at(site: Site, ends: dict[int, int], moment: int) -> Site:
    """The site as it is when what has ended then is free."""
    then: Site = object.__new__(Site)
    then.sizes, then.nodes = site.sizes, site.nodes
    busy = Counter(site.block_of[node] for node, end in ends.items() if end > moment)
    then.free = [count - busy[block] for block, count in enumerate(site.nodes)]
    return then


def test_base_blocks_without_nodes_stop_slurm() -> None:
    """BlockSizes=2,4,16: of 10 nodes, below each 4 but the one with fewest both base blocks give some."""
    sizes = [2, 4, 16]
    assert accepts([2, 2, 2, 2, 2, 0, 0, 0], 10, sizes)
    assert accepts([2, 2, 2, 0, 2, 2, 0, 0], 10, sizes)
    assert not accepts([2, 1, 2, 0, 2, 1, 1, 1], 10, sizes)  # below four of them: only three are taken
    assert not accepts([4, 0, 2, 1, 2, 1, 0, 0], 10, sizes)  # stops at the first, of which a base block gives none


def test_what_is_refused() -> None:
    for sizes, count, message in [
        ([], 4, "no base block"),
        ([0], 4, "no base block"),
        ([4], 0, "no base block"),
        ([4, 6], 4, "6 nodes: must be 4 times a power of two"),
        ([4, 12], 4, "12 nodes"),
    ]:
        with pytest.raises(CoreError, match=message):
            blocks_of(sizes, count)
    cluster = Cluster(4)
    cluster.add_node(cluster.add_shape(NodeShape((GpuShape("B200", 81920),))), 8000, 65536)
    for request in (
        Request(gpus=1, nodes_min=2, lower_switches=1),
        Request(gpus=1, nodes_min=2, lower_switches=1, one_switch=Preference.REQUIRED),
        Request(gpus=1, nodes_min=2, segment=2, lower_switches=1, one_switch=Preference.REQUIRED, switch_level=1),
    ):
        with pytest.raises(CoreError, match="lower_switches 1: needs one_switch"):
            place(cluster, Policy.SLUICE, request)


def test_levels_of_block_sizes() -> None:
    """The last level has all; where BlockSizes has none so large, it is added."""
    found = []
    for sizes, count in [([4, 8, 32], 5), ([4, 8, 32], 8), ([4], 1), ([4], 3), ([4, 8], 2), ([8, 4 * 8, 2 * 8], 9)]:
        blocks = blocks_of(sizes, count)
        found.append(list(blocks.size[0 : blocks.levels]))
    assert found == [[1, 2, 8], [1, 2, 8], [1], [1, 3], [1, 2], [1, 2, 4, 9]]
