"""Allocate and free in the shared GPU memory ledger, processes racing for one device; peer: a robust pthread mutex."""

from __future__ import annotations

from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks import Result
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.errors import check, new_error_text

OPTIONS = [
    click.Option(["--processes"], type=click.IntRange(1, 256), default=8, show_default=True),
    click.Option(["--pairs"], type=click.IntRange(1000), default=100_000, show_default=True, help="Per process."),
    click.Option(
        ["--rounds"], type=click.IntRange(1), default=7, show_default=True, help="Each of both arms, in turn."
    ),
    click.Option(["--bytes", "bytes_"], type=click.IntRange(1), default=2 << 20, show_default=True),
    click.Option(["--kills"], type=click.IntRange(0), default=1000, show_default=True, help="Random SIGKILLs."),
    click.Option(["--kill-processes"], type=click.IntRange(1, 256), default=16, show_default=True),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"pair_p99_us": ("<=", 1.0), "lost_bytes": ("==", 0.0)}

_ARMS = {"ledger": lib.SLUICE_BENCH_LEDGER, "mutex": lib.SLUICE_BENCH_ROBUST_MUTEX}


def measure(guard: int, processes: int, pairs: int, bytes_: int) -> dict[str, float]:
    """One round of one arm: percentiles over all pairs of all processes, the clock's reading included."""
    times = np.zeros(processes * pairs, dtype=np.uint64)
    elapsed, text = ffi.new("uint64_t *"), new_error_text()
    check(
        lib.sluice_bench_ledger(
            guard, processes, pairs, bytes_, ffi.from_buffer("uint64_t[]", times, require_writable=True), elapsed, text
        ),
        text,
    )
    p50, p99, p999 = np.percentile(times, [50, 99, 99.9]) / 1000
    return {
        "pair_p50_us": float(p50),
        "pair_p99_us": float(p99),
        "pair_p999_us": float(p999),
        "pairs_per_second": processes * pairs / (elapsed[0] / 1e9),
    }


def run(**options: Any) -> Result:
    """Medians over the rounds; every round's figure is in the spread."""
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
    for _ in range(options["rounds"]):
        for arm, guard in _ARMS.items():
            rounds[arm].append(measure(guard, options["processes"], options["pairs"], options["bytes_"]))
    figures, peer = (
        {name: median(figures[name] for figures in rounds[arm]) for name in rounds[arm][0]} for arm in _ARMS
    )
    spread = {
        name if arm == "ledger" else f"peer_{name}": [figures[name] for figures in rounds[arm]]
        for arm in _ARMS
        for name in rounds[arm][0]
    }
    lost, reaped, text = ffi.new("uint64_t *"), ffi.new("uint64_t *"), new_error_text()
    check(
        lib.sluice_bench_ledger_kills(options["kill_processes"], options["kills"], options["seed"], lost, reaped, text),
        text,
    )
    figures |= {
        "lost_bytes": float(lost[0]),
        "kills": float(options["kills"]),
        "reaped_bytes": float(reaped[0]),
        "clock_us": lib.sluice_bench_clock_ns() / 1000,
    }
    return Result(figures=figures, peer=peer, spread=spread, versions={"sluice_core": version()})
