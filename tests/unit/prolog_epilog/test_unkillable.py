"""Killed processes that wait for a file system of their user's: only that file system is aborted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prolog_epilog.subuids import Subuids
from prolog_epilog.unkillable import Unkillable

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")

ALICE, BOB, INSIDE = 2001, 2002, 100001
VERSIONS = {
    "v1": "freezer/slurm_n1/uid_2001/job_7/step_0",
    "v2": "system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
}
NONE, KILL = "0000000000000000", "0000000000000100"
# What /proc says of a thread: its state, signals of its own, the process's, and whether it exits.
LIVES = ("S (sleeping)", NONE, NONE, False)
KILLED = ("D (disk sleep)", KILL, KILL, False)
KILLED_ON_ITS_WAY_OUT = ("D (disk sleep)", NONE, KILL, True)  # measured on Linux 6.18, as the next
EXITS = ("S (sleeping)", NONE, NONE, True)
Thread = tuple[str, str, str, bool]


class Machine:
    """A node's files, as far as they are read."""

    def __init__(self, folder: Path, step: str) -> None:
        self.connections, self.proc, self.root = (folder / name for name in ("connections", "proc", "cgroup"))
        self.step = self.root / step
        self.step.mkdir(parents=True)
        self.connections.mkdir()
        (folder / "subuid").write_text(f"{ALICE}:100000:65536\n")
        self.duty = Unkillable(
            connections=self.connections, proc=self.proc, root=self.root, subuids=Subuids(folder / "subuid")
        )

    def mount(self, number: int, uid: int, waiting: int = 1) -> Path:
        connection = self.connections / str(number)
        connection.mkdir()
        (connection / "waiting").write_text(f"{waiting}\n")
        (connection / "abort").touch()
        os.chown(connection, uid, uid)
        return connection / "abort"

    def process(self, pid: int, *threads: Thread, uid: int = ALICE) -> None:
        for number, (state, own, shared, exits) in enumerate(threads):
            folder = self.proc / f"{pid}/task/{pid + number}"
            folder.mkdir(parents=True)
            text = f"Name:\tx\nState:\t{state}\nUid:\t{uid}\t0\t0\t0\nSigPnd:\t{own}\nShdPnd:\t{shared}\n"
            (folder / "status").write_text(text)
            (folder / "stat").write_text(f"{pid} (x) ) {state[0]} 1 1 1 0 -1 {4 if exits else 0} 0")
            (self.proc / f"{pid}/status").write_text(text)
        with (self.step / "cgroup.procs").open("a") as file:
            file.write(f"{pid}\n")

    def look(self, times: int) -> None:
        for _ in range(times):
            self.duty.run()


@pytest.fixture(params=VERSIONS)
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, VERSIONS[request.param])


@pytest.mark.parametrize("thread", [KILLED, KILLED_ON_ITS_WAY_OUT])
def test_what_a_killed_process_waits_for_is_aborted_at_the_second_look(machine: Machine, thread: Thread) -> None:
    stuck, answers, neighbours = machine.mount(1, ALICE), machine.mount(2, ALICE, waiting=0), machine.mount(3, BOB)
    machine.process(50, thread)
    machine.look(1)
    assert not stuck.read_text()
    machine.look(1)
    assert stuck.read_text() == "1"
    assert not answers.read_text() and not neighbours.read_text()


def test_who_exits_by_himself_takes_no_signal_and_has_half_a_minute(machine: Machine) -> None:
    stuck = machine.mount(1, ALICE)
    machine.process(50, EXITS)
    machine.look(5)
    assert not stuck.read_text()
    machine.look(1)
    assert stuck.read_text()


def test_a_thread_that_waits_after_its_leader_has_ended(machine: Machine) -> None:
    stuck = machine.mount(1, ALICE)
    machine.process(50, ("Z (zombie)", NONE, NONE, True), ("D (disk sleep)", KILL, NONE, False))
    machine.look(2)
    assert stuck.read_text()


def test_a_crowd_of_dying_ones_hides_none(machine: Machine) -> None:
    """The first processes of containers wait, dying, for what is stuck in them."""
    stuck = machine.mount(1, ALICE)
    for pid in range(100, 5100, 100):
        machine.process(pid, ("S (sleeping)", NONE, KILL, True))
    machine.process(9000, KILLED)
    machine.look(2)
    assert stuck.read_text()


def test_a_crowd_of_mounts_hides_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.unkillable._MOST_CONNECTIONS", 5)
    stuck = [machine.mount(number, ALICE) for number in range(20)]
    machine.process(50, KILLED)
    machine.look(6)
    assert all(one.read_text() for one in stuck)


def test_a_number_that_has_become_anothers_is_not_aborted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = machine.mount(1, ALICE)
    machine.process(50, KILLED)
    machine.look(1)
    look = machine.duty._look

    def look_slowly() -> Iterator[tuple[int, int]]:
        os.chown(mounted.parent, BOB, BOB)
        return look()

    monkeypatch.setattr(machine.duty, "_look", look_slowly)
    machine.look(1)
    assert not mounted.read_text()


def test_one_that_is_unmounted_meanwhile_keeps_up_no_other(machine: Machine) -> None:
    gone, stuck = machine.mount(1, ALICE), machine.mount(2, ALICE)
    gone.unlink()
    machine.process(50, KILLED)
    machine.look(2)
    assert stuck.read_text()


@pytest.mark.parametrize(("of", "by"), [(INSIDE, ALICE), (ALICE, INSIDE)])
def test_subordinate_uids_are_their_owners(machine: Machine, of: int, by: int) -> None:
    stuck = machine.mount(1, of)
    machine.process(50, KILLED, uid=by)
    machine.look(2)
    assert stuck.read_text()


@pytest.mark.parametrize("others", [[LIVES], [("D (disk sleep)", NONE, NONE, False)], [EXITS, LIVES]])
def test_a_step_in_which_a_process_goes_on_keeps_its_mounts(machine: Machine, others: list[Thread]) -> None:
    """E.g. a script whose program writes what it has on its way out, for as long as that takes."""
    mounted = machine.mount(1, ALICE)
    machine.process(50, EXITS)
    machine.process(60, *others)
    machine.look(8)
    assert not mounted.read_text()


def test_another_process_at_each_look_is_ending(machine: Machine) -> None:
    mounted = machine.mount(1, ALICE)
    machine.process(50, KILLED)
    machine.look(1)
    (machine.step / "cgroup.procs").unlink()
    machine.process(60, KILLED)
    machine.look(1)
    assert not mounted.read_text()


def test_a_node_without_file_systems_of_users_looks_at_no_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.mount(1, 0)
    machine.process(50, KILLED)
    monkeypatch.delattr(machine.duty, "_proc")
    machine.look(2)
    machine.connections.rename(machine.connections.with_name("none"))
    machine.look(1)
