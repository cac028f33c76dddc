"""GPU allocation and waiting under an openb job mix at more load than there is room for: Sluice beside stock Slurm.

On real daemons. Jobs have the GPUs, GPU shares, CPUs and memory of pods drawn from an openb list, and their run times,
cut to --longest and divided by --speed-up; they arrive at random (Poisson) so that --load percent of the cluster's GPU
time is asked. Time limits are one to three times the run time, in whole minutes as Slurm counts them. Of the list's
jobs few have eight GPUs (0.6 percent): of those drawn --eights percent have. Both arms get the same jobs at the same
times, on clusters of their own, stock with sched/backfill and the same parameters. Measured after a warm-up of a
quarter of the arrivals, until the last arrival; a job that has not started by then has waited until then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from benchmarks.openb_trace import read_text
from benchmarks.slurm_load import (
    CORES_A_NODE,
    GPUS_A_NODE,
    MEMORY_MIB,
    SHARDS_A_GPU,
    Arm,
    Job,
    Ran,
    allocation,
    percentile,
)
from dev_cluster.cluster import require_root
from policy.compiled import Global
from policy.traces.rows import MAX_SECONDS, csv_rows
from sluice_base.run import run_command

OPTIONS = [
    click.Option(
        ["--pods"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="Pod list in the openb format.",
    ),
    click.Option(["--nodes"], type=click.IntRange(2, 1024), default=64, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--load"], type=click.IntRange(1, 1000), default=110, show_default=True, help="Percent asked."),
    click.Option(["--minutes"], type=click.FloatRange(1), default=12.0, show_default=True, help="Of arrivals."),
    click.Option(["--longest"], type=click.IntRange(1), default=3600, show_default=True, help="Seconds."),
    click.Option(["--speed-up"], type=click.FloatRange(1), default=10.0, show_default=True),
    click.Option(["--eights"], type=click.FloatRange(0, 100), default=3.0, show_default=True, help="Percent."),
    click.Option(["--runs"], type=click.IntRange(1), default=5, show_default=True, help="Each with jobs of its own."),
    click.Option(["--first-seed"], type=int, default=42, show_default=True),
    click.Option(["--reservations"], type=click.IntRange(0), default=64, show_default=True, help="Of the planner."),
    click.Option(
        ["--plugins"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Built plugins.",
    ),
]
MUST: dict[str, tuple[str, float]] = {
    "allocation_gain_least_points": (">", 0.0),
    "eights_started_gain_least_points": (">", 0.0),
}


@dataclass(frozen=True)
class _Pod:
    gpus: int
    gpu_milli: int
    cpus: int
    memory_mib: int
    seconds: int


def _pods(path: Path) -> list[_Pod]:
    columns = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "scheduled_time", "creation_time", "deletion_time")
    pods = []
    for row in csv_rows(path, read_text(path, "pod"), columns):
        gpus = row.integer("num_gpu", high=16)
        if not 0 < gpus <= GPUS_A_NODE:
            continue
        begun = row.fields["scheduled_time"] or row.fields["creation_time"]
        ended = row.integer("deletion_time", high=MAX_SECONDS)
        pods.append(
            _Pod(
                gpus,
                row.integer("gpu_milli", high=1000),
                math.ceil(row.integer("cpu_milli", high=10**9) / 1000),
                row.integer("memory_mib", high=2**30),
                max(1, ended - int(float(begun))),
            )
        )
    return pods


def _job(pod: _Pod, at: float, longest: int, speed_up: float, draw: random.Random) -> Job:
    seconds = max(2.0, min(pod.seconds, longest) / speed_up)
    minutes = math.ceil(seconds * draw.uniform(1, 3) / 60 + 0.1)
    cpus = min(pod.cpus, CORES_A_NODE * pod.gpus // GPUS_A_NODE)
    memory = min(pod.memory_mib, MEMORY_MIB * pod.gpus // GPUS_A_NODE)
    shared = pod.gpu_milli < 1000
    gres = f"shard:{pod.gpu_milli * SHARDS_A_GPU // 1000}" if shared else f"gpu:{pod.gpus}"
    options = ("-N1", "-n1", f"-c{cpus}", f"--mem={memory}M", f"--gres={gres}")
    return Job(at, options, seconds, minutes, pod.gpus * pod.gpu_milli / 1000, pod.gpus)


def _draw(pods: Sequence[_Pod], seed: int, options: dict[str, float]) -> list[Job]:
    """Arrivals of one run."""
    draw = random.Random(seed)
    eights = [pod for pod in pods if pod.gpus == GPUS_A_NODE]
    others = [pod for pod in pods if pod.gpus != GPUS_A_NODE]
    longest, speed_up = int(options["longest"]), options["speed_up"]
    sample = [draw.choice(eights if draw.uniform(0, 100) < options["eights"] else others) for _ in range(20_000)]
    asked = [_job(pod, 0, longest, speed_up, draw) for pod in sample]
    mean = sum(job.gpus * job.seconds for job in asked) / len(asked)  # GPU-seconds of a job
    rate = options["load"] / 100 * options["nodes"] * GPUS_A_NODE / mean
    jobs: list[Job] = []
    at = 0.0
    for pod in sample:
        at += draw.expovariate(rate)
        if at > options["minutes"] * 60:
            return jobs
        jobs.append(_job(pod, at, longest, speed_up, draw))
    return jobs


def _figures(ran: Sequence[Ran], nodes: int, options: dict[str, float]) -> dict[str, float]:
    begin = min(job.submitted for job in ran)
    end = max(job.submitted for job in ran)
    warm = begin + (end - begin) / 4
    seen = [job for job in ran if job.submitted >= warm]
    small = [job.wait(end) for job in seen if job.job.gpus <= 1]
    eights = [job for job in seen if job.job.group == GPUS_A_NODE]
    waits = [job.wait(end) for job in eights]
    started = sum(job.started is not None and job.started <= end for job in eights)
    return {
        "allocation_percent": allocation(ran, nodes * GPUS_A_NODE, warm, end),
        "eights_started_percent": 100 * started / max(1, len(eights)),
        "small_wait_p50_s": percentile(small, 50),
        "small_wait_p95_s": percentile(small, 95),
        "eights_wait_p50_s": percentile(waits, 50),
        "eights_wait_p95_s": percentile(waits, 95),
    }


def run(
    pods: Path, nodes: int, runs: int, first_seed: int, reservations: int, plugins: Path | None, **more: float
) -> Result:
    """Medians over the runs; `spread` has the least and the most of each."""
    require_root("up")
    options = {"nodes": nodes, **more}
    kinds = _pods(pods)
    arms = {
        "stock": Arm(nodes, None),
        "sluice": Arm(
            nodes,
            "place",
            plugins,
            Global(planner_interval_ms=1000, backfill_reservations=reservations),
        ),
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    jobs = 0
    for number in range(runs):
        load = _draw(kinds, first_seed + number, options)
        jobs += len(load)
        for name, arm in arms.items():
            with arm:
                ran, _ = arm.run(load, settle_s=1)
            measured[name].append(_figures(ran, nodes, options))
    figures, peer, spread = {}, {}, {}
    for figure in measured["sluice"][0]:
        ours, theirs = ([one[figure] for one in measured[name]] for name in ("sluice", "stock"))
        figures[figure], peer[figure] = round(median(ours), 3), round(median(theirs), 3)
        spread[figure] = [round(min(ours), 3), round(max(ours), 3)]
        spread[f"stock_{figure}"] = [round(min(theirs), 3), round(max(theirs), 3)]
    for figure, name in (("allocation_percent", "allocation"), ("eights_started_percent", "eights_started")):
        gains = [one[figure] - other[figure] for one, other in zip(measured["sluice"], measured["stock"], strict=True)]
        figures[f"{name}_gain_points"] = round(median(gains), 3)
        figures[f"{name}_gain_least_points"] = round(min(gains), 3)  # of all runs: better in each of them
        spread[f"{name}_gain_points"] = [round(min(gains), 3), round(max(gains), 3)]
    figures["jobs_a_run"] = round(jobs / runs)
    return Result(figures, peer, spread, versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]})
