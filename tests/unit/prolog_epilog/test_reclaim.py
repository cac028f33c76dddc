"""Memory that stays on a GPU after a job: its user's processes that may hold it are ended; what is left is a fault."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from policy.model import Strangers as Policy
from prolog_epilog import cgroups
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.devices import NodeDevice
from prolog_epilog.owners import Owner
from prolog_epilog.reclaim import Reclaim
from prolog_epilog.state import Settings, State
from prolog_epilog.suspects import Suspects
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError
from sluice.exchange.record import Grant, JobRecord
from tests.unit.prolog_epilog.examples import granted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: processes of other users")

GIB = 1 << 30
ANN, BEN = 48611, 48612
HOLDS = "import os, sys, time; sys.argv[1:] and os.open(sys.argv[1], os.O_RDONLY); print(flush=True); time.sleep(60)"

Start = Callable[..., subprocess.Popen[str]]


class Node:
    """One GPU, whose memory is free when nobody of `held_by` lives any more."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy = Policy()
        self.file = folder / "nvidia0"
        self.file.touch()
        self.state = State(Settings(run=folder / "run", records=folder / "records", memory_wait=60.0))
        for store in (self.state.jobs, self.state.store):
            store.prepare()
        self.state.devices = [
            NodeDevice(0, "nvidia", "H100", "GPU-0", "", (str(self.file),), str(self.file), 81008, "550", 0, "", ())
        ]
        self.watcher = Watcher(self.state, lambda: self.policy)
        self.watch = self.watcher.watches["nvidia"] = Watch(Worker("nvidia"))
        self.held_by: list[subprocess.Popen[str]] = []
        monkeypatch.setattr(self.watcher, "await_sample", self.sample)
        monkeypatch.setattr("prolog_epilog.reclaim._HOLDERS_AFTER", 0.0)
        self.reclaim = Reclaim(self.state, self.watcher)

    def sample(self, watch: Watch, deadline: float) -> None:
        time.sleep(0.05)
        held = any(program.poll() is None for program in self.held_by)
        watch.foreign = {"GPU-0": 5 * GIB if held else GIB}

    def wait(self, seconds: float) -> None:
        self.state.settings = replace(self.state.settings, memory_wait=seconds)

    def job(self, number: int = 7, uid: int = ANN) -> JobRecord:
        one = JobRecord(number, uid, f"user{uid}", "physics", "main", "n1", 1.0)
        one.grants = [Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB, foreign=GIB)]
        self.state.records[number] = one
        return one


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


@pytest.fixture
def start(node: Node) -> Iterator[Start]:
    programs = []

    def begin(uid: int, *files: Path) -> subprocess.Popen[str]:
        for folder in (node.file.parent, *node.file.parent.parents):
            if folder.name.startswith(("pytest", node.file.parent.name)):
                folder.chmod(0o755)
        command = [sys.executable, "-I", "-S", "-c", HOLDS, *map(str, files)]
        program = subprocess.Popen(command, user=uid, stdout=subprocess.PIPE, text=True)
        programs.append(program)
        assert program.stdout and program.stdout.readline() == "\n"
        return program

    yield begin
    for program in programs:
        program.kill()
        program.communicate()


def strays(record: JobRecord) -> list[int]:
    return [event.detail["pid"] for event in record.events if event.action == "stray"]


def test_a_driver_that_is_slow_once_leaves_no_gpu_unclean(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def sample(watch: Watch, deadline: float) -> None:
        nonlocal looks
        looks += 1
        watch.problem = SluiceError("the nvidia driver gives no answer") if looks < 4 else None
        watch.foreign = {"GPU-0": GIB}

    monkeypatch.setattr(node.watcher, "await_sample", sample)
    assert node.reclaim.free(node.job()) == {} and looks == 4
    looks = -1000
    node.wait(0.3)
    assert "gives no answer" in node.reclaim.free(node.job())["GPU-0"]


def test_who_has_the_device_open_is_ended_and_nobody_else(node: Node, start: Start) -> None:
    holder, other, neighbour = start(ANN, node.file), start(ANN), start(BEN, node.file)
    node.held_by = [holder]
    record = node.job()
    assert node.reclaim.free(record) == {}
    assert holder.wait(10) == -9 and other.poll() is None and neighbour.poll() is None
    assert strays(record) == [holder.pid]


def test_a_descriptor_that_nobody_shows_is_found_by_its_user(
    node: Node, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in a socket, or only a mapping is left of it."""
    monkeypatch.setattr("prolog_epilog.reclaim._ALL_AFTER", 0.0)
    hidden, neighbour = start(ANN), start(BEN)
    node.held_by = [hidden]
    assert node.reclaim.free(node.job()) == {}
    assert hidden.wait(10) == -9 and neighbour.poll() is None


def test_who_left_a_shared_gpu_before_is_a_suspect_of_the_last_one(node: Node, start: Start) -> None:
    first, last, holder = node.job(7, ANN), node.job(8, BEN), start(ANN, node.file)
    node.held_by = [holder]
    assert node.reclaim.free(first) == {} and holder.poll() is None  # it may be the other job's
    del node.state.records[7]
    assert node.reclaim.free(last) == {} and holder.wait(10) == -9
    assert node.reclaim._left == {}


def test_who_left_nothing_is_no_suspect_when_a_neighbour_does(
    node: Node, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prolog_epilog.reclaim._ALL_AFTER", 0.0)
    first, last, innocent, hidden = node.job(7, ANN), node.job(8, BEN), start(ANN), start(BEN)
    assert node.reclaim.free(first) == {}
    del node.state.records[7]
    node.held_by = [hidden]
    assert node.reclaim.free(last) == {} and hidden.wait(10) == -9
    assert innocent.poll() is None


def test_another_job_of_the_user_hears_why_its_step_was_ended(
    node: Node, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start(ANN, node.file)
    node.held_by = [holder]
    monkeypatch.setattr(cgroups, "place_of", lambda pid, *_: Place(9, "0") if pid == holder.pid else None)
    other = node.job(9)
    other.grants = []
    assert node.reclaim.free(node.job()) == {}
    [event] = other.events
    assert (event.action, event.detail["step"], event.detail["uuid"]) == ("end", "0", "GPU-0")


def test_a_number_that_becomes_anothers_while_others_are_ended_is_not_signalled(
    node: Node, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who sees his first processes end ends his last one, too, and another user's process gets its number."""
    monkeypatch.setattr("prolog_epilog.reclaim._ALL_AFTER", 0.0)
    first, last = start(ANN), start(ANN)
    uid_of = cgroups.uid_of
    monkeypatch.setattr(
        cgroups, "uid_of", lambda pid, *of: BEN if pid == last.pid and ends(first) else uid_of(pid, *of)
    )
    node.held_by = [first]
    assert node.reclaim.free(node.job()) == {}
    assert first.wait(10) == -9 and last.poll() is None


def ends(program: subprocess.Popen[str]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        program.wait(0.1)
    return program.returncode is not None


def test_what_stays_when_all_are_gone_is_the_machines_fault(node: Node, start: Start) -> None:
    node.wait(1.0)
    innocent = start(BEN)
    node.held_by = [innocent]
    assert "4G in use by no process since job 7" in node.reclaim.free(node.job())["GPU-0"]
    assert innocent.poll() is None


@pytest.mark.parametrize(("uid", "policy"), [(ANN, Policy(unknown="report")), (0, Policy())])
def test_nothing_is_ended_on_suspicion_where_policy_says_so_nor_of_roots(
    node: Node, start: Start, uid: int, policy: Policy
) -> None:
    node.wait(1.0)
    node.policy = policy
    holder = start(uid, node.file)
    node.held_by = [holder]
    assert "in use by no process" in node.reclaim.free(node.job(uid=uid))["GPU-0"]
    assert holder.poll() is None


@pytest.mark.parametrize("owner", [Owner(), Owner(uid=ANN), Owner(Place(7, "0"), ANN)])
def test_what_the_driver_lists_of_remains_is_not_free(node: Node, start: Start, owner: Owner) -> None:
    """The process that had it is none, or a zombie; another one keeps its descriptor."""
    record, zombie, holder = node.job(), start(ANN), start(ANN, node.file)
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    node.watch.owners = {zombie.pid: owner}

    def sample(watch: Watch, deadline: float) -> None:
        time.sleep(0.05)
        watch.held = {("GPU-0", zombie.pid): 4 * GIB} if holder.poll() is None else {}

    node.watcher.await_sample = sample  # type: ignore[method-assign]
    assert node.reclaim.free(record) == {} and holder.wait(10) == -9


def test_what_the_user_runs_outside_of_jobs_keeps_nothing_after_the_last_one(node: Node, start: Start) -> None:
    record, outside = node.job(), start(ANN)
    node.watch.owners = {outside.pid: Owner(uid=ANN)}

    def sample(watch: Watch, deadline: float) -> None:
        time.sleep(0.05)
        watch.held = {("GPU-0", outside.pid): 4 * GIB} if outside.poll() is None else {}

    node.watcher.await_sample = sample  # type: ignore[method-assign]
    assert node.reclaim.free(record) == {} and outside.wait(10) == -9


def test_a_look_is_bounded_and_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in range(1, 31):
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/status").write_text(f"Uid:\t{ANN}\t0\t0\t0\n")
        (tmp_path / f"{pid}/fd/3").symlink_to("/dev/nvidia0")

    def looks(count: int, files: set[str] | None) -> list[list[int]]:
        suspects = Suspects({ANN: "ann"}, tmp_path)
        return [[pid for pid, _ in suspects.look(files)] for _ in range(count)]

    monkeypatch.setattr("prolog_epilog.suspects._MOST_PROCESSES", 10)
    first, second, third = [list(range(start, start + 10)) for start in (1, 11, 21)]
    assert looks(4, None) == [first, second, third, first]
    monkeypatch.setattr("prolog_epilog.suspects._MOST_FILES", 2)
    assert looks(3, {"/dev/nvidia0"}) == [[1, 2], [3, 4], [5, 6]]
    assert looks(2, {"/dev/nvidia1"}) == [[], []]


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
