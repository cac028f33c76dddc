"""The node agent on a node with eight GPUs: its programs' times, and what watching and measuring cost under eight jobs.

Real daemons, simulated drivers. The programs are timed as whole processes on the node; the watchdog's figure is the
CPU time of the agent with its vendor process, over a time in which each GPU has a job that holds memory. Then the same
with metrics of all GPUs, jobs and processes once a second, sent to a database that takes them: the sender's process is
counted in. Memory is the proportional set size (PSS), which counts pages that processes share once.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import click

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER
from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicy

OPTIONS = [
    click.Option(["--runs"], type=click.IntRange(20), default=100, show_default=True, help="Runs of each program."),
    click.Option(["--seconds"], type=click.IntRange(5), default=30, show_default=True, help="Of watching."),
]
MUST = {
    "prolog_ms_p95": ("<=", 50.0),
    "epilog_ms_p95": ("<=", 50.0),
    "task_init_ms_p95": ("<=", 50.0),
    "watchdog_core_percent": ("<=", 0.5),
    "metrics_core_percent": ("<=", 1.0),
    "metrics_memory_mib": ("<=", 60.0),
}
NODE = "h100-1"
CLUSTER = f"""
nodes:
  - {{names: {NODE}, platform: dgx-h100}}
controllers: 1
accounting: false
agent: true
users:
  - {{name: alice}}
"""
_HOLD = """
import ctypes, time
cu, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0 and cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
time.sleep(3600)
"""
# On the node: one job after another through the programs, all eight GPUs each; prints milliseconds by program.
_LOOP = """
import json, os, subprocess, sys, time
programs, runs = sys.argv[1], int(sys.argv[2])
times = {"sluice-prolog": [], "sluice-task-init": [], "sluice-epilog": []}
for run in range(runs):
    job, gpus = str(900000 + run), ",".join(map(str, range(8)))
    environment = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "2001", "SLURM_JOB_USER": "alice", "SLURM_JOB_GPUS": gpus,
                   "SLUICE_JOB": job, "SLUICE_UID": "2001", "SLUICE_STEP": "whole", "SLUICE_GPUS": "0",
                   "SLUICE_SHARDS": "10240"}
    for name, taken in times.items():
        start = time.perf_counter()
        subprocess.run([f"{programs}/{name}"], env=environment, check=True, stdout=subprocess.DEVNULL)
        taken.append(1000 * (time.perf_counter() - start))
bare = []
for run in range(runs):
    start = time.perf_counter()
    subprocess.run(["/usr/bin/python3", "-IS", "-c", "pass"], check=True)
    bare.append(1000 * (time.perf_counter() - start))
print(json.dumps(times | {"python": bare}))
"""


def run(runs: int, seconds: int) -> Result:
    """Boot a node, time the programs, then watch it under load."""
    require_root("up")
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        cluster = DevCluster(Path(parent) / "cluster")
        cluster.up(parse_description(CLUSTER, source="benchmark"), attached=True)
        try:
            programs = Path(__file__).parents[1] / "prolog_epilog/programs"
            loop = [sys.executable, "-c", _LOOP, str(programs), str(runs)]
            times = json.loads(cluster.run(loop, node=NODE, timeout=500).stdout)
            percent = _watch(cluster, seconds)
            with _database() as (url, received):
                total = _measure(cluster, seconds, url)
                memory = _memory_mib(cluster)
                lines = received()
        finally:
            cluster.run(["scancel", "--user=alice"], check=False)
            cluster.down()
    if lines < 8 * seconds:
        raise click.ClickException(f"the database got {lines} lines in {seconds} s: metrics were not sent")
    figures = {
        "watchdog_core_percent": round(percent, 3),
        "metrics_core_percent": round(max(0.0, total - percent), 3),  # beyond the watchdog
        "metrics_total_core_percent": round(total, 3),
        "metrics_memory_mib": round(memory, 1),
        "metrics_lines_per_s": round(lines / seconds, 1),
    }
    for name, taken in times.items():
        word = name.removeprefix("sluice-").replace("-", "_")
        figures[f"{word}_ms_p50"] = round(_percentile(taken, 0.5), 2)
        figures[f"{word}_ms_p95"] = round(_percentile(taken, 0.95), 2)
    spread = {name: [round(min(taken), 2), round(max(taken), 2)] for name, taken in times.items()}
    return Result(figures, spread=spread)


def _watch(cluster: DevCluster, seconds: int) -> float:
    """Percent of a core that the agent and its children take while eight jobs hold memory."""
    start_holders(cluster, 8, "--gres=gpu:1")
    return _percent(cluster, seconds)


def start_holders(cluster: DevCluster, count: int, gres: str) -> None:
    """Jobs that hold GPU memory, once they do."""
    script = f"exec /usr/bin/python3 -c '{_HOLD}'"
    for _ in range(count):
        cluster.run(["sbatch", "-w", NODE, gres, "--mem=100", "-o", "/dev/null", "--wrap", script], user="alice")
    end = time.monotonic() + 60
    while _held(cluster) < count:
        if time.monotonic() > end:
            raise click.ClickException(f"{count} jobs did not come to hold memory within a minute")
        time.sleep(0.5)


def _measure(cluster: DevCluster, seconds: int, url: str) -> float:
    """The same with metrics once a second."""
    settings = NodeMetrics(interval=1, url=url, token_file="/nowhere")  # noqa: S106 - there is none
    (cluster.layout.slurm / FILE_NAME).write_text(NodePolicy(metrics=settings).render())
    time.sleep(3)  # the sender starts
    return _percent(cluster, seconds)


def _percent(cluster: DevCluster, seconds: int) -> float:
    before = _cpu_ticks(cluster)
    time.sleep(seconds)
    return 100 * (_cpu_ticks(cluster) - before) / os.sysconf("SC_CLK_TCK") / seconds


@contextmanager
def _database() -> Iterator[tuple[str, Callable[[], int]]]:
    """A database that takes all it gets; its address, and how many lines came."""
    lines = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802 - its name there
            """A batch."""
            nonlocal lines
            lines += gzip.decompress(self.rfile.read(int(self.headers["Content-Length"]))).count(b"\n")
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", lambda: lines
    finally:
        server.shutdown()
        server.server_close()


def _memory_mib(cluster: DevCluster) -> float:
    """PSS of the agent and its children."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; grep ^Pss: $p/smaps_rollup; done 2>/dev/null"
    lines = cluster.run(["sh", "-c", script], node=NODE).stdout.splitlines()
    return sum(int(pss.split()[1]) for command, pss in pairwise(lines) if is_agent(command) and pss) / 1024


def is_agent(command: str) -> bool:
    """Whether a command line is the agent's, its guard's, a vendor's process's or the sender's."""
    return any(word in command for word in ("sluice.main agent", "prolog_epilog.sampling", "sluice.metrics.sender"))


def _held(cluster: DevCluster) -> int:
    answer = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node=NODE).stdout)
    return sum(grant["peak"] > 0 for job in answer["jobs"] for grant in job["grants"])


def _cpu_ticks(cluster: DevCluster) -> int:
    """Clock ticks of the agent and its living children since they began."""
    listing = "for f in /proc/[0-9]*; do tr '\\0' ' ' < $f/cmdline; echo; cat $f/stat; done 2>/dev/null"
    lines = cluster.run(["sh", "-c", listing], node=NODE).stdout.splitlines()
    ticks = 0
    for command, state in pairwise(lines):
        if is_agent(command):
            fields = state.rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
