"""sluice-supervise alone: whichever process is stopped or killed, two never write at the same time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[3]
_LEASE = 3.0  # seconds; a process that gets no processor for so long loses it, as it should
_FENCED = 75


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the supervisor, and a process that is fenced as slurmctld is."""
    if shutil.which("gcc") is None or shutil.which("unshare") is None:
        pytest.skip("no gcc or unshare")
    folder = tmp_path_factory.mktemp("supervise")
    plugin = _ROOT / "slurm_plugin"
    options: list[str | Path] = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-D_GNU_SOURCE",
        f"-I{plugin}",
        f"-I{_ROOT}/native/include",
    ]
    supervise: list[str | Path] = [*sorted((plugin / "supervisor").glob("*.c")), "-o", folder / "supervise"]
    fenced = [plugin / "tests/tool_fenced.c", plugin / "failover/fence.c", plugin / "runtime/log.c"]
    subprocess.run([*options, *supervise], check=True, timeout=120)
    subprocess.run([*options, *fenced, "-o", folder / "fenced", "-lpthread", "-ldl"], check=True, timeout=120)
    return folder


class Host:
    """A controller: a host name of its own, a supervisor, and what it runs."""

    def __init__(self, name: str, programs: Path, folder: Path, *, lead: bool = True, patience: float = 30) -> None:
        self.name = name
        self.folder = folder
        words: list[str | Path] = [
            programs / "supervise",
            f"--lease={_LEASE}",
            f"--patience={patience}",
            f"--run-dir={folder}",
            "--",
        ]
        words += [programs / "fenced", folder / "state", *(["lead"] if lead else [])]
        script = 'hostname "$0"; exec "$@"'
        own: list[str | Path] = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        self.process = subprocess.Popen([*own, "sh", "-c", script, name, *words], stderr=subprocess.PIPE, text=True)

    def status(self) -> dict[str, Any]:
        """Its own status in the shared folder."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / f"state/sluice.supervise.{self.name}").read_text())
            if found["supervisor"] == self.process.pid:
                return found
        return {}

    def child(self) -> int:
        """The fenced process's pid."""
        until(lambda: "slurmctld" in self.status())
        return int(self.status()["slurmctld"])

    def storage(self) -> int:
        """The pid of the process for the storage."""
        child = self.child()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if int(pid) != child)

    def holds(self) -> bool:
        """Whether it has the lease, by the lease's file."""
        return lease(self.folder).get("host") == self.name and lease(self.folder).get("state") == "held"

    def leads(self) -> bool:
        """Whether it has the lease, and what it runs writes."""
        last = written(self.folder)[-1:]
        return self.holds() and bool(last) and last[0][0] == self.status().get("slurmctld")

    def events(self) -> list[dict[str, Any]]:
        """What it recorded."""
        path = self.folder / f"state/sluice.failover.{self.name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ended(self, timeout: float = 20) -> int:
        """Its exit status."""
        return self.process.wait(timeout=timeout)


MakeHost = Callable[..., Host]


@pytest.fixture
def host(programs: Path, tmp_path: Path) -> Iterator[MakeHost]:
    """A function that starts a controller; all share one state folder."""
    (tmp_path / "state").mkdir()
    made: list[Host] = []

    def make(name: str, **options: Any) -> Host:
        made.append(Host(name, programs, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.send_signal(signal.SIGCONT)
            one.process.wait()
    disjoint(tmp_path)


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lease(folder: Path) -> dict[str, str]:
    """The lease's file."""
    with suppress(OSError, ValueError):
        lines = (folder / "state/sluice.lease").read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)
    return {}


def written(folder: Path) -> list[tuple[int, int, int]]:
    """Who wrote, when, in which epoch."""
    path = folder / "state/written"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(when), int(epoch)) for pid, when, epoch in (line.split() for line in lines)]


def disjoint(folder: Path) -> None:
    """Those who wrote took turns, and each turn has an epoch above the one before."""
    turns: list[tuple[int, int]] = []
    for pid, _, epoch in sorted(written(folder), key=lambda line: line[1]):
        if not turns or turns[-1] != (pid, epoch):
            turns.append((pid, epoch))
    assert [epoch for _, epoch in turns] == sorted({epoch for _, epoch in turns})


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_one_leads_and_ends_in_order(host: MakeHost, tmp_path: Path) -> None:
    one = host("one")
    until(one.leads)
    until(lambda: len(written(tmp_path)) > 5)
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 3
    assert lease(tmp_path)["state"] == "free"
    assert [event["kind"] for event in one.events()] == ["lease.taken", "lease.released", "slurmctld.died"]
    assert not list(tmp_path.glob("sluice-supervise.*"))


def test_a_second_one_waits_for_its_turn(host: MakeHost, tmp_path: Path) -> None:
    one = host("one")
    until(one.leads)
    two = host("two", lead=False)
    os.kill(two.child(), signal.SIGUSR1)
    time.sleep(2 * _LEASE)
    assert one.holds()
    first = one.child()
    assert {pid for pid, _, _ in written(tmp_path)} == {first}
    os.kill(first, signal.SIGUSR2)  # gives its place back, and is a backup again: started again
    until(two.leads)
    until(lambda: not alive(first) and one.child() != first)
    os.kill(two.child(), signal.SIGUSR2)
    until(one.leads)
    assert one.process.poll() is None
    assert two.process.poll() is None


@pytest.mark.parametrize("victim", ["child", "storage"])
def test_what_hangs_is_killed_in_time(host: MakeHost, tmp_path: Path, victim: str) -> None:
    one = host("one")
    until(one.leads)
    two = host("two", lead=False)
    second, first = two.child(), one.child()
    stopped = one.child() if victim == "child" else one.storage()
    os.kill(stopped, signal.SIGSTOP)
    os.kill(second, signal.SIGUSR1)
    assert one.ended(timeout=4 * _LEASE) == _FENCED
    assert not alive(first)
    words = one.process.stderr.read() if one.process.stderr else ""
    assert ("has not run" if victim == "child" else "not renewed") in words
    until(two.leads)


def test_a_death_is_passed_on(host: MakeHost) -> None:
    one = host("one")
    until(one.leads)
    os.kill(one.child(), signal.SIGKILL)
    assert one.ended() == -signal.SIGKILL
    assert one.events()[-1] | {"seq": 0, "time": 0} == {
        "seq": 0,
        "time": 0,
        "kind": "slurmctld.died",
        "host": "one",
        "signal": 9,
    }


def test_it_dies_with_its_supervisor(host: MakeHost, tmp_path: Path) -> None:
    one = host("one")
    until(one.leads)
    child = one.child()
    one.process.kill()
    until(lambda: not alive(child), 2)
    two = host("two")
    until(two.leads)  # when the lease has lapsed
    assert two.events()[0]["given_back"] is False
    assert lease(tmp_path)["epoch"] == "2"


def test_it_ends_when_its_supervisor_is_stopped(host: MakeHost) -> None:
    one = host("one")
    until(one.leads)
    child = one.child()
    one.process.send_signal(signal.SIGSTOP)
    until(lambda: not alive(child), 4 * _LEASE)
    two = host("two")
    until(two.leads)
    one.process.send_signal(signal.SIGCONT)
    assert one.ended() == _FENCED
    assert two.holds()


def test_a_paused_host_does_not_write_when_it_goes_on(host: MakeHost, tmp_path: Path) -> None:
    one = host("one")
    until(one.leads)
    everything = [one.process.pid, one.storage(), one.child()]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    two = host("two")
    until(two.leads)
    for pid in reversed(everything):  # what leads, first
        os.kill(pid, signal.SIGCONT)
    assert one.ended() == _FENCED
    assert two.holds()


def test_one_who_may_not_lead_is_killed(host: MakeHost, tmp_path: Path) -> None:
    one = host("one")
    until(one.leads)
    two = host("two", patience=2)
    assert two.ended() == _FENCED
    words = two.process.stderr.read() if two.process.stderr else ""
    assert "did not get the lease from one (holds it, epoch 1)" in words
    assert one.holds()
    assert len({pid for pid, _, _ in written(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 2),
        (["--lease=0", "--", "true"], 2),
        (["--lease=1x", "--", "true"], 2),
        (["--what", "--", "true"], 2),
        (["--help"], 0),
        (["--", "/no/such/program"], 127),
        (["--", "true"], 0),
        (["--", "sh", "-c", "exit 7"], 7),
    ],
)
def test_command_line(programs: Path, tmp_path: Path, words: list[str], status: int) -> None:
    done = subprocess.run(
        [programs / "supervise", f"--run-dir={tmp_path}", *words], capture_output=True, timeout=20, check=False
    )
    assert done.returncode == status
    assert not list(tmp_path.iterdir())
