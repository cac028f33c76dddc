"""One request through the gate of model services (admit, turn, settle): alone, among processes, and from Python."""

from __future__ import annotations

import mmap
import time
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks import Result
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.errors import check, new_error_text
from sluice.core.gate import Gate, Kind, Limit, Refused, Shape

OPTIONS = [
    click.Option(["--processes"], type=click.IntRange(2, 16), default=4, show_default=True, help="That contend."),
    click.Option(["--requests"], type=click.IntRange(1000), default=50_000, show_default=True, help="Per process."),
    click.Option(["--replicas"], type=click.IntRange(1, 1024), default=8, show_default=True),
    click.Option(["--waiting"], type=click.IntRange(0, 500_000), default=10_000, show_default=True, help="Elsewhere."),
    click.Option(["--rounds"], type=click.IntRange(1), default=5, show_default=True),
]
MUST = {"alone_p99_us": ("<=", 5.0)}


def measure(processes: int, requests: int, replicas: int, waiting: int) -> dict[str, float]:
    """Percentiles over all requests of all processes, the clock's reading included."""
    times = np.zeros(processes * requests, dtype=np.uint64)
    elapsed, text = ffi.new("uint64_t *"), new_error_text()
    room = ffi.from_buffer("uint64_t[]", times, require_writable=True)
    check(lib.sluice_bench_gate(processes, requests, replicas, waiting, room, elapsed, text), text)
    p50, p99, p999 = np.percentile(times, [50, 99, 99.9]) / 1000
    return {
        "mean_ns": elapsed[0] / (processes * requests),
        "p50_us": float(p50),
        "p99_us": float(p99),
        "p999_us": float(p999),
        "per_second": processes * requests / (elapsed[0] / 1e9),
    }


def measure_python(requests: int, replicas: int) -> dict[str, float]:
    """Median time of each call through cffi, with limits on all four subjects."""
    shape = Shape()
    gate = Gate.create(mmap.mmap(-1, shape.size()), shape)
    worker, calls = gate.join(1, 1), ("admit", "turn", "progress", "settle")
    times = np.zeros((requests, len(calls) + 1), dtype=np.int64)
    for kind in Kind:
        gate.set_limit(kind, 1, Limit(2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1))
    for name in range(replicas):
        gate.set_replica(name + 1, 1, 64)
    clock = time.perf_counter_ns
    for number in range(requests):
        now_us, prefix = time.monotonic_ns() // 1000, (1, 2, 3 + number % 512, 4 + number % 512)
        at = [clock()]
        ticket = gate.admit(
            worker, now_us, key=1, user=1, tenant=1, service=1, tokens=600, prompt_tokens=100, prefix=prefix
        )
        if isinstance(ticket, Refused):
            raise RuntimeError(f"the gate refused request {number}: {ticket}")
        at.append(clock())
        gate.turn(worker, now_us)
        at.append(clock())
        gate.progress(ticket, 7)
        at.append(clock())
        gate.settle(ticket, now_us, 100, 300)
        at.append(clock())
        times[number] = at
    medians = np.median(np.diff(times), axis=0)
    return {f"python_{name}_us": float(taken) / 1000 for name, taken in zip(calls, medians, strict=True)}


def run(**options: Any) -> Result:
    """Medians over the rounds; every round's figure is in the spread."""
    arms = {"alone": 1, "contended": options["processes"]}
    spread: dict[str, list[float]] = {}
    for _ in range(options["rounds"]):
        for arm, processes in arms.items():
            found = measure(processes, options["requests"], options["replicas"], options["waiting"])
            for name, figure in found.items():
                spread.setdefault(f"{arm}_{name}", []).append(figure)
        for name, figure in measure_python(options["requests"] // 5, options["replicas"]).items():
            spread.setdefault(name, []).append(figure)
    figures = {name: median(measured) for name, measured in spread.items()}
    figures |= {"processes": float(options["processes"]), "clock_us": lib.sluice_bench_clock_ns() / 1000}
    return Result(figures=figures, spread=spread, versions={"sluice_core": version()})
