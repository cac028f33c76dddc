"""Jobs with their own /proc, stopped while they are saved: all of them, and none for ever, whenever the agent dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policy.checkpoint import NodeSystem
from prolog_epilog.checkpoint import contents, criu, opened
from prolog_epilog.checkpoint import saver as saving
from prolog_epilog.checkpoint.images import Images, Run, Writer
from prolog_epilog.checkpoint.saver import Saver
from prolog_epilog.server import Peer
from tests.unit.prolog_epilog.saved_images import fake_criu, write_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

# As sluice-launch init: it lets all go on where it is let go on itself.
INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))
if os.fork() == 0:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv("/usr/bin/python3", ["python3", "-c", {program!r}])
while True:
    if signal.sigwaitinfo(range(1, 65)).si_signo == signal.SIGCONT:
        os.kill(-1, signal.SIGCONT)
"""
SLEEPS = "import time; print(flush=True); time.sleep(600)"
# Its first thread ends.
THREADED = """
import ctypes, threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print(flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""
WRITES = 'printf magicmag >"$2/files.img"'
KILLS_AGENT = "kill -9 $PPID"


@contextmanager
def job(program: str) -> Iterator[int]:
    """The first process of one."""
    words = ["unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]
    init = ["/usr/bin/python3", "-c", INIT.format(program=program)]
    with subprocess.Popen([*words, *init], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        try:
            assert made.stdout.readline()
            yield int(Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text())
        finally:
            made.kill()


def runs(init: int) -> list[bool]:
    return [saving._runs(pid) for pid in opened.processes(init)]


def sees(init: int) -> int:
    """How many processes it sees in /proc."""
    return sum(path.name.isdecimal() for path in Path(f"/proc/{init}/root/proc").iterdir())


def test_a_process_whose_first_thread_has_ended_is_stopped_too() -> None:
    with job(THREADED) as init:
        until(lambda: "Z" in [saving._state(pid) for pid in opened.processes(init)])
        assert runs(init) == [True, True] and not saving._is_stopped(init)
        saving._stop(init)
        assert runs(init) == [False, False] and saving._is_stopped(init)
        saving._go_on(init)
        until(lambda: runs(init) == [True, True])


def dies(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mounts_and_dies(words: list[str], timeout: float) -> None:
    subprocess.run(words, check=True, timeout=timeout)
    dies()


MOMENTS: dict[str, tuple[object, str, Callable[..., None]] | None] = {
    "before it is stopped": (saving, "_stop", dies),
    "stopped": (criu, "_nodes_proc", dies),
    "covered": (criu, "run_command", mounts_and_dies),
    "encrypted": (Writer, "add", dies),
    "saved by CRIU": None,
    "uncovered": (contents, "check_files", dies),
    "looked at": (Writer, "end", dies),
    "written": (Images, "complete", dies),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_agent_left_stopped_goes_on_and_sees_its_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Also where it has no GPU, and nobody asks again for its save."""
    program = fake_criu(tmp_path / "criu", WRITES, KILLS_AGENT if MOMENTS[moment] is None else "")
    monkeypatch.setattr(Saver, "_cannot_return", lambda *_: "")
    monkeypatch.setattr(opened, "rights", lambda init, uid: set())

    def make() -> Saver:
        requeue: Callable[[int, int], None] = lambda job, restarts: pytest.fail("it goes on")  # noqa: E731
        return Saver(tmp_path / "made", lambda: NodeSystem(criu=str(program)), tmp_path / "ready", requeue)

    make().images.prepare()
    with job(SLEEPS) as init:
        agent = os.fork()
        if agent == 0:
            saver = make()
            if saver.problem() == "" and (patch := MOMENTS[moment]) is not None:
                setattr(*patch)  # what criu.py runs from now on is the mount alone
            saver.save(peer=Peer(1, 0), job=7, uid=65534, restarts=0, init=init)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(agent, 0)[1]) == signal.SIGKILL
        if moment in ("covered", "saved by CRIU"):
            assert runs(init) == [False, False] and sees(init) > 2
            (cover,) = [line for line in criu._mounts(init) if criu._NODES_PROC in line]
            assert "hidepid=" in cover  # whom its user lets go on sees no others
        saver = make()
        saver.images.prepare()
        saver.settle()
        until(lambda: runs(init) == [True, True])
        assert sees(init) == 2 and not list((tmp_path / "made/work").glob("*.saving"))


def test_a_job_that_may_have_gone_on_after_its_save_is_not_resumed_from_it(tmp_path: Path) -> None:
    """Its agent was killed before the order to requeue it was on disk, and it ended before the next one came."""
    saver = Saver(tmp_path / "made", NodeSystem, tmp_path / "ready", lambda job, restarts: None)
    saver.images.prepare()
    for restarts in (0, 1):
        write_image(saver.images, Run(7, 65534, restarts))
    note = saver.images.folder / "work" / ".7.saving"
    note.write_text(json.dumps({"uid": 65534, "restarts": 0, "init": os.getpid(), "started": 1}))
    saver.settle()
    assert not note.exists() and saver.images.runs() == [Run(7, 65534, 1)]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
