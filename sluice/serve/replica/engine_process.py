"""The engine as a process: its own group, its own environment, and what it said last."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.serve.engines.base import Start

_KEPT = (
    "HOME", "LANG", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
    "GPU_DEVICE_ORDINAL",
)  # fmt: skip
_KEPT_PREFIXES = (
    "CUDA_", "HIP_", "HSA_", "LC_", "LD_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEAPI_", "RCCL_", "ROCR_", "ROCM_",
    "SLURM_", "SLUICE_", "SYCL_", "UCX_", "VLLM_", "SGLANG_", "ZE_",
)  # fmt: skip
_WORDS = 400
_LINES = 20
_LINE = 2000
_PIECE = 1 << 16
_KILLED_S = 10.0
_MASK = b"***"


class EngineError(SluiceError):
    """The engine cannot be started, or has ended."""


def environment(given: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Of an engine: what chooses GPUs and libraries, and nothing else that a job may have."""
    kept = {name: value for name, value in given.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return {**kept, "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", **more}


class Masker:
    """Takes a secret out of what comes in pieces."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.rest = b""
        """What may be the secret's begin."""

    def feed(self, piece: bytes) -> bytes:
        """What may be passed on now."""
        secret = self._secret
        if not secret:
            return piece
        data = (self.rest + piece).replace(secret, _MASK)
        begun = next((length for length in range(len(secret) - 1, 0, -1) if data.endswith(secret[:length])), 0)
        self.rest = data[len(data) - begun :]
        return data[: len(data) - begun]


class EngineProcess:
    """Started by the main thread: the kernel ends the engine when the thread that started it ends."""

    def __init__(self, start: Start, folder: Path) -> None:
        for name, text in start.files.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        if isinstance(start.address, Path):
            start.address.unlink(missing_ok=True)
        program = start.arguments[0]
        if shutil.which(program) is None:
            raise EngineError(f"engine {program}: no such program", remedy="install it on the node, or correct PATH")
        setpriv = shutil.which("setpriv")
        guard = (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()
        try:
            self._process = subprocess.Popen(
                [*guard, *start.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, start.environment),
                cwd=folder,
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"engine {program}: {error.strerror}", remedy="see its file on the node") from error
        self.address = start.address
        self.was_ready = False
        """Set by who knows: what it says from then on may have words of requests."""
        self._masker = Masker(start.secret.encode())
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._reader = threading.Thread(target=self._read, name="engine's output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process, which is its group, too."""
        return self._process.pid

    def ended(self) -> str | None:
        """Why it has ended, in words; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if self.was_ready:
            return f"the engine has ended: {how}"
        self._reader.join(0.5)
        said = one_line(" | ".join(self._lines), limit=None)[-_WORDS:]
        return f"the engine has ended before it was ready: {how}{f': {said}' if said else ''}"

    def end(self, seconds: float) -> None:
        """SIGTERM, and after that time SIGKILL, to all of its group. Returns when it has ended, or a while later: what
        hangs in a driver is Slurm's, which drains the node for it."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        """Pass on what it prints to the job's output; keep the last lines of its start."""
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101 - it is a pipe
        rest = b""
        while read := os.read(pipe.fileno(), _PIECE):
            piece = self._masker.feed(read)
            self._print(piece)
            if self.was_ready:
                continue
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-_LINE:]
            self._lines.extend(line[-_LINE:].decode(errors="replace") for line in lines[-_LINES:])
        rest += self._masker.rest
        self._print(self._masker.rest)
        if rest and not self.was_ready:
            self._lines.append(rest.decode(errors="replace"))

    @staticmethod
    def _print(piece: bytes) -> None:
        with suppress(OSError):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
