"""The agent's parent: the real program with a small agent of the test's own, and real cgroups where there are any."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prolog_epilog.guarding import Guard
from prolog_epilog.outages import Outage, read
from sluice.core.limit import library_path
from sluice.exchange.record import Grant, JobRecord

PROGRAM = library_path().with_name("sluice-guard")
FREEZER = Path("/sys/fs/cgroup/freezer")
PATIENCE = 20.0
# Writes its process number to a file, sends the given messages, and goes on as its name demands.
AGENT = """
import json, os, signal, sys, time
from pathlib import Path
from prolog_epilog.guarding import Guard

folder = Path(sys.argv[1])
guard = Guard.inherited()
with (folder / "pids").open("a") as pids:
    print(os.getpid(), file=pids)
for words in json.loads((folder / "says").read_text()):
    guard._keep(words, words)
plan = json.loads((folder / "plan").read_text())
if plan.get("exit") is not None:
    sys.exit(plan["exit"])
about = guard.about(plan["about"]) if "about" in plan else None
if about:
    about.__enter__()
if plan.get("die"):
    os.kill(os.getpid(), plan["die"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    guard.sampled("nvidia")
    guard.beat("nvidia")
    with (folder / "beats").open("a") as beats:
        print(os.getpid(), file=beats)
    time.sleep(0.1)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def eventually(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"it did not happen within {seconds} s"
        time.sleep(0.02)


class Site:
    """A guard with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.plan()
        self.says("ready")

    def says(self, *messages: str) -> None:
        (self.folder / "says").write_text(json.dumps(messages))

    def plan(self, **plan: int) -> None:
        (self.folder / "plan").write_text(json.dumps(plan))

    def start(self, **environment: str) -> None:
        words = [str(PROGRAM), str(self.folder / "agent"), sys.executable, "-c", AGENT, str(self.folder)]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})

    @property
    def pids(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / "pids").read_text().split()]
        return []

    def outages(self) -> list[Outage]:
        return read(self.folder / "agent/guard")

    def runs(self, count: int) -> None:
        eventually(lambda: len(self.pids) >= count)

    def works(self) -> None:
        """Wait until the agent has sent its messages, and then some signs of life."""
        self.runs(1)
        beats = self.folder / "beats"
        eventually(lambda: beats.exists() and beats.read_text().split().count(str(self.pids[-1])) >= 4)

    def kill_agent(self) -> None:
        os.kill(self.pids[-1], signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def said(self) -> str:
        assert self.process and self.process.stderr
        return self.process.stderr.read()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    if made.process and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_agent_that_is_killed_is_started_again_at_once(site: Site) -> None:
    site.start()
    site.works()
    site.kill_agent()
    began = time.monotonic()
    site.runs(2)
    assert time.monotonic() - began < 2  # a bare start of Python and a loaded machine
    eventually(lambda: site.outages() and site.outages()[0].lasted is not None)
    [outage] = site.outages()
    assert (outage.cause, outage.about, outage.frozen) == ("signal-9", (), ())
    assert outage.lasted is not None and outage.lasted < 2
    assert site.end() == 0
    assert not is_alive(site.pids[-1])


@pytest.mark.parametrize("name", ["{0}/notify", "@sluice-test-{1}"])
def test_systemd_is_notified_when_the_agent_answers(site: Site, name: str) -> None:
    address = name.format(site.folder, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        systemd.settimeout(0.5)
        site.says()
        site.start(NOTIFY_SOCKET=address)
        site.runs(1)
        with pytest.raises(TimeoutError):  # it runs, and does not answer
            systemd.recv(1024)
        assert "NOTIFY_SOCKET" not in Path(f"/proc/{site.pids[-1]}/environ").read_text()
        site.says("ready")
        site.kill_agent()
        systemd.settimeout(PATIENCE)
        assert systemd.recv(1024).startswith(b"STATUS=the agent is started again")
        assert systemd.recv(1024).startswith(b"READY=1\n")
        site.end()
        assert systemd.recv(1024) == b"STOPPING=1"


def test_the_start_of_a_guard_that_holds_jobs_does_not_time_out(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(site.folder / "notify"))
        systemd.settimeout(PATIENCE)
        (site.folder / "agent").mkdir(mode=0o700)
        (site.folder / "agent/guard").write_text("sluice-guard 1\nwatched 7 1 /sys/fs/cgroup/sluice-test/job_7\n")
        site.says()
        site.start(NOTIFY_SOCKET=str(site.folder / "notify"))
        assert systemd.recv(1024) == b"EXTEND_TIMEOUT_USEC=60000000"
        site.end()


def test_a_guard_that_goes_on_keeps_systemds_watchdog_quiet(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(site.folder / "notify"))
        systemd.settimeout(PATIENCE)
        site.start(NOTIFY_SOCKET=str(site.folder / "notify"), WATCHDOG_USEC="2000000")
        said = [systemd.recv(1024) for _ in range(4)]
        assert said.count(b"WATCHDOG=1") >= 2
        assert site.process
        site.process.send_signal(signal.SIGSTOP)
        systemd.settimeout(0.8)
        with pytest.raises(TimeoutError):
            while True:
                systemd.recv(1024)
        site.process.send_signal(signal.SIGCONT)


def test_an_agent_that_answered_once_is_started_again_also_when_it_fails(site: Site) -> None:
    site.start()
    site.works()
    site.plan(exit=3)
    site.kill_agent()
    site.runs(3)
    assert site.process and site.process.poll() is None


def test_an_agent_that_asks_to_begin_again_is_no_loss(site: Site) -> None:
    site.start()
    site.works()
    os.kill(site.pids[-1], signal.SIGTERM)  # it ends with 0
    site.runs(2)
    assert site.outages() == []


def test_a_first_start_that_fails_ends_the_guard_with_the_agents_status(site: Site) -> None:
    site.plan(exit=3)
    site.says()
    site.start()
    assert site.process and site.process.wait(PATIENCE) == 3
    assert len(site.pids) == 1


def test_a_storm_of_deaths_is_slowed_down_after_the_third_and_names_whose_data_was_read(site: Site) -> None:
    site.plan(die=signal.SIGBUS, about=77)
    site.start()
    site.runs(4)
    time.sleep(3)
    assert len(site.pids) <= 6  # 1 s after the fourth, 2 s after the fifth
    deaths = site.outages()
    assert {outage.cause for outage in deaths} == {"signal-7"}
    assert {outage.about for outage in deaths} == {(77,)}
    site.plan()
    eventually(lambda: all(outage.lasted is not None for outage in site.outages()))


def test_the_agent_dies_with_its_guard(site: Site) -> None:
    site.start()
    site.runs(1)
    site.end(signal.SIGKILL)
    eventually(lambda: not is_alive(site.pids[-1]))


def test_one_guard_a_node(site: Site) -> None:
    site.start()
    site.runs(1)
    other = Site(site.folder)
    other.start()
    assert other.process and other.process.wait(PATIENCE) == 1
    assert "another one runs on this node" in other.said()
    assert len(site.pids) == 1


def test_a_guard_that_hangs_makes_nobody_wait() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guard = Guard(ours)
    grant = Grant(0, "GPU-1", "nvidia", "H100", 1, limit=1, rung="limiter")
    began = time.monotonic()
    for job in range(1, 3001):
        record = JobRecord(job, 1, "a", "a", "p", "n", 0.0, grants=[grant], cgroup=f"/sys/fs/cgroup/freezer/job_{job}")
        guard.watch(record)
        guard.sampled("nvidia")
    for job in range(1, 2990):
        guard.forget(job)
    assert time.monotonic() - began < 5
    known: set[str] = set()
    theirs.settimeout(0.02)
    for _ in range(100):  # each beat sends more of what had no room
        with suppress(TimeoutError):
            while True:
                kind, *words = theirs.recv(512).decode().split()
                known = known | {words[0]} if kind == "watch" else known - ({words[0]} if kind == "forget" else set())
                if kind == "beat":
                    break
        if not guard._unsaid:
            break
        guard.beat("nvidia")
    guard.beat("nvidia")
    assert known == {str(job) for job in range(2990, 3001)}


# ---- real cgroups ----


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A job's folder in version 1's freezer hierarchy, with a process in a step of it that counts."""
    if not (FREEZER / "cgroup.procs").exists():
        pytest.skip("no freezer hierarchy of cgroup version 1 here")
    top = FREEZER / f"sluice-test-{os.getpid()}"
    folder = top / "job_12"
    for one in (top, folder, folder / "step_0", folder / "step_extern"):
        one.mkdir()
    count = "import sys,time\nwhile True:\n open(sys.argv[1],'w').write(str(time.monotonic()))\n time.sleep(0.02)"
    process = subprocess.Popen([sys.executable, "-c", count, str(tmp_path / "count")])
    (folder / "step_0/cgroup.procs").write_text(str(process.pid))
    yield folder, process
    for step in folder.glob("step_*"):
        (step / "freezer.state").write_text("THAWED")
    process.kill()
    process.wait()
    for one in (folder / "step_0", folder / "step_extern", folder, top):
        eventually(lambda one=one: _removed(one))


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def state(folder: Path) -> str:
    return (folder / "step_0/freezer.state").read_text().strip()


def test_a_job_is_frozen_while_the_agent_hangs_and_thawed_after(
    site: Site, job: tuple[Path, subprocess.Popen[bytes]]
) -> None:
    folder, _ = job
    site.says("bound 1", f"watch 12 nvidia {folder}", "ready")
    site.start()
    site.runs(1)
    time.sleep(1.5)
    assert state(folder) == "THAWED"
    os.kill(site.pids[-1], signal.SIGSTOP)
    eventually(lambda: state(folder) == "FROZEN")
    assert (folder / "freezer.state").read_text().strip() == "THAWED"  # where slurmstepd is
    [outage] = site.outages()
    assert (outage.cause, outage.frozen, outage.lasted) == ("stalled", (12,), None)
    os.kill(site.pids[-1], signal.SIGCONT)
    eventually(lambda: state(folder) == "THAWED")
    eventually(lambda: site.outages()[0].lasted is not None)
    assert site.outages()[0].cause == "stalled"


def test_the_next_guard_thaws_what_a_killed_one_froze(site: Site, job: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, _ = job
    site.says("bound 1", f"watch 12 nvidia {folder}", "ready")
    site.start()
    site.works()
    os.kill(site.pids[-1], signal.SIGSTOP)
    eventually(lambda: state(folder) == "FROZEN")
    site.end(signal.SIGKILL)
    assert state(folder) == "FROZEN"
    site.says("bound 1", "ready")  # job 12 has ended meanwhile, as far as the next agent knows
    site.start()
    eventually(lambda: state(folder) == "THAWED")


def test_a_guard_that_is_ended_in_order_leaves_nothing_frozen(
    site: Site, job: tuple[Path, subprocess.Popen[bytes]]
) -> None:
    folder, _ = job
    site.says("bound 1", f"watch 12 nvidia {folder}", "ready")
    site.start()
    site.works()
    site.plan(die=signal.SIGSEGV)
    site.kill_agent()
    eventually(lambda: state(folder) == "FROZEN")
    assert site.end() == 0
    assert state(folder) == "THAWED"


def test_a_job_that_slurm_has_suspended_stays_so(site: Site, job: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, _ = job
    for step in folder.glob("step_*"):
        (step / "freezer.state").write_text("FROZEN")
    site.says("bound 1", f"watch 12 nvidia {folder}", "ready")
    site.start()
    site.works()
    os.kill(site.pids[-1], signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(site.pids[-1], signal.SIGCONT)
    time.sleep(1)
    assert state(folder) == "FROZEN"
    assert site.outages() == []


def test_folders_of_others_than_root_are_left_alone(site: Site, job: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, _ = job
    os.chown(folder, 12345, 12345)
    outside = site.folder / "job_13/step_0"
    outside.mkdir(parents=True)
    (outside / "freezer.state").write_text("THAWED")
    os.symlink(folder, site.folder / "job_14")
    paths = {12: folder, 13: outside.parent, 14: site.folder / "job_14"}
    site.says("bound 1", *(f"watch {number} nvidia {path}" for number, path in paths.items()), "ready")
    site.start()
    site.works()
    os.kill(site.pids[-1], signal.SIGSTOP)
    time.sleep(2.5)
    assert state(folder) == "THAWED"
    assert (outside / "freezer.state").read_text() == "THAWED"
    assert site.outages() == []


def test_what_is_no_message_changes_nothing(site: Site) -> None:
    site.says("ready now", "x" * 511, "watch 1 nvidia /etc/../job_1", "bound 99999999", "beat " * 100, "ready")
    site.start()
    site.works()
    site.kill_agent()
    site.runs(2)
    eventually(lambda: site.outages() and site.outages()[-1].lasted is not None)


def test_it_is_small(site: Site) -> None:
    site.start()
    site.runs(1)
    assert site.process
    status = Path(f"/proc/{site.process.pid}/status").read_text()
    own = int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))
    assert own < 1024  # KiB
    assert "Threads:\t1\n" in status
