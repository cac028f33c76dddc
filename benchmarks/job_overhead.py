"""A job under Sluice next to a bare process: what limiter, watchdog and agent cost while it runs, and what a job costs.

**While it runs.** One program that works in steps, as training does (allocate, launch, compute, free), runs as a bare
process and within a job that has a share of a GPU, on one node and one processor. A round starts a new process of each:
where memory happens to lie makes one faster or slower than the next by more than the difference in question, so that
rounds are counted, not slices. In a round the two take turns in short slices, in random order, so that other load on
the machine affects both equally. `program_cpu_percent` is the Hodges-Lehmann estimate over the rounds of the difference
in the program's own CPU time, with the interval of Wilcoxon's signed ranks (Hodges and Lehmann, 1963).
`elapsed_percent` is the same by the clock, from slices in which neither had to wait for a processor; it is left out
where fewer than half of the rounds have any.

One job lasts for all rounds, so that what a job costs once is not counted as a rate. Meanwhile the kernel's CPU time of
the node's other processes is read, in percent of one processor: `agent_percent` of the node agent with its vendor's
process, `slurm_percent` of slurmd and the job's slurmstepds, with an interval by bootstrap over windows. `cost_percent`
is the sum of the three, as if the job had one processor only, which also did all of the others' work; its interval is
that of a sum of independent estimates (Zou and Donner, 2008). `cost_percent_high` is the upper end of the interval.

**Once a job.** An empty job under Sluice and one on stock Slurm, in turn. `fixed_ms` is what Sluice adds from srun's
start to its end (prolog, the task's helper, the step that the agent needs), `whole_ms` all of such a job, Slurm's part
included; `agent_cpu_ms_a_job` is the agent's CPU time for one, part of which comes after the job's end.
`one_percent_job_s` is how long a job must run until `fixed_ms` and the rate together are one percent of it,
`one_percent_bare_s` the same with `whole_ms`: compared with a process outside Slurm.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from benchmarks.agent import is_agent
from dev_cluster import processes
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER
from sluice.base.errors import SluiceError

OPTIONS = [
    click.Option(["--rounds"], type=click.IntRange(10), default=240, show_default=True, help="Processes of each kind."),
    click.Option(["--pairs"], type=click.IntRange(3), default=8, show_default=True, help="Of slices, a round."),
    click.Option(["--slice-s"], type=click.FloatRange(0.02), default=0.1, show_default=True, help="Of work, about."),
    click.Option(["--jobs"], type=click.IntRange(5), default=60, show_default=True, help="Empty ones, of each kind."),
]
MUST = {"cost_percent": ("<=", 1.0), "cost_percent_high": ("<=", 1.0)}
_NODE = "h100-1"
_SHARE_MIB = 10240
_ANSWER_S = 120.0
_RESAMPLES = 2000
_WINDOW_S = 31.0  # the rarest of the agent's duties runs every 30 s
_NORMAL = 1.96  # 95 %
# For each number on its input: runs so many steps, then prints elapsed and CPU seconds.
_PROGRAM = """
import ctypes as c, hashlib, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
cu = c.CDLL("libcuda.so.1")
context, address, scratch = c.c_void_p(), c.c_uint64(), c.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(c.byref(scratch), c.c_size_t(4096)) == 0
data = os.urandom(4 << 20)
for line in iter(sys.stdin.readline, ""):
    if line == "end\\n":
        break
    start, used = time.perf_counter(), time.process_time()
    for step in range(int(line)):
        assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(64 << 20)) == 0
        for _ in range(32):
            cu.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None)  # the simulated driver runs none
            assert cu.cuMemsetD8Async(scratch, 0, c.c_size_t(64), None) == 0
        hashlib.sha256(data).digest()
        assert cu.cuMemFree_v2(address) == 0
    print(time.perf_counter() - start, time.process_time() - used, flush=True)
"""
# One process after the other, each with the same standard input and output.
_HOST = 'while read -r line; do "$@"; echo ended; done'


@dataclass(frozen=True, slots=True)
class Slice:
    """Seconds: on the clock, and of the program's CPU time."""

    elapsed: float
    cpu: float

    @property
    def waited(self) -> bool:
        """Whether it waited for a processor for longer than the difference in question."""
        return self.elapsed > 1.01 * self.cpu


Pair = tuple[Slice, Slice]  # a bare slice and the job's


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds on the clock, and of CPU time of the agent and of Slurm's daemons in them."""

    elapsed: float
    agent: float
    slurm: float

    def since(self, other: Window) -> Window:
        """From another time until this one."""
        return Window(self.elapsed - other.elapsed, self.agent - other.agent, self.slurm - other.slurm)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its interval of 95 %."""

    value: float
    low: float
    high: float

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """Of a function that grows."""
        return Estimate(function(self.value), function(self.low), function(self.high))

    def plus(self, other: Estimate) -> Estimate:
        """The sum with an independent estimate."""
        value = self.value + other.value
        below = math.hypot(self.value - self.low, other.value - other.low)
        above = math.hypot(self.high - self.value, other.high - other.value)
        return Estimate(value, value - below, value + above)


class Processes:
    """Some of the cluster's processes on the node, as the kernel counts their time."""

    def __init__(self, cluster: DevCluster, wanted: Callable[[int], bool]) -> None:
        self.pids = [pid for pid in _family(processes.marked(cluster.folder)) if wanted(pid)]

    def cpu(self) -> float:
        """Seconds of all their threads, of those that have ended as well, and of children that they have waited for."""
        # ~pid << 3 | 2: the clock of a process's CPU time, as clock_getcpuclockid(3) makes it, which Python lacks.
        return sum(time.clock_gettime(~pid << 3 | 2) + _children_cpu(pid) for pid in self.pids)


def _agent(cluster: DevCluster) -> Processes:
    """The node agent with its guard and its vendor's process."""
    found = Processes(cluster, lambda pid: is_agent(_read(pid, "cmdline").replace("\0", " ")))
    if len(found.pids) != 3:
        raise SluiceError(f"{len(found.pids)} processes of the agent, not it, its guard and its vendor's")
    return found


class Beside:
    """What runs on the node for its job: the agent, slurmd and slurmstepds."""

    def __init__(self, cluster: DevCluster) -> None:
        self.agent = _agent(cluster)
        self.slurm = Processes(cluster, lambda pid: _read(pid, "comm").strip() in ("slurmd", "slurmstepd"))
        if len(self.slurm.pids) < 3:
            raise SluiceError(
                f"{len(self.slurm.pids)} of Slurm's processes, not slurmd, the job's step and its external one"
            )

    def read(self) -> Window:
        """Now, since some time in the past."""
        return Window(time.perf_counter(), self.agent.cpu(), self.slurm.cpu())


class Arm:
    """Runs the program as one new process after the other."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self) -> None:
        """A new process that has loaded all that it loads once."""
        self._write("begin")
        self.work(10)

    def work(self, steps: int) -> Slice:
        """So many steps."""
        elapsed, cpu = self._ask(str(steps), words=2)
        return Slice(float(elapsed), float(cpu))

    def end(self) -> None:
        """The process ends."""
        self._ask("end", words=1)

    def close(self) -> None:
        """No process any more."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_ANSWER_S)  # the end of its input is its own
        self._process.kill()

    def _ask(self, line: str, words: int) -> list[str]:
        assert self._process.stdout is not None
        self._write(line)
        answer = self._process.stdout.readline().split()
        if len(answer) != words:
            raise SluiceError(f"the program ended, and said {answer}")
        return answer

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SluiceError("the program ended") from None


@dataclass(slots=True)
class Taken:
    """What was measured."""

    rounds: list[list[Pair]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    whole: dict[str, list[float]] = field(default_factory=lambda: {"stock": [], "job": []})  # seconds of empty jobs
    agent_a_job: float = 0.0  # seconds of CPU time


def run(rounds: int, pairs: int, slice_s: float, jobs: int) -> Result:
    """Boot two nodes, one with the agent; slices in turn, then empty jobs in turn."""
    require_root("up")
    taken = Taken()
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        stock, sluice = (DevCluster(Path(parent) / name) for name in ("stock", "sluice"))
        try:
            for cluster, agent in ((stock, "false"), (sluice, "true")):
                cluster.up(parse_description(_description(agent), source="benchmark"), attached=True)
            _take_rounds(sluice, taken, rounds, pairs, slice_s)
            _take_jobs(stock, sluice, taken, jobs)
        finally:
            for cluster in (stock, sluice):
                cluster.down()
    return judge(taken)


def judge(taken: Taken) -> Result:
    """The figures of what was measured."""
    program = _program(taken.rounds, lambda one: one.cpu)
    beside = {
        "agent_percent": _share(taken.windows, lambda one: one.agent),
        "slurm_percent": _share(taken.windows, lambda one: one.slurm),
    }
    cost = program.plus(_share(taken.windows, lambda one: one.agent + one.slurm))
    fixed = _located([1000 * (job - bare) for bare, job in zip(taken.whole["stock"], taken.whole["job"], strict=True)])
    whole = _located([1000 * seconds for seconds in taken.whole["job"]])
    found = {"cost_percent": cost, "program_cpu_percent": program, **beside, "fixed_ms": fixed, "whole_ms": whole}
    quiet = [kept for pairs in taken.rounds if (kept := [pair for pair in pairs if not any(s.waited for s in pair)])]
    if len(quiet) >= len(taken.rounds) / 2:
        found["elapsed_percent"] = _program(quiet, lambda one: one.elapsed)
    figures = {name: round(one.value, 3) for name, one in found.items()}
    spread = {name: [round(one.low, 3), round(one.high, 3)] for name, one in found.items()}
    figures["cost_percent_high"] = round(cost.high, 3)
    for name, once in (("one_percent_job_s", fixed), ("one_percent_bare_s", whole)):
        if cost.value < 1:
            figures[name] = round(_length(once.value, cost.value), 1)
        if cost.high < 1:
            spread[name] = [round(_length(once.low, cost.low), 1), round(_length(once.high, cost.high), 1)]
    slices = [one for pairs in taken.rounds for pair in pairs for one in pair]
    figures["waited_percent"] = round(100 * sum(one.waited for one in slices) / len(slices), 1)
    figures["agent_cpu_ms_a_job"] = round(1000 * taken.agent_a_job, 1)
    return Result(figures, peer={"whole_ms": round(1000 * median(taken.whole["stock"]), 1)}, spread=spread)


def _length(once_ms: float, percent: float) -> float:
    """How many seconds a job runs of which both are one percent."""
    return once_ms / 1000 / (0.01 - percent / 100)


def _program(rounds: Sequence[Sequence[Pair]], cost: Callable[[Slice], float]) -> Estimate:
    """By how many percent the job's slices cost more than the bare ones of their pairs; a value a round."""
    ratios = [median(math.log(cost(job) / cost(bare)) for bare, job in pairs) for pairs in rounds]
    return _located(ratios).mapped(lambda ratio: 100 * math.expm1(ratio))


def _located(values: Sequence[float]) -> Estimate:
    """Where values lie: the median of all means of two, and the interval that goes with it (Hodges and Lehmann)."""
    count = len(values)
    means = sorted((one + other) / 2 for place, one in enumerate(values) for other in values[place:])
    deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    left_out = max(0, math.floor(count * (count + 1) / 4 - _NORMAL * deviation))
    return Estimate(median(means), means[left_out], means[-1 - left_out])


def _share(windows: Sequence[Window], cpu: Callable[[Window], float]) -> Estimate:
    """CPU time in percent of one processor; the interval by bootstrap (Efron, 1979)."""

    def of(chosen: Sequence[Window]) -> float:
        return 100 * sum(map(cpu, chosen)) / sum(one.elapsed for one in chosen)

    chance = random.Random(1)
    found = sorted(of(chance.choices(windows, k=len(windows))) for _ in range(_RESAMPLES))
    return Estimate(of(windows), found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)])


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


def _take_rounds(cluster: DevCluster, taken: Taken, rounds: int, pairs: int, slice_s: float) -> None:
    """New processes and their slices in each round; windows of some rounds each. All in one job."""
    words = ["/bin/sh", "-c", _HOST, "sh", "/usr/bin/python3", "-c", _PROGRAM, str(max(os.sched_getaffinity(0)))]
    bare = Arm(cluster.command(words, node=_NODE, user="alice"))
    job = Arm(cluster.command(_srun(*words), user="alice"))
    arms, chance, steps = (bare, job), random.Random(), 0
    try:
        for arm in arms:
            arm.begin()
        beside = Beside(cluster)
        steps = max(1, round(slice_s * 20 / bare.work(20).elapsed))
        for arm in arms:
            arm.end()
        before = beside.read()
        for number in range(rounds):
            for arm in arms:
                arm.begin()
            made = []
            for _ in range(pairs):
                found = {arm: arm.work(steps) for arm in chance.sample(arms, 2)}
                made.append((found[bare], found[job]))
            taken.rounds.append(made)
            if number == rounds - 1:
                _check_held(cluster)
            for arm in arms:
                arm.end()
            window = (now := beside.read()).since(before)
            if window.elapsed >= _WINDOW_S:
                taken.windows.append(window)
                before = now
        if not taken.windows:
            taken.windows.append(now.since(before))
    finally:
        for arm in arms:
            arm.close()


def _take_jobs(stock: DevCluster, sluice: DevCluster, taken: Taken, jobs: int) -> None:
    """Empty jobs, timed from srun's start to its end, and what the agent does for one."""
    agent, chance, began, used = _agent(sluice), random.Random(3), 0.0, 0.0
    for number in range(jobs + 1):
        if number == 1:  # the first loads what is loaded for the first time
            began, used = time.perf_counter(), agent.cpu()
        for name, cluster in chance.sample([("stock", stock), ("job", sluice)], 2):
            command = cluster.command(_srun("true"), user="alice")
            start = time.perf_counter()
            subprocess.run(command, check=True, timeout=_ANSWER_S)
            if number:
                taken.whole[name].append(time.perf_counter() - start)
    rate = sum(one.agent for one in taken.windows) / sum(one.elapsed for one in taken.windows)
    taken.agent_a_job = (agent.cpu() - used - rate * (time.perf_counter() - began)) / jobs


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


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _children_cpu(pid: int) -> float:
    """Seconds of CPU time of a process's children that have ended and been waited for."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[13]) + int(words[14])) / os.sysconf("SC_CLK_TCK")


def _check_held(cluster: DevCluster) -> None:
    """Raise an error unless Sluice was measured."""
    status = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node=_NODE).stdout)
    grants = [grant for job in status["jobs"] for grant in job["grants"]]
    if [grant["rung"] for grant in grants] != ["limiter"] or not grants[0]["peak"]:
        raise SluiceError(f"the job was not held and watched: {grants}")
