"""Log-in at a real OpenID Connect provider, which runs on this host, by its forms; and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from sluice.base import oidc
from sluice.base.oidc import Settings
from sluice.base.tokens import TokenStore
from sluice.exchange.snapshot import parse_answer
from sluice.serve.gateway.keys import Caller, Keys
from sluice.serve.gateway.refusals import RefusalError
from sluice.web import session
from sluice.web.app import make_app
from sluice.web.endpoint import PREFIX
from sluice.web.login import Proxy
from sluice.web.serve import make_site
from tests.unit.web.test_access import a_snapshot

ROOT = Path(__file__).parents[3]
MODULES = ROOT / "build/web-tests"
HERE = "https://sluice.test"
REDIRECT = f"{HERE}/login/oidc/callback"
SECRET = "s e:c+r%t"  # what a header of HTTP has to quote


class Identity:
    """The provider's process."""

    def __init__(self, lasts: int = 300) -> None:
        self.lasts = lasts
        self.issuer = ""
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """At the same port, with a new key."""
        given = {
            "folder": str(MODULES), "port": urlsplit(self.issuer).port or 0, "redirect": REDIRECT, "secret": SECRET,
            "lasts": self.lasts,
        }  # fmt: skip
        self.process = subprocess.Popen(
            ["node", str(ROOT / "tests/web/provider.mjs"), json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.issuer = self.process.stdout.readline().strip()
        assert self.issuer.startswith("http://127.0.0.1:"), "the provider did not start"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _providers(lasts: int) -> Iterator[Identity]:
    if shutil.which("node") is None or not (MODULES / "node_modules/oidc-provider").is_dir():
        if os.environ.get("SLUICE_BROWSER") == "require":
            pytest.fail("make test installs Node.js and its packages")
        pytest.skip("needs Node.js and build/web-tests: make build/web-tests/.installed")
    made = Identity(lasts)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def identity() -> Iterator[Identity]:
    yield from _providers(300)


@pytest.fixture
def own_identity() -> Iterator[Identity]:
    """One that a test stops, or whose tokens are over at once."""
    yield from _providers(2)


class Browser:
    """A client with cookies, of the application in this process and of the provider."""

    def __init__(self, app: Any) -> None:
        transport = httpx.ASGITransport(app, client=("10.1.1.1", 1))
        mounts = {HERE: transport}
        self.http = httpx.AsyncClient(mounts=mounts, base_url=HERE, trust_env=False, timeout=20)
        self.seen: list[httpx.Response] = []

    async def get(self, url: str, **headers: str) -> httpx.Response:
        """With redirects."""
        said = await self.http.get(url, headers=headers, follow_redirects=True)
        self.seen += [*said.history, said]
        return said

    async def log_in(self, user: str, said: httpx.Response) -> httpx.Response:
        """Through the provider's forms."""
        for _ in range(4):
            form = re.search(r'action="([^"]+)"', said.text)
            if said.url.host != "127.0.0.1" or form is None:
                break
            prompt = re.search(r'name="prompt" value="(\w+)"', said.text)
            assert prompt is not None, said.text
            fields = {"prompt": prompt[1], "login": user, "password": "x"}
            said = await self.http.post(form[1], data=fields, follow_redirects=True)
            self.seen += [*said.history, said]
        return said

    def names(self) -> set[str]:
        return {cookie.name for cookie in self.http.cookies.jar}

    def token(self) -> str:
        """The session's."""
        given = {cookie.name: cookie.value or "" for cookie in self.http.cookies.jar}
        proof = session.proof_in(given, secure=True)
        assert proof is not None and proof.kind == "oidc"
        return proof.text


class World:
    """The application with a provider."""

    def __init__(self, folder: Path, identity: Identity, **change: Any) -> None:
        secret = folder / "secret"
        secret.write_text(SECRET + "\n")
        settings = Settings(
            **{
                "issuer": identity.issuer, "client_id": "sluice", "redirect_uri": REDIRECT,
                "client_secret_file": secret, "name": "Lab ID", **change,
            }
        )  # fmt: skip
        self.site = make_site(folder / "socket", folder / "tokens.json", Proxy(), settings)
        self.site.store.apply(parse_answer(a_snapshot(["jobs"]).after("", 0)))
        self.app = make_app(self.site, follow=False)

    def browser(self) -> Browser:
        return Browser(self.app)


Play = Callable[[Browser], Awaitable[None]]


def play(world: World, act: Play) -> None:
    """With a browser."""

    async def main() -> None:
        browser = world.browser()
        async with browser.http:
            await act(browser)

    asyncio.run(main())


def test_log_in_and_see_my_jobs(tmp_path: Path, identity: Identity) -> None:
    world = World(tmp_path, identity)

    async def act(browser: Browser) -> None:
        page = await browser.get("/?x=1")
        assert page.url.path == "/login" and "Lab ID" in page.text
        link = re.search(r'href="(/login/oidc[^"]*)"', page.text)
        assert link is not None
        asked = await browser.http.get(link[1].replace("&amp;", "&"))
        sent = parse_qs(urlsplit(asked.headers["location"]).query)
        assert sent["code_challenge_method"] == ["S256"] and sent["state"] and sent["nonce"] and "prompt" not in sent
        cookie = asked.headers["set-cookie"]
        assert all(word in cookie for word in ("__Host-", "HttpOnly", "Secure", "SameSite=Lax", "Max-Age=600"))
        page = await browser.log_in("alice", await browser.get(asked.headers["location"]))
        assert (page.status_code, str(page.url)) == (200, f"{HERE}/?x=1") and "alice" in page.text
        assert not [name for name in browser.names() if "login" in name], "what the log-in needed is gone"
        mine = (await browser.get(f"{PREFIX}/jobs")).json()
        assert {job["id"] for job in mine["jobs"]} == {1, 4}
        assert (await browser.get(f"{PREFIX}/whoami")).json()["user"] == "alice"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url=HERE) as program:
            sent_token = {"authorization": f"Bearer {browser.token()}"}
            assert (await program.get(f"{PREFIX}/whoami", headers=sent_token)).json()["user"] == "alice"
        out = await browser.http.post("/logout", data={"csrf": "x"})
        assert out.status_code == 403, "not from a page of this session"
        value = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert value is not None
        out = await browser.http.post("/logout", data={"csrf": value[1]}, follow_redirects=True)
        assert out.url.path == "/login" and f"{identity.issuer}/session/end" in out.text
        assert (await browser.http.get(f"{PREFIX}/whoami")).status_code == 401

    play(world, act)


def test_a_token_that_is_over_is_renewed_without_a_question_or_ends(tmp_path: Path, own_identity: Identity) -> None:
    world = World(tmp_path, own_identity)

    async def act(browser: Browser) -> None:
        await browser.log_in("alice", await browser.get("/login/oidc?next=/"))
        first = browser.token()
        await asyncio.sleep(2.5)
        said = await browser.http.get(f"{PREFIX}/whoami")
        assert said.status_code == 401 and "over" in said.json()["detail"]
        browser.seen.clear()
        page = await browser.get("/?x=2")
        assert (page.status_code, str(page.url)) == (200, f"{HERE}/?x=2")
        assert any("prompt=none" in str(one.url) for one in browser.seen), "nobody was asked"
        assert browser.token() != first
        await asyncio.sleep(2.5)
        for cookie in [one for one in browser.http.cookies.jar if one.domain == "127.0.0.1"]:
            browser.http.cookies.delete(cookie.name, cookie.domain, cookie.path)
        page = await browser.get("/?x=3")
        assert page.url.path == "/login" and "next=%2F%3Fx%3D3" in str(page.url), "the provider has to ask"
        assert "__Host-sluice" not in browser.names()
        codes = [(await browser.http.get(f"{PREFIX}/whoami")).status_code for _ in range(60)]
        assert set(codes) == {401}, "a session that has ended is no refused log-in"

    play(world, act)


async def at_a_gateway(world: World, text: str) -> Caller:
    """Who calls a model with a token, by the keys that a gateway reads of the provider itself. Raises RefusalError."""
    assert world.site.login.provider is not None
    keys = Keys(TokenStore(Path("/nonexistent")), oidc.Provider(world.site.login.provider.settings))
    found = keys.check(f"Bearer {text}".encode(), "10.1.1.1")
    return found if isinstance(found, Caller) else await keys.check_later(found, "10.1.1.1")


def _forged(text: str, key: RSAKey, header: dict[str, Any], **change: Any) -> str:
    claims = {**oidc._part(text, 1), **change}
    return jwt.encode({**oidc._part(text, 0), **header}, claims, key, algorithms=["RS256"])


def test_tokens_of_others_are_refused(tmp_path: Path, identity: Identity) -> None:
    world = World(tmp_path, identity)
    other = World(tmp_path, identity, client_id="other")
    texts = []

    async def of_other(browser: Browser) -> None:
        await browser.log_in("alice", await browser.get("/login/oidc"))
        texts.append(browser.token())

    play(other, of_other)

    async def act(browser: Browser) -> None:
        await browser.log_in("alice", await browser.get("/login/oidc"))
        good = browser.token()
        key = RSAKey.generate_key(2048)
        bad = [
            *texts,  # for another client
            _forged(good, key, {}),  # another's key
            _forged(good, key, {"kid": "x"}),
            _forged(good, key, {}, iss=f"{identity.issuer}/"),
            good[:-4] + "AAAA",
        ]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url=HERE) as program:
            for text in bad:
                for headers in ({"authorization": f"Bearer {text}"}, {"cookie": f"__Host-sluice=oidc:{text}"}):
                    said = await program.get(f"{PREFIX}/whoami", headers=headers)
                    assert said.status_code == 401, said.text
            plain = await program.get(f"{PREFIX}/whoami", headers={"cookie": f"sluice=oidc:{good}"})
            assert plain.status_code == 401, "over TLS only a cookie that only this host can have set"
        assert (await at_a_gateway(world, good)).user == "alice"
        for text in bad:
            with pytest.raises(RefusalError, match="token"):
                await at_a_gateway(world, text)

    play(world, act)


@pytest.mark.parametrize("name", ["root", "Alice", "alice@site.org", "../x"])
def test_an_account_that_names_no_user_is_refused(tmp_path: Path, identity: Identity, name: str) -> None:
    async def act(browser: Browser) -> None:
        page = await browser.log_in(name, await browser.get("/login/oidc"))
        assert page.status_code == 401 and "not a user" in page.text and "__Host-sluice" not in browser.names()

    play(World(tmp_path, identity), act)


def test_a_log_in_is_of_the_browser_that_began_it_and_once(tmp_path: Path, identity: Identity) -> None:
    world = World(tmp_path, identity)

    async def act(browser: Browser) -> None:
        thief = world.browser()
        await browser.log_in("alice", await browser.get("/login/oidc?next=/"))
        back = next(one for one in browser.seen if one.url.path == "/login/oidc/callback")
        for who in (thief, browser):
            said = await who.http.get(str(back.url))
            assert said.status_code == 400 and "not begun in this browser" in said.text
        begun = await thief.http.get("/login/oidc")
        mine = parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]
        for state in ("", "x", mine[:-1], f"{mine}x", mine[:12]):
            said = await thief.http.get("/login/oidc/callback", params={"state": state, "code": "x"})
            assert said.status_code == 400, state
        said = await thief.http.get("/login/oidc/callback", params={"state": mine, "code": "x", "iss": "https://x"})
        assert said.status_code == 400
        begun = await thief.http.get("/login/oidc")
        mine = parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]
        said = await thief.http.get("/login/oidc/callback", params={"state": mine, "code": "x"})
        assert said.status_code == 401 and "__Host-sluice" not in thief.names()
        assert not [name for name in thief.names() if mine[:12] in name], "it cannot be tried again"
        await thief.http.aclose()

    play(world, act)


def test_a_token_of_another_log_in_is_refused(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, identity)
    real = oidc.fetch
    kept: list[tuple[int, dict[str, Any]]] = []

    def replayed(*given: Any) -> tuple[int, dict[str, Any]]:
        kept.append(real(*given))
        return kept[0]

    async def act(browser: Browser) -> None:
        await browser.get("/login")
        monkeypatch.setattr(oidc, "fetch", replayed)
        await browser.log_in("alice", await browser.get("/login/oidc"))
        assert browser.token()
        thief = world.browser()
        page = await thief.log_in("mallory", await thief.get("/login/oidc"))
        assert page.status_code == 401 and "another log-in" in page.text and "__Host-sluice" not in thief.names()
        await thief.http.aclose()

    play(world, act)


def test_a_new_key_is_found_and_while_the_provider_is_away_sessions_go_on(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "_AGAIN_S", 0.0)
    own = Identity(300)
    world = World(tmp_path, own)
    token = world.site.login.tokens.create("bob", ["read"], now=time.time(), seconds=60)[1]

    async def act(browser: Browser) -> None:
        await browser.log_in("alice", await browser.get("/login/oidc"))
        own.stop()
        assert (await browser.get(f"{PREFIX}/whoami")).status_code == 200
        world.site.login._known.clear()
        assert (await browser.get(f"{PREFIX}/whoami")).status_code == 200, "its keys are known"
        late = world.browser()
        unknown = {"authorization": f"Bearer {_forged(browser.token(), RSAKey.generate_key(2048), {'kid': 'new'})}"}
        said = await late.http.get(f"{PREFIX}/whoami", headers=unknown)
        assert said.status_code == 401
        page = await late.get("/login")
        assert "does not answer now" in page.text
        entered = await late.http.post("/login", data={"token": token, "next": "/"})
        assert entered.status_code == 303, "others log in"
        own.start()
        await late.http.aclose()
        late = world.browser()
        page = await late.log_in("alice", await late.get("/login/oidc"))
        assert page.status_code == 200 and late.token() != browser.token(), "with the new key"
        assert "does not answer now" not in (await world.browser().get("/login")).text
        await late.http.aclose()

    try:
        play(world, act)
    finally:
        own.stop()


def test_a_provider_that_was_never_there(tmp_path: Path, own_identity: Identity) -> None:
    own_identity.stop()
    world = World(tmp_path, own_identity)

    async def act(browser: Browser) -> None:
        page = await browser.get("/login/oidc?next=/jobs")
        assert page.status_code == 503 and "refused" in page.text and 'value="/jobs"' in page.text
        forged = jwt.encode({"alg": "RS256"}, {"iss": own_identity.issuer}, RSAKey.generate_key(2048))
        said = await browser.http.get(f"{PREFIX}/whoami", headers={"authorization": f"Bearer {forged}"})
        assert said.status_code == 503 and said.headers["retry-after"]

    play(world, act)
