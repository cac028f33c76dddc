"""The probe on the nodes of a real cluster: in their own file systems, inside jobs, and fetched to the controller."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from gpu_sim import load_platform
from gres_probe.inventory import Inventory
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

SLUICE = [sys.executable, "-m", "sluice.main"]
PLATFORMS = {
    "h100-1": "dgx-h100",
    "mi300x-1": "mi300x-platform",
    "max1550-1": "intel-max-1550x4",
    "mixed-1": "mixed",
    "mig-1": "dgx-h100-mig",
}


@pytest.mark.parametrize("node", PLATFORMS)
def test_each_node_sees_its_own_devices(demo: DevCluster, node: str) -> None:
    """No option and no environment: libraries, /sys, /proc and /dev are those of the node, and every file is there."""
    done = demo.run([*SLUICE, "probe", "--json"], node=node)
    inventory = Inventory.from_json(done.stdout, source=node)
    assert inventory.node == node and inventory.problems == []
    platform = load_platform(PLATFORMS[node])
    assert {gpu.pci_address for gpu in inventory.gpus} == {place.pci for place in platform.gpus}
    files = [file for gpu in inventory.gpus for file in (gpu.device_file, *gpu.extra_device_files)]
    files += [file for gpu in inventory.gpus for part in gpu.partitions for file in part.device_files]
    assert demo.run(["ls", *files], node=node).returncode == 0


def test_a_job_sees_its_own_gpus_only_and_gets_a_message(demo: DevCluster) -> None:
    job = ["srun", "--quiet", "-w", "h100-1", "--gpus=2"]
    done = demo.run([*job, *SLUICE, "probe", "--json"], user="alice", check=False)
    inventory = Inventory.from_json(done.stdout, source="job")
    assert len(inventory.gpus) == 2
    (problem,) = inventory.problems
    assert "2 of 8 GPUs" in problem.what and "outside of jobs" in problem.remedy


def test_inventories_of_all_nodes_come_through_srun(demo: DevCluster) -> None:
    """Including nodes of several GPU types, where each type has to be asked for by name."""
    folder = "/tmp/sluice-test-inventory"
    program = " ".join(SLUICE)
    collect = [*SLUICE, "inventory", "collect", "--srun", "--program", program, "--inventory-dir", folder]
    done = demo.run([*collect, "--timeout", "120"], cwd="/", timeout=300, check=False)
    try:
        assert done.returncode == 0, done.stderr
        assert f"{len(demo.nodes)} of {len(demo.nodes)} nodes" in done.stderr
        shown = demo.run([*SLUICE, "inventory", "--inventory-dir", folder, "--json"])
        nodes = {node["node"]: node for node in json.loads(shown.stdout)["nodes"]}
        assert set(nodes) == set(demo.nodes)
        for name, platform in PLATFORMS.items():
            assert len(nodes[name]["gpus"]) == len(load_platform(platform).gpus)
        topology = demo.run([*SLUICE, "topo", "h100-1", "--inventory-dir", folder]).stdout
        assert "NV18" in topology.splitlines()[1]
        counts = demo.run([*SLUICE, "inventory", "--inventory-dir", folder, "--by", "model", "-Pno", "model,gpus"])
        assert "AMD Instinct MI300X|9" in counts.stdout.splitlines()
    finally:
        demo.run(["rm", "-rf", folder])
    until(lambda: demo.run(["squeue", "--noheader", "--name=sluice-probe"]).stdout, lambda left: left == "")


def test_a_silent_node_is_given_up_and_leaves_no_job(demo: DevCluster, tmp_path: Path) -> None:
    program = "sh -c 'sleep 1000'"
    collect = [*SLUICE, "inventory", "collect", "rtx4090-1", "--srun", "--program", program, "--timeout", "8"]
    done = demo.run([*collect, "--inventory-dir", str(tmp_path)], cwd="/", timeout=120, check=False)
    assert done.returncode == 1 and "rtx4090-1: no answer within 8 s" in done.stderr
    until(lambda: demo.run(["squeue", "--noheader", "--name=sluice-probe"]).stdout, lambda left: left == "")
