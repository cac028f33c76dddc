"""Jobs larger than a block on Slurm's topology/block: what is chosen for them is what Slurm starts."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from tests.integration.jobs import sbatch
from tests.integration.settled import fresh_status, until

pytestmark = [pytest.mark.cluster, pytest.mark.trixie]

ROUNDS = 60 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 8
NODES, BASE = 14, 2
SIZES = (2, 4, 16)  # a job of more than 4 nodes is within 16, below as few 4 as hold it
SCRIPT = "/run/sluice-cluster/scratch/job"
DESCRIPTION = {
    "nodes": [{"names": f"n[1-{NODES}]", "platform": "dgx-h100"}],
    "controllers": 1,
    "accounting": False,
    "topology_conf": "".join(f"BlockName=b{i} Nodes=n[{2 * i - 1}-{2 * i}]\n" for i in range(1, NODES // BASE + 1))
    + f"BlockSizes={','.join(map(str, SIZES))}\n",
    "slurm_conf": "TopologyPlugin=topology/block\nDefMemPerCPU=200\n"
    "SchedulerParameters=bf_interval=3,sched_interval=2,sched_min_interval=0,batch_sched_delay=0\n",
    "sluice": {
        "level": "place",
        "policy": CompiledPolicy(settings=Global(placement="sluice", planner_interval_ms=500)).render(),
    },
}


def counters(cluster: DevCluster) -> Counter[str]:
    return Counter(fresh_status(cluster)["counters"])


def running(cluster: DevCluster, job: str) -> list[int]:
    """The numbers of its nodes; empty while it waits."""
    shown = cluster.run(["squeue", "-h", "-t", "R", "-j", job, "-o", "%N"]).stdout.strip()
    names = cluster.run(["scontrol", "show", "hostnames", shown]).stdout.split() if shown else []
    return [int(re.sub(r"\D", "", name)) for name in names]


def waiting(cluster: DevCluster) -> set[str]:
    """Why jobs wait: only those that were tried have a reason."""
    return set(cluster.run(["squeue", "-h", "-t", "PD", "-o", "%R"]).stdout.split())


def test_slurm_starts_every_set_that_is_chosen(make_cluster: Callable[..., DevCluster], trixie_root: Path) -> None:
    """Jobs of 2 to 9 nodes come and go; stock Slurm refuses no start of the core's, and several blocks are used."""
    cluster = make_cluster(DESCRIPTION, root=trixie_root)
    script = cluster.folder / "scratch/job"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    topology = cluster.run(["scontrol", "show", "topology"]).stdout
    assert "AggregatedBlock=" in topology
    assert f"BlockSize={BASE}" in topology
    draw = random.Random(5)
    before, jobs, lower = counters(cluster), dict[str, int](), 0
    for _ in range(ROUNDS):
        for job in draw.sample(sorted(jobs), len(jobs) // 2):
            cluster.run(["scancel", job])
            del jobs[job]
        until(lambda: cluster.run(["squeue", "-h", "-t", "CG"]).stdout.strip() == "")
        for wanted in (draw.choice([1, 1, 2, 3]), draw.randint(5, 9)):
            options = [f"-N{wanted}", f"-n{wanted}", "-c1", "--gpus-per-node=8", "-t60"]
            jobs[sbatch(cluster, *options, SCRIPT, user="root")] = wanted
        until(lambda: waiting(cluster), lambda reasons: reasons <= {"(Resources)", "(Priority)"})
        for job, wanted in list(jobs.items()):
            nodes = running(cluster, job)
            assert len(nodes) in (0, wanted)
            lower += wanted > 4 and len({(node - 1) // 4 for node in nodes}) > 1
            if not nodes:
                cluster.run(["scancel", job])
                del jobs[job]
    found = counters(cluster)
    assert found["select.narrowed"] > before["select.narrowed"] + ROUNDS * 5 // 8
    assert lower > 2
    assert found["select.fell_back"] == before["select.fell_back"], "stock Slurm refused what the core had chosen"
