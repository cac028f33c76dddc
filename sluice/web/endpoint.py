"""What an endpoint of /api/v1 is, and what all of them use. `sluice.web.api` has them, one file a subject."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from email.utils import format_datetime
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from sluice.web.access import Asked, Viewer
from sluice.web.acts import Acts, read_only
from sluice.web.feed import Feed
from sluice.web.limits import MOST_BODY, Rates
from sluice.web.login import Login
from sluice.web.problems import ProblemError
from sluice.web.store import Store
from sluice.web.stream import Streams

PREFIX = "/api/v1"
_BODY_S = 30.0
_EXACT = 2.0**53  # below it a number of JSON is the integer that was meant
MOST_TEXT = 1024
"""Characters of a parameter."""


Spent = Callable[[float], None]
"""Is called with the seconds that something took, in which nobody else was served."""


def free(seconds: float) -> None:
    """Nobody pays for it."""


class NoQuery(BaseModel, extra="forbid"):
    """No parameters."""


class Site:
    """What all endpoints use."""

    def __init__(self, store: Store, feed: Feed, login: Login, acts: Acts | None = None) -> None:
        self.acts = acts or Acts()
        self.store = store
        self.feed = feed
        self.login = login
        self.rates = Rates()
        login.may_fail = self.rates.may_fail
        self.streams = Streams(store)

    def viewed(self, *parts: str) -> dict[str, Any]:
        """The head of an answer from these parts."""
        found = [self.store.part(name) for name in parts]
        stale = [one for one in found if one["stale_since"] is not None]
        return {
            "schema_version": 1,
            "stale_since": min((one["stale_since"] for one in stale), default=None),
            "problem": next((one["problem"] for one in stale), ""),
        }


@dataclass(frozen=True)
class Plain:
    """An answer that is no JSON, or whose JSON is made already."""

    text: str
    media_type: str


@dataclass(frozen=True)
class Going:
    """Since when something is deprecated, when it goes at the earliest, and what to use then."""

    since: date
    until: date
    instead: str

    def headers(self) -> dict[str, str]:
        """Of its answers: RFC 9745 and RFC 8594."""
        since, until = (datetime.combine(day, datetime.min.time(), UTC) for day in (self.since, self.until))
        return {"deprecation": f"@{int(since.timestamp())}", "sunset": format_datetime(until, usegmt=True)}

    def schema(self) -> dict[str, Any]:
        """For `json_schema_extra` of a field that is to go: of an answer, a parameter or a body."""
        return {"deprecated": True, "x-since": str(self.since), "x-sunset": str(self.until), "x-instead": self.instead}


def going_of(model: type[BaseModel], given: Iterable[str]) -> dict[str, str]:
    """The headers of an answer to a request that has fields which are to go: of the first of them to do so."""
    found = []
    for name in given:
        field = model.model_fields.get(name)
        extra = None if field is None else field.json_schema_extra
        if isinstance(extra, dict) and isinstance(until := extra.get("x-sunset"), str):
            found.append((date.fromisoformat(until), str(extra.get("x-since", until))))
    if not found:
        return {}
    until_day, since = min(found)
    return Going(date.fromisoformat(since), until_day, "").headers()


Method = Literal["GET", "POST", "PATCH", "DELETE"]
Answer = Callable[[Site, Viewer, Any, Mapping[str, str]], Any]


@dataclass(frozen=True)
class Endpoint:
    """One method of a path. `operators`: for nobody else.

    A write has a `method`, the scope ``write``, usually a `body` of at most `most_body` bytes, which `answer` gets
    where others get the query, and the `status` of what was done. Its `answer` is awaited; it asks `site.acts`.
    """

    path: str
    answer: Answer
    model: type[BaseModel]
    summary: str
    query: type[BaseModel] = NoQuery
    operators: bool = False
    method: Method = "GET"
    body: type[BaseModel] | None = None
    scope: Literal["read", "write"] = "read"
    status: int = 200
    most_body: int = MOST_BODY
    by_proof: bool = False
    """Root's helper answers it, which wants the caller's own proof: not the word of a proxy."""
    going: Going | None = None
    """It is to go."""
    text: Answer | None = None
    """Gives the answer to requests in place of `answer`, as a text that costs less to make."""


def words_of(text: str) -> frozenset[str]:
    """The values of a parameter that takes several, with commas."""
    return frozenset(word for word in text.split(",") if word)


def known(site: Site, part: str, section: str) -> Any:
    """The row of a section that has one. Raises ProblemError 503 where it is not known."""
    found = site.store.one(section)
    if found is None:
        said = site.store.part(part)["problem"]
        raise ProblemError(503, f"{part}: not known: {said}", remedy="see: sluice controllerd status")
    return found


def parse_query(model: type[BaseModel], request: Request) -> Any:
    """The parameters of a request. Raises ProblemError."""
    given = request.query_params
    try:
        if len(given) > len(model.model_fields) + 1:
            raise ProblemError(
                400, "too many parameters", remedy=f"known are: {', '.join(model.model_fields) or 'none'}"
            )
        if len(given) != len(given.multi_items()):
            raise ProblemError(400, "a parameter is given twice", remedy="give several values with commas")
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ProblemError(
            400,
            f"parameter {name[:80]!r}: {first['msg']}",
            remedy=f"known are: {', '.join(model.model_fields) or 'none'}",
        ) from error


def asking(viewer: Viewer, request: Request) -> Viewer:
    """The viewer with what a write needs to know of its request. Raises ProblemError 403 where it can only read."""
    if viewer.proof is None:
        raise read_only("a user whom a proxy names")
    if "write" not in viewer.scopes:
        raise read_only("this token")
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise ProblemError(400, "Idempotency-Key: given twice", remedy="send one")
    return replace(viewer, asked=Asked(request.state.request_id, keys[0] if keys else None, request.state.address))


async def read_bytes(request: Request, most: int) -> bytes:
    """The body of a request. Raises ProblemError 408, 413."""
    if int(request.headers.get("content-length", "0")) > most:
        raise too_large(most)
    pieces = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                pieces += piece
                if len(pieces) > most:
                    raise too_large(most)
    except TimeoutError as error:
        raise ProblemError(408, "the body did not come in time", remedy="try again") from error
    return bytes(pieces)


async def read_body(model: type[BaseModel], request: Request, most: int, spent: Spent = free) -> Any:
    """The JSON of a request. Raises ProblemError 400, 408, 413, 415, 422."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ProblemError(415, f"content-type {kind[:80]!r}", remedy="send application/json")
    pieces = await read_bytes(request, most)
    began = time.thread_time()
    try:
        return checked(model, json.loads(pieces, parse_float=_number), strict=True)
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, "the body is not JSON", remedy="send an object of JSON in UTF-8") from error
    finally:
        spent(time.thread_time() - began)


def _number(text: str) -> float:
    """1.0 is an integer in JSON Schema."""
    value = float(text)
    return int(value) if abs(value) < _EXACT and value.is_integer() else value


def checked(model: type[BaseModel], document: Any, *, strict: bool = False) -> Any:
    """What was sent, as the model has it; `strict`: also in its types, of which forms have texts only.

    Raises ProblemError 422.
    """
    try:
        return model.model_validate(document, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ProblemError(
            422, f"field {name[:80]!r}: {first['msg'][:300]}", remedy=f"known are: {', '.join(model.model_fields)}"
        ) from error


def too_large(most: int) -> ProblemError:
    """For a body."""
    return ProblemError(413, f"a body of more than {most} bytes", remedy="send less", headers={"connection": "close"})
