"""What an endpoint of /api/v1 is, and what all of them use. `sluice.web.api` has them, one file a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from sluice.web.access import Viewer
from sluice.web.feed import Feed
from sluice.web.limits import Rates
from sluice.web.login import Login
from sluice.web.problems import ProblemError
from sluice.web.store import Store
from sluice.web.stream import Streams

PREFIX = "/api/v1"
MOST_TEXT = 1024
"""Characters of a parameter."""


class NoQuery(BaseModel, extra="forbid"):
    """No parameters."""


class Site:
    """What all endpoints use."""

    def __init__(self, store: Store, feed: Feed, login: Login) -> None:
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


Answer = Callable[[Site, Viewer, Any, Mapping[str, str]], Any]


@dataclass(frozen=True)
class Endpoint:
    """One path. `operators`: for nobody else."""

    path: str
    answer: Answer
    model: type[BaseModel]
    summary: str
    query: type[BaseModel] = NoQuery
    operators: bool = False


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
