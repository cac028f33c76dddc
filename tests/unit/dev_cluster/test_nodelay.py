"""The library by which slurmdbd answers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[3] / "dev_cluster/nodelay/libnodelay.so"
TALKS = """
import os, socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    accepted, _ = server.accept()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    options = [socket.TCP_NODELAY, socket.TCP_QUICKACK]
    print(*[accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options])
    client.sendall(b"asked")
    print(os.read(accepted.fileno(), 9).decode())
    print(*[accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options])
    accepted.setblocking(False)
    try:
        os.read(accepted.fileno(), 9)
    except BlockingIOError:
        print("nothing yet")
read, write = os.pipe()
os.write(write, b"no socket")
print(os.read(read, 9).decode())
"""


def test_what_is_read_is_acknowledged_at_once_and_answers_do_not_wait_for_that() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TALKS], env={"LD_PRELOAD": str(LIBRARY)}, capture_output=True, text=True, check=True,
        timeout=30,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["1 0", "asked", "1 1", "nothing yet", "no socket"]
