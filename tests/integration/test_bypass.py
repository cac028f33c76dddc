"""Ways around a job's limit on GPU memory: each is refused, or ended within two seconds, and recorded. And the records'
way to where users and reports find them. The table in docs/security.md names these tests."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from sluice.exchange.admin_comment import parse
from sluice.exchange.job_records import FOLDER, JobRecords
from sluice.exchange.record import JobRecord
from tests.integration.beds import Bed
from tests.integration.platforms import SINGLE
from tests.integration.settled import PATIENCE, until
from tests.programs.begin import CUDA
from tests.programs.build import build_program

pytestmark = pytest.mark.cluster

NODE, OTHER = "single-1", "single-2"
PYTHON = "/usr/bin/python3"
GIB = 1 << 30
OVER = "8192"  # MiB, of 4096


# Says when, tries, says what came of it, and stays: who is to be ended can be.
TRY = """
import ctypes, os, sys, time
library, deep, mib = sys.argv[1:]
cu = ctypes.CDLL(library, mode=os.RTLD_NOW | (os.RTLD_DEEPBIND if deep == "deep" else 0))
context, address = ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0
print("at", time.time(), flush=True)
code = cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20))
print("code", code, flush=True)
time.sleep(0 if code else 30)
"""
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.argv[1], sys.argv[1:])
    os._exit(0)
os.wait()
os.read(3, 1)
"""
EARLY = """
start()
place, codes = reserve(8192), []
for i in range(4):
    handle = create(2048)
    codes.append(handle if handle < 0 else map_(place + 2048 * i * MIB, 2048, handle) or release(handle))
print("said", codes)
"""
POOLS = """
start()
pool = c.c_void_p()
ok(cu.cuMemPoolCreate(c.byref(pool), c.byref(Pool(1, 0, 1, 0))))
ok(cu.cuMemPoolSetAttribute(pool, 4, c.byref(c.c_uint64(2**63))))
one = alloc_async(3000, None, pool)
ok(cu.cuMemFreeAsync(c.c_uint64(one), None))
print("said", [alloc(2000), alloc_async(2000, None, pool) > 0, alloc_async(2000, None, pool)])
"""
GRAPHS = """
start()
print("said", [cu.cuGraphLaunch(graph_of(2000, 3000), None), cu.cuGraphLaunch(graph_of(3000), None), alloc(2000)])
"""
IMPORT = """
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]
here, there = os.pipe(), os.pipe()
if os.fork() == 0:
    start()
    handle = c.create_string_buffer(64)
    assert alloc(2420) > 0
    ok(cu.cuIpcGetMemHandle(handle, c.c_uint64(alloc(80))))
    os.write(here[1], handle.raw)
    os.read(there[0], 1)
    os._exit(0)
start()
p = c.c_uint64()
ok(cu.cuIpcOpenMemHandle_v2(c.byref(p), Handle.from_buffer_copy(os.read(here[0], 64)), 1))
print("said", [p.value > 0, alloc(1500), alloc(100) > 0])
os.write(there[1], b"-")
"""
LAST = CUDA + "start(); first = fill(); print('has', os.uname().nodename, first + 520, alloc(2), flush=True)"
SIGNALLED = """
import signal
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
start()
print("up", alloc(100) > 0, flush=True)
while not caught:
    time.sleep(0.05)
print("caught", caught, alloc(100) > 0, flush=True)
"""
MOVE = """
for f in $(find /sys/fs/cgroup -maxdepth 3 -name "*.procs" -o -maxdepth 3 -name tasks) /proc/self/cgroup; do
    echo $$ >$f
done 2>/dev/null
exec "$@"
"""
# A root of its own with what programs need, and a process namespace; nothing is preloaded there.
CONTAINER = """
set -e
mount -t tmpfs none /mnt
cd /mnt
for folder in usr dev run proc sys tmp; do mkdir $folder; mount --rbind /$folder $folder; done
for link in bin lib lib64 sbin; do cp -P /$link $link; done
mkdir etc
cp /etc/ld.so.cache etc
exec chroot . "$@"
"""
# The same by a program that users have for it, with a cgroup namespace; and one that only hides what it does not need.
# The machine's own /proc may be partly covered, so that none can be mounted again.
BUBBLE = ["--unshare-all", "--die-with-parent", "--dev-bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev"]
OWN_ROOT = (
    "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --dir /etc "
    "--ro-bind /etc/ld.so.cache /etc/ld.so.cache --bind /run /run --ro-bind /sys /sys --tmpfs /tmp"
).split()
MPI = """
mpi = c.CDLL("libmpich.so.12", mode=c.RTLD_GLOBAL)
WORLD, LONG_LONG, SUM = 0x44000000, 0x4c000809, 0x58000003  # of MPICH's mpi.h
rank, beside, all_said = c.c_int(), int(sys.argv[1]), []  # how many ranks a node has
def add(value):
    "Of all ranks; each has said its own by then."
    one, total = c.c_longlong(value), c.c_longlong()
    ok(mpi.MPI_Allreduce(c.byref(one), c.byref(total), 1, LONG_LONG, SUM, WORLD))
    all_said.append(total.value)
ok(mpi.MPI_Init(None, None))
ok(mpi.MPI_Comm_rank(WORLD, c.byref(rank)))
add(1 << rank.value)
add(os.uname().nodename.endswith("-2"))
start()
first = alloc(4096 / beside - 520)
add(first > 0)
add(alloc(2) == -2)
if rank.value == 0:
    ok(free(first))
add(0)
add(rank.value % beside == beside - 1 and alloc(4096 / beside - 520) > 0)
ok(mpi.MPI_Finalize())
if rank.value == 0:
    print("said", all_said)
"""
MASK = 'mount --bind /dev/null /etc/ld.so.preload && exec "$@"'
ADOPT = """
for folder in $(find /sys/fs/cgroup -type d -path "*/job_$0/step_extern"); do echo $$ >$folder/cgroup.procs; done
exec "$@"
"""


@pytest.fixture(scope="module")
def cluster(
    make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory, bed: Bed
) -> DevCluster:
    platform = tmp_path_factory.mktemp("platform") / "single.yaml"
    platform.write_text(SINGLE)
    return make_shared_cluster(
        {
            "nodes": [{"names": f"{NODE},{OTHER}", "platform": str(platform)}],
            **bed.description,
            "controllers": 1,
            "agent": True,
            "controllerd": True,
            "accounts": [{"name": "physics"}],
            "users": [{"name": "alice", "accounts": ["physics"]}, {"name": "bob", "accounts": ["physics"]}],
        },
        **bed.options,
    )


@pytest.fixture(scope="module")
def shared(cluster: DevCluster) -> Path:
    """Where all hosts see the programs."""
    folder = cluster.layout.scratch
    folder.chmod(0o777)
    build_program("cuda_setuid", folder / "setuid")
    build_program("static_sleeper", folder / "static", "-static")
    (folder / "setuid").chmod(0o4755)
    shutil.copy("/usr/bin/bwrap", folder)  # another system's tree has none
    (folder / "try.py").write_text(TRY)
    (folder / "daemon.py").write_text(DAEMON)
    return INSIDE / folder.name


def srun(*command: str, mib: int = 4096, node: str = NODE) -> list[str]:
    return ["srun", "--quiet", "--overlap", "-w", node, f"--gres=shard:{mib}", *command]


def records(cluster: DevCluster) -> list[JobRecord]:
    """What the controllers' store has."""
    return list(JobRecords(cluster.layout.state / FOLDER).between(0, time.time() + 86400))


@dataclass
class Outcome:
    """What became of one way: `at` when it tried, `said` all that its job printed."""

    at: float
    said: str
    record: JobRecord

    @property
    def refused(self) -> int:
        return sum(grant.refused for grant in self.record.grants)

    def ended(self) -> list[float]:
        return [event.time for event in self.record.events if event.action == "end"]


def ways(shared: Path) -> dict[str, list[str]]:
    attempt = [PYTHON, str(shared / "try.py"), "libcuda.so.1", "-", OVER]
    driver, bwrap = str(INSIDE / "lib/libcuda.so.1"), str(shared / "bwrap")
    return {
        "environment": ["env", "-i", *attempt],
        "preload": ["env", "LD_PRELOAD=libc.so.6", "LD_BIND_NOW=1", *attempt],
        "loader": ["/lib64/ld-linux-x86-64.so.2", "--preload", "libc.so.6", *attempt],
        "path": [*attempt[:2], driver, *attempt[3:]],
        "deep": [*attempt[:2], driver, "deep", OVER],
        "copy": ["sh", "-c", f'd=$(mktemp -d); cp -L {driver} $d/libmine.so; exec "$@" $d/libmine.so - {OVER}', "x",
                 *attempt[:2]],
        "setuid": [str(shared / "setuid")],
        "daemon": ["sh", "-c", 'mkfifo /tmp/way.$$; exec "$@" 3<>/tmp/way.$$', "x", PYTHON, str(shared / "daemon.py"),
                   "/usr/bin/env", "-i", *attempt],
        "move": ["sh", "-c", MOVE, "x", *attempt],
        "namespace": ["unshare", "-Urm", "sh", "-c", MASK, "x", "env", "-i", *attempt],
        "container": ["unshare", "-Urmpf", "sh", "-c", CONTAINER, "x", "env", "-i", *attempt],
        "bubblewrap": [bwrap, *BUBBLE, *OWN_ROOT, "/usr/bin/env", "-i", *attempt],
        "node's root": [bwrap, "--dev-bind", "/", "/", *BUBBLE, "env", "-i", *attempt],
        "early release": [PYTHON, "-c", CUDA + EARLY],
        "pools": [PYTHON, "-c", CUDA + POOLS],
        "graphs": [PYTHON, "-c", CUDA + GRAPHS],
        "import": [PYTHON, "-c", CUDA + IMPORT],
    }  # fmt: skip


REFUSED = ["environment", "path", "copy", "setuid", "daemon", "move", "node's root"]
# A library of the tenant's own before the limiter answers for dlsym, as whoever runs code in a process may do.
ENDED = ["preload", "loader", "namespace", "container", "bubblewrap"]
SAID = {
    "early release": "[0, -2, -2, -2]",
    "pools": "[-2, True, -2]",
    "graphs": "[2, 0, -2]",
    "import": "[True, -2, True]",
}


@pytest.fixture(scope="module")
def slow(cluster: DevCluster) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Jobs for which Slurm takes its time: they run while the other tests do."""
    parts = [["-w", node, f"--gres=shard:{mib}", PYTHON, "-c", LAST] for node, mib in ((NODE, 3000), (OTHER, 6000))]
    signalled = ["--signal=USR1@60", "--time=1", "-w", OTHER, "--gres=shard:2048"]
    # Slurm may send it before Python has begun: it is kept until the program can take it.
    signalled += ["env", "--block-signal=USR1", PYTHON, "-c", CUDA + SIGNALLED]
    commands = {"parts": [*parts[0], ":", *parts[1]], "signal": signalled}
    started = {
        name: subprocess.Popen(
            cluster.command(["srun", "--quiet", *words], user="alice"), stdout=subprocess.PIPE, text=True
        )
        for name, words in commands.items()
    }
    yield started
    for program in started.values():
        program.kill()
        program.wait()


@pytest.fixture(scope="module")
def outcomes(cluster: DevCluster, shared: Path, slow: dict[str, subprocess.Popen[str]]) -> dict[str, Outcome]:
    """All ways at once, each in a job of its own on one GPU: that many are over their limits delays no end."""
    del slow  # only to be started by now
    said: dict[str, list[str]] = {}

    def run(name: str, command: list[str]) -> None:
        job = ["sh", "-c", 'echo job $SLURM_JOB_ID; exec "$@"', "x", *command]
        with subprocess.Popen(
            cluster.command(srun(*job), user="alice"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as program:
            assert program.stdout
            for line in program.stdout:
                said[name].append(line)
                if name == "daemon" and line.startswith("code"):  # what it left in the background ends with its step
                    program.terminate()

    every = ways(shared)
    for name in every:
        said[name] = []
    with ThreadPoolExecutor(len(every)) as pool:
        list(pool.map(run, every, every.values()))
    jobs = {
        name: int(next(line.split()[1] for line in lines if line.startswith("job "))) for name, lines in said.items()
    }
    until(lambda: set(jobs.values()) <= {record.job for record in records(cluster)})
    found = {record.job: record for record in records(cluster)}
    return {
        name: Outcome(
            float(next((line.split()[1] for line in lines if line.startswith("at ")), "nan")),
            "".join(lines),
            found[jobs[name]],
        )
        for name, lines in said.items()
    }


@pytest.mark.parametrize("way", REFUSED)
def test_refused(outcomes: dict[str, Outcome], way: str) -> None:
    outcome = outcomes[way]
    assert "code 2\n" in outcome.said, outcome.said
    assert outcome.refused >= 1 and outcome.ended() == []
    assert outcome.record.grants[0].peak <= 4 * GIB


@pytest.mark.parametrize("way", SAID)
def test_memory_held_by_other_means_is_charged(outcomes: dict[str, Outcome], way: str) -> None:
    outcome = outcomes[way]
    assert f"said {SAID[way]}\n" in outcome.said, outcome.said
    assert outcome.refused >= 1 and outcome.record.grants[0].peak <= 4 * GIB


@pytest.mark.parametrize("way", ENDED)
def test_ended_within_two_seconds(outcomes: dict[str, Outcome], way: str) -> None:
    outcome = outcomes[way]
    assert "code 0\n" in outcome.said, outcome.said
    assert len(outcome.ended()) == 1, outcome.record.events
    assert 0 < outcome.ended()[0] - outcome.at < 2
    assert "of GPU memory on /dev/nvidia" in outcome.said and "step 0 is ended" in outcome.said


def test_a_driver_linked_out_of_reach_is_refused_or_ended(outcomes: dict[str, Outcome]) -> None:
    """RTLD_DEEPBIND: what the program finds in the library is the library's own."""
    outcome = outcomes["deep"]
    if "code 0\n" in outcome.said:
        [ended] = outcome.ended()
        assert ended - outcome.at < 2
    else:
        assert "code 2\n" in outcome.said and outcome.refused >= 1


def test_a_static_program_is_ended(cluster: DevCluster, shared: Path) -> None:
    """It has no loader, and speaks to the driver itself: here the test says what the driver would see."""
    words = ["sh", "-c", 'echo $SLURM_JOB_ID; exec env -i "$0"', str(shared / "static")]
    job = cluster.command(srun(*words), user="alice")
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout
        number = int(program.stdout.readline())
        pid, limited = (program.stdout.readline().split()[1] for _ in range(2))
        assert limited == "0"
        folder = cluster.node_folder(NODE) / "gpu_sim"
        began = time.time()
        set_values(folder, 0, {"process": f"{pid}:5G"})
        try:
            _, said = program.communicate(timeout=PATIENCE)
        finally:
            set_values(folder, 0, {"processes": "none"})
    record = until(lambda: [one for one in records(cluster) if one.job == number])[0]
    [end] = [event for event in record.events if event.action == "end"]
    assert 0 < end.time - began < 2
    assert program.returncode != 0 and "limit 4G" in said, (said, end)


@pytest.mark.parametrize("place", ["outside", "extern"])
def test_what_comes_by_ssh_is_ended(cluster: DevCluster, shared: Path, place: str) -> None:
    """A process that no step started: outside of every job, and where pam_slurm_adopt puts it."""
    attempt = [PYTHON, str(shared / "try.py"), "libcuda.so.1", "-", OVER]
    job = cluster.command(srun("sh", "-c", "echo $SLURM_JOB_ID; sleep 600"), user="bob")
    uid = cluster.run(["id", "-u", "bob"]).stdout.strip()
    with subprocess.Popen(job, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        number = program.stdout.readline().strip()
        words = ["setpriv", f"--reuid={uid}", "--clear-groups", *attempt]
        if place == "extern":
            words = ["sh", "-c", ADOPT, number, *words]
        came = cluster.run(words, node=NODE, check=False, timeout=PATIENCE)
        cluster.run(["scancel", number])
    assert "code 0" in came.stdout and came.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    at = float(came.stdout.split()[1])
    record = until(lambda: [one for one in records(cluster) if one.job == int(number)])[0]
    [end] = [event for event in record.events if event.action == "end"]
    assert 0 < end.time - at < 2 and end.detail["step"] == place


# ---- jobs of several nodes, and of several parts ----


def test_each_node_of_a_job_has_its_own_limit_to_the_last_mib(cluster: DevCluster) -> None:
    ran = cluster.run(
        ["srun", "--quiet", "-N2", "--gres=shard:4096", PYTHON, "-c", LAST], user="alice", timeout=PATIENCE
    )
    assert sorted(ran.stdout.splitlines()) == [f"has {name} 4096 -2" for name in (NODE, OTHER)]


# ---- programs that are to go on as without ----


def test_umask_core_limit_and_own_preload_stay(cluster: DevCluster) -> None:
    look = "umask; ulimit -c; echo $LD_PRELOAD; grep -c libdl /proc/self/maps; unshare -Urm true && echo own"
    bare = ["sh", "-c", f"umask 027; ulimit -c 1000; export LD_PRELOAD=libdl.so.2; exec sh -c '{look}'"]
    without = cluster.run(["srun", "--quiet", "-w", NODE, *bare], user="alice", timeout=PATIENCE).stdout
    within = cluster.run(
        ["srun", "--quiet", "-w", NODE, "--gres=shard:2048", *bare], user="alice", timeout=PATIENCE
    ).stdout
    assert within == without and within.split()[:3] == ["0027", "1000", "libdl.so.2"] and within.endswith("own\n")


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_of_an_mpi_program_share_the_limit_exactly(cluster: DevCluster, bed: Bed, nodes: int) -> None:
    """MPICH by Slurm's PMI2: what four processes reduce is right, and on each node they have 4096 MiB to the last."""
    if bed.root is not None:
        pytest.skip("MPICH is this machine's")
    beside, names = 4 // nodes, ",".join([NODE, OTHER][:nodes])
    job = ["srun", "--quiet", "--mpi=pmi2", f"-N{nodes}", f"--ntasks-per-node={beside}", "-w", names]
    program = [PYTHON, "-c", CUDA + MPI, str(beside)]
    ran = cluster.run([*job, "--gres=shard:4096", *program], user="alice", timeout=PATIENCE)
    assert ran.stdout == f"said [15, {4 - beside}, 4, 4, 0, 1]\n"


# ---- bad input ----


@pytest.mark.parametrize(
    "asked", ["shard:200000", "shard:0", "shard:12Q", "gpu:h200:1", "shard:-5", "shard:99999999999999999999"]
)
def test_what_cannot_be_given_is_refused_or_has_no_gpu(cluster: DevCluster, asked: str) -> None:
    """Slurm's own answers; with the plugins job_submit/sluice answers first (test_submit.py)."""
    attempt = ["sh", "-c", 'echo ran; exec "$@"', "x", PYTHON, "-c", CUDA + "start(); print('alloc', alloc(100))"]
    ran = cluster.run(["timeout", "20", "srun", "-w", NODE, f"--gres={asked}", *attempt], user="alice", check=False)
    assert "alloc" not in ran.stdout
    assert asked == "shard:0" or ("ran" not in ran.stdout and "error" in ran.stderr), ran.stderr


# ---- an agent that is killed ----


def test_killed_at_any_moment_it_lets_no_job_run_without_its_limit(cluster: DevCluster, full_scale: bool) -> None:
    """Prologs, tasks and epilogs of many jobs while the agent is killed again and again."""
    agent, chance = f"agent@{OTHER}", random.Random(6)
    program = CUDA + "start(); print(os.environ['SLURM_JOB_ID'], alloc(2000), alloc(400) > 0)"
    command = ["sbatch", "--parsable", "-w", OTHER, "--gres=shard:2048", "--requeue", "-o", f"{INSIDE}/home/bob/%j"]
    script = f"exec {PYTHON} -c '{program.replace(chr(39), chr(34))}'"
    jobs = [int(cluster.run([*command, "--wrap", script], user="bob").stdout) for _ in range(100 if full_scale else 20)]
    for _ in range(30 if full_scale else 4):
        time.sleep(chance.uniform(0.05, 0.8))
        cluster.stop_daemon(agent, number=signal.SIGKILL)
        cluster.start_daemon(agent)
    until(lambda: _resumed_and_done(cluster, jobs), timeout=240)
    said = {job: (cluster.folder / "home/bob" / str(job)).read_text() for job in jobs}
    assert said == {job: f"{job} -2 True\n" for job in jobs}
    until(lambda: set(jobs) <= {record.job for record in records(cluster)})
    found = [record for record in records(cluster) if record.job in jobs]
    assert all(grant.limit == 2 * GIB for record in found for grant in record.grants)
    until(lambda: cluster.run(["ls", "/run/sluice/agent/jobs"], node=OTHER).stdout == "")


def _resumed_and_done(cluster: DevCluster, jobs: list[int]) -> bool:
    """Whether all have run; a node whose prolog the agent did not answer in time is put back, as an admin would."""
    state = cluster.run(["sinfo", "-h", "-n", OTHER, "-o", "%T"]).stdout
    if "drain" in state:
        cluster.run(["scontrol", "update", f"nodename={OTHER}", "state=resume"], check=False)
    waiting = cluster.run(["squeue", "-h", "-u", "bob", "-o", "%i %r"]).stdout
    for line in waiting.splitlines():
        if "held" in line:
            cluster.run(["scontrol", "release", line.split()[0]], check=False)
    time.sleep(0.3)
    return not waiting


# ---- the records ----


def sacct(cluster: DevCluster, job: int) -> dict[str, str]:
    line = cluster.run(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "AdminComment"], user="alice").stdout
    return parse(line.strip()) or {}


def test_users_find_the_record_in_sacct(cluster: DevCluster, outcomes: dict[str, Outcome]) -> None:
    job = outcomes["pools"].record.job
    words = until(lambda: sacct(cluster, job))
    assert words == {
        "v": "1",
        "rung": "limiter",
        "gpus": "1",
        "asked": "4096",
        "limit": "4096",
        "peak": str(-(-outcomes["pools"].record.grants[0].peak >> 20)),
        "refused": words["refused"],
        "ended": "0",
    } | {name: value for name, value in words.items() if len(name) == 2}
    ended = until(lambda: sacct(cluster, outcomes["container"].record.job))
    assert ended["ended"] == "1" and int(ended["peak"]) > 8192


def test_each_task_of_an_array_has_its_own_record(cluster: DevCluster) -> None:
    """The last one's number is the array's, by which sacctmgr would change all of them."""
    program = CUDA + 'start(); alloc(500 * int(os.environ["SLURM_ARRAY_TASK_ID"])); time.sleep(1.5)'
    script = f"exec {PYTHON} -c '{program.replace(chr(39), chr(34))}'"
    words = [
        "sbatch",
        "--parsable",
        "--array=1-3",
        "-w",
        OTHER,
        "--gres=shard:4096",
        "-o",
        "/dev/null",
        "--wrap",
        script,
    ]
    array = cluster.run(words, user="bob").stdout.strip()

    def peaks() -> dict[str, str]:
        said = cluster.run(["sacct", "-X", "-n", "-P", "-j", array, "-o", "JobID,AdminComment"], user="bob").stdout
        lines = (line.split("|", 1) for line in said.splitlines())
        return {name: words["peak"] for name, comment in lines if (words := parse(comment))}

    found = until(lambda: len(now := peaks()) == 3 and now, timeout=60)
    assert found == {f"{array}_{task}": str(520 + 500 * task) for task in (1, 2, 3)}


def test_two_tenants_on_one_gpu_have_a_record_each(cluster: DevCluster, outcomes: dict[str, Outcome]) -> None:
    """What one has is never counted to the other, on one GPU at the same time."""
    del outcomes
    sizes = {"alice": 2000, "bob": 9000}
    hold = (
        "import sys\n" + CUDA + "start(); print(os.environ['SLURM_JOB_ID'], alloc({}) > 0, flush=True); time.sleep(3)"
    )
    programs = {
        user: subprocess.Popen(
            cluster.command(srun(PYTHON, "-c", hold.format(size), mib=size + 1000), user=user),
            stdout=subprocess.PIPE,
            text=True,
        )
        for user, size in sizes.items()
    }
    jobs = {}
    for user, program in programs.items():
        said, _ = program.communicate(timeout=PATIENCE)
        number, done = said.split()
        assert done == "True"
        jobs[user] = int(number)
    until(lambda: set(jobs.values()) <= {record.job for record in records(cluster)})
    found = {record.job: record for record in records(cluster)}
    for user, size in sizes.items():
        [grant] = found[jobs[user]].grants
        assert (found[jobs[user]].user, grant.asked) == (user, (size + 1000) << 20)
        assert size < grant.peak >> 20 < size + 1000  # with its context


def test_records_wait_for_a_controller_and_an_agent_that_are_away(cluster: DevCluster) -> None:
    """A job of two nodes has a record of each, and one line in sacct, however long it takes."""
    controllerd, agent = "controllerd@ctl1", f"agent@{NODE}"
    cluster.stop_daemon(controllerd)
    try:
        job = ["srun", "--quiet", "-N2", "--gres=gpu:1", "sh", "-c", "echo $SLURM_JOB_ID"]
        number = int(cluster.run(job, user="alice", timeout=PATIENCE).stdout.split()[0])
        outboxes = [cluster.node_folder(name) / "outbox" for name in (NODE, OTHER)]
        until(lambda: all(list(folder.glob(f"{number}-*.json")) for folder in outboxes))
        cluster.stop_daemon(agent, number=signal.SIGKILL)
        cluster.start_daemon(agent)
        assert sacct(cluster, number) == {}
    finally:
        cluster.start_daemon(controllerd)
    words = until(lambda: (found := sacct(cluster, number)) and found["gpus"] == "2" and found, timeout=90)
    assert words["rung"] == "none"
    assert sorted(record.node for record in records(cluster) if record.job == number) == [NODE, OTHER]
    until(lambda: not any(list(folder.glob(f"{number}-*.json")) for folder in outboxes))


def test_a_full_disk_delays_a_record(cluster: DevCluster) -> None:
    """The job's limits are taken back and the GPU is given to others; the record waits in /run."""
    folder = cluster.node_folder(NODE) / "records"
    away = folder.with_name("records.away")
    folder.rename(away)
    folder.touch()  # nothing can be written there
    try:
        number = int(cluster.run(srun("sh", "-c", "echo $SLURM_JOB_ID"), user="alice", timeout=PATIENCE).stdout)
        log = cluster.log(f"agent@{NODE}")
        until(lambda: f"action=problem job={number}" in log.read_text())
        waiting = cluster.run(["ls", "/run/sluice/agent/jobs", "/run/sluice/limit"], node=NODE).stdout.split()
        assert f"{number}.json" in waiting and f"job_{number}" not in waiting
        assert not any(record.job == number for record in records(cluster))
    finally:
        folder.unlink()
        away.rename(folder)
    until(lambda: any(record.job == number for record in records(cluster)))
    assert json.loads((folder / f"{number}.json").read_text())["job"] == number


# ---- what took its time ----


def test_each_part_of_a_heterogeneous_job_has_its_own_limit(slow: dict[str, subprocess.Popen[str]]) -> None:
    said, _ = slow["parts"].communicate(timeout=2 * PATIENCE)
    assert sorted(said.splitlines()) == [f"has {NODE} 3000 -2", f"has {OTHER} 6000 -2"]


def test_slurms_signal_reaches_the_program(slow: dict[str, subprocess.Popen[str]]) -> None:
    """--signal, by which programs write their checkpoints."""
    said, _ = slow["signal"].communicate(timeout=2 * PATIENCE)
    assert said == "up True\ncaught [10] True\n"
