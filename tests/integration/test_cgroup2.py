"""Slurm and the node agent on cgroup version 2: what jobs are held to, and what users can do with cgroups of theirs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from tests.integration.settled import PATIENCE, until

pytestmark = pytest.mark.cluster

NODE, OTHER = "h100-1", "h100-2"
PYTHON = "/usr/bin/python3"
UNIFIED = Path("/sys/fs/cgroup/unified")
HOLD = """
import ctypes, sys, time
cu, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0
print("at", time.time(), flush=True)
assert cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]) << 20)) == 0
time.sleep(600)
"""
# A mount namespace of the user's own, in which nothing is preloaded: the watchdog alone holds it.
ESCAPE = ["unshare", "-Urm", "sh", "-c", 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"', "x"]
OVER = [*ESCAPE, PYTHON, "-c", HOLD, "8192"]
LIMITED = "--gres=shard:4096"
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


def began(said: str) -> float:
    return float(next(line.split()[1] for line in said.splitlines() if line.startswith("at ")))


def ends(cluster: DevCluster, job: int) -> list[dict[str, Any]]:
    """The ends in a job's record, once it has one."""
    record = cluster.node_folder(NODE) / f"records/{job}.json"
    until(record.exists)
    return [event for event in json.loads(record.read_text())["events"] if event["action"] == "end"]


def test_a_step_over_its_limit_ends_and_its_slurmstepd_does_its_duty(cluster: DevCluster) -> None:
    """A step that is ended is one of which slurmstepd collects the tasks: their exit status reaches srun, and the job
    goes on with its next step. Without slurmstepd the job would be RUNNING for minutes."""
    script = 'echo job $SLURM_JOB_ID; srun --quiet "$@"; echo status $?; exec srun --quiet echo next'
    job = cluster.command(["salloc", "--quiet", "-w", NODE, LIMITED, "sh", "-c", script, "x", *OVER], user="alice")
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        said, _ = running.communicate(timeout=PATIENCE)
    number = int(said.split()[1])
    assert "step 0 is ended" in said and "status 137" in said and said.endswith("next\n")
    [end] = ends(cluster, number)
    assert 0 < end["time"] - began(said) < 2


def test_a_batch_job_over_its_limit_has_its_end(cluster: DevCluster) -> None:
    words = ["sbatch", "--parsable", "-w", NODE, LIMITED, "-o", "/dev/null", "--wrap", shlex.join(OVER)]
    number = int(cluster.run(words, user="alice").stdout)
    started = time.monotonic()
    until(lambda: cluster.run(["squeue", "-h", "-j", str(number)], check=False).stdout == "")
    assert time.monotonic() - started < 15
    shown = cluster.run(["scontrol", "show", "job", str(number)]).stdout
    assert "JobState=FAILED" in shown and "ExitCode=0:9" in shown
    assert len(ends(cluster, number)) == 1


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
