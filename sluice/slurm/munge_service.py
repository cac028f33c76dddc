"""A service whose callers MUNGE identifies: each connection has one request and one answer, each a credential and a
newline.

MUNGE identifies the caller, refuses replays, and encrypts; only the asking user can decode the answer. Who asks is
not known before all of a request is there, so until then places belong to addresses; connections from ports that only
root can take, as those of nodes' agents (`connect`), have places and threads that users' cannot take. So have requests
that begin with a word by which their owner is known, and a blank.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.line_server import Asker, Kind, LineServer, Listener
from sluice.base.rates import Budgets, Owner, Rate
from sluice.base.text import one_line
from sluice.slurm.munge import Message, decode, encode

_LOOK_S = 0.5
_BACKLOG = 1024
_ROOTS_PORTS = range(600, 1024)  # as glibc's bindresvport
_TRIES = 8
_RATES = (Rate(1024, 200), Rate(128, 50))  # requests of users: of all, from an address
_RATES_OF_UIDS = (Rate(512, 100), Rate(64, 20))


class RefusedError(SluiceError):
    """A request that is not answered."""


class Service:
    """Answers until it is stopped.

    `answer`: to what an authenticated user sent; one that raises SluiceError answers nothing. `most`: bytes of a
    request with its credential; `seconds`: in which it must have come; `trusted`: uids that may ask at any rate;
    `rates`: requests of users, of all and from an address, `rates_of_uids`: of all and of one; `refused`: is called
    for each that is not answered; `known`: the owner of a request's first word, which proves nothing, with
    `rates_of_known`: of all and of one.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Message], bytes],
        *,
        most: int,
        seconds: float,
        log: logging.Logger,
        trusted: Iterable[int] = (),
        rates: tuple[Rate, Rate] = _RATES,
        rates_of_uids: tuple[Rate, Rate] = _RATES_OF_UIDS,
        refused: Callable[[], None] = lambda: None,
        known: Callable[[bytes], Owner | None] | None = None,
        rates_of_known: tuple[Rate, Rate] = _RATES,
    ) -> None:
        self._answer = answer
        self._refused = refused
        self._log = log
        self._trusted = frozenset(trusted)
        self._lock = threading.Lock()
        self._asked = Budgets(*rates_of_uids)
        self._roots = Kind(f"{name}-roots", 512, 4, most, 64 << 20, seconds)
        self._users = Kind(f"{name}-users", 512, 2, most, 32 << 20, seconds, rates)
        self._owner_of, self._known = known, Kind(f"{name}-known", 512, 2, most, 32 << 20, seconds, rates_of_known)

    def serve(self, sockets: list[socket.socket], goes_on: Callable[[], bool]) -> None:
        """Answer while `goes_on` says so, asked twice a second; the sockets are closed then."""
        kinds = (self._roots, self._users, *([self._known] if self._owner_of is not None else []))
        lines, stopping = LineServer(kinds, self._reply, self._recognize), threading.Event()

        def look() -> None:
            try:
                while goes_on():
                    time.sleep(_LOOK_S)
            finally:
                stopping.set()
                lines.wake()

        for listening in sockets:
            lines.listen(Listener(listening, self._greet))
        threading.Thread(target=look, daemon=True).start()  # it may have to ask slurmctld
        lines.serve(lambda: not stopping.is_set())

    def _greet(self, connection: socket.socket, address: Any) -> Asker:
        del connection
        return Asker(self._roots if address[1] < 1024 else self._users, _owner(address[0]), address)

    def _recognize(self, line: bytes, address: Any) -> Asker | None:
        word, blank, _ = line.partition(b" ")
        owner = self._owner_of(word) if self._owner_of is not None and blank else None
        return None if owner is None else Asker(self._known, owner, address)

    def _reply(self, line: bytes, address: Any) -> bytes:
        try:
            message = decode(line.decode("ascii", "replace").strip().rpartition(" ")[2])
            self._spend(message.uid)
            return encode(self._answer(message), readable_by=message.uid).encode() + b"\n"
        except SluiceError as error:
            # A client that is not authenticated gets no answer, not even the reason.
            self._refused()
            self._log.info("%s: refused: %s", one_line(str(address)), one_line(str(error)))
            return b""

    def _spend(self, uid: int) -> None:
        """Count a request. Raises RefusedError where the user makes too many."""
        if uid in self._trusted:
            return
        now = time.monotonic()
        with self._lock:
            if self._asked.wait((uid,), now) > 0:
                raise RefusedError(f"uid {uid}: too many requests")
            self._asked.forget(now)
            self._asked.take((uid,), now)


def _owner(host: str) -> Owner:
    """An address; of IPv6 its network before it, as a host with one address there has them all."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return address.packed[:8], host
    return host, host


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to a service, as root from a port that only root can take where one is free. Raises OSError."""
    for _ in range(_TRIES if os.geteuid() == 0 else 0):
        source = "", random.choice(_ROOTS_PORTS)  # noqa: S311 - any will do
        try:
            return socket.create_connection((host, port), timeout, source)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM):
                raise
    return socket.create_connection((host, port), timeout)


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
                made += [
                    socket.create_server(where[:2], family=family, backlog=_BACKLOG)
                    for family, _, _, _, where in found[:1]
                ]
            else:
                made.append(
                    socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
                )
    except OSError as error:
        for one in made:
            one.close()
        raise SluiceError(f"port {port}: {error.strerror or error}", remedy="choose another with --port") from error
    return made
