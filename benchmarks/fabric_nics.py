"""GPUs near NICs: what choosing them costs in the core, and the pairs that jobs get on real daemons."""

from __future__ import annotations

import random
import re
import tempfile
import time
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
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import check, new_error_text

GPUS = 8  # of a node
NEAR = {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 7: 5, 8: 6, 9: 7}
"""DGX H100: the GPU below the same switches as each interface; interfaces 1 and 6 have none."""
_NICS = 10
_NODES = 4  # of the cluster of real daemons
_PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Chosen:
    """Decisions of the core; times in microseconds, without the clock's own."""

    place_p99: float
    choose_p99: float
    both_p99: float
    share: float
    """Of the pairs that there would be, were all near."""
    kept_share: float
    """The same, were the policy's own GPUs kept."""


def choose(nodes: int, decisions: int, seed: int) -> Chosen:
    """`decisions` jobs with NICs on a cluster in use."""
    cluster = Cluster(nodes)
    shape = cluster.add_shape(NodeShape((GpuShape("h100", 81920),) * GPUS))
    for _ in range(nodes):
        cluster.add_node(shape, 64_000, 1 << 20)
    groups = ffi.new("struct sluice_nic_groups *")
    groups.gpu_count, groups.nic_count = GPUS, _NICS
    groups.gpu_group = list(range(GPUS))
    groups.nic_group = [NEAR.get(nic, GPUS + nic) for nic in range(_NICS)]
    place_ns, choose_ns = (np.zeros(decisions, np.uint32) for _ in range(2))
    result, text = ffi.new("struct sluice_bench_nics_result *"), new_error_text()
    result.place_ns = ffi.cast("uint32_t *", ffi.from_buffer(place_ns))
    result.choose_ns = ffi.cast("uint32_t *", ffi.from_buffer(choose_ns))
    check(lib.sluice_bench_nics(cluster.handle, groups, decisions, seed, result, text), text)
    clock = int(lib.sluice_bench_clock_ns())
    place_us, choose_us = ((times.astype(np.int64) - clock) / 1000 for times in (place_ns, choose_ns))
    return Chosen(
        place_p99=float(np.percentile(place_us, 99)),
        choose_p99=float(np.percentile(choose_us, 99)),
        both_p99=float(np.percentile(place_us + choose_us, 99)),
        share=result.pairs / result.wanted,
        kept_share=result.kept_pairs / result.wanted,
    )


def near_share(rounds: int, seed: int, *, sluice: bool) -> float:
    """The part of the pairs of jobs with as many NICs as GPUs that are near, on four DGX H100 with real daemons.

    Each round submits jobs until the nodes are full, looks at what runs, and ends a random half of it.
    """
    draw = random.Random(seed)
    wanted = near = 0
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        cluster = DevCluster(Path(folder) / "cluster")
        cluster.up(parse_description(yaml.safe_dump(_description(sluice=sluice)), source="benchmark"), attached=True)
        try:
            running: set[str] = set()
            for _ in range(rounds):
                running |= {_submit(cluster, draw) for _ in range(12)}
                shown = _started(cluster)
                for job in shown.keys() & running:
                    gpus, nics = shown[job]
                    if gpus and nics:
                        wanted += len(gpus)
                        near += sum(NEAR.get(nic) in gpus for nic in nics)
                ended = draw.sample(sorted(running), len(running) * 2 // 3)
                cluster.run(["scancel", *ended])
                running -= set(ended)
        finally:
            cluster.down()
    return near / wanted


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


def _submit(cluster: DevCluster, draw: random.Random) -> str:
    gpus = draw.choice((1, 1, 2, 2, 4))
    gres = draw.choice((f"gpu:{gpus},nic:{gpus}",) * 6 + (f"gpu:{gpus}", "nic:1"))
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-n1", "-N1", f"--gres={gres}", "--wrap", "exec sleep 600"]
    return cluster.run(words).stdout.strip()


def _started(cluster: DevCluster) -> dict[str, tuple[set[int], set[int]]]:
    """The GPUs and interfaces of each job that runs, when Slurm has started all that it can."""
    end, before = time.monotonic() + _PATIENCE_S, -1
    while time.monotonic() < end:
        time.sleep(1.5)
        text = cluster.run(["scontrol", "show", "job", "-d", "-o"]).stdout
        lines = [line for line in text.splitlines() if " JobState=RUNNING " in line]
        if len(lines) == before and " JobState=COMPLETING " not in text:
            return {line.split("=", 1)[1].split()[0]: (_numbers(line, "gpu"), _numbers(line, "nic")) for line in lines}
        before = len(lines)
    raise SluiceError(f"jobs still started after {_PATIENCE_S} s", remedy="run the benchmark alone")


def _numbers(line: str, name: str) -> set[int]:
    found = re.search(rf" GRES=\S*?\b{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)", line)
    ends = [part.partition("-")[::2] for part in found[1].split(",")] if found else []
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}
