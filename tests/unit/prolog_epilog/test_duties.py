"""What the agent does besides answering and watching: when it is woken, what it tries again, what it leaves alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policy.node_limits import NodeLimits, NodeStrangers
from prolog_epilog import cgroups, job_output
from prolog_epilog.accounting import Accounting
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.devices import NodeDevice
from prolog_epilog.gpu_reset import GpuReset
from prolog_epilog.jobs import Jobs
from prolog_epilog.owners import Owner
from prolog_epilog.reclaim import Reclaim
from prolog_epilog.state import Settings, State
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.base.duties import Duties, NotYet
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange import courier
from sluice.exchange.courier import Controllers, Courier, Outbox
from sluice.exchange.record import Grant, JobRecord

GIB = 1 << 30
WITHIN = 20.0
"""Seconds, for what happens at once."""


def job(number: int = 7, uuids: tuple[str, ...] = ("GPU-0",), limit: int | None = None) -> JobRecord:
    made = JobRecord(number, 1000, "ann", "physics", "main", "n1", time.time())
    made.grants = [Grant(int(uuid[4:]), uuid, "nvidia", "H100", 80 * GIB, limit, limit) for uuid in uuids]
    return made


def device(index: int) -> NodeDevice:
    own = f"/dev/nvidia{index}"
    pci = f"0000:0{index}:00.0"
    return NodeDevice(index, "nvidia", "H100", f"GPU-{index}", pci, (own,), own, 81920, "550", 0, "", ())


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = State(Settings(run=tmp_path / "run", records=tmp_path / "records", memory_wait=0.2))
    made.devices = [device(0), device(1)]
    for folder in (made.jobs, made.store, made.outbox):
        folder.prepare()
    return made


@pytest.fixture
def duties(state: State) -> Iterator[Duties]:
    yield Duties(state.stopping)
    state.stopping.set()


# ---- duties ----


def test_a_duty_that_is_notified_of_work_does_not_wait_for_its_period(duties: Duties) -> None:
    called: list[float] = []
    times = [threading.Event(), threading.Event()]

    def work() -> None:
        called.append(time.monotonic())
        times[len(called) - 1].set()

    duty = duties.add("work", 3600.0, work, delay=0.2)
    duties.start()
    assert times[0].wait(WITHIN)
    told = time.monotonic()
    duty.wake()
    assert times[1].wait(WITHIN) and called[1] - told >= 0.2  # it delays no answer


def test_work_that_comes_while_a_duty_works_is_not_forgotten(duties: Duties) -> None:
    begun, go_on, again = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        if begun.is_set():
            again.set()
        begun.set()
        assert go_on.wait(WITHIN)

    duty = duties.add("work", 3600.0, work)
    duties.start()
    assert begun.wait(WITHIN)
    duty.wake()
    go_on.set()
    assert again.wait(WITHIN)


def test_a_duty_that_fails_is_tried_again_after_its_retry_and_one_that_says_when_then(duties: Duties) -> None:
    called: list[int] = []
    done = threading.Event()

    def work() -> float:
        called.append(1)
        if len(called) == 1:
            raise OSError("full")
        if len(called) == 3:
            done.set()
        return 0.01

    duties.add("work", 3600.0, work, retry=0.01)
    duties.start()
    assert done.wait(WITHIN)


def test_an_outage_is_reported_once_however_often_nothing_was_tried(
    duties: Duties, capfd: pytest.CaptureFixture[str]
) -> None:
    called: list[int] = []
    done = threading.Event()

    def work() -> float | None:
        called.append(1)
        if len(called) == 9:
            done.set()
        if len(called) == 6:
            return None  # it worked
        if len(called) % 2:
            raise SluiceError("nobody there")
        return NotYet(0.001)

    duties.add("work", 0.001, work, retry=0.001)
    duties.start()
    assert done.wait(WITHIN)
    assert capfd.readouterr().err.count('what="SluiceError: nobody there"') == 2  # before and after it had worked


# ---- courier ----


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """The same, as nobody compares them here."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(courier, "time", made)
    monkeypatch.setattr(courier, "controllers", lambda: Controllers(("127.0.0.1",), frozenset({0})))
    return made


def test_the_courier_waits_longer_after_each_failure_and_tries_no_sooner_when_more_comes(
    state: State, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    there = False

    def send(*_: Any) -> int:
        tries.append(clock.now)
        if not there:
            raise SluiceError("nobody there")
        for path in state.outbox.folder.iterdir():
            path.unlink()
        return 1

    monkeypatch.setattr(state.outbox, "send", send)
    state.outbox.put(job(1))
    one = Courier(state.outbox)
    for number in range(2000):  # it is woken again and again
        clock.now = 1000.0 + 0.1 * number
        try:
            one.run()
        except SluiceError:
            continue
    gaps = [round(after - before) for before, after in pairwise(tries)]
    assert gaps == [2, 4, 8, 16, 32, 60, 60]
    there, clock.now = True, tries[-1] + 60
    assert one.run() is None and len(tries) == 9 and one.run() is None and len(tries) == 9  # nothing waits
    there = False
    state.outbox.put(job(2))
    with pytest.raises(SluiceError):
        one.run()  # at once, as the last one worked
    assert isinstance(one.run(), NotYet) and len(tries) == 10


def test_records_are_not_read_as_long_as_no_controller_listens(
    state: State, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day's records, read and written out at every try, would be most of what the agent takes."""
    read: list[str] = []
    of_text = JobRecord.from_json

    def count(text: str, source: str) -> JobRecord:
        read.append(source)
        return of_text(text, source)

    monkeypatch.setattr(JobRecord, "from_json", count)
    for number in range(3):
        state.outbox.put(job(number + 1))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(courier, "port", lambda: 1)
    with pytest.raises(SluiceError, match="no controller accepts requests"):
        Courier(state.outbox).run()
    assert read == [] and state.outbox.waiting() == [1, 2, 3]


def test_a_record_that_is_put_wakes_the_courier(state: State, duties: Duties) -> None:
    sent = threading.Event()

    class Now(Outbox):
        def send(self, *_: Any) -> int:
            for path in self.folder.iterdir():
                path.unlink()
            sent.set()
            return 1

    outbox = Now(state.outbox.folder, state.store)
    outbox.on_put = duties.add("courier", 3600.0, Courier(outbox).run, retry=1.0).wake
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(courier, "controllers", lambda: Controllers(("127.0.0.1",), frozenset({0})))
        duties.start()
        outbox.put(job())
        assert sent.wait(WITHIN)
        state.stopping.set()


# ---- records that could not be written ----


def test_a_record_that_cannot_be_written_is_written_when_there_is_room(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    nothing: Any = Nothing()
    jobs = Jobs(state, *[nothing] * 8)
    woken: list[int] = []
    jobs.on_unwritten = lambda: woken.append(1)
    record = job()
    state.records[7] = record
    full = True

    def save(kept: JobRecord, save: Any = state.store.save) -> None:
        if full:
            raise OSError(28, "No space left on device", "records")
        save(kept)

    monkeypatch.setattr(state.store, "save", save)
    jobs._take_back(record, {})
    assert woken == [1] and state.records == {}  # its GPUs are given to others
    with pytest.raises(OSError, match="No space"):
        jobs.write_records()
    assert state.jobs.load(7).ended is not None  # an agent that starts now goes on with it
    full = False
    jobs.write_records()
    assert state.store.load(7).ended and state.outbox.waiting() == [7]
    assert list(state.jobs.folder.iterdir()) == []
    jobs.write_records()
    assert state.outbox.waiting() == [7]  # once


# ---- accounting ----


def test_sums_of_a_job_that_ends_while_they_are_saved_do_not_stay(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = state.settings.records.parent / "running"
    accounting = Accounting(state, folder)
    accounting.load()
    record = job()
    state.records[7] = record
    watch: Any = Watch(Worker("nvidia"))
    told = {"busy_ns": 0, "energy_mj": 0, "throttle": [], "at_s": 1.0}
    accounting.sample(watch, {"usage": [], "devices": {"GPU-0": told}, "busy": {}})
    accounting.save()
    assert [path.name for path in folder.iterdir()] == ["7.json"]

    def ends(path: Path, *more: Any, write: Any = write_atomic, **options: Any) -> None:
        with state.lock:
            accounting.finish(record)
            del state.records[7]
        write(path, *more, **options)

    monkeypatch.setattr("prolog_epilog.accounting.write_atomic", ends)
    accounting.save()
    assert list(folder.iterdir()) == [] and record.usage is not None


# ---- what is done to a GPU between two jobs ----


class Driver:
    """A vendor's process that is asked for resets."""

    vendor = "nvidia"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.broken = False

    def ask(self, *, timeout: float, do: str, uuids: list[str]) -> dict[str, Any]:
        """Put all back but GPU-1, whose driver refuses."""
        assert do == "reset"
        self.asked.append(uuids)
        if self.broken:
            raise SluiceError("the nvidia driver gives no answer")
        failed = {uuid: "refused" for uuid in uuids if uuid == "GPU-1"}
        return {"failed": failed, "reset": {uuid: ["compute mode"] for uuid in uuids if uuid not in failed}}


def gpu_reset(state: State, driver: Driver, policy: NodeLimits | SluiceError) -> GpuReset:
    watcher = Watcher(state, NodeStrangers)
    watch: Any = Watch(driver)  # type: ignore[arg-type]
    watcher.watches["nvidia"] = watch

    def told() -> NodeLimits:
        if isinstance(policy, SluiceError):
            raise policy
        return policy

    return GpuReset(state, watcher, told)


def test_gpus_are_put_back_by_the_last_job_to_go(state: State) -> None:
    driver, record = Driver(), job(uuids=("GPU-0", "GPU-1"))
    one = gpu_reset(state, driver, NodeLimits())
    state.records = {7: record, 8: job(8)}  # on GPU-0
    assert one.reset(record, {"GPU-1": "not free"}) == {} and driver.asked == []
    del state.records[8]
    unclean = one.reset(record, {})
    assert driver.asked == [["GPU-0", "GPU-1"]]
    assert list(unclean) == ["GPU-1"] and "were not reset: refused" in unclean["GPU-1"]
    assert [(event.action, event.detail["uuid"]) for event in record.events] == [("reset", "GPU-0")]


def test_a_gpu_whose_driver_or_policy_gives_no_answer_is_not_clean(state: State) -> None:
    driver, record = Driver(), job()
    driver.broken = True
    assert "gives no answer" in gpu_reset(state, driver, NodeLimits()).reset(record, {})["GPU-0"]
    bad = gpu_reset(state, Driver(), SluiceError("sluice.node.json: damaged"))
    assert "the policy on clearing its memory cannot be read" in bad.reset(record, {})["GPU-0"]


def test_memory_that_is_not_cleared_in_time_is_reported(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    record = job()
    one = gpu_reset(state, Driver(), NodeLimits(scrub=True, scrub_seconds=1))

    def late(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("scrub", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert "its memory was not cleared within 1 s" in one.reset(record, {})["GPU-0"]
    said = subprocess.CompletedProcess("scrub", 0, "cleared 123\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert one.reset(record, {}) == {} and record.events[-1].detail["bytes"] == 123
    said.returncode, said.stdout = 1, "out of memory"
    assert "not cleared: out of memory" in one.reset(record, {})["GPU-0"]


# ---- the end of a job's processes ----


@pytest.mark.parametrize("dies", [True, False])
def test_what_is_left_of_a_job_is_ended_until_nothing_is(
    state: State, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    watcher, record = Watcher(state, NodeStrangers), job()
    watch = watcher.watches["nvidia"] = Watch(Worker("nvidia"))
    state.records[7] = record
    monkeypatch.setattr(cgroups, "place_of", lambda pid: Place(7, "0") if pid in (11, 12) else Place(8, "0"))
    monkeypatch.setattr(cgroups, "has_exited", lambda _: False)
    killed: list[int] = []

    files: dict[int, int] = {}

    def find(pid: int) -> int:
        file = os.open("/dev/null", os.O_RDONLY)
        files[file] = pid
        return file

    def kill(file: int, _: int) -> None:
        killed.append(files[file])
        if files[file] == 12:
            raise ProcessLookupError

    def sample(watch: Watch, _: float) -> None:
        held = {("GPU-0", 11): GIB, ("GPU-0", 12): GIB, ("GPU-0", 13): GIB, ("GPU-1", 11): GIB}
        watch.held = {key: size for key, size in held.items() if not (dies and key[1] in killed)}
        watch.owners = {pid: Owner(cgroups.place_of(pid), 1000) for _, pid in held}

    monkeypatch.setattr(os, "pidfd_open", find)
    monkeypatch.setattr(signal, "pidfd_send_signal", kill)
    monkeypatch.setattr(watcher, "await_sample", sample)
    unclean = Reclaim(state, watcher).free(record)
    assert watch.some == {"GPU-0"}  # its events are asked for, too
    assert set(killed) == {11, 12} and [event.detail["pid"] for event in record.events] in ([11, 12], [12, 11])
    if dies:
        assert unclean == {} and len(killed) <= 4
    else:
        assert "of job 7 cannot be ended" in unclean["GPU-0"]


# ---- many that are over their limits at one time ----


def test_all_that_are_over_their_limits_are_ended_together(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of all are written at one time; what was ended a moment ago is ended again, without a line."""
    watcher, watch = Watcher(state, NodeStrangers), Watch(Worker("nvidia"))
    owners = {10 * number: Owner(Place(number, "0"), 1000) for number in range(1, 31)}
    monkeypatch.setattr(watch.finder, "look", lambda pids: {pid: owners[pid] for pid in pids})
    monkeypatch.setattr(watch.finder, "is_still", lambda pid, owner: owners[pid] == owner)
    state.records = {number: job(number, limit=GIB) for number in range(1, 31)}
    done: list[tuple[str, Any]] = []

    def begin(jobs: list[list[job_output.Line]]) -> list[job_output.Writer]:
        done.append(("told", [text for lines in jobs for _, text in lines]))
        return [job_output.Writer(len(lines)) for lines in jobs]

    monkeypatch.setattr(job_output, "begin", begin)
    monkeypatch.setattr(
        "prolog_epilog.watching.end_step", lambda _, pids, __: done.append(("killed", pids)) or len(pids)
    )
    usage = [("GPU-0", 10 * number, 2 * GIB) for number in state.records]
    watcher._sample(watch, usage, None)
    assert [what for what, _ in done] == ["told"] + ["killed"] * 30
    assert len(done[0][1]) == 30 and done[0][1][0].endswith("limit 1G; step 0 is ended")
    assert sorted(about for what, about in done[1:]) == [[10 * number] for number in range(1, 31)]
    assert all([event.action for event in one.events] == ["end"] for one in state.records.values())
    done.clear()
    watcher._sample(watch, usage, None)  # they take a moment to go
    assert [what for what, _ in done] == ["told"] + ["killed"] * 30 and done[0][1] == []
    assert all(len(one.events) == 1 for one in state.records.values())


def test_lines_that_are_not_taken_do_not_hold_others_up() -> None:
    """Tenants whose pipes are full have no line, and take nobody else's."""
    pipes = [os.pipe() for _ in range(10)]
    programs = []
    try:
        for number, (_, write) in enumerate(pipes):
            if number:  # the first one takes its line
                os.set_blocking(write, False)
                try:
                    while True:
                        os.write(write, b"x" * 65536)
                except BlockingIOError:
                    os.set_blocking(write, True)
            words = [sys.executable, "-c", "input()"]
            programs.append(subprocess.Popen(words, stdin=subprocess.PIPE, stderr=write))
        told = job_output.write_all([[([program.pid], "job 7: too much")] for program in programs], 60.0)
        assert told == [[True]] + [[False]] * 9
        assert os.read(pipes[0][0], 4096) == b"\nsluice: job 7: too much\n"
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        for ends in pipes:
            for end in ends:
                os.close(end)


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


def test_old_records_go_while_the_agent_runs(agent: Agent) -> None:
    store, outbox = agent.state.store, agent.state.outbox
    outbox.prepare()
    for number in (7, 8):
        store.save(job(number))
        outbox.put(job(number))
    for old in (*store.folder.glob("7.json"), *outbox.folder.glob("7-*.json")):
        os.utime(old, (1, 1))
    [retention] = [duty for duty in agent.duties._duties if duty.name == "retention"]
    retention.function()
    assert [one.job for one in store.load_all()[0]] == [8] == outbox.waiting()
