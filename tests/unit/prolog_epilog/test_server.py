"""The agent's socket under hostile users: root is answered whatever they do."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prolog_epilog import server
from prolog_epilog.agent import only_one
from prolog_epilog.server import Peer, Server
from sluice_base.errors import SluiceError

USER = 65534


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], socket.socket]]:
    """A function that connects as a user; the kernel's word on who it is is ours here."""
    users: list[int] = []
    monkeypatch.setattr(server, "_peer", lambda _: Peer(1, users.pop(0)))
    stopping = threading.Event()
    made = Server(tmp_path / "agent.sock", stopping)
    made.add("ping", lambda *, peer: {"uid": peer.uid}, root_only=False)
    made.add("secret", lambda *, peer: {"uid": peer.uid})
    ready = threading.Event()
    thread = threading.Thread(target=made.serve, args=(ready.set,))
    thread.start()
    assert ready.wait(10)
    lock = threading.Lock()

    def connect(uid: int) -> socket.socket:
        with lock:
            users.append(uid)
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(20)
            connection.connect(str(made.path))
            end = time.monotonic() + 10
            while users and time.monotonic() < end:
                time.sleep(0.001)
        return connection

    yield connect
    made.stop()
    thread.join(10)


def ask(connection: socket.socket, what: str = "ping") -> dict[str, object] | None:
    try:
        connection.sendall(json.dumps({"do": what}).encode() + b"\n")
        answer = connection.makefile("rb").readline()
    except OSError:
        return None
    return dict(json.loads(answer)) if answer else None


def test_users_cannot_take_roots_places(served: Callable[[int], socket.socket]) -> None:
    crowd = [served(USER) for _ in range(40)] + [served(1000 + user) for user in range(100)]
    assert ask(served(0)) == {"ok": {"uid": 0}}
    answered = [ask(connection) is not None for connection in crowd]
    assert sum(answered[:40]) == server._MOST_OF_USER and sum(answered) == server._MOST_OF_USERS
    for connection in crowd:
        connection.close()
    end = time.monotonic() + 5
    while ask(served(USER)) is None:  # their places are free again
        assert time.monotonic() < end


def test_a_silent_user_is_shown_out(served: Callable[[int], socket.socket]) -> None:
    silent, root = served(USER), served(0)
    began = time.monotonic()
    assert silent.recv(10) == b"" and time.monotonic() - began < server._USERS_IDLE_SECONDS + 2
    assert ask(root) == {"ok": {"uid": 0}}


def test_refusals_do_not_fill_the_log(
    served: Callable[[int], socket.socket], capfd: pytest.CaptureFixture[str]
) -> None:
    one = served(USER)
    for _ in range(500):
        answer = ask(one, "secret")
        assert answer is not None and "for root only" in str(answer["error"])
    assert capfd.readouterr().err.count("action=refused") == server._USERS_REFUSALS


LINES = {
    "deep": b"[" * 60000,
    "infinite": b'{"do": "ping", "job": 1e999}',
    "no text": b"\xff" * 100,
    "large number": b'{"do":' + b"9" * 5000,
    "long": b"x" * 70000,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_lines_of_any_kind_are_answered(served: Callable[[int], socket.socket], line: bytes) -> None:
    one = served(USER)
    one.sendall(line + b"\n")
    answer = one.makefile("rb").readline()
    assert b"error" in answer
    assert ask(served(0)) == {"ok": {"uid": 0}}


def test_a_link_in_the_sockets_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "agent.sock").symlink_to(tmp_path / "victim")
    made, ready = Server(tmp_path / "agent.sock", threading.Event()), threading.Event()
    thread = threading.Thread(target=made.serve, args=(ready.set,))
    thread.start()
    assert ready.wait(10)
    made.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert (tmp_path / "victim").read_text() == "kept" and not os.path.islink(tmp_path / "agent.sock")  # noqa: PTH114


def test_one_agent_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.agent._LOCK_SECONDS", 0.2)
    first = only_one(tmp_path / "lock")
    with pytest.raises(SluiceError, match="another one runs"):
        only_one(tmp_path / "lock")
    os.close(first)
    os.close(only_one(tmp_path / "lock"))
    (tmp_path / "planted").symlink_to(tmp_path / "lock")
    with pytest.raises(OSError, match="symbolic"):
        only_one(tmp_path / "planted")
