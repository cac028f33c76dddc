"""Parts of the node agent, without Slurm and without root."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.compiled import CompiledPolicy, Tenant
from prolog_epilog import notice, watchdog
from prolog_epilog.agent import Agent
from prolog_epilog.caps import Caps
from prolog_epilog.cgroups import Place, parse_place
from prolog_epilog.devices import NodeDevice, devices_of, select
from prolog_epilog.duties import Duties
from prolog_epilog.hints import hints
from prolog_epilog.owners import Owner
from prolog_epilog.reclaim import Reclaim
from prolog_epilog.record import Grant, JobRecord, Store
from prolog_epilog.regions import check_library
from prolog_epilog.sampling import Usage
from prolog_epilog.server import Peer
from prolog_epilog.state import RefusalError, Settings
from prolog_epilog.watchdog import OUTSIDE, Act
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice_base.errors import SluiceError

Answering = Callable[[list[bytes]], tuple[str, list[dict[str, object]]]]
MIB, GIB = 1 << 20, 1 << 30
PROGRAM = Path(__file__).parents[3] / "prolog_epilog/programs/node_program.py"


def device(index: int = 0, **changes: object) -> NodeDevice:
    fields = {
        "index": index,
        "vendor": "nvidia",
        "model": "H100",
        "uuid": f"GPU-{index}",
        "pci": f"0000:0{index}:00.0",
        "files": (f"/dev/nvidia{index}",),
        "own_file": f"/dev/nvidia{index}",
        "memory_mib": 80 * 1024,
        "driver_version": "550",
        "numa_node": index // 4,
        "cores": "0-3",
        "nics": (f"mlx5_{index}",),
    }
    return NodeDevice(**{**fields, **changes})  # type: ignore[arg-type]


def record(job: int = 7, **changes: object) -> JobRecord:
    fields = {"uid": 1000, "user": "ann", "account": "physics", "partition": "main", "node": "n1", "started": 1.0}
    return JobRecord(job, **{**fields, **changes})  # type: ignore[arg-type]


def granted(limit: int | None, uuid: str = "GPU-0", job: int = 7, uid: int = 1000) -> JobRecord:
    return record(job, uid=uid, grants=[Grant(0, uuid, "nvidia", "H100", 80 * GIB, limit, limit)])


# ---- cgroups ----


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "9:freezer:/slurm_n1/uid_1000/job_12/step_0\n5:devices:/slurm_n1/uid_1000/job_12/step_0/task_3\n",
            Place(12, "0"),
        ),
        ("5:devices:/slurm/uid_1000/job_12/step_batch/task_0\n0::/\n", Place(12, "batch")),
        ("0::/system.slice/n1_slurmstepd.scope/job_12/step_extern/user/task_special\n", Place(12, "extern")),
        ("4:cpu,cpuacct:/slurm/uid_1/job_3/step_0\n", Place(3, "0")),
        ("9:freezer:/slurm/uid_1000/job_12\n", Place(12, "")),
        ("0::/user.slice/user-1000.slice/session-1.scope\n", None),
        ("1:name=x:/my_job_12/step_0\n0::/\n", None),  # not Slurm's, and not a hierarchy that it uses
        ("0::/x/job_99999999999/step_0\n", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_a_process_is_placed_by_its_cgroup(text: str, place: Place | None) -> None:
    assert parse_place(text) == place


def test_proctracks_own_hierarchy_decides() -> None:
    """The others are joined late, or moved by somebody else."""
    assert parse_place("5:devices:/slurm/uid_1/job_1/step_0\n9:freezer:/slurm/uid_1/job_2/step_1\n") == Place(2, "1")


# ---- watchdog ----


def places(found: dict[int, Place], users: dict[int, int] | None = None) -> Callable[[int], Owner]:
    """Whose processes are; those of jobs are of the user that `record` has."""
    return lambda pid: Owner(found.get(pid), (users or {}).get(pid, 1000 if pid in found else None))


def judge(usage: Usage, records: dict[int, JobRecord], owner_of: Callable[[int], Owner]) -> list[Act]:
    return watchdog.judge(usage, records, owner_of).acts


def test_a_job_is_warned_once_at_nine_tenths_and_ended_above() -> None:
    one, here = granted(10 * GIB), places({1: Place(7, "0")})
    assert list(judge([("GPU-0", 1, 9 * GIB - 1)], {7: one}, here)) == []
    [act] = judge([("GPU-0", 1, 9 * GIB)], {7: one}, here)
    assert (act.action, act.charged, act.limit) == ("warn", 9 * GIB, 10 * GIB)
    one.grants[0].warned = True
    assert list(judge([("GPU-0", 1, 10 * GIB)], {7: one}, here)) == []  # to the last byte
    [act] = judge([("GPU-0", 1, 10 * GIB + 1)], {7: one}, here)
    assert (act.action, act.step, act.pids) == ("end", "0", (1,))
    assert one.grants[0].peak == 10 * GIB + 1


def test_processes_of_a_job_count_together_and_the_largest_step_ends() -> None:
    here = places({1: Place(7, "0"), 2: Place(7, "1"), 3: Place(7, "1"), 4: Place(8, "0")})
    usage = [("GPU-0", 1, 4 * GIB), ("GPU-0", 2, 3 * GIB), ("GPU-0", 3, 4 * GIB), ("GPU-0", 4, 50 * GIB)]
    [act] = judge(usage, {7: granted(10 * GIB), 8: granted(60 * GIB, job=8)}, here)
    assert (act.job, act.step, act.charged, act.pids) == (7, "1", 11 * GIB, (3, 2))


def test_a_gpu_that_was_not_granted_may_not_be_used_and_strangers_are_left_alone() -> None:
    [act] = judge([("GPU-1", 1, 1)], {7: granted(None)}, places({1: Place(7, "0")}))
    assert (act.action, act.limit) == ("end", 0)
    assert list(judge([("GPU-0", 1, 90 * GIB)], {7: granted(None)}, places({1: Place(7, "0")}))) == []
    assert (
        list(judge([("GPU-0", 1, 90 * GIB), ("GPU-0", 2, 90 * GIB)], {7: granted(1)}, places({2: Place(9, "0")}))) == []
    )


def test_what_a_jobs_user_runs_outside_of_it_counts_to_it() -> None:
    """E.g. a program that came by ssh, past pam_slurm_adopt."""
    here = places({1: Place(7, "0")}, {2: 1000, 3: 1001, 4: 0})
    usage = [("GPU-0", 1, 6 * GIB), ("GPU-0", 2, 7 * GIB), ("GPU-0", 3, 50 * GIB), ("GPU-0", 4, GIB)]
    [act] = judge(usage, {7: granted(10 * GIB)}, here)
    assert (act.action, act.step, act.charged, act.pids) == ("end", OUTSIDE, 13 * GIB, (2,))
    [act] = judge([("GPU-1", 2, 1)], {7: granted(10 * GIB)}, here)
    assert (act.action, act.step, act.limit) == ("end", OUTSIDE, 0)
    [act] = judge([("GPU-0", 2, 5 * GIB)], {6: granted(GIB, job=6), 7: granted(None)}, here)
    assert act.job == 6
    assert list(judge([("GPU-0", 4, 90 * GIB)], {7: granted(1, uid=0)}, here)) == []  # root's


# ---- records ----


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "a/b")
    store.prepare()
    one = granted(GIB)
    one.note("grant", uuids=["GPU-0"])
    store.save(one)
    assert store.load(7) == one and store.load_all() == ([one], [])
    assert (store.folder / "7.json").stat().st_mode & 0o777 == 0o600
    store.remove(7)
    store.remove(7)
    with pytest.raises(SluiceError, match="job 7: no record"):
        store.load(7)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema_version": 1}', '{"schema_version": 2}', "null", '"x"'])
def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.save(record(8))
    (tmp_path / "7.json").write_text(text)
    found, [problem] = store.load_all()
    assert [one.job for one in found] == [8] and "7.json" in problem.what


def test_fields_of_later_versions_are_ignored() -> None:
    fields = json.loads(granted(GIB).to_json())
    fields["later"] = fields["grants"][0]["later"] = 1
    assert JobRecord.from_json(json.dumps(fields), "x") == granted(GIB)


def test_a_job_is_as_old_as_the_clock_says_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    now, up = [5000.0], [100.0]
    monkeypatch.setattr("prolog_epilog.record.time.time", lambda: now[0])
    monkeypatch.setattr("prolog_epilog.record.uptime", lambda: up[0])
    one, earlier = record(started=5000.0, started_uptime=100.0), record(started=5000.0)
    now[0], up[0] = 5000.0 - 3600 + 30, 130.0
    assert (one.age(), earlier.age()) == (30.0, -3570.0)
    for each in (one, earlier):
        each.end(now[0], up[0])
    assert (one.ended, one.ran_s, earlier.ran_s) == (1430.0, 30.0, None)
    up[0] = 20.0  # another boot: only the times are left
    one.end(now[0], up[0])
    assert (one.age(), one.ran_s) == (-3570.0, None)


def test_old_records_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(record(7))
    store.save(record(8))
    os.utime(tmp_path / "7.json", (1, 1))
    store.prune(before=1000)
    assert [one.job for one in store.load_all()[0]] == [8]


# ---- caps ----


def test_caps_follow_the_policy_and_the_last_good_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "sluice.policy"
    caps = Caps(path)
    assert caps.of("physics") is None  # no policy, no caps
    tenants = [Tenant(account="physics", gpu_memory_mib_per_gpu=100), Tenant(account="atoms")]
    CompiledPolicy(generated_s=0, source="test", tenants=tenants).write(path)
    assert (caps.of("physics"), caps.of("atoms"), caps.of("other")) == (100 * MIB, None, None)
    path.write_text("damaged")
    assert caps.of("physics") == 100 * MIB and caps.problem is not None
    path.unlink()
    assert caps.of("physics") == 100 * MIB
    path.write_text("damaged from the start")
    with pytest.raises(SluiceError, match="checksum"):
        Caps(path).of("physics")


# ---- limits ----


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    made = Agent(Settings(run=tmp_path / "run", records=tmp_path / "records", policy=tmp_path / "sluice.policy"))
    made.state.devices = [device(0), device(1)]
    made.contexts.measured = {device(0).kind: {"total": 80 * GIB, "context": GIB // 2}}
    made.state.jobs.prepare()
    made.state.store.prepare()
    return made


def test_the_smaller_of_what_was_asked_and_the_cap_holds(agent: Agent) -> None:
    CompiledPolicy(
        generated_s=0, source="test", tenants=[Tenant(account="physics", gpu_memory_mib_per_gpu=10240)]
    ).write(agent.state.settings.policy)
    for asked, bound in ((4 * GIB, 4 * GIB), (20 * GIB, 10 * GIB), (None, 10 * GIB)):
        one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
        agent.jobs.limit_device(one, agent.state.devices[0], asked, True)
        assert one.grants[0].limit == bound
    other = granted(8 * GIB, job=8)
    agent.state.records[8] = other
    one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    agent.jobs.limit_device(one, agent.state.devices[0], 4 * GIB, True)
    assert one.grants[0].limit == 2 * GIB  # what the tenant's other job leaves
    other.grants[0].limit = 10 * GIB
    with pytest.raises(RefusalError, match=r"account physics may have 10G of a GPU, and its jobs here have 10G"):
        agent.jobs.limit_device(one, agent.state.devices[0], 4 * GIB, True)


def test_steps_that_srun_starts_do_not_add_up(agent: Agent) -> None:
    """With --overlap their parts are the same memory; the largest is the job's, until the whole is told."""
    one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    for asked, whole, bound in ((2, False, 2), (4, False, 4), (3, False, 4), (8, True, 8)):
        agent.jobs.limit_device(one, agent.state.devices[0], asked * GIB, whole)
        assert one.grants[0].limit == bound * GIB


def ask(agent: Agent, peer_uid: Any = 0, **request: object) -> dict[str, object]:
    return agent.server.answer(json.dumps(request).encode(), Peer(os.getpid(), peer_uid))


def test_requests_that_make_no_sense_are_refused(agent: Agent) -> None:
    for line in (b"", b"x", b"[]", b"1", b'{"do": "no"}', b'{"do": []}', b"{}", b'{"do": "prolog"}'):
        assert "error" in agent.server.answer(line, Peer(1, 0)), line
    for wrong in ({"job": 1, "gpus": [9]}, {"job": 1, "gpus": [-1]}, {"job": 1, "gpus": 3}):
        fields = {"uid": 1, "user": "", "account": "", "partition": ""} | wrong
        assert "error" in ask(agent, do="prolog", **fields)
    assert agent.state.records == {} and list(agent.state.jobs.folder.iterdir()) == []


def test_a_split_over_gpus_is_in_force_from_the_prolog_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.cgroups.jobs_here", lambda: set())
    for name in ("nvidia",):
        agent.watcher.watches[name] = Watch(Worker(name))
    job = {"do": "prolog", "uid": 1000, "user": "ann", "account": "physics", "partition": "main", "gpus": [0, 1]}
    assert ask(agent, **job, job=7, split=[[0, 40960], [1, 512]]) == {"ok": {}}
    one = agent.state.records[7]
    assert one.split and [grant.limit for grant in one.grants] == [40 * GIB, 512 * MIB]
    assert ask(agent, **job, job=8, split=[[0, 1000]]) == {"ok": {}}  # not of all its GPUs: nothing is believed
    assert not agent.state.records[8].split and agent.state.records[8].grants[0].limit is None
    assert "makes no sense" in str(ask(agent, **job, job=9, split=[[0]])["error"]) or 9 not in agent.state.records


def test_only_root_may_speak_for_jobs(agent: Agent) -> None:
    for name in ("prolog", "limit", "epilog", "status"):
        assert "for root only" in str(ask(agent, peer_uid=1000, do=name)["error"])
    assert ask(agent, peer_uid=1000, do="devices") == {"ok": {"files": ["/dev/nvidia0", "/dev/nvidia1"]}}


def test_limits_are_refused_that_cannot_hold(agent: Agent) -> None:
    fields = {"do": "limit", "job": 7, "uid": 1000, "whole": True, "gpus": [0], "shards": 10, "open": []}
    assert "its prolog did not run" in str(ask(agent, **fields)["error"])
    agent.state.records[7] = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    assert "of user 1000, not 5" in str(ask(agent, **fields | {"uid": 5})["error"])
    assert "GPU 1 is not among those" in str(ask(agent, **fields | {"gpus": [1]})["error"])
    assert "can open /dev/nvidia1, which it was not given" in str(ask(agent, **fields | {"open": ["/dev/nvidia1"]}))
    assert agent.state.records[7].events[-1].detail["open"] == ["/dev/nvidia1"]
    assert "100G asked of a GPU with 80G" in str(ask(agent, **fields | {"shards": 100 * 1024})["error"])
    agent.state.records[7].grants.append(Grant(1, "GPU-1", "nvidia", "H100", 80 * GIB))
    assert "how many on each" in str(ask(agent, **fields | {"gpus": [0, 1]})["error"])
    agent.contexts.measured = {}
    assert "a driver context is not known" in str(ask(agent, **fields)["error"])


def test_the_epilog_ends_the_jobs_own_processes_and_no_others(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    owners = {mine.pid: Place(7, "0"), other.pid: Place(8, "0")}
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", owners.get)
    watch = agent.watcher.watches["nvidia"] = Watch(Worker("nvidia"))
    watch.owners = {pid: Owner(place, 1000) for pid, place in owners.items()}
    watch.held = {("GPU-0", mine.pid): GIB, ("GPU-0", other.pid): GIB}

    def sample(of: Watch, deadline: float) -> None:
        assert deadline > 0
        of.held = {key: size for key, size in of.held.items() if key[1] == other.pid or mine.poll() is None}

    monkeypatch.setattr(agent.watcher, "await_sample", sample)
    one = agent.state.records[7] = granted(2 * GIB)
    try:
        assert Reclaim(agent.state, agent.watcher).free(one) == {}
        assert mine.wait(10) == -9 and other.poll() is None
        assert [event.detail for event in one.events] == [{"pid": mine.pid}]
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_memory_that_nobody_holds_makes_a_gpu_unclean(agent: Agent) -> None:
    watch = agent.watcher.watches["nvidia"] = Watch(Worker("nvidia"))
    one = agent.state.records[7] = granted(GIB)
    watch.held = {("GPU-0", 1): GIB}
    agent.watcher.note_foreign(watch, {"GPU-0": 3 * GIB})
    assert one.grants[0].foreign == 2 * GIB and Reclaim(agent.state, agent.watcher).residue(one) == {}
    agent.watcher.note_foreign(watch, {"GPU-0": 4 * GIB})
    assert "1G in use by no process since job 7" in Reclaim(agent.state, agent.watcher).residue(one)["GPU-0"]
    agent.state.records[8] = granted(GIB, job=8)  # it may be the other job's
    assert Reclaim(agent.state, agent.watcher).residue(one) == {}


def test_hints_name_what_is_near() -> None:
    assert hints([device(0), device(5)]) == {
        "SLUICE_GPU_NUMA": "0,1",
        "SLUICE_GPU_CORES": "0-3",
        "SLUICE_GPU_NICS": "mlx5_0,mlx5_5",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert hints([]) == {}
    assert hints([device(0, vendor="intel", numa_node=None, cores="", nics=())]) == {}


def test_devices_are_numbered_as_in_gres_conf() -> None:
    with pytest.raises(SluiceError, match=r"GPU 2 of gres.conf: this node's drivers show 2 devices"):
        select([device(0), device(1)], [2])
    assert [one.uuid for one in select([device(0), device(1)], [1, 0])] == ["GPU-1", "GPU-0"]
    from gres_probe.inventory import Inventory

    assert devices_of(Inventory("n1")) == []


# ---- notices ----


def test_a_notice_reaches_a_processs_standard_error() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert notice.tell([program.pid], "job 7: too much")
        program.communicate(b"\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        notice.tell([2**22 + 1, program.pid], "again")  # the first has ended
        assert b"sluice: again" in program.communicate(b"\n")[1]


def test_a_notice_is_written_with_the_processs_own_rights(tmp_path: Path) -> None:
    """A file that it opened for reading is not written, though root could."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    command = [sys.executable, "-c", "input()"]
    with precious.open() as file, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file) as program:
        assert not notice.tell([program.pid], "job 7: too much")
        program.communicate(b"\n")
    assert precious.read_text() == "as it was"


def test_a_full_pipe_does_not_hold_the_watchdog_up() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(write, True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=write) as program:
        began = time.monotonic()
        assert not notice.tell([program.pid], "too much")
        assert time.monotonic() - began < 5
        program.kill()
    os.close(read)
    os.close(write)


# ---- the vendor's process ----


def vendor_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Worker:
    """A worker whose process runs `body` for each request."""
    (tmp_path / "fake_sampling.py").write_text(f"import sys, json, time, os\nfor line in sys.stdin:\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Worker("nvidia", timeout=3.0, module="fake_sampling")


def test_a_hanging_driver_is_given_up_and_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "time.sleep(60) if not os.path.exists('well') else print(json.dumps({'ok': {'usage': []}}), flush=True)"
    worker = vendor_process(tmp_path, monkeypatch, hang)
    with pytest.raises(SluiceError, match="the nvidia driver gives no answer"):
        worker.ask(do="sample", timeout=0.5)
    (tmp_path / "well").touch()
    assert worker.ask(do="sample", timeout=20.0) == {"usage": []}
    worker.close()


def test_a_crash_and_an_error_of_the_library_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = vendor_process(tmp_path, monkeypatch, "os.abort()")
    with pytest.raises(SluiceError, match="ended the process"):
        worker.ask(do="sample", timeout=20.0)
    (tmp_path / "fake_sampling.py").write_text('print(\'{"error": "GPU is lost"}\', flush=True); input()\n')
    with pytest.raises(SluiceError, match="the nvidia driver: GPU is lost"):
        worker.ask(do="sample", timeout=20.0)
    worker.close()


# ---- the programs ----


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """A socket that gives prepared answers; where it lies, and what it was asked."""
    listeners: list[socket.socket] = []

    def make(answers: list[bytes]) -> tuple[str, list[dict[str, object]]]:
        path, asked = str(tmp_path / "agent.sock"), []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listeners.append(listener)
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    asked.append(json.loads(connection.makefile("rb").readline()))
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return path, asked

    yield make
    for listener in listeners:
        listener.close()


def program(name: str, path: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the programs against another socket, with little patience."""
    text = PROGRAM.read_text().replace("/run/sluice/agent.sock", path).replace("PATIENCE = 5.0", "PATIENCE = 0.3")
    (folder / name).write_text(text)
    command = ["/usr/bin/python3", "-IS", str(folder / name)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": 'a"\u00e9\n', "SLURM_JOB_GPUS": "0,1"}


def test_the_prolog_tells_the_job(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b'{"ok": {}}\n'])
    done = program("sluice-prolog", path, tmp_path, **JOB, LC_ALL="C.UTF-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert asked == [
        {
            "do": "prolog",
            "job": 7,
            "uid": 1000,
            "user": 'a"\u00e9\n',
            "account": "",
            "partition": "",
            "gpus": [0, 1],
            "split": [],
        }
    ]


def test_the_prolog_tells_which_run_of_the_job_it_is(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b'{"ok": {}}\n'] * 2)
    assert program("sluice-prolog", path, tmp_path, **JOB, SLURM_JOB_RESTART_COUNT="0").returncode == 0
    newer = {"SLURM_JOB_RESTART_COUNT": "3", "SLURM_JOB_START_TIME": "1790000000"}  # the latter since 23.02
    assert program("sluice-prolog", path, tmp_path, **JOB, **newer).returncode == 0
    assert [(one["restarts"], one.get("begun")) for one in asked] == [(0, None), (3, 1790000000)]


@pytest.mark.parametrize("answer", [b"", b"\n", b"x\n", b"[]\n", b"{}\n", b'{"ok"', b'{"error": "no room"}\n', b"1\n"])
def test_a_bad_answer_is_a_failure(answering: Answering, tmp_path: Path, answer: bytes) -> None:
    path, _ = answering([answer])
    done = program("sluice-prolog", path, tmp_path, **JOB)
    assert done.returncode == 1 and done.stderr.startswith("sluice-prolog: ") and "Traceback" not in done.stderr


def test_an_answer_that_a_restart_cut_off_is_asked_for_again(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b"", b'{"ok": {"unclean": []}}\n'])
    assert program("sluice-epilog", path, tmp_path, **JOB).returncode == 0
    assert len(asked) == 2


def test_an_unclean_gpu_fails_the_epilog(answering: Answering, tmp_path: Path) -> None:
    path, _ = answering([b'{"ok": {"unclean": ["GPU x: process 5 cannot be ended"]}}\n'])
    done = program("sluice-epilog", path, tmp_path, **JOB)
    assert (done.returncode, done.stderr) == (1, "sluice-epilog: GPU x: process 5 cannot be ended\n")


def test_without_the_agent_a_job_with_gpus_fails_and_another_does_not(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    done = program("sluice-prolog", gone, tmp_path, **JOB)
    assert done.returncode == 1 and "systemctl start sluice-agent" in done.stderr
    assert program("sluice-prolog", gone, tmp_path, SLURM_JOB_ID="7").returncode == 0
    assert program("sluice-task-prolog", gone, tmp_path, SLURM_JOB_ID="7").returncode == 0


@pytest.mark.parametrize(
    "wrong", [{"SLUICE_GPU_SHARDS": "0:1,2"}, {"SLURM_JOB_ID": "x"}, {"SLURM_JOB_GPUS": "0,-1"}, {"SLURM_JOB_UID": ""}]
)
def test_variables_without_sense_are_named(tmp_path: Path, wrong: dict[str, str]) -> None:
    done = program("sluice-prolog", "/nonexistent", tmp_path, **{**JOB, **wrong})
    assert done.returncode == 1 and next(iter(wrong)) in done.stderr and "Traceback" not in done.stderr


def test_the_helper_says_where_the_limits_lie(answering: Answering, tmp_path: Path) -> None:
    files = json.dumps({"ok": {"files": ["/dev/null", "/nonexistent/device"]}}).encode() + b"\n"
    path, asked = answering([files, b'{"ok": {"region": "/run/sluice/limit/job_7"}}\n'])
    task = {"SLUICE_JOB": "7", "SLUICE_UID": "1", "SLUICE_STEP": "part", "SLUICE_GPUS": "0", "SLUICE_SHARDS": "5"}
    assert program("sluice-task-init", path, tmp_path, **task).stdout == "region /run/sluice/limit/job_7\n"
    limit = {"do": "limit", "job": 7, "uid": 1, "whole": False, "gpus": [0], "shards": 5, "open": ["/dev/null"]}
    assert asked == [{"do": "devices"}, limit]


def test_a_task_keeps_what_its_user_set(answering: Answering, tmp_path: Path) -> None:
    own = tmp_path / "device"
    own.touch()
    files = json.dumps({"ok": {"files": [str(own), "/nonexistent/device"]}}).encode() + b"\n"
    path, asked = answering([files, b'{"ok": {"export": {"NCCL_IB_HCA": "=mlx5_0", "SLUICE_GPU_NUMA": "0"}}}\n'])
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", NCCL_IB_HCA="mine")
    assert done.stdout == "export SLUICE_GPU_NUMA=0\n"
    assert asked[1] == {"do": "task", "open": [str(own)]}


def test_a_limiter_that_users_cannot_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    library = folder / "libsluice_limit.so"
    library.write_bytes(b"")
    library.chmod(0o644)
    with pytest.raises(SluiceError, match=r"users cannot open it, as .*/home has mode 700"):
        check_library(library)
    with pytest.raises(SluiceError, match="No such file"):
        check_library(folder / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")
def test_a_limiter_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sluice"
    folder.mkdir(mode=0o755)
    library = folder / "libsluice_limit.so"
    library.touch(mode=0o755)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o555)  # pytest's own folders are shut
    check_library(library)
    for path, change in ((library, 0o757), (library, 0o775), (folder, 0o777), (folder, 0o775)):
        path.chmod(change)
        with pytest.raises(SluiceError, match="others than root can replace it"):
            check_library(library)
        path.chmod(0o755)
    folder.chmod(0o1777)  # as /tmp
    check_library(library)
    os.chown(folder, 65534, -1)
    with pytest.raises(SluiceError, match="of user 65534"):
        check_library(library)


# ---- duties and readers of samples ----


def test_a_duty_that_fails_is_called_again_and_does_not_hold_another_up(capfd: pytest.CaptureFixture[str]) -> None:
    stopping, called = threading.Event(), {"bad": 0, "good": 0}
    enough = threading.Event()

    def bad() -> None:
        called["bad"] += 1
        raise ValueError("no sensor")

    def good() -> None:
        called["good"] += 1
        if called["good"] >= 3 and called["bad"] >= 3:
            enough.set()

    duties = Duties(stopping)
    duties.add("bad", 0.001, bad)
    duties.add("good", 0.001, good)
    duties.start()
    assert enough.wait(20)
    stopping.set()
    assert capfd.readouterr().err.count("action=problem duty=bad") == 1  # said once, however often it fails


def test_readers_get_each_sample_with_the_vendors_whole_answer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, seen = Watch(Worker("nvidia")), []
    answer = {"usage": [["GPU-0", 5, 7]], "temperature": {"GPU-0": 50}}
    monkeypatch.setattr(watch.worker, "ask", lambda **_: answer)

    def read(of: Watch, told: dict[str, object]) -> None:
        seen.append((of.samples, told))
        agent.state.stopping.set()

    agent.watcher.on_sample.append(read)
    agent.watcher._watch(watch)
    assert seen == [(1, answer)] and watch.held == {("GPU-0", 5): 7}


def test_the_epilog_waits_while_memory_is_cleared(tmp_path: Path) -> None:
    """Other requests are given up after 20 s; this one may take as long as a policy allows."""
    names = dict(
        line.split(" = ")[:2] for line in PROGRAM.read_text().splitlines() if line.startswith(("SECONDS", "EPIL"))
    )
    assert float(names["SECONDS"]) == 20 and float(names["EPILOG_SECONDS"].split()[0]) > 3600
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def slowly() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.makefile("rb").readline()
                time.sleep(1.5)
                connection.sendall(b'{"ok": {"unclean": []}}\n')

        threading.Thread(target=slowly, daemon=True).start()
        text = (
            PROGRAM.read_text().replace("/run/sluice/agent.sock", str(path)).replace("SECONDS = 20.0", "SECONDS = 0.5")
        )
        (tmp_path / "sluice-epilog").write_text(text)
        command = ["/usr/bin/python3", "-IS", str(tmp_path / "sluice-epilog")]
        assert subprocess.run(command, env=JOB, check=False, timeout=30).returncode == 0


def test_what_a_task_makes_up_is_refused_and_not_kept(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: 62 KB of names a request, each of them another event."""
    agent.state.records[7] = granted(GIB)
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    other = agent.state.devices[1].own_file
    for number in range(200):
        request = {"do": "task", "open": [other, *(f"/dev/{number}/" + "x" * 100 for _ in range(50))]}
        answer = agent.server.answer(json.dumps(request).encode(), Peer(1, 1000))
        assert "which it was not given" in answer["error"]
    [event] = agent.state.records[7].events
    assert event.detail["open"] == [other] and event.times == 200
    answer = agent.server.answer(b'{"do": "status"}', Peer(1, 0))
    assert len(json.dumps(answer)) < 8 << 10


def test_the_drivers_are_let_go_for_a_change_of_layout(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, asked = Watch(Worker("nvidia")), []
    agent.watcher.watches["nvidia"] = watch

    def sample(**request: object) -> dict[str, object]:
        asked.append(request)
        agent.state.stopping.set()
        return {"usage": []}

    monkeypatch.setattr(watch.worker, "ask", sample)
    agent.state.records[7] = granted(GIB)
    assert "1 jobs have GPUs here" in str(ask(agent, do="pause")["error"])
    del agent.state.records[7]
    assert ask(agent, do="pause") == {"ok": {}}
    thread = threading.Thread(target=agent.watcher._watch, args=(watch,), daemon=True)
    thread.start()
    thread.join(0.5)
    assert asked == []
    agent.watcher._paused_until = 0.0
    thread.join(20)
    assert len(asked) == 1
    assert ask(agent, do="restart") == {"ok": {}}
