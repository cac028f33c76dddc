"""Whose processes are that a driver lists, what is done about them, and how a step is ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from policy.node_limits import NodeStrangers as Policy
from prolog_epilog import cgroups, job_output, owners, step_kill
from prolog_epilog.cgroups import Place
from prolog_epilog.owners import Owner, Owners
from prolog_epilog.sampling import _bounded
from prolog_epilog.state import Settings, State
from prolog_epilog.step_kill import end_step
from prolog_epilog.strangers import Earlier, Strangers
from prolog_epilog.subuids import Subuids
from prolog_epilog.watchdog import OUTSIDE, Stranger, judge
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.exchange.record import Grant, JobRecord

GIB = 1 << 30
STEP_1 = "9:freezer:/slurm_n1/uid_1000/job_12/step_0\n0::/\n"
STEP_2 = "0::/system.slice/n1_slurmstepd.scope/job_12/step_0/user/task_0\n"
EXITED_1 = "9:freezer:/\n0::/\n"
EXITING = 0x4


def process(
    proc: Path,
    pid: int,
    text: str,
    *,
    uid: int = 1000,
    flags: int = 0,
    threads: dict[int, tuple[str, int]] | None = None,
) -> None:
    """A process, and its other threads: what their cgroup files say, and their flags."""
    main = proc / str(pid)
    of = {pid: (text, flags), **(threads or {})}
    for folder, (said, flag) in [(main, of[pid]), *((main / "task" / str(tid), one) for tid, one in of.items())]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup").write_text(said)
        (folder / "stat").write_text(f"{folder.name} (a) b) S 1 1 1 0 -1 {flag} 0 0\n")
    (main / "status").write_text(f"Name:\ta\nUid:\t{uid}\t0\t0\t0\n")


def record(
    job: int = 12, uid: int = 1000, limit: int | None = GIB, uuid: str = "GPU-0", user: str = "ann"
) -> JobRecord:
    one = JobRecord(job, uid, user, "physics", "main", "n1", 1.0)
    one.grants = [Grant(0, uuid, "nvidia", "H100", 80 * GIB, limit, limit)]
    return one


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def subuids(tmp_path: Path) -> Subuids:
    (tmp_path / "subuid").write_text("ann:100000:65536\nbroken\n1001:165536:65536\nx:y:z\nroot:0:5\n")
    return Subuids(tmp_path / "subuid")


@pytest.fixture
def finder(tmp_path: Path, subuids: Subuids) -> Owners:
    return Owners(tmp_path / "proc", subuids=subuids, clock=Clock(), most_files=4)


# ---- owners ----


def test_containers_count_to_the_owner_of_their_subordinate_uids(tmp_path: Path, subuids: Subuids) -> None:
    assert [subuids.owner(uid) for uid in (0, 1000, 99999, 100000, 165535, 165536, 231072)] == [
        "",
        "",
        "",
        "ann",
        "ann",
        "1001",
        "",
    ]
    (tmp_path / "subuid").write_text("bob:100000:10\n")
    assert (subuids.owner(100001), subuids.owner(100010)) == ("bob", "")
    (tmp_path / "subuid").unlink()
    assert subuids.owner(100001) == ""
    records = {12: record(), 13: record(13, 1001, user="bob")}
    usage = [("GPU-0", 1, 2 * GIB), ("GPU-0", 2, 2 * GIB)]
    found = judge(usage, records, {1: Owner(uid=100001, name="ann"), 2: Owner(uid=165537, name="1001")}.get)
    assert [(act.job, act.step, act.pids) for act in found.acts] == [(12, OUTSIDE, (1,)), (13, OUTSIDE, (2,))]


def test_a_huge_file_of_subordinate_uids_is_read_in_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "subuid").write_text("ann:100000:65536\n" + "#" * (2 << 20))
    assert Subuids(tmp_path / "subuid").owner(100001) == "ann"
    assert "larger than" in capfd.readouterr().err


def test_what_was_found_of_a_process_outlives_its_leader(finder: Owners, tmp_path: Path) -> None:
    """Version 1 does not show it then; a thread that is not among the first does not matter."""
    process(tmp_path / "proc", 5, STEP_1)
    assert finder.look([5]) == {5: Owner(Place(12, "0"), 1000)}
    dead = {tid: (EXITED_1, EXITING) for tid in range(6, 200)}
    process(tmp_path / "proc", 5, EXITED_1, flags=EXITING, threads=dead)
    assert finder.look([5])[5].place == Place(12, "0")


def test_one_that_only_seems_to_end_counts_to_its_user_soon(finder: Owners, tmp_path: Path) -> None:
    clock = finder._clock
    assert isinstance(clock, Clock)
    process(tmp_path / "proc", 5, EXITED_1, flags=EXITING, threads={6: (EXITED_1, EXITING)})
    assert finder.look([5])[5].ending
    clock.now += 1.9
    assert finder.look([5])[5].ending
    clock.now += 0.2
    assert finder.look([5])[5] == Owner(uid=1000)
    dead = {tid: (EXITED_1, EXITING) for tid in range(8, 200)}
    process(tmp_path / "proc", 7, EXITED_1, flags=EXITING, threads=dead)  # what is behind them is unknown
    assert finder.look([7])[7] == Owner(uid=1000)


def test_a_process_that_ended_is_not_taken_for_another_with_its_number(tmp_path: Path) -> None:
    """Its file cannot be read any more; here it is one of another number, as the kernel gives them out."""
    finder = Owners()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        before = finder.look([program.pid])[program.pid]
        assert before == Owner(uid=os.getuid()) and finder.is_still(program.pid, before)
        program.communicate(b"\n")
        assert finder.look([program.pid])[program.pid] == Owner()
        assert not finder.is_still(program.pid, before)
    assert finder.look([]) == {} and finder._open == 0


def test_who_hides_in_a_path_that_is_too_long_counts_to_his_user(finder: Owners, tmp_path: Path) -> None:
    process(tmp_path / "proc", 50, STEP_1)
    (tmp_path / "proc/50/cgroup").unlink()
    (tmp_path / "proc/50/cgroup").symlink_to("a" * 300)  # to open it fails as the kernel's file does
    owner = finder.look([50])[50]
    assert owner == Owner(uid=1000) and finder.is_still(50, owner)
    [act] = judge([("GPU-0", 50, 2 * GIB)], {12: record()}, finder.look([50]).get).acts
    assert (act.action, act.job, act.step, act.pids) == ("end", 12, OUTSIDE, (50,))


def test_so_many_processes_are_looked_at_and_the_largest_first(
    finder: Owners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_MOST_LOOKS", 10)
    for pid in range(1, 31):
        process(tmp_path / "proc", pid, STEP_1)
    assert list(finder.look(range(30, 0, -1))) == list(range(30, 20, -1)) and finder._open == 4
    assert len(finder.look(range(30, 0, -1))) == 20
    assert len(finder.look(range(30, 0, -1))) == 30
    assert finder.look([30]) == {30: Owner(Place(12, "0"), 1000)} and finder._open == 1


# ---- whose ----


def test_a_place_in_a_job_counts_where_its_user_is_the_jobs() -> None:
    records = {12: record(), 13: record(13, 1001, user="bob")}
    here = Place(12, "0")

    def whose(owner: Owner) -> tuple[int, str] | str:
        found = judge([("GPU-0", 1, 2 * GIB)], records, {1: owner}.get)
        return (found.acts[0].job, found.acts[0].step) if found.acts else found.strangers[0].kind

    assert whose(Owner(here, 1000)) == whose(Owner(here, 0)) == whose(Owner(here, 100001, "ann")) == (12, "0")
    assert whose(Owner(here, 1001)) == (13, OUTSIDE)  # of one who has a job of his own here
    assert whose(Owner(here, 1002)) == (12, "0")  # of one who has none: the cgroup is root's word
    assert whose(Owner(Place(12, "0", uid=1007), 1007)) == "job"  # another job of that number
    assert whose(Owner(Place(14, "0"), 1000)) == "job"  # never the neighbouring job


def test_slurmstepd_and_services_are_nobodys() -> None:
    system = [
        Owner(Place(12, "0", version=2, stepd=True), 0),
        Owner(uid=0),
        Owner(uid=107),
        Owner(uid=1000, ending=True),
    ]
    for owner in system:
        found = judge([("GPU-0", 1, 2 * GIB)], {12: record()}, {1: owner}.get)
        assert (found.acts, found.strangers) == ([], [])
    hidden = Owner(Place(12, "0", version=2, stepd=True), 1000)
    assert judge([("GPU-0", 1, 2 * GIB)], {12: record()}, {1: hidden}.get).acts[0].job == 12


def test_everybody_else_is_a_stranger_of_some_kind() -> None:
    usage = [("GPU-0", 1, 3), ("GPU-0", 2, 4), ("GPU-0", 3, 5), ("GPU-0", 4, 6), ("GPU-1", 2, 1), ("GPU-0", 5, 7)]
    known = {1: Owner(Place(40, "1"), 1009), 2: Owner(Place(40, "1"), 1009), 3: Owner(uid=1009), 4: Owner()}
    found = judge(usage, {12: record()}, known.get)  # 5: not looked at yet
    assert found.acts == [] and found.strangers == [
        Stranger("job", 40, "1", "1009", "GPU-0", 7, (2, 1)),
        Stranger("user", 0, "", "1009", "GPU-0", 5, (3,)),
        Stranger("unknown", 0, "", "", "GPU-0", 6, (4,)),
        Stranger("job", 40, "1", "1009", "GPU-1", 1, (2,)),
    ]


def test_processes_that_are_too_many_count_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.sampling._MOST_LISTED", 2)
    monkeypatch.setattr("prolog_epilog.sampling.uid_of", {1: 1000, 2: 1000, 3: None}.get)
    answer = _bounded(
        [("GPU-0", 1, 1), ("GPU-0", 2, 2), ("GPU-0", 3, 1), ("GPU-0", 4, 9), ("GPU-0", 5, 8), ("GPU-1", 1, 1)]
    )
    assert answer == {
        "usage": [("GPU-0", 4, 9), ("GPU-0", 5, 8), ("GPU-1", 1, 1)],
        "rest": [("GPU-0", 1000, 3)],
    }
    known = {4: Owner(Place(12, "0"), 1000), -1: Owner(uid=1000)}
    [act] = judge([("GPU-0", 4, GIB - 1), ("GPU-0", -1, 5)], {12: record()}, known.get).acts
    assert (act.charged, act.step, act.pids) == (GIB + 4, "0", (4,))  # what is not a process number is never signalled


# ---- strangers ----


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = State(Settings(run=tmp_path / "run", records=tmp_path / "records", policy=tmp_path / "sluice.policy"))
    (tmp_path / "run/agent").mkdir(parents=True)
    for store in (made.jobs, made.store, made.outbox):
        store.prepare()
    return made


def settled(state: State, policy: Policy | None = None) -> Strangers:
    """On a node where prologs report jobs to the agent."""
    made = Strangers(state, lambda: policy or Policy(), Clock())
    made.earlier.begin()
    return made


A_JOB = Stranger("job", 40, "1", "1009", "GPU-0", 7 * GIB, (2, 1))
A_USER = Stranger("user", 0, "", "1009", "GPU-0", GIB, (3,))
UNKNOWN = Stranger("unknown", 0, "", "", "GPU-0", GIB, (4,))


def test_a_job_without_gpus_is_ended_and_the_controllers_hear_of_it(state: State) -> None:
    strangers = settled(state)
    [act] = strangers.acts([A_JOB])
    assert (act.action, act.job, act.step, act.limit, act.pids) == ("end", 40, "1", 0, (2, 1))
    strangers.note(act, notified=True)
    strangers.write()
    strangers.note(act, notified=False)
    strangers.write()
    [file] = state.outbox.folder.iterdir()  # one record, however often it tries
    one = JobRecord.from_json(file.read_text(), "outbox")
    assert (one.job, one.uid, one.grants, one.ended is not None) == (40, 1009, [], True)
    assert [(event.action, event.detail["notified"]) for event in one.events] == [("end", True), ("end", False)]
    assert one.events[0].detail | {"notified": 0} == {
        "step": "1",
        "uuid": "GPU-0",
        "charged": 7 * GIB,
        "limit": 0,
        "notified": 0,
    }


def test_what_policy_says_of_each_kind(state: State, capfd: pytest.CaptureFixture[str]) -> None:
    strangers = settled(state)
    assert strangers.acts([A_USER, UNKNOWN]) == []
    said = capfd.readouterr().err
    assert said.count("action=stranger") == 1 and "user=1009" in said
    clock = strangers._clock
    assert isinstance(clock, Clock)
    clock.now += 6
    assert strangers.acts([A_USER, UNKNOWN]) == [] == strangers.acts([A_USER, UNKNOWN])
    said = capfd.readouterr().err
    assert said.count("action=stranger") == 1 and "user=unknown" in said and "pids=4" in said
    ending_users = settled(state, Policy(users="end", jobs_without_gpus="report", unknown="ignore"))
    [act] = ending_users.acts([A_USER, A_JOB])
    assert (act.job, act.step, act.user, act.pids) == (0, OUTSIDE, "1009", (3,))
    ending_users.write()
    [file] = state.outbox.folder.iterdir()
    assert [event["action"] for event in json.loads(file.read_text())["events"]] == ["report"]


def test_jobs_from_before_the_agent_are_only_reported(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {40}
    monkeypatch.setattr(cgroups, "jobs_here", lambda: set(here))
    strangers = Strangers(state, Policy, Clock())
    strangers.load()
    assert strangers.acts([A_JOB]) == []  # no prolog has come
    strangers.earlier.begin()
    here.add(41)
    later = Stranger("job", 41, "0", "1009", "GPU-0", 1, (9,))
    assert [act.job for act in strangers.acts([A_JOB, later])] == [41]
    again = Strangers(state, Policy, Clock())  # an agent that is started again
    again.load()
    assert [act.job for act in again.acts([A_JOB, later])] == [41]
    (state.settings.run / "agent/earlier.json").unlink()  # the node has booted
    here.clear()
    state.store.save(record())
    booted = Strangers(state, Policy, Clock())
    booted.load()
    assert [act.job for act in booted.acts([A_JOB])] == [40]


def test_what_is_left_of_a_job_that_ended_is_ended_and_its_record_stays(state: State) -> None:
    strangers = settled(state, Policy(jobs_without_gpus="ignore"))
    state.store.save(record(40))
    [act] = strangers.acts([A_JOB])
    strangers.note(act, notified=True)
    strangers.write()
    assert act.action == "end" and list(state.outbox.folder.iterdir()) == []


def test_damaged_memory_of_earlier_jobs_is_named(tmp_path: Path) -> None:
    (tmp_path / "earlier.json").write_text("{")
    with pytest.raises(Exception, match=r"earlier.json: not a list of jobs"):
        Earlier(tmp_path / "earlier.json").load(attached=False)


# ---- ending ----


def any_one(pid: int) -> bool:
    return True


def sleepers(count: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["sleep", "60"]) for _ in range(count)]


@pytest.mark.parametrize("frozen", ["freezer.state", "cgroup.freeze"])
def test_a_step_is_ended_by_its_cgroup(tmp_path: Path, frozen: str) -> None:
    """Also what is in cgroups below it, and what its user froze: it dies when it is thawed."""
    programs = sleepers(3)
    try:
        (tmp_path / "below").mkdir()
        for folder, members in ((tmp_path, programs[:1]), (tmp_path / "below", programs[1:2])):
            (folder / "cgroup.procs").write_text("".join(f"{one.pid}\n" for one in members))
            (folder / frozen).write_text("")
        assert end_step(tmp_path, [programs[2].pid], any_one) == 2
        assert [one.wait(10) for one in programs] == [-signal.SIGKILL] * 3
        assert (tmp_path / "below" / frozen).read_text() == (tmp_path / frozen).read_text() in ("THAWED", "0")
    finally:
        for one in programs:
            one.kill()
            one.wait()


def test_numbers_are_signalled_before_the_step_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user can make the search slow: by then the number may be another user's."""
    done: list[str] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: done.append("kill"))
    monkeypatch.setattr(step_kill, "_end_frozen", lambda _: done.append("walk") or 0)
    assert end_step(tmp_path, [os.getpid()], any_one) == 1
    assert done == ["kill", "walk"]


def test_what_its_user_may_freeze_again_is_taken_to_the_jobs_own_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [hidden] = sleepers(1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # it is frozen
    step = tmp_path / "job_12/step_0"
    try:
        step.mkdir(parents=True)
        for path in (step.parent / "cgroup.procs", step / "cgroup.procs", step / "freezer.state"):
            path.touch()
        end_step(step, [hidden.pid], any_one)
        assert (step.parent / "cgroup.procs").read_text() == ""  # it is slow, and not done without need
        (step / "mine").mkdir()
        end_step(step, [hidden.pid], any_one)
        assert (step.parent / "cgroup.procs").read_text() == str(hidden.pid)
        (step.parent / "cgroup.procs").write_text("")
        hidden.kill()
        hidden_has_ended = select.select([os.pidfd_open(hidden.pid)], [], [], 10)[0]
        end_step(step, [hidden.pid], any_one)
        assert hidden_has_ended and (step.parent / "cgroup.procs").read_text() == ""  # it may be another's number
    finally:
        hidden.kill()
        hidden.wait()


def test_where_the_kernel_ends_a_whole_cgroup_nobody_is_looked_for(tmp_path: Path) -> None:
    [other] = sleepers(1)
    try:
        (tmp_path / "cgroup.kill").write_text("")
        (tmp_path / "cgroup.procs").write_text(f"{other.pid}\n")
        assert end_step(tmp_path, [], any_one) == 0 and (tmp_path / "cgroup.kill").read_text() == "1"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_no_process_of_a_step_sees_another_ones_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch script went on with its next line, for a moment."""
    kill, seen = tmp_path / "cgroup.kill", []
    kill.touch()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: seen.append(kill.read_text()))
    end_step(tmp_path, [os.getpid()], any_one)
    assert seen == ["1"]
    kill.write_text("")
    assert end_step(tmp_path, [os.getpid()], lambda _: kill.read_text() == "") == 1, "it went with the others"


def test_ending_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    monkeypatch.setattr(step_kill, "_MOST_FOLDERS", 8)
    folder = tmp_path
    for depth in range(40):
        folder = folder / str(depth)
        folder.mkdir()
        (folder / "cgroup.procs").write_text(f"{10000 + depth}\n")
    (tmp_path / "freezer.state").touch()
    began = time.monotonic()
    end_step(tmp_path, [], any_one)
    assert time.monotonic() - began < 5 and signalled == [10000 + depth for depth in range(7)]


def test_a_number_that_has_become_anothers_is_not_signalled(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the driver's list and the signal the process has ended."""
    watcher, watch = Watcher(state, Policy), Watch(Worker("nvidia"))
    state.records[12] = record()
    found = {5: Owner(Place(12, "0"), 1000), 6: Owner(Place(12, "0"), 1000)}
    monkeypatch.setattr(watch.finder, "look", lambda pids: {pid: found[pid] for pid in pids})
    monkeypatch.setattr(cgroups, "place_of", lambda pid, proc: Place(33, "0") if pid == 5 else Place(12, "0"))
    ended: list[Any] = []
    monkeypatch.setattr("prolog_epilog.watching.end_step", lambda _, pids, __: ended.extend(pids) or 0)
    watcher._sample(watch, [("GPU-0", 5, GIB), ("GPU-0", 6, GIB)], None)
    assert ended == [6]


# ---- lines ----


def test_whoever_does_not_read_keeps_nobody_alive(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that cannot even get at the files of one job's processes holds up no other's end."""
    watcher, watch = Watcher(state, Policy), Watch(Worker("nvidia"))
    state.records = {job: record(job) for job in (1, 2, 3)}
    monkeypatch.setattr(watch.finder, "look", lambda pids: {pid: Owner(Place(pid, "0"), 1000) for pid in pids})
    monkeypatch.setattr(watch.finder, "is_still", lambda *_: True)
    monkeypatch.setattr(job_output, "_error_of", lambda pid: time.sleep(60) if pid == 1 else None)
    began, ended = time.monotonic(), {}
    monkeypatch.setattr(
        "prolog_epilog.watching.end_step", lambda _, pids, __: ended.update({pids[0]: time.monotonic() - began}) or 1
    )
    watcher._sample(watch, [("GPU-0", pid, 2 * GIB) for pid in (1, 2, 3)], None)
    assert list(ended)[-1] == 1 and max(ended[2], ended[3]) < ended[1] < 5
    assert [one.events[-1].detail["notified"] for one in state.records.values()] == [False] * 3
    deadline = time.monotonic() + 10
    while job_output._left and time.monotonic() < deadline:
        job_output._reap()
    assert not job_output._left


def test_no_more_children_than_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_output, "_MOST_CHILDREN", 2)
    monkeypatch.setattr(job_output, "_error_of", lambda _: time.sleep(60))
    writers = job_output.begin([[([1], "x")], [([2], "x"), ([3], "y")], [([4], "x")]])
    try:
        assert [writer.pid > 0 for writer in writers] == [True, True, False]
        assert [writer.written for writer in writers] == [[False], [False, False], [False]]
    finally:
        job_output.finish(writers)
