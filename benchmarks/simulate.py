"""The time to replay 100,000 jobs on 1,213 nodes.

The jobs are drawn from a pod list: shapes and run times as they are there, with random arrivals at a rate that offers
`--load` of the GPUs. Run times are cut at `--longest`, so that the cluster fills within the trace; with a load above 1
the queue grows until the last arrival, and with it the work of each decision. Drawing the jobs is not timed; setting up
the cluster and measuring the result is.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import click

from benchmarks import Result
from sluice.core import version
from sluice.simulate.cluster_file import read_nodes
from sluice.simulate.metrics import measure
from sluice.simulate.simulation import MILLI, PRESETS, parse_policy, simulate
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob, read_trace

OPTIONS = [
    click.Option(
        ["--trace"], type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="Pod list."
    ),
    click.Option(["--nodes"], required=True, help="Node list."),
    click.Option(["--jobs"], type=click.IntRange(1), default=100_000, show_default=True),
    click.Option(["--load"], type=click.FloatRange(0, min_open=True), default=0.95, show_default=True),
    click.Option(["--longest"], type=click.FloatRange(1), default=3600, show_default=True, help="Seconds."),
    click.Option(["--policy"], multiple=True, default=("easy", "slurm", "sluice"), show_default=True),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"replay_100k_s": ("<=", 30.0)}


def draw(source: Trace, count: int, gpus: int, load: float, longest_s: float, seed: int) -> Trace:
    """`count` jobs like those of the trace, arriving at random so that they offer `load` of the GPUs."""
    chance = random.Random(seed)
    jobs = [chance.choice(source.jobs) for _ in range(count)]
    runs = [min(max(job.run, MICROSECOND), round(longest_s * MICROSECOND)) for job in jobs]
    work = sum(run * (job.share / MILLI if job.share else job.gpus) for job, run in zip(jobs, runs, strict=True))
    rate = count * gpus * load / work  # arrivals in a microsecond
    drawn, now = [], 0.0
    for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        now += chance.expovariate(rate)
        drawn.append(
            TraceJob(
                name=str(number),
                submit=int(now),
                run=run,
                gpus=job.gpus,
                nodes=job.nodes,
                share=job.share,
                cpus_milli=job.cpus_milli,
                memory_mib=job.memory_mib,
                models=job.models,
                tenant=job.tenant,
            )
        )
    return Trace(source.format, drawn, source.share_unit)


def run(trace: Path, nodes: str, jobs: int, load: float, longest: float, policy: tuple[str, ...], seed: int) -> Result:
    """Replay under each policy; the slowest counts."""
    cluster = read_nodes(nodes)
    drawn = draw(read_trace(trace), jobs, sum(node.gpus for node in cluster), load, longest, seed)
    figures: dict[str, float] = {}
    slowest = 0.0
    for name in policy or tuple(PRESETS):
        begin = time.perf_counter()
        measured = measure(simulate(drawn, cluster, parse_policy(name)))
        seconds = time.perf_counter() - begin
        slowest = max(slowest, seconds)
        figures[f"{name}_s"] = seconds
        figures[f"{name}_wait_mean_s"] = measured.wait_mean_s
        figures[f"{name}_allocation_percent"] = measured.allocation_percent
    per_job = slowest / jobs
    return Result(
        {"replay_100k_s": per_job * 100_000, "jobs": jobs, "nodes": len(cluster), **figures},
        versions={"sluice_core": version()},
    )
