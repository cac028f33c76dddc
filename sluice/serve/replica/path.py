"""How the bytes of a piece go from one replica to another: over the connection itself (TLS), or next to it (UCX).

Questions, answers and digests always go over the connection. A path has one direction, and belongs to one thread at a
time. What `receive` returns is compared with its digest by who asked for it, whatever the path.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Protocol


class Path(Protocol):
    """Of one connection."""

    def send(self, parts: Iterable[bytes]) -> None:
        """The parts of a piece, each of at most `sluice.serve.replica.pieces.PART` bytes. Raises OSError."""

    def receive(self, size: int) -> bytearray:
        """A piece of this size, whole. Raises OSError."""

    def close(self) -> None:
        """Free what it has next to the connection."""


class Tls:
    """The connection itself."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def send(self, parts: Iterable[bytes]) -> None:
        """See Path."""
        for part in parts:
            self._connection.sendall(part)

    def receive(self, size: int) -> bytearray:
        """See Path."""
        return exactly(self._connection, size)

    def close(self) -> None:
        """See Path."""


def exactly(connection: ssl.SSLSocket, size: int) -> bytearray:
    """So many bytes. Raises OSError."""
    data, done = bytearray(size), 0
    with memoryview(data) as view:
        while done < size:
            count = connection.recv_into(view[done:])
            if not count:
                raise OSError("it closed the connection")
            done += count
    return data
