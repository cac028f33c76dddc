"""Where gateways reach the engine: TLS, the replica's secret as the first line, then bytes both ways.

A connection that has not shown the secret costs little: there is a bounded number of them, each for a
bounded time and with 65 bytes. Reading stops where the other side does not take what was read.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import cast

from sluice.base.log import log
from sluice.serve.replica.asking import is_own_port

SHOW_S = 5.0
"""For the TLS handshake, and again for the secret."""
ENGINE_S = 10.0
"""For the engine to take a connection: one that hangs does not."""
MOST_UNKNOWN = 256
GRACE_S = 0.5
"""Before one of too many gives way; until then, others wait to be accepted."""
_BUFFER = 256 << 10
_BACKLOG = 1024
_ROUND = 64
_LINE = 65
_FLUSH_S = 60.0  # for what was written before the end
_PAUSE_S = 0.02


class Relay:
    """Listens from the start; connections are let through while `open` is set."""

    def __init__(self, context: ssl.SSLContext, secret: str, address: Path | int) -> None:
        self.open = False
        self.refused: Counter[str] = Counter()
        self.moved = 0
        """Grows with whatever is relayed."""
        self._secret = secret.encode()
        self._context = context
        self._address = address
        self._unknown: dict[asyncio.Task[None], tuple[str, float]] = {}  # address and begin, the oldest first
        self._known: set[_Client] = set()
        self._socket: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> int:
        """Of gateways."""
        return len(self._known)

    def listen(self, host: str = "") -> int:
        """Begin; the port."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind((host or "0.0.0.0", 0))  # noqa: S104 - gateways are on other hosts
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket.fileno(), self._accept)
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Accept no more, and end all connections."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for task in list(self._unknown):
            task.cancel()
        for client in list(self._known):
            client.end()

    def _accept(self) -> None:
        listening = self._socket
        for _ in range(_ROUND):
            if listening is None:
                return
            now = self._loop.time()
            if not self._has_place(now):
                self._pause(listening)
                return
            try:
                accepted, address = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # gone again, or no descriptor is left
                self._pause(listening)
                return
            accepted.setblocking(False)
            with suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._greet(accepted))
            self._unknown[task] = str(address[0]), now
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log("problem", what=f"{type(error).__name__}: {error}")

    def _pause(self, listening: socket.socket) -> None:
        self._loop.remove_reader(listening.fileno())
        self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _has_place(self, now: float) -> bool:
        """Of those that have not shown the secret, the oldest of the address with the most gives way."""
        if len(self._unknown) < MOST_UNKNOWN:
            return True
        most = Counter(address for address, _ in self._unknown.values()).most_common(1)[0][0]
        oldest, began = next((task, began) for task, (address, began) in self._unknown.items() if address == most)
        if now - began < GRACE_S:
            return False
        self.refused["too many"] += 1
        del self._unknown[oldest]
        oldest.cancel()
        return True

    async def _greet(self, accepted: socket.socket) -> None:
        """The handshake, and the secret."""
        client = _Client(self)
        transport: asyncio.BaseTransport | None = None
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: client, accepted, ssl=self._context, ssl_handshake_timeout=SHOW_S, ssl_shutdown_timeout=_FLUSH_S
            )
            if not await asyncio.wait_for(client.shown, SHOW_S):
                self.refused["secret"] += 1
                client.end()
                return
        except TimeoutError:
            self.refused["slow"] += 1
            client.end()
            return
        except (OSError, ssl.SSLError):
            self.refused["tls"] += 1
            client.end()
            return
        except asyncio.CancelledError:
            client.end()
            if transport is None:
                accepted.close()
            raise
        if not self.open:
            self.refused["not ready"] += 1
            client.end()
            return
        self._known.add(client)
        self._unknown.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)  # it gives way to nobody
        try:
            await asyncio.wait_for(self._reach(client.engine), ENGINE_S)
        except OSError:  # TimeoutError, too
            self.refused["engine"] += 1
            client.end()

    async def _reach(self, engine: _Engine) -> None:
        if isinstance(self._address, Path):
            await self._loop.create_unix_connection(lambda: engine, str(self._address))
            return
        if not is_own_port(self._address):
            raise ConnectionRefusedError
        await self._loop.create_connection(lambda: engine, "127.0.0.1", self._address)

    def is_secret(self, line: bytes) -> bool:
        """Whether a first line is the secret, in constant time."""
        return hmac.compare_digest(line, self._secret)

    def gone(self, client: _Client) -> None:
        """A connection has ended."""
        self._known.discard(client)


class _Side(asyncio.Protocol):
    """One of the two ends; what it reads is written to the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self.held: list[bytes] = []
        """Read before the other end was there."""
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_BUFFER)

    def pause_writing(self) -> None:
        """Too much is not taken yet: the other end is not read."""
        self.full = True
        if self.other is not None and self.other.transport is not None:
            with suppress(RuntimeError):
                self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It was taken."""
        self.full = False
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            with suppress(RuntimeError):
                self.other.transport.resume_reading()

    def end(self) -> None:
        """Close it now."""
        if self.transport is not None:
            self.transport.abort()


class _Client(_Side):
    """A gateway's connection, or one that claims to be."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay
        self.shown: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.engine = _Engine(self)
        self.other = self.engine
        self._line = b""

    def data_received(self, data: bytes) -> None:
        """The secret, then what is for the engine."""
        if self.shown.done():
            self._pass(data)
            return
        self._line += data
        line, newline, rest = self._line.partition(b"\n")
        if newline or len(self._line) >= _LINE:
            self._line = b""
            self.shown.set_result(bool(newline) and self.relay.is_secret(line))
            if rest:
                self._pass(rest)

    def _pass(self, data: bytes) -> None:
        self.relay.moved += 1
        engine = self.engine
        if engine.transport is None:
            self.held.append(data)
            if self.transport is not None:
                self.transport.pause_reading()
        else:
            engine.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway has gone: what the engine does for it ends with its connection."""
        del exc
        if not self.shown.done():
            self.shown.set_result(False)
        self.relay.gone(self)
        self.engine.end()


class _Engine(_Side):
    """The connection to the engine that a gateway's connection has."""

    def __init__(self, client: _Client) -> None:
        super().__init__()
        self.client = client
        self.other = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: what was read until now goes to the engine."""
        super().connection_made(transport)
        client = self.client.transport
        if client is None or client.is_closing():
            self.end()
            return
        for data in self.client.held:
            cast(asyncio.Transport, transport).write(data)
        if self.client.held:
            self.client.held.clear()
            if not self.full:
                client.resume_reading()

    def data_received(self, data: bytes) -> None:
        """A part of an answer."""
        self.client.relay.moved += 1
        if self.client.transport is not None:
            self.client.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has ended it: what it said until then still goes to the gateway."""
        del exc
        if self.client.transport is not None:
            self.client.transport.close()
