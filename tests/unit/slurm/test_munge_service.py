"""A service of the controllers under hostile hosts and users: root of a node is always answered."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.base.rates import Rate
from sluice.slurm import munge_service
from sluice.slurm.munge import Message, MungeError
from sluice.slurm.munge_service import Service, connect

ROOT, USER = 0, 1000
WORD = b"known"
MOST = 1 << 20
SECONDS = 10.0


def credential(uid: int, text: str = "hello") -> bytes:
    return base64.b64encode(json.dumps([uid, text]).encode()) + b"\n"


def decode(text: str) -> Message:
    try:
        uid, payload = json.loads(base64.b64decode(text))
        return Message(payload.encode(), uid, 0)
    except ValueError as error:
        raise MungeError("munge: Invalid credential") from error


@pytest.fixture
def few_files() -> Iterator[None]:
    """As daemons are started: with fewer files than a service has places."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(munge_service, "decode", decode)
    monkeypatch.setattr(munge_service, "encode", lambda payload, readable_by: f"{readable_by}:{payload.decode()}")
    monkeypatch.setattr(munge_service, "_ROOTS_PORTS", range(600, 1024))
    stop = threading.Event()
    service = Service(
        "test", lambda message: message.payload, most=MOST, seconds=SECONDS, log=logging.getLogger("x"), trusted=[ROOT],
        known=lambda word: (word,) if word == WORD else None, rates_of_known=(Rate(512, 100), Rate(64, 20)),
    )  # fmt: skip
    listening = socket.create_server(("", 0), backlog=1024)
    thread = threading.Thread(target=service.serve, args=([listening], lambda: not stop.is_set()))
    thread.start()
    yield int(listening.getsockname()[1])
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def send(port: int, uid: int, make: Callable[..., socket.socket] = connect) -> tuple[float, bytes]:
    """How long a request took, and its answer."""
    began = time.monotonic()
    with make("127.0.0.1", port, 20) as connection:
        connection.sendall(credential(uid))
        answer = connection.makefile("rb").readline()
    return time.monotonic() - began, answer


def from_user(host: str, port: int, timeout: float) -> socket.socket:
    return socket.create_connection((host, port), timeout)


ATTACK = """
import contextlib, socket, sys, time
port, kind, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
line, mine = sys.stdin.buffer.readline(), []
print("begun", flush=True)
while True:
    with contextlib.suppress(OSError):
        one = socket.socket()
        one.bind(("127.0.0.%d" % (2 + number % 50 if kind == "slow" else 2), 0))
        number += 1
        one.settimeout(0.5)
        one.connect(("127.0.0.1", port))
        mine.append(one)
        if kind == "flood":
            one.sendall(line)
            one.recv(1)
        for slow in mine[-200:] if kind == "slow" else ():
            slow.setblocking(False)
            with contextlib.suppress(OSError):
                slow.send(b"x")
    if len(mine) > (1000 if kind != "flood" else 20):
        del mine[:10]
"""


@pytest.mark.parametrize("kind", ["silent", "slow", "flood", "garbage"])
def test_a_nodes_request_is_answered_whatever_others_do(port: int, kind: str) -> None:
    """1,000 silent connections from one address, slow ones from 50, and floods of an ordinary user's."""
    with contextlib.ExitStack() as stack:
        for number in range(2):
            crowd = subprocess.Popen(
                [sys.executable, "-c", ATTACK, str(port), kind if kind != "garbage" else "flood", str(25 * number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(crowd.wait)
            stack.callback(crowd.kill)
            assert crowd.stdin is not None and crowd.stdout is not None
            crowd.stdin.write(credential(USER) if kind == "flood" else b"nonsense\n")
            crowd.stdin.flush()
            assert crowd.stdout.readline()
        time.sleep(1.5)
        times, answers = zip(*(send(port, ROOT) for _ in range(100)), strict=True)
    assert set(answers) == {b"0:hello\n"}
    assert max(times) < SECONDS  # none waited for a silent connection to be given up


def test_a_thousand_silent_connections_do_not_keep_another_address_out(port: int) -> None:
    """Attack: four silent connections kept the service for 10 s each. An ordinary port, as of an older agent."""
    silent = []
    for _ in range(1000):
        silent.append(socket.socket())
        silent[-1].bind(("127.0.0.2", 0))
        silent[-1].connect(("127.0.0.1", port))
    took, answer = send(port, ROOT, from_user)
    assert answer == b"0:hello\n" and took < SECONDS
    for one in silent:
        one.close()


@pytest.mark.usefixtures("few_files")
def test_silent_connections_do_not_take_the_daemons_last_file(port: int) -> None:
    silent: list[socket.socket] = []
    send(port, ROOT)  # once it answers it has allowed itself more files
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            for _ in range(300):
                silent.append(stack.enter_context(from_user("127.0.0.1", port, 1)))
        seconds, answer = send(port, ROOT)
        with Path(os.devnull).open():
            pass
    assert len(silent) == 300 and answer.endswith(b"hello\n") and seconds < SECONDS


def ask_as(word: bytes, port: int, seconds: float = 20.0) -> bytes:
    """The answer to a request from the crowd's address that begins with a word; empty: none."""
    with socket.create_connection(("127.0.0.1", port), seconds, ("127.0.0.2", 0)) as connection:
        connection.sendall(b"%b %b" % (word, credential(USER + 1)))
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            return connection.makefile("rb").readline()
    return b""


def test_who_is_known_does_not_wait_with_the_others_of_an_address(port: int) -> None:
    """Attack: a user on a replica's node sends what is no credential, far above the rate of the address."""
    crowd = []
    for _ in range(600):
        crowd.append(socket.create_connection(("127.0.0.1", port), 20, ("127.0.0.2", 0)))
        crowd[-1].sendall(b"nonsense\n")
    began = time.monotonic()
    assert {ask_as(WORD, port) for _ in range(20)} == {b"1001:hello\n"}
    assert time.monotonic() - began < 3.0
    assert not ask_as(b"unknown", port, 1.0), "it waits with its address"
    for one in crowd:
        one.close()


def test_who_is_known_has_a_rate(port: int) -> None:
    began = time.monotonic()
    for _ in range(80):
        assert ask_as(WORD, port)
    assert time.monotonic() - began > 0.4, "64 at once, and 20 a second"


def test_a_user_who_asks_too_often_is_not_answered_and_others_are(port: int) -> None:
    answers = [send(port, USER, from_user)[1] for _ in range(150)]
    assert answers[:60] == [b"1000:hello\n"] * 60 and b"" in answers
    assert send(port, USER + 1, from_user)[1] == b"1001:hello\n" and send(port, ROOT, from_user)[1] == b"0:hello\n"


def test_a_request_that_is_too_long_or_too_slow_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    with from_user("127.0.0.1", port, 20) as connection:
        with contextlib.suppress(OSError):
            for _ in range(40):
                connection.sendall(b"x" * 65536)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""


def test_the_port_is_free_again_when_the_service_ends() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    Service("test", lambda _: b"", most=MOST, seconds=1, log=logging.getLogger("x")).serve([listening], lambda: False)
    socket.create_server(("127.0.0.1", port), reuse_port=False).close()


def test_addresses_of_one_network_are_one_owner() -> None:
    assert munge_service._owner("2001:db8::1")[0] == munge_service._owner("2001:db8::ffff:2")[0]
    assert munge_service._owner("2001:db8::1")[0] != munge_service._owner("2001:db8:1::1")[0]
    assert munge_service._owner("::ffff:10.0.0.1")[0] != munge_service._owner("::ffff:10.0.0.2")[0]
    assert munge_service._owner("fe80::1%eth0") and munge_service._owner("no address")
