"""Heads of requests and answers: what is taken from a client, and what is said to a replica.

llhttp has parsed them, strictly; here is what it leaves open. Only headers that are listed here are looked at, and none
is passed on as it came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from sluice.exchange.requests import BATCHES
from sluice.serve.gateway.bounds import MOST_BODY, MOST_PATH, MOST_UPLOAD
from sluice.serve.gateway.refusals import RefusalError

Ability = Literal["chat", "completions", "embeddings", "responses"]


@dataclass(frozen=True, slots=True)
class Route:
    """What a path does."""

    path: str
    method: str
    ability: Ability | None = None  # of the replica that is asked
    stored: bool = False  # about files and batches
    uploads: bool = False  # its body is a form with a file, which is not held in memory

    @property
    def most(self) -> int:
        """Bytes of its body."""
        return MOST_UPLOAD if self.uploads else MOST_BODY


FILES: Final = "/v1/files"
BATCH_JOB: Final = "/batch/{batch}"
"""What a batch's job asks, with the batch's secret."""
ROUTES: Final = {
    route.path.encode(): (route,)
    for route in (
        Route("/v1/chat/completions", "POST", "chat"),
        Route("/v1/completions", "POST", "completions"),
        Route("/v1/embeddings", "POST", "embeddings"),
        Route("/v1/responses", "POST", "responses"),
        Route("/v1/models", "GET"),
        Route("/health", "GET"),
        Route("/metrics", "GET"),
    )
}

_TAKEN: Final = frozenset(
    (
        b"authorization", b"connection", b"content-encoding", b"content-length", b"content-type", b"expect", b"host",
        b"idempotency-key", b"sluice-deadline", b"sluice-priority", b"sluice-tenant", b"traceparent",
        b"transfer-encoding", b"x-forwarded-for",
    )
)  # fmt: skip
_MANY: Final = frozenset((b"connection", b"x-forwarded-for"))  # lists, which may come in several lines
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}\Z")
_NAMED: Final = tuple(
    (re.compile(pattern + rb"\Z"), routes)
    for pattern, routes in (
        (rb"/v1/models/([A-Za-z0-9._~:%/-]{1,512})", (Route("/v1/models/{model}", "GET"),)),
        (rb"/v1/files()", (Route(FILES, "GET", stored=True), Route(FILES, "POST", stored=True, uploads=True))),
        (
            rb"/v1/files/([A-Za-z0-9_-]{1,64})",
            (Route(f"{FILES}/{{file}}", "GET", stored=True), Route(f"{FILES}/{{file}}", "DELETE", stored=True)),
        ),
        (rb"/v1/files/([A-Za-z0-9_-]{1,64})/content", (Route(f"{FILES}/{{file}}/content", "GET", stored=True),)),
        (rb"/v1/batches()", (Route(BATCHES, "GET", stored=True), Route(BATCHES, "POST", stored=True))),
        (rb"/v1/batches/([A-Za-z0-9_-]{1,64})", (Route(f"{BATCHES}/{{batch}}", "GET", stored=True),)),
        (rb"/v1/batches/([A-Za-z0-9_-]{1,64})/cancel", (Route(f"{BATCHES}/{{batch}}/cancel", "POST", stored=True),)),
        (rb"/batch/([A-Za-z0-9_.@$/-]{1,400})", (Route(BATCH_JOB, "POST", stored=True),)),
    )
)
_PLAIN_JSON: Final = b"application/json"
_JSON: Final = re.compile(rb"application/json\s*(?:;\s*charset\s*=\s*\"?utf-8\"?\s*)?\Z", re.IGNORECASE)

Headers = dict[bytes, bytes]


def add_header(headers: Headers, name: bytes, value: bytes) -> None:
    """Take a header of a request. Raises RefusalError for one that is there twice."""
    name = name.lower()
    if name not in _TAKEN:
        return
    if name in headers:
        if name not in _MANY:
            raise RefusalError(400, f"header {name.decode()}: given twice", remedy="send it once", close=True)
        value = headers[name] + b"," + value
    headers[name] = value


def check_framing(version: str, headers: Headers) -> int | None:
    """The length of the body; None: in chunks. Raises RefusalError."""
    if version not in ("1.1", "1.0"):
        raise RefusalError(400, f"HTTP/{version}", remedy="speak HTTP/1.1", close=True)
    if b"host" not in headers and version == "1.1":
        raise RefusalError(400, "header host: not there", remedy="send it", close=True)
    coding = headers.get(b"transfer-encoding")
    length = headers.get(b"content-length")
    if coding is not None:
        if version == "1.0" or length is not None or coding.strip().lower() != b"chunked":
            raise RefusalError(
                400, "header transfer-encoding: not `chunked` alone", remedy="send content-length", close=True
            )
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 15:
        raise RefusalError(400, "header content-length: not a number", remedy="send the body's bytes", close=True)
    return int(length)


def too_large(size: int, most: int = MOST_BODY) -> RefusalError:
    """Of a body."""
    return RefusalError(
        413, f"body: {size} bytes or more", remedy=f"send {most} at most", code="request_too_large", close=True
    )


def route_of(method: bytes, target: bytes) -> tuple[Route, bytes]:
    """What a request line asks for, and what the path names. Raises RefusalError."""
    path = target.partition(b"?")[0]
    routes, named = _routes_of(path) if len(target) <= MOST_PATH else ((), b"")
    if not routes:
        known = ", ".join(sorted([FILES, BATCHES, *(one.decode() for one in ROUTES)]))
        raise RefusalError(404, f"path {shown(path)}: not known", remedy=f"known are {known}", code="unknown_url")
    for route in routes:
        if method == route.method.encode():
            return route, named
    known = " or ".join(route.method for route in routes)
    raise RefusalError(405, f"method {shown(method)}: not allowed for {routes[0].path}", remedy=f"use {known}")


def _routes_of(path: bytes) -> tuple[tuple[Route, ...], bytes]:
    """What a path can be asked, one route for each method, and what it names."""
    if path in ROUTES:
        return ROUTES[path], b""
    for pattern, routes in _NAMED:
        if (found := pattern.match(path)) is not None:
            return routes, found[1]
    return (), b""


def shown(text: bytes) -> str:
    """Bytes of a client within a message."""
    return ascii(text[:80].decode("latin-1"))


def check_body_headers(route: Route, headers: Headers, length: int | None) -> None:
    """Whether the body can be read. Raises RefusalError."""
    if length is not None and length > route.most:
        raise too_large(length, route.most)
    coding = headers.get(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        raise RefusalError(
            415, f"header content-encoding: {shown(coding)}", remedy="send the body as it is", close=True
        )
    kind = headers.get(b"content-type", _PLAIN_JSON)
    if kind != _PLAIN_JSON and not route.uploads and not _JSON.match(kind):
        raise RefusalError(415, f"header content-type: {shown(kind)}", remedy="send application/json", close=True)
    expected = headers.get(b"expect")
    if expected is not None and expected.lower() != b"100-continue":
        raise RefusalError(400, f"header expect: {shown(expected)}", remedy="leave it out", close=True)


def idempotency_key(headers: Headers) -> bytes | None:
    """What the client calls this request. Raises RefusalError."""
    key = headers.get(b"idempotency-key")
    if key is not None and not _KEY.match(key):
        raise RefusalError(400, "header idempotency-key: not 1 to 255 printable characters", remedy="send a UUID")
    return key


def deadline(headers: Headers, most: float) -> float | None:
    """Seconds to the first token, where the client says them. Raises RefusalError."""
    text = headers.get(b"sluice-deadline")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= most:
        raise RefusalError(
            400, f"header sluice-deadline: {shown(text)} is not seconds", remedy=f"send more than 0, {most:g} at most"
        )
    return seconds


def to_replica(path: str, host: str, secret: str, request_id: str, length: int, headers: Headers) -> bytes:
    """The head of a request to a replica. Its secret is the key of engines that listen on a port of their host."""
    trace = headers.get(b"traceparent")
    traced = f"traceparent: {trace.decode()}\r\n" if trace is not None and _TRACE.match(trace) else ""
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\naccept: */*\r\n"
        f"authorization: Bearer {secret}\r\nx-request-id: {request_id}\r\n{traced}content-length: {length}\r\n\r\n"
    ).encode()
