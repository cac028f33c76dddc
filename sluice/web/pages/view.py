"""What a view of the page is, and what a form is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from sluice.base.errors import SluiceError
from sluice.web.access import Viewer
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import Endpoint, Site, checked
from sluice.web.problems import ProblemError

Seen = dict[str, Any]
"""What a template gets."""


@dataclass(frozen=True)
class Done:
    """What a form did, or where a view is: the browser goes to `where`, a path of this site, which shows `said`."""

    where: str
    said: str = ""


Shown = Seen | Done


@dataclass(frozen=True)
class View:
    """One page. `show` calls the functions of the API's endpoints, so that both have one answer.

    `title` is a text that is translated; a `title` in what `show` gives is taken as it is, a `status` is that of HTTP.
    `nav`: the path of the entry of the navigation that it belongs to. `operators`: for nobody else.
    """

    path: str
    show: Callable[[Site, Viewer, Request], Shown | Awaitable[Shown]]
    template: str
    title: str
    nav: str = ""
    operators: bool = False


@dataclass(frozen=True)
class Form:
    """What a form posts. `do` gets its fields and the path's; what it gives is shown with `template`.

    The viewer that it gets has `asked`, with the form's field `key` as the request's idempotency key.
    """

    path: str
    do: Callable[[Site, Viewer, dict[str, str], Mapping[str, str]], Awaitable[Shown]]
    template: str
    title: str
    nav: str = ""
    operators: bool = False
    most: int = 64 << 10
    """Bytes of its body."""


# ---- the API's answers ----


@cache
def _endpoints() -> dict[tuple[str, str], Endpoint]:
    return {(one.method, one.path): one for one in ENDPOINTS}


def ask(site: Site, viewer: Viewer, path: str, query: Mapping[str, Any] | None = None, **names: str) -> Any:
    """What GET of an endpoint gives this viewer; of some it must be awaited. `names`: those in the path.

    Raises ProblemError, also for parameters that the endpoint does not take.
    """
    endpoint = _endpoints()["GET", path]
    if endpoint.operators and not viewer.operator:
        raise ProblemError(403, f"{path}: for operators of Slurm", remedy="ask one of them")
    try:
        asked = endpoint.query.model_validate(query or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        what = f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:300]}"
        raise ProblemError(400, what, remedy="correct it in the form or in the address") from error
    return endpoint.answer(site, viewer, asked, names)


async def soon(answer: Any, seconds: float) -> tuple[Any, str]:
    """What is awaited, or why it is not there; both empty: not yet."""
    try:
        return await asyncio.wait_for(answer, seconds) if isinstance(answer, Awaitable) else answer, ""
    except TimeoutError:
        return None, ""
    except SluiceError as error:
        return None, error.what


async def write(
    site: Site, viewer: Viewer, method: str, path: str, body: Mapping[str, Any] | None = None, **names: str
) -> dict[str, Any]:
    """What a write gives; `viewer` is the one that a form gets. Raises ProblemError."""
    endpoint = _endpoints()[method, path]
    if endpoint.operators and not viewer.operator:
        raise ProblemError(403, f"{path}: for operators of Slurm", remedy="ask one of them")
    words = None if endpoint.body is None else checked(endpoint.body, body or {})
    done: dict[str, Any] = await endpoint.answer(site, viewer, words, names)
    return done


def whole(model: type[BaseModel], document: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A document with all fields of its model: what it leaves out is None."""
    return None if document is None else model.model_validate(document).model_dump()
