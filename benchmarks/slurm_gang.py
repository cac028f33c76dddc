"""Gangs among small jobs on real daemons: no partial start, no longer wait than the same work as one big job each.

--gangs gangs of four jobs of a whole node each arrive among --small jobs of one or two GPUs, at random over --minutes.
Then the same again, on the same cluster and at level place, too, with one job of four nodes instead of each gang; each
other run begins with these. A gang's wait is from its last member's submission to its last member's start; starts are
reported in whole seconds.

A gang has started in part if one of its members' scripts began before all members had nodes, or if one runs and another
does not. Each script leaves a stamp; a job's start is the moment at which it got its nodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from benchmarks.slurm_load import GPUS_A_NODE, Arm, Job, Ran, percentile
from dev_cluster.handle import require_root
from policy.compiled import Global
from sluice.base.run import run_command

MEMBERS = 4
OPTIONS = [
    click.Option(
        ["--nodes"], type=click.IntRange(MEMBERS, 1024), default=16, show_default=True, help="Nodes of 8 GPUs."
    ),
    click.Option(["--gangs"], type=click.IntRange(1), default=20, show_default=True),
    click.Option(["--small"], type=click.IntRange(1), default=500, show_default=True),
    click.Option(["--minutes"], type=click.FloatRange(0.5), default=4.0, show_default=True, help="Of arrivals."),
    click.Option(["--runs"], type=click.IntRange(1), default=3, show_default=True, help="Each with jobs of its own."),
    click.Option(["--first-seed"], type=int, default=42, show_default=True),
    click.Option(
        ["--plugins"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Built plugins.",
    ),
]
MUST: dict[str, tuple[str, float]] = {
    "partial_starts": ("==", 0.0),
    "gangs_not_started": ("==", 0.0),
    "wait_p95_ratio": ("<=", 1.0),
}
_TOGETHER_S = 5.0  # members of one gang get their nodes within it


def _load(seed: int, gangs: int, small: int, minutes: float, as_gangs: bool) -> list[Job]:
    draw = random.Random(seed)
    jobs = []
    for _ in range(small):
        gpus = draw.choice((1, 1, 1, 2))
        seconds = draw.uniform(10, 50)
        jobs.append(
            Job(draw.uniform(0, minutes * 60), ("-N1", f"--gres=gpu:{gpus}"), seconds, draw.choice((1, 2)), gpus)
        )
    for number in range(gangs):
        at, seconds = draw.uniform(5, minutes * 60 - 5), draw.uniform(10, 20)
        options = ("-N1", f"--gres=gpu:{GPUS_A_NODE}")
        if as_gangs:
            name = f"--gang=g{number}:{MEMBERS}"
            jobs += [Job(at, (*options, name), seconds, 1, GPUS_A_NODE, number + 1) for _ in range(MEMBERS)]
        else:
            options = (f"-N{MEMBERS}", f"--gres=gpu:{GPUS_A_NODE}")
            jobs.append(Job(at, options, seconds, 1, GPUS_A_NODE * MEMBERS, number + 1))
    return sorted(jobs, key=lambda job: (job.at, job.group))


def in_part(members: Sequence[Ran]) -> bool:
    """Whether a gang has started in part."""
    starts = [job.started for job in members if job.started is not None]
    scripts = [job.script for job in members if job.script is not None]
    if not starts and not scripts:
        return False
    if len(starts) < len(members) or max(starts) - min(starts) > _TOGETHER_S:
        return True
    return bool(scripts) and min(scripts) < max(starts)


def _waits(ran: Sequence[Ran], until: float, gangs: int) -> tuple[list[float], int, int]:
    """The wait of each group, how many started in part, and how many not at all."""
    waits, partial, missing = [], 0, 0
    for group in range(1, gangs + 1):
        members = [job for job in ran if job.job.group == group]
        starts = [job.started for job in members if job.started is not None]
        waits.append(max(starts, default=until) - max(job.submitted for job in members))
        missing += not starts
        partial += in_part(members)
    return [max(0.0, wait) for wait in waits], partial, missing


def run(nodes: int, gangs: int, small: int, minutes: float, runs: int, first_seed: int, plugins: Path | None) -> Result:
    """Waits over all runs' gangs, and over all runs' big jobs."""
    require_root("up")
    waits: dict[bool, list[float]] = {True: [], False: []}
    p95: dict[bool, list[float]] = {True: [], False: []}
    small_waits: dict[bool, list[float]] = {True: [], False: []}
    partial = missing = 0
    with Arm(nodes, "place", plugins, Global(planner_interval_ms=500)) as arm:
        for number in range(runs):
            for as_gangs in (True, False) if number % 2 == 0 else (False, True):  # other load affects both
                ran, until = arm.run(_load(first_seed + number, gangs, small, minutes, as_gangs), settle_s=120)
                found, parts, never = _waits(ran, until, gangs)
                waits[as_gangs] += found
                p95[as_gangs].append(percentile(found, 95))
                small_waits[as_gangs] += [job.wait(until) for job in ran if job.job.group == 0]
                if as_gangs:
                    partial += parts
                    missing += never
        held = arm.counters()["gang.gpu_seconds_held"]
    gang_p95, big_p95 = percentile(waits[True], 95), percentile(waits[False], 95)
    figures = {
        "partial_starts": partial,
        "gangs_not_started": missing,
        "wait_p50_s": round(median(waits[True]), 3),
        "wait_p95_s": round(gang_p95, 3),
        "wait_p95_ratio": round(gang_p95 / max(big_p95, 1.0), 3),
        "small_wait_p95_s": round(percentile(small_waits[True], 95), 3),
        "gpu_seconds_held": held,
    }
    peer = {
        "wait_p50_s": round(median(waits[False]), 3),
        "wait_p95_s": round(big_p95, 3),
        "small_wait_p95_s": round(percentile(small_waits[False], 95), 3),
    }
    spread = {
        "wait_p95_s": [round(min(p95[True]), 3), round(max(p95[True]), 3)],
        "big_wait_p95_s": [round(min(p95[False]), 3), round(max(p95[False]), 3)],
    }
    return Result(figures, peer, spread, versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]})
