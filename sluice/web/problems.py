"""Errors as problem+json (RFC 9457): what is wrong, where, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

from sluice.base.errors import SluiceError


class ProblemError(SluiceError):
    """An answer that is an error."""

    def __init__(self, status: int, what: str, *, remedy: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what, remedy=remedy, usage=400 <= status < 500)
        self.status = status
        self.headers = dict(headers or {})


def not_found(what: str) -> ProblemError:
    """Not there, or not the caller's to see: which of both is not said."""
    return ProblemError(404, f"{what}: not known, or you may not see it", remedy="look at the list of them")


def response(error: ProblemError, request_id: str) -> Response:
    """The HTTP answer."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.what,
        "remedy": error.remedy,
        "request_id": request_id,
    }
    headers = {"cache-control": "no-store", **error.headers}  # else a cache may keep a 404
    return Response(json.dumps(body), error.status, headers, "application/problem+json")
