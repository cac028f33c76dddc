"""llama.cpp's own server with a tiny model, as a process: for tests of what talks to an engine.

`python -m tests.serve_engine MODEL.gguf SOCKET_OR_PORT [KEY]` starts one by hand.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-P", "-m", "sluice.serve.engines.xllamacpp_server")


@dataclass(slots=True)
class Engine:
    """One that runs; `address`: a path of a socket, or a port of 127.0.0.1."""

    process: subprocess.Popen[bytes]
    address: Path | int

    def connect(self) -> socket.socket:
        """A connection to it."""
        if isinstance(self.address, int):
            return socket.create_connection(("127.0.0.1", self.address), timeout=30)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        connection.connect(str(self.address))
        return connection

    def kill(self) -> None:
        """As a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def engine(
    model: Path,
    address: Path | int,
    *options: str,
    name: str = "tiny",
    slots: int = 4,
    key: str = "",
    seconds: float = 60,
) -> Iterator[Engine]:
    """An engine that answers, until the end of the block. `options`: of llama-server."""
    if isinstance(address, Path):
        address.unlink(missing_ok=True)
        place = ["--host", str(address)]
    else:
        place = ["--host", "127.0.0.1", "--port", str(address)]
    secret = ["--api-key", key] if key else []
    process = subprocess.Popen(
        [
            *PROGRAM,
            "--model",
            str(model),
            "--alias",
            name,
            "--parallel",
            str(slots),
            "--ctx-size",
            str(4096 * slots),
            "--threads",
            "1",
            "--metrics",
            *place,
            *secret,
            *options,
        ],  # fmt: skip
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        stdin=subprocess.DEVNULL,
    )
    running = Engine(process, address)
    try:
        end = time.monotonic() + seconds
        while not _ready(running):
            if process.poll() is not None:
                raise AssertionError(f"the engine ended with {process.returncode}")
            assert time.monotonic() < end, "the engine does not answer"
            time.sleep(0.02)
        yield running
    finally:
        if process.poll() is None:
            running.kill()


def _ready(running: Engine) -> bool:
    with suppress(OSError), running.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return connection.recv(64).split(b" ")[1:2] == [b"200"]
    return False


if __name__ == "__main__":
    where = sys.argv[2]
    with engine(Path(sys.argv[1]), int(where) if where.isdecimal() else Path(where), key="".join(sys.argv[3:4])) as it:
        print(f"ready: {it.address}", flush=True)
        it.process.wait()
