"""The application: the endpoints' routes, what they have in common, and the stream."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.base.errors import SluiceError
from sluice.web.access import Viewer
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import MOST_TEXT, PREFIX, Endpoint, Site, parse_query, words_of
from sluice.web.limits import Guard
from sluice.web.openapi import document
from sluice.web.problems import ProblemError, response
from sluice.web.stream import TOPICS

STREAM = f"{PREFIX}/stream"


class StreamQuery(BaseModel, extra="forbid"):
    """What to follow."""

    topics: str = Field(",".join(TOPICS), max_length=MOST_TEXT, description=f"Of {', '.join(TOPICS)}, with commas.")


def description() -> dict[str, Any]:
    """The API's description."""
    return document(PREFIX, ENDPOINTS, StreamQuery)


def make_app(site: Site, *, follow: bool = True) -> Guard:
    """The application. `follow`: with the daemon's snapshot, until it ends."""

    async def caller(request: Request) -> Viewer:
        peer = request.client.host if request.client else ""
        viewer = await site.login.viewer(request.headers, peer, request.state.address)
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
            began = time.thread_time()
            try:
                found = endpoint.answer(site, viewer, parse_query(endpoint.query, request), request.path_params)
                if isinstance(found, Awaitable):
                    found = await found
                    began = time.thread_time()
                body = json.dumps(found, separators=(",", ":")).encode()
            except ProblemError:
                raise
            except SluiceError as error:
                raise ProblemError(400 if error.usage else 503, error.what, remedy=error.remedy) from error
            finally:
                site.rates.spend_time(viewer.user, time.thread_time() - began)
            tag = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            headers = {"etag": tag, "cache-control": "private, no-cache", "vary": ", ".join(site.login.credentials)}
            if tag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(body, headers=headers, media_type="application/json")

        return Route(PREFIX + endpoint.path, handle, methods=["GET"])

    async def stream(request: Request) -> Response:
        viewer = await caller(request)
        topics = words_of(parse_query(StreamQuery, request).topics)
        if not topics or not topics <= set(TOPICS):
            raise ProblemError(400, "topics: not known", remedy=f"use {', '.join(TOPICS)}")
        one = site.streams.enter(viewer, topics)
        host = request.client.host if request.client else ""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}

        async def again() -> Viewer:
            return await site.login.viewer(request.headers, host, request.state.address)

        return StreamingResponse(site.streams.send(one, again), headers=headers, media_type="text/event-stream")

    async def missing(request: Request, error: Exception) -> Response:
        gone = ProblemError(404, f"{request.url.path[:200]}: no such path", remedy=f"see {PREFIX}/openapi.json")
        try:
            site.rates.spend_address(request.state.address)
        except ProblemError as too_many:
            gone = too_many
        return response(gone, request.state.request_id)

    async def openapi(request: Request) -> Response:
        site.rates.spend_address(request.state.address)
        return Response(json.dumps(description()), media_type="application/json")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        site.feed._changed = site.streams.changed
        task = asyncio.create_task(site.feed.follow()) if follow else None
        yield
        if task is not None:
            task.cancel()

    routes = [Route(f"{PREFIX}/openapi.json", openapi), Route(STREAM, stream), *map(route, ENDPOINTS)]

    async def broken(request: Request, error: Exception) -> Response:
        known = request.state.request_id
        return response(ProblemError(500, "this request failed", remedy=f"see the log for {known}"), known)

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)  # noqa: S101 - it is the handler of these
        if error.status == 401:
            try:
                site.rates.failed(request.state.address)
            except ProblemError as too_many:
                error = too_many
        return response(error, request.state.request_id)

    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={404: missing, Exception: broken, ProblemError: problem}
    )
    return Guard(app, site.login.proxy.client)
