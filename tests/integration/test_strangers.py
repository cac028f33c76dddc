"""Holders of GPU memory that seem to be nobody's, or somebody else's: each is found, and ended where it is to be.

The drivers are simulated, and say of processes what a test says; cgroups and Slurm are real.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from tests.integration.beds import Bed
from tests.integration.platforms import PAIR
from tests.integration.settled import PATIENCE, until

pytestmark = pytest.mark.cluster

NODE = "pair-1"
PYTHON = "/usr/bin/python3"
ALICE, BOB = 2001, 2002
SOON = 2.0  # seconds from what a job did to its end
IDLE = 5.0  # between samples where no job has GPUs, and nobody suffers
FREEZER = "/sys/fs/cgroup/freezer"
STAYS = ["sh", "-c", "echo $$ $SLURM_JOB_ID; exec sleep 600"]

# The leader exits alone, as pthread_exit in main does; a thread goes on.
LEADERLESS = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
threading.Thread(target=time.sleep, args=(600,)).start()
print(os.getpid(), os.environ["SLURM_JOB_ID"], flush=True)
libc.syscall(60, 0)
"""
FREEZES = """
folder=/sys/fs/cgroup/freezer$(sed -n s/.*freezer://p /proc/self/cgroup)
echo $$ $SLURM_JOB_ID
mkdir $folder/mine && echo $$ >$folder/mine/cgroup.procs && echo FROZEN >$folder/mine/freezer.state
exec sleep 600
"""
CROWD = """
import os, sys, time
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
print(os.getpid(), os.environ["SLURM_JOB_ID"], flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(
    make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory, bed: Bed
) -> DevCluster:
    platform = tmp_path_factory.mktemp("platform") / "pair.yaml"
    platform.write_text(PAIR)
    return make_shared_cluster(
        {
            "nodes": [{"names": NODE, "platform": str(platform)}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "users": [{"name": "alice"}, {"name": "bob"}],
            **bed.description,
        },
        **bed.options,
    )


def srun(mib: int, *command: str) -> list[str]:
    gres = [f"--gres=shard:{mib}"] if mib else []
    return ["srun", "--quiet", "-w", NODE, *gres, *command]


@contextmanager
def running(cluster: DevCluster, command: list[str], user: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A program that first says its number and its job's; both."""
    words = cluster.command(command, user=user)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            pid, job = map(int, program.stdout.readline().split())
            yield program, pid, job
        finally:
            cluster.run(["scancel", "--user", user], check=False)
            program.kill()


@contextmanager
def holding(cluster: DevCluster, pid: int, size: str, gpu: int = 0) -> Iterator[float]:
    """The driver says that a process holds so much; since when."""
    folder = cluster.node_folder(NODE) / "gpu_sim"
    set_values(folder, gpu, {"process": f"{pid}:{size}"})
    try:
        yield time.monotonic()
    finally:
        set_values(folder, gpu, {"processes": "none"})


@contextmanager
def holds(cluster: DevCluster, job: int, pid: int) -> Iterator[float]:
    """The same of 60 GiB of the job's own GPU."""
    with holding(cluster, pid, "60G", granted(cluster, job)) as since:
        yield since


def status(cluster: DevCluster) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node=NODE).stdout)
    return answer


def granted(cluster: DevCluster, job: int) -> int:
    [record] = [one for one in status(cluster)["jobs"] if one["job"] == job]
    return int(record["grants"][0]["index"])


def log(cluster: DevCluster) -> str:
    return cluster.log(f"agent@{NODE}").read_text()


def ended(program: subprocess.Popen[str], since: float, within: float = SOON) -> str:
    """What a program that is ended had said; `within`, and the time that srun takes to say so on a busy machine."""
    _, said = program.communicate(timeout=PATIENCE)
    assert program.returncode != 0
    assert time.monotonic() - since < within + 2, f"ended after {time.monotonic() - since:.1f} s"
    return said


def outbox(cluster: DevCluster, job: int) -> dict[str, Any]:
    folder = cluster.node_folder(NODE) / "outbox"
    until(lambda: list(folder.glob(f"{job}-*.json")))
    [file] = folder.glob(f"{job}-*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


@pytest.mark.cgroup1
def test_a_job_that_began_before_any_with_gpus_is_no_refuge(cluster: DevCluster) -> None:
    """The first test of all: the node's first job has no GPUs, and stays."""
    with running(cluster, srun(0, *STAYS), "bob") as (program, pid, job):
        cluster.run(srun(1024, "true"), user="alice", timeout=PATIENCE)
        with holding(cluster, pid, "60G", 0) as since:
            ended(program, since, IDLE)
    assert f"action=end job={job} step=0" in log(cluster)


@pytest.mark.cgroup1
def test_a_process_whose_leader_has_exited_is_its_jobs(cluster: DevCluster) -> None:
    command = srun(4096, PYTHON, "-c", LEADERLESS)
    with running(cluster, command, "bob") as (program, pid, job), holds(cluster, job, pid) as since:
        ended(program, since)
    file = cluster.node_folder(NODE) / f"records/{job}.json"
    until(file.exists)
    record = json.loads(file.read_text())
    assert "end" in [event["action"] for event in record["events"]] and record["grants"][0]["peak"] == 60 << 30


def test_a_job_without_gpus_is_ended_and_its_neighbour_is_not(cluster: DevCluster) -> None:
    with running(cluster, srun(4096, *STAYS), "alice") as (neighbour, _, one):
        gpu = granted(cluster, one)
        with (
            running(cluster, srun(0, *STAYS), "bob") as (program, pid, job),
            holding(cluster, pid, "60G", gpu) as since,
        ):
            said = ended(program, since)
        assert neighbour.poll() is None
    assert f"job {job}: 60G of GPU memory on /dev/nvidia" in said
    assert "which it was not given; step 0 is ended" in said
    record = outbox(cluster, job)
    assert (record["grants"], record["uid"], record["ended"] > 0) == ([], BOB, True)
    [event] = [event for event in record["events"] if event["action"] == "end"]
    assert event["detail"]["notified"] and event["detail"]["charged"] == 60 << 30


def test_a_gpu_that_a_job_was_not_given(cluster: DevCluster) -> None:
    """As by a descriptor that somebody passed to it."""
    with running(cluster, srun(4096, *STAYS), "bob") as (program, pid, job):
        gpu = 1 - granted(cluster, job)
        with holding(cluster, pid, "1G", gpu) as since:
            said = ended(program, since)
    assert f"job {job}: 1G of GPU memory on /dev/nvidia" in said and "which it was not given" in said


@pytest.mark.cgroup1(alone=True)
def test_a_cgroup_that_bears_a_neighbours_name_ends_nothing_of_it(cluster: DevCluster) -> None:
    with running(cluster, srun(4096, *STAYS), "alice") as (neighbour, _, one):
        folder = f"{FREEZER}/user.slice/job_{one}/step_0"
        enter = f"mkdir -p {folder}; echo $$ >{folder}/cgroup.procs; echo $$ 0; exec setpriv --reuid={BOB} sleep 600"
        words = cluster.command(["sh", "-c", enter], node=NODE)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as outside:
            try:
                assert outside.stdout is not None
                pid = int(outside.stdout.readline().split()[0])
                with holding(cluster, pid, "60G", granted(cluster, one)):
                    until(lambda: f"user={BOB} " in log(cluster))
                    time.sleep(1.5)
                    assert neighbour.poll() is None and outside.poll() is None
            finally:
                cluster.run(["kill", "-9", str(pid)], node=NODE, check=False)
        cluster.run(["rmdir", folder, str(Path(folder).parent), f"{FREEZER}/user.slice"], node=NODE, check=False)


def test_a_container_counts_to_the_owner_of_its_uids(cluster: DevCluster) -> None:
    (cluster.folder / "subuid").write_text("bob:100000:65536\n")
    cluster.run(["mount", "--bind", str(INSIDE / "subuid"), "/etc/subuid"], node=NODE)
    with running(cluster, srun(4096, *STAYS), "bob") as (program, _, job):
        words = cluster.command(["setpriv", "--reuid=100001", "sh", "-c", "echo $$; exec sleep 600"], node=NODE)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as outside:
            assert outside.stdout is not None
            pid = int(outside.stdout.readline())
            try:
                with holding(cluster, pid, "8G", granted(cluster, job)):
                    until(lambda: outside.poll() is not None)
            finally:
                outside.kill()
        assert program.poll() is None
    assert f"action=end job={job} step=outside" in log(cluster)


@pytest.mark.cgroup1(alone=True)
def test_who_freezes_himself_is_ended(cluster: DevCluster) -> None:
    """Version 1: a signal does not end what its user froze."""
    command = srun(4096, "sh", "-c", FREEZES)
    with running(cluster, command, "bob") as (program, pid, job), holds(cluster, job, pid) as since:
        ended(program, since)


@pytest.mark.cgroup1(alone=True)
@pytest.mark.parametrize("mib", [4096, 0])
@pytest.mark.parametrize("step", ["step_0", "step_extern"])
def test_nobody_has_a_freezer_of_his_own(cluster: DevCluster, mib: int, step: str) -> None:
    """Version 1: slurmd drains a node on which it cannot end a step, and no signal ends what is frozen."""
    script = f"! mkdir {FREEZER}$(sed -n s/.*freezer://p /proc/self/cgroup)/../{step}/mine"
    cluster.run(srun(mib, "sh", "-c", script), user="bob", timeout=PATIENCE)
    owner = ["stat", "-c", "%u", f"{FREEZER}/slurm_{NODE}"]
    assert cluster.run(owner, node=NODE).stdout == "0\n"


@pytest.mark.cgroup1(alone=True)
def test_a_task_finds_no_freezer_of_a_step_that_begins(cluster: DevCluster) -> None:
    """Version 1: it is its user's for a moment, in which another of the user's tasks could make a cgroup there."""
    cluster.run(srun(0, "sh", "-c", f"! ls {FREEZER}/slurm_{NODE}"), user="bob", timeout=PATIENCE)


@pytest.mark.cgroup1
@pytest.mark.parametrize("mib", [4096, 0])
def test_a_crowd_is_ended_as_one(cluster: DevCluster, mib: int) -> None:
    with running(cluster, srun(mib, PYTHON, "-c", CROWD, "1500"), "bob") as (program, pid, job):
        with holding(cluster, pid, "60G", granted(cluster, job) if mib else 0) as since:
            ended(program, since, SOON if mib else IDLE)
        left = cluster.run(["pgrep", "-u", str(BOB), "python3"], node=NODE, check=False)
        assert left.stdout == ""


def test_memory_that_a_job_leaves_with_its_users_other_job_drains_no_node(cluster: DevCluster) -> None:
    """As by a descriptor that another job keeps: the driver names no process."""
    folder = cluster.node_folder(NODE) / "gpu_sim"
    with (
        running(cluster, srun(1024, *STAYS), "alice") as (neighbour, _, _),
        running(cluster, srun(0, *STAYS), "bob") as (keeper, _, other),
        running(cluster, ["srun", "--quiet", "-w", NODE, "--gres=gpu:1", *STAYS], "bob") as (_, _, job),
    ):
        gpu = granted(cluster, job)
        set_values(folder, gpu, {"memory_used": "8G"})
        try:
            cluster.run(["scancel", str(job)], user="bob")
            keeper.communicate(timeout=PATIENCE)
        finally:
            set_values(folder, gpu, {"memory_used": "0"})
        file = cluster.node_folder(NODE) / f"records/{job}.json"
        until(file.exists)
        record = json.loads(file.read_text())
        assert record["grants"][0]["clean"] and "stray" in [event["action"] for event in record["events"]]
        assert neighbour.poll() is None
    assert [event["action"] for event in outbox(cluster, other)["events"]] == ["end"]
    assert not any("drain" in node.state for node in cluster.node_states())
