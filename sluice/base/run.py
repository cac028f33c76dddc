"""Other programs, without a shell and always with a time limit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
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
