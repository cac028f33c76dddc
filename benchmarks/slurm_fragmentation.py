"""GPU allocation and waiting under an openb job mix at more load than there is room for: Sluice and stock Slurm.

On real daemons. Jobs have the GPUs, GPU shares, CPUs and memory of pods drawn from an openb list, and their run times,
cut to --longest and divided by --speed-up, as are the schedulers' periods. A third of the default list's pods ran for
longer than that, and 0.6 percent have eight GPUs; --eights percent of the jobs that are drawn have. Jobs that fill the
cluster come first, as many as would be running at some moment, with what would be left of their run times. Then others
arrive at random times (Poisson); together they ask for --load percent of the cluster's GPU time. Time limits are one to
three times the run time, in whole minutes as Slurm counts them. Measured after a quarter of the arrivals, until the
last; a job that has not started by then has waited until then. The number of jobs with eight GPUs among those is
reported (eights_counted): they are few.

Both arms get the same jobs at the same times, in turn, on clusters of their own. Stock Slurm has sched/backfill and its
own order (first come, first served); Sluice is configured to put whole and large requests first (weight.size). Stock
Slurm can do so, too, by CPUs and nodes: --stock-conf PriorityWeightJobSize=100000.

Allocation is measured GPU by GPU: one that is given out twice (Slurm 22.05 gives parts of GPUs that others hold whole)
counts once, and the time that Slurm takes to end a job does not count. held_percent counts both.
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
    in_use,
    percentile,
)
from dev_cluster.handle import require_root
from policy.compiled import Global, Weights
from sluice.base.run import run_command
from sluice.simulate.traces.rows import MAX_SECONDS, csv_rows

OPTIONS = [
    click.Option(
        ["--pods"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="Pod list in the openb format.",
    ),
    click.Option(["--nodes"], type=click.IntRange(2, 1024), default=64, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--load"], type=click.IntRange(1, 1000), default=110, show_default=True, help="Percent asked."),
    click.Option(["--minutes"], type=click.FloatRange(1), default=3.0, show_default=True, help="Of arrivals."),
    click.Option(["--longest"], type=click.IntRange(1), default=1200, show_default=True, help="Seconds."),
    click.Option(["--speed-up"], type=click.FloatRange(1), default=10.0, show_default=True),
    click.Option(["--eights"], type=click.FloatRange(0, 100), default=3.0, show_default=True, help="Percent."),
    click.Option(["--runs"], type=click.IntRange(1), default=5, show_default=True, help="All of the same jobs."),
    click.Option(["--seed"], type=int, default=42, show_default=True, help="Of the jobs that are drawn."),
    click.Option(["--stock-conf"], multiple=True, help="Lines of slurm.conf of stock Slurm's cluster."),
    click.Option(["--reservations"], type=click.IntRange(0), default=64, show_default=True, help="Of the planner."),
    click.Option(
        ["--plugins"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Built plugins.",
    ),
]
MUST: dict[str, tuple[str, float]] = {
    "allocation_margin_outside_spread_points": (">", 0.0),
    "eights_started_margin_outside_spread_points": (">", 0.0),
}


FILL_S = 45.0
"""Until arrivals begin: the jobs that fill the cluster are submitted and start."""


@dataclass(frozen=True)
class Pod:
    """What a pod of the list asked for, and how long it ran."""

    gpus: int
    gpu_milli: int
    cpus: int
    memory_mib: int
    seconds: int


def read_pods(path: Path) -> list[Pod]:
    """The pods with GPUs of a list in the openb format. Raises SluiceError."""
    columns = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "scheduled_time", "creation_time", "deletion_time")
    pods = []
    for row in csv_rows(path, read_text(path, "pod"), columns):
        gpus = row.integer("num_gpu", high=16)
        if not 0 < gpus <= GPUS_A_NODE:
            continue
        begun = row.fields["scheduled_time"] or row.fields["creation_time"]
        ended = row.integer("deletion_time", high=MAX_SECONDS)
        pods.append(
            Pod(
                gpus,
                row.integer("gpu_milli", high=1000),
                math.ceil(row.integer("cpu_milli", high=10**9) / 1000),
                row.integer("memory_mib", high=2**30),
                max(1, ended - int(float(begun))),
            )
        )
    return pods


def _job(pod: Pod, at: float, seconds: float, draw: random.Random) -> Job:
    minutes = math.ceil(seconds * draw.uniform(1, 3) / 60 + 0.1)
    cpus = min(pod.cpus, CORES_A_NODE * pod.gpus // GPUS_A_NODE)
    memory = min(pod.memory_mib, MEMORY_MIB * pod.gpus // GPUS_A_NODE)
    shared = pod.gpu_milli < 1000
    gres = f"shard:{pod.gpu_milli * SHARDS_A_GPU // 1000}" if shared else f"gpu:{pod.gpus}"
    options = ("-N1", "-n1", f"-c{cpus}", f"--mem={memory}M", f"--gres={gres}")
    return Job(at, options, seconds, minutes, pod.gpus * pod.gpu_milli / 1000, pod.gpus)


def draw_jobs(pods: Sequence[Pod], seed: int, options: dict[str, float]) -> list[Job]:
    """Jobs of one run: first those that run already, then the arrivals, from FILL_S on."""
    draw = random.Random(seed)
    eights = [pod for pod in pods if pod.gpus == GPUS_A_NODE]
    others = [pod for pod in pods if pod.gpus != GPUS_A_NODE]

    def some() -> tuple[Pod, float]:
        pod = draw.choice(eights if draw.uniform(0, 100) < options["eights"] else others)
        return pod, max(2.0, min(pod.seconds, options["longest"]) / options["speed_up"])

    def work(pod: Pod) -> float:
        return pod.gpus * pod.gpu_milli / 1000

    capacity = options["nodes"] * GPUS_A_NODE
    jobs: list[Job] = []
    longest = options["longest"] / options["speed_up"]
    held = 0.0
    while (
        held < capacity
    ):  # at any moment long jobs run more often than short ones, and have run for a part of their time
        pod, seconds = some()
        if draw.uniform(0, longest) < seconds:
            jobs.append(_job(pod, 0, FILL_S + seconds * draw.random(), draw))
            held += work(pod)
    length = options["minutes"] * 60
    arrivals = []
    asked = 0.0
    while asked < options["load"] / 100 * capacity * length:  # exactly as much as is to be asked, at random times
        pod, seconds = some()
        arrivals.append((pod, seconds))
        asked += work(pod) * seconds
    times = sorted(draw.uniform(0, length) for _ in arrivals)
    return jobs + [_job(pod, FILL_S + at, seconds, draw) for at, (pod, seconds) in zip(times, arrivals, strict=True)]


def figures_of(ran: Sequence[Ran], nodes: int, options: dict[str, float]) -> dict[str, float]:
    """Allocation and waits of the arrivals, from a quarter of them to the last."""
    arrivals = [job for job in ran if job.job.at > 0]
    begin = min(job.submitted for job in arrivals)
    end = max(job.submitted for job in arrivals)
    warm = begin + (end - begin) / 4
    seen = [job for job in arrivals if job.submitted >= warm]
    small = [job.wait(end) for job in seen if job.job.gpus <= 1]
    eights = [job for job in seen if job.job.group == GPUS_A_NODE]
    waits = [job.wait(end) for job in eights]
    started = sum(job.started is not None and job.started <= end for job in eights)
    used, twice = in_use(ran, nodes * GPUS_A_NODE, warm, end)
    return {
        "allocation_percent": used,
        "held_percent": allocation(ran, nodes * GPUS_A_NODE, warm, end),
        "jobs_on_gpus_of_others": twice,
        "eights_counted": len(eights),
        "eights_started_percent": 100 * started / max(1, len(eights)),
        "small_wait_p50_s": percentile(small, 50),
        "small_wait_p95_s": percentile(small, 95),
        "eights_wait_p50_s": percentile(waits, 50),
        "eights_wait_p95_s": percentile(waits, 95),
    }


def scheduler_parameters(speed_up: float) -> str:
    """SchedulerParameters of both arms: Slurm's periods in seconds, divided as the jobs' times are."""
    defaults = {"bf_interval": 30, "bf_resolution": 60, "sched_interval": 60, "batch_sched_delay": 3}
    periods = [f"{name}={max(1, round(seconds / speed_up))}" for name, seconds in defaults.items()]
    rest = "bf_continue,bf_max_job_test=1000,bf_window=1440,bf_yield_interval=500000,default_queue_depth=200"
    return ",".join((*periods, rest))


def _arms(nodes: int, speed_up: float, reservations: int, plugins: Path | None, stock_conf: str) -> dict[str, Arm]:
    """The default periods of both."""
    periods = scheduler_parameters(speed_up)
    ours = Global(
        weight=Weights(size=1000),
        size_full_gpus=GPUS_A_NODE,
        planner_interval_ms=max(100, round(2000 / speed_up)),
        backfill_reservations=reservations,
    )
    return {
        "stock": Arm(nodes, None, scheduler=periods, slurm_conf=stock_conf),
        "sluice": Arm(nodes, "place", plugins, ours, scheduler=periods),
    }


def run(
    pods: Path,
    nodes: int,
    runs: int,
    seed: int,
    reservations: int,
    plugins: Path | None,
    stock_conf: tuple[str, ...],
    **more: float,
) -> Result:
    """Medians over the runs; `spread` has the least and the most of each."""
    require_root("up")
    options = {"nodes": nodes, **more}
    arms = _arms(nodes, more["speed_up"], reservations, plugins, "\n".join(stock_conf))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    load = draw_jobs(read_pods(pods), seed, options)
    for number in range(runs):
        for name, arm in arms.items():
            with arm:
                ran, _ = arm.run(load, settle_s=1)
            measured[name].append(figures_of(ran, nodes, options))
            click.echo(f"run {number + 1} of {runs}, {name}: {measured[name][-1]}", err=True)
    figures, peer, spread = {}, {}, {}
    for figure in measured["sluice"][0]:
        ours, theirs = ([one[figure] for one in measured[name]] for name in ("sluice", "stock"))
        figures[figure], peer[figure] = round(median(ours), 3), round(median(theirs), 3)
        spread[figure] = [round(min(ours), 3), round(max(ours), 3)]
        spread[f"stock_{figure}"] = [round(min(theirs), 3), round(max(theirs), 3)]
    for figure, name in (("allocation_percent", "allocation"), ("eights_started_percent", "eights_started")):
        figures[f"{name}_gain_points"] = round(figures[figure] - peer[figure], 3)
        # of the worst run here over the best one there
        margin = spread[figure][0] - spread[f"stock_{figure}"][1]
        figures[f"{name}_margin_outside_spread_points"] = round(margin, 3)
    figures["jobs_a_run"] = len(load)
    return Result(figures, peer, spread, versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]})
