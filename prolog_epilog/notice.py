"""Lines in the output of processes that are about to be ended: written with those processes' own rights to their files.

A file may be one that never answers, so that a child writes it, one for all lines of a job. A child first takes the
open files over, which takes none of their owners to answer; as soon as it has them their processes may be ended.
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

Line = tuple[Iterable[int], str]
"""Processes, of which the first that has a standard error gets the line, and the line."""

_PIDFD_GETFD = 438
_MOST_CHILDREN = 32  # at one time, those that hang in a file included
_MOST_LINES = 32  # of one job
_MOST_PIDS = 8  # that are tried for a line
_MOST_BYTES = 4000  # a pipe that has room takes so much without waiting
_libc = ctypes.CDLL(None, use_errno=True)
_left: set[int] = set()  # children that were killed and have not ended yet
_left_lock = threading.Lock()


@dataclass(eq=False)
class Voice:
    """A child that writes the lines of one job."""

    lines: int
    pid: int = 0
    pipe: int = -1  # gets a byte when the files are held, then one for each line
    said: bytes = b""

    @property
    def told(self) -> list[bool]:
        """Of each line, whether it was written."""
        answers = self.said[1:].ljust(self.lines, b"0")
        return [answer == ord("1") for answer in answers[: self.lines]]


def tell(pids: Iterable[int], text: str) -> bool:
    """`tell_all` for one."""
    return tell_all([[(pids, text)]])[0][0]


def tell_all(jobs: Sequence[Sequence[Line]], seconds: float = 0.6) -> list[list[bool]]:
    """Write the lines of each job; of each line, whether it was written. All of them have `seconds`."""
    voices = begin(jobs)
    finish(voices, seconds)
    return [voice.told for voice in voices]


def begin(jobs: Sequence[Sequence[Line]]) -> list[Voice]:
    """Have a child write the lines of each job; where that were too many children the last ones say nothing."""
    _reap()
    with _left_lock:
        room = _MOST_CHILDREN - len(_left)
    return [_begin(lines) if number < room else Voice(len(lines)) for number, lines in enumerate(jobs)]


def _begin(lines: Sequence[Line]) -> Voice:
    voice = Voice(len(lines))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _speak(theirs, lines[:_MOST_LINES])
        finally:
            os._exit(0)
    os.close(theirs)
    voice.pid, voice.pipe = child, ours
    return voice


def held(voices: Sequence[Voice], seconds: float) -> Iterator[Voice]:
    """Each voice as soon as its files are held; after `seconds` also the others, and first those that say nothing."""
    waiting = {voice.pipe: voice for voice in voices if voice.pid}
    yield from (voice for voice in voices if not voice.pid)
    for voice in _hear(waiting, seconds, 1):
        del waiting[voice.pipe]
        yield voice
    yield from waiting.values()


def finish(voices: Sequence[Voice], seconds: float) -> None:
    """Wait until all is written, and end those that take longer."""
    for _ in _hear({voice.pipe: voice for voice in voices if voice.pid}, seconds, 1 + _MOST_LINES):
        pass
    for voice in voices:
        if voice.pid:
            os.close(voice.pipe)
            os.kill(voice.pid, signal.SIGKILL)
            with _left_lock:
                _left.add(voice.pid)
            voice.pid = 0
    _reap()


def _hear(voices: dict[int, Voice], seconds: float, enough: int) -> Iterator[Voice]:
    """Each voice that has said `enough` bytes, or all that it has to say."""
    end = time.monotonic() + seconds
    waiting = dict(voices)
    poll = select.poll()
    for pipe in waiting:
        poll.register(pipe, select.POLLIN)
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe, _ in poll.poll(1000 * left):
            voice = waiting[pipe]
            more = os.read(pipe, enough)
            voice.said += more
            if not more or len(voice.said) >= min(enough, 1 + voice.lines):
                poll.unregister(pipe)
                del waiting[pipe]
                yield voice


def _reap() -> None:
    with _left_lock:
        for child in list(_left):
            try:
                ended, _ = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                ended = child
            if ended:
                _left.discard(child)


def _speak(answers: int, lines: Sequence[Line]) -> None:
    files = [next(filter(None, map(_error_of, islice(pids, _MOST_PIDS))), None) for pids, _ in lines]
    os.write(answers, b"h")
    for file, (_, text) in zip(files, lines, strict=True):
        told = file is not None and _write(file, f"\nsluice: {text}\n".encode(errors="replace")[:_MOST_BYTES])
        os.write(answers, b"1" if told else b"0")


def _error_of(pid: int) -> int | None:
    """The open file itself is taken over, so that nothing is written which the process could not write."""
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
