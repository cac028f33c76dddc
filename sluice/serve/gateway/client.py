"""A client's connection: HTTP/1.1 by llhttp, with what bounds a client; one request after the other is answered."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, cast

import httptools

from sluice.base.networks import Network, client_of
from sluice.base.rates import FewLines
from sluice.serve.gateway import bounds, heads
from sluice.serve.gateway.figures import Figures
from sluice.serve.gateway.heads import Headers, Route
from sluice.serve.gateway.keys import Caller, Keys
from sluice.serve.gateway.refusals import REASONS, RefusalError, failed_request
from sluice.serve.gateway.upload import Upload

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STREAM: Final = (
    "content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
_LAST: Final = b"0\r\n\r\n"

log = logging.getLogger("sluice.gateway")
log.addFilter(FewLines())


def _new_ids() -> Iterator[str]:
    """Of requests: nobody can guess one. Many at once, as each question to the kernel costs as much as all of them."""
    while True:
        some = os.urandom(1024).hex()
        yield from (some[at : at + 32] for at in range(0, len(some), 32))


new_id = partial(next, _new_ids())


@dataclass(slots=True)
class Request:
    """A request that has come, or comes."""

    id: str
    method: bytes
    target: bytes
    headers: Headers
    address: str
    begun: float
    """Monotonic."""
    version: str = "1.1"
    keep: bool = True
    route: Route | None = None
    named: bytes = b""
    """The model that its path names."""
    caller: Caller | str | None = None
    """A text: an identity token that has to be checked yet."""
    parts: list[bytes] | None = None
    size: int = 0
    held: int = 0
    """Bytes that count against what a worker holds."""
    refused: RefusalError | None = None
    proof: bytes | None = field(default=None, repr=False)
    """What the client has sent to show who it is, where others are asked in its name."""
    upload: Upload | None = None
    """What takes its body while it comes."""

    def body(self) -> bytes:
        """All of it, once."""
        parts, self.parts = self.parts or [], None
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Worker(Protocol):
    """What connections need of their worker."""

    held: int
    draining: bool
    metrics: Figures
    keys: Keys
    proxies: Sequence[Network]

    def enter(self, client: Client) -> bool:
        """Count a connection; whether it may stay."""

    def leave(self, client: Client) -> None:
        """A connection that has ended."""

    def begin(self, client: Client, request: Request) -> None:
        """Answer a request, or begin to."""

    def check_job(self, request: Request) -> None:
        """Whether who asks is a batch's job. Raises RefusalError."""

    def upload(self, client: Client, request: Request, length: int | None) -> Upload:
        """What takes its body. Raises RefusalError."""

    def refuse(self, client: Client, request: Request, refusal: RefusalError) -> None:
        """Answer that there is no answer."""


class Handler:
    """What answers a request: what happens to the client is reported to it."""

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""

    def client_full(self) -> None:
        """The client takes its answer more slowly than it comes."""

    def client_ready(self) -> None:
        """It has taken what there was."""


class Client(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_chunked", "_closing", "_counted", "_fresh", "_late", "_next", "_owner", "_parser", "_reading",
        "_since", "_stuck", "_unsent", "address", "handler", "peer", "request", "transport", "waiting", "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.transport: asyncio.Transport | None = None
        self.peer = self.address = ""
        self._fresh = True  # its first request may be on its way
        self.handler: Handler | None = None
        self.request: Request | None = None
        """The one that is being answered."""
        self.waiting: deque[Request] = deque()
        self._next: Request | None = None  # the one that comes
        self._owner: tuple[str, str] | None = None
        self._counted = False
        self._closing = False
        self._reading = True
        self._chunked = True
        self._unsent = b""  # the answer's head, which is sent with its first part
        self._late = 0  # bytes that came while a request was answered
        self._since = 0.0  # since when it waits for the next request, or for the rest of one
        self._stuck = 0.0  # since when the client takes nothing; 0: it takes
        self._parser: Any = httptools.HttpRequestParser(self)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = self.address = peer[0] if isinstance(peer, tuple) else ""
        self._since = time.monotonic()
        if not self.worker.enter(self):
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=bounds.WRITE_HIGH)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._closing or self.transport is None:
            return
        if self.request is not None:
            self._late += len(data)
            if self._late > bounds.MOST_HEAD:
                self.hold()
        else:  # a head; or a body, of which all but the trailer and chunks' sizes is taken off again
            self._late += len(data)
            if self._late > bounds.MOST_HEAD + len(data):
                self._refuse_connection(
                    RefusalError(
                        431, f"head: more than {bounds.MOST_HEAD} bytes", remedy="send fewer headers", close=True
                    )
                )
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse_connection(RefusalError(400, "header upgrade", remedy="speak HTTP/1.1", close=True))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, RefusalError):
                self._refuse_connection(cause)
            else:
                log.error("a request: unexpected", exc_info=cause)
                self._refuse_connection(failed_request())
        except httptools.HttpParserError as error:
            self._refuse_connection(
                RefusalError(400, f"not HTTP/1.1: {error}", remedy="correct the client", close=True)
            )

    def eof_received(self) -> None:
        """The client has gone: none waits for an answer on half a connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone."""
        self.transport = None
        self._closing = True
        self.worker.leave(self)
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.client_gone()
        for one in (self.request, self._next, *self.waiting):
            if one is not None:
                self._let_go(one)
        self.request = self._next = None
        self.waiting.clear()

    def pause_writing(self) -> None:
        """What was written waits for the client."""
        self._stuck = time.monotonic()
        if self.handler is not None:
            self.handler.client_full()

    def resume_writing(self) -> None:
        """It was taken."""
        self._stuck = 0.0
        if self.handler is not None:
            self.handler.client_ready()

    def hold(self) -> None:
        """Read no more for now: what has come waits for the disk."""
        if self._reading and self.transport is not None:
            self._reading = False
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        if not self._reading and self.transport is not None:
            self._reading = True
            self.transport.resume_reading()

    @property
    def full(self) -> bool:
        """Whether what was written waits for the client."""
        return self._stuck > 0

    def sweep(self, now: float) -> None:
        """End what takes too long."""
        if self.transport is None:
            return
        if self._stuck and now - self._stuck > bounds.WRITE_S:
            self.worker.metrics.add("slow_clients")
            self.transport.abort()
        elif self._closing:
            if now - self._since > bounds.WRITE_S:
                self.transport.abort()
        elif self.request is None:
            coming = self._next
            if coming is None:
                most = bounds.HEAD_S if self._late or self.worker.draining else bounds.IDLE_S
            elif coming.parts is None:
                most = bounds.HEAD_S
            else:
                most = bounds.BODY_S + coming.size / bounds.BODY_BYTES_S
            if now - self._since > most:
                if coming is not None and coming.parts is not None:
                    self._refuse_connection(
                        RefusalError(408, "body: did not come in time", remedy="send it faster", close=True)
                    )
                else:
                    self.transport.abort()

    def drain(self) -> None:
        """Take no further requests; at once where there is none and has been one."""
        if (
            not self._fresh
            and self.request is None
            and self._next is None
            and not self._late
            and self.transport is not None
        ):
            self._close()

    def abort(self) -> None:
        """End the connection, as the loss of this gateway would."""
        if self.transport is not None:
            self.transport.abort()

    # ---- httptools ----

    def on_message_begin(self) -> None:
        """A request begins."""
        self._fresh = False
        now = time.monotonic()
        if self.request is None:
            self._since = now
        if len(self.waiting) >= bounds.MOST_PIPELINED:
            raise RefusalError(
                429,
                f"more than {bounds.MOST_PIPELINED} requests wait on this connection",
                remedy="use another one",
                close=True,
            )
        self._next = Request(new_id(), b"", b"", {}, self.address, now)

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        coming = cast(Request, self._next)
        coming.target += url
        if len(coming.target) > bounds.MOST_PATH:
            raise RefusalError(431, f"path: more than {bounds.MOST_PATH} bytes", remedy="shorten it", close=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers. Of the trailer, after the body: nothing is taken."""
        coming = cast(Request, self._next)
        if coming.parts is not None:
            raise RefusalError(400, "headers after the body", remedy="send them before it", close=True)
        coming.size += 1
        if coming.size > bounds.MOST_HEADERS:
            raise RefusalError(431, f"more than {bounds.MOST_HEADERS} headers", remedy="send fewer", close=True)
        heads.add_header(coming.headers, name, value)

    def on_headers_complete(self) -> None:
        """Its head is there: who calls is checked before a body is taken."""
        coming = cast(Request, self._next)
        parser = self._parser
        coming.method, coming.version = parser.get_method(), parser.get_http_version()
        coming.keep = parser.should_keep_alive()
        coming.size, coming.parts = 0, []
        if parser.should_upgrade():
            raise RefusalError(400, "header upgrade, or method CONNECT", remedy="speak HTTP/1.1", close=True)
        length = heads.check_framing(coming.version, coming.headers)
        if not coming.target.startswith(b"/"):
            raise RefusalError(
                400, f"path {heads.shown(coming.target)}: not a path", remedy="send one that begins with /", close=True
            )
        if self.worker.proxies:
            coming.address = client_of(
                self.peer, coming.headers.get(b"x-forwarded-for", b"").decode("latin-1"), self.worker.proxies
            )
        try:
            coming.route, coming.named = heads.route_of(coming.method, coming.target)
            proof = coming.headers.pop(b"authorization", None)
            if coming.route.stored:
                coming.proof = proof
            if coming.route.path.startswith("/v1"):
                coming.caller = self.worker.keys.check(proof, coming.address)
            elif coming.route.stored:
                self.worker.check_job(coming)
            if coming.route.method == "POST":
                heads.check_body_headers(coming.route, coming.headers, length)
                if coming.route.uploads:
                    coming.upload = self.worker.upload(self, coming, length)
                elif length is not None and length > bounds.SMALL_BODY:
                    self._hold(coming, length)
        except RefusalError as refusal:
            if length != 0:
                refusal.close = True  # its body is not read
            coming.refused = refusal
            if refusal.close:
                self._come(coming)
                raise
            return
        if b"expect" in coming.headers and length != 0 and self.request is None and self.transport is not None:
            self.transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        coming = cast(Request, self._next)
        if coming.parts is None:
            return
        coming.size += len(body)
        if self.request is None:
            self._late = max(0, self._late - bounds.FRAMING * len(body))
        if coming.route is not None and coming.size > coming.route.most:
            raise heads.too_large(coming.size, coming.route.most)
        if coming.upload is not None:
            coming.upload.feed(body)
            return
        if coming.size > bounds.SMALL_BODY and coming.size > coming.held:
            self._hold(coming, coming.size + (256 << 10))
        coming.parts.append(body)

    def on_message_complete(self) -> None:
        """It is there."""
        coming = cast(Request, self._next)
        if coming.parts:
            parsed = coming.size
            for part in coming.parts:
                parsed += bounds.PARSED * (part.count(b"{") + part.count(b"["))
            if parsed > bounds.SMALL_BODY and parsed > coming.held:
                self._hold(coming, parsed)
        if coming.upload is not None:
            coming.upload.end()
        self._next = None
        self._come(coming)

    # ---- requests ----

    def _hold(self, coming: Request, size: int) -> None:
        """Count a large body. Raises RefusalError where there are too many."""
        worker = self.worker
        if worker.held + size - coming.held > bounds.HELD_BODIES:
            raise RefusalError(
                503, "too many large requests at once", remedy="try again", retry_after=1.0, close=True, code="busy"
            )
        worker.held += size - coming.held
        coming.held = size

    def _let_go(self, request: Request) -> None:
        self.worker.held -= request.held
        request.held = 0
        request.parts = None
        if request.upload is not None:
            request.upload.drop()

    def _come(self, request: Request) -> None:
        self._next = None
        if self.request is None and not self.waiting:
            self._begin(request)
        else:
            self.waiting.append(request)

    def _begin(self, request: Request) -> None:
        self.request = request
        self._late = 0
        self.worker.begin(self, request)

    def _refuse_connection(self, refusal: RefusalError) -> None:
        """Answer, where no other answer is under way, and end the connection."""
        if self._closing:
            return
        coming, self._next = self._next, None
        if coming is not None:
            self._let_go(coming)
        if self.request is not None:
            self._closing = True  # the answer that is under way is the last one
            return
        self.request = coming or Request(new_id(), b"-", b"-", {}, self.address, time.monotonic())
        self.request.keep = False
        refusal.close = True
        self.worker.refuse(self, self.request, refusal)

    # ---- answers ----

    def answer(self, status: int, content_type: str, body: bytes, retry_after: float | None = None) -> None:
        """A whole answer."""
        request = self.request
        if request is None or self.transport is None:
            return
        again = "" if retry_after is None else f"retry-after: {max(1, -(-int(retry_after * 1000) // 1000))}\r\n"
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\ncontent-type: {content_type}\r\n{again}"
            f"content-length: {len(body)}\r\nx-request-id: {request.id}\r\n{self._connection(request)}\r\n"
        )
        self.transport.write(head.encode("latin-1", "replace") + body)
        self.finish()

    def begin_answer(self, status: int, content_type: str, length: bytes | None) -> None:
        """The head of an answer that is sent in parts. It is sent with the first one, or by `send_head`."""
        request = self.request
        if request is None or self.transport is None:
            return
        self._chunked = length is None and request.version == "1.1"
        if length is not None:
            framing = f"content-length: {length.decode()}\r\n"
        elif self._chunked:
            framing = "transfer-encoding: chunked\r\n"
        else:
            framing, request.keep = "", False
        kind = _STREAM if content_type == "text/event-stream" else f"content-type: {content_type}\r\n"
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\n{kind}{framing}"
            f"x-request-id: {request.id}\r\n{self._connection(request)}\r\n"
        )
        self._unsent = head.encode("latin-1", "replace")

    def send_head(self) -> None:
        """Its parts come later."""
        head, self._unsent = self._unsent, b""
        if self.transport is not None and head:
            self.transport.write(head)

    def part(self, data: bytes) -> None:
        """A part of it."""
        head, self._unsent = self._unsent, b""
        if self.transport is not None:
            self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data)

    def end_answer(self, last: bytes) -> None:
        """Its last part, and its end."""
        head, self._unsent = self._unsent, b""
        if self.transport is not None:
            if self._chunked:
                last = b"%x\r\n%b\r\n%b" % (len(last), last, _LAST) if last else _LAST
            if head or last:
                self.transport.write(head + last)
            self.finish()

    def break_off(self, last: bytes = b"") -> None:
        """End the connection in the middle of an answer, so that nobody takes it for complete."""
        if self.transport is not None:
            if last:
                self.part(last)
            else:
                self.send_head()
            self.handler = None
            self._close()

    def finish(self) -> None:
        """The request was answered: the next one."""
        request, self.request, self.handler = self.request, None, None
        if request is not None:
            self._let_go(request)
        if self.transport is None:
            return
        self._since = time.monotonic()
        if request is None or not request.keep or self._closing or self.worker.draining:
            self._close()
            return
        if self.waiting:
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        self._late = 0
        self.go_on()

    def _go_on(self) -> None:
        if self.request is None and self.waiting and not self._closing:
            self._begin(self.waiting.popleft())

    def _connection(self, request: Request) -> str:
        if not request.keep or self._closing or self.worker.draining:
            request.keep = False
            return "connection: close\r\n"
        return "connection: keep-alive\r\n" if request.version == "1.0" else ""

    def _close(self) -> None:
        self._closing = True
        self._since = time.monotonic()
        if self.transport is not None:
            self.transport.close()
