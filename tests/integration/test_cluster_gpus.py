"""The shipped cluster `demo`: GPUs of three vendors, which jobs see, and can open, only as far as they were given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.description import load_description, shipped_names
from gpu_sim import device_files, load_platform

pytestmark = pytest.mark.cluster

# Prints a line a device file: its name and how opening it ends.
OPEN = r"""
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        print(path, "opened")
    except OSError as error:
        print(path, {1: "EPERM", 6: "ENXIO", 19: "ENODEV"}.get(error.errno, error.errno))
"""
# With no driver behind them, device files that a job may open fail later than those that it may not.
ALLOWED = {"ENXIO", "ENODEV"}


def gpu_count(cluster: DevCluster, node: str) -> int:
    gres = next(status.gres for status in cluster.node_states() if status.name == node)
    return sum(int(count) for count in re.findall(r"gpu:[^:,]+:(\d+)", gres))


def test_every_shipped_cluster_names_platforms_that_exist() -> None:
    counts = {}
    for name in shipped_names():
        groups = load_description(name).nodes
        counts[name] = sum(len(group.hosts) * len(load_platform(group.platform).gpus) for group in groups)
    assert counts["scale-128"] == 1024
    assert counts["scale-1024"] == 8192


def test_every_gpu_of_the_platforms_reaches_slurm(demo: DevCluster) -> None:
    platforms = {node: load_platform(platform) for node, platform in demo.facts["nodes"].items()}
    assert len(platforms) == 8
    for node, platform in platforms.items():
        if node != "mig-1":
            assert gpu_count(demo, node) == len(platform.gpus), node
    assert gpu_count(demo, "mig-1") > len(platforms["mig-1"].gpus)  # instances are devices of their own
    assert "shard:" in next(status.gres for status in demo.node_states() if status.name == "rtx4090-1")
    shown = demo.run(["scontrol", "show", "node", "h100-1"]).stdout
    assert "Sockets=2" in shown
    assert "CoresPerSocket=56" in shown


@pytest.mark.parametrize("node", ["h100-1", "mi300x-1", "max1550-1", "a770-1", "mixed-1"])
def test_a_job_opens_the_gpu_that_it_was_given_and_no_other(demo: DevCluster, node: str) -> None:
    folder = demo.node_folder(node) / "gpu_sim"
    gpus = [f.path for f in device_files(folder) if re.fullmatch(r"/dev/(nvidia\d+|dri/renderD\d+)", f.path)]
    assert len(gpus) == gpu_count(demo, node)
    for count in (1, 2):
        job = ["srun", "-w", node, f"--gres=gpu:{count}", "python3", "-c", OPEN, *gpus]
        outcome = dict(line.split() for line in demo.run(job, user="alice").stdout.splitlines())
        assert sorted(outcome) == sorted(gpus)
        assert sum(result in ALLOWED for result in outcome.values()) == count
        assert sum(result == "EPERM" for result in outcome.values()) == len(gpus) - count


def test_a_job_opens_its_mig_instance_and_no_other(demo: DevCluster) -> None:
    # What Slurm guards is the capability file that each instance has for itself; it is opened for reading.
    lines = (demo.slurm_conf_dir() / "gres.conf").read_text().splitlines()
    instances = [line for line in lines if line.startswith("NodeName=mig-1 Name=gpu") and "nvidia-cap" in line]
    files = [file for line in instances for file in re.findall(r"/dev/nvidia-caps/nvidia-cap\d+", line)]
    assert len(files) >= 4
    job = ["srun", "-w", "mig-1", "--gres=gpu:h100_1g.10gb:1", "python3", "-c", OPEN.replace("O_RDWR", "O_RDONLY")]
    outcome = [line.split()[1] for line in demo.run([*job, *files], user="alice").stdout.splitlines()]
    assert sum(result in ALLOWED for result in outcome) == 1
    assert outcome.count("EPERM") == len(files) - 1


def test_a_job_that_asked_for_no_gpu_opens_none(demo: DevCluster) -> None:
    job = ["srun", "-w", "h100-1", "python3", "-c", OPEN, *(f"/dev/nvidia{minor}" for minor in range(8))]
    assert {line.split()[1] for line in demo.run(job, user="bob").stdout.splitlines()} == {"EPERM"}


def test_two_jobs_on_a_node_hold_different_gpus(demo: DevCluster) -> None:
    waits = "echo $SLURM_STEP_GPUS; touch both/$SLURM_JOB_ID; until [ $(ls both | wc -l) = 2 ]; do sleep 0.1; done"
    both = f"mkdir both; for i in 1 2; do srun -w rtx4090-1 --gres=gpu:2 sh -c '{waits}' & done; wait"
    held = demo.run(["bash", "-c", both], user="carol").stdout.split()
    assert sorted(",".join(held).split(",")) == ["0", "1", "2", "3"]


def test_a_job_sees_its_nodes_hardware_through_the_ordinary_loader(demo: DevCluster) -> None:
    look = (
        "import ctypes, os, socket\n"
        "library = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "assert library.nvmlInit_v2() == 0\n"
        "count = ctypes.c_uint()\n"
        "assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0\n"
        "print(socket.gethostname(), count.value, os.path.exists('/sys/bus/pci/devices/0000:1b:00.0'))"
    )
    job = ["srun", "-w", "h100-1", "--gres=gpu:3", "env", "-u", "LD_LIBRARY_PATH", "python3", "-c", look]
    assert demo.run(job, user="alice").stdout == "h100-1 3 True\n"
    elsewhere = demo.run(["bash", "-c", "ls /sys/bus/pci/devices /dev"], node="max1550-1").stdout.split()
    assert "0000:1b:00.0" not in elsewhere
    assert "nvidia0" not in elsewhere
    assert "dri" in elsewhere
    assert not Path("/dev/sluice-sim").exists()
    assert demo.run(["ls", "/dev"]).stdout.split().count("nvidia0") == Path("/dev/nvidia0").exists()


def test_a_job_across_nodes_of_three_vendors(demo: DevCluster) -> None:
    nodes = ["h100-1", "mi300x-1", "max1550-1"]
    job = ["srun", "-w", ",".join(nodes), "--gres=gpu:1", "sh", "-c", "echo $(hostname) $SLURM_NNODES"]
    assert sorted(demo.run(job, user="carol").stdout.splitlines()) == sorted(f"{node} 3" for node in nodes)
