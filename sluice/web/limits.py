"""Bounds of what clients may do: bytes of headers and bodies, seconds, and requests by address and by user."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sluice.base.networks import network_of
from sluice.base.rates import Budgets, FewLines, Owner, Rate
from sluice.web.problems import ProblemError, response

MOST_HEAD = 32 << 10
MOST_BODY = 64 << 10
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
LARGE: dict[str, int] = {}
"""Paths to which more may be sent, and how much; endpoints add theirs."""
HEAD_S = 10.0
"""In which a request's head must have come."""
BODY_S = 35.0
"""In which its body must have come."""
WRITE_S = 30.0
"""In which a client must take a piece of an answer, and the rest of it once the connection is being closed."""
MOST_HEADERS = 100
MOST_PIPELINED = 16
"""Requests of a connection that wait for the answer to the one before."""
MOST_CONNECTIONS = (1000, 200)
"""Of a network, and of an address."""
_BY_ADDRESS = (Rate(20_000, 2000), Rate(2000, 200), Rate(600, 60))  # all, a network, an address
_BY_USER = (Rate(20_000, 2000), Rate(600, 40))
REQUEST_S = 0.005
"""What an answer takes that counts as one request."""
BYTE_S = 5e-8
"""What it takes to receive a byte of a body and to pass it on."""
_MOST_AT_ONCE = 400
_FAILED = (Rate(1000, 20), Rate(200, 5), Rate(30, 0.5))  # log-ins that were refused
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"interest-cohort=()"),
]
_HSTS = (b"strict-transport-security", b"max-age=31536000")

log = logging.getLogger("sluice.web")
log.addFilter(FewLines())


def most_body(method: str, path: str) -> int:
    """Bytes of the body that may be sent to a path."""
    return LARGE.get(path, MOST_BODY) if method == "POST" else MOST_BODY


def is_secure(scheme: str, forwarded: str) -> bool:
    """Whether a browser speaks TLS, with this process or with a proxy before it. Who says so wrongly harms itself only:
    it is how the browser is asked to keep its own cookie."""
    return scheme == "https" or forwarded.rpartition(",")[2].strip().lower() == "https"


def _with_ours(headers: Iterable[tuple[bytes, bytes]], request_id: str, secure: bool) -> list[tuple[bytes, bytes]]:
    """An answer's headers with those of all, where it has not its own: pages have another policy."""
    given = list(headers)
    names = {name.lower() for name, _ in given}
    ours = [*_HEADERS, (b"x-request-id", request_id.encode()), *([_HSTS] if secure else [])]
    return given + [one for one in ours if one[0] not in names]


class Rates:
    """Budgets of requests."""

    def __init__(self) -> None:
        self._addresses = Budgets(*_BY_ADDRESS)
        self._users = Budgets(*_BY_USER)
        self._failed = Budgets(*_FAILED)
        self._next = 0.0

    def spend_address(self, address: str) -> None:
        """Count a request without a user. One with a good token is its user's alone, as many may share an address, such
        as that of a login node. Raises ProblemError 429."""
        self._spend(self._addresses, network_of(address), "too many requests from this address")

    def spend_user(self, user: str) -> None:
        """Count a request. Raises ProblemError 429."""
        self._spend(self._users, (user,), "too many requests of this user")

    def spend_time(self, user: str, seconds: float) -> None:
        """Count a request that took so long as several: others wait for it."""
        now = time.monotonic()
        for _ in range(min(int(seconds / REQUEST_S), _MOST_AT_ONCE)):
            self._users.take((user,), now)

    def may_fail(self, address: str) -> None:
        """Raises ProblemError 429 where there were too many refused log-ins."""
        self._spend(self._failed, network_of(address), "too many refused log-ins from this address", take=False)

    def failed(self, address: str) -> None:
        """Count a log-in that was refused. Raises ProblemError 429."""
        self.may_fail(address)
        self._failed.take(network_of(address), time.monotonic())

    def _spend(self, budgets: Budgets, owner: Owner, what: str, *, take: bool = True) -> None:
        now = time.monotonic()
        if now > self._next:
            self._next = now + 1
            for each in (self._addresses, self._users, self._failed):
                each.forget(now)
        wait = budgets.wait(owner, now)
        if wait > 0:
            raise ProblemError(429, what, remedy="ask less often", headers={"retry-after": str(int(wait) + 1)})
        if take:
            budgets.take(owner, now)


class Guard:
    """The outermost layer: every request has an id, bounds and security headers, and every error is a problem."""

    def __init__(
        self,
        app: ASGIApp,
        client: Callable[[str, str], str],
        page: Callable[[Scope, ProblemError], Response | None] = lambda scope, error: None,
    ) -> None:
        """`page`: an error as HTML, for browsers; None: it is not for one."""
        self.app = app
        self.client = client
        self.page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        request_id = secrets.token_hex(8)
        begun = secure = False

        async def bounded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": _with_ours(message.get("headers", ()), request_id, secure)}
            async with asyncio.timeout(WRITE_S):
                await send(message)

        try:
            try:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                address = self.client((scope["client"] or ("", 0))[0], headers.get("x-forwarded-for", ""))
                secure = is_secure(scope["scheme"], headers.get("x-forwarded-proto", ""))
                known = {"address": address, "request_id": request_id, "secure": secure}
                scope["state"] = {**scope.get("state", {}), **known}
                self._check(scope, headers)
                await self.app(scope, receive, bounded)
            except ProblemError as error:
                if begun:
                    raise
                shown = self.page(scope, error) if "state" in scope else None
                await (shown or response(error, request_id))(scope, receive, bounded)
            except TimeoutError:
                raise
            except Exception:
                log.exception("request %s: unexpected", request_id)
                if begun:
                    raise
                failed = ProblemError(500, "this request failed", remedy=f"see the log for {request_id}")
                await response(failed, request_id)(scope, receive, bounded)
        except TimeoutError:
            log.info("%s: did not take its answer", request_id)
            raise

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if scope["method"] not in METHODS:
            raise ProblemError(
                405, f"{scope['method'][:20]}: not allowed", remedy="use GET",
                headers={"allow": ", ".join(METHODS), "connection": "close"},
            )  # fmt: skip
        length = headers.get("content-length", "0")
        most = most_body(scope["method"], scope["path"])
        if "transfer-encoding" in headers or not length.isdecimal() or len(length) > 19 or int(length) > most:
            raise ProblemError(
                413, f"a body of {length[:20]} bytes", remedy=f"send {most} at most, and their number",
                headers={"connection": "close"},
            )  # fmt: skip


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds that it does not have: on a request's head, on those that wait, on a client's connections,
    and on the time until a connection that is being closed has gone, which a client that does not read would hold."""

    trusted: Callable[[str], bool] = staticmethod(lambda _: False)
    """Addresses that may have any number of connections: the reverse proxy's."""
    _open: ClassVar[Counter[Owner]] = Counter()  # of all connections
    _head = 0
    _most = MOST_BODY
    _owner: Owner = ()
    _timer: asyncio.TimerHandle | None = None
    _watch: asyncio.TimerHandle | None = None
    _closing = False

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        owner = network_of(address)
        if not self.trusted(address):
            if any(self._open[part] >= most for part, most in zip((owner[:1], owner), MOST_CONNECTIONS, strict=True)):
                self.transport.abort()
                return
            self._owner = owner
            self._open.update((owner[:1], owner))
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)
        self._watch = self.loop.call_later(WRITE_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop()
        if self._watch is not None:
            self._watch.cancel()
        for part in (self._owner[:1], self._owner) if self._owner else ():
            self._open[part] -= 1
            if not self._open[part]:
                del self._open[part]
        self._owner = ()
        super().connection_lost(exc)

    def _look(self) -> None:
        """close() waits until what is written has been taken: not for ever."""
        if self._closing:
            self.transport.abort()
            return
        self._closing = self.transport.is_closing()
        self._watch = self.loop.call_later(WRITE_S, self._look)

    def data_received(self, data: bytes) -> None:
        """Bytes of heads, or of bodies that nobody reads."""
        if self.transport.is_closing():
            return
        self._head += len(data)
        if self._head > MOST_HEAD + self._most:
            self._stop()
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._timer = self.loop.call_later(HEAD_S, self._too_slow)
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head's lines."""
        if len(self.headers) >= MOST_HEADERS:
            self._refuse(f"more than {MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop()
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(f"more than {MOST_PIPELINED} requests wait")
        super().on_headers_complete()
        self._most = most_body(self.scope["method"], self.scope["path"])
        self._timer = self.loop.call_later(BODY_S, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        """Not after a connection was cut."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _refuse(self, why: str) -> None:
        """Cut the connection, and end the parser's work, which has more bytes."""
        self.transport.abort()
        raise ValueError(why)

    def on_message_complete(self) -> None:
        """The request is there; the next one counts from 0."""
        self._stop()
        self._head, self._most = 0, MOST_BODY
        super().on_message_complete()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.abort()
