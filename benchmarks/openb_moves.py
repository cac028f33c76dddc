"""The openb lists once more, with pods that may be moved: a pod that finds no place starts where others can make room.

The plan is the core's (``sluice_compaction_plan``), the same for every policy that places, with the same constants for
all lists. A pod moves at most once, and at most MOVED_PERCENT of all pods do. What a start gains is the GPU it asks, in
thousandths, and each move costs 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import Result
from sluice.core._bench import ffi, lib
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Policy

if TYPE_CHECKING:
    from benchmarks.openb import Replay

MOVED_PERCENT = 5
_LEAST_GAIN = 16  # thousandths of a GPU for each move: a plan that starts a pod of one GPU has at most 62
_POLICIES = {"sluice": Policy.SLUICE, "fgd": Policy.FGD}
# Of the lists that Sluice promises a figure for.
_LIST_MUST = {"default": (">=", 96.1), "gpuspec33": (">=", 95.2)}


@dataclass(frozen=True)
class Answer:
    """What one run shows."""

    allocation_percent: float
    moved_percent: float
    moved_for_each_start: float
    plan_mean_ms: float
    plan_longest_ms: float


def run_moving(replay: Replay, policy: Policy, savable_percent: int, seed: int) -> Answer:
    """One seed's arrivals; of all pods, `savable_percent` can be saved, and so moved."""
    cluster, requests = replay.prepare(policy)
    chance, count = random.Random(seed + (2 << 32)), len(replay.order)
    movable = np.array([chance.randrange(100) < savable_percent for _ in range(count)], dtype=bool)
    placed = np.zeros(count, dtype=bool)
    gains = ffi.new("int64_t[]", [shape.gpu_milli_in_all for shape in replay.shapes])
    costs = ffi.new("int64_t[]", [1] * len(replay.shapes))
    moves = ffi.new(
        "struct sluice_bench_moves *",
        {
            "movable": ffi.from_buffer("bool[]", movable),
            "gains": gains,
            "costs": costs,
            "limits": {"moves": lib.SLUICE_COMPACTION_MAX_MOVES, "factor_permille": _LEAST_GAIN * 1000},
            "budget": count * MOVED_PERCENT // 100,
        },
    )
    text = new_error_text()
    check(
        lib.sluice_bench_moves(
            cluster.handle,
            policy,
            requests,
            len(replay.shapes),
            ffi.from_buffer("uint32_t[]", replay.numbers),
            count,
            moves,
            ffi.from_buffer("bool[]", placed, require_writable=True),
            text,
        ),
        text,
    )
    cluster.check()
    return Answer(
        replay.allocation_percent(placed),
        100 * moves.moved / count,
        moves.moved / max(moves.started, 1),
        moves.plan_ns / 1e6 / max(moves.plans, 1),
        moves.longest_plan_ns / 1e6,
    )


def measure(result: Result, name: str, replays: Sequence[Replay], savable_percent: int, first_seed: int) -> None:
    """Add the figures of both policies on one list."""
    runs = {
        policy: [run_moving(replay, number, savable_percent, first_seed + i) for i, replay in enumerate(replays)]
        for policy, number in _POLICIES.items()
    }
    for policy, answers in runs.items():
        target = result.figures if policy == "sluice" else result.peer
        for field in fields(Answer):
            values = [float(getattr(answer, field.name)) for answer in answers]
            figure = f"{name}_{policy}_moving_{field.name}"
            target[figure] = max(values) if field.name == "plan_longest_ms" else fmean(values)
            result.spread[figure] = values
    gains = [
        ours.allocation_percent - theirs.allocation_percent
        for ours, theirs in zip(runs["sluice"], runs["fgd"], strict=True)
    ]
    result.figures[f"{name}_moving_gain_over_fgd_points"] = fmean(gains)
    result.figures[f"{name}_moving_gain_over_fgd_worst_seed_points"] = min(gains)
    result.figures[f"{name}_sluice_moving_moved_percent_most"] = max(answer.moved_percent for answer in runs["sluice"])
    result.must[f"{name}_sluice_moving_moved_percent_most"] = ("<=", MOVED_PERCENT)
    if name in _LIST_MUST and savable_percent == 100:
        result.must[f"{name}_sluice_moving_allocation_percent"] = _LIST_MUST[name]
        result.must[f"{name}_moving_gain_over_fgd_worst_seed_points"] = (">", 0.0)
