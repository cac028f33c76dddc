"""Errors as clients of OpenAI's API know them: one object that names the value, the place and the remedy."""

from __future__ import annotations

import json
from typing import Final

from sluice.base.errors import SluiceError

_KINDS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 411: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
    500: "server_error", 502: "server_error", 503: "server_error", 504: "server_error", 507: "server_error",
}  # fmt: skip
REASONS: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 409: "Conflict", 411: "Length Required", 413: "Content Too Large",
    415: "Unsupported Media Type", 422: "Unprocessable Content", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 499: "Client Closed Request", 500: "Internal Server Error",
    501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
    507: "Insufficient Storage",
}  # fmt: skip


class RefusalError(SluiceError):
    """A request that gets no answer of a replica.

    `retry_after`: seconds after which the same request succeeds if nobody else asks meanwhile. `close`: what follows on
    the connection cannot be trusted, or is not wanted.
    """

    def __init__(
        self, status: int, what: str, *, remedy: str = "", code: str | None = None, param: str | None = None,
        retry_after: float | None = None, close: bool = False, kind: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what, remedy=remedy)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.close = close
        self.kind = kind or _KINDS.get(status, "server_error")

    def document(self, request_id: str) -> bytes:
        """Its JSON."""
        message = f"{self} (request {request_id})" if self.status >= 500 else str(self)
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")

    def event(self, request_id: str) -> bytes:
        """As an event of a stream that has begun. No `data: [DONE]` follows it, nor the end of the HTTP message."""
        return b"data: " + self.document(request_id) + b"\n\n"


def failed_request() -> RefusalError:
    """Where something unexpected happened, which the log has."""
    return RefusalError(500, "this request failed", remedy="see the log of sluice-gateway", close=True)
