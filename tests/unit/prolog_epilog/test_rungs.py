"""Each rung against simulated drivers: exact to the last MiB, in one process and many; found again by a new agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import get_values, set_values
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from prolog_epilog import cgroups
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.devices import NodeDevice
from prolog_epilog.owners import Owner
from prolog_epilog.rungs.mps import Mps, allow
from prolog_epilog.rungs.share import cu_mask, instance_percent
from prolog_epilog.server import Peer
from prolog_epilog.state import RefusalError, Settings, State
from prolog_epilog.watchdog import judge
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError
from sluice.exchange.record import Grant, JobRecord

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: folders, cgroups and drivers' setters are root's"
)

MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 520 * MIB  # of the simulated H100
TOTAL = 81008 * MIB
UNIFIED = next(
    (path for path in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (path / "cgroup.procs").exists()), None
)
needs_unified = pytest.mark.skipif(UNIFIED is None, reason="no cgroup file system of version 2 is mounted here")
MPS_BIN = Path(__file__).parents[3] / "gpu_sim/bin"

# argv: how, MiB of a piece, workers. Prints what each got, in MiB, and the code that ended it; waits for a line.
PROGRAM = """
import ctypes as c, json, os, subprocess, sys, threading
how, piece, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cu = c.CDLL("libcuda.so.1")
def start():
    context = c.c_void_p()
    code = cu.cuInit(0) or cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) or cu.cuCtxSetCurrent(context)
    return code, context
def grab(piece=piece):
    got, address = 0, c.c_uint64()
    while True:
        code = cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(piece << 20))
        if code:
            return got, code
        got += piece
def tell(out, found):
    os.write(out, (json.dumps(found) + "\\n").encode())
def work(out, ready=None, go=None):
    code, context = start()
    if ready is not None:  # all have their contexts before the race begins
        os.write(ready, b"x"); os.read(go, 1)
    tell(out, grab() if code == 0 else (-1, code))
if how == "exec" and "again" not in sys.argv:
    start(); grab()
    os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], *sys.argv[1:], "again"])
if how == "fork":
    (came, ready), (go, gone) = os.pipe(), os.pipe()
    for _ in range(workers):
        if os.fork() == 0:
            work(1, ready, go); sys.stdin.readline(); os._exit(0)
    for _ in range(workers):
        os.read(came, 1)
    os.write(gone, b"x" * workers)
elif how == "threads":
    code, context = start()
    assert code == 0
    def one():
        cu.cuCtxSetCurrent(context); tell(1, grab())
    threads = [threading.Thread(target=one) for _ in range(workers)]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
else:
    work(1)
sys.stdin.readline()
if how == "fork":
    for _ in range(workers):
        os.wait()
"""


class Site:
    """A simulated node with an agent that is not started, its worker being real."""

    def __init__(self, folder: Path, platform: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sim = folder / "sim"
        write_node_state(self.sim, load_platform(str(platform)), "n1")
        self.sim.chmod(0o755)
        monkeypatch.setenv("SLUICE_SIM_STATE", str(self.sim / "state"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library_dir()))
        monkeypatch.setenv("PATH", f"{MPS_BIN}:{os.environ['PATH']}")
        monkeypatch.setattr(cgroups, "folder_of", lambda _: self.cgroup)
        self.cgroup: Path | None = None
        self.run = folder / "run"
        self.agent = self.new_agent()

    def new_agent(self) -> Agent:
        """As after a restart."""
        agent = Agent(
            Settings(run=self.run, records=self.run / "records", policy=self.run / "sluice.policy", memory_wait=3.0)
        )
        self.run.mkdir(exist_ok=True)
        (self.run / "agent").mkdir(exist_ok=True)
        for store in (agent.state.jobs, agent.state.store, agent.state.outbox):
            store.prepare()
        agent.holds.prepare()
        agent.regions.folder.mkdir(exist_ok=True)
        agent.watcher.watches["nvidia"] = Watch(Worker("nvidia", timeout=10))
        return agent

    def policy(self, **limits: object) -> None:
        (self.run / "sluice.node.json").write_text(NodePolicy(limits=NodeLimits(**limits)).render())  # type: ignore[arg-type]

    def devices(self, **changes: object) -> list[NodeDevice]:
        """The node's first GPU, as the agent would find it."""
        one = NodeDevice(
            0, "nvidia", "H100", get_values(self.sim, 0)["uuid"], "0000:1b:00.0", ("/dev/nvidia0",), "/dev/nvidia0",
            81008, "615.10", 0, "", (),
        )  # fmt: skip
        self.agent.state.devices = [replace(one, **changes)]  # type: ignore[arg-type]
        self.agent.contexts.measured = {
            device.kind: {"total": TOTAL, "context": CONTEXT} for device in self.agent.state.devices
        }
        return self.agent.state.devices

    def job(self, number: int, limit: int | None, **more: object) -> JobRecord:
        device = self.agent.state.devices[0]
        grant = Grant(0, device.uuid, device.vendor, device.model, device.memory_mib * MIB, limit, limit)
        record = JobRecord(number, 0, "ann", "physics", "main", "n1", 1.0, grants=[grant], **more)  # type: ignore[arg-type]
        self.agent.state.records[number] = record
        return record

    def start(self, how: str, piece: int, workers: int, **environment: str) -> subprocess.Popen[str]:
        folder = self.cgroup

        def enter() -> None:
            if folder is not None:
                (folder / "cgroup.procs").write_text("0")

        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how, str(piece), str(workers)],
            env={**os.environ, "PROGRAM": PROGRAM, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
        )

    def charged(self) -> list[tuple[str, int, int]]:
        answer = self.agent.watcher.watches["nvidia"].worker.ask(do="sample", used=False)
        return [(str(uuid), int(pid), int(size)) for uuid, pid, size in answer["usage"]]


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(platform: str = "dgx-h100", **drivers: int) -> Site:
        site = Site(tmp_path, platform, monkeypatch)
        for name, value in drivers.items():
            set_values(site.sim, 0, {name: str(value)})
        made.append(site)
        return site

    yield make
    for site in made:
        for record in list(site.agent.state.records.values()):
            Mps(site.agent.state).remove(record)
            site.agent.regions.remove(record.job)
        for watch in site.agent.watcher.watches.values():
            watch.worker.close()


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of version 2, as a job has."""
    assert UNIFIED is not None
    folder = UNIFIED / f"sluice-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    for _ in range(200):
        try:
            folder.rmdir()
            return
        except OSError:
            import time

            time.sleep(0.02)


def check_exact(site: Site, record: JobRecord, how: str, workers: int, **environment: str) -> None:
    """Together the workers get all of the limit, are refused what is over it, and the watchdog sees nothing wrong."""
    limit = record.grants[0].limit
    assert limit is not None
    contexts = workers if how == "fork" else 1
    with site.start(how, 2, workers, **environment) as program:
        assert program.stdout and program.stdin
        found = [json.loads(program.stdout.readline()) for _ in range(workers if how in ("fork", "threads") else 1)]
        usage = site.charged()
        acts = judge(usage, {record.job: record}, lambda _: Owner(Place(record.job, "0"))).acts
        program.stdin.write("\n" * workers)
        program.stdin.close()
        program.wait(30)
    assert [code for _, code in found] == [2] * len(found)  # CUDA_ERROR_OUT_OF_MEMORY
    assert sum(got for got, _ in found) * MIB == limit - contexts * CONTEXT
    assert sum(size for _, _, size in usage) == limit
    assert [act.action for act in acts] in ([], ["warn"])  # full, and not over


SHAPES = [("single", 1), ("fork", 8), ("exec", 1), ("threads", 8)]


@needs_unified
@pytest.mark.parametrize(("how", "workers"), SHAPES)
def test_the_drivers_limit_is_exact(make_site: Callable[..., Site], group: Path, how: str, workers: int) -> None:
    site = make_site(driver_generation=615)
    site.policy(ladder=["mig", "driver", "limiter", "watchdog"])
    site.devices()
    site.cgroup = group
    record = site.job(7, 6 * GIB)
    site.agent.jobs._ladder.hold(record)
    grant = record.grants[0]
    assert (grant.rung, grant.passed_over) == ("driver", {"mig": "a whole GPU"})
    check_exact(site, record, how, workers)
    site.agent.jobs._ladder.remove(record)
    assert site.agent.watcher.watches["nvidia"].worker.ask(
        do="cgroup_limit_of", uuid=grant.uuid, folder=str(group)
    ) == {"hard": None, "used": 0}


@needs_unified
def test_a_new_agent_finds_the_drivers_limit_and_sets_it_again(make_site: Callable[..., Site], group: Path) -> None:
    site = make_site(driver_generation=615)
    site.policy(ladder=["driver", "watchdog"])
    devices = site.devices()
    site.cgroup = group
    record = site.job(7, 4 * GIB)
    site.agent.jobs._ladder.hold(record)
    new = site.new_agent()
    new.state.devices, new.state.records = devices, {7: record}
    new.jobs.check_limits()
    assert record.events == []  # it is in force
    (site.sim / "limits").write_bytes(b"")  # as if the driver had been loaded again
    new.jobs.check_limits()
    assert [event.detail["again"] for event in record.events] == ["the driver reports None bytes"]
    assert (
        new.watcher.watches["nvidia"].worker.ask(do="cgroup_limit_of", uuid=record.grants[0].uuid, folder=str(group))[
            "hard"
        ]
        == 4 * GIB
    )
    new.watcher.watches["nvidia"].worker.close()


@pytest.mark.parametrize(
    ("changes", "cgroup", "why"),
    [
        ({"driver_version": "550.90.07"}, True, "driver 550.90.07; needs 615 or later"),
        ({"driver_version": "?"}, True, "driver ?; needs 615"),
        ({"partition": "1g.10gb"}, True, "the driver limits whole GPUs only"),
        ({"vendor": "amd"}, True, "amd's driver has no such limit"),
        ({}, False, "the job has no cgroup of version 2"),
    ],
)
def test_where_the_driver_cannot_the_next_rung_does(
    make_site: Callable[..., Site], tmp_path: Path, changes: dict[str, str], cgroup: bool, why: str
) -> None:
    site = make_site()
    site.policy(ladder=["driver", "watchdog"])
    site.devices(**changes)
    site.agent.watcher.watches["amd"] = site.agent.watcher.watches["nvidia"]
    site.cgroup = tmp_path if cgroup else None
    record = site.job(7, GIB)
    site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "watchdog" and why in record.grants[0].passed_over["driver"]
    site.policy(ladder=["driver"])
    with pytest.raises(RefusalError, match="the policy allows no rung that can hold its limit"):
        site.agent.jobs._ladder.hold(record)


def test_a_limit_that_cannot_be_set_refuses_the_job(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """The driver is new enough and refuses: nothing weaker is put in its place."""
    site = make_site(driver_generation=615)
    site.policy(ladder=["driver", "limiter", "watchdog"])
    site.devices()
    site.cgroup = tmp_path  # no cgroup at all
    record = site.job(7, GIB)
    with pytest.raises(SluiceError, match="Not Found"):
        site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "none" and record.events[-1].action == "refuse"


# ---- MIG ----


@pytest.mark.parametrize(("how", "workers"), SHAPES)
def test_an_instance_is_exact_by_itself(make_site: Callable[..., Site], how: str, workers: int) -> None:
    site = make_site("dgx-h100-mig")
    site.policy()
    listed = site.agent.watcher.watches["nvidia"].worker
    uuid = mig_uuid(site, 0)
    size = 9984 * MIB
    site.devices(uuid=uuid, partition="1g.10gb", pci="", memory_mib=9984)
    record = site.job(7, size)
    site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "mig"
    check_exact(site, record, how, workers, CUDA_VISIBLE_DEVICES=uuid)
    record = site.job(8, None)
    site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "mig"  # all of it, and no more
    listed.close()


def test_less_than_an_instance_is_held_by_another_rung(make_site: Callable[..., Site]) -> None:
    site = make_site("dgx-h100-mig")
    site.policy(ladder=["mig", "watchdog"])
    site.devices(uuid=mig_uuid(site, 0), partition="1g.10gb", pci="", memory_mib=9984)
    record = site.job(7, 4 * GIB)
    site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "watchdog"
    assert record.grants[0].passed_over == {"mig": "the limit is less than the instance"}


def mig_uuid(site: Site, gpu: int) -> str:
    from gpu_sim import read_state

    return next(str(one.uuid.decode()) for one in read_state(site.sim).gpus[gpu].instances if one.used)


# ---- MPS ----


def held_by_mps(site: Site, number: int, limit: int | None, **more: object) -> JobRecord:
    record = site.job(number, limit, **more)
    site.agent.jobs._ladder.hold(record)
    return record


@pytest.mark.parametrize(("how", "workers"), [("single", 1), ("exec", 1), ("threads", 8)])
def test_a_client_of_mps_is_held_exactly(make_site: Callable[..., Site], how: str, workers: int) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    assert record.grants[0].rung == "mps" and site.agent.regions.of(7) is not None  # their sum is the limiter's
    check_exact(site, record, how, workers, **site.agent.jobs._ladder.exports(record))


def test_eight_clients_race_for_one_limit(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """MPS limits each of them; the limiter limits their sum."""
    from sluice.core.limit import library_path

    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 6 * GIB)
    region = site.agent.regions.of(7)
    wrapper = tmp_path / "in-job"
    wrapper.write_text(
        f"#!/bin/sh\nmkdir -p /run/sluice/limit && mount -t tmpfs none /run/sluice/limit "
        f'&& mkdir /run/sluice/limit/job && mount --bind "{region}" /run/sluice/limit/job '
        f'&& LD_PRELOAD={library_path()} exec "$@"\n'
    )
    wrapper.chmod(0o755)
    environment = {**os.environ, "PROGRAM": PROGRAM, **site.agent.jobs._ladder.exports(record)}
    command = ["unshare", "-m", str(wrapper), sys.executable, "-c", PROGRAM, "fork", "2", "8"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout and program.stdin
        found = [json.loads(program.stdout.readline()) for _ in range(8)]
        usage = site.charged()
        program.stdin.write("\n" * 8)
        program.stdin.close()
    assert [code for _, code in found] == [2] * 8
    assert sum(got for got, _ in found) * MIB == 6 * GIB - 8 * CONTEXT
    assert sum(size for _, _, size in usage) == 6 * GIB


def test_one_more_task_tells_the_daemon_nothing_and_a_larger_limit_does(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 2 * GIB)
    log = site.run / "mps/job_7/log/control.log"

    def commands() -> int:
        return log.read_text().count("Cmd:set_")

    before = commands()
    site.agent.jobs._ladder.hold(record)
    assert commands() == before
    record.grants[0].limit = 5 * GIB
    site.agent.jobs._ladder.hold(record)
    assert commands() > before
    check_exact(site, record, "single", 1, **site.agent.jobs._ladder.exports(record))


def test_what_a_client_sets_itself_is_never_more(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    mine = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=50G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
    check_exact(site, record, "single", 1, **site.agent.jobs._ladder.exports(record), **mine)


def test_a_process_with_a_dead_daemons_number_and_name_is_not_the_daemon(tmp_path: Path) -> None:
    """Only root's is: a user's would be ended in its place, and its files could keep a reader waiting."""
    mps = Mps(State(Settings(run=tmp_path)))
    (tmp_path / "mps/job_7/pipe").mkdir(parents=True)
    with subprocess.Popen(["nvidia-cuda-mps-control", "60"], executable="/bin/sleep", user=48611, cwd="/") as forged:
        (tmp_path / "mps/job_7/pipe/nvidia-cuda-mps-control.pid").write_text(str(forged.pid))
        record = JobRecord(7, 1000, "ann", "physics", "main", "n1", 1.0)
        assert mps._pid(record) is None
        mps.stop(record)
        assert forged.poll() is None
        forged.kill()


def test_a_daemon_that_dies_is_started_again_and_a_new_agent_finds_it(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    devices = site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    mps = Mps(site.agent.state)
    first = mps._pid(record)
    new = site.new_agent()
    new.state.devices, new.state.records = devices, {7: record}
    new.contexts.measured = site.agent.contexts.measured
    new.jobs.check_limits()
    assert record.events == [] and mps._pid(record) == first
    assert first is not None
    with site.start("single", 2, 1, **site.agent.jobs._ladder.exports(record)) as program:
        assert program.stdout and program.stdin and program.stdout.readline()
        os.kill(first, 9)
        program.stdin.close()
    new.jobs.check_limits()
    assert [event.detail["again"] for event in record.events] == ["its MPS daemon has ended"]
    assert mps._pid(record) not in (None, first)
    check_exact(site, record, "single", 1, **site.agent.jobs._ladder.exports(record))
    site.agent.jobs._ladder.stop(record)
    assert mps._pid(record) is None
    site.agent.jobs._ladder.remove(record)
    site.agent.jobs._ladder.remove(record)  # again, as after a kill
    assert not (mps.folder / "job_7").exists() and site.agent.jobs._ladder.exports(record) == {}
    new.watcher.watches["nvidia"].worker.close()


def test_an_exclusive_gpu_is_the_mps_daemons(make_site: Callable[..., Site]) -> None:
    """Clients of one daemon share it, as the mode is meant for; a client that bypasses the daemon is refused."""
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    set_values(site.sim, 0, {"compute_mode": "3"})
    inside = site.agent.jobs._ladder.exports(record)
    opened = []
    with site.start("single", 64, 1, **inside) as first, site.start("single", 64, 1, **inside) as second:
        for program in (first, second):
            assert program.stdout
            opened.append(json.loads(program.stdout.readline())[0] > 0)
        with site.start("single", 64, 1, CUDA_MPS_PIPE_DIRECTORY="/none") as past:
            assert past.stdout and past.stdin
            assert json.loads(past.stdout.readline()) == [-1, 46]
            past.stdin.close()
        for program in (first, second):
            assert program.stdin
            program.stdin.close()
    assert opened == [True, True]


def test_a_tenant_reaches_his_own_daemon_and_no_other(make_site: Callable[..., Site], tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith("pytest"):
            folder.chmod(0o755)
    site = make_site()
    site.run.chmod(0o755)
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    jobs = {uid: held_by_mps_of(site, uid, uid) for uid in (20001, 20002)}
    reach = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)\n"
        "for name in ('control', 'control_privileged'):\n"
        "    try: socket.socket(socket.AF_UNIX).connect(sys.argv[2] + '/' + name); print('in')\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "try: open(sys.argv[2] + '/mine', 'w'); print('written')\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    for uid in jobs:
        for owner, record in jobs.items():
            pipes = site.agent.jobs._ladder.exports(record)["CUDA_MPS_PIPE_DIRECTORY"]
            done = subprocess.run(
                [sys.executable, "-c", reach, str(uid), pipes], capture_output=True, text=True, check=True
            )
            denied = ["PermissionError"] * 3
            assert done.stdout.split() == (["in", *denied[:2]] if uid == owner else denied), done


def held_by_mps_of(site: Site, number: int, uid: int) -> JobRecord:
    record = site.job(number, 5 * GIB)
    record.uid = uid
    site.agent.jobs._ladder.hold(record)
    return record


def test_without_the_daemon_installed_the_limiter_holds(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    assert record.grants[0].rung == "limiter"
    assert record.grants[0].passed_over == {"mps": "no nvidia-cuda-mps-control on this node"}


def test_an_access_list_gives_one_user_what_it_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    allow(tmp_path, 12345, 1)
    assert tmp_path.stat().st_mode & 0o777 == 0o710  # the mask is in the group's place


# ---- shares ----

SHARE = """
import ctypes as c
cu, value = c.CDLL("libcuda.so.1"), c.c_int()
assert cu.cuInit(0) == 0 and cu.cuDeviceGetAttribute(c.byref(value), 16, 0) == 0
print(value.value)
"""


def test_a_share_by_mps_is_a_part_of_the_multiprocessors(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, None, share_percent=25)
    assert (record.share_by, record.grants[0].rung) == ("mps", "none")
    out = subprocess.run(
        [sys.executable, "-c", SHARE],
        env={**os.environ, **site.agent.jobs._ladder.exports(record)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(out.stdout) == 132 // 4
    with pytest.raises(RefusalError, match=r"the jobs on GPU 0 leave 75 % of it"):
        held_by_mps(site, 8, None, share_percent=80)


@pytest.mark.parametrize(
    ("changes", "policy", "why"),
    [
        ({}, {}, "the policy does not allow mps"),
        ({"vendor": "intel"}, {}, "nothing holds programs to a share of intel GPUs"),
        ({"vendor": "amd"}, {}, "the policy does not allow cu_mask, which programs could remove"),
        ({"partition": "3g.40gb"}, {}, "the instance has 42 % of its GPU"),
    ],
)
def test_a_share_that_cannot_be_given_is_refused_in_the_prolog(
    make_site: Callable[..., Site], changes: dict[str, str], policy: dict[str, object], why: str
) -> None:
    site = make_site()
    site.policy(**policy)
    site.devices(**changes)
    site.agent.watcher.watches |= {name: site.agent.watcher.watches["nvidia"] for name in ("amd", "intel")}
    request = {
        "do": "prolog",
        "job": 7,
        "uid": 1,
        "user": "a",
        "account": "b",
        "partition": "c",
        "gpus": [0],
        "share": "50",
    }
    answer = site.agent.server.answer(json.dumps(request).encode(), Peer(1, 0))
    assert why in answer["error"] and "--gpu-share=50" in answer["error"]
    assert answer["blame"] == "job" and site.agent.state.records[7].refused == answer["error"]


@pytest.mark.parametrize(
    ("profile", "percent"), [("1g.10gb", 14), ("3g.40gb", 42), ("7g.80gb", 100), ("1c.3g.40gb", 14), ("x", 0)]
)
def test_the_share_of_an_instance(profile: str, percent: int) -> None:
    assert instance_percent(profile) == percent


def test_masks_of_compute_units_do_not_overlap() -> None:
    assert [cu_mask(304, percent, before) for percent, before in ((50, 0), (25, 50), (25, 75))] == [
        (0, 151),
        (152, 227),
        (228, 303),
    ]


# ---- between two jobs ----

READ = """
import ctypes as c, sys
cu, context, address, data = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64(), c.create_string_buffer(16)
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(4 << 20)) == 0
if len(sys.argv) > 1:
    assert cu.cuMemcpyHtoD_v2(address, sys.argv[1].encode(), c.c_size_t(len(sys.argv[1]))) == 0
assert cu.cuMemcpyDtoH_v2(data, address, c.c_size_t(16)) == 0
print(data.raw.rstrip(b"\\0").decode())
"""


def read_memory(*write: str) -> str:
    done = subprocess.run([sys.executable, "-c", READ, *write], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_memory_is_cleared_between_jobs_where_the_policy_asks(make_site: Callable[..., Site]) -> None:
    site = make_site()
    (site.sim / "vram").write_bytes(b"\0" * 65536)  # a driver that clears nothing
    site.policy(scrub=False)
    site.devices()
    record = site.job(7, None)
    assert read_memory("a secret") == "a secret"
    assert site.agent.jobs._gpu_reset.reset(record, {}) == {}
    assert read_memory() == "a secret"  # what the next tenant would read
    site.policy(scrub=True)
    assert site.agent.jobs._gpu_reset.reset(record, {}) == {}
    assert read_memory() == ""
    assert record.events[-1].action == "scrub" and record.events[-1].detail["bytes"] > 0.97 * (TOTAL - CONTEXT)


def test_memory_that_cannot_be_cleared_is_reported(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(scrub=True)
    site.devices()
    record = site.job(7, None)
    other = site.job(8, GIB)
    assert site.agent.jobs._gpu_reset.reset(record, {}) == {} and record.events == []  # the last job there clears it
    del site.agent.state.records[other.job]
    set_values(site.sim, 0, {"lost": "yes"})
    [why] = site.agent.jobs._gpu_reset.reset(record, {}).values()
    assert why.startswith("GPU GPU-") and ("were not reset" in why or "not cleared" in why)


def test_compute_mode_and_clocks_are_put_back(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy()
    site.devices()
    record = site.job(7, None)
    change = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "n.nvmlDeviceSetComputeMode(h, n.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)\n"
        "n.nvmlDeviceSetGpuLockedClocks(h, 300, 900)\n"
    )
    subprocess.run([sys.executable, "-c", change], check=True)
    assert site.agent.jobs._gpu_reset.reset(record, {}) == {}
    [event] = record.events
    assert (event.action, event.detail["what"]) == ("reset", ["compute_mode"])
    from gpu_sim import read_state

    gpu = read_state(site.sim).gpus[0]
    assert (gpu.compute_mode, gpu.clock_locked) == (0, 0)


def test_cgroups_that_bear_a_sluid_are_the_jobs(tmp_path: Path) -> None:
    sluid = "sEKNKTV3WPV500"  # the example of cgroup.conf(5) of Slurm 26.05
    scope = f"system.slice/slurmstepd.scope/{sluid}"
    text = f"0::/{scope}/step_0/user/task_0\n"
    assert cgroups.parse_place(text) is None  # no prolog has named it
    cgroups.name_job(sluid, 12)
    for step in ("0", "batch", "extern", "interactive"):
        assert cgroups.parse_place(text.replace("step_0", f"step_{step}")) == Place(12, step)
    assert cgroups.parse_place(text.replace("slurmstepd", "n1_slurmstepd")) == Place(12, "0")  # several slurmd a host
    assert cgroups.parse_place(f"0::/{scope}\n") == Place(12, "")
    assert cgroups.parse_place(text.replace(sluid, "job_12")) == Place(12, "0")  # CgroupJobIdPaths=yes
    for none in (f"job_{sluid}", sluid + "0", sluid.lower(), sluid.replace("K", "I"), sluid.replace("E", "G")):
        assert cgroups.parse_place(text.replace(sluid, none)) is None
    (tmp_path / "root" / scope).mkdir(parents=True)
    (tmp_path / "root" / scope / "cgroup.procs").touch()
    assert cgroups.folder_of(12, tmp_path / "root") == tmp_path / "root" / scope
    cgroups.forget_job(12)
    assert cgroups.parse_place(text) is None
    with pytest.raises(SluiceError, match="not a SLUID"):
        cgroups.name_job("../x", 12)


def test_the_folder_of_a_jobs_cgroup(tmp_path: Path) -> None:
    scope = "system.slice/n1_slurmstepd.scope/job_12"
    (tmp_path / "root" / scope).mkdir(parents=True)
    assert cgroups.folder_of(12, tmp_path / "root") is None  # no cgroup file system
    (tmp_path / "root" / scope / "cgroup.procs").touch()
    assert cgroups.folder_of(12, tmp_path / "root") == tmp_path / "root" / scope
    assert cgroups.folder_of(13, tmp_path / "root") is None


def test_an_unknown_rung_is_refused(tmp_path: Path) -> None:
    from policy.document import parse

    with pytest.raises(SluiceError, match="ladder"):
        parse("enforcement: {ladder: [limiter, hope]}\n", source="f")


# ---- bad input ----


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 9}', '{"limits": {"ladder": ["hope"]}}', "[]"])
def test_a_node_policy_that_was_never_readable_refuses_jobs_with_limits(
    make_site: Callable[..., Site], text: str
) -> None:
    site = make_site()
    site.devices()
    (site.run / "sluice.node.json").write_text(text)
    record = site.job(7, GIB)
    with pytest.raises(SluiceError, match=r"sluice.node.json.*sluice apply"):
        site.agent.jobs._ladder.hold(record)
    [why] = site.agent.jobs._gpu_reset.reset(record, {}).values()
    assert "the policy on clearing its memory cannot be read" in why


def test_a_node_policy_that_becomes_unreadable_leaves_the_last_one(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["watchdog"])
    site.devices()
    record = site.job(7, GIB)
    site.agent.jobs._ladder.hold(record)
    (site.run / "sluice.node.json").write_text("{")
    record = site.job(8, GIB)
    site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "watchdog"


@needs_unified
def test_less_than_a_driver_context_is_refused(make_site: Callable[..., Site], group: Path) -> None:
    site = make_site(driver_generation=615)
    site.policy(ladder=["driver", "watchdog"])
    site.devices()
    site.cgroup = group
    with pytest.raises(RefusalError, match=r"100M of GPU memory: the driver itself takes 520M of it"):
        site.agent.jobs._ladder.hold(site.job(7, 100 * MIB))


def test_without_room_for_its_daemon_a_job_is_refused(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    (site.run / "mps").touch()  # as good as a full /run
    record = site.job(7, GIB)
    with pytest.raises(OSError, match="mps"):
        site.agent.jobs._ladder.hold(record)
    assert record.grants[0].rung == "none"


def test_a_daemon_that_does_not_start_refuses_the_job(
    make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no device; exit 1\n")
    (broken / "nvidia-cuda-mps-control").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:/usr/bin:/bin")
    with pytest.raises(SluiceError, match="MPS of job 7: no device"):
        site.agent.jobs._ladder.hold(site.job(7, GIB))


def test_what_a_tenant_leaves_among_the_logs_is_not_walked(make_site: Callable[..., Site]) -> None:
    """Folders deeper than any recursion, links to files of root's, a FIFO: all gone in one step, and only they."""
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    home, others = site.run / "mps/job_7", site.run / "others"
    others.write_text("root's")
    (home / "log/link").symlink_to(others)
    os.mkfifo(home / "log/fifo")
    with pytest.raises(OSError, match="No space"):
        (home / "log/large").write_bytes(bytes(17 * MIB))
    here = os.open(home / "log", os.O_RDONLY)
    made = 0
    with suppress(OSError):  # until the file system has no more inodes
        while made < 2000:
            os.mkdir("d", dir_fd=here)  # noqa: PTH102
            inner = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here, made = inner, made + 1
    os.close(here)
    assert 100 < made < 1500
    begin = time.monotonic()
    site.agent.jobs._ladder.remove(record)
    assert not home.exists() and others.read_text() == "root's"
    assert time.monotonic() - begin < 3


def test_a_folder_of_an_earlier_version_is_put_aside(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    (site.run / "mps/job_7/log/deep").mkdir(parents=True)
    record = held_by_mps(site, 7, 5 * GIB)
    assert (site.run / "mps/job_7").is_mount()
    site.agent.jobs._ladder.remove(record)
    assert [path.name[:5] for path in (site.run / "mps").iterdir()] == ["left-"]


def test_a_daemon_that_gives_no_answer_is_asked_once(make_site: Callable[..., Site]) -> None:
    """Its tenant may have made it hang."""
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    mps = site.agent.jobs._ladder._rungs["mps"]
    assert isinstance(mps, Mps)
    pid = mps._pid(record)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    for _ in range(5):
        site.agent.jobs.check_limits()
    assert time.monotonic() - begin < 4.5  # 5 times 2 s before
    begin = time.monotonic()
    site.agent.jobs._ladder.remove(record)
    assert time.monotonic() - begin < 1 and not Path(f"/proc/{pid}/exe").exists()


def test_a_daemon_that_gives_no_answer_keeps_no_other_job_waiting(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.policy(ladder=["mps", "limiter", "watchdog"])
    site.devices()
    record = held_by_mps(site, 7, 5 * GIB)
    mps = site.agent.jobs._ladder._rungs["mps"]
    assert isinstance(mps, Mps)
    asked, free = mps._ask, []

    def ask(*words: object) -> str:
        def try_lock() -> None:
            free.append(site.agent.state.lock.acquire(blocking=False))
            if free[-1]:
                site.agent.state.lock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return asked(*words)  # type: ignore[arg-type]

    mps._ask = ask  # type: ignore[method-assign, assignment]
    site.agent.jobs.check_limits()
    assert free == [True]
    with site.agent.state.lock:
        site.agent.jobs._ladder.hold(record)  # one more task
    assert free == [True], "nobody is asked under the lock what was told"


def test_shares_of_an_amd_gpu_are_masks_side_by_side(make_site: Callable[..., Site]) -> None:
    site = make_site("mi300x-platform")
    site.policy(cu_mask=True)
    site.devices(vendor="amd", model="MI300X", uuid=get_values(site.sim, 0)["uuid"])
    worker = Worker("amd", timeout=20)
    site.agent.watcher.watches["amd"] = Watch(worker)
    masks = []
    for number, percent in ((7, 50), (8, 25), (9, 25)):
        record = site.job(number, None, share_percent=percent)
        site.agent.jobs._ladder.hold(record)
        assert record.share_by == "cu-mask"
        masks.append(site.agent.jobs._ladder.exports(record))
    assert masks == [{"HSA_CU_MASK": f"0:{part}"} for part in ("0-151", "152-227", "228-303")]
    del site.agent.state.records[8]
    with pytest.raises(RefusalError, match="the jobs on GPU 0 leave 25 %"):
        site.agent.jobs._ladder.hold(site.job(10, None, share_percent=30))
    record = site.job(11, None, share_percent=25)  # what the second left
    del site.agent.state.records[10]
    site.agent.jobs._ladder.hold(record)
    assert site.agent.jobs._ladder.exports(record) == masks[1]
    worker.close()
