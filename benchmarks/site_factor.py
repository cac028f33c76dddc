"""The order and the plan of 10,000 pending jobs: what they cost under slurmctld's locks, and in their own threads.

In isolation: the same C code in a program of its own. On real daemons: a full cluster with as many pending jobs, and
what slurmctld's own counters say. A new job's score, the pass over all jobs and the snapshot are under a lock; the step
and planning are not, but reading queue and nodes for the planner is.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER
from sluice.base.errors import SluiceError
from sluice.base.run import run_command

OPTIONS = [
    click.Option(["--jobs"], type=click.IntRange(1, 65536), default=10_000, show_default=True, help="Pending jobs."),
    click.Option(["--tenants"], type=click.IntRange(1, 10_000), default=100, show_default=True),
    click.Option(["--rounds"], type=click.IntRange(1), default=15, show_default=True, help="In isolation."),
    click.Option(["--daemons/--no-daemons"], default=True, show_default=True, help="Also on real daemons."),
    click.Option(["--submitters"], type=click.IntRange(1, 64), default=4, show_default=True, help="At a time."),
    click.Option(["--plugins"], type=click.Path(path_type=Path), help="A build folder instead of a new build."),
]
MUST = {"pass_ms": ("<=", 50.0)}
_DAEMON_MUST = {"daemon_pass_ms": ("<=", 50.0), "planner_lock_ms": ("<=", 50.0)}

_ROOT = Path(__file__).parents[1]
_SOURCES = (
    "slurm_plugin/tests/tool_site_factor.c",
    "slurm_plugin/order/order.c",
    "slurm_plugin/order/factors.c",
    "slurm_plugin/order/files.c",
    "slurm_plugin/order/ranks.c",
    "slurm_plugin/order/tenants.c",
    "slurm_plugin/queue/queue.c",
    "slurm_plugin/rules/policy.c",
)
_POLICY = """[global]
weight.size = 1000
weight.age = 1000
weight.service = 1000
weight.fair-share = 1000
age-full-s = 604800
size-full-gpus = 64
"""
_SUBMIT = """
seq {first} {last} | while read i; do
    printf '#!/bin/bash\\nsleep 7200\\n' | sbatch -Q -n1 --mem=1M --gres=gpu:$((i % 8 + 1)) --time=$((i % 50 + 300)) \\
        -J job$((i % 37)) -o /dev/null || exit 1
done
"""


def run(jobs: int, tenants: int, rounds: int, daemons: bool, submitters: int, plugins: Path | None) -> Result:
    """Medians of the rounds; the daemons' figures are the largest that were seen with at least `jobs` pending."""
    isolated = _isolated(jobs, tenants, rounds)
    names = ("step_ms", "pass_ms", "new_jobs_ms", "write_ms")
    figures = {name: median(row[column] for row in isolated) for column, name in enumerate(names)}
    spread = {name: [row[column] for row in isolated] for column, name in enumerate(names)}
    if daemons:
        require_root("up")
        figures |= _on_daemons(jobs, submitters, plugins)
    return Result(
        figures,
        spread=spread,
        must=_DAEMON_MUST if daemons else {},
        versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]} if daemons else {},
    )


def _isolated(jobs: int, tenants: int, rounds: int) -> list[list[float]]:
    """Of each round milliseconds of: a step, the pass over all jobs, scoring as many new ones, writing the table."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tool_site_factor"
        sources = [_ROOT / name for name in _SOURCES] + sorted((_ROOT / "native/core").glob("*.c"))
        includes = [f"-I{_ROOT / name}" for name in ("slurm_plugin", "native/include", "native/core")]
        options = ["-std=gnu11", "-O2", "-march=x86-64-v2", "-mcx16", "-D_GNU_SOURCE"]
        run_command(["gcc", *options, *includes, "-o", program, *sources, "-lm", "-lpthread"], timeout=300)
        said = run_command([program, str(jobs), str(tenants), str(rounds)], timeout=600).stdout
    return [[float(word) / 1000 for word in line.split()] for line in said.splitlines()]


def _description(jobs: int, plugins: Path | None) -> str:
    policy = f"sluice-policy 1.0\ngenerated-s = 1\nsource = benchmark\n{_POLICY}"
    sluice: dict[str, Any] = {
        "level": "place",
        "policy": f"{policy}checksum = crc32:{zlib.crc32(policy.encode()):08x}\n",
    }
    if plugins is not None:
        sluice["plugins"] = str(plugins)
    return yaml.safe_dump(
        {
            "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
            "controllers": 1,
            "slurm_conf": "PriorityType=priority/multifactor\nPriorityCalcPeriod=1\n"  # a minute
            f"MaxJobCount={jobs + 1000}\nSchedulerParameters=defer\n",
            "sluice": sluice,
        }
    )


def _on_daemons(jobs: int, submitters: int, plugins: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        cluster = DevCluster(Path(parent) / "cluster")
        cluster.up(parse_description(_description(jobs, plugins), source="benchmark"), attached=True)
        try:
            _submit(cluster, jobs, submitters)
            return _watch(cluster, jobs)
        finally:
            cluster.down()


def _submit(cluster: DevCluster, jobs: int, submitters: int) -> None:
    share = -(-(jobs + 40) // submitters)  # some start at once
    started = []
    for number in range(submitters):
        script = _SUBMIT.format(first=number * share, last=(number + 1) * share - 1)
        started.append(subprocess.Popen(cluster.command(["bash", "-c", script]), stdout=subprocess.DEVNULL))
    codes = [process.wait(timeout=1800) for process in started]
    if any(codes):
        raise SluiceError("sbatch refused a job of the benchmark", remedy="see slurmctld's log")


def _watch(cluster: DevCluster, jobs: int) -> dict[str, float]:
    """What slurmctld's counters say over two passes over all pending jobs, one a minute, and of plans meanwhile."""
    passes: list[float] = []
    steps: list[float] = []
    snapshots: list[float] = []
    on_cpu: list[float] = []
    pictures: list[float] = []
    plans: set[int] = set()
    until = time.monotonic() + 240
    while time.monotonic() < until and len(passes) < 3:  # the first may be of a time with fewer jobs
        counters = json.loads((cluster.layout.state / "sluice.status.ctl1").read_text())["counters"]
        if counters["order.pending_jobs"] >= jobs:
            plans.add(counters["plan.plans"])
            for seen, name in (
                (passes, "site_factor.update_us_last"),
                (steps, "order.step_us_last"),
                (snapshots, "order.queue_us_last"),
                (on_cpu, "order.queue_cpu_us_last"),
                (pictures, "plan.lock_us_last"),
            ):
                if not seen or seen[-1] != counters[name] / 1000:
                    seen.append(counters[name] / 1000)
        time.sleep(1)
    if len(passes) < 2:
        raise SluiceError(f"slurmctld made no pass over {jobs} pending jobs", remedy="see its log")
    if len(plans) < 3:
        raise SluiceError(f"slurmctld planned no {jobs} pending jobs twice", remedy="see its log")
    return {
        "daemon_jobs": float(jobs),
        "daemon_pass_ms": max(passes[1:]),
        "daemon_step_ms": median(steps),
        "daemon_snapshot_ms": median(snapshots),
        "daemon_snapshot_cpu_ms": median(on_cpu),
        "daemon_snapshot_most_ms": max(snapshots),
        # The planner's own counters: the worst since slurmctld started, and jobs of the last plan.
        "planner_lock_ms": counters["plan.lock_us_max"] / 1000,
        "planner_lock_median_ms": median(pictures),
        "planner_plan_ms": counters["plan.plan_us_max"] / 1000,
        "planner_jobs": float(counters["plan.jobs"]),
    }
