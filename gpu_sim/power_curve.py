"""What a GPU draws under a power limit and how fast it then is, as the simulated drivers have it (src/power.c)."""

from __future__ import annotations

from itertools import pairwise

from gpu_sim.layout import SPEED_CURVE, Gpu


def speed(cap: float, demand: float) -> float:
    """The speed of a GPU that would draw `demand` under a limit of `cap`; 1: as without a limit."""
    share = 1000 * cap / demand if demand > cap else 1000.0
    for (low, slow), (high, fast) in pairwise(SPEED_CURVE):
        if share <= high:
            return (slow + (share - low) * (fast - slow) / (high - low)) / 1000
    return 1.0


def drawn_mw(gpu: Gpu) -> int:
    """What a GPU draws; one that would draw more than its highest limit has a fault that no limit holds."""
    held = gpu.power_limit_mw < gpu.power_mw <= gpu.power_limit_max_mw
    return int(gpu.power_limit_mw if held else gpu.power_mw)
