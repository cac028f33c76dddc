"""What a neighbour of a hostile tenant notices: with each attack running on a node, and with none.

Real daemons, simulated drivers, one GPU that all jobs share. Each attack runs in a job of an unprivileged user
(tests/integration/hostile_programs.py), at nice 19: on a node that confines jobs to their cores these are not the
daemons' cores. Meanwhile another user's steps exceed their limit, one after the other, and the time until each of them
is ended is measured; prologs are timed as whole processes, each next to a bare start of their interpreter; and the
agent's CPU time and memory are read, with its children and its guard. `peer` has the same figures with no attack, of
the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER
from gpu_sim.fields import set_values

_PROJECT = Path(__file__).parents[1]
ATTACKS = {
    "truncate": 0, "fill": 0, "seats": 0, "scribble": 0, "remove": 0, "locks": 0, "watch-files": 0,
    "processes": 10_000, "mappings": 1_000_000, "threads": 2_000, "forks": 0, "execs": 0, "churn": 0, "leaderless": 0,
    "names": 0, "signals": 0, "trace": 0, "dump": 0, "cgroups": 0,
    "crowd": 16, "requests": 0, "half-closed": 0, "json-bombs": 0, "descriptors": 0,
}  # fmt: skip
"""Attacks, and how many there are of what there can be many of."""
NONE = "quiet"
OPTIONS = [
    click.Option(["--attacks"], default=",".join(ATTACKS), show_default=True, help="Which ones, by comma."),
    click.Option(
        ["--runs"], type=click.IntRange(5), default=40, show_default=True, help="Excesses; three times as many prologs."
    ),
    click.Option(["--seconds"], type=click.IntRange(2), default=10, show_default=True, help="Of the agent's CPU time."),
]
MUST = {
    "excess_ended_s_p99": ("<=", 2.0),
    "prolog_ms_p95": ("<=", 50.0),
    "agent_core_percent": ("<=", 2.0),
    "agent_memory_mib": ("<=", 60.0),
    "run_growth_kib": ("<=", 8192.0),
    "nodes_drained": ("==", 0.0),
    "agents_lost": ("==", 0.0),
}
_NODE = "single-1"
_CLUSTER = f"""
nodes:
  - {{names: {_NODE}, platform: h100x1}}
controllers: 1
accounting: false
agent: true
users:
  - {{name: alice}}
  - {{name: mallory}}
"""
_LONGEST_S = 20.0  # after which an excess counts as never ended
_POLL_S = 0.005

# Runs as root on the node: answers each line of JSON with one. Times are of the clock that all processes share.
_EYES = r"""
import json, os, subprocess, sys, time
programs, poll, number = sys.argv[1], float(sys.argv[2]), 900000
ours = ("sluice.main agent", "prolog_epilog.sampling", "sluice.metrics.sender", "sluice-guard")
def agents(words=ours):
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if os.stat("/proc/" + entry).st_uid == 0:
                    line = open("/proc/%s/cmdline" % entry, "rb").read().replace(b"\0", b" ").decode(errors="replace")
                    if any(word in line for word in words):
                        yield int(entry)
            except OSError:
                pass
def ticks(pid):
    fields = open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
def pss(pid):
    return next(int(line.split()[1]) for line in open("/proc/%d/smaps_rollup" % pid) if line.startswith("Pss:"))
def run_kib():
    return int(subprocess.run(["du", "-sk", "/run/sluice"], capture_output=True, text=True).stdout.split()[0])
def lives(pid):
    try:
        return open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
def gone(pid, seconds):
    end = time.monotonic() + seconds
    while lives(pid):
        if time.monotonic() > end:
            return None
        time.sleep(poll)
    return time.monotonic()
def prolog():
    global number
    number += 1
    job = str(number)
    environment = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "2001", "SLURM_JOB_USER": "alice", "SLURM_JOB_GPUS": "0"}
    taken = []
    for name in ("sluice-prolog", "sluice-epilog"):
        start = time.monotonic()
        done = subprocess.run([programs + "/" + name], env=environment, capture_output=True, text=True)
        taken.append(1000 * (time.monotonic() - start))
        if done.returncode:
            return None
    return taken[0]
def python():
    start = time.monotonic()
    subprocess.run(["/usr/bin/python3", "-ISc", "pass"], capture_output=True, text=True, check=True)
    return 1000 * (time.monotonic() - start)
for line in sys.stdin:
    name, *words = json.loads(line)
    try:
        answer = {
            "agents": lambda: [*agents(ours[:1])],
            "ticks": lambda: sum(map(ticks, agents())),
            "pss": lambda: sum(map(pss, agents())),
            "run": run_kib,
            "gone": gone,
            "prolog": prolog,
            "python": python,
        }[name](*words)
    except (OSError, StopIteration, IndexError):
        answer = None
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Fare:
    """What a neighbour measured under one attack."""

    excess_s: list[float] = field(default_factory=list)
    prolog_ms: list[float] = field(default_factory=list)
    python_ms: list[float] = field(default_factory=list)
    core_percent: float = 0.0
    memory_mib: float = 0.0
    growth_kib: float = 0.0
    drained: int = 0
    lost: int = 0

    def figures(self) -> dict[str, float]:
        """All of them, without a name of an attack."""
        return {
            "excess_ended_s_p99": round(_percentile(self.excess_s, 0.99), 3),
            "prolog_ms_p95": round(_percentile(self.prolog_ms, 0.95), 2),
            "python_ms_p95": round(_percentile(self.python_ms, 0.95), 2),
            "agent_core_percent": round(self.core_percent, 3),
            "agent_memory_mib": round(self.memory_mib, 1),
            "run_growth_kib": self.growth_kib,
            "nodes_drained": float(self.drained),
            "agents_lost": float(self.lost),
        }


class _Eyes:
    """The program on the node."""

    def __init__(self, cluster: DevCluster) -> None:
        programs = _PROJECT / "prolog_epilog/programs"
        line = cluster.command(["/usr/bin/python3", "-c", _EYES, programs, str(_POLL_S)], node=_NODE)
        self._program = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def see(self, *words: Any) -> Any:
        """Its answer; None where it does not know."""
        assert self._program.stdin and self._program.stdout
        self._program.stdin.write(json.dumps(words) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._program.kill()
        self._program.wait()


def run(attacks: str, runs: int, seconds: int) -> Result:
    """Boot a node, measure it without an attack, then under each one."""
    require_root("up")
    names = [name for name in attacks.split(",") if name]
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}: no attack; known are {', '.join(ATTACKS)}", param_hint="--attacks")
    fares: dict[str, Fare] = {}
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent, tempfile.TemporaryDirectory() as shared:
        program = Path(shared) / "hostile_programs.py"
        Path(shared).chmod(0o755)
        program.write_text((_PROJECT / "tests/integration/hostile_programs.py").read_text())
        program.chmod(0o644)
        cluster = DevCluster(Path(parent) / "cluster")
        cluster.up(parse_description(_CLUSTER, source="benchmark"), attached=True)
        try:
            eyes = _Eyes(cluster)
            for name in (NONE, *names):
                click.echo(f"hostile: {name}", err=True)
                fares[name] = _measure(cluster, eyes, program, name, runs, seconds)
            eyes.close()
        finally:
            cluster.down()
    peace = fares.pop(NONE).figures()
    worst = {figure: max([fare.figures()[figure] for fare in fares.values()], default=0.0) for figure in peace}
    each = {
        f"{name.replace('-', '_')}_{figure}": fare.figures()[figure]
        for name, fare in fares.items()
        for figure in ("excess_ended_s_p99", "prolog_ms_p95", "python_ms_p95", "agent_core_percent")
    }
    return Result(worst | each, peer=peace)


def _measure(cluster: DevCluster, eyes: _Eyes, program: Path, name: str, runs: int, seconds: int) -> Fare:
    """One attack in a job of mallory's, and its effect on alice."""
    fare = Fare()
    agents, before = set(eyes.see("agents")) & set(eyes.see("agents")), eyes.see("run")  # no child that was just forked
    with _job(cluster, program, name, "mallory"), _job(cluster, program, NONE, "alice") as (job, _):
        ticks = eyes.see("ticks")
        time.sleep(seconds)
        after = eyes.see("ticks")
        if ticks is not None and after is not None and after >= ticks:
            fare.core_percent = 100 * (after - ticks) / os.sysconf("SC_CLK_TCK") / seconds
        for number in range(runs):
            if number < 3 or min(fare.excess_s) < _LONGEST_S:  # else nothing is ended any more
                fare.excess_s.append(_excess(cluster, eyes, program, job))
        for _ in range(3 * runs):
            fare.python_ms.append(eyes.see("python") or 0.0)
            taken = eyes.see("prolog")
            fare.prolog_ms.append(1000 * _LONGEST_S if taken is None else taken)
            if taken is None and len(fare.prolog_ms) >= 3:
                break
        fare.memory_mib = (eyes.see("pss") or 0) / 1024
        fare.growth_kib = float(max(0, (eyes.see("run") or 0) - (before or 0)))
    fare.lost = int(not agents <= set(eyes.see("agents")))
    _heal(cluster, fare)
    return fare


def _excess(cluster: DevCluster, eyes: _Eyes, program: Path, job: int) -> float:
    """Seconds that a step of alice's job lives that holds too much."""
    words = ["srun", "--quiet", "--overlap", f"--jobid={job}", "/usr/bin/python3", str(program), NONE]
    line = cluster.command(words, user="alice", cwd="/tmp")  # noqa: S108 - a folder that all hosts have
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as step:
        assert step.stdout
        said = step.stdout.readline().split()
        if said[:1] != ["up"]:
            return _LONGEST_S
        pid, folder = int(said[1]), cluster.node_folder(_NODE) / "gpu_sim"
        began = time.monotonic()
        set_values(folder, 0, {"process": f"{pid}:8G"})
        gone = eyes.see("gone", pid, _LONGEST_S)
        set_values(folder, 0, {"processes": "none"})
        if gone is None:
            step.kill()
            return _LONGEST_S
        step.wait(60)
        return float(gone - began)


@contextmanager
def _job(cluster: DevCluster, program: Path, name: str, user: str) -> Iterator[tuple[int, int]]:
    """A job that attacks; its number, and a process of it."""
    count = [f"COUNT={ATTACKS[name]}"] if ATTACKS.get(name) else []
    nice = ["nice", "-n", "19"] if user == "mallory" else []
    words = ["srun", "--quiet", "--mem=100", "--gres=shard:2048", "sh", "-c", 'echo $SLURM_JOB_ID; exec "$@"', "x"]
    line = [*words, "env", *count, *nice, "/usr/bin/python3", str(program), name]
    started = cluster.command(line, user=user, cwd="/tmp")  # noqa: S108 - a folder that all hosts have
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as step:
        assert step.stdout
        job = int(step.stdout.readline() or 0)
        said = step.stdout.readline().split()
        if not job or said[:1] != ["up"]:
            raise click.ClickException(f"{name}: its job did not start")
        try:
            yield job, int(said[1])
        finally:
            cluster.run(["scancel", "--full", "--signal=KILL", str(job)], check=False)
            cluster.run(["scancel", str(job)], check=False)
            try:
                step.wait(90)
            except subprocess.TimeoutExpired:
                step.kill()


def _heal(cluster: DevCluster, fare: Fare) -> None:
    """Count what was lost, and put it back for the next attack."""
    end = time.monotonic() + 90
    while cluster.run(["squeue", "-h"]).stdout and time.monotonic() < end:
        time.sleep(0.2)
    state = next(node.state for node in cluster.node_states())
    fare.drained = int(any(word in state for word in ("drain", "down", "fail")))
    for daemon in cluster.daemons():
        if daemon.status is not None and daemon.name.startswith("agent@"):
            cluster.start_daemon(daemon.name)
    if fare.drained:
        time.sleep(2)
        cluster.run(["scontrol", "update", f"nodename={_NODE}", "state=resume"], check=False)
    cluster.wait_idle(timeout=90)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
