"""How long jobs go unwatched when the node agent is killed: from SIGKILL to the first sample of the next agent.

Real daemons, simulated drivers, a node with eight GPUs; without jobs, and with one on each GPU that has a limit and
holds memory. The agent's guard starts the next one and records when a vendor was sampled again: from then on the
watchdog enforces the limits. Each kill is the first within a minute for a guard that was started for it, as more of
them are handled otherwise (docs/node-agent.md). `ready` is when the agent answers prologs again. The peer is the least
that is possible: a bare start of the interpreter and of the vendor's library, one after the other.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result
from benchmarks.agent import CLUSTER, NODE, start_holders
from dev_cluster.agents import READY
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER

OPTIONS = [
    click.Option(["--runs"], type=click.IntRange(3), default=20, show_default=True, help="Kills, of each."),
]
_JOBS = 8
MUST = {f"jobs_{jobs}_{figure}": ("<=", 1.0) for jobs in (0, _JOBS) for figure in ("sampled_s_p50", "sampled_s_max")}
_AGENT = f"agent@{NODE}"
_SHARDS = 60_000  # more than half of a GPU: one job on each
# Root on the node: kills the agent; prints seconds until it was sampled and until it answered, and the jobs watched.
_KILL = r"""
import json, os, signal, socket, time
def guard():
    try:
        with open("/run/sluice/agent/guard") as file:
            return [line.split() for line in file]
    except FileNotFoundError:  # nothing to remember yet
        return []
def answers():
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect("/run/sluice/ask/0")
            link.sendall(b'{"do": "devices"}\n')
            return b"ok" in link.recv(1 << 16)
        except OSError:
            return False
def agent():
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/comm") as name, open(f"/proc/{entry}/task/{entry}/children") as children:
                if name.read() == "sluice-guard\n":
                    return int(children.read().split()[0])
        except OSError:
            pass
pid, began, ready, lasted = agent(), time.time(), None, -1
os.kill(pid, signal.SIGKILL)
while ready is None or lasted < 0:
    time.sleep(0.005)
    found = [words for words in guard() if words[0] == "outage"]
    if lasted < 0 and found:
        lasted = int(found[-1][4])
        sampled = (int(found[-1][2]) + lasted) / 1000 - began
    if ready is None and found and answers():
        ready = time.time() - began
    if time.time() > began + 60:
        raise SystemExit("the agent did not come back within a minute")
print(json.dumps([sampled, ready, sum(words[0] == "watched" for words in guard())]))
"""
_BARE = """
import subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.executable, "-c", "pass"], check=True)
subprocess.run([sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"], check=True)
print(time.perf_counter() - start)
"""


def run(runs: int) -> Result:
    """Boot a node, kill its agent again and again, without jobs and with eight."""
    require_root("up")
    figures: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        cluster = DevCluster(Path(parent) / "cluster")
        cluster.up(parse_description(CLUSTER, source="benchmark"), attached=True)
        try:
            bare = [_on_node(cluster, _BARE) for _ in range(runs)]
            for jobs in (0, _JOBS):
                if jobs:
                    start_holders(cluster, jobs, f"--gres=shard:{_SHARDS}")
                times = [_kill(cluster, jobs) for _ in range(runs)]
                for name, taken in zip(("sampled", "ready"), zip(*times, strict=True), strict=True):
                    figures[f"jobs_{jobs}_{name}_s_p50"] = round(median(taken), 3)
                    figures[f"jobs_{jobs}_{name}_s_max"] = round(max(taken), 3)
                    spread[f"jobs_{jobs}_{name}_s"] = [round(min(taken), 3), round(max(taken), 3)]
        finally:
            cluster.run(["scancel", "--user=alice"], check=False)
            cluster.down()
    peer = {f"jobs_{jobs}_sampled_s_p50": round(median(bare), 3) for jobs in (0, _JOBS)}
    return Result(figures, peer=peer, spread=spread)


def _on_node(cluster: DevCluster, program: str) -> Any:
    return json.loads(cluster.run([sys.executable, "-c", program], node=NODE, timeout=90).stdout)


def _kill(cluster: DevCluster, jobs: int) -> tuple[float, float]:
    """Seconds until the next agent has taken a sample, and until it answers."""
    cluster.stop_daemon(_AGENT)
    cluster.run(["rm", "-f", "/run/sluice/agent/guard"], node=NODE)
    before = cluster.log(_AGENT).read_text().count(READY)
    cluster.start_daemon(_AGENT)
    end = time.monotonic() + 60
    while cluster.log(_AGENT).read_text().count(READY) == before:
        if time.monotonic() > end:
            raise click.ClickException("the agent did not start within a minute")
        time.sleep(0.05)
    time.sleep(2)  # what comes after the start
    sampled, ready, watched = _on_node(cluster, _KILL)
    if watched != jobs:
        raise click.ClickException(f"{watched} of {jobs} jobs are watched")
    return sampled, ready
