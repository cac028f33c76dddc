"""GPUs near NICs: what looking at NICs costs the core, and the pairs that jobs get on real daemons."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from policy.compiled import CompiledPolicy, Global
from sluice.base.errors import SluiceError
from sluice.core._bench import ffi, lib
from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape
from sluice.core.errors import check, new_error_text

GPUS = 8  # of a node
NEAR = {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 7: 5, 8: 6, 9: 7}
"""DGX H100: the GPU below the same switches as each interface; interfaces 1 and 6 have none."""
_NICS = 10
_NODES, _MOST_JOBS, _MOST_GPUS = 5, 7, 4  # on real daemons: one node has room for one more job, whatever runs
_PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Chosen:
    """Placements of the core; times in microseconds, without the clock's own."""

    without_p99: float
    """Of placements without NICs."""
    with_p99: float
    share: float
    """Of the pairs that there would be, were all near."""
    node_share: float
    """The same, were the node chosen without a look at its NICs."""
    elsewhere: float
    """Share of placements on another node."""


def choose(nodes: int, decisions: int, seed: int, gpus_per_nic: int = 1) -> Chosen:
    """`decisions` jobs with NICs on a cluster in use."""
    cluster = Cluster(nodes)
    groups = NicGroups(tuple(range(GPUS)), tuple(NEAR.get(nic, GPUS + nic) for nic in range(_NICS)))
    shape = cluster.add_shape(NodeShape((GpuShape("h100", 81920),) * GPUS, nics=groups))
    for _ in range(nodes):
        cluster.add_node(shape, 64_000, 1 << 20)
    without_ns, with_ns = (np.zeros(decisions, np.uint32) for _ in range(2))
    result, text = ffi.new("struct sluice_bench_nics_result *"), new_error_text()
    result.without_ns = ffi.cast("uint32_t *", ffi.from_buffer(without_ns))
    result.with_ns = ffi.cast("uint32_t *", ffi.from_buffer(with_ns))
    check(lib.sluice_bench_nics(cluster.handle, gpus_per_nic, decisions, seed, result, text), text)
    clock = int(lib.sluice_bench_clock_ns())
    without_us, with_us = ((times.astype(np.int64) - clock) / 1000 for times in (without_ns, with_ns))
    return Chosen(
        without_p99=float(np.percentile(without_us, 99)),
        with_p99=float(np.percentile(with_us, 99)),
        share=result.pairs / result.wanted,
        node_share=result.node_pairs / result.wanted,
        elsewhere=result.elsewhere / decisions,
    )


@dataclass(slots=True)
class Pairs:
    """Of jobs with as many interfaces as GPUs."""

    wanted: int = 0
    possible: int = 0
    """Whose GPU and interface were both free on the job's node when it started."""
    near: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    node: str
    gpus: frozenset[int]
    nics: frozenset[int]


def count_pairs(jobs: int, seed: int, *, sluice: bool) -> Pairs:
    """Start so many jobs one after another on five DGX H100 with real daemons; random ones end when seven run."""
    draw = random.Random(seed)
    pairs = Pairs()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        cluster = DevCluster(Path(folder) / "cluster")
        cluster.up(parse_description(yaml.safe_dump(_description(sluice=sluice)), source="benchmark"), attached=True)
        try:
            running: dict[str, _Held] = {}
            for _ in range(jobs):
                job, got = _start(cluster, draw)
                if got.gpus and got.nics:
                    pairs.wanted += len(got.gpus)
                    pairs.possible += min(len(got.gpus), _free_pairs(got.node, running.values()))
                    pairs.near += sum(NEAR.get(nic) in got.gpus for nic in got.nics)
                running[job] = got
                if len(running) == _MOST_JOBS:
                    ended = draw.sample(sorted(running), _MOST_JOBS // 2)
                    cluster.run(["scancel", *ended])
                    _wait(cluster, lambda text: " JobState=COMPLETING " not in text)
                    running = {job: held for job, held in running.items() if job not in ended}
        finally:
            cluster.down()
    return pairs


def _free_pairs(node: str, held: Iterable[_Held]) -> int:
    there = [one for one in held if one.node == node]
    return sum(not any(nic in one.nics or gpu in one.gpus for one in there) for nic, gpu in NEAR.items())


def _description(*, sluice: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "nodes": [{"names": f"h-[1-{_NODES}]", "platform": "dgx-h100"}],
        "nics": True,
        "controllers": 1,
        "accounting": False,
        "slurm_conf": "DefMemPerCPU=100\nSchedulerParameters=sched_min_interval=0,batch_sched_delay=0\n",
    }
    if sluice:
        described["sluice"] = {
            "level": "place",
            "policy": CompiledPolicy(settings=Global(placement="sluice")).render(),
        }
    return described


def _start(cluster: DevCluster, draw: random.Random) -> tuple[str, _Held]:
    """A job that runs, and what it holds."""
    gpus = draw.choice((1, 1, 2, 2, _MOST_GPUS))
    gres = draw.choice((f"gpu:{gpus},nic:{gpus}",) * 6 + (f"gpu:{gpus}", "nic:1"))
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-n1", "-N1", f"--gres={gres}", "--wrap", "exec sleep 600"]
    job = cluster.run(words).stdout.strip()
    line = _wait(cluster, lambda text: " JobState=RUNNING " in text, job)
    node = re.search(r" NodeList=(\S+)", line)
    assert node is not None
    return job, _Held(node[1], _numbers(line, "gpu"), _numbers(line, "nic"))


def _wait(cluster: DevCluster, good: Callable[[str], bool], *job: str) -> str:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        text = cluster.run(["scontrol", "show", "job", "-d", "-o", *job]).stdout
        if good(text):
            return text
        time.sleep(0.1)
    raise SluiceError(f"jobs did not start or end within {_PATIENCE_S} s", remedy="run the benchmark alone")


def _numbers(line: str, name: str) -> frozenset[int]:
    found = re.search(rf" GRES=\S*?\b{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)", line)
    ends = [part.partition("-")[::2] for part in found[1].split(",")] if found else []
    return frozenset(number for first, last in ends for number in range(int(first), int(last or first) + 1))
