"""What one client can send, whoever it is: it fails, and what it costs is counted as its own."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest

from sluice.exchange.acts import Proof
from sluice.web import limits
from sluice.web.endpoint import PREFIX
from sluice.web.pages.routes import local
from sluice.web.problems import ProblemError
from sluice.web.session import csrf
from sluice.web.single_sign_on import AskError, Begun, SingleSignOn
from tests.unit.web.test_access import Web
from tests.unit.web.test_login_page import send

FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("text", ["//[", "//[x]:y", "http://[", "//evil.org", "/\\evil.org", "\t//x", "/\t/x", ""])
def test_no_address_of_another_site_and_none_that_fails(text: str) -> None:
    assert local(text) == "/"


def test_a_log_in_with_a_broken_address_is_a_log_in(tmp_path: Path) -> None:
    assert send(Web(tmp_path, []), "GET", "/login", params={"next": "//["}).status_code == 200


def test_choosing_a_language_is_counted_as_any_request_without_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 1000.0))  # no budget refills meanwhile
    web = Web(tmp_path, [])
    said = [send(web, "GET", "/?lang=zh").status_code for _ in range(650)]
    assert said == [303] * 600 + [429] * 50


def token_that_writes(web: Web, user: str = "alice") -> dict[str, str]:
    _, text = web.site.login.tokens.create(user, ["read", "write"], now=time.time(), seconds=60)
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("kind", ["form", "json", "unread form"])
def test_what_a_body_takes_to_be_read_is_its_users(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web(tmp_path, [])
    mine = {"authorization": f"Bearer {web.token('alice')}"} if kind == "unread form" else token_that_writes(web)
    spent: list[float] = []
    monkeypatch.setattr(web.site.rates, "spend_time", lambda user, seconds: spent.append(seconds))
    if kind == "json":
        head = {**mine, "content-type": "application/json"}
        said = send(web, "POST", f"{PREFIX}/jobs", headers=head, content='{"a":[' + "[]," * 600_000 + "[]]}")
        assert said.status_code == 422
        assert any(one > 0.02 and one != len(said.request.content) * limits.BYTE_S for one in spent)
    else:
        said = send(web, "POST", "/submit", headers={**mine, **FORM}, content="script=" + "%41" * 600_000)
        assert said.status_code == 403
        assert max(spent, default=0) > 0.02


def test_a_length_with_zeros_before_it_is_none(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    head = {**token_that_writes(web), "content-type": "application/json", "content-length": "0" * 4500 + "2"}
    assert send(web, "POST", f"{PREFIX}/jobs", headers=head, content=b"{}").status_code == 413


@pytest.mark.parametrize("name", ["nonce", "verifier", "next"])
def test_a_cookie_of_a_log_in_with_other_values_is_none(name: str, tmp_path: Path) -> None:
    begun = {"state": "s" * 43, "nonce": "n", "verifier": "v", "next": "/", "silent": False, name: 5}
    value = urlsafe_b64encode(json.dumps(begun).encode()).decode()
    given = {f"__Host-sluice-login-{'s' * 12}": value}
    with pytest.raises(ProblemError, match="not begun in this browser"):
        SingleSignOn(Web(tmp_path, []).site.login).begun("s" * 43, given, secure=True)


@pytest.mark.parametrize("head", [{"sec-fetch-site": "cross-site"}, {"origin": "https://evil.org"}, {"origin": "null"}])
def test_no_other_site_ends_a_session_by_a_form(head: dict[str, str], tmp_path: Path) -> None:
    said = send(Web(tmp_path, []), "POST", "/logout", headers=head, data={"csrf": "x"})  # its cookie is not sent
    assert said.status_code == 403 and "set-cookie" not in said.headers


def test_no_other_site_ends_a_session_by_asking_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_known(self: SingleSignOn, begun: Begun, said: object) -> Proof:
        raise AskError("login_required")

    monkeypatch.setattr(SingleSignOn, "finish", not_known)
    web, begun = Web(tmp_path, []), Begun("s" * 43, "n", "v", "/jobs", silent=True)
    began = begun.cookie(secure=True).partition(";")[0]
    for token, kept in ((web.token("alice"), True), ("sluice_over", False)):
        session = f"__Host-sluice=sluice:{token}"
        said = send(web, "GET", f"/login/oidc/callback?state={begun.state}", headers={"cookie": f"{began}; {session}"})
        assert said.status_code == 303
        assert any(one.startswith("__Host-sluice=;") for one in said.headers.get_list("set-cookie")) is not kept


def test_the_first_of_all_days_has_none_before_it(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    head = {"authorization": f"Bearer {web.token('alice')}"}
    assert send(web, "GET", "/reports?until=0001-01-05", headers=head).status_code == 400


@pytest.mark.parametrize(
    ("gpus", "status", "asked"),
    [("0, 3", 303, [0, 3]), ("", 303, []), ("0;1", 422, None), ("all", 422, None), ("9" * 5000, 422, None)],
)
def test_what_is_no_gpu_does_not_return_all_of_them(gpus: str, status: int, asked: object, tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["health-return"] = {"schema_version": 1, "node": "n1", "done": ["done"]}
    head = token_that_writes(web, "oscar")
    text = head["authorization"].removeprefix("Bearer ")
    form = {"node": "n1", "gpus": gpus, "csrf": csrf(Proof("sluice", text))}
    assert send(web, "POST", "/health/return", headers=head, data=form).status_code == status
    assert [one.words.get("gpus") for one in web.acted] == ([] if asked is None else [asked])
