"""Writes lines to the standard error of processes that are about to be ended, with those processes' own open files.

A file may be one that never answers, so a child process writes, one for all lines of a job. Processes are ended when
their lines are written: slurmstepd reads no output that comes after the last of a step's processes has ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from prolog_epilog import cgroups

Line = tuple[Iterable[int], str]
"""Processes, of which the first that has a standard error gets the line, and the line."""

_PIDFD_GETFD = 438
_MOST_CHILDREN = 32  # at one time, those that hang in a file included
_MOST_LINES = 32  # of one job
_MOST_PIDS = 8  # that are tried for each line
_MOST_BYTES = 4000  # a pipe that has room takes this much without blocking
_MORE_S = 0.6  # for a child that waits for a processor: that is a busy node, and no file that hangs
_LOOK_S = 0.02  # between looks at it
_libc = ctypes.CDLL(None, use_errno=True)
_left: set[int] = set()  # children that were killed and have not ended yet
_left_lock = threading.Lock()


@dataclass(eq=False)
class Writer:
    """A child that writes the lines of one job."""

    lines: int
    pid: int = 0
    pipe: int = -1  # gets a byte for each line
    answers: bytes = b""

    @property
    def written(self) -> list[bool]:
        """Of each line, whether it was written."""
        answers = self.answers.ljust(self.lines, b"0")
        return [answer == ord("1") for answer in answers[: self.lines]]


def write_line(pids: Iterable[int], text: str) -> bool:
    """`write_all` for one line."""
    return write_all([[(pids, text)]])[0][0]


def write_all(jobs: Sequence[Sequence[Line]], seconds: float = 0.6) -> list[list[bool]]:
    """Write the lines of each job; of each line, whether it was written. All of them have `seconds`."""
    writers = begin(jobs)
    for _ in done(writers, seconds):
        pass
    finish(writers)
    return [writer.written for writer in writers]


def begin(jobs: Sequence[Sequence[Line]]) -> list[Writer]:
    """Start a child for the lines of each job; if these would be too many children the last jobs get no lines."""
    _reap()
    with _left_lock:
        room = _MOST_CHILDREN - len(_left)
    return [_begin(lines) if number < room else Writer(len(lines)) for number, lines in enumerate(jobs)]


def _begin(lines: Sequence[Line]) -> Writer:
    writer = Writer(len(lines))
    try:
        ours, theirs = os.pipe()
    except OSError:
        return writer
    try:
        child = os.fork()
    except OSError:  # a node without processes left: they are ended without a line
        os.close(ours)
        os.close(theirs)
        return writer
    if child == 0:
        try:
            _write_lines(theirs, lines[:_MOST_LINES])
        finally:
            os._exit(0)
    os.close(theirs)
    writer.pid, writer.pipe = child, ours
    return writer


def done(writers: Sequence[Writer], seconds: float) -> Iterator[Writer]:
    """Each writer when its lines are done, and first those without a child.

    After `seconds` also the others; one whose child has not had the processor to write comes up to `_MORE_S` later.
    """
    yield from (writer for writer in writers if not writer.pid)
    waiting = {writer.pipe: writer for writer in writers if writer.pid}
    poll = select.poll()
    for pipe in waiting:
        poll.register(pipe, select.POLLIN)
    end = time.monotonic() + seconds
    while waiting:
        left = end - time.monotonic()
        ready = [pipe for pipe, _ in poll.poll(1000 * max(left, _LOOK_S)) if _has_answered(waiting[pipe])]
        if left <= 0:
            late = left <= -_MORE_S
            over = [pipe for pipe, one in waiting.items() if late or not _is_runnable(one.pid)]
            ready += [pipe for pipe in over if pipe not in ready]
        for pipe in ready:
            poll.unregister(pipe)
            yield waiting.pop(pipe)


def finish(writers: Sequence[Writer]) -> None:
    """Kill the children: what they have not written by now is not waited for."""
    for writer in writers:
        if writer.pid:
            os.close(writer.pipe)
            os.kill(writer.pid, signal.SIGKILL)
            with _left_lock:
                _left.add(writer.pid)
            writer.pid = 0
    _reap()


def _has_answered(writer: Writer) -> bool:
    """Whether a writer that can be read has answered for all its lines, or has ended."""
    more = os.read(writer.pipe, _MOST_LINES)
    writer.answers += more
    return not more or len(writer.answers) >= writer.lines


def _is_runnable(pid: int) -> bool:
    """Whether a process runs or waits for a processor."""
    try:
        return cgroups.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False


def _reap() -> None:
    with _left_lock:
        for child in list(_left):
            try:
                ended, _ = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                ended = child
            if ended:
                _left.discard(child)


def _write_lines(answers: int, lines: Sequence[Line]) -> None:
    for pids, text in lines:
        file = next(filter(None, map(_error_of, islice(pids, _MOST_PIDS))), None)
        written = file is not None and _write(file, f"\nsluice: {text}\n".encode(errors="replace")[:_MOST_BYTES])
        os.write(answers, b"1" if written else b"0")


def _error_of(pid: int) -> int | None:
    """The process's own open file, so that nothing is written which the process could not write."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        file = int(_libc.syscall(_PIDFD_GETFD, process, 2, 0))
        os.close(process)
        return file if file >= 0 else None
    return None


def _write(file: int, line: bytes) -> bool:
    """Whether the file takes the line at once; devices other than terminals get none."""
    try:
        if stat.S_ISBLK(os.fstat(file).st_mode) or (stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file)):
            return False
        room = select.poll()
        room.register(file, select.POLLOUT)
        return any(events & select.POLLOUT for _, events in room.poll(0)) and os.write(file, line) > 0
    except OSError:
        return False
