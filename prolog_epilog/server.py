"""The agent's socket: one JSON object a line, each answered by one; who asks is what the kernel says."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prolog_epilog.log import log
from sluice_base.errors import SluiceError
from sluice_base.text import one_line
from sluice_core.errors import CoreError

_MOST_REQUEST = 64 << 10
_MOST_CONNECTIONS = 128  # of root's: no user can keep the prolog from being answered
_MOST_OF_USERS = 64  # of all others together
_MOST_OF_USER = 16
_LOOK_SECONDS = 2.0  # for a `stopping` that was set without `stop`
_IDLE_SECONDS = 30.0  # a connection that says nothing is closed
_USERS_IDLE_SECONDS = 2.0
_USERS_REFUSALS = 10  # that are logged in `_REFUSALS_SECONDS`
_REFUSALS_SECONDS = 10.0
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
    """Answers requests, a thread a connection."""

    def __init__(self, path: Path, stopping: threading.Event) -> None:
        self.path = path
        self._stopping = stopping
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # connections by user
        self._refusals: list[float] = []  # when a user's request was last refused, with a line in the log
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def stop(self) -> None:
        """Set `stopping`, and end `serve` now; also from a signal's handler."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)

    def add(
        self, name: str, method: Callable[..., dict[str, Any]], *, root_only: bool = True, quiet: bool = False
    ) -> None:
        """Take requests with ``"do": NAME``: their other fields and `peer` are the method's keyword arguments.

        What it returns is the answer; SluiceError, CoreError and OSError are told to the asker. `quiet`: not logged.
        """
        self._requests[name] = _Request(method, root_only, quiet)

    def serve(self, ready: Callable[[], None]) -> None:
        """Answer until `stopping`; `ready` is called once the socket is there. Raises OSError."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.path))
            self.path.chmod(0o666)  # who asks is told by the kernel, request by request
            listener.listen(256)
            listener.setblocking(False)
            waiting = select.poll()
            for file in (listener.fileno(), self._wake):
                waiting.register(file, select.POLLIN)
            ready()
            while not self._stopping.is_set():
                waiting.poll(1000 * _LOOK_SECONDS)
                with suppress(BlockingIOError):
                    connection, _ = listener.accept()
                    peer = _peer(connection)
                    if self._enter(peer.uid):
                        threading.Thread(target=self._answer_all, args=(connection, peer), daemon=True).start()
                    else:
                        connection.close()

    def _enter(self, uid: int) -> bool:
        """Count a user's connection; whether there is room for it."""
        with self._lock:
            mine, users = self._open.get(uid, 0), sum(count for of, count in self._open.items() if of != 0)
            if mine >= (_MOST_CONNECTIONS if uid == 0 else _MOST_OF_USER) or (uid != 0 and users >= _MOST_OF_USERS):
                return False
            self._open[uid] = mine + 1
            return True

    def _leave(self, uid: int) -> None:
        with self._lock:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]

    def _answer_all(self, connection: socket.socket, peer: Peer) -> None:
        """One connection's requests."""
        try:
            connection.settimeout(_IDLE_SECONDS if peer.uid == 0 else _USERS_IDLE_SECONDS)
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(_MOST_REQUEST):
                    answer = self.answer(line, peer)
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass  # the asker has gone, or says nothing
        finally:
            self._leave(peer.uid)

    def _log_refused(self, peer: Peer, **detail: Any) -> None:
        """One line; of users' a few only, as they can make as many as they like."""
        if peer.uid != 0:
            now = time.monotonic()
            with self._lock:
                self._refusals = [when for when in self._refusals if now - when < _REFUSALS_SECONDS]
                if len(self._refusals) >= _USERS_REFUSALS:
                    return
                self._refusals.append(now)
        log("refused", **detail)

    def answer(self, line: bytes, peer: Peer) -> dict[str, Any]:
        """Do one request: ``{"ok": ...}``, or ``{"error": "...", "blame": ...}``: whose fault, "job" or "node"."""
        began = time.monotonic()
        fields: dict[str, Any] = {}
        blame = "node"
        try:
            fields = json.loads(line)
            name = fields.pop("do")
            request = self._requests[name]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return {"error": "not a request that this agent knows; are agent and programs of one version?"}
        if request.root_only and peer.uid != 0:
            self._log_refused(peer, request=name, uid=peer.uid, pid=peer.pid, why="not root")
            return {"error": f"{name}: for root only"}
        try:
            done = request.method(peer=peer, **fields)
        except SluiceError as error:
            why: str = str(error)
            blame = getattr(error, "blame", blame)
        except CoreError as error:
            why = f"the job's region of limits: {error}"
        except OSError as error:
            why = f"{error.filename or 'the node agent'}: {error.strerror}"
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            why = f"{name}: a request that makes no sense: {one_line(repr(error))}"
        else:
            if not request.quiet:
                log(name, **_logged(fields), ms=round(1000 * (time.monotonic() - began), 1))
            return {"ok": done}
        self._log_refused(peer, request=name, **_logged(fields), why=why)
        return {"error": why, "blame": blame}


def _peer(connection: socket.socket) -> Peer:
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def _logged(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key in _LOGGED}
