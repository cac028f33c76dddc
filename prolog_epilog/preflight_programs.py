"""Programs that measure for a preflight: they run as a user without rights, and say one JSON object a line."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prolog_epilog.owners import MEASURES_AS
from sluice.base.errors import SluiceError

_PYTHON = "/usr/bin/python3"
_FIND = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_END_S = 2.0  # a program that waits for its device may not end, though it is killed
_MOST_LINE = 4096
_MOST_LINES = 4096


class Program:
    """One such program; it ends with this object."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_LINES)
        self._lock = threading.Lock()
        self._over = False

    @property
    def path(self) -> Path:
        """The program's file."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """In addition to where programs are."""
        return {}

    def locked(self) -> int | None:
        """Bytes of memory that it and what it starts may lock, each of them; None: as many as the agent."""
        return None

    def groups(self) -> list[int]:
        """Numbers of further groups that it is in."""
        return []

    def __exit__(self, *_: object) -> None:
        with self._lock:
            over, self._over = self._over, True
        if self._program is not None and not over:  # once: afterwards its number may be another process's
            with suppress(ProcessLookupError):
                os.killpg(self._program.pid, signal.SIGKILL)  # with what it started
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(_END_S)

    def begin(self) -> None:
        """Start it. Raises SluiceError, OSError."""
        with self._lock:
            if self._over or self._program is not None:
                raise SluiceError("the controllers have begun another preflight of the job, or time is over")
            self._program = program = self._start()
        threading.Thread(target=self._read, args=(program,), daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        """From a file that only root may be able to reach. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            root = os.geteuid() == 0
            program = subprocess.Popen(
                [_PYTHON, "-IS", f"/proc/self/fd/{descriptor}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                cwd="/",
                env={"PATH": _FIND, **self.environment()},
                user=MEASURES_AS if root else None,
                group=MEASURES_AS if root else None,
                extra_groups=self.groups() if root else None,
                start_new_session=True,
            )
            locked = self.locked()
            if locked is not None:
                with suppress(OSError):  # without the right to raise it, or it has ended
                    resource.prlimit(program.pid, resource.RLIMIT_MEMLOCK, (locked, locked))
            return program
        finally:
            os.close(descriptor)

    def _read(self, program: subprocess.Popen[bytes]) -> None:
        assert program.stdout is not None  # noqa: S101 - it is a pipe
        with suppress(queue.Full):
            while line := program.stdout.readline(_MOST_LINE):
                self._lines.put_nowait(line)
            self._lines.put_nowait(b"")  # it has ended: nobody waits for more

    def say(self, words: object) -> None:
        """One line to the program. Raises SluiceError, OSError."""
        if self._program is None or self._program.stdin is None:
            raise SluiceError(f"{self.path.name} was not started")
        self._program.stdin.write(json.dumps(words).encode() + b"\n")
        self._program.stdin.flush()

    def line(self, end: float) -> Mapping[str, Any]:
        """The next line. Raises SluiceError where none comes until `end`, or any more."""
        try:
            said = json.loads(self._lines.get(timeout=max(0.0, end - time.monotonic())))
        except (queue.Empty, ValueError, RecursionError):
            raise SluiceError(f"{self.path.name} said nothing that can be read in time") from None
        if not isinstance(said, dict):
            raise SluiceError(f"{self.path.name} said something else than an object")
        return said


def figure(value: object) -> float | None:
    """Of what a program says only numbers are believed."""
    return value if isinstance(value, float) else None
