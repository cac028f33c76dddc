"""SchedulerParameters with the planner: stock Slurm's defaults, what `sluice apply` writes, and single changes of it.

On real daemons at level place, the job mix of slurm-fragmentation. --left percent of the arrivals ask for contiguous
nodes: the planner leaves those to Slurm's own passes, which SchedulerParameters control. All arms get the same jobs at
the same times, one after another, on clusters of their own; periods in seconds are divided by --speed-up in all of
them, as the jobs' times are.

Peer: Slurm's defaults. A change is worth making where its waits or its allocation are better by more than the spread of
the seeds.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from benchmarks.slurm_fragmentation import Pod, draw_jobs, figures_of, read_pods
from benchmarks.slurm_load import GPUS_A_NODE, Arm, Job, Ran, percentile
from dev_cluster.handle import require_root
from policy.compiled import Global, Weights
from policy.wanted import BACKFILL
from sluice.base.errors import UsageError
from sluice.base.run import run_command

LEFT = "--contiguous"  # of a job of one node it changes nothing else
DEFAULTS = {"bf_interval": "30", "bf_resolution": "60", "sched_interval": "60", "batch_sched_delay": "3"}
"""Slurm's own periods, in seconds: those that --speed-up divides."""
CHANGES: dict[str, dict[str, str | None]] = {
    "stock": dict.fromkeys(BACKFILL, None),
    "apply": {},
    "bf_interval_10": {"bf_interval": "10"},
    "bf_interval_120": {"bf_interval": "120"},
    "bf_max_job_test_100": {"bf_max_job_test": "100"},
    "bf_max_job_test_5000": {"bf_max_job_test": "5000"},
    "no_bf_continue": {"bf_continue": None},
    "bf_yield_interval_2000000": {"bf_yield_interval": "2000000"},
    "bf_resolution_600": {"bf_resolution": "600"},
    "default_queue_depth_1000": {"default_queue_depth": "1000"},
    "defer": {"defer": ""},
    "batch_sched_delay_10": {"batch_sched_delay": "10"},
}
"""Arms: what differs from what apply writes; None: left out, so that Slurm's default holds."""

OPTIONS = [
    click.Option(
        ["--pods"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="Pod list in the openb format.",
    ),
    click.Option(["--nodes"], type=click.IntRange(2, 1024), default=16, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--load"], type=click.IntRange(1, 1000), default=110, show_default=True, help="Percent asked."),
    click.Option(["--minutes"], type=click.FloatRange(0.5), default=1.5, show_default=True, help="Of arrivals."),
    click.Option(["--longest"], type=click.IntRange(1), default=300, show_default=True, help="Seconds."),
    click.Option(["--speed-up"], type=click.FloatRange(1), default=5.0, show_default=True),
    click.Option(["--eights"], type=click.FloatRange(0, 100), default=3.0, show_default=True, help="Percent."),
    click.Option(["--left"], type=click.FloatRange(0, 100), default=10.0, show_default=True, help="Percent."),
    click.Option(["--seeds"], type=click.IntRange(1), default=3, show_default=True, help="Each draws other jobs."),
    click.Option(["--arm", "arms"], multiple=True, type=click.Choice(list(CHANGES)), help="Default: all."),
    click.Option(
        ["--plugins"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Built plugins.",
    ),
]
MUST: dict[str, tuple[str, float]] = {}


def scheduler_parameters(arm: str, speed_up: float) -> str:
    """SchedulerParameters of an arm, in compressed time."""
    words = {**DEFAULTS, **{key: value for key, value in BACKFILL.items() if arm != "stock"}}
    for key, value in CHANGES[arm].items():
        if value is not None:
            words[key] = value
        elif key not in DEFAULTS:
            words.pop(key, None)
    for key in DEFAULTS:
        words[key] = str(max(1, round(int(words[key]) / speed_up)))
    return ",".join(f"{key}={value}" if value else key for key, value in words.items())


def _some_left_to_slurm(jobs: Sequence[Job], percent: float, seed: int) -> list[Job]:
    draw = random.Random(seed)
    return [
        replace(job, options=(*job.options, LEFT)) if job.at > 0 and draw.uniform(0, 100) < percent else job
        for job in jobs
    ]


def _is_left(ran: Ran) -> bool:
    return LEFT in ran.job.options


def _controller(arm: Arm, jobs: int) -> dict[str, float]:
    """The CPU time of slurmctld, and the mean of its cycles."""
    stats = arm.cluster.run(["bash", "-c", "cat $(printf '/proc/%s/stat ' $(pidof slurmctld))"]).stdout.splitlines()
    ticks = sum(sum(map(int, line.rpartition(")")[2].split()[11:13])) for line in stats)
    said = arm.cluster.run(["sdiag"]).stdout
    main, _, backfill = said.partition("Backfilling stats")
    found = {"main_cycle_mean_us": main, "backfill_cycle_mean_us": backfill}
    cycles = {name: re.search(r"Mean cycle:\s+(\d+)", text) for name, text in found.items()}
    return {
        "slurmctld_cpu_ms_a_job": 1000 * ticks / os.sysconf("SC_CLK_TCK") / jobs,
        **{name: float(match[1]) if match else 0.0 for name, match in cycles.items()},
    }


def _measure(arm: Arm, load: Sequence[Job], options: dict[str, float]) -> dict[str, float]:
    with arm:
        ran, _ = arm.run(load, settle_s=1)
        controller = _controller(arm, len(load))
    figures = figures_of([job for job in ran if not _is_left(job)], arm.nodes, options)
    end = max(job.submitted for job in ran)
    left = [job.wait(end) for job in ran if _is_left(job)]
    all_figures = figures_of(ran, arm.nodes, options)
    return {
        "allocation_percent": all_figures["allocation_percent"],
        "small_wait_p50_s": figures["small_wait_p50_s"],
        "small_wait_p95_s": figures["small_wait_p95_s"],
        "eights_wait_p50_s": figures["eights_wait_p50_s"],
        "left_wait_p50_s": percentile(left, 50),
        "left_wait_p95_s": percentile(left, 95),
        **controller,
    }


def _arm(name: str, nodes: int, speed_up: float, plugins: Path | None) -> Arm:
    settings = Global(
        weight=Weights(size=1000),
        size_full_gpus=GPUS_A_NODE,
        planner_interval_ms=max(100, round(2000 / speed_up)),
        backfill_reservations=64,
    )
    return Arm(nodes, "place", plugins, settings, scheduler=scheduler_parameters(name, speed_up))


def run(
    pods: Path, nodes: int, seeds: int, left: float, arms: tuple[str, ...], plugins: Path | None, **more: float
) -> Result:
    """Medians over the seeds; `spread` has the least and the most of each."""
    require_root("up")
    names = list(arms) or list(CHANGES)
    if "stock" not in names:
        raise UsageError("--arm: stock is missing, and everything is compared with it", remedy="add --arm stock")
    options = {"nodes": nodes, **more}
    listed: list[Pod] = read_pods(pods)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(42, 42 + seeds):
        load = _some_left_to_slurm(draw_jobs(listed, seed, options), left, seed)
        for name in names:
            measured[name].append(_measure(_arm(name, nodes, more["speed_up"], plugins), load, options))
            loads = " ".join(f"{value:.1f}" for value in os.getloadavg())
            click.echo(f"seed {seed}, {name} (load {loads}): {measured[name][-1]}", err=True)
    result = Result({}, versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]})
    for name in names:
        for figure in measured[name][0]:
            key = f"{name}_{figure}"
            values, stock = ([one[figure] for one in measured[arm]] for arm in (name, "stock"))
            result.figures[key] = round(median(values), 3)
            result.spread[key] = [round(min(values), 3), round(max(values), 3)]
            result.peer[key] = round(median(stock), 3)
    return result
