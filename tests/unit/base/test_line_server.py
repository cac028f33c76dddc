"""One poll loop for many clients."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from pathlib import Path

from sluice.base.line_server import Asker, Kind, LineServer, Listener
from sluice.base.rates import Rate

KIND = Kind("users", places=64, threads=1, line=64, held=1 << 16, seconds=30.0, rates=(Rate(10, 20), Rate(512, 15)))


def listener(path: Path, owner: int) -> Listener:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(256)
    asker = Asker(KIND, (owner,), owner)
    return Listener(listening, lambda connection, address: asker, KIND, (owner,))


def ask(path: Path, count: int) -> list[socket.socket]:
    crowd = []
    for _ in range(count):
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].connect(str(path))
        crowd[-1].sendall(b"?\n")
    return crowd


def test_who_asks_seldom_does_not_share_with_who_always_asks(tmp_path: Path) -> None:
    """Attack: users send requests at the highest rate of all together; another user's tasks still begin."""
    answered: list[int] = []

    def answer(line: bytes, who: int) -> bytes:
        answered.append(who)
        return b"!\n"

    server, stopping = LineServer([KIND], answer), threading.Event()
    for number in range(4):
        server.listen(listener(tmp_path / str(number), number))
    thread = threading.Thread(target=server.serve, args=(lambda: not stopping.is_set(),))
    thread.start()
    crowd = [one for number in (1, 2, 3) for one in ask(tmp_path / str(number), 100)]
    while len(answered) < 60:
        time.sleep(0.01)
    for one in ask(tmp_path / "0", 16):
        assert one.makefile("rb").readline() == b"!\n"
    stopping.set()
    server.wake()
    thread.join(10)
    for one in crowd:
        one.close()
    others = [who for who in answered[answered.index(0) :] if who != 0]
    assert len(others) < 24, "a fair part would leave 48 to the crowd"


def test_a_server_that_has_ended_leaves_no_descriptor(tmp_path: Path) -> None:
    """The controllers' daemon starts one each time that its controller becomes the leader."""

    def serve(number: int) -> int:
        server = LineServer([KIND], lambda line, who: b"!\n")
        server.listen(listener(tmp_path / str(number), 0))
        server.serve(lambda: False)
        del server
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    first = serve(0)
    assert max(serve(number) for number in range(1, 4)) <= first  # an earlier test's may go meanwhile
