"""A job under Sluice beside a bare process: what limiter, watchdog and agent cost while it runs, and what a job costs.

**While it runs.** One program that works in steps, as training does (allocate, launch, compute, free), runs twice at
the same time on one node: as a bare process, and as a job with a share of a GPU. They take turns, a slice each, in an
order drawn by lot, on one processor, so that what else the machine does meets both alike. Where memory happens to lie
makes a process faster or slower by more than what is sought: there are many rounds, with new processes in each.
`program_cpu_percent` is the median of the pairs' ratios of the program's own CPU time. `agent_percent` is the CPU time
of the agent with its vendor's process in all that time, in percent of one processor, as if it had to share the job's
only one. `cost_percent` is both together. `elapsed_percent` compares the clock, by those pairs of slices in which
neither had to wait for a processor, and is left out where there are few of them. Intervals are of 95 %, by bootstrap
over the rounds.

**Once a job.** Prolog, the task's helper and epilog: an empty job under Sluice and one on stock Slurm, in turn;
`fixed_ms` is the median of the differences from srun's start to its end. `one_percent_job_s` is how long a job must run
until both costs together are one percent of it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result
from benchmarks.agent import is_agent
from dev_cluster import processes
from dev_cluster.cluster import DevCluster, require_root
from dev_cluster.description import parse_description
from dev_cluster.layout import DEFAULT_FOLDER
from sluice_base.errors import SluiceError

OPTIONS = [
    click.Option(["--rounds"], type=click.IntRange(5), default=30, show_default=True, help="Processes of each kind."),
    click.Option(["--pairs"], type=click.IntRange(3), default=6, show_default=True, help="Of slices, a round."),
    click.Option(["--slice-s"], type=click.FloatRange(0.05), default=0.4, show_default=True, help="Of work, about."),
    click.Option(["--jobs"], type=click.IntRange(5), default=30, show_default=True, help="Empty ones, of each kind."),
]
MUST = {"cost_percent": ("<=", 1.0)}
_NODE = "h100-1"
_SHARE_MIB = 10240
_ANSWER_S = 120.0
_RESAMPLES = 2000
# For each number on its input: so many steps, then elapsed and CPU seconds on its output.
_PROGRAM = """
import ctypes as c, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
cu = c.CDLL("libcuda.so.1")
context, address, scratch = c.c_void_p(), c.c_uint64(), c.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(c.byref(scratch), c.c_size_t(4096)) == 0
for line in iter(sys.stdin.readline, ""):
    start, used = time.perf_counter(), time.process_time()
    for step in range(int(line)):
        assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(64 << 20)) == 0
        for _ in range(32):
            cu.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None)  # the simulated driver runs none
            assert cu.cuMemsetD8Async(scratch, 0, c.c_size_t(64), None) == 0
        sum(i * i for i in range(50000))
        assert cu.cuMemFree_v2(address) == 0
    print(time.perf_counter() - start, time.process_time() - used, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Slice:
    """Seconds: on the clock, and of the program's CPU time."""

    elapsed: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs of a bare slice and the job's; how long all took, and the agent's CPU time in it, in seconds."""

    pairs: list[tuple[Slice, Slice]]
    elapsed: float
    agent: float


class Agent:
    """The agent of the node with its vendor's process, as the kernel lists them."""

    def __init__(self, cluster: DevCluster) -> None:
        self.pids = [pid for pid in _family(processes.marked(cluster.folder)) if is_agent(_command(pid))]
        if len(self.pids) != 2:
            raise SluiceError(f"{len(self.pids)} processes of the agent, not it and its vendor's")

    def cpu(self) -> float:
        """Seconds that all its threads have run."""
        files = (path for pid in self.pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(path.read_text().split()[0]) for path in files) / 1e9


def run(rounds: int, pairs: int, slice_s: float, jobs: int) -> Result:
    """Boot two nodes, one with the agent; slices in turn, then empty jobs in turn."""
    require_root("up")
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        stock, sluice = (DevCluster(Path(parent) / name) for name in ("stock", "sluice"))
        try:
            for cluster, agent in ((stock, "false"), (sluice, "true")):
                cluster.up(parse_description(_description(agent), source="benchmark"), attached=True)
            taken = [_take_round(sluice, pairs, slice_s) for _ in range(rounds)]
            whole = _take_jobs({"stock": stock, "job": sluice}, jobs)
        finally:
            for cluster in (stock, sluice):
                cluster.down()
    fixed = [1000 * (job - bare) for bare, job in zip(whole["stock"], whole["job"], strict=True)]
    figures = {name: round(function(taken), 3) for name, function in _FIGURES.items()}
    spread = {name: _interval(taken, function) for name, function in _FIGURES.items()}
    quiet = [replace(one, pairs=[pair for pair in one.pairs if not any(map(_waited, pair))]) for one in taken]
    if sum(len(one.pairs) for one in quiet) >= rounds * pairs // 3:
        quiet = [one for one in quiet if one.pairs]
        figures["elapsed_percent"] = round(_elapsed(quiet), 3)
        spread["elapsed_percent"] = _interval(quiet, _elapsed)
    figures |= {"fixed_ms": round(median(fixed), 1), "whole_ms": round(1000 * median(whole["job"]), 1)}
    spread["fixed_ms"] = _interval(fixed, median)
    left = 0.01 - figures["cost_percent"] / 100
    if left > 0:
        figures["one_percent_job_s"] = round(figures["fixed_ms"] / 1000 / left, 1)
    peer = {"whole_ms": round(1000 * median(whole["stock"]), 1)}
    return Result(figures, peer=peer, spread=spread)


def _program(rounds: Sequence[Round]) -> float:
    return 100 * (median(job.cpu / bare.cpu for one in rounds for bare, job in one.pairs) - 1)


def _agent(rounds: Sequence[Round]) -> float:
    return 100 * sum(one.agent for one in rounds) / sum(one.elapsed for one in rounds)


def _elapsed(rounds: Sequence[Round]) -> float:
    return 100 * (median(job.elapsed / bare.elapsed for one in rounds for bare, job in one.pairs) - 1)


_FIGURES: dict[str, Callable[[Sequence[Round]], float]] = {
    "cost_percent": lambda rounds: _program(rounds) + _agent(rounds),
    "program_cpu_percent": _program,
    "agent_percent": _agent,
}


def _waited(one: Slice) -> bool:
    """Whether it had to wait for a processor by more than what is sought."""
    return one.elapsed > 1.01 * one.cpu


def _interval(values: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> list[float]:
    """The 95 % interval of a figure, by bootstrap (Efron, 1979)."""
    chance = random.Random(1)
    found = sorted(figure(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return [round(found[int(share * _RESAMPLES)], 3) for share in (0.025, 0.975)]


def _description(agent: str) -> str:
    return f"""
nodes:
  - {{names: {_NODE}, platform: dgx-h100}}
controllers: 1
accounting: false
agent: {agent}
users:
  - {{name: alice}}
"""


def _srun(*words: str) -> list[str]:
    return ["srun", "--quiet", "-w", _NODE, f"--gres=shard:{_SHARE_MIB}", *words]


def _take_round(cluster: DevCluster, pairs: int, slice_s: float) -> Round:
    """A round: slices of a bare process and of a job's."""
    words = ["/usr/bin/python3", "-c", _PROGRAM, str(max(os.sched_getaffinity(0)))]
    commands = {
        "bare": cluster.command(words, node=_NODE, user="alice"),
        "job": cluster.command(_srun(*words), user="alice"),
    }
    programs = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    chance = random.Random()
    try:
        for program in programs.values():
            _work(program, 50)  # whatever is loaded for the first time
        agent = Agent(cluster)
        steps = max(1, round(slice_s * 50 / _work(programs["bare"], 50)[0]))

        began, used = time.perf_counter(), agent.cpu()
        taken = []
        for _ in range(pairs):
            order = chance.sample(list(programs), 2)
            found = {name: Slice(*_work(programs[name], steps)) for name in order}
            taken.append((found["bare"], found["job"]))
        made = Round(taken, time.perf_counter() - began, agent.cpu() - used)
        _check_held(cluster)
        return made
    finally:
        for program in programs.values():
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                program.communicate(timeout=_ANSWER_S)  # the end of its input is its own
            program.kill()


def _work(program: subprocess.Popen[str], steps: int) -> tuple[float, float]:
    """So many steps of a program: elapsed and CPU seconds."""
    assert program.stdin is not None and program.stdout is not None
    try:
        program.stdin.write(f"{steps}\n")
        program.stdin.flush()
    except BrokenPipeError:
        raise SluiceError(f"the program ended with {program.wait()}") from None
    line = program.stdout.readline().split()
    if len(line) != 2:
        raise SluiceError(f"the program ended with {program.wait()}")
    return float(line[0]), float(line[1])


def _take_jobs(clusters: dict[str, DevCluster], jobs: int) -> dict[str, list[float]]:
    """Seconds from srun's start to its end, of empty jobs."""
    taken: dict[str, list[float]] = {name: [] for name in clusters}
    chance = random.Random(3)
    for number in range(jobs + 1):
        for name in chance.sample(list(clusters), 2):
            command = clusters[name].command(_srun("true"), user="alice")
            start = time.perf_counter()
            subprocess.run(command, check=True, timeout=_ANSWER_S)
            if number:  # the first loads what is loaded for the first time
                taken[name].append(time.perf_counter() - start)
    return taken


def _family(roots: Iterable[int]) -> list[int]:
    """Processes and all below them, as this machine numbers them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = list(roots)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _check_held(cluster: DevCluster) -> None:
    """Whether it was Sluice that was measured."""
    told = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node=_NODE).stdout)
    grants = [grant for job in told["jobs"] for grant in job["grants"]]
    if [grant["rung"] for grant in grants] != ["limiter"] or not grants[0]["peak"]:
        raise SluiceError(f"the job was not held and watched: {grants}")
