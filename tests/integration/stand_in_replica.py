"""A replica for tests of what keeps replicas: its engine is nothing, its words are those of a real one.

It reads its spec from standard input, and becomes the real program where the service is `REAL`. A file LAUNCH.json in
the folder of its first argument says what it does: seconds until it is ready, the requests that it has, or that it
fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sluice.exchange.serving import Abilities, Heartbeat, Load, Orders, ReplicaSpec, State, parse, render
from sluice.slurm.munge import decode, encode

REAL = "engine"
"""A service whose replicas are real ones."""


def main() -> None:
    """Say what a replica says until its orders are to stop."""
    folder = Path(sys.argv[1])
    text = sys.stdin.buffer.read()
    spec = parse(ReplicaSpec, text)
    if spec.service == REAL:
        path = folder / f"{spec.launch}.spec"
        path.write_bytes(text)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "sluice.serve.replica.main", str(path)])
    began, stop, drains, ends = time.time(), threading.Event(), threading.Event(), threading.Event()
    noticed = threading.Event()

    def term(*_: object) -> None:
        """The first one is a notice."""
        for event in (drains, ends) if noticed.is_set() else (noticed,):
            event.set()

    signal.signal(signal.SIGTERM, term)
    wanted: dict[str, Any] = {}
    while not stop.is_set():
        for name in (f"{spec.service}.json", f"{spec.launch}.json"):
            if (folder / name).is_file():
                wanted |= json.loads((folder / name).read_text() or "{}")
        state = State.READY if time.time() > began + wanted.get("start_s", 0.3) else State.STARTING
        state = State.DRAINING if drains.is_set() else state
        state = State.FAILED if wanted.get("fails") else state
        beat = Heartbeat(
            spec.service, spec.launch, int(os.environ["SLURM_JOB_ID"]), os.environ["SLURMD_NODENAME"], 4711, "ab" * 32,
            "cd" * 32, state, Abilities(chat=True), spec.slots, Load(running=wanted.get("running", 0)), None,
            why=str(wanted.get("fails", "")) or ("Slurm ends the job" if noticed.is_set() else ""),
        )  # fmt: skip
        for registry in spec.registries:
            try:
                orders = say(registry, beat, spec.registry_uid)
            except (OSError, ValueError) as error:
                print(registry, error, flush=True)
                continue
            if orders.do == "drain":
                drains.set()
            if orders.do == "stop":
                stop.set()
        if ends.is_set() and not wanted.get("running"):
            break
        stop.wait(0.1 if state is State.STARTING else 0.5)


def say(registry: str, beat: Heartbeat, uid: int) -> Orders:
    """One heartbeat. Raises OSError, ValueError."""
    host, _, port = registry.rpartition(":")
    with socket.create_connection((host, int(port)), 3.0) as connection:
        connection.sendall(encode(render(beat), readable_by=uid).encode() + b"\n")
        line = connection.makefile("rb").readline()
    if not line:
        raise ValueError("refused")
    message = decode(line.decode().strip())
    if message.uid != uid:
        raise ValueError(f"an answer of uid {message.uid}")
    return parse(Orders, message.payload)


if __name__ == "__main__":
    main()
