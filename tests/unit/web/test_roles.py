"""Every endpoint and every page with every kind of log-in: who may read, who may write, and who is sent to log in."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from sluice.base.errors import SluiceError
from sluice.base.oidc import Provider
from sluice.exchange.acts import Proof
from sluice.web import session
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import PREFIX
from sluice.web.login import Proxy
from sluice.web.pages import FORMS, VIEWS
from tests.unit.base import test_oidc as identity
from tests.unit.web.test_access import PATHS, Web
from tests.unit.web.test_writes import BODIES

USER = "oscar"  # an operator: what is refused is refused for how it logged in
PROXY = "10.0.0.5"
NAMES_IN = {**PATHS, "silence": "12345678", "act": "cancel", "change": "pause", "name": "n1"}
FIELDS = {"node": "n1", "rule": "x", "subject": "*", "seconds": "3600", "do": "check", "text": "tenants: {}",
          "script": "#!/bin/sh\n", "hash": "0" * 64}  # fmt: skip
DOES = ("cancel", "health-return", "silence", "silence-end", "policy-check", "service-change")
OF_PROOFS = {"/audit", "/policy/drift", "/jobs/{job}/profile"}  # read by root's helper, which wants a proof

Headers = dict[str, str]
Make = Callable[[Web], Proof]


@dataclass(frozen=True)
class Kind:
    """How a caller logs in, and what it may do."""

    name: str
    headers: Callable[[Web], Headers]
    reads: bool = True
    writes: bool = True
    forms: bool = False
    """Whether forms of pages are its own."""
    peer: str = ""


def sluice(*scopes: str, ago: float = 0.0, revoked: bool = False) -> Make:
    def make(web: Web) -> Proof:
        token, text = web.site.login.tokens.create(USER, scopes, now=time.time() - ago, seconds=60)
        if revoked:
            web.site.login.tokens.revoke([token.id])
        return Proof("sluice", text)

    return make


def slurm(good: bool = True) -> Make:
    return lambda web: Proof("slurm", "good.b.c" if good else "over.b.c")


def oidc(ago: float = 0.0) -> Make:
    def make(web: Web) -> Proof:
        now = time.time() - ago
        return Proof("oidc", identity.token(iat=now, exp=now + 300, preferred_username=USER))

    return make


def bearer(make: Make) -> Callable[[Web], Headers]:
    return lambda web: {"authorization": f"Bearer {make(web).text}"}


def cookie(make: Make, *, csrf: bool = True) -> Callable[[Web], Headers]:
    def headers(web: Web) -> Headers:
        proof = make(web)
        pieces = [one.partition(";")[0] for one in session.cookies(proof, secure=True)]
        return {"cookie": "; ".join(pieces), **({"x-csrf-token": session.csrf(proof)} if csrf else {})}

    return headers


def named(name: str) -> Callable[[Web], Headers]:
    return lambda web: {name: USER}


READ, WRITE = ("read",), ("read", "write")
NOT = {"reads": False, "writes": False}
KINDS = [
    Kind("nobody", lambda web: {}, **NOT),
    Kind("a password", lambda web: {"authorization": "Basic cm9vdDpyb290"}, **NOT),
    Kind("a token that reads", bearer(sluice(*READ)), writes=False),
    Kind("a cookie that reads", cookie(sluice(*READ)), writes=False),
    Kind("a token that writes", bearer(sluice(*WRITE))),
    Kind("a cookie that writes", cookie(sluice(*WRITE)), forms=True),
    Kind("a cookie that another site makes a browser send", cookie(sluice(*WRITE), csrf=False), writes=False),
    Kind("a token of Slurm", bearer(slurm())),
    Kind("a token of Slurm as Slurm's API takes it", lambda web: {"x-slurm-user-token": slurm()(web).text}),
    Kind("a cookie of Slurm", cookie(slurm()), forms=True),
    Kind("an identity token", bearer(oidc())),
    Kind("a cookie of an identity token", cookie(oidc()), forms=True),
    Kind("a proxy", named("x-remote-user"), writes=False, peer=PROXY),
    Kind("a proxy, and a cookie that is over", lambda web: {**named("x-remote-user")(web), **cookie(oidc(900))(web)},
         writes=False, peer=PROXY),
    Kind("a proxy, and a cookie that writes", lambda web: {**named("x-remote-user")(web), **cookie(oidc())(web)},
         forms=True, peer=PROXY),
    Kind("who says to be a proxy", named("x-remote-user"), **NOT),
    Kind("a token that is over", bearer(sluice(*WRITE, ago=100)), **NOT),
    Kind("a cookie that is over", cookie(sluice(*WRITE, ago=100)), **NOT),
    Kind("a token that was revoked", bearer(sluice(*WRITE, revoked=True)), **NOT),
    Kind("a cookie that was revoked", cookie(sluice(*WRITE, revoked=True)), **NOT),
    Kind("a token of Slurm that is over", bearer(slurm(False)), **NOT),
    Kind("an identity token that is over", bearer(oidc(900)), **NOT),
    Kind("a cookie of an identity token that is over", cookie(oidc(900)), **NOT),
]  # fmt: skip


class Caller:
    """One who calls in a kind."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.web = Web(folder, [])
        self.kind = kind
        login = self.web.site.login
        login.proxy = Proxy([ipaddress.ip_network(PROXY)])
        keys = identity.World(identity.RSA)
        login.provider = Provider(identity.SETTINGS, keys.fetch)
        other = self.web.site.feed.ask

        async def ask(do: str, **words: Any) -> dict[str, Any]:
            if do != "jwt":
                return await other(do, **words)
            if words["token"] != "good.b.c":
                raise SluiceError("token: over")
            return {"user": USER, "expires": time.time() + 60}

        login.feed.ask = ask  # type: ignore[method-assign]
        done = {
            "messages": [],
            "node": "n1",
            "done": [],
            "until": 1.0,
            "id": "1",
            "mistakes": [],
            "tenants": 1,
            "unenforced": [],
        }
        self.web.acts.update(dict.fromkeys(DOES, done))
        self.headers = kind.headers(self.web)
        self._networks = count()

    def send(self, method: str, path: str, **words: Any) -> httpx.Response:
        """A request, each from another network: what is refused often is another test's."""
        number = next(self._networks)
        peer = self.kind.peer or f"10.{1 + number // 250}.{number % 250}.1"

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.web.app, client=(peer, 1))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="https://web") as client:
                return await client.request(method, path, headers=self.headers, **words)

        return asyncio.run(call())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_endpoint_with_every_log_in(tmp_path: Path, kind: Kind) -> None:
    caller = Caller(tmp_path, kind)
    web = caller.web
    for one in ENDPOINTS:
        path = PREFIX + one.path.format(**NAMES_IN)
        writes = one.scope == "write"
        said = caller.send(one.method, path, json=BODIES[one.body.__name__] if one.body else None)
        what = f"{one.method} {one.path}: {said.text[:300]}"
        if not kind.reads:
            assert said.status_code == 401 and "www-authenticate" in said.headers, what
        elif writes and not kind.writes:
            assert said.status_code == 403, what
        elif writes:
            assert said.status_code == one.status and web.acted.pop().proof.text in "".join(
                caller.headers.values()
            ), what
        else:
            assert said.status_code in ((200, 404, 403) if one.path in OF_PROOFS else (200, 404)), what
        if one.path not in OF_PROOFS:
            assert not web.acted, f"{what}: root's helper was asked"
        web.acted.clear()
    if kind.reads:
        assert caller.send("GET", f"{PREFIX}/whoami").json()["user"] == USER


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_page_with_every_log_in(tmp_path: Path, kind: Kind) -> None:
    caller = Caller(tmp_path, kind)
    for view in VIEWS:
        path = view.path.format(**NAMES_IN)
        said = caller.send("GET", path)
        what = f"{view.path}: {said.status_code} {said.text[:300]}"
        if kind.reads:
            assert said.status_code in ((200, 404, 403) if view.path in OF_PROOFS else (200, 404)), what
            assert f'<span class="user">{USER}</span>' in said.text, what
        else:
            assert said.status_code == 303, what
            assert said.headers["location"] == f"/login?next={quote(path, safe='')}", what
        assert ("script-src 'self'" in said.headers["content-security-policy"]) is (said.status_code != 303)
    caller.web.acted.clear()
    for form in FORMS:
        fields = {**FIELDS, "csrf": caller.headers.get("x-csrf-token", "")}
        said = caller.send("POST", form.path.format(**NAMES_IN), data=fields)
        what = f"{form.path}: {said.status_code} {said.text[:300]}"
        if not kind.reads:
            assert said.status_code == 401, what
        elif not kind.forms:
            assert said.status_code == 403, what
        else:
            assert said.status_code in (200, 303), what
        assert bool(caller.web.acted) is kind.forms, what
        caller.web.acted.clear()


def test_what_is_walked_is_all(tmp_path: Path) -> None:
    app: Any = Web(tmp_path, []).app.app
    walked = {PREFIX + one.path for one in ENDPOINTS} | {one.path for one in (*VIEWS, *FORMS)}
    others = {route.path for route in app.routes} - walked
    assert others == {
        f"{PREFIX}/openapi.json", f"{PREFIX}/stream", "/static/{digest}/{name:path}", "/login", "/logout",
        "/login/oidc", "/login/oidc/callback",
    }  # fmt: skip


def test_the_stream_is_for_who_may_read(tmp_path: Path) -> None:
    for kind in KINDS:
        if not kind.reads:
            folder = tmp_path / kind.name
            folder.mkdir()
            assert Caller(folder, kind).send("GET", f"{PREFIX}/stream").status_code == 401
