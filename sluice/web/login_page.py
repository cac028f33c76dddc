"""The pages of logging in and out: with a token, or at the site's provider."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluice.base.errors import SluiceError
from sluice.base.oidc import CALLBACK, ProviderError
from sluice.exchange.acts import Proof
from sluice.web import session
from sluice.web.endpoint import Site
from sluice.web.limits import MOST_BODY
from sluice.web.login import NobodyError
from sluice.web.pages.routes import local, read_form, render
from sluice.web.problems import ProblemError
from sluice.web.single_sign_on import AskError, SingleSignOn

OIDC = "/login/oidc"
_NO_STORE = {"cache-control": "no-store"}


class LoginPages:
    """The handlers."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.sign_on = SingleSignOn(site.login)

    def routes(self) -> list[Route]:
        """Theirs."""
        return [
            Route("/login", self.show),
            Route("/login", self.enter, methods=["POST"]),
            Route("/logout", self.leave, methods=["POST"]),
            Route(OIDC, self.begin),
            Route(CALLBACK, self.finish),
        ]

    async def warm(self) -> None:
        """Ask the provider, so that the first log-in does not wait; one that is away is asked again by log-ins."""
        if self.site.login.provider is not None:
            with suppress(ProviderError):
                await self.sign_on.endpoints()

    async def show(self, request: Request) -> Response:
        """The log-in page; who has logged in goes on, and an identity token that is over is renewed silently."""
        self.site.rates.spend_address(request.state.address)
        where = local(request.query_params.get("next", "/"))
        proof = session.proof_in(request.cookies, secure=request.state.secure)
        if proof is None:
            return self._page(request, where)
        try:
            viewer = await self._viewer(request)
        except NobodyError:
            if proof.kind == "oidc" and self.site.login.provider is not None:
                return _to(f"{OIDC}?silent=1&next={quote(where, safe='')}")
            return self._ended(request, where)
        except ProblemError as error:
            return self._ended(request, where) if error.status == 401 else self._page(request, where, error)
        return _to(where) if viewer.by_cookie else self._ended(request, where)

    async def enter(self, request: Request) -> Response:
        """A session begins with a token."""
        address = request.state.address
        self.site.rates.spend_address(address)
        if not _is_own(request):
            raise ProblemError(403, "the form is of another site", remedy="load the log-in page, then send it")
        fields = await read_form(request, MOST_BODY)
        where = local(fields.get("next", "/"))
        try:
            self.site.rates.may_fail(address)
            viewer = await self.site.login.of_text(fields.get("token", "").strip(), address)
            assert viewer.proof is not None  # noqa: S101 - it is the token
            return self._begins(request, viewer.proof, where)
        except ProblemError as error:
            return self._page(request, where, self._counted(error, address))

    async def leave(self, request: Request) -> Response:
        """A session ends."""
        secure = request.state.secure
        self.site.rates.spend_address(request.state.address)
        if not _is_own(request):  # without SameSite's cookie, and its answer would end the session
            raise ProblemError(403, "the form is of another site", remedy="load a page, then log out there")
        proof = session.proof_in(request.cookies, secure=secure)
        fields = await read_form(request, MOST_BODY)
        if proof is not None and not session.is_csrf(fields.get("csrf", ""), proof):
            raise ProblemError(403, "the form is not from a page of this session", remedy="load the page again")
        kind = "" if proof is None else proof.kind
        return _to(f"/login?out={kind}", session.cookies(None, secure=secure))

    async def begin(self, request: Request) -> Response:
        """To the provider."""
        self.site.rates.spend_address(request.state.address)
        where = local(request.query_params.get("next", "/"))
        silent = "silent" in request.query_params
        try:
            url, cookies = await self.sign_on.begin(where, request.cookies, silent=silent, secure=request.state.secure)
        except SluiceError as error:
            return self._page(request, where, _as_problem(error))
        return _to(url, cookies)

    async def finish(self, request: Request) -> Response:
        """Back from the provider."""
        address, secure = request.state.address, request.state.secure
        self.site.rates.spend_address(address)
        self.site.rates.may_fail(address)
        said = dict(request.query_params)
        try:
            begun = self.sign_on.begun(said.get("state", ""), request.cookies, secure=secure)
        except ProblemError as error:
            return self._page(request, "/", error)
        gone = self.sign_on.forget(begun, secure=secure)
        where = local(begun.next)
        try:
            return self._begins(request, await self.sign_on.finish(begun, said), where, [gone])
        except AskError:
            over = [] if await self._goes_on(request) else session.cookies(None, secure=secure)
            return _to(f"/login?next={quote(where, safe='')}", [gone, *over])
        except SluiceError as error:
            page = self._page(request, where, self._counted(_as_problem(error), address))
            return _with(page, [gone])

    async def _viewer(self, request: Request) -> Any:
        peer = request.client.host if request.client else ""
        return await self.site.login.viewer(request.headers, peer, request.state.address, request.state.secure)

    async def _goes_on(self, request: Request) -> bool:
        """Whether there is a session already, which other sites cannot end."""
        with suppress(ProblemError):
            return bool((await self._viewer(request)).by_cookie)
        return False

    def _begins(self, request: Request, proof: Proof, where: str, cookies: Sequence[str] = ()) -> Response:
        try:
            made = session.cookies(proof, secure=request.state.secure)
        except ValueError as error:
            raise ProblemError(
                400, f"a token of {len(proof.text)} characters, too long for a browser",
                remedy="let the provider put less into it, as groups, or log in with a token of Sluice",
            ) from error  # fmt: skip
        return _to(where, [*cookies, *made])

    def _counted(self, error: ProblemError, address: str) -> ProblemError:
        """The error, or that there were too many."""
        if error.status == 401:
            try:
                self.site.rates.failed(address)
            except ProblemError as too_many:
                return too_many
        return error

    def _ended(self, request: Request, where: str) -> Response:
        """The log-in page, for a session that has ended."""
        over = ProblemError(200, "your session has ended", remedy="log in again")
        return _with(self._page(request, where, over), session.cookies(None, secure=request.state.secure))

    def _page(self, request: Request, where: str, problem: ProblemError | None = None) -> Response:
        provider, out = self.site.login.provider, request.query_params.get("out")
        seen = {
            "next": where, "problem": problem, "out": out is not None,
            "provider": None if provider is None else provider.settings.name,
            "away": provider is not None and provider.problem != "",
            "end": self.sign_on.end_url() if out == "oidc" and provider is not None else None,
        }  # fmt: skip
        status = 200 if problem is None else problem.status
        headers = {} if problem is None else problem.headers
        return render(self.site, request, "login.html", seen, title="Log in", status=status, headers=headers)


def _is_own(request: Request) -> bool:
    """Whether a form is from a page of this site: there is no session yet that could tell."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def _as_problem(error: SluiceError) -> ProblemError:
    if isinstance(error, ProblemError):
        return error
    return ProblemError(503 if isinstance(error, ProviderError) else 401, error.what, remedy=error.remedy)


def _to(where: str, cookies: Sequence[str] = ()) -> Response:
    return _with(RedirectResponse(where, 303, _NO_STORE), cookies)


def _with(answer: Response, cookies: Sequence[str]) -> Response:
    for cookie in cookies:
        answer.headers.append("set-cookie", cookie)
    return answer
