"""`sluice fabric` on a fabric of 1,000 nodes: ibsim's, asked by the real ibnetdiscover."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fabric_site import fat_tree, simulated, write_site
from tests.integration.conftest import MakeCluster

simulates = pytest.mark.skipif(
    shutil.which("ibsim") is None or shutil.which("ibnetdiscover") is None,
    reason="no ibsim-utils or infiniband-diags: make test-packages",
)
NODES = 1000


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


@pytest.mark.cluster
def test_a_job_opens_its_own_interfaces(make_cluster: MakeCluster) -> None:
    """`sluice gres write --nics` on a DGX H100 with ten."""
    nodes = [{"names": "h-1", "platform": "dgx-h100"}]
    cluster = make_cluster({"nodes": nodes, "nics": True, "controllers": 1, "accounting": False, "agent": True})
    (state,) = cluster.node_states()
    assert "nic:10" in state.gres
    for asked, opened in (("gpu:1", 0), ("gpu:2,nic:2", 2)):
        job = ["srun", f"--gres={asked}", "python3", "-c", OPEN]
        codes = [int(code) for code in cluster.run(job).stdout.split()]
        # No driver is behind the files: one that may be opened fails as absent.
        assert len(codes) == 10
        assert codes.count(errno.EPERM) == 10 - opened, codes
        near = cluster.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"]).stdout.split()
        assert len(near) == min(opened, 1), near
        own = cluster.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"], env={"NCCL_IB_HCA": "mine"})
        assert own.stdout == "mine\n"
