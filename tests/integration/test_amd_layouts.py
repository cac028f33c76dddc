"""AMD partitions under real jobs: `sluice mig apply` on a node, its GRES in Slurm, and jobs on single partitions."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from versions import NATIVE_FIRST

from dev_cluster.cluster import DevCluster
from gpu_sim.fields import get_values, set_values
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from tests.integration.laid_out import restart_slurm, take_over_gres
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

NODE = "amd-1"
PYTHON = "/usr/bin/python3"
PART = (196592 - 284) // 8 // 256 * 256  # MiB of a partition that the probe offers, at the least
CONTEXT = 310
FILL = """
import ctypes as c, os
hip, p, got = c.CDLL("libamdhip64.so"), c.c_void_p(), 0
count = c.c_int()
assert hip.hipGetDeviceCount(c.byref(count)) == 0
while (code := hip.hipMalloc(c.byref(p), c.c_size_t(1 << 20))) == 0:
    got += 1
def opens(file):
    try:
        os.close(os.open(file, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:
        return True
    return True
files = ["/dev/dri/" + name for name in os.listdir("/dev/dri") if name.startswith("renderD")]
print(count.value, got, code, len(files), sum(map(opens, files)))
"""


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def cluster(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[DevCluster]:
    root: Path | None = request.getfixturevalue("trixie_root") if request.param == "trixie" else None
    made: DevCluster = make_shared_cluster(
        {
            "nodes": [{"names": NODE, "platform": "mi300x-platform"}],
            "controllers": 1,
            "cgroup": "v2" if root else "v1",  # 22.05 loads no program for so many devices (sluice doctor says so)
            "accounting": False,
            "agent": True,
            "users": [{"name": "alice"}],
        },
        **({"root": root} if root else {}),
    )
    take_over_gres(made, NODE)
    yield made


def apply(cluster: DevCluster, mode: str) -> subprocess.CompletedProcess[str]:
    policy = NodePolicy(limits=NodeLimits(amd_partitions={NODE: mode}))
    (cluster.slurm_conf_dir() / "sluice.node.json").write_text(policy.render())
    command = ["sluice", "mig", "apply", "--node", NODE, "--wait", "60"]
    return cluster.run(command, node=NODE, check=False, timeout=120)


def job(cluster: DevCluster, *options: str) -> tuple[list[int], dict[str, Any]]:
    """What a job that fills its device prints, and its only grant."""
    folder = cluster.node_folder(NODE) / "records"
    before = set(folder.glob("*.json"))
    ran = cluster.run(["srun", "--quiet", *options, PYTHON, "-c", FILL], user="alice", check=False, timeout=120)
    until(lambda: set(folder.glob("*.json")) - before)
    [record] = set(folder.glob("*.json")) - before
    [grant] = json.loads(record.read_text())["grants"]
    assert ran.returncode == 0 or grant["rung"] == "watchdog", ran.stderr
    return [int(word) for word in ran.stdout.split()], grant


def test_a_node_is_partitioned_and_each_partition_is_a_device(cluster: DevCluster) -> None:
    sim = cluster.node_folder(NODE) / "gpu_sim"
    done = apply(cluster, "cpx-nps4")
    assert [get_values(sim, index)["partitions"] for index in range(8)] == ["cpx-nps4"] * 8, done.stderr
    assert "GPU 0 (AMD Instinct MI300X): spx-nps1 -> cpx-nps4" in done.stdout
    assert done.returncode == 1 and "restart slurmctld and the node's slurmd" in done.stderr
    restart_slurm(cluster, NODE)
    until(lambda: apply(cluster, "cpx-nps4").returncode == 0)
    shown = cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%G %T"]).stdout
    assert "gpu:mi300x_cpx.nps4:64" in shown and "shard" in shown
    until(lambda: cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T"]).stdout.strip() == "idle")
    assert "nothing to change" in apply(cluster, "cpx-nps4").stderr


def test_a_job_on_a_partition_is_held_to_its_memory(cluster: DevCluster) -> None:
    told, grant = job(cluster, "--gres=gpu:mi300x_cpx.nps4:1")
    devices, got, code, files, opened = told
    assert (devices, code, opened) == (1, 2, 1) and files == 64
    assert PART <= got + CONTEXT <= PART + 256  # all of the partition, and hipErrorOutOfMemory beyond
    assert (grant["rung"], grant["clean"]) == ("mig", True)
    assert re.fullmatch(r"[0-9a-f-]{36}/[0-7]", grant["uuid"])


def test_a_node_that_starts_again_lays_itself_out(cluster: DevCluster) -> None:
    """As after a reboot: the modes are gone, the files of /run with them; then the unit, the agent, slurmd, in turn."""
    sim = cluster.node_folder(NODE) / "gpu_sim"

    def registered() -> str:
        shown = cluster.run(["scontrol", "show", "node", NODE]).stdout
        return shown.partition("SlurmdStartTime=")[2].split()[0]

    def restore(check: bool = True) -> subprocess.CompletedProcess[str]:
        return cluster.run(["sluice", "mig", "restore", "--node", NODE], node=NODE, check=check, timeout=120)

    in_service = restore(check=False)
    assert in_service.returncode == 1 and "its agent has run since it started" in in_service.stderr
    before = registered()
    for daemon in (f"slurmd@{NODE}", f"agent@{NODE}"):
        cluster.stop_daemon(daemon)
    for index in range(8):
        set_values(sim, index, {"partitions": "spx-nps1"})
    cluster.run(["rm", "/run/sluice/agent/lock"], node=NODE)
    assert restore().stdout.count("spx-nps1 -> cpx-nps4") == 8
    cluster.start_daemon(f"agent@{NODE}")
    until(lambda: cluster.run(["sluice", "agent", "status"], node=NODE, check=False).returncode == 0)
    cluster.start_daemon(f"slurmd@{NODE}")
    until(lambda: registered() != before)
    until(lambda: cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T"]).stdout.strip() == "idle")
    told, grant = job(cluster, "--gres=gpu:mi300x_cpx.nps4:1")
    assert told[0] == 1 and (grant["rung"], grant["clean"]) == ("mig", True)


def test_less_than_a_partition_is_held_by_the_watchdog(cluster: DevCluster) -> None:
    _, grant = job(cluster, "--gres=shard:2048")
    assert (grant["limit"] >> 20, grant["rung"]) == (2048, "watchdog")
    assert "one PCI address" in grant["passed_over"]["limiter"]
