"""Connections to replicas: TLS with the certificate that the replica named, its secret as the first line, then HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import httptools

from sluice.base.rates import FewLines
from sluice.exchange.serving import ReplicaRow, State
from sluice.serve.gateway.bounds import (
    CONNECT_S,
    EJECT_S,
    FRAMING,
    MOST_ANSWER_HEAD,
    MOST_FAILURES,
    MOST_HEADERS,
    MOST_IDLE_UPSTREAM,
    UPSTREAM_IDLE_S,
)

_TAKEN: Final = frozenset((b"connection", b"content-length", b"content-type", b"retry-after", b"transfer-encoding"))

log = logging.getLogger("sluice.gateway")
log.addFilter(FewLines())


class Exchange(Protocol):
    """What a connection tells of the request that it was given."""

    def upstream_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The answer's head is there."""

    def upstream_data(self, data: bytes) -> None:
        """A part of its body."""

    def upstream_waits(self) -> None:
        """The head came without a part of its body."""

    def upstream_end(self) -> None:
        """It is complete."""

    def upstream_lost(self, why: str, *, stale: bool) -> None:
        """It will not be. `stale`: nothing has come on an old connection, which says nothing of the replica."""


class Upstream(asyncio.Protocol):
    """One connection to a replica."""

    __slots__ = (
        "_ended", "_head_size", "_headers", "_keep", "_own_length", "_parser", "_parts", "_status", "began", "call",
        "heard", "idle_since", "pool", "transport", "used",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.call: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.used = False
        """Whether a request was answered on it before."""
        self.began = False
        """Whether the answer has begun."""
        self.heard = 0.0
        self.idle_since = 0.0
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._status = self._head_size = 0
        self._ended = self._keep = self._own_length = False
        self._reset()

    # ---- used by a call ----

    def send(self, call: Exchange, head: bytes, body: bytes) -> None:
        """Send a request."""
        transport = cast(asyncio.Transport, self.transport)
        self.call = call
        self.began = self._ended = False
        self.heard = time.monotonic()
        if len(body) < 16_384:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def leave(self) -> None:
        """The request is of no use any more: what the replica does for it ends with the connection."""
        self.call = None
        self.close()

    def release(self) -> None:
        """The answer was taken whole; what is left is the end of its framing."""
        self.call = None
        self.heard = time.monotonic()
        if self._ended:
            self._to_pool()
        elif self.transport is not None:
            self.transport.resume_reading()
            self.pool.finishing.add(self)

    def pause(self) -> None:
        """Read no more."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        self.heard = time.monotonic()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def close(self) -> None:
        """End the connection."""
        self.pool.forget(self)
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        call = self.call
        if call is None and self not in self.pool.finishing:
            self._broken("sent bytes without a request")
            return
        self.heard = time.monotonic()
        self._head_size += len(data)  # of a body, all but the trailer and chunks' sizes is taken off again
        if self._head_size > MOST_ANSWER_HEAD + len(data):
            self._broken("sent too long a head or trailer")
            return
        began = self.began
        try:
            self._parser.feed_data(data)
        except Exception as error:  # whatever the parser finds, the connection ends
            self._broken(f"did not speak HTTP ({error})")
            return
        if call is None:
            if self._ended:
                self.pool.finishing.discard(self)
                self._to_pool()
            return
        if self._status and not began:
            self.began = True
            if not self._own_length:
                self._broken("sent an answer without a length")
                return
            call.upstream_head(self._status, self._headers)
        if self._parts and self.call is call:
            parts, self._parts = self._parts, []
            call.upstream_data(parts[0] if len(parts) == 1 else b"".join(parts))
        elif not began and self.call is call:
            call.upstream_waits()
        if self._ended and self.call is call:
            self.call = None
            call.upstream_end()
            self._to_pool()

    def eof_received(self) -> None:
        """The replica has closed its side."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone."""
        self.transport = None
        self.pool.forget(self)
        call, self.call = self.call, None
        if call is not None:
            call.upstream_lost("closed the connection", stale=self.used and not self.began)

    def pause_writing(self) -> None:
        """The request waits in memory, where it was before."""

    def resume_writing(self) -> None:
        """It goes on."""

    # ---- httptools ----

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the answer's headers."""
        name = name.lower()
        if len(self._headers) >= MOST_HEADERS:
            raise ValueError("too many headers")
        if name in _TAKEN:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is there."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        if self._status:
            raise ValueError("two answers to one request")
        self._status = status
        self._own_length = (
            b"content-length" in self._headers or b"transfer-encoding" in self._headers or status in (204, 304)
        )
        self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._head_size = max(0, self._head_size - FRAMING * len(body))
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The end."""
        if self._status:
            self._ended = True

    def _reset(self) -> None:
        """For the next answer, before its request comes: nobody waits for this then."""
        self._parser = httptools.HttpResponseParser(self)
        self._parts, self._headers, self._status, self._head_size = [], {}, 0, 0

    def _to_pool(self) -> None:
        self.used = True
        if self._keep and self.transport is not None and not self.transport.is_closing():
            self._reset()
            self.pool.put(self)
        else:
            self.close()

    def _broken(self, why: str) -> None:
        call, self.call = self.call, None
        self.close()
        if call is not None:
            call.upstream_lost(why, stale=False)


class Pool:
    """The connections to one replica, and whether it is left out."""

    __slots__ = ("_context", "_failures", "_out", "_tasks", "all", "finishing", "idle", "out_until", "row", "slot")

    def __init__(self, slot: int, row: ReplicaRow, context: ssl.SSLContext) -> None:
        self.slot = slot
        self.row = row
        self.idle: list[Upstream] = []
        self.finishing: set[Upstream] = set()
        self.all: set[Upstream] = set()
        self.out_until: float = 0.0
        self._failures = 0  # since it worked
        self._out = 0  # how often it was left out since then
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self) -> Upstream | None:
        """A connection without a request."""
        while self.idle:
            one = self.idle.pop()
            if one.transport is not None and not one.transport.is_closing():
                return one
        return None

    def put(self, one: Upstream) -> None:
        """Keep a connection for the next request."""
        if len(self.idle) >= MOST_IDLE_UPSTREAM or self.row.state is not State.READY:
            one.close()
            return
        one.idle_since = time.monotonic()
        self.idle.append(one)

    def forget(self, one: Upstream) -> None:
        """A connection that has gone."""
        self.all.discard(one)
        self.finishing.discard(one)
        with suppress(ValueError):
            self.idle.remove(one)

    def connect(self, call: Connecting) -> None:
        """Make a connection for a call, to which it is reported."""
        task = asyncio.get_running_loop().create_task(self._connect(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, call: Connecting) -> None:
        made: Upstream | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: Upstream(self), self.row.host, self.row.port, ssl=self._context, server_hostname=""
                )
        except (OSError, TimeoutError) as error:
            why = "did not take a connection in time" if isinstance(error, TimeoutError) else f"no connection ({error})"
            call.connect_failed(self, why)
            return
        transport = made.transport
        if transport is None:
            call.connect_failed(self, "closed the connection")
            return
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), self.row.fingerprint):
            transport.abort()
            log.warning("replica %s of %s: another certificate than it named", self.row.launch, self.row.service)
            call.connect_failed(self, "has another certificate than it named")
            return
        transport.write(self.row.secret.encode() + b"\n")
        self.all.add(made)
        call.connected(made)

    def failed(self, why: str, *, surely: bool) -> float:
        """A request failed, `surely` not by its own fault; for how many seconds the replica is left out, or 0."""
        least, most = EJECT_S
        now = time.monotonic()
        self._failures += 1
        if now < self.out_until:
            return self.out_until - now
        if not surely and self._failures < MOST_FAILURES:
            log.info("replica %s of %s: %s", self.row.launch, self.row.service, why)
            return 0.0
        seconds = min(least * float(1 << min(self._out, 16)), most)
        self._out += 1
        self.out_until = now + seconds
        log.warning("replica %s of %s: %s; left out for %g s", self.row.launch, self.row.service, why, seconds)
        for one in list(self.idle):
            one.close()
        return seconds

    def worked(self) -> None:
        """It has answered."""
        self._failures = self._out = 0

    def sweep(self, now: float) -> None:
        """Close what is too old."""
        for one in [one for one in self.idle if now - one.idle_since > UPSTREAM_IDLE_S]:
            one.close()
        for one in [one for one in self.finishing if now - one.heard > CONNECT_S]:
            one.close()

    def end(self) -> None:
        """The replica has gone: its connections without a request end."""
        for one in [*self.idle, *self.finishing]:
            one.close()


class Connecting(Protocol):
    """To what it is reported that a connection was made."""

    def connected(self, upstream: Upstream) -> None:
        """It is there."""

    def connect_failed(self, pool: Pool, why: str) -> None:
        """There is none."""


def tls_context() -> ssl.SSLContext:
    """For all replicas: the fingerprint of a certificate takes the place of an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
