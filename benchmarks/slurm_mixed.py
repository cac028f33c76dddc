"""Who waits how long where half of the jobs want no GPU: stock Slurm, and the same jobs at level place.

Jobs of eight kinds arrive at random over --minutes, on clusters of their own, the same jobs at the same times: small
ones with and without GPUs, whole nodes with GPUs, those that need one of a few licences, and those for which Slurm
itself chooses the nodes (several nodes without GPUs, --exclusive, --nodelist, heterogeneous ones). A kind that others
overtake shows it in its waits: `starvation` is the worst ratio of p95 waits of all kinds. Starts are reported in whole
seconds.

Peer: stock Slurm with sched/backfill, in the same compressed time.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from benchmarks.slurm_load import CORES_A_NODE, GPUS_A_NODE, Arm, Job, percentile
from dev_cluster.handle import require_root
from policy.compiled import Global
from sluice.base.run import run_command

OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(4, 1024), default=8, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--load"], type=click.IntRange(1, 1000), default=120, show_default=True, help="Percent of all CPUs."),
    click.Option(["--minutes"], type=click.FloatRange(0.5), default=3.0, show_default=True, help="Of arrivals."),
    click.Option(["--seeds"], type=click.IntRange(1), default=3, show_default=True, help="Each draws other jobs."),
    click.Option(
        ["--plugins"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Built plugins.",
    ),
]
MUST: dict[str, tuple[str, float]] = {"starvation": ("<=", 1.25)}

_EIGHTH = CORES_A_NODE // 8
SHARE = {
    "gpu_small": 0.25,
    "gpu_node": 0.2,
    "licence": 0.05,
    "cpu_small": 0.15,
    "cpu_nodes": 0.1,
    "exclusive": 0.1,
    "nodelist": 0.1,
    "heterogeneous": 0.05,
}
"""Of all CPU time that is asked for; half goes to jobs without GPUs, from cpu_small on."""
_CONF = "Licenses=solver:4\n"


def _job(kind: str, at: float, nodes: int, draw: random.Random) -> Job:
    """A job of a kind; what it holds is in eighths of a node."""
    wide = 2 if nodes < 6 else 3
    half, quarter = f"-c{CORES_A_NODE // 2}", f"-c{CORES_A_NODE // 4}"
    options, eighths = {
        "gpu_small": (("-N1", "-n1", f"-c{_EIGHTH}", "--gres=gpu:1"), 1),
        "gpu_node": (("-N1", "-n1", f"-c{CORES_A_NODE}", f"--gres=gpu:{GPUS_A_NODE}"), 8),
        "cpu_small": (("-N1", "-n1", f"-c{_EIGHTH}"), 1),
        "cpu_nodes": ((f"-N{wide}", f"-n{wide}", half), 4 * wide),
        "exclusive": ((f"-N{wide}", "--exclusive"), 8 * wide),
        "licence": (("-N1", "-n1", f"-c{_EIGHTH}", "--gres=gpu:1", "-Lsolver:1"), 1),
        "heterogeneous": (("-N1", "-n1", half, ":", "-t1", "-N1", "-n1", quarter), 6),
        "nodelist": ((f"-wn{draw.randint(1, nodes)}", "-n1", half), 4),
    }[kind]
    return Job(at, options, draw.uniform(5, 25), 1, eighths)


def draw_jobs(seed: int, nodes: int, load: float, minutes: float) -> list[tuple[str, Job]]:
    """Jobs of each kind until its share of the CPU time is asked for, by time of arrival."""
    draw = random.Random(seed)
    jobs = []
    for kind, share in SHARE.items():
        left = share * load / 100 * nodes * 8 * minutes * 60
        while left > 0:
            job = _job(kind, draw.uniform(0, minutes * 60), nodes, draw)
            left -= job.gpus * job.seconds
            jobs.append((kind, job))
    return sorted(jobs, key=lambda one: one[1].at)


def _waits(arm: Arm, jobs: Sequence[tuple[str, Job]]) -> dict[str, list[float]]:
    waits = defaultdict(list)
    with arm:
        ran, until = arm.run([job for _, job in jobs], settle_s=300)
    for (kind, _), one in zip(jobs, ran, strict=True):
        waits[kind].append(one.wait(until))
    return waits


def run(nodes: int, load: int, minutes: float, seeds: int, plugins: Path | None) -> Result:
    """p50 and p95 of each kind's waits, over all seeds' jobs."""
    require_root("up")
    waits: dict[str | None, dict[str, list[float]]] = {None: defaultdict(list), "place": defaultdict(list)}
    p95: dict[str, list[float]] = defaultdict(list)
    for seed in range(42, 42 + seeds):
        jobs = draw_jobs(seed, nodes, load, minutes)
        for level in (None, "place") if seed % 2 == 0 else ("place", None):
            found = _waits(Arm(nodes, level, plugins, Global(planner_interval_ms=500), _CONF), jobs)
            for kind, seconds in found.items():
                waits[level][kind] += seconds
                if level:
                    p95[kind].append(percentile(seconds, 95))
            click.echo(f"seed {seed}, {level or 'stock'}: {len(jobs)} jobs, load {os.getloadavg()[0]:.1f}", err=True)
    result = Result({}, versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]})
    worst = 0.0
    for kind in SHARE:
        for side, of in ((result.figures, waits["place"][kind]), (result.peer, waits[None][kind])):
            side[f"{kind}_wait_p50_s"] = round(median(of), 3)
            side[f"{kind}_wait_p95_s"] = round(percentile(of, 95), 3)
            side[f"{kind}_wait_max_s"] = round(max(of), 3)
        name = f"{kind}_wait_p95_s"
        worst = max(worst, result.figures[name] / max(result.peer[name], 1.0))
        result.spread[name] = [round(min(p95[kind]), 3), round(max(p95[kind]), 3)]
    result.figures["starvation"] = round(worst, 3)
    return result
