"""The application: the endpoints' routes, what they have in common, and the stream."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

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
from sluice.web.login_page import LoginPages
from sluice.web.openapi import document
from sluice.web.pages import routes as pages
from sluice.web.problems import ProblemError
from sluice.web.refusals import Refusals
from sluice.web.stream import TOPICS

STREAM = f"{PREFIX}/stream"


class StreamQuery(BaseModel, extra="forbid"):
    """What to follow."""

    topics: str = Field(",".join(TOPICS), max_length=MOST_TEXT, description=f"Of {', '.join(TOPICS)}, with commas.")
    rows: bool = Field(True, description="false: only which topics have changed, and not what.")


def description() -> dict[str, Any]:
    """The API's description."""
    return document(PREFIX, ENDPOINTS, StreamQuery)


class Service:
    """What answers the endpoints' requests."""

    def __init__(self, site: Site) -> None:
        self.site = site

    async def caller(self, request: Request) -> Viewer:
        """Who asks. Raises ProblemError, also before the first snapshot."""
        viewer = await self._viewer(request)
        self.site.rates.spend_user(viewer.user)
        if not self.site.store.complete:
            raise ProblemError(
                503, f"there is no snapshot yet: {self.site.store.problem or 'it is being read'}", remedy="try again",
                headers={"retry-after": "2"},
            )  # fmt: skip
        return viewer

    async def _viewer(self, request: Request) -> Viewer:
        peer = request.client.host if request.client else ""
        return await self.site.login.viewer(request.headers, peer, request.state.address, request.state.secure)

    def route(self, endpoint: Endpoint) -> Route:
        """An endpoint's route."""

        async def handle(request: Request) -> Response:
            viewer = await self.caller(request)
            if endpoint.operators and not viewer.operator:
                raise ProblemError(403, f"{request.url.path}: for operators of Slurm", remedy="ask one of them")
            return await (self._write if endpoint.scope == "write" else self._read)(endpoint, request, viewer)

        if endpoint.most_body > MOST_BODY:
            LARGE[PREFIX + endpoint.path] = endpoint.most_body
        return Route(PREFIX + endpoint.path, handle, methods=[endpoint.method])

    async def _read(self, endpoint: Endpoint, request: Request, viewer: Viewer) -> Response:
        found = await self._found(endpoint, request, viewer)
        body = found.text.encode()
        headers = {
            "etag": f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"',
            "cache-control": "private, no-cache",
            "vary": ", ".join(self.site.login.credentials),
            **(_going(endpoint) or going_of(endpoint.query, request.query_params)),
        }
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=found.media_type)

    async def _found(self, endpoint: Endpoint, request: Request, viewer: Viewer) -> Plain:
        """An answer's text; the time that it takes is the viewer's."""
        began = time.thread_time()
        try:
            answer = endpoint.text or endpoint.answer
            found = answer(self.site, viewer, parse_query(endpoint.query, request), request.path_params)
            if isinstance(found, Awaitable):
                found = await found
                began = time.thread_time()
            if isinstance(found, Plain):
                return found
            return Plain(json.dumps(found, separators=(",", ":")), "application/json")
        except ProblemError:
            raise
        except SluiceError as error:
            raise ProblemError(400 if error.usage else 503, error.what, remedy=error.remedy) from error
        finally:
            self.site.rates.spend_time(viewer.user, time.thread_time() - began)

    async def _write(self, endpoint: Endpoint, request: Request, viewer: Viewer) -> Response:
        asked = asking(viewer, request)
        self.site.login.may_write(request.headers, viewer)
        parse_query(NoQuery, request)
        going = _going(endpoint)
        if endpoint.body is None:
            found = await endpoint.answer(self.site, asked, None, request.path_params)
        else:
            spend = functools.partial(self.site.rates.spend_time, viewer.user)
            size = int(request.headers.get("content-length", "0"))
            spend(size * BYTE_S)
            with self.site.acts.bodies.room(viewer.user, size):
                body = await read_body(endpoint.body, request, endpoint.most_body, spend)
                going = going or going_of(endpoint.body, body.model_fields_set)
                found = await endpoint.answer(self.site, asked, body, request.path_params)
        return JSONResponse(found, endpoint.status, {"cache-control": "no-store", **going})

    async def stream(self, request: Request) -> Response:
        """What changes, until the reader leaves."""
        viewer = await self.caller(request)
        query = parse_query(StreamQuery, request)
        topics = words_of(query.topics)
        if not topics or not topics <= set(TOPICS):
            raise ProblemError(400, "topics: not known", remedy=f"use {', '.join(TOPICS)}")
        one = self.site.streams.enter(viewer, topics, rows=query.rows)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        sent = self.site.streams.send(one, functools.partial(self._viewer, request))
        return StreamingResponse(sent, headers=headers, media_type="text/event-stream")

    async def openapi(self, request: Request) -> Response:
        """The API's description; nobody has to say who asks."""
        self.site.rates.spend_address(request.state.address)
        return Response(json.dumps(description()), media_type="application/json")


def _going(endpoint: Endpoint) -> dict[str, str]:
    return {} if endpoint.going is None else endpoint.going.headers()


def make_app(site: Site, *, follow: bool = True) -> Guard:
    """The application. `follow`: with the daemon's snapshot, until it ends."""
    service, logins = Service(site), LoginPages(site)
    refusals = Refusals(site, service.caller)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        site.feed.changed = site.streams.changed
        tasks = [asyncio.create_task(logins.warm())]
        if follow:
            tasks.append(asyncio.create_task(site.feed.follow()))
        yield
        for task in tasks:
            task.cancel()

    app = Starlette(
        routes=[
            Route(f"{PREFIX}/openapi.json", service.openapi),
            Route(STREAM, service.stream),
            *map(service.route, ENDPOINTS),
            *pages.routes(site, service.caller),
            *logins.routes(),
        ],
        lifespan=lifespan,
        exception_handlers=refusals.handlers(),
    )
    return Guard(app, site.login.proxy.client, refusals.as_page)
