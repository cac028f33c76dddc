"""Errors of HTTP as those of gRPC: the code, a message with the remedy, and metadata by which a client can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import grpc

from sluice.base.text import one_line
from sluice.client import ApiError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_MOST_TEXT = 1000
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_BY_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 402,
    "timeout": 504,
    "timeout_error": 504,
    "service_unavailable": 503,
    "service_unavailable_error": 503,
    "stream_broken": 502,
    "replica_failed": 502,
    "deadline_exceeded": 503,
    "busy": 503,
}
"""What an error within a stream says, which has no status of HTTP any more."""


def code_of(status: int) -> grpc.StatusCode:
    """The code of a status of HTTP."""
    return _CODES.get(status, grpc.StatusCode.INVALID_ARGUMENT if 400 <= status < 500 else grpc.StatusCode.INTERNAL)


class CallError(Exception):
    """A call ends with this."""

    def __init__(self, code: grpc.StatusCode, text: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = one_line(text, limit=_MOST_TEXT)
        self.metadata = dict(metadata or {})

    async def end(self, context: Context) -> NoReturn:
        """End the call."""
        trailing = tuple((name, value) for name, value in self.metadata.items() if value.isascii() and value)
        await context.abort(self.code, self.text, trailing)
        raise AssertionError("abort returned")


def of_answer(status: int, headers: Mapping[str, str], body: bytes) -> CallError:
    """The error that an answer of the gateway is."""
    found = _error_object(body)
    text = (
        str(found.get("message", "")) or f"the gateway answered {status}: {one_line(body.decode('utf-8', 'replace'))}"
    )
    metadata = {name: headers.get(name, "") for name in ("x-request-id", "retry-after")}
    if metadata["retry-after"].isdecimal():
        metadata["grpc-retry-pushback-ms"] = str(1000 * int(metadata["retry-after"][:6]))
    return CallError(code_of(status), text, metadata)


def of_event(found: Mapping[str, Any], request_id: str) -> CallError:
    """The error that an event of a stream is."""
    status = found.get("status") or found.get("code")
    if not isinstance(status, int):
        status = _BY_TYPE.get(str(found.get("type", "")), _BY_TYPE.get(str(found.get("code", "")), 500))
    return CallError(code_of(status), str(found.get("message", "the stream failed")), {"x-request-id": request_id})


def _error_object(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    found = document.get("error") if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def of_api(error: ApiError) -> CallError:
    """The error of a call of the REST API."""
    code = grpc.StatusCode.UNAVAILABLE if error.status == 0 else code_of(error.status)
    text = f"{error.what}; {error.remedy}" if error.remedy else error.what
    return CallError(code, text, {"x-request-id": error.request_id})
