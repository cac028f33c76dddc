"""Slurm and the node agent on cgroup version 2: what jobs are held to, and what users can do with cgroups of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

NODE, OTHER = "h100-1", "h100-2"
PYTHON = "/usr/bin/python3"
UNIFIED = Path("/sys/fs/cgroup/unified")
DESCRIPTION = {
    "nodes": [{"names": f"{NODE},{OTHER}", "platform": "dgx-h100"}],
    "controllers": 1,
    "accounting": False,
    "agent": True,
    "cgroup": "v2",
    "users": [{"name": "alice"}, {"name": "bob"}],
}


@pytest.fixture(scope="module", params=["22.05", pytest.param("24.11", marks=pytest.mark.trixie)])
def cluster(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    options = {"root": request.getfixturevalue("trixie_root")} if request.param == "24.11" else {}
    return make_shared_cluster(DESCRIPTION, **options)


def srun(*words: str) -> list[str]:
    return ["srun", "--quiet", "-w", NODE, *words]


def run(cluster: DevCluster, *words: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
    return cluster.run(srun(*words), user=user, check=False, timeout=120)


def test_a_job_is_in_its_cgroup_and_its_slurmstepd_next_to_it(cluster: DevCluster) -> None:
    words = run(cluster, "sh", "-c", "echo $SLURM_JOB_ID; grep ^0: /proc/self/cgroup /proc/$PPID/cgroup -h")
    number, own, stepd = words.stdout.split()
    step = f"0::/system.slice/{NODE}_slurmstepd.scope/job_{number}/step_0"
    assert own.startswith(f"{step}/user/task_0") and stepd == f"{step}/slurm"


def test_a_job_opens_the_gpus_that_it_was_given_and_no_other(cluster: DevCluster) -> None:
    tries = 'for f in /dev/nvidia[0-7]; do (exec 3<>$f) 2>&1 | grep -o "No such device or\\|not permitted"; done'
    said = run(cluster, "--gres=gpu:3", "bash", "-c", tries).stdout.splitlines()
    assert (said.count("No such device or"), said.count("not permitted")) == (3, 5)


def test_nothing_of_it_is_left(make_cluster: Callable[..., DevCluster]) -> None:
    """After a kill at any moment, with a job on the node and cgroups of users' own, one of them frozen."""
    cluster = make_cluster({**DESCRIPTION, "nodes": [{"names": NODE, "platform": "none"}], "agent": False})
    group = UNIFIED / cluster.layout.cgroup
    if not group.parent.is_dir():
        pytest.skip("version 2 is mounted elsewhere")
    job = cluster.command(srun("sleep", "600"), user="alice")
    with subprocess.Popen(job, stderr=subprocess.DEVNULL) as running:
        try:
            until(lambda: list(group.glob("system.slice/*.scope/job_*/step_0/user/task_0")))
            frozen = next(group.glob("system.slice/*.scope/job_*")) / "cgroup.freeze"
            frozen.write_text("1")
            (group / "user.slice/a/b").mkdir(parents=True)
            pid = init_pid(cluster.layout)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert cluster.down() and not group.exists()
        finally:
            running.kill()
