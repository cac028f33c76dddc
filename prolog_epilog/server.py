"""The agent's sockets: each connection sends one JSON object on a line and gets one; the kernel says who asks.

Root and each user with a job here have their own socket, ``ask/UID``, which no other user can open: no other can fill
the kernel's queue in which slurmd's prolog, or another user's task, waits. ``agent.sock`` is for all others. Root,
users and strangers are answered independently of each other (`sluice.base.line_server`).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prolog_epilog.subuids import Subuids
from sluice.base.errors import SluiceError
from sluice.base.line_server import Asker, Kind, LineServer, Listener
from sluice.base.log import log
from sluice.base.rates import Lines, Rate
from sluice.base.text import one_line
from sluice.core.errors import CoreError

_TOO_LONG = b'{"error": "a request that is too long", "blame": "node"}\n'
_ROOT = Kind(
    "root", places=256, threads=128, line=64 << 10, held=16 << 20, seconds=30.0, too_long=_TOO_LONG
)  # an epilog keeps its thread for as long as memory is cleared
_USERS = Kind(
    "users",
    places=256,
    threads=2,
    line=8 << 10,  # the names of 64 device files and more
    held=4 << 20,
    seconds=2.0,
    rates=(Rate(1024, 20), Rate(512, 15)),  # of all, of a user; two requests a task
    too_long=_TOO_LONG,
)
_STRANGERS = replace(_USERS, name="strangers", places=64, threads=1, rates=(Rate(128, 5), Rate(32, 1)))
_BACKLOG = 1024
_LOGGED = ("job", "uid", "gpus", "shards", "whole", "open")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks, as the kernel says."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class _Request:
    method: Callable[..., dict[str, Any]]
    root_only: bool
    quiet: bool


class Server:
    """Answers requests until `stop`. `users`: those with a job here, besides root."""

    def __init__(self, path: Path, stopping: threading.Event, users: Callable[[], Collection[int]] = tuple) -> None:
        self.path = path
        self.folder = path.with_name("ask")
        self._users = users
        self._stopping = stopping
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        self._lines_of_users = Lines(512, 64)
        self._subuids = Subuids()
        self._user_sockets: dict[int, socket.socket] = {}
        self._lines = LineServer((_ROOT, _USERS, _STRANGERS), self._answer_line)

    def stop(self) -> None:
        """Set `stopping`, and end `serve` now; also from a signal's handler."""
        self._stopping.set()
        self._lines.wake()

    def add(
        self, name: str, method: Callable[..., dict[str, Any]], *, root_only: bool = True, quiet: bool = False
    ) -> None:
        """Take requests with ``"do": NAME``: their other fields and `peer` are the method's keyword arguments.

        What it returns is the answer; SluiceError, CoreError and OSError are returned to the caller. `quiet`: not
        logged.
        """
        self._requests[name] = _Request(method, root_only, quiet)

    def serve(self, ready: Callable[[], None]) -> None:
        """Answer until `stopping`; `ready` is called once the sockets are there. Raises OSError."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        for left in self.folder.iterdir():
            left.unlink()
        self._user_sockets[0] = _listen(self.folder / "0", 0, 0o600)
        self._lines.listen(Listener(self._user_sockets[0], self._greet, _ROOT, (0,)))
        self._open_user_sockets()
        self._lines.listen(Listener(_listen(self.path, 0, 0o666), self._greet, _STRANGERS))
        ready()
        self._lines.serve(lambda: not self._stopping.is_set())

    def _open_user_sockets(self) -> None:
        """A socket for each user with a job here, and for none else. Raises OSError."""
        with self._lock:
            wanted = {0, *self._users()}
            for uid in self._user_sockets.keys() - wanted:
                (self.folder / str(uid)).unlink(missing_ok=True)
                self._lines.leave(self._user_sockets.pop(uid))
            for uid in wanted - self._user_sockets.keys():
                self._user_sockets[uid] = _listen(self.folder / str(uid), uid, 0o600)
                self._lines.listen(Listener(self._user_sockets[uid], self._greet, _USERS, (uid,)))

    def _greet(self, connection: socket.socket, address: Any) -> Asker:
        del address
        peer = _peer(connection)
        if peer.uid == 0:
            return Asker(_ROOT, (0,), peer)
        if peer.uid in self._user_sockets:
            return Asker(_USERS, (peer.uid,), peer)
        return Asker(_STRANGERS, (self._subuids.owner(peer.uid) or peer.uid,), peer)

    def _answer_line(self, line: bytes, peer: Peer) -> bytes:
        answer = json.dumps(self.answer(line, peer)).encode() + b"\n"
        if peer.uid == 0:  # it may have been a prolog or an epilog
            try:
                self._open_user_sockets()
            except OSError as error:  # there is the socket for everybody
                log("problem", what=f"{error.filename or self.folder}: {error.strerror}")
        return answer

    def _log(self, peer: Peer, action: str, **detail: Any) -> None:
        """Log one line; for users only a few, as they can make any number of requests."""
        if peer.uid != 0:
            left_out = self._lines_of_users.left_out((peer.uid,))
            if left_out is None:
                return
            detail |= {"left_out": left_out} if left_out else {}
        log(action, **detail)

    def answer(self, line: bytes, peer: Peer) -> dict[str, Any]:
        """Do one request: ``{"ok": ...}``, or ``{"error": "...", "blame": ...}``: whose fault, "job" or "node"."""
        began = time.monotonic()
        fields: dict[str, Any] = {}
        try:
            fields = json.loads(line)
            name = fields.pop("do")
            request = self._requests[name]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return _refusal("not a request that this agent knows; install agent and programs of one version")
        if request.root_only and peer.uid != 0:
            self._log(peer, "refused", request=name, uid=peer.uid, pid=peer.pid, why="not root")
            return _refusal(f"{name}: for root only")
        blame: object = None
        try:
            done = request.method(peer=peer, **fields)
        except SluiceError as error:
            why, blame = str(error), getattr(error, "blame", None)
        except CoreError as error:
            why = f"the job's region of limits: {error}"
        except OSError as error:
            why = f"{error.filename or 'the node agent'}: {error.strerror}"
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            why = f"{name}: not a valid request: {one_line(repr(error))}"
        else:
            if not request.quiet:
                self._log(peer, name, **_logged(fields), ms=round(1000 * (time.monotonic() - began), 1))
            return {"ok": done}
        self._log(peer, "refused", request=name, **_logged(fields), why=why)
        return _refusal(why, blame)


def _refusal(why: str, blame: object = None) -> dict[str, Any]:
    return {"error": why, "blame": getattr(blame, "value", "node")}


def _listen(path: Path, owner: int, mode: int) -> socket.socket:
    """A user's listening socket, in place of what was at its path. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chown(path, owner, -1)
    path.chmod(mode)  # no client can connect before `listen`
    listener.listen(_BACKLOG)
    return listener


def _peer(connection: socket.socket) -> Peer:
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def _logged(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key in _LOGGED}
