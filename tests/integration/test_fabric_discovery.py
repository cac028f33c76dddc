"""`sluice fabric` on a fabric of 1,000 nodes: ibsim's, asked by the real ibnetdiscover."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fabric_site import fat_tree, simulated, write_site
from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from tests.integration.conftest import MakeCluster
from tests.integration.jobs import shown, submit
from tests.integration.settled import fresh_status, until
from tests.unit.prolog_epilog.nccl_rules import read

simulates = pytest.mark.skipif(
    shutil.which("ibsim") is None or shutil.which("ibnetdiscover") is None,
    reason="no ibsim-utils or infiniband-diags: make test-packages",
)
NODES = 1000
POLICY = CompiledPolicy(settings=Global(placement="sluice")).render()


def sluice(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice.main", "fabric", *words, "--slurm-conf", str(folder)]
    command += ["--ibnetdiscover", "-", "--slurm-version", "24.11.5"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@simulates
def test_discover_write_and_check(tmp_path: Path) -> None:
    write_site(tmp_path, NODES)
    file = tmp_path / "topology.conf"
    with simulated(tmp_path, fat_tree(NODES)) as environment:
        shown = sluice(tmp_path, environment, "discover")
        assert (shown.returncode, file.exists()) == (0, False), shown.stderr
        assert "40 switches, 1256 links, 1000 of 1000 nodes, 1 planes" in shown.stderr
        assert "+SwitchName=leaf32 Nodes=node[993-1000]\n+SwitchName=group-spine1 Switches=leaf[1-32]\n" in shown.stdout
        written = sluice(tmp_path, environment, "discover", "--write")
        assert (written.returncode, file.exists()) == (0, True), written.stderr
        assert sluice(tmp_path, environment, "discover", "--write").stderr.endswith("nothing to change\n")
        checked = sluice(tmp_path, environment, "check", "--json")
        assert (checked.returncode, json.loads(checked.stdout)["problems"]) == (0, [])
        text = file.read_text()
        file.write_text(text.replace("leaf1 Nodes=node[1-32]", "leaf1 Nodes=node[1-31]").replace("[33-64]", "[32-64]"))
        moved = sluice(tmp_path, environment, "check")
        assert moved.returncode == 1
        assert moved.stdout.startswith("other-place: node32: configured in leaf switch leaf2, whose other nodes")


@simulates
def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    """Eight nodes of slurm.conf have no cable: they are named, and nothing is written unless it must be."""
    write_site(tmp_path, 72)
    with simulated(tmp_path, fat_tree(64)) as environment:
        done = sluice(tmp_path, environment, "discover", "--write")
        assert done.returncode == 1
        assert "unreachable: node[65-72]: no port of theirs leads to a switch" in done.stderr
        assert not (tmp_path / "topology.conf").exists()
        assert sluice(tmp_path, environment, "discover", "--write", "--force").returncode == 0
    assert "node[33-64]\n" in (tmp_path / "topology.conf").read_text()


# Prints how opening each RDMA interface's device file ends.
OPEN = """
import os
for number in range(10):
    try:
        os.close(os.open(f"/dev/infiniband/uverbs{number}", os.O_RDWR))
    except OSError as error:
        print(error.errno)
"""


@pytest.fixture(scope="module")
def dgx(make_shared_cluster: MakeCluster) -> DevCluster:
    """A DGX H100 with ten interfaces, as `sluice gres write --nics` offers them."""
    description = {
        "nodes": [{"names": "h-1", "platform": "dgx-h100"}],
        "nics": True,
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "sluice": {"level": "place", "policy": POLICY, "environment": {"SLUICE_MIRROR_CHECK_EVERY": "1"}},
    }
    return make_shared_cluster(description)


@pytest.mark.cluster
def test_a_job_opens_its_own_interfaces(dgx: DevCluster) -> None:
    (state,) = dgx.node_states()
    assert "nic:10" in state.gres
    for asked, opened in (("gpu:1", 0), ("gpu:2,nic:2", 2)):
        job = ["srun", f"--gres={asked}", "python3", "-c", OPEN]
        codes = [int(code) for code in dgx.run(job).stdout.split()]
        # No driver is behind the files: one that may be opened fails as absent.
        assert len(codes) == 10
        assert codes.count(errno.EPERM) == 10 - opened, codes
        near = dgx.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"]).stdout.split()
        assert len(near) == min(opened, 1), near
        own = dgx.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"], env={"NCCL_IB_HCA": "mine"})
        assert own.stdout == "mine\n"


INTERFACES = [f"mlx5_{number}" for number in (0, 1, 3, 4, 5, 6, 7, 9, 10, 11)]

# Shows the file, and what another user than root may write of it and of the folders above it.
TOPOLOGY = """
cat $NCCL_TOPO_FILE
for path in $NCCL_TOPO_FILE $(dirname $NCCL_TOPO_FILE) /run/sluice/topology; do
    setpriv --reuid=65534 --regid=65534 --clear-groups test -r $path && echo readable
    setpriv --reuid=65534 --regid=65534 --clear-groups test -w $path && echo writable
done
true
"""
# How many GPUs the task's file has, and how many it cannot open.
COUNT = """
closed() { for file in /dev/nvidia[0-7]; do (: <>$file) 2>&1; done | grep -c permitted; }
echo $(grep -c '<gpu' $NCCL_TOPO_FILE) $(closed)
"""


@pytest.mark.cluster
def test_a_task_finds_its_part_of_the_node(dgx: DevCluster) -> None:
    inherited = {"NCCL_TOPO_FILE": "/of/the/batch.xml", "SLUICE_SET": "NCCL_TOPO_FILE=/of/the/batch.xml"}
    shown = dgx.run(["srun", "-n1", "-c2", "--gres=gpu:2,nic:2", "sh", "-c", TOPOLOGY], env=inherited).stdout
    text, end, access = shown.rpartition("</system>\n")
    assert access == "readable\n" * 3
    system = read(text + end)
    ends = {name: [one.attributes for one in system.all() if one.name == name] for name in ("gpu", "net")}
    assert [gpu["dev"] for gpu in ends["gpu"]] == ["0", "1"]
    assert {nic["name"] for nic in ends["net"]} <= set(INTERFACES) and len(ends["net"]) == 2
    for job in (["-n1", "--gres=gpu:3"], ["-n2", "--gpus-per-task=1"]):
        for line in dgx.run(["srun", *job, "sh", "-c", COUNT]).stdout.splitlines():
            has, closed = line.split()
            assert int(has) + int(closed) == 8
    mine = dgx.run(["srun", "--gres=gpu:1", "printenv", "NCCL_TOPO_FILE"], env={"NCCL_TOPO_FILE": "mine"})
    assert mine.stdout == "mine\n"
    until(lambda: dgx.run(["srun", "ls", "/run/sluice/topology"]).stdout == "")


NEAR = {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 7: 5, 8: 6, 9: 7}
"""The GPU next to each interface, by their numbers in Slurm; 1 and 6 are for storage."""


def devices(cluster: DevCluster, job: str, name: str) -> set[int]:
    """The numbers of a running job's GPUs or interfaces."""
    until(lambda: shown(cluster, job)["JobState"] == "RUNNING")
    line = cluster.run(["scontrol", "show", "job", "-d", job]).stdout
    found = re.search(rf"GRES=\S*?{name}(?::h100)?:\d+\(IDX:([\d,-]+)\)", line)
    assert found, line
    ends = [part.partition("-")[::2] for part in found[1].split(",")]
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def counters(cluster: DevCluster) -> dict[str, int]:
    shown = fresh_status(cluster)["counters"]
    return {name.removeprefix("select."): count for name, count in shown.items()}


@pytest.mark.cluster
def test_gpus_come_with_interfaces_near_them(dgx: DevCluster) -> None:
    """Stock Slurm takes the lowest numbers of each; here each GPU has its own next to it, as long as there are any."""
    jobs = []

    def start(*words: str) -> tuple[set[int], set[int]]:
        jobs.append(submit(dgx, "-c1", *words, user="root"))
        return devices(dgx, jobs[-1], "gpu"), devices(dgx, jobs[-1], "nic")

    before = counters(dgx)
    try:
        jobs.append(submit(dgx, "-c1", "--gres=nic:4", user="root"))
        assert devices(dgx, jobs[0], "nic") == {0, 1, 2, 3}
        # Who says which GPUs are to be together keeps those, and gets an interface that no other GPU has near.
        assert start("--gpu-affinity=numa", "--gres=gpu:1,nic:1") == ({0}, {6})
        gpus, nics = start("--gres=gpu:2,nic:2")
        assert {NEAR[nic] for nic in nics} == gpus, (gpus, nics)
        gpus, nics = start("--gres=gpu:h100:1,nic:1")
        assert {NEAR[nic] for nic in nics} == gpus, (gpus, nics)
        dgx.run(["scancel", *jobs[:2]])
        until(lambda: {shown(dgx, job)["JobState"] for job in jobs[:2]} == {"CANCELLED"})
        gpus, nics = start("--gres=gpu:2,nic:3")  # one more than it has GPUs: none that other GPUs have near
        assert {NEAR[nic] for nic in nics - {1, 6}} == gpus, (gpus, nics)
        own = dgx.run(["srun", "-n1", "--gres=gpu:1,nic:1", "sh", "-c", "echo $NCCL_IB_HCA $SLURM_STEP_GPUS"])
        hca, gpu = own.stdout.split()
        assert NEAR[INTERFACES.index(hca.removeprefix("="))] == int(gpu)
        after = counters(dgx)
        assert after["nic_pairs"] - before["nic_pairs"] == 8
        assert after["nic_pairs_near"] - before["nic_pairs_near"] == 6
        assert after["check_failures"] == 0
    finally:
        dgx.run(["scancel", *jobs])


@pytest.mark.cluster
def test_a_damaged_file_changes_nothing(dgx: DevCluster) -> None:
    file = dgx.slurm_conf_dir() / "nics.sluice.conf"
    file.write_text(file.read_text().replace("h-1 0,1", "h-1 1,0"))
    dgx.run(["scontrol", "reconfigure"])
    log = dgx.log("slurmctld@ctl1")
    until(lambda: "nics.sluice.conf: the checksum is not the file's" in log.read_text())
    near = counters(dgx)["nic_pairs_near"]
    dgx.run(["srun", "--gres=gpu:1,nic:1", "true"])
    assert counters(dgx)["nic_pairs_near"] == near + 1
