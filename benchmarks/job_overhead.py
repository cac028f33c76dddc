"""A whole job under Sluice beside a bare process: prolog, limiter, watchdog, agent and epilog, on real daemons.

The program does a fixed amount of work in steps, as training does: allocate, launch kernels, compute, free. It runs as
a bare process on the node without the agent, as a job on stock Slurm, and as a job with a share of a GPU under Sluice,
in turn. `running_time` is the program's own time from its first step to its last, the least of all rounds, as whatever
else runs on the machine only adds to it; every round is longer than several of the watchdog's periods. `cpu` is the
program's CPU time, which a busy machine disturbs less, and which does not have what the agent takes beside it.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from dev_cluster.cluster import DevCluster, require_root
from dev_cluster.description import parse_description
from dev_cluster.layout import DEFAULT_FOLDER
from sluice_base.errors import SluiceError

OPTIONS = [
    click.Option(["--rounds"], type=click.IntRange(1), default=7, show_default=True, help="Of all three."),
    click.Option(["--steps"], type=click.IntRange(10), default=1500, show_default=True, help="Of the program's work."),
]
MUST = {"running_time_overhead_percent": ("<=", 1.0)}
_NODE = "h100-1"
_AGENT = f"agent@{_NODE}"
_SHARE_MIB = 10240
_PROGRAM = """
import ctypes as c, sys, time
cu = c.CDLL("libcuda.so.1")
context, address = c.c_void_p(), c.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
scratch = c.c_uint64()
assert cu.cuMemAlloc_v2(c.byref(scratch), c.c_size_t(4096)) == 0
start, used = time.perf_counter(), time.process_time()
for step in range(int(sys.argv[1])):
    assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(64 << 20)) == 0
    for _ in range(32):
        cu.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None)  # the simulated driver runs none
        assert cu.cuMemsetD8Async(scratch, 0, c.c_size_t(64), None) == 0
    sum(i * i for i in range(50000))
    assert cu.cuMemFree_v2(address) == 0
print(time.perf_counter() - start, time.process_time() - used)
"""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: the program's own, its CPU time, and from the command to its end."""

    program: float
    cpu: float
    whole: float


def run(rounds: int, steps: int) -> Result:
    """Boot two nodes, one with the agent, and run the program on them in turn."""
    require_root("up")
    taken: dict[str, list[Times]] = {"bare": [], "stock": [], "job": []}
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        clusters = [DevCluster(Path(parent) / name) for name in ("stock", "sluice")]
        try:
            for cluster, agent in zip(clusters, ("false", "true"), strict=True):
                cluster.up(parse_description(_description(agent), source="benchmark"), attached=True)
            stock, sluice = clusters
            _time(sluice, True, steps // 10)  # whatever is loaded for the first time
            for _ in range(rounds):
                sluice.stop_daemon(_AGENT)
                taken["bare"].append(_time(sluice, False, steps))
                taken["stock"].append(_time(stock, True, steps))
                sluice.start_daemon(_AGENT)
                _wait(sluice)
                taken["job"].append(_time(sluice, True, steps))
        finally:
            for cluster in clusters:
                cluster.down()
    least = {name: min(one.program for one in times) for name, times in taken.items()}
    cpu = {name: min(one.cpu for one in times) for name, times in taken.items()}
    whole = {name: median(one.whole for one in times) for name, times in taken.items()}
    figures = {
        "running_time_overhead_percent": round(100 * (least["job"] / least["bare"] - 1), 3),
        "running_time_s": round(least["job"], 4),
        "cpu_overhead_percent": round(100 * (cpu["job"] / cpu["bare"] - 1), 3),
        "whole_s": round(whole["job"], 4),
        "whole_added_to_stock_ms": round(1000 * (whole["job"] - whole["stock"]), 1),
    }
    peer = {"running_time_s": round(least["bare"], 4), "whole_s": round(whole["stock"], 4)}
    spread = {
        f"{name}_s": [round(bound(one.program for one in times), 4) for bound in (min, max)]
        for name, times in taken.items()
    }
    return Result(figures, peer=peer, spread=spread)


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


def _time(cluster: DevCluster, as_job: bool, steps: int) -> Times:
    """Run the program once."""
    words = ["/usr/bin/python3", "-c", _PROGRAM, str(steps)]
    if as_job:
        command = cluster.command(["srun", "--quiet", "-w", _NODE, f"--gres=shard:{_SHARE_MIB}", *words], user="alice")
    else:
        command = cluster.command(words, node=_NODE, user="alice")
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode != 0:
        raise SluiceError(f"the program: {done.stderr.strip()[-500:]}")
    program, cpu = map(float, done.stdout.split())
    return Times(program, cpu, elapsed)


def _wait(cluster: DevCluster) -> None:
    """Until the agent answers."""
    end = time.monotonic() + 30
    while cluster.run(["sluice", "agent", "status", "--json"], node=_NODE, check=False).returncode != 0:
        if time.monotonic() > end:
            raise SluiceError("the agent does not answer")
        time.sleep(0.1)
