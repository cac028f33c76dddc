"""Slurm and the node agent on cgroup version 2: what jobs are held to, and what users can do with cgroups of theirs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpu_sim
from dev_cluster.agents import READY
from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from tests.integration.settled import PATIENCE, until
from tests.integration.versions import TREES
from tests.programs.begin import ESCAPE, FILL

pytestmark = pytest.mark.cluster

NODE, OTHER = "h100-1", "h100-2"
PYTHON = "/usr/bin/python3"
HOLD = """
import ctypes, sys, time
cu, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0
print("at", time.time(), flush=True)
assert cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]) << 20)) == 0
time.sleep(600)
"""
ESCAPING = ["unshare", "-Urm", "sh", "-c", ESCAPE, "x"]
OVER = [*ESCAPING, PYTHON, "-c", HOLD, "8192"]
LIMITED = "--gres=shard:4096"
CGROUP = "${SLURM_JOB_SLUID:-job_$SLURM_JOB_ID}"
"""The name of a job's cgroup, in its shell; that of Slurm 26.05 and later is the first."""
# Its main thread ends; another one allocates, and goes on.
DEAD_LEADER = """
import ctypes, sys, threading, time
before, after = sys.argv[2].split("print(")
def hold():
    time.sleep(0.3)
    exec("cu.cuCtxSetCurrent(context); print(" + after, globals())
exec(before)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(60, 0)
"""
# A cgroup namespace, in which the task's cgroup is the root, with a mount of version 2 of its own.
NAMESPACE = """
mount --bind /dev/null /etc/ld.so.preload && mount -t cgroup2 none /mnt && echo root $(grep ^0: /proc/self/cgroup)
{ mkdir /mnt/mine && echo $$ >/mnt/mine/cgroup.procs; } || echo stays
exec env -i "$@"
"""
LEAVE = """
import errno, json, os, sys, tempfile
def place():
    return open("/proc/self/cgroup").read().split("0::")[1].strip()
refused, task, own = [], "/sys/fs/cgroup" + place(), sys.argv[1]
def attempt(act):
    try:
        act()
    except OSError as error:
        refused.append(errno.errorcode[error.errno])
def write(path, text):
    os.write(os.open(path, os.O_WRONLY), text)
attempt(lambda: write(f"{own}/cgroup.procs", b"0"))
attempt(lambda: write(f"{tempfile.mkdtemp(dir=own)}/cgroup.procs", b"0"))
attempt(lambda: write(f"{tempfile.mkdtemp(dir=task)}/cgroup.procs", b"0"))
attempt(lambda: write(f"{task}/cgroup.freeze", b"1"))
print(json.dumps({"refused": refused, "place": place()}))
"""
# Goes where its user may go, and holds memory.
IN_OWN_CGROUP = """
import os, sys, threading
folder, words = sys.argv[2], sys.argv[3:]
os.makedirs(folder, exist_ok=True)
if "threads" in words:
    open(f"{folder}/cgroup.type", "w").write("threaded")
    open(f"{folder}/cgroup.threads", "w").write(str(threading.get_native_id()))
else:
    open(f"{folder}/cgroup.procs", "w").write("0")
program = sys.stdin.read()
before, after = program.split("time.sleep(600)")
exec(before)
if "freeze" in words:
    open(f"{folder}/cgroup.freeze", "w").write("1")
time.sleep(60)
"""
DESCRIPTION = {
    "nodes": [{"names": f"{NODE},{OTHER}", "platform": "dgx-h100"}],
    "controllers": 1,
    "accounting": False,
    "agent": True,
    "cgroup": "v2",
    "users": [{"name": "alice"}, {"name": "bob"}],
}


@pytest.fixture(scope="module", params=["native", *TREES])
def cluster(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    options = {} if request.param == "native" else {"root": request.getfixturevalue(f"{request.param}_root")}
    return make_shared_cluster(DESCRIPTION, **options)


def srun(*words: str) -> list[str]:
    return ["srun", "--quiet", "-w", NODE, *words]


def run(cluster: DevCluster, *words: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
    return cluster.run(srun(*words), user=user, check=False, timeout=120)


def test_a_job_is_in_its_cgroup_and_its_slurmstepd_next_to_it(cluster: DevCluster) -> None:
    words = run(cluster, "sh", "-c", f"echo {CGROUP}; grep ^0: /proc/self/cgroup /proc/$PPID/cgroup -h")
    job, own, stepd = words.stdout.split()
    step = f"0::/system.slice/{NODE}_slurmstepd.scope/{job}/step_0"
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


def test_on_a_kernel_that_lists_both_versions(cluster: DevCluster) -> None:
    """An agent that sees the lines of version 1, too, with nothing in them."""
    name, plain = f"agent@{NODE}", f"plain-agent@{NODE}"
    begun = cluster.facts["daemons"][name]
    cluster.stop_daemon(name)
    try:
        environment = {**begun["env"], "LD_PRELOAD": ""}
        cluster.start_program(plain, begun["argv"], node=NODE, env=environment)
        until(lambda: READY in cluster.log(plain).read_text())
        ran = run(cluster, LIMITED, "sh", "-c", 'echo job $SLURM_JOB_ID; exec "$@"', "x", *OVER)
        [end] = ends(cluster, int(ran.stdout.split()[1]))
        assert 0 < end["time"] - began(ran.stdout) < 2 and "step 0 is ended" in ran.stderr
        cluster.stop_daemon(plain)
    finally:
        cluster.start_daemon(name)
        until(lambda: cluster.log(name).read_text().count(READY) == 2)


def test_a_batch_job_over_its_limit_has_its_end(cluster: DevCluster) -> None:
    words = ["sbatch", "--parsable", "-w", NODE, LIMITED, "-o", "/dev/null", "--wrap", shlex.join(OVER)]
    number = int(cluster.run(words, user="alice").stdout)
    started = time.monotonic()
    until(lambda: cluster.run(["squeue", "-h", "-j", str(number)], check=False).stdout == "")
    assert time.monotonic() - started < 15
    shown = cluster.run(["scontrol", "show", "job", str(number)]).stdout
    assert "JobState=FAILED" in shown and "ExitCode=0:9" in shown
    assert len(ends(cluster, number)) == 1


@contextmanager
def waits(cluster: DevCluster, *words: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A limited job of alice's that runs until its input ends, its number, and the name of its cgroup."""
    script = f'echo $SLURM_JOB_ID {CGROUP}; "$@" & read -r line'
    job = cluster.command(srun(LIMITED, "sh", "-c", script, "x", *words), user="alice")
    with subprocess.Popen(
        job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as it:
        assert it.stdout is not None
        number, cgroup = it.stdout.readline().split()
        yield it, int(number), cgroup


WAYS = {
    "dead leader": [*ESCAPING, PYTHON, "-c", DEAD_LEADER, "8192", HOLD],
    "namespace": ["unshare", "-UrmC", "sh", "-c", NAMESPACE, "x", PYTHON, "-c", HOLD, "8192"],
}


@pytest.mark.parametrize("way", WAYS)
def test_ended_within_two_seconds(cluster: DevCluster, way: str) -> None:
    job = ["sh", "-c", 'echo job $SLURM_JOB_ID; exec "$@"', "x", *WAYS[way]]
    said = cluster.run([*srun(LIMITED), *job], user="alice", check=False, timeout=60).stdout
    assert way != "namespace" or ("root 0::/\n" in said and "stays" in said)
    [end] = ends(cluster, int(said.split()[1]))
    assert 0 < end["time"] - began(said) < 2


def delegated(cluster: DevCluster, uid: int) -> str:
    """A cgroup that is a user's own, as systemd makes one for each who logs in."""
    folder = f"/sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service"
    files = " ".join(f"{folder}/{name}" for name in ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"))
    cluster.run(["sh", "-c", f"mkdir -p {folder} && chown {uid}:{uid} {files}"], node=NODE)
    return folder


def in_delegated(cluster: DevCluster, uid: int, folder: str, *words: str) -> list[str]:
    """The command line of a user's process outside of all jobs, which begins in that cgroup and goes to `folder`."""
    begin = (
        f'echo $$ >{delegated(cluster, uid)}/cgroup.procs; exec setpriv --reuid={uid} --regid={uid} --clear-groups "$@"'
    )
    program = [PYTHON, "-c", IN_OWN_CGROUP, "8192", folder, *words]
    return cluster.command(["sh", "-c", begin, "x", *program], node=NODE)


@pytest.mark.parametrize("form", ["{0}/step_0", "system.slice/{1}_slurmstepd.scope/{0}/step_0/user/task_0", "threads"])
def test_a_users_cgroup_with_the_name_of_a_job_is_not_the_jobs(cluster: DevCluster, form: str) -> None:
    alice, bob = uids(cluster)
    with waits(cluster, PYTHON, "-c", HOLD, "1000") as (job, number, cgroup):
        assert job.stdout is not None and job.stdout.readline().startswith("at")
        own = delegated(cluster, bob)
        path = f"{own}/" + ("threads" if form == "threads" else form.format(cgroup, NODE))
        command = in_delegated(cluster, bob, path, *(["threads"] if form == "threads" else []))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
            assert neighbour.stdin is not None and neighbour.stdout is not None
            neighbour.stdin.write(HOLD)
            neighbour.stdin.close()
            assert neighbour.stdout.readline().startswith("at")
            time.sleep(3)
            assert job.poll() is None
            neighbour.kill()
        job.communicate("\n", timeout=PATIENCE)
        assert job.returncode == 0
        assert ends(cluster, number) == []


def test_nobody_leaves_his_job_for_a_cgroup_of_his_own(cluster: DevCluster) -> None:
    """Nor for one below the task's, in which Slurm 22.05 lets the user make others."""
    own = delegated(cluster, uids(cluster)[0])
    for begin in ([], ["unshare", "-Urm"]):
        tried = json.loads(run(cluster, *begin, PYTHON, "-c", LEAVE, own).stdout)
        assert tried["refused"] == ["EACCES"] * 4 and "_slurmstepd.scope/" in tried["place"]


def test_a_job_with_gpus_makes_no_cgroups_that_would_stay(cluster: DevCluster, full_scale: bool) -> None:
    """Slurm 22.05 gives a task's folder to the user, and leaves it there with all that was made in it."""
    make = "cd /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup) && mkdir mine; echo $PWD $?"
    for _ in range(100 if full_scale else 5):  # Slurm makes the folders while the step sets its limits
        task, one, _, other = run(cluster, "-n2", LIMITED, "sh", "-c", make).stdout.split()
        assert (one, other) == ("1", "1")
        until(partial(folders_of_tasks, cluster, task.partition("/step_0")[0]), lambda found: found == "")


def folders_of_tasks(cluster: DevCluster, job: str) -> str:
    """Of tasks and users below a job's cgroup. Slurm's own may stay: slurmstepd does not wait until the kernel has
    finished with their last process."""
    of_tasks = ["-name", "task_[0-9]*", "-o", "-name", "mine", "-o", "-not", "-user", "root"]
    return cluster.run(["find", job, *of_tasks], node=NODE, check=False).stdout


def test_who_freezes_himself_is_ended_all_the_same(cluster: DevCluster) -> None:
    """What a job's user has outside of it counts to the job."""
    alice, _ = uids(cluster)
    with waits(cluster, "true") as (job, number, _):
        command = in_delegated(cluster, alice, f"{delegated(cluster, alice)}/cold", "freeze")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frozen:
            said, _ = frozen.communicate(HOLD, timeout=PATIENCE)
            took = time.time() - began(said)
        assert frozen.returncode == -signal.SIGKILL and took < 2.5
        assert job.communicate("\n", timeout=PATIENCE) and job.returncode == 0
        assert [end["detail"]["step"] for end in ends(cluster, number)] == ["outside"]


def uids(cluster: DevCluster) -> list[int]:
    return [int(cluster.run(["id", "-u", name]).stdout) for name in ("alice", "bob")]


def test_the_drivers_own_limit_holds_the_whole_job(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    """The rung `driver`: a limit on the job's cgroup, which no other test has with a cgroup that Slurm made."""
    platform = tmp_path / "new.yaml"
    text = Path(gpu_sim.__file__).with_name("platforms").joinpath("dgx-h100.yaml").read_text()
    platform.write_text(text.replace("550.90.07", "615.10.01"))
    cluster = make_cluster({**DESCRIPTION, "nodes": [{"names": NODE, "platform": str(platform)}]})
    policy = NodePolicy(limits=NodeLimits(ladder=("driver", "limiter", "watchdog")))
    (cluster.slurm_conf_dir() / "sluice.node.json").write_text(policy.render())
    job = ["sh", "-c", 'echo $SLURM_JOB_ID; exec "$@"', "x", *ESCAPING, PYTHON, "-c", FILL]
    ran = run(cluster, LIMITED, *job)
    number, filled, code = ran.stdout.split()
    assert (int(filled), code) == (4096 - 520, "2"), ran.stderr
    assert ends(cluster, int(number)) == []
    [grant] = json.loads((cluster.node_folder(NODE) / f"records/{number}.json").read_text())["grants"]
    assert grant["rung"] == "driver" and grant["clean"]


FROZEN = {
    "v1": ("freezer", "slurm_*/uid_*/job_*/step_0", "freezer.state", "FROZEN"),
    "v2": ("unified", "system.slice/*.scope/job_*/step_0", "cgroup.freeze", "1"),
}


@pytest.mark.parametrize("version", FROZEN)
def test_nothing_of_it_is_left(make_cluster: Callable[..., DevCluster], version: str) -> None:
    """After a kill, with a frozen job on the node, and cgroups that others made."""
    hierarchy, pattern, file, word = FROZEN[version]
    folder = Path("/sys/fs/cgroup") / hierarchy
    if not folder.is_dir():
        pytest.skip(f"cgroup {version} is mounted elsewhere")
    nodes = [{"names": NODE, "platform": "none"}]
    cluster = make_cluster({**DESCRIPTION, "nodes": nodes, "agent": False, "cgroup": version})
    group = folder / cluster.layout.cgroup
    job = cluster.command(srun("sleep", "600"), user="alice")
    with subprocess.Popen(job, stderr=subprocess.DEVNULL) as running:
        try:
            [step] = until(lambda: list(group.glob(pattern)))
            until(lambda: any(path.read_text() for path in step.rglob("cgroup.procs") if path.parent.name != "slurm"))
            (step / file).write_text(word)
            (group / "user.slice/a/b").mkdir(parents=True)
            pid = init_pid(cluster.layout)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert cluster.down() and not group.exists()
        finally:
            running.kill()
