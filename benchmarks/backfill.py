"""A full backfill pass: every pending job of a busy cluster gets its reservation, with and without an index."""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks import Result
from benchmarks.openb_trace import MILLI, add_nodes, read_nodes, read_pods, read_text, to_request
from sluice.base.errors import UsageError
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.backfill import CONSERVATIVE, EASY, Backfill, PendingJob, Plan, Queue, RunningJob
from sluice.core.cluster import Cluster
from sluice.core.errors import CoreError, check, new_error_text
from sluice.core.placement import Policy, Request, start
from sluice.simulate.traces.rows import MAX_SECONDS, csv_rows

OPTIONS = [
    click.Option(["--nodes"], type=click.Path(path_type=Path), required=True, help="Node list, openb format."),
    click.Option(["--pods"], type=click.Path(path_type=Path), required=True, help="Pod list, openb format."),
    click.Option(["--pending"], type=click.IntRange(1), default=10_000, show_default=True, help="Jobs in the queue."),
    click.Option(["--gang-percent"], type=click.FloatRange(0, 100), default=1.0, show_default=True),
    click.Option(["--gang-nodes"], type=click.IntRange(2), default=8, show_default=True, help="At most, 8 GPUs each."),
    click.Option(["--repeats"], type=click.IntRange(1), default=21, show_default=True),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"conservative_pass_ms": ("<=", 50.0), "starts_unlike_peer": ("==", 0.0)}

NOW = 1_000_000_000
REFUSED = 1000  # pods after which the cluster counts as full


def read_run_times(path: Path) -> list[int]:
    """Seconds that the pods of an openb list ran, where the list has it; at least one."""
    times = []
    for row in csv_rows(path, read_text(path, "pod"), ("creation_time", "scheduled_time", "deletion_time")):
        if row.text("deletion_time"):
            begin = "scheduled_time" if row.text("scheduled_time") else "creation_time"
            times.append(row.integer("deletion_time", high=MAX_SECONDS) - row.integer(begin, high=MAX_SECONDS))
    if not times:
        raise UsageError(f"{path}: no pod has a deletion_time", remedy="give a pod list in the openb format")
    return [max(1, seconds) for seconds in times]


def build(
    nodes: Path, pods: Path, pending: int, gang_percent: float, gang_nodes: int, seed: int
) -> tuple[Cluster, list[RunningJob], list[PendingJob]]:
    """A full cluster whose jobs have partly run, and a queue; requests and run times are drawn from the list."""
    draw = random.Random(seed)
    node_list, shapes, run_times = read_nodes(nodes), read_pods(pods), read_run_times(pods)
    cluster = Cluster(len(node_list), max_allocations=64 * len(node_list))
    add_nodes(cluster, node_list, MILLI)
    requests = {shape: to_request(cluster, shape) for shape in set(shapes)}
    gangs = [
        Request(gpus=8, cpus_milli=64000, host_memory_mib=65536, nodes_min=count) for count in range(2, gang_nodes + 1)
    ]
    running: list[RunningJob] = []
    refused = 0
    while refused < REFUSED:
        try:
            allocation = start(cluster, Policy.BEST_FIT, requests[draw.choice(shapes)])
        except CoreError:  # a pod that no node of the list can take
            allocation = None
        if allocation is None:
            refused += 1
        else:
            running.append(RunningJob(allocation.id, NOW + max(1, int(draw.choice(run_times) * draw.random()))))
    jobs = []
    for _ in range(pending):
        gang = draw.random() * 100 < gang_percent
        jobs.append(PendingJob(draw.choice(gangs) if gang else requests[draw.choice(shapes)], draw.choice(run_times)))
    return cluster, running, jobs


def scan(cluster: Cluster, queue: Queue) -> tuple[float, list[int]]:
    """The same plan without an index: milliseconds, and each job's start."""
    starts, elapsed = ffi.new("int64_t[]", queue.pending_count), ffi.new("uint64_t *")
    text = new_error_text()
    check(
        lib.sluice_bench_backfill_scan(
            cluster.handle,
            NOW,
            queue.running,
            queue.running_count,
            queue.pending,
            queue.pending_count,
            starts,
            elapsed,
            text,
        ),
        text,
    )
    return elapsed[0] / 1e6, list(starts)


def run(**options: Any) -> Result:
    """Medians over the repeats; the plan's starts are compared with the peer's."""
    repeats = options.pop("repeats")
    cluster, running, jobs = build(**options)
    queue = Queue(running, jobs)
    plan = Plan(queue)
    backfill = Backfill(cluster.totals().nodes, max_jobs=len(jobs), max_planned=2 * queue.part_capacity)
    times: dict[str, list[float]] = {"conservative_pass_ms": [], "easy_pass_ms": [], "conservative_pass_cpu_ms": []}
    for _ in range(repeats):
        for name, reservations in (("easy_pass_ms", EASY), ("conservative_pass_ms", CONSERVATIVE)):
            begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
            backfill.fill(plan, cluster, NOW, queue, reservations)
            times[name].append((time.perf_counter_ns() - begin) / 1e6)
        times["conservative_pass_cpu_ms"].append((time.process_time_ns() - cpu_begin) / 1e6)
    planned = plan.to_list()
    peer_ms, peer_starts = scan(cluster, queue)
    different = sum(
        (start.start_s if start else -1) != peer_start for start, peer_start in zip(planned, peer_starts, strict=True)
    )
    totals = cluster.totals()
    figures = {name: median(values) for name, values in times.items()}
    figures |= {
        "conservative_pass_p99_ms": float(np.percentile(times["conservative_pass_ms"], 99)),
        "conservative_us_per_job": figures["conservative_pass_ms"] * 1000 / len(jobs),
        "starts_unlike_peer": float(different),
        "running_jobs": float(len(running)),
        "gpu_allocated_percent": 100 * (1 - totals.gpu_memory_mib_free / totals.gpu_memory_mib),
        "started_now": float(sum(start is not None and start.start_s == NOW for start in planned)),
        "reserved": float(sum(start is not None and start.start_s > NOW for start in planned)),
    }
    return Result(
        figures=figures,
        peer={"conservative_pass_ms": peer_ms},
        spread=times,
        versions={"sluice_core": version()},
    )
