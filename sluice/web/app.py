"""The application: the endpoints' routes, what they have in common, and the stream."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from sluice.base.errors import SluiceError
from sluice.web.access import Viewer
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import (
    MOST_TEXT,
    PREFIX,
    Endpoint,
    NoQuery,
    Plain,
    Site,
    asking,
    going_of,
    parse_query,
    read_body,
    words_of,
)
from sluice.web.limits import BYTE_S, LARGE, MOST_BODY, Guard
from sluice.web.login import NobodyError
from sluice.web.login_page import LoginPages
from sluice.web.openapi import document
from sluice.web.pages import routes as pages
from sluice.web.problems import ProblemError, response
from sluice.web.stream import TOPICS

STREAM = f"{PREFIX}/stream"


class StreamQuery(BaseModel, extra="forbid"):
    """What to follow."""

    topics: str = Field(",".join(TOPICS), max_length=MOST_TEXT, description=f"Of {', '.join(TOPICS)}, with commas.")
    rows: bool = Field(True, description="false: only which topics have changed, and not what.")


def description() -> dict[str, Any]:
    """The API's description."""
    return document(PREFIX, ENDPOINTS, StreamQuery)


def make_app(site: Site, *, follow: bool = True) -> Guard:
    """The application. `follow`: with the daemon's snapshot, until it ends."""

    async def caller(request: Request) -> Viewer:
        peer = request.client.host if request.client else ""
        viewer = await site.login.viewer(request.headers, peer, request.state.address, request.state.secure)
        site.rates.spend_user(viewer.user)
        if not site.store.complete:
            raise ProblemError(
                503, f"there is no snapshot yet: {site.store.problem or 'it is being read'}", remedy="try again",
                headers={"retry-after": "2"},
            )  # fmt: skip
        return viewer

    def route(endpoint: Endpoint) -> Route:
        async def handle(request: Request) -> Response:
            viewer = await caller(request)
            if endpoint.operators and not viewer.operator:
                raise ProblemError(403, f"{request.url.path}: for operators of Slurm", remedy="ask one of them")
            if endpoint.scope == "write":
                return await write(endpoint, request, viewer)
            began = time.thread_time()
            try:
                answer = endpoint.text or endpoint.answer
                found = answer(site, viewer, parse_query(endpoint.query, request), request.path_params)
                if isinstance(found, Awaitable):
                    found = await found
                    began = time.thread_time()
                kind = found.media_type if isinstance(found, Plain) else "application/json"
                text = found.text if isinstance(found, Plain) else json.dumps(found, separators=(",", ":"))
                body = text.encode()
            except ProblemError:
                raise
            except SluiceError as error:
                raise ProblemError(400 if error.usage else 503, error.what, remedy=error.remedy) from error
            finally:
                site.rates.spend_time(viewer.user, time.thread_time() - began)
            going = {} if endpoint.going is None else endpoint.going.headers()
            going = going or going_of(endpoint.query, request.query_params)
            tag = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            headers = {"etag": tag, "cache-control": "private, no-cache", "vary": ", ".join(site.login.credentials)}
            headers |= going
            if tag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(body, headers=headers, media_type=kind)

        if endpoint.most_body > MOST_BODY:
            LARGE[PREFIX + endpoint.path] = endpoint.most_body
        return Route(PREFIX + endpoint.path, handle, methods=[endpoint.method])

    async def write(endpoint: Endpoint, request: Request, viewer: Viewer) -> Response:
        asked = asking(viewer, request)
        site.login.may_write(request.headers, viewer)
        parse_query(NoQuery, request)
        going = {} if endpoint.going is None else endpoint.going.headers()
        if endpoint.body is None:
            found = await endpoint.answer(site, asked, None, request.path_params)
        else:
            size = int(request.headers.get("content-length", "0"))
            site.rates.spend_time(viewer.user, size * BYTE_S)
            with site.acts.bodies.room(viewer.user, size):
                body = await read_body(
                    endpoint.body, request, endpoint.most_body, lambda took: site.rates.spend_time(viewer.user, took)
                )
                going = going or going_of(endpoint.body, body.model_fields_set)
                found = await endpoint.answer(site, asked, body, request.path_params)
        return JSONResponse(found, endpoint.status, {"cache-control": "no-store", **going})

    async def stream(request: Request) -> Response:
        viewer = await caller(request)
        query = parse_query(StreamQuery, request)
        topics = words_of(query.topics)
        if not topics or not topics <= set(TOPICS):
            raise ProblemError(400, "topics: not known", remedy=f"use {', '.join(TOPICS)}")
        one = site.streams.enter(viewer, topics, rows=query.rows)
        host = request.client.host if request.client else ""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}

        async def again() -> Viewer:
            return await site.login.viewer(request.headers, host, request.state.address, request.state.secure)

        return StreamingResponse(site.streams.send(one, again), headers=headers, media_type="text/event-stream")

    async def missing(request: Request, error: Exception) -> Response:
        where = "begin at the overview" if pages.is_page(request) else f"see {PREFIX}/openapi.json"
        gone = ProblemError(404, f"{request.url.path[:200]}: no such path", remedy=where)
        try:
            site.rates.spend_address(request.state.address)
        except ProblemError as too_many:
            gone = too_many
        if pages.is_page(request):
            return await page_problem(request, gone)
        return response(gone, request.state.request_id)

    async def not_allowed(request: Request, error: Exception) -> Response:
        page = pages.is_page(request)
        wrong = ProblemError(
            405, f"{request.method}: not allowed here",
            remedy="begin at the overview" if page else f"see {PREFIX}/openapi.json",
            headers=getattr(error, "headers", None) or {},
        )  # fmt: skip
        return await page_problem(request, wrong) if page else response(wrong, request.state.request_id)

    async def openapi(request: Request) -> Response:
        site.rates.spend_address(request.state.address)
        return Response(json.dumps(description()), media_type="application/json")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        site.feed._changed = site.streams.changed
        tasks = [asyncio.create_task(logins.warm())]
        if follow:
            tasks.append(asyncio.create_task(site.feed.follow()))
        yield
        for task in tasks:
            task.cancel()

    logins = LoginPages(site)
    routes = [
        Route(f"{PREFIX}/openapi.json", openapi),
        Route(STREAM, stream),
        *map(route, ENDPOINTS),
        *pages.routes(site, caller),
        *logins.routes(),
    ]

    async def broken(request: Request, error: Exception) -> Response:
        known = request.state.request_id
        failed = ProblemError(500, "this request failed", remedy=f"see the log for {known}")
        return pages.problem(site, request, failed) if pages.is_page(request) else response(failed, known)

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)  # noqa: S101 - it is the handler of these
        if error.status == 401:
            count = site.rates.spend_address if isinstance(error, NobodyError) else site.rates.failed
            try:
                count(request.state.address)
            except ProblemError as too_many:
                error = too_many
        if pages.is_page(request):
            return await page_problem(request, error)
        return response(error, request.state.request_id)

    async def page_problem(request: Request, error: ProblemError) -> Response:
        viewer = None
        if error.status == 404:  # who has logged in keeps the navigation
            with suppress(ProblemError):
                viewer = await caller(request)
        return pages.problem(site, request, error, viewer)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={404: missing, 405: not_allowed, Exception: broken, ProblemError: problem},
    )

    def as_page(scope: Scope, error: ProblemError) -> Response | None:
        request = Request(scope)
        wanted = pages.is_page(request) and "text/html" in request.headers.get("accept", "")
        return pages.problem(site, request, error) if wanted else None

    return Guard(app, site.login.proxy.client, as_page)
