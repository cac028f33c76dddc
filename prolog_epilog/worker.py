"""The agent's side of a vendor's process (`prolog_epilog.sampling`): asked with a timeout, replaced when it hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON

STARTS_S = 50.0
"""How long a driver may take for the first answer of a process: after a boot, or on a busy node."""
_MOST_ANSWER = 8 << 20


class Worker:
    """One vendor's process. One question at a time; threads may share it."""

    def __init__(
        self, vendor: str, timeout: float = 5.0, module: str = "prolog_epilog.sampling", starts: float = STARTS_S
    ) -> None:
        self.vendor = vendor
        self.timeout = timeout
        self.module = module
        self.starting = False
        """The process has not answered yet, and still may: it is kept, and its first answer waited for."""
        self._starts = starts
        self._started = 0.0
        self._owed = False  # the answer to a question that was given up while the process started
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, *, timeout: float | None = None, **request: Any) -> dict[str, Any]:
        """The library's answer. Raises SluiceError when the driver hangs, the library crashes, or it refuses."""
        seconds = timeout or self.timeout
        if not self._lock.acquire(timeout=seconds):
            raise SluiceError(f"the {self.vendor} driver is still busy with another question", remedy="see dmesg")
        try:
            return self._ask(request, time.monotonic() + seconds)
        except SluiceError:
            if not self._owed or time.monotonic() > self._started + self._starts:
                self._drop()
            raise
        finally:
            self._lock.release()

    def _ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._drop()
            self._process = subprocess.Popen(
                [*PYTHON, "-m", self.module, self.vendor],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.starting, self._started = True, time.monotonic()
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101 - both are pipes
        try:
            if self._owed:
                self._read(deadline)
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read(deadline)
        except OSError as error:
            raise self._ended() from error
        answer = json.loads(line)
        if "error" in answer:
            raise SluiceError(f"the {self.vendor} driver: {answer['error']}", remedy="see: sluice probe, dmesg")
        return dict(answer["ok"])

    def _read(self, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None  # noqa: S101 - it runs
        line = _read_line(self._process.stdout.fileno(), deadline)
        self._owed = line is None and self.starting
        if line is None:
            raise SluiceError(
                f"the {self.vendor} driver gives no answer",
                remedy="see dmesg; it may hang until the node is rebooted",
            )
        if not line:
            raise self._ended()
        self.starting = False
        return line

    def _ended(self) -> SluiceError:
        return SluiceError(
            f"the {self.vendor} library ended the process that asked it", remedy="see dmesg, and the agent's log"
        )

    def _drop(self) -> None:
        """Kill the process; one in an uninterruptible sleep is left behind."""
        self.starting = self._owed = False
        if self._process is None:
            return
        with suppress(OSError):
            os.killpg(self._process.pid, 9)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._drop()


def _read_line(descriptor: int, deadline: float) -> bytes | None:
    """A line; None after the timeout, empty at the end."""
    data = b""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(1000 * left):
            return None
        part = os.read(descriptor, 1 << 16)
        if not part or len(data) > _MOST_ANSWER:
            return b""
        data += part
    return data
