"""The page's routes: who asks, which view, in which language; whole pages, or the one part that is live."""

from __future__ import annotations

import functools
import gzip
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluice.base.errors import SluiceError
from sluice.exchange.acts import is_key
from sluice.web import session
from sluice.web.access import Asked, Viewer
from sluice.web.acts import read_only
from sluice.web.endpoint import PREFIX as API
from sluice.web.endpoint import Site, Spent, free, read_bytes
from sluice.web.limits import LARGE, MOST_BODY
from sluice.web.pages import FORMS, NAVIGATION, VIEWS, static
from sluice.web.pages.show import Ui, count, parse_have, visible
from sluice.web.pages.view import Done, Form, Seen, View
from sluice.web.pages.why import saves, why
from sluice.web.pages.words import LANGUAGES, TEMPLATES, choose, say_in
from sluice.web.problems import ProblemError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
THEMES = ("auto", "light", "dark")
_MOST_FIELDS = 200
_PACKED = 1024
_SAID = "said"
"""The cookie with what a form did, for the page after it."""
_MOST_SAID = 300
_KEPT = "Max-Age=31536000; Path=/; SameSite=Lax"

Caller = Callable[[Request], Awaitable[Viewer]]


@cache
def templates() -> Environment:
    """The templates."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False, finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    made.filters["count"] = count
    return made


def is_page(request: Request) -> bool:
    """Whether an answer to it is HTML."""
    return not request.url.path.startswith((API, static.PREFIX))


# ---- rendering ----


def render(
    site: Site, request: Request, template: str, seen: Seen, *, viewer: Viewer | None = None, title: str, nav: str = "",
    status: int = 200, headers: Mapping[str, str] | None = None,
) -> Response:  # fmt: skip
    """A page, or the block of it that htmx asks for. `viewer`: None where nobody has logged in."""
    language = request.cookies.get("lang", "")
    if language not in LANGUAGES:
        language = choose(request.headers.get("accept-language", ""))
    theme = request.cookies.get("theme", "auto")
    say = say_in(language)
    proof = None if viewer is None else viewer.proof
    status = int(seen.get("status", status))
    ui = Ui(
        say, quote(request.scope["path"]), dict(request.query_params), "" if proof is None else session.csrf(proof),
        parse_have(request.headers.get("x-have", "")), language,
    )  # fmt: skip
    words: dict[str, Any] = {
        "t": say, "ui": ui, "viewer": viewer, "lang": language, "languages": LANGUAGES, "nav": nav,
        "theme": theme if theme in THEMES else "auto", "themes": THEMES, "navigation": NAVIGATION,
        "cluster": (site.store.one("cluster") or {}).get("cluster", ""), "site_stale": stale(site, viewer),
        "writes": proof is not None and viewer is not None and "write" in viewer.scopes,
        "said": unquote(request.cookies.get(_SAID, ""))[:_MOST_SAID],
        "problem": None, "reasons": why(ui, seen.get("explanation")), "saves": saves(ui, seen.get("explanation")),
        "title": say(title), "now": time.time(), **seen,
    }  # fmt: skip
    made = templates().get_template(template)
    block = request.headers.get("hx-target", "").replace("-", "_") if "hx-request" in request.headers else ""
    if block in made.blocks:
        text = "".join(made.blocks[block](made.new_context(words)))
    else:
        text = made.render(words)
        if _SAID in request.cookies:  # once
            headers = {**(headers or {}), "set-cookie": f"{_SAID}=; Max-Age=0; Path=/; HttpOnly; SameSite=Lax"}
    return _answer(request, text, status, headers)


def _answer(request: Request, text: str, status: int, headers: Mapping[str, str] | None) -> Response:
    body = text.encode()
    more = {
        "cache-control": "no-store", "content-security-policy": POLICY, "content-type": "text/html; charset=utf-8",
        "vary": "cookie, accept-language, accept-encoding, hx-request", **(headers or {}),
    }  # fmt: skip
    if len(body) > _PACKED and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 5, mtime=0)
        more["content-encoding"] = "gzip"
    return Response(body, status, more)


def stale(site: Site, viewer: Viewer | None) -> list[dict[str, Any]]:
    """The parts of the snapshot that could not be read again, as a viewer sees them."""
    if viewer is None:
        return []
    parts = ((name, viewer.part(site.store.part(name))) for name in sorted(site.store.rows("parts")))
    return [{"name": name, **part} for name, part in parts if part["stale_since"] is not None]


def problem(site: Site, request: Request, error: ProblemError, viewer: Viewer | None = None) -> Response:
    """An error as a page; without a session, the way to the log-in."""
    if error.status == 401 and request.method in ("GET", "HEAD") and request.url.path != "/login":
        query = f"?{request.url.query}" if request.url.query else ""
        where = f"/login?next={quote(quote(request.scope['path']) + query, safe='')}"
        if "hx-request" in request.headers:
            return Response(status_code=204, headers={"hx-redirect": where, "cache-control": "no-store"})
        return RedirectResponse(where, 303, {"cache-control": "no-store"})
    seen = {"error": error, "request_id": request.state.request_id}
    return render(
        site, request, "error.html", seen, viewer=viewer, title="It did not work", status=error.status,
        headers=error.headers,
    )  # fmt: skip


# ---- routes ----


def local(text: str) -> str:
    """A path of this site, or the first page: nobody is sent elsewhere."""
    good = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if good else "/"


def _chosen(request: Request) -> Response | None:
    """What a viewer chose of languages and themes, as cookies; None: nothing."""
    given = dict(request.query_params)
    chosen = [("lang", given.pop("lang", ""), tuple(LANGUAGES)), ("theme", given.pop("theme", ""), THEMES)]
    made = [f"{name}={value}; {_KEPT}" for name, value, known in chosen if value in known]
    if not made or request.method != "GET":
        return None
    query = urlencode(given)
    found = RedirectResponse(local(quote(request.scope["path"]) + (f"?{query}" if query else "")), 303)
    for cookie in made:
        found.headers.append("set-cookie", cookie)
    return found


async def read_form(request: Request, most: int, spent: Spent = free) -> dict[str, str]:
    """The fields of a form; of one that is there twice the last. Raises ProblemError 408, 413, 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ProblemError(415, f"content-type {kind[:80]!r}", remedy="send a form")
    pieces = await read_bytes(request, most)
    began = time.thread_time()
    try:
        return dict(parse_qsl(pieces.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:
        raise ProblemError(400, "not a form", remedy="load the page again") from error
    finally:
        spent(time.thread_time() - began)


def routes(site: Site, caller: Caller) -> list[Route]:
    """The page's. `caller`: who asks; raises ProblemError."""

    async def file(request: Request) -> Response:
        site.rates.spend_address(request.state.address)
        return static.serve(request)

    return [
        Route(static.PREFIX + "/{digest}/{name:path}", file),
        *(Route(view.path, functools.partial(_show, site, caller, view)) for view in VIEWS),
        *(_form_route(site, caller, form) for form in FORMS),
    ]


async def _show(site: Site, caller: Caller, view: View, request: Request) -> Response:
    if (chosen := _chosen(request)) is not None:
        site.rates.spend_address(request.state.address)
        return chosen
    viewer = await caller(request)
    began = time.thread_time()
    try:
        _allow(view, viewer)
        seen = view.show(site, viewer, request)
        if isinstance(seen, Awaitable):
            seen = await seen
            began = time.thread_time()
        if isinstance(seen, Done):
            return _sent(request, seen)
        return render(site, request, view.template, seen, viewer=viewer, title=view.title, nav=view.nav)
    except SluiceError as error:
        return problem(site, request, _as_problem(error), viewer)
    finally:
        site.rates.spend_time(viewer.user, time.thread_time() - began)


def _form_route(site: Site, caller: Caller, form: Form) -> Route:
    if form.most > MOST_BODY:
        LARGE[form.path] = form.most

    async def handle(request: Request) -> Response:
        try:
            viewer = await caller(request)
        except ProblemError as error:
            if error.status != 401 or "text/html" not in request.headers.get("accept", ""):
                raise
            return await _log_in_first(site, form, request)
        return await _send(site, form, request, viewer)

    return Route(form.path, handle, methods=["POST"])


async def _log_in_first(site: Site, form: Form, request: Request) -> Response:
    site.rates.spend_address(request.state.address)
    with site.acts.bodies.room("", int(request.headers.get("content-length", "0"))):
        return _again(site, form, request, None, await read_form(request, form.most))


def _again(site: Site, form: Form, request: Request, viewer: Viewer | None, fields: dict[str, str]) -> Response:
    """What was typed, to be sent after another log-in: nothing of it is done, nor kept here."""
    kept = fields.pop("key", "")
    fields.pop("csrf", None)
    seen = {"typed": fields, "kept": kept if is_key(kept) else ""}
    status = 401 if viewer is None else 403
    return render(site, request, "again.html", seen, viewer=viewer, title=form.title, nav=form.nav, status=status)


async def _send(site: Site, form: Form, request: Request, viewer: Viewer) -> Response:
    spent = functools.partial(site.rates.spend_time, viewer.user)
    try:
        _allow(form, viewer)
        with site.acts.bodies.room(viewer.user, int(request.headers.get("content-length", "0"))):
            fields = await read_form(request, form.most, spent)
            try:
                asking = _may_write(request, viewer, dict(fields))
            except OtherSessionError:
                return _again(site, form, request, viewer, fields)
            fields = {name: value for name, value in fields.items() if name not in ("csrf", "key")}
            done = await form.do(site, asking, fields, request.path_params)
    except SluiceError as error:
        return problem(site, request, _as_problem(error), viewer)
    if isinstance(done, Done):
        return _sent(request, done)
    began = time.thread_time()
    try:
        return render(site, request, form.template, done, viewer=viewer, title=form.title, nav=form.nav)
    finally:
        spent(time.thread_time() - began)


def _sent(request: Request, done: Done) -> Response:
    where, headers = local(done.where), {"cache-control": "no-store"}
    if done.said:
        said = quote(done.said[:_MOST_SAID], safe="")
        headers["set-cookie"] = f"{_SAID}={said}; Max-Age=60; Path=/; HttpOnly; SameSite=Lax"
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={**headers, "hx-redirect": where})
    return RedirectResponse(where, 303, headers)


def _allow(one: View | Form, viewer: Viewer) -> None:
    if one.operators and not viewer.operator:
        raise ProblemError(403, "this page is for operators of Slurm", remedy="ask one of them")


def _as_problem(error: SluiceError) -> ProblemError:
    if isinstance(error, ProblemError):
        return error
    return ProblemError(400 if error.usage else 503, error.what, remedy=error.remedy)


class OtherSessionError(ProblemError):
    """A form of a page that was made for another session, or by somebody else: it counts once its user has seen it."""


def _may_write(request: Request, viewer: Viewer, fields: dict[str, str]) -> Viewer:
    """The viewer, if the form is one of its own pages and it may write. Raises ProblemError 403."""
    if viewer.proof is None:
        raise read_only("a user whom a proxy names")
    if "write" not in viewer.scopes:
        raise read_only("this token")
    if not session.is_csrf(fields.pop("csrf", ""), viewer.proof):
        raise OtherSessionError(
            403, "the form is not from a page of this session", remedy="load the page again, then send it"
        )
    asked = Asked(request.state.request_id, fields.pop("key", "") or None, request.state.address)
    return replace(viewer, asked=asked)
