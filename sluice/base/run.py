"""Other programs, without a shell and always with a time limit."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError

PYTHON = (sys.executable, "-P")
"""This Python, which imports nothing from the folder in which it is started: that may be a user's."""


class CommandError(SluiceError):
    """A program that could not be started, took too long or failed; carries what it said."""

    def __init__(self, what: str, *, returncode: int | None = None, stderr: str = "") -> None:
        super().__init__(what)
        self.returncode = returncode
        self.stderr = stderr


def run_command(
    arguments: Sequence[str | Path],
    *,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    input_text: str | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed.

    `timeout` in seconds; `env` replaces the environment. Raises CommandError when the program is missing, exceeds
    the time-out (it is killed) or, with `check`, ends with a non-zero status.
    """
    words = [str(argument) for argument in arguments]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=None if env is None else dict(env),
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            check=False,
        )
    except OSError as error:
        raise CommandError(f"{words[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{' '.join(words)}: no answer within {timeout:g} s") from error
    if check and done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise CommandError(f"{' '.join(words)}: {said}", returncode=done.returncode, stderr=done.stderr)
    return done


_PIECE = 1 << 20


def read_command(
    arguments: Sequence[str | Path], *, timeout: float = 60, env: Mapping[str, str] | None = None
) -> Iterator[bytes]:
    """What a program prints, piece by piece, for output that is not to be in memory as a whole.

    Raises CommandError as `run_command`, after the last piece where the program failed: what was printed until then is
    not all. The program is killed when it exceeds the time-out, or when nobody reads on.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as complaints:
        try:
            program = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=None if env is None else dict(env),
            )
        except OSError as error:
            raise CommandError(f"{words[0]}: {error.strerror}") from error
        late = threading.Event()

        def end() -> None:
            late.set()
            program.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            assert program.stdout is not None  # noqa: S101 - it is a pipe
            while piece := program.stdout.read(_PIECE):
                yield piece
            code = program.wait()
        finally:
            timer.cancel()
            program.kill()
            program.wait()
            program.stdout.close()  # type: ignore[union-attr]
        if late.is_set():
            raise CommandError(f"{words[0]}: no answer within {timeout:g} s")
        if code != 0:
            complaints.seek(0)
            said = complaints.read(_PIECE).decode(errors="replace")
            raise CommandError(f"{words[0]}: {said.strip() or f'exit status {code}'}", returncode=code, stderr=said)


# ---- programs that are not trusted to end, or to say little ----

_DIES_S = 5.0
_MOST_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program said. `status` None: it was ended, as it took too long or said too much."""

    status: int | None
    out: str
    err: str


@contextmanager
def input_file(data: bytes) -> Iterator[int]:
    """A program's standard input. Not a pipe: whose giver is killed, takes a part for all."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def finish(child: subprocess.Popen[bytes], timeout: float, most: int) -> Finished:
    """Wait for a program that was started with pipes and a session of its own; `most` bounds each of its two outputs.

    Whatever it started and left in its session's group is ended with it.
    """
    try:
        out, err, whole = _listen(child, time.monotonic() + timeout, most)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the leader is not reaped yet: the number is its
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):  # it waits for a file server, and dies with that
            status = child.wait(_DIES_S)
        for stream in (child.stdout, child.stderr):
            assert stream is not None  # noqa: S101 - both are pipes
            stream.close()
    return Finished(status if whole else None, out.decode(errors="replace"), err.decode(errors="replace"))


def _listen(child: subprocess.Popen[bytes], until: float, most: int) -> tuple[bytes, bytes, bool]:
    """Take its outputs until it ends; whether it ended by itself. It is not reaped here."""
    assert child.stdout is not None and child.stderr is not None  # noqa: S101
    said = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    ended = os.pidfd_open(child.pid)
    whole = False
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for number in said:
                os.set_blocking(number, False)
                selector.register(number, selectors.EVENT_READ)
            while not whole and (wait := until - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(wait)}
                whole = ended in ready
                for number in ready & said.keys():
                    if not _take(number, said[number], most, all_of_it=whole):
                        selector.unregister(number)
                if any(len(taken) > most for taken in said.values()):
                    whole = False
                    break
    finally:
        os.close(ended)
    return bytes(said[child.stdout.fileno()]), bytes(said[child.stderr.fileno()]), whole


def _take(number: int, taken: bytearray, most: int, *, all_of_it: bool) -> bool:
    """Read what is there; whether there may be more."""
    while len(taken) <= most:
        try:
            piece = os.read(number, _MOST_PIECE)
        except BlockingIOError:
            return True
        taken += piece
        if not piece:
            return False
        if not all_of_it:
            return True
    return True
