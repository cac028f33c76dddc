"""The node agent and the plugin that holds tasks under newer Slurm (24.11, 26.05)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.settled import until
from tests.programs.begin import ESCAPE, HOLD

pytestmark = pytest.mark.cluster

NODE, MIXED = "h100-1", "mixed-1"
PYTHON = "/usr/bin/python3"
GIB = 1 << 30
HIP = """
import ctypes
hip, address = ctypes.CDLL("libamdhip64.so"), ctypes.c_void_p()
for gib in (40, 40, 1):
    print(hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(gib << 30)), flush=True)
"""
FILL = """
import ctypes as c
cu, count, address = c.CDLL("libcuda.so.1"), c.c_int(), c.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDeviceGetCount(c.byref(count)) == 0
for device in range(count.value):
    context, has, piece = c.c_void_p(), 520, 1 << 16
    assert cu.cuDevicePrimaryCtxRetain(c.byref(context), device) == 0 and cu.cuCtxSetCurrent(context) == 0
    while piece >= 2:
        if cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(piece << 20)) == 0:
            has += piece
        else:
            piece //= 2
    print(has, flush=True)
"""


@pytest.fixture(scope="module")
def cluster(newer_root: Path | None, make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    return make_shared_cluster(
        {
            "nodes": [{"names": NODE, "platform": "dgx-h100"}, {"names": MIXED, "platform": "mixed"}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "sluice": {"level": "off"},
            "slurm_conf": "SelectTypeParameters=CR_Core_Memory,MULTIPLE_SHARING_GRES_PJ",
            "users": [{"name": "alice"}],
        },
        root=newer_root,
    )


def run(cluster: DevCluster, *command: str, node: str = NODE) -> subprocess.CompletedProcess[str]:
    return cluster.run(["srun", "--quiet", "-w", node, *command], user="alice", check=False, timeout=120)


def last_record(cluster: DevCluster, node: str = NODE) -> dict[str, Any]:
    """Of the newest job, once its epilog has run."""
    folder = cluster.node_folder(node) / "records"
    end = time.monotonic() + 90
    while cluster.run(["squeue", "-h"]).stdout or not list(folder.glob("*.json")):
        assert time.monotonic() < end
        time.sleep(0.1)
    newest = max(folder.glob("*.json"), key=lambda path: int(path.stem))
    record: dict[str, Any] = json.loads(newest.read_text())
    return record


def test_a_limit_holds_whatever_the_environment(cluster: DevCluster) -> None:
    ran = run(cluster, "--gres=shard:4096", "env", "-i", PYTHON, "-c", HOLD, "0", "3000", "2000")
    assert ran.stdout.split() == ["0", "2"], ran.stderr
    [grant] = last_record(cluster)["grants"]
    assert (grant["limit"], grant["rung"], grant["refused"], grant["clean"]) == (4 * GIB, "limiter", 1, True)


def test_parts_of_several_gpus_are_held_to_the_mib_each(cluster: DevCluster) -> None:
    """Slurm gives two whole GPUs' memory and a part of a third, and only the job's credential says how much of each."""
    ran = run(cluster, "--gres=shard:200000", PYTHON, "-c", FILL)
    if not (cluster.layout.plugins / "prep_script.so").exists():  # which reads it, and needs private headers
        assert "200000 shards on 3 GPUs: Slurm does not report how many on each" in ran.stderr and not ran.stdout
        return
    sizes = [int(line) for line in ran.stdout.split()]
    assert len(sizes) == 3 and sum(sizes) == 200000 and sizes[2] < sizes[0] == sizes[1], ran.stderr
    grants = last_record(cluster)["grants"]
    assert [grant["limit"] >> 20 for grant in grants] == sizes
    tasks = ["-n3", "--tres-per-task=gres/shard:4000", "--gres-flags=one-task-per-sharing", "true"]
    assert run(cluster, *tasks).returncode == 0
    assert [grant["limit"] >> 20 for grant in last_record(cluster)["grants"]] == [4000] * 3


def test_amd_too(cluster: DevCluster) -> None:
    ran = run(cluster, f"--gres=shard:{50 * 1024}", PYTHON, "-c", HIP, node=MIXED)
    assert ran.stdout.split() == ["0", "2", "0"], ran.stderr


def test_an_escape_is_ended(cluster: DevCluster) -> None:
    words = ["unshare", "-Urm", "sh", "-c", ESCAPE, "x", PYTHON, "-c", HOLD, "30", "8192"]
    ended = run(cluster, "--gres=shard:4096", *words)
    assert ended.returncode != 0 and "limit 4G; step 0 is ended" in ended.stderr
    assert [event["action"] for event in last_record(cluster)["events"]].count("end") == 1


def test_a_task_opens_what_it_was_given(cluster: DevCluster) -> None:
    attempt = 'for f in /dev/nvidia[0-7]; do (exec 3<>$f) 2>&1 | grep -o "not permitted"; done; env'
    ran = run(cluster, "--gres=gpu:3", "bash", "-c", attempt)
    assert ran.stdout.count("not permitted") == 5 and "SLUICE_GPU_NUMA=" in ran.stdout
    assert [grant["rung"] for grant in last_record(cluster)["grants"]] == ["none"] * 3


def test_without_the_agent_no_task_starts(cluster: DevCluster) -> None:
    cluster.stop_daemon(f"agent@{MIXED}")
    refused = cluster.run(
        ["timeout", "20", "srun", "--quiet", "-w", MIXED, "--gres=shard:1024", "echo", "ran"], user="alice", check=False
    )
    assert "ran" not in refused.stdout
    said = "the node agent does not answer at /run/sluice/agent.sock"
    until(lambda: said in cluster.log(f"slurmd@{MIXED}").read_text())
