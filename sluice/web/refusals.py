"""How a request is refused: as a page to a browser, else as problem+json (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from sluice.web.access import Viewer
from sluice.web.endpoint import PREFIX, Site
from sluice.web.login import NobodyError
from sluice.web.pages import routes as pages
from sluice.web.problems import ProblemError, response


class Refusals:
    """`caller`: who asks, or ProblemError."""

    def __init__(self, site: Site, caller: Callable[[Request], Awaitable[Viewer]]) -> None:
        self._site = site
        self._caller = caller

    def handlers(self) -> Mapping[Any, Callable[[Request, Any], Awaitable[Response]]]:
        """By status or exception, as starlette takes them."""
        return {
            404: self._missing,
            405: self._not_allowed,
            ProblemError: self._problem,
            Exception: self._broken,
        }

    def as_page(self, scope: Scope, error: ProblemError) -> Response | None:
        """A problem found before there is a request, if a browser asks for a page."""
        request = Request(scope)
        wanted = pages.is_page(request) and "text/html" in request.headers.get("accept", "")
        return pages.problem(self._site, request, error) if wanted else None

    async def _missing(self, request: Request, error: Exception) -> Response:
        gone = ProblemError(404, f"{request.url.path[:200]}: no such path", remedy=_begin(request))
        return await self._refuse(request, self._counted(request, gone, self._site.rates.spend_address))

    async def _not_allowed(self, request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None) or {}
        wrong = ProblemError(405, f"{request.method}: not allowed here", remedy=_begin(request), headers=headers)
        return await self._refuse(request, wrong)

    async def _problem(self, request: Request, error: ProblemError) -> Response:
        if error.status == 401:
            rates = self._site.rates
            count = rates.spend_address if isinstance(error, NobodyError) else rates.failed
            error = self._counted(request, error, count)
        return await self._refuse(request, error)

    async def _broken(self, request: Request, error: Exception) -> Response:
        known = request.state.request_id
        failed = ProblemError(500, "this request failed", remedy=f"see the log for {known}")
        return pages.problem(self._site, request, failed) if pages.is_page(request) else response(failed, known)

    def _counted(self, request: Request, error: ProblemError, count: Callable[[str], None]) -> ProblemError:
        """The error, or that there were too many of this address."""
        try:
            count(request.state.address)
        except ProblemError as too_many:
            return too_many
        return error

    async def _refuse(self, request: Request, error: ProblemError) -> Response:
        if not pages.is_page(request):
            return response(error, request.state.request_id)
        viewer = None
        if error.status == 404:  # who has logged in keeps the navigation
            with suppress(ProblemError):
                viewer = await self._caller(request)
        return pages.problem(self._site, request, error, viewer)


def _begin(request: Request) -> str:
    return "begin at the overview" if pages.is_page(request) else f"see {PREFIX}/openapi.json"
