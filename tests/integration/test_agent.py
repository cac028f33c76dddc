"""The node agent under real jobs: limits that hold, escapes that end, and what happens without it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dev_cluster.agents import READY
from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from policy.compiled import CompiledPolicy, Tenant
from sluice.profile.records import Kind, Reason, read
from tests.integration.beds import Bed
from tests.integration.platforms import SINGLE
from tests.integration.settled import PATIENCE, lasts_until, until
from tests.programs.begin import ESCAPE, HOLD

pytestmark = pytest.mark.cluster

NODE, MIXED, INTEL = "single-1", "mixed-1", "intel-1"
AGENT = f"agent@{NODE}"
GIB = 1 << 30
PYTHON = "/usr/bin/python3"
PROGRAMS = INSIDE / "programs"
JOB = ["SLURM_JOB_ID=900001", "SLURM_JOB_UID=2001", "SLURM_JOB_USER=alice"]
OUT_OF_MEMORY = "2"


EPILOG = f"""#!/bin/sh
setsid {INSIDE}/home/alice/left 60 8192 >{INSIDE}/home/alice/said 2>&1 &
sleep 2
"""


@pytest.fixture(scope="module")
def cluster(
    make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory, bed: Bed
) -> DevCluster:
    platform = tmp_path_factory.mktemp("platform") / "single.yaml"
    platform.write_text(SINGLE)
    return make_shared_cluster(
        {
            "nodes": [
                {"names": NODE, "platform": str(platform)},
                {"names": MIXED, "platform": "mixed"},
                {"names": INTEL, "platform": "arc-a770x2"},
            ],
            **bed.description,
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "users": [{"name": "alice"}, {"name": "bob"}],
            "slurm_conf": "SchedulerParameters=nohold_on_prolog_fail",
        },
        **bed.options,
    )


@pytest.fixture
def healthy(cluster: DevCluster) -> Iterator[None]:
    """Puts the node right after a test that drains it."""
    yield
    cluster.run(["scancel", "--full", "--signal=KILL", "--partition=main"], check=False)
    if next(daemon for daemon in cluster.daemons() if daemon.name == AGENT).status is not None:
        restart(cluster)
    for job in status(cluster)["jobs"]:  # of an epilog that had no agent
        words = ["env", f"SLURM_JOB_ID={job['job']}", "SLURM_JOB_GPUS=0", str(PROGRAMS / "sluice-epilog")]
        cluster.run(words, node=NODE)
    cluster.run(["scontrol", "update", f"nodename={NODE}", "state=resume"], check=False)
    cluster.wait_idle(timeout=PATIENCE)


def restart(cluster: DevCluster) -> None:
    """Start the agent and wait until it answers."""
    before = log(cluster).count("action=ready")
    cluster.start_daemon(AGENT)
    until(lambda: log(cluster).count("action=ready") > before)


def log(cluster: DevCluster, node: str = NODE) -> str:
    return cluster.log(f"agent@{node}").read_text()


def srun(mib: int, *command: str) -> list[str]:
    return ["srun", "--quiet", "-w", NODE, f"--gres=shard:{mib}", *command]


def hold(seconds: float, *sizes: int) -> list[str]:
    return [PYTHON, "-c", HOLD, str(seconds), *map(str, sizes)]


def escaping(command: list[str]) -> list[str]:
    return ["unshare", "-Urm", "sh", "-c", ESCAPE, "escape", *command]


def run(cluster: DevCluster, user: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    return cluster.run(command, user=user, check=False, timeout=180)


def records(cluster: DevCluster) -> list[dict[str, Any]]:
    """What ended, by job."""
    folder = cluster.node_folder(NODE) / "records"
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda record: record["job"])


def last_record(cluster: DevCluster, user: str, after: int) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [record for record in records(cluster) if record["user"] == user and record["job"] > after]

    newest: dict[str, Any] = until(found)[-1]
    return newest


def newest(cluster: DevCluster) -> int:
    """The last job's number, when the records of all are written."""
    until(lambda: not status(cluster)["jobs"])
    return max((record["job"] for record in records(cluster)), default=0)


def status(cluster: DevCluster, node: str = NODE) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node=node).stdout)
    return answer


@pytest.mark.cgroup1
def test_two_tenants_on_one_gpu_one_refused_and_one_ended(cluster: DevCluster) -> None:
    before = newest(cluster)
    honest = cluster.command(srun(30 * 1024, *hold(4, 20 * 1024, 10 * 1024, 9 * 1024)), user="alice")
    escape = srun(49 * 1024, *escaping(hold(600, 30 * 1024, 19 * 1024)))
    with subprocess.Popen(honest, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert [program.stdout.readline().strip() for _ in range(3)] == ["0", OUT_OF_MEMORY, "0"]
        ended = run(cluster, "bob", escape)  # which would hold the memory for ten minutes
        assert program.wait(PATIENCE) == 0  # the other tenant's job goes on to its end
    assert ended.returncode != 0
    assert "of GPU memory on /dev/nvidia" in ended.stderr and "limit 49G; step 0 is ended" in ended.stderr

    alice, bob = last_record(cluster, "alice", before), last_record(cluster, "bob", before)
    [one], [other] = alice["grants"], bob["grants"]
    assert one["uuid"] == other["uuid"]  # they did share it
    assert (one["asked"], one["limit"], one["rung"]) == (30 * GIB, 30 * GIB, "limiter")
    assert one["refused"] == 1 and 29 * GIB < one["peak"] <= 30 * GIB and one["clean"]
    assert [event["action"] for event in alice["events"]] == ["grant", "limit", "warn", "return"]
    [end] = [event["detail"] for event in bob["events"] if event["action"] == "end"]
    assert end["charged"] > end["limit"] == 49 * GIB and end["notified"]
    assert other["peak"] > 49 * GIB


@pytest.mark.cgroup1
def test_an_overrun_is_ended_within_two_seconds(cluster: DevCluster) -> None:
    before = newest(cluster)
    over = [PYTHON, "-c", "import time; print(time.time(), flush=True)\n" + HOLD, "600", "8192"]
    with subprocess.Popen(
        cluster.command(srun(4096, *escaping(over)), user="bob"),
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout
        began = float(program.stdout.readline())
        assert program.wait(PATIENCE) != 0
    events = last_record(cluster, "bob", before)["events"]
    [ended] = [event["time"] for event in events if event["action"] == "end"]
    assert 0 < ended - began < 2


@pytest.mark.cgroup1
def test_what_a_tasks_epilog_leaves_is_ended(cluster: DevCluster) -> None:
    """The user's program, which slurmstepd starts in its own cgroup when the task has ended, without the limiter."""
    home = INSIDE / "home/alice"
    for name, text in (
        ("epilog", EPILOG),
        ("left", f"#!{PYTHON}\nimport time; print(time.time(), flush=True)\n{HOLD}"),
    ):
        outside = cluster.layout.homes / "alice" / name
        outside.write_text(text)
        outside.chmod(0o755)
    cluster.run(["touch", home / "said"], user="alice")
    job = srun(4096, "sh", "-c", "echo $SLURM_JOB_ID")
    job.insert(1, f"--task-epilog={home}/epilog")
    number = int(run(cluster, "alice", job).stdout)
    record = last_record(cluster, "alice", number - 1)
    [ended] = [event["time"] for event in record["events"] if event["action"] == "end"]
    assert record["job"] == number
    assert 0 < ended - float((cluster.layout.homes / "alice/said").read_text().split()[0]) < 2


@pytest.mark.parametrize("change", ["env", "unset LD_PRELOAD", "env -i", "LD_PRELOAD= LD_LIBRARY_PATH="])
def test_no_environment_takes_the_limit_away(cluster: DevCluster, change: str) -> None:
    words = change.split()
    if words[0] == "unset":
        command = ["sh", "-c", 'unset LD_PRELOAD; exec "$@"', "x", *hold(0, 4000, 100)]
    else:
        command = ["env", *words[words[0] == "env" :], *hold(0, 4000, 100)]
    assert run(cluster, "alice", srun(4096, *command)).stdout.split() == [OUT_OF_MEMORY, "0"]


def test_a_forged_count_of_shards_means_nothing(cluster: DevCluster) -> None:
    forged = ["env", "SLURM_SHARDS_ON_NODE=40000", "SLUICE_SHARDS=40000", *srun(2048, *hold(0, 3000))]
    assert run(cluster, "alice", forged).stdout.split() == [OUT_OF_MEMORY]


def test_a_limit_outlives_its_agent(cluster: DevCluster) -> None:
    before = newest(cluster)
    part, gate = f"{PYTHON} -c '{HOLD}' 0 3000 2000", "outlives"
    wait = ["sh", "-c", f"{part}; {lasts_until(INSIDE / gate)}; exec {part}"]
    with subprocess.Popen(
        cluster.command(srun(4096, *wait), user="alice"), stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        first = [program.stdout.readline().strip() for _ in range(2)]
        cluster.stop_daemon(AGENT, number=signal.SIGKILL)
        restart(cluster)
        assert [job["job"] for job in status(cluster)["jobs"]] != []
        (cluster.folder / gate).touch()
        second = [program.stdout.readline().strip() for _ in range(2)]
        assert program.wait(PATIENCE) == 0
    assert first == second == ["0", OUT_OF_MEMORY]
    [grant] = last_record(cluster, "alice", before)["grants"]
    assert grant["refused"] == 2  # of both halves


RUIN = """
import os, sys, time
end = time.monotonic() + 3
ledger = os.open("/run/sluice/limit/job/ledger", os.O_RDWR)
while time.monotonic() < end:
    os.ftruncate(ledger, 0)
    os.pwrite(ledger, os.urandom(1 << 16), 0)
try:
    os.posix_fallocate(ledger, 0, 1 << 30)
except OSError as error:
    print(error.strerror)
"""


def test_a_tenant_who_ruins_his_ledger_harms_only_himself(cluster: DevCluster) -> None:
    """The agent goes on, the node is not drained, and the record is written, without figures from there."""
    before, starts = newest(cluster), log(cluster).count(READY)
    ran = run(cluster, "alice", srun(1024, PYTHON, "-c", RUIN))
    assert (ran.returncode, ran.stdout) == (0, "No space left on device\n"), ran.stderr
    record = last_record(cluster, "alice", before)
    assert (record["grants"][0]["refused"], record["grants"][0]["clean"]) == (0, True)
    assert "its figures are not known" in json.dumps(record["events"])
    assert run(cluster, "bob", srun(1024, "echo", "ran")).stdout == "ran\n"
    assert log(cluster).count(READY) == starts
    mounts = cluster.run(["cat", "/proc/self/mountinfo"], node=NODE).stdout
    assert f"/run/sluice/limit/job_{record['job']} " not in mounts


@pytest.mark.cgroup1
def test_the_watchdog_goes_on_after_a_restart(cluster: DevCluster) -> None:
    waits = f'echo up; {lasts_until(INSIDE / "restarted")}; exec "$@"'
    escape = ["sh", "-c", waits, "x", *escaping(hold(600, 8192))]
    with subprocess.Popen(
        cluster.command(srun(4096, *escape), user="bob"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout and program.stdout.readline() == "up\n"
        cluster.stop_daemon(AGENT, number=signal.SIGKILL)
        restart(cluster)
        (cluster.folder / "restarted").touch()
        _, said = program.communicate(timeout=PATIENCE)
    assert program.returncode != 0 and "is ended" in said


@pytest.mark.usefixtures("healthy")
def test_without_the_agent_no_job_gets_a_gpu_and_no_task_starts(cluster: DevCluster) -> None:
    """Both wait for an agent that restarts, here at the same time."""
    newest(cluster)  # no epilog waits for the agent
    script = f"echo up; {lasts_until(INSIDE / 'gone')}; exec srun --quiet echo ran"
    begun = ["salloc", "--quiet", "-w", NODE, "--gres=shard:1024", "sh", "-c", script]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(cluster.command(begun, user="alice"), **piped) as program:
        assert program.stdout and program.stdout.readline() == "up\n"
        cluster.stop_daemon(AGENT)
        (cluster.folder / "gone").touch()
        new = run(cluster, "alice", ["timeout", "30", *srun(1024, "echo", "ran")])
        out, said = program.communicate(timeout=PATIENCE)
    assert "ran" not in new.stdout
    reason = "the node agent does not answer at /run/sluice/agent.sock"
    until(lambda: reason in cluster.log(f"slurmd@{NODE}").read_text())
    until(lambda: "Prolog" in cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T %E"]).stdout)
    assert "ran" not in out and program.returncode != 0
    assert "the task is not started" in said and "systemctl start sluice-agent" in said


def test_a_job_without_gpus_does_not_need_the_agent(cluster: DevCluster) -> None:
    newest(cluster)
    cluster.stop_daemon(AGENT)
    try:
        assert run(cluster, "alice", ["srun", "--quiet", "-w", NODE, "echo", "ran"]).stdout == "ran\n"
    finally:
        restart(cluster)


@pytest.mark.usefixtures("healthy")
def test_a_job_needs_little_room_in_run(cluster: DevCluster) -> None:
    """Its region is a file system of its own."""
    fill = "mount -o remount,size=64m /run; dd if=/dev/zero of=/run/fill bs=64k; truncate -s -96K /run/fill"
    cluster.run(["sh", "-c", fill], node=NODE)
    try:
        assert run(cluster, "alice", srun(1024, "echo", "ran")).stdout == "ran\n"
    finally:
        cluster.run(["sh", "-c", "rm /run/fill; mount -o remount,size=50% /run"], node=NODE)


def test_a_hanging_driver_takes_only_its_own_gpus_along(cluster: DevCluster) -> None:
    folder = cluster.node_folder(MIXED) / "gpu_sim"
    set_values(folder, 0, {"driver_hang": "yes"})
    try:
        until(lambda: "no answer" in status(cluster, MIXED)["vendors"]["nvidia"])
        assert {name: state for name, state in status(cluster, MIXED)["vendors"].items() if name != "nvidia"} == {
            "amd": "ok",
            "intel": "ok",
        }
        amd = ["srun", "--quiet", "-w", MIXED, "--gres=gpu:mi300x:1", "echo", "ran"]
        assert run(cluster, "alice", amd).stdout == "ran\n"
        programs = [str(PROGRAMS / "sluice-prolog")]
        device = next(one for one in status(cluster, MIXED)["devices"] if one["file"].startswith("/dev/nvidia"))
        refused = cluster.run(["env", *JOB, f"SLURM_JOB_GPUS={device['index']}", *programs], node=MIXED, check=False)
        assert refused.returncode == 1 and "the nvidia driver gives no answer; see dmesg" in refused.stderr
    finally:
        set_values(folder, 0, {"driver_hang": "no"})
    until(lambda: status(cluster, MIXED)["vendors"]["nvidia"] == "ok")


@pytest.mark.cgroup1
@pytest.mark.parametrize("kind", ["l40s", "mi300x", "arca770"])
def test_a_task_opens_the_gpus_that_it_was_given_and_no_other(cluster: DevCluster, kind: str) -> None:
    """Device numbers differ from ordinals on this node; the check is the agent's own."""
    gres = (cluster.slurm_conf_dir() / "gres.conf").read_text()
    [name] = {word for word in gres.split() if word.startswith("Type=") and kind in word}
    ran = run(cluster, "alice", ["srun", "--quiet", "-w", MIXED, f"--gres=gpu:{name[5:]}:1", "env"])
    assert "SLUICE_GPU_NUMA=" in ran.stdout, ran.stderr


ASK = """
import glob, json, os, socket
def ask(request):
    with socket.socket(socket.AF_UNIX) as agent:
        own = [path for path in glob.glob("/run/sluice/ask/*") if os.access(path, os.W_OK)]
        agent.connect([*own, "/run/sluice/agent.sock"][0])
        agent.sendall(json.dumps(request).encode() + b"\\n")
        return agent.recv(1 << 16).decode().strip()
"""


@pytest.mark.cgroup1
def test_a_task_that_can_open_more_is_refused(cluster: DevCluster) -> None:
    """As if devices were not constrained: the task reports that it opened another."""
    given = next(one for one in status(cluster)["devices"] if one["index"] == 0)["file"]
    other = "/dev/nvidia7"
    ask = (
        f"{ASK}for files in (['{given}'], ['{given}', '{other}']):\n" "    print(ask({'do': 'task', 'open': files}))\n"
    )
    fine, refused = run(cluster, "alice", srun(1024, PYTHON, "-c", ask)).stdout.splitlines()
    assert "export" in json.loads(fine)["ok"]
    assert f"can open {other}, which it was not given" in refused and "ConstrainDevices=yes" in refused


HIP = """
import ctypes
hip, address = ctypes.CDLL("libamdhip64.so"), ctypes.c_void_p()
for gib in (40, 40, 1):
    print(hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(gib << 30)), flush=True)
"""


def test_amd_gpus_are_held_by_the_limiter(cluster: DevCluster) -> None:
    limited = ["srun", "--quiet", "-w", MIXED, f"--gres=shard:{50 * 1024}", "env", "-i", PYTHON, "-c", HIP]
    assert run(cluster, "alice", limited).stdout.split() == ["0", OUT_OF_MEMORY, "0"]


HIP_WORK = """
import ctypes as c, time
hip, module, function, one = c.CDLL("libamdhip64.so"), c.c_void_p(), c.c_void_p(), c.c_uint(1)
assert hip.hipInit(0) == 0 and hip.hipModuleLoadData(c.byref(module), b"any") == 0
assert hip.hipModuleGetFunction(c.byref(function), module, b"gemm") == 0
end = time.monotonic() + 3
while time.monotonic() < end:
    for _ in range(10):
        assert hip.hipModuleLaunchKernel(function, one, one, one, one, one, one, 0, None, None, None) == 0
    assert hip.hipDeviceSynchronize() == 0
    time.sleep(0.01)
"""


def test_steps_on_amd_gpus_are_profiled_where_they_asked(cluster: DevCluster) -> None:
    on_amd = ["srun", "--quiet", "-w", MIXED, "--gres=gpu:mi300x:1", f"-D{INSIDE}/home/alice"]
    plain = run(cluster, "alice", [*on_amd, "sh", "-c", "echo ${ROCP_TOOL_LIBRARIES-none}"])
    assert plain.stdout == "none\n"
    own = run(cluster, "alice", [*on_amd, "env", "ROCP_TOOL_LIBRARIES=/no.so", "sh", "-c", "echo $ROCP_TOOL_LIBRARIES"])
    assert own.stdout == "/no.so\n"
    asked = ["env", "SLUICE_GPU_PROFILE=60", *on_amd, PYTHON, "-c", HIP_WORK]
    done = run(cluster, "alice", asked)
    assert done.returncode == 0, done.stderr
    (path,) = (cluster.layout.folder / "home/alice").glob("sluice-profile-*/mixed-1.0/*.profile")
    profile = read(path)
    assert {profile.names[one.name] for one in profile.events if one.kind == Kind.KERNEL} == {"gemm"}
    assert profile.ended is not None and profile.ended.reason == Reason.EXIT
    assert [name for _, name in profile.devices.values()] == ["AMD Instinct MI300X"]


ZE_WORK = """
import ctypes as c, time
ze, how, one = c.CDLL("libze_loader.so.1"), bytes(256), c.c_uint(1)
def made(function, *arguments):
    handle = c.c_void_p()
    assert function(*arguments, c.byref(handle)) == 0
    return handle
class Kernel(c.Structure):
    _fields_ = [("type", c.c_uint), ("next", c.c_void_p), ("flags", c.c_uint), ("name", c.c_char_p)]
assert ze.zeInit(0) == 0
driver = made(ze.zeDriverGet, c.byref(one))
device = made(ze.zeDeviceGet, driver, c.byref(one))
context, module = made(ze.zeContextCreate, driver, how), c.c_void_p()
assert ze.zeModuleCreate(context, device, how, c.byref(module), None) == 0
kernel = made(ze.zeKernelCreate, module, c.byref(Kernel(0x1d, None, 0, b"gemm")))
commands = made(ze.zeCommandListCreateImmediate, context, device, how)
assert ze.zeKernelSetGroupSize(kernel, 32, 1, 1) == 0
end = time.monotonic() + 3
while time.monotonic() < end:
    for _ in range(10):
        assert ze.zeCommandListAppendLaunchKernel(commands, kernel, (c.c_uint * 3)(1, 1, 1), None, 0, None) == 0
    assert ze.zeCommandListHostSynchronize(commands, c.c_uint64(10**10)) == 0
    time.sleep(0.01)
"""


def test_steps_on_intel_gpus_are_profiled_where_they_asked(cluster: DevCluster) -> None:
    """Of a shell that runs the program, too; what the step's environment has preloaded stays."""
    on_intel = ["srun", "--quiet", "-w", INTEL, "--gres=gpu:1", f"-D{INSIDE}/home/alice"]
    plain = run(cluster, "alice", [*on_intel, "sh", "-c", "echo $LD_PRELOAD ${ZE_ENABLE_TRACING_LAYER-none}"])
    assert "libsluice_profile" not in plain.stdout and plain.stdout.endswith("none\n")
    asked = ["env", "SLUICE_GPU_PROFILE=60", *on_intel, "sh", "-c"]
    done = run(cluster, "alice", [*asked, 'echo $LD_PRELOAD; exec "$0" -c "$1"', PYTHON, ZE_WORK])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(":")[-1].endswith("libsluice_profile_preload.so\n")
    (path,) = (cluster.layout.folder / "home/alice").glob("sluice-profile-*/intel-1.0/*.profile")
    profile = read(path)
    assert {profile.names[one.name] for one in profile.events if one.kind == Kind.KERNEL} == {"gemm"}
    assert profile.ended is not None and profile.ended.reason == Reason.EXIT
    assert [name for _, name in profile.devices.values()] == ["Intel(R) Arc(TM) A770 Graphics"]


@pytest.mark.cgroup1
def test_intel_gpus_are_held_by_the_watchdog(cluster: DevCluster) -> None:
    folder = cluster.node_folder(INTEL) / "gpu_sim"
    job = ["srun", "--quiet", "-w", INTEL, "--gres=shard:4096", "sh", "-c", "echo $$ $SLURM_STEP_GPUS; sleep 600"]
    with subprocess.Popen(
        cluster.command(job, user="alice"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        pid, index = program.stdout.readline().split()
        uuid = next(one["uuid"] for one in status(cluster, INTEL)["devices"] if one["index"] == int(index))
        set_values(folder, uuid, {"process": f"{pid}:4G"})
        try:
            time.sleep(1.5)
            assert program.poll() is None  # all that it was given
            set_values(folder, uuid, {"process": f"{pid}:5G"})
            _, said = program.communicate(timeout=PATIENCE)
        finally:
            set_values(folder, uuid, {"processes": "none"})
    assert program.returncode != 0 and "5G of GPU memory" in said and "limit 4G" in said


@pytest.mark.usefixtures("healthy")
def test_a_gpu_that_keeps_memory_is_not_given_to_the_next(cluster: DevCluster) -> None:
    before, folder = newest(cluster), cluster.node_folder(NODE) / "gpu_sim"
    ends = ["sh", "-c", f"echo up; {lasts_until(INSIDE / 'keeps')}"]
    job = cluster.command(["srun", "--quiet", "-w", NODE, "--gres=gpu:1", *ends], user="alice")
    with subprocess.Popen(job, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout and program.stdout.readline() == "up\n"
        set_values(folder, 0, {"memory_used": "2G"})
        (cluster.folder / "keeps").touch()
        assert program.wait(PATIENCE) == 0
    try:
        [grant] = last_record(cluster, "alice", before)["grants"]
        assert grant["clean"] is False
        until(lambda: "2G in use by no process since job" in cluster.log(f"slurmd@{NODE}").read_text())
        until(lambda: "Epilog" in cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T %E"]).stdout)
    finally:
        set_values(folder, 0, {"memory_used": "0"})


def test_a_tenants_cap_holds_for_whole_gpus_and_for_its_jobs_together(cluster: DevCluster) -> None:
    policy = cluster.slurm_conf_dir() / "sluice.policy"
    tenants = [Tenant(account="physics", gpu_memory_mib_per_gpu=8192)]
    CompiledPolicy(generated_s=0, source="test", tenants=tenants).write(policy)
    try:
        physics = ["srun", "--quiet", "-A", "physics", "-w", NODE]
        whole = run(cluster, "alice", [*physics, "--gres=gpu:1", *hold(0, 8000, 7000)])
        assert whole.stdout.split() == [OUT_OF_MEMORY, "0"]
        ends = ["sh", "-c", f"echo up; {lasts_until(INSIDE / 'cap')}"]
        first = cluster.command([*physics, "--gres=shard:6144", *ends], user="alice")
        with subprocess.Popen(first, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout and program.stdout.readline() == "up\n"
            second = run(cluster, "bob", [*physics, "--gres=shard:6144", *hold(0, 4096, 1024)])
            (cluster.folder / "cap").touch()
        assert second.stdout.split() == [OUT_OF_MEMORY, "0"]  # 2 GiB are left to the tenant
    finally:
        policy.unlink()


def test_programs_may_run_twice(cluster: DevCluster) -> None:
    """As after a slurmd that was killed half-way."""
    environment = ["env", *JOB, "SLURM_JOB_GPUS=0"]
    before = newest(cluster)
    for program in ("sluice-prolog", "sluice-prolog"):
        cluster.run([*environment, str(PROGRAMS / program)], node=NODE)
    # From a slurmctld with which no node has registered yet, which names no GPUs.
    cluster.run(["env", *JOB, str(PROGRAMS / "sluice-epilog")], node=NODE)
    assert newest(cluster) == 900001 > before
    cluster.run([*environment, str(PROGRAMS / "sluice-epilog")], node=NODE)
    assert newest(cluster) == 900001
    (cluster.node_folder(NODE) / "records/900001.json").unlink()


def test_a_prolog_that_runs_again_leaves_a_running_job_its_limits(cluster: DevCluster) -> None:
    gate = "again"
    wait = f"echo $SLURM_JOB_ID; {lasts_until(INSIDE / gate)}; exec {PYTHON} -c '{HOLD}' 0 5000 3000"
    with subprocess.Popen(
        cluster.command(srun(4096, "sh", "-c", wait), user="alice"), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout
        job = [*JOB, f"SLURM_JOB_ID={running.stdout.readline().strip()}", "SLURM_JOB_GPUS=0"]
        cluster.run(["env", *job, str(PROGRAMS / "sluice-prolog")], node=NODE)
        (cluster.folder / gate).touch()
        assert running.stdout.read().split() == [OUT_OF_MEMORY, "0"]


def test_users_cannot_speak_for_root(cluster: DevCluster) -> None:
    ask = (
        f"{ASK}for what in ('epilog', 'prolog', 'limit', 'status'):\n"
        "    print(ask({'do': what, 'job': 1}))\n"
        "print(ask('nonsense'))\n"
        "print(ask({'do': 'task', 'open': []}))\n"
    )
    *refused, nonsense, task = cluster.run([PYTHON, "-c", ask], node=NODE, user="bob").stdout.splitlines()
    assert all("for root only" in line for line in refused) and len(refused) == 4
    assert "not a request" in nonsense and "not a task of a job" in task


STORM = """
import contextlib, glob, socket, sys
mine = []
print("begun", flush=True)
while True:
    for path in ["/run/sluice/agent.sock", *glob.glob("/run/sluice/ask/*")]:
        mine.append(socket.socket(socket.AF_UNIX))
        mine[-1].setblocking(False)
        with contextlib.suppress(OSError):
            mine[-1].connect(path)
            mine[-1].send(sys.argv[1].encode())
    if len(mine) > 500:
        del mine[:250]
"""


def test_a_crowd_of_connections_keeps_no_job_from_running(cluster: DevCluster) -> None:
    """Attack: four users held 64 connections, which were those of all users, and another one's task prolog failed."""
    half, asks = '{"do', '{"do": "task", "open": ["/dev/nvidia7"]}\n'
    crowd = [
        cluster.command(srun(1024, PYTHON, "-c", STORM, asks), user="bob"),
        *(
            cluster.command(["setpriv", f"--reuid={uid}", "--clear-groups", PYTHON, "-c", STORM, half], node=NODE)
            for uid in range(4000, 4004)
        ),
    ]
    with contextlib.ExitStack() as stack:
        for command in crowd:
            program = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(program.kill)
            assert program.stdout and program.stdout.readline() == "begun\n"
        for _ in range(5):
            ran = run(cluster, "alice", srun(1024, "env"))
            assert ran.returncode == 0 and "SLUICE_GPU_NUMA=" in ran.stdout, ran.stderr
    assert "drain" not in cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T"]).stdout


def test_what_a_tenant_asks_does_not_fill_the_record(cluster: DevCluster, full_scale: bool) -> None:
    """Attack: 210 requests filled the list of events, and of the job that was ended no event said so."""
    before = newest(cluster)
    ask = (
        f"{ASK}for number in range({400 if full_scale else 220}):\n"
        "    names = [f'/dev/{number}'] + ['/dev/' + 'x' * 100] * (number % 60)\n"
        "    assert 'which it was not given' in ask({'do': 'task', 'open': names})\n"
    )
    script = f'{PYTHON} -c "$1" && shift && ' + ESCAPE
    words = ["unshare", "-Urm", "sh", "-c", script, "escape", ask, *hold(600, 8192)]
    assert run(cluster, "bob", srun(4096, *words)).returncode != 0
    record = last_record(cluster, "bob", before)
    actions = [event["action"] for event in record["events"]]
    assert "end" in actions and 1 <= actions.count("refuse") <= 16
    assert len(json.dumps(record)) < 32 << 10 and "/dev/1" not in json.dumps(record)
