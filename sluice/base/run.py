"""Other programs, without a shell and always with a time limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
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
