"""CRIU: whether it is there and can save, and how it is called."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prolog_epilog.checkpoint.stream import Take, taken
from sluice.base.errors import SluiceError
from sluice.base.run import CommandError, run_command
from sluice.base.text import one_line

OLDEST = (4, 2)
"""3.17 of Debian 12 fails on Linux 6.18."""
_CHECK_S = 20.0
_COLLECT_S = 10  # to stop all processes, which may start others meanwhile
# Its own cgroup, in which the restored processes are then, is the job's.
_COMMON = ("--file-locks", "--manage-cgroups=ignore", "-v1")
_DETACHED = "--restore-detached"
_LOG = "log"
_NODES_PROC = "sluice-criu"
"""The source by which the node's /proc is known where it covers a job's."""
_MOUNT_S = 10.0
_LETS_GO_S = 30.0  # for a CRIU whose files are not taken any more to let the job go on
_UNSHARE = "/usr/bin/unshare"
_MOUNT_PROC = ("mount", "-t", "proc", "-o", "nosuid,nodev,noexec")
_REASONS = (
    (re.compile(r"Connected TCP socket"), "it has a TCP connection"),
    (re.compile(r"[Ee]xternal .*socket|unix.*external|half of stream"), "it has a socket to a process outside"),
    (re.compile(r"io_uring"), "it uses io_uring"),
    (re.compile(r"/dev/(?:nvidia|kfd|dri)"), "it has a GPU open"),
    (re.compile(r"Can't lookup mount"), "it has a file open that it was given, such as an output that it may not open"),
    (re.compile(r"/dev/infiniband"), "it has an RDMA adapter open"),
    (re.compile(r"Zombies with threads"), "the first thread of one of its processes has ended"),
    (re.compile(r"nested \w+ namespace"), "it has made namespaces of its own"),
    (re.compile(r"ghost file|Ghost file"), "it has a deleted file open"),
)


class BrokenOffError(SluiceError):
    """CRIU was killed: what it was saving may be damaged."""


class Criu:
    """The program at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: tuple[tuple[int, int], str] | None = None

    def problem(self) -> str:
        """Why it cannot be used; empty: it can. It is asked again when the file changes."""
        try:
            state = self.path.stat()
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        stamp = state.st_mtime_ns, state.st_ino
        if self._checked is None or self._checked[0] != stamp:
            self._checked = stamp, self._check()
        return self._checked[1]

    def _check(self) -> str:
        try:
            said = run_command([self.path, "--version"], timeout=_CHECK_S).stdout
            match = re.search(r"Version:\s*(\d+)\.(\d+)", said)
            if match is None or (int(match[1]), int(match[2])) < OLDEST:
                return f"{self.path}: {one_line(said) or 'no version'}; {OLDEST[0]}.{OLDEST[1]} or later is needed"
            run_command([self.path, "check"], timeout=_CHECK_S)
        except CommandError as error:
            return one_line(f"{error}")
        return ""

    def save(self, init: int, folder: Path, seconds: float, lock: int, take: Take) -> None:
        """Save the processes below `init`, which is included, and leave them stopped. `take` gets all files of them;
        CRIU works in `folder`.

        `lock`: a descriptor that is open for as long as CRIU works. Raises SluiceError with the reason, and they run
        on, or are stopped where CRIU had come to its end; BrokenOffError.
        """
        words = [str(self.path), "dump", "--tree", str(init), "-D", str(folder), "-o", _LOG, "--leave-stopped",
                 "--timeout", str(_COLLECT_S), "--stream", *_COMMON]  # fmt: skip
        try:
            with taken(folder, take, seconds) as stream, _nodes_proc(init):
                done = subprocess.run(
                    [*_inside(init), *words], timeout=seconds + _LETS_GO_S, check=False, stdin=subprocess.DEVNULL,
                    capture_output=True, pass_fds=(lock,),
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BrokenOffError(f"CRIU did not save it within {seconds:g} s") from None
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}") from error
        if done.returncode < 0:
            raise BrokenOffError(f"CRIU was killed by signal {-done.returncode}")
        if stream.error is not None:  # that CRIU failed is its consequence
            raise stream.error
        if done.returncode != 0:
            raise SluiceError(_why(folder / _LOG) or f"CRIU ended with {done.returncode}")
        if left := {path.name for path in folder.iterdir()} - {_LOG, "stats-dump"}:
            raise SluiceError(f"CRIU keeps {min(left)} of it, which is not resumed")

    def resume_words(self, folder: Path) -> list[str]:
        """The command that starts what is in `folder`, stopped, as children of whoever runs it, in a mount namespace of
        their own; the number of the first process is then in the file ``pid`` there."""
        inside = [_UNSHARE, "--mount", "--propagation", "slave", "--"]
        return [*inside, str(self.path), "restore", "-D", str(folder), "-o", _LOG, "--leave-stopped",
                _DETACHED, "--pidfile", str(folder / "pid"), *_COMMON]  # fmt: skip


def is_restoring(init: int) -> bool:
    """Whether CRIU still works on what it restores: it is the parent of the first process until it ends."""
    with suppress(FileNotFoundError, ProcessLookupError):
        parent = Path(f"/proc/{init}/stat").read_text().rpartition(") ")[2].split()[1]
        return _DETACHED.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    return False


def _inside(init: int) -> list[str]:
    """What runs a program in the mount namespace of a job, and in the PID namespace of the node."""
    return ["nsenter", f"--target={init}", "--mount", "--root", "--"]


def _has_own_mounts(init: int) -> bool:
    return not os.path.samestat(*(Path(f"/proc/{pid}/ns/mnt").stat() for pid in (init, "self")))


@contextmanager
def _nodes_proc(init: int) -> Iterator[None]:
    """CRIU takes only mounts of its own namespace for the node's, so it runs in the job's; and it looks into /proc for
    processes as the node numbers them. A process of the job that its user lets go on meanwhile sees no other users'
    there. Raises SluiceError, OSError."""
    if not _has_own_mounts(init):
        yield
        return
    run_command([*_inside(init), *_MOUNT_PROC, "-o", "hidepid=2", _NODES_PROC, "/proc"], timeout=_MOUNT_S)
    try:
        yield
    finally:
        uncover_proc(init)


def uncover_proc(init: int) -> None:
    """A job sees its own /proc again, where an agent that was killed has left the node's.

    Raises SluiceError, OSError.
    """
    while any(f" - proc {_NODES_PROC} " in line for line in _mounts(init)):
        run_command([*_inside(init), "umount", "--lazy", "/proc"], timeout=_MOUNT_S)


def _mounts(init: int) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return Path(f"/proc/{init}/mountinfo").read_text().splitlines()
    return []


def mount_own_proc(init: int) -> None:
    """What was resumed sees its own processes in /proc, as before. Raises SluiceError, OSError."""
    if not _has_own_mounts(init):
        raise SluiceError("it has no mount namespace of its own")
    words = ["nsenter", f"--target={init}", "--mount", "--root", "--pid", "--", *_MOUNT_PROC, "proc", "/proc"]
    run_command(words, timeout=_MOUNT_S)


def log_in(folder: Path) -> Path:
    """What CRIU writes as it resumes what is in `folder`."""
    return folder / _LOG


def why_not(folder: Path) -> str:
    """What CRIU says why it could not resume."""
    return _why(folder / _LOG) or "CRIU gives no reason"


def _why(path: Path) -> str:
    """The first error of CRIU's log, which root wrote; in our words where they are known."""
    lines: list[str] = []
    with suppress(OSError), path.open("rb") as file:
        lines = file.read(1 << 20).decode(errors="replace").splitlines()
    errors = [line.partition("Error ")[2] for line in lines if "Error " in line and "rlimit: Can't setup" not in line]
    for pattern, words in _REASONS:
        if any(pattern.search(error) for error in errors):
            return words
    return one_line(re.sub(r"^\(\S+\):\s*", "", errors[0]))[:200] if errors else ""
