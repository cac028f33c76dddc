"""Logging in with a token, and out: cookies, forms of other sites, addresses of other sites, and too many tries."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.acts import Proof
from sluice.web import session
from sluice.web.endpoint import PREFIX
from sluice.web.login import Proxy
from sluice.web.problems import ProblemError
from tests.unit.web.test_access import Web

HTTPS = "https://web"


def send(web: Web, method: str, path: str, base: str = HTTPS, peer: str = "10.1.1.1", **words: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(web.app, client=(peer, 1))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **words)

    return asyncio.run(call())


def cookies(said: httpx.Response) -> dict[str, str]:
    return {one.partition("=")[0]: one for one in said.headers.get_list("set-cookie")}


def given(said: httpx.Response) -> dict[str, str]:
    """What a browser sends after it."""
    return {"cookie": "; ".join(one.partition(";")[0] for one in said.headers.get_list("set-cookie"))}


def test_a_token_becomes_a_session_which_ends(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    page = send(web, "GET", "/login?next=/jobs")
    assert page.status_code == 200 and 'name="next" value="/jobs"' in page.text and "single sign-on" not in page.text
    assert (
        "script-src 'self'" in page.headers["content-security-policy"] and page.headers["cache-control"] == "no-store"
    )
    said = send(web, "POST", "/login", data={"token": f" {web.token('alice')}\n", "next": "/jobs"})
    assert (said.status_code, said.headers["location"]) == (303, "/jobs")
    (cookie,) = [one for one in cookies(said).values() if "Max-Age=43200" in one]
    assert cookie.startswith("__Host-sluice=sluice:")
    assert all(word in cookie for word in ("HttpOnly", "SameSite=Lax", "Secure", "Path=/")) and "Domain" not in cookie
    mine = given(said)
    assert send(web, "GET", f"{PREFIX}/whoami", headers=mine).json()["user"] == "alice"
    assert send(web, "GET", "/login?next=/x", headers=mine).headers["location"] == "/x", "already"
    assert send(web, "GET", f"{PREFIX}/whoami", base="http://web", headers=mine).status_code == 401
    page = send(web, "GET", "/", headers=mine)
    value = re.search(r'action="/logout".*?name="csrf" value="([^"]+)"', page.text)
    assert value is not None, "who only reads can log out, too"
    assert send(web, "POST", "/logout", headers=mine).status_code == 415
    assert send(web, "POST", "/logout", headers=mine, data={"csrf": "x"}).status_code == 403
    out = send(web, "POST", "/logout", headers=mine, data={"csrf": value[1]})
    assert out.status_code == 303 and all("Max-Age=0" in one for one in cookies(out).values())
    assert "You have logged out" in send(web, "GET", out.headers["location"]).text


def test_without_tls_and_behind_a_proxy_with_it(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    words = {"data": {"token": web.token("alice")}, "base": "http://web"}
    plain = send(web, "POST", "/login", **words)
    assert "sluice" in cookies(plain) and "Secure" not in str(cookies(plain))
    assert "strict-transport-security" not in plain.headers
    behind = send(web, "POST", "/login", headers={"x-forwarded-proto": "http, https"}, **words)
    assert "__Host-sluice" in cookies(behind) and "strict-transport-security" in behind.headers


@pytest.mark.parametrize(
    "where",
    ["https://evil.example/", "//[",
     "//evil.example", "/\\evil.example", "\\\\evil.example", "/\t/evil.example", "/\n/evil",
     " //evil.example", "javascript:alert(1)", "evil.example", "", "///evil.example", "http:evil.example",
     "/x\r\nset-cookie: a=b"],
)  # fmt: skip
def test_nobody_is_sent_to_another_site(tmp_path: Path, where: str) -> None:
    web = Web(tmp_path, [])
    said = send(web, "POST", "/login", data={"token": web.token("alice"), "next": where})
    assert (said.status_code, said.headers["location"]) == (303, "/")
    assert send(web, "GET", "/login", params={"next": where}, headers=given(said)).headers["location"] == "/"
    assert 'name="next" value="/"' in send(web, "GET", "/login", params={"next": where}).text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://["}, 403),
        ({"origin": HTTPS}, 303),
        ({"sec-fetch-site": "same-origin", "origin": "https://inside"}, 303),
        ({}, 303),
    ],
)
def test_another_site_logs_nobody_in(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    web = Web(tmp_path, [])
    assert send(web, "POST", "/login", data={"token": web.token("alice")}, headers=headers).status_code == status


def test_refused_log_ins_are_counted_and_sessions_that_ended_are_not(tmp_path: Path) -> None:
    web = Web(tmp_path, [])

    async def ask(do: str, **words: Any) -> dict[str, Any]:
        raise SluiceError("token: its signature is not of this cluster's key")

    web.site.login.feed.ask = ask  # type: ignore[method-assign]
    said = send(web, "POST", "/login", data={"token": "sluice_x", "next": "/jobs"})
    assert said.status_code == 401 and 'value="/jobs"' in said.text and "sluice_x" not in said.text
    codes = [send(web, "POST", "/login", data={"token": "x.y.z"}).status_code for _ in range(60)]
    assert codes[0] == 401 and codes[-1] == 429
    good = send(web, "POST", "/login", data={"token": web.token("alice")})
    assert good.status_code == 429, "nobody tries more here"
    assert send(web, "POST", "/login", peer="10.9.9.9", data={"token": web.token("alice")}).status_code == 303
    codes = [send(web, "GET", "/jobs", peer="10.8.8.8").status_code for _ in range(60)]
    assert set(codes) == {303}, "who has no session has not failed"
    for bad in ({"token": "x" * 70_000}, {"token": "é"}, {"token": ""}, {f"f{n}": "" for n in range(500)}):
        said = send(web, "POST", "/login", peer="10.7.7.7", data=bad)
        assert said.status_code in (400, 401, 413), bad


def test_a_session_that_has_ended_is_taken_from_the_browser(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    mine = given(send(web, "POST", "/login", data={"token": web.token("alice")}))
    web.site.login.tokens.revoke([web.token("alice").split("_")[1]])
    assert send(web, "GET", "/jobs", headers=mine).headers["location"] == "/login?next=%2Fjobs"
    page = send(web, "GET", "/login?next=/jobs", headers=mine)
    assert "your session has ended" in page.text and "Max-Age=0" in cookies(page)["__Host-sluice"]


def test_a_long_token_is_several_cookies_and_a_strange_one_is_none() -> None:
    proof = Proof("oidc", "e" * 9000)
    made = session.cookies(proof, secure=True)
    assert len(made) == 3 and all(len(one) < 4096 for one in made)
    sent = dict(one.partition(";")[0].split("=", 1) for one in made)
    assert session.proof_in(sent, secure=True) == proof and session.proof_in(sent, secure=False) is None
    for bad in (Proof("oidc", "e" * 20_000), Proof("slurm", "a;b"), Proof("slurm", "a\r\nb"), Proof("slurm", "")):
        with pytest.raises(ValueError, match="cookie"):
            session.cookies(bad, secure=True)
    value, other = session.csrf(proof), session.csrf(proof)
    assert value != other and session.is_csrf(value, proof) and session.is_csrf(other, proof)
    mine = Proof("oidc", "f" * 9000)
    assert not any(session.is_csrf(one, mine) for one in (value, "", "x", value[:-1], "é" * 64))


def test_a_user_of_a_proxy_can_log_in_with_a_token_to_write(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.site.login.proxy = Proxy([ipaddress.ip_network("10.1.1.1")])
    named = {"x-remote-user": "alice"}
    page = send(web, "GET", "/", headers=named)
    assert page.status_code == 200 and 'action="/logout"' not in page.text
    assert send(web, "GET", "/login", headers=named).status_code == 200, "the page is there for who can only read"
    _, text = web.site.login.tokens.create("alice", ["read", "write"], now=time.time(), seconds=60)
    mine = given(send(web, "POST", "/login", headers=named, data={"token": text}))
    assert 'action="/logout"' in send(web, "GET", "/", headers={**named, **mine}).text


def test_each_kind_of_answer_has_its_headers_once(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    page = send(web, "GET", "/login")
    style = re.search(r'href="(/static/[^"]+app.css)"', page.text)
    assert style is not None
    pages = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    policies = {
        "/login": pages + "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
        "/nothing": pages + "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
        style[1]: "default-src 'none'; frame-ancestors 'none'",
        f"{PREFIX}/openapi.json": "default-src 'none'; frame-ancestors 'none'",
        f"{PREFIX}/jobs": "default-src 'none'; frame-ancestors 'none'",
    }
    for path, policy in policies.items():
        said = send(web, "GET", path)
        assert said.headers.get_list("content-security-policy") == [policy], path
        assert said.headers.get_list("x-content-type-options") == ["nosniff"], path
        assert said.headers.get_list("strict-transport-security") == ["max-age=31536000"], path
        assert ("immutable" in said.headers.get("cache-control", "")) is (path == style[1]), path
    assert "<script>" not in page.text and "style=" not in page.text and "onclick" not in page.text


def test_files_and_pages_count(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    style = re.search(r'href="(/static/[^"]+app.css)"', send(web, "GET", "/login").text)
    assert style is not None
    for path in (style[1], "/login", "/jobs", "/nothing"):
        peer = f"10.{len(path)}.0.1"
        with pytest.raises(ProblemError):
            for _ in range(10_000):
                web.site.rates.spend_address(peer)
        assert send(web, "GET", path, peer=peer).status_code == 429, path
    token = {"authorization": f"Bearer {web.token('alice')}"}
    assert send(web, "GET", "/", headers=token).status_code == 200
    with pytest.raises(ProblemError):
        for _ in range(10_000):
            web.site.rates.spend_user("alice")
    assert send(web, "GET", "/", headers=token).status_code == 429
