"""A service whose askers munge knows: one request and one answer a connection, each a munge credential and a newline.

munge says who asks, refuses what was seen before, and encrypts; only the asking user can decode the answer.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

from sluice_base.errors import SluiceError
from sluice_base.text import one_line
from slurm_client.munge import Message, decode, encode

_WORKERS = 4
_LOOK_S = 0.5


class RefusedError(SluiceError):
    """A request that is not answered."""


class Service:
    """Answers for as long as it is wanted.

    `answer`: to what an authenticated user sent; one that raises SluiceError answers nothing. `most`: bytes of a
    request with its credential; `seconds`: in which it must have come; `waiting`: connections that may wait, more are
    closed at once.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Message], bytes],
        *,
        most: int,
        seconds: float,
        waiting: int,
        log: logging.Logger,
    ) -> None:
        self._name = name
        self._answer = answer
        self._most = most
        self._seconds = seconds
        self._log = log
        self._slots = BoundedSemaphore(_WORKERS + waiting)

    def serve(self, sockets: list[socket.socket], goes_on: Callable[[], bool]) -> None:
        """Answer while `goes_on` says so, asked twice a second; the sockets are closed then."""
        with selectors.DefaultSelector() as selector, ThreadPoolExecutor(_WORKERS, self._name) as pool:
            for listening in sockets:
                listening.setblocking(False)
                selector.register(listening, selectors.EVENT_READ)
            while goes_on():
                for key, _ in selector.select(timeout=_LOOK_S):
                    self._accept(key.fileobj, pool)
        for listening in sockets:
            listening.close()

    def _accept(self, listening: Any, pool: ThreadPoolExecutor) -> None:
        try:
            connection, address = listening.accept()
        except OSError:
            return
        if not self._slots.acquire(blocking=False):
            connection.close()
            return
        pool.submit(self._serve_one, connection, address)

    def _serve_one(self, connection: socket.socket, address: Any) -> None:
        try:
            with connection:
                message = decode(read_line(connection, self._most, self._seconds).decode("ascii", "replace").strip())
                reply = self._answer(message)
                connection.settimeout(self._seconds)
                connection.sendall(encode(reply, readable_by=message.uid).encode() + b"\n")
        except (SluiceError, OSError) as error:
            # Who is not authenticated learns nothing, not even why.
            self._log.info("%s: refused: %s", one_line(str(address)), one_line(str(error)))
        except Exception:
            self._log.exception("%s: unexpected", one_line(str(address)))
        finally:
            self._slots.release()


def read_line(connection: socket.socket, most: int, seconds: float) -> bytes:
    """Up to the first newline; at most `most` bytes within `seconds` in all. Raises RefusedError."""
    data, until = b"", time.monotonic() + seconds
    while b"\n" not in data:
        left = until - time.monotonic()
        if left <= 0:
            raise RefusedError("no request in time")
        connection.settimeout(left)
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError as error:
            raise RefusedError("no request in time") from error
        data += piece
        if not piece or len(data) > most:
            raise RefusedError("no request, or a request that is too long")
    return data.split(b"\n", 1)[0]


def listen(addresses: Iterable[str], port: int) -> list[socket.socket]:
    """Listening sockets; without addresses: on all of the host's. Raises SluiceError."""
    made: list[socket.socket] = []
    try:
        for address in list(addresses) or [""]:
            if address or not socket.has_dualstack_ipv6():
                found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                made += [socket.create_server(where[:2], family=family) for family, _, _, _, where in found[:1]]
            else:
                made.append(socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True))
    except OSError as error:
        for one in made:
            one.close()
        raise SluiceError(f"port {port}: {error.strerror or error}", remedy="choose another with --port") from error
    return made
