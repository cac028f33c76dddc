"""Budgets of watts on public histories: kept each second, met after they are lowered, and what throughput costs.

Each history is replayed on a simulated cluster with a full queue under budgets of 50, 65 and 80 % of its GPUs' highest
limits, in three ways: Sluice's budget; static caps, all GPUs alike; uncapped, with as many nodes as the budget
allows (the others off, drawing nothing). Throughput is work done in GPU-seconds at full speed. What of it is a model is
in `benchmarks.power_cluster`. The worst gain of all histories is reported next to the mean.

`gain_NN_bound_percent` is what no planner can exceed, on any history: the gain over the better of the other two if all
GPUs ran at full speed in each second, as without any budget (`unlimited_gpu_hours`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks import Result
from benchmarks.power_cluster import GPUS, MOST_W, Ran, Simulation, Way, Work, read_work
from sluice.core import version
from sluice.core.backfill import EASY, Plan
from sluice.simulate.traces import read_trace

OPTIONS = [
    click.Option(
        ["--trace", "traces"], type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True,
        required=True, help="Job history; may be given again.",
    ),
    click.Option(["--jobs"], type=click.IntRange(1), default=3000, show_default=True, help="The first of each."),
    click.Option(["--nodes"], type=click.IntRange(2, 512), default=8, show_default=True, help="Of 8 GPUs."),
    click.Option(["--minutes"], type=click.IntRange(2), default=60, show_default=True, help="Simulated, of each run."),
    click.Option(["--run-mean"], type=click.FloatRange(60), default=900.0, show_default=True,
                 help="Seconds, to which run times are scaled."),
    click.Option(["--lowest-cap"], type=click.IntRange(25, 100), default=50, show_default=True,
                 help="Percent: power.lowest_cap."),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]  # fmt: skip
MUST = {
    "constant_over_s": ("==", 0.0),
    "lowered_met_s": ("<=", 5.0),
    "constant_requeues": ("==", 0.0),
    "decision_added_us": ("<=", 10.0),
}
SHARES = (50, 65, 80)
_WAYS: tuple[Way, ...] = ("sluice", "static", "fewer")
_REPEATS = 101


def run(
    traces: Sequence[Path], jobs: int, nodes: int, minutes: int, run_mean: float, lowest_cap: int, seed: int
) -> Result:
    """All histories, budgets and ways; then a budget that is lowered while all is full."""
    peak = nodes * GPUS * MOST_W
    done: dict[tuple[str, int, Way], Ran] = {}
    lowered: list[Ran] = []
    added: list[float] = []
    for path in traces:
        work = read_work(read_trace(path), jobs, run_mean, nodes * GPUS, seed)
        for share in SHARES:
            for way in _WAYS:
                one = Simulation(work, nodes, way, _constant(peak * share / 100), lowest_cap / 100, seed)
                done[str(path), share, way] = one.run(minutes * 60)
                if way == "sluice" and share == SHARES[1]:
                    added.append(_decision_us(one, work))
        at = minutes * 30
        for to in (0.6, 0.3):  # by caps alone, and by stopping jobs
            one = Simulation(work, nodes, "sluice", _falling(peak, to * peak, at), lowest_cap / 100, seed)
            lowered.append(one.run(minutes * 60, at))
    capacity = nodes * GPUS * minutes * 60.0
    bounds = {share: [100 * (capacity / _better(done, path, share) - 1) for path in traces] for share in SHARES}
    ours = [ran for (_, _, way), ran in done.items() if way == "sluice"]
    return Result(
        figures={
            "constant_over_s": float(sum(ran.over_s for ran in ours)),
            "constant_requeues": float(sum(ran.stopped for ran in ours)),
            "lowered_met_s": float(max(ran.met_s for ran in lowered)),
            "lowered_late_s": float(sum(ran.late_s for ran in lowered)),
            "lowered_requeues": float(sum(ran.stopped for ran in lowered)),
            "decision_added_us": max(added),
            "keeper_step_us_per_gpu": statistics.median(us for ran in ours for us in ran.step_us) / (nodes * GPUS),
            **_throughput(done, traces, peak),
            "unlimited_gpu_hours": len(traces) * capacity / 3600,
            **{f"gain_{share}_bound_percent": max(bounds[share]) for share in SHARES},
        },
        spread={f"gain_{share}_percent": _gains(done, traces, share) for share in SHARES}
        | {f"gain_{share}_bound_percent": bounds[share] for share in SHARES},
        versions={"sluice_core": version()},
    )


def _constant(watts: float) -> Callable[[int], float]:
    return lambda _: watts


def _falling(before: float, after: float, at: int) -> Callable[[int], float]:
    return lambda now: after if now >= at else before


def _better(done: dict[tuple[str, int, Way], Ran], path: Path, share: int) -> float:
    """GPU-seconds of the better of the other two."""
    return max(done[str(path), share, way].gpu_s for way in _WAYS if way != "sluice")


def _gains(done: dict[tuple[str, int, Way], Ran], traces: Sequence[Path], share: int) -> list[float]:
    """Percent over the better of the other two, by history."""
    return [100 * (done[str(path), share, "sluice"].gpu_s / _better(done, path, share) - 1) for path in traces]


def _throughput(done: dict[tuple[str, int, Way], Ran], traces: Sequence[Path], peak: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for share in SHARES:
        for way in _WAYS:
            rans = [done[str(path), share, way] for path in traces]
            figures[f"{way}_{share}_gpu_hours"] = sum(ran.gpu_s for ran in rans) / 3600
            figures[f"{way}_{share}_peak_percent"] = 100 * max(ran.peak_w for ran in rans) / peak
        gains = _gains(done, traces, share)
        figures[f"gain_{share}_mean_percent"] = statistics.mean(gains)
        figures[f"gain_{share}_worst_percent"] = min(gains)
    return figures


def _decision_us(one: Simulation, work: Sequence[Work]) -> float:
    """What budgets add to a plan, for each job that it looks at: medians of the same plan with and without them."""
    jobs = [job for job in work if job.gpus <= one.count][:48]
    now = 10_000_000
    queue = one.queue(now, jobs)
    plan = Plan(queue)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_REPEATS):
        for with_power, taken in times.items():
            one.backfill.set_power(one.power if with_power else None)
            begin = time.perf_counter_ns()
            one.backfill.fill(plan, one.cluster, now, queue, EASY)
            taken.append((time.perf_counter_ns() - begin) / 1000)
    return max(0.0, statistics.median(times[True]) - statistics.median(times[False])) / len(jobs)
