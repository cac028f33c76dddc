"""A line in the output of a process that is about to be ended: written with that process's own rights to its file."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterable, Sequence

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def tell(pids: Iterable[int], text: str) -> bool:
    """`tell_all` for one."""
    return tell_all([(pids, text)])[0]


def tell_all(lines: Sequence[tuple[Iterable[int], str]], seconds: float = 0.6) -> list[bool]:
    """Write each line to the standard error of the first of its processes that has one; of each, whether one had.

    The open file itself is taken over, not opened anew by its name, so that nothing is written which the process could
    not write. A child for each line does it, as a file may be one that never answers; all of them have `seconds`, which
    is what a child may need to be given a CPU on a machine that has too much to do.
    """
    children = [_start(pids, f"\nsluice: {text}\n".encode(errors="replace")[:4000]) for pids, text in lines]
    end = time.monotonic() + seconds
    return [_wait(child, max(0.0, end - time.monotonic())) for child in children]


def _start(pids: Iterable[int], line: bytes) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = 0 if any(_write(pid, line) for pid in pids) else 1
    finally:
        os._exit(status)


def _write(pid: int, line: bytes) -> bool:
    try:
        process = os.pidfd_open(pid)
        file = _libc.syscall(_PIDFD_GETFD, process, 2, 0)
        os.close(process)
        if file < 0:
            return False
        _, ready, _ = select.select([], [file], [], 0)
        return bool(ready) and os.write(file, line) > 0
    except OSError:
        return False


def _wait(child: int, seconds: float) -> bool:
    """Whether the child ended well in time; else it is killed."""
    process = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([process], [], [], seconds)
    finally:
        os.close(process)
    if not ready:
        os.kill(child, 9)
    _, status = os.waitpid(child, 0 if ready else os.WNOHANG)
    return bool(ready) and os.waitstatus_to_exitcode(status) == 0
