"""A replica as its job runs it, a registry that hears it, and connections as gateways make them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sluice.exchange.serving import Heartbeat, Orders, ReplicaSpec, State, parse, render

ROOT = Path(__file__).parents[3]
LAUNCH = "0123456789abcdef"
REGISTRY_UID = 4711
# munge as the tests have it: a credential is the reader's uid, the maker's, and the payload, readable
PROGRAM = """
import sys
from sluice.slurm import munge
def encode(payload, *, readable_by=None):
    return f"{readable_by}:{payload.hex()}"
def decode(credential):
    uid, _, payload = credential.partition(":")
    return munge.Message(bytes.fromhex(payload), int(uid), 0)
munge.encode, munge.decode = encode, decode
from sluice.serve.replica.main import main
sys.exit(main())
"""


def spec_of(model: Path | str, **changes: Any) -> ReplicaSpec:
    """Of a replica with llama.cpp."""
    given = {
        "service": "tiny", "launch": LAUNCH, "engine": "llama.cpp", "model": str(model), "sha256": None, "stage": None,
        "options": ("--ctx-size", "16384", "--threads", "1"), "command": (), "slots": 4, "registries": (),
        "registry_uid": REGISTRY_UID, "ready_s": 60.0, "drain_s": 20.0, "health": "/health",
        "broadcast": 1024, "nodes": 1,
    }  # fmt: skip
    return ReplicaSpec(**{**given, **changes})


class Registry:
    """Hears heartbeats, as replicad does, and answers with `orders`. `successor`: who must be replaced has one."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.tickets: list[str] = []
        self.times: list[float] = []
        self.orders = Orders()
        self.successor = True
        self.uid = REGISTRY_UID
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, suppress(OSError, ValueError):
                connection.settimeout(10)
                line = b""
                while not line.endswith(b"\n"):
                    line += connection.recv(65536)
                ticket, _, credential = line.decode().strip().rpartition(" ")
                reader, _, payload = credential.partition(":")
                assert int(reader) == REGISTRY_UID
                beat = parse(Heartbeat, bytes.fromhex(payload))
                self.beats.append(beat)
                self.tickets.append(ticket)
                self.times.append(time.monotonic())
                replaced = self.successor and beat.state is State.READY and beat.why
                orders = Orders("drain") if replaced else self.orders
                connection.sendall(f"{self.uid}:{render(orders).hex()}\n".encode())

    @property
    def states(self) -> list[State]:
        """Each once, in the order in which they were heard."""
        return list(dict.fromkeys(beat.state for beat in self.beats))

    def wait(self, state: State, seconds: float = 60) -> Heartbeat:
        """The first heartbeat with this state."""
        return until(lambda: next((beat for beat in self.beats if beat.state is state), None), seconds)


def until(look: Callable[[], Any], seconds: float = 30) -> Any:
    """What it finds, within a time that is enough on a busy machine."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


class Replica:
    """A process of sluice-replica."""

    def __init__(self, spec: ReplicaSpec, folder: Path, **variables: str) -> None:
        (folder / "spec.json").write_text(json.dumps(asdict(spec)))
        self.folder = folder
        self.tmp = Path(tempfile.mkdtemp(prefix="replica-"))  # short, as a socket's path must be
        self.errors = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, folder / "spec.json"],
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp), "SLURM_JOB_ID": "77",
                "SLURMD_NODENAME": "node1", **variables,
            },
            stderr=self.errors,
        )  # fmt: skip

    @property
    def said(self) -> str:
        """Its output."""
        return (self.folder / "stderr").read_text(errors="replace")

    def ended(self, seconds: float = 60) -> int:
        """Its exit status."""
        return self.process.wait(seconds)


@contextmanager
def replica(spec: ReplicaSpec, folder: Path, **variables: str) -> Iterator[Replica]:
    """One that runs."""
    started = Replica(spec, folder, **variables)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started.errors.close()
        shutil.rmtree(started.tmp)


def connect(port: int, secret: str | bytes | None, *, timeout: float = 30) -> ssl.SSLSocket:
    """As a gateway does; `secret` is the whole first line if it is bytes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=timeout))
    if secret is not None:
        connection.sendall(secret if isinstance(secret, bytes) else secret.encode() + b"\n")
    return connection


def request(path: str, body: Any = None) -> bytes:
    """Of HTTP, with the answer's end at the connection's."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(text)}\r\n\r\n".encode() + text


def read_all(connection: socket.socket) -> bytes:
    """Until it ends."""
    pieces = []
    with suppress(ConnectionResetError, ssl.SSLError):
        while piece := connection.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)
