"""Services in the page: what its views get, and what their forms ask of root's helper."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.acts import ActError
from sluice.web.pages.services import thinned
from sluice.web.series import ServiceSeries
from tests.unit.web.test_access import Web, service_rows
from tests.unit.web.test_pages import fetch, field_of
from tests.web.demo_site import Demo, DemoSite


@pytest.fixture
def site(tmp_path: Path) -> DemoSite:
    return DemoSite(Demo(40), tmp_path)


def test_the_list_has_state_replicas_what_waits_and_who_may_call(site: DemoSite) -> None:
    row = re.search(r'<tr id="s-deepseek-7b".*?</tr>', fetch(site, "/services", "root").text, re.DOTALL)
    assert row is not None
    text = " ".join(re.sub("<[^>]*>", " ", row[0]).split())
    assert text == "deepseek-7b ✓ ready 2 ready, 1 starting, 1 draining, at most 4 7 186,420 99 % language all"
    theirs = fetch(site, "/services", "alice").text
    assert "186,420" not in theirs, "use is private at this site"
    assert "/services/bge-m3" in theirs and "/services/bge-m3" not in fetch(site, "/services", "grace").text


def test_the_first_call_is_a_command_that_a_shell_takes(site: DemoSite) -> None:
    text = fetch(site, "/services/deepseek-7b", "alice").text
    shown = re.search(r'<pre id="call"[^>]*>(.*?)</pre>', text, re.DOTALL)
    assert shown is not None and "sluice token create alice --scope serve" in text
    call = shown[1].replace("&#34;", '"').replace("&#39;", "'")
    words = shlex.split(call)
    assert words[:2] == ["curl", "https://models.lab.org/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "deepseek-7b"


def test_a_callers_own_limits_are_on_the_page_of_services(site: DemoSite) -> None:
    def rows(user: str) -> list[str]:
        own = re.search(r'<section id="own".*?</section>', fetch(site, "/services", user).text, re.DOTALL)
        assert own is not None
        found = re.findall(r"<tr><th.*?</tr>", own[0].partition("<tbody>")[2], re.DOTALL)
        return [" ".join(re.sub("<[^>]*>", " ", row).split()) for row in found]

    assert rows("alice") == [
        "Requests a minute yours 31 120", "Tokens a minute yours 22,400 60,000", "Requests at once yours 5 16",
        "Tokens a minute physics \u2013 400,000", "Tokens in the period physics \u2013 500,000,000",
    ]  # fmt: skip
    assert "Tokens a minute physics 140,300 400,000" in rows("carla"), "its coordinator: use is private at this site"
    assert "Requests at once physics 21 \u2013" in rows("carla")
    assert rows("grace")[0] == "Requests a minute yours 0 120"


def test_limits_of_gateways_are_for_operators(site: DemoSite) -> None:
    assert "200,000" in fetch(site, "/services/deepseek-7b", "oper").text
    assert "200,000" not in fetch(site, "/services/deepseek-7b", "grace").text, "its own tenant's member"


def test_the_day_is_private_with_the_use(site: DemoSite) -> None:
    assert 'data-plot="load"' in fetch(site, "/services/deepseek-7b", "grace").text
    assert "data-plot" not in fetch(site, "/services/deepseek-7b", "alice").text


@pytest.mark.parametrize(
    ("change", "fields", "words", "said"),
    [
        ("scale", {"least": "1", "most": "3"}, {"least": 1, "most": 3}, "The service was scaled."),
        ("scale", {"least": "", "most": "5"}, {"most": 5}, "The service was scaled."),
        ("pause", {}, {"paused": True}, "The service is paused."),
        ("resume", {}, {"paused": False}, "The service was resumed."),
    ],
)
def test_an_administrator_changes_a_service_with_its_own_proof(
    tmp_path: Path, change: str, fields: dict[str, str], words: dict[str, Any], said: str
) -> None:
    web = Web(tmp_path, [])
    web.acts["service-change"] = {"schema_version": 1, "service": "own", "changes": 1, "messages": []}
    page = fetch(web, "/services/own", "root")
    form = {"csrf": field_of(page, "csrf"), "key": field_of(page, "key"), **fields}
    answer = fetch(web, f"/services/own/{change}", "root", form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/services/own")
    (asked,) = web.acted
    assert (asked.do, asked.words, asked.key) == ("service-change", {"service": "own", **words}, form["key"])
    assert asked.proof.text.startswith("sluice_")
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert said in fetch(web, "/services/own", "root", cookie=cookie).text


def test_a_change_that_is_refused_says_why_and_others_get_no_form(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    form = {"csrf": field_of(fetch(web, "/services/own", "root"), "csrf")}
    assert fetch(web, "/services/own/explode", "root", form).status_code == 404
    assert fetch(web, "/services/own/scale", "root", {**form, "most": "0"}).status_code == 422
    assert fetch(web, "/services/nope/pause", "root", form).status_code == 404
    assert web.acted == []
    web.acts["service-change"] = ActError(409, "sluice.yaml: 2 changes in it are not applied", remedy="apply them")
    said = fetch(web, "/services/own/pause", "root", form)
    assert said.status_code == 409 and "2 changes in it are not applied" in said.text
    for user in ("mallory", "oscar"):
        assert 'method="post"' not in fetch(web, "/services/own", user).text.partition("<main")[2]


def test_a_day_is_kept_by_service_and_forgotten_with_it() -> None:
    series, rows = ServiceSeries(), service_rows()
    for at in range(0, 3600, 10):
        series.note(1000.0 + at, rows if at < 3000 else {"own": rows["own"]})
    assert [one["time"] for one in series.of("own")] == [1000.0 + at for at in range(0, 3600, 120)]
    assert series.of("for-all") == []
    moments = [{"time": at, "ready": 1, "waiting": at % 7, "tokens_per_minute": None} for at in range(721)]
    shown = thinned(moments)  # type: ignore[arg-type]
    assert len(shown) <= 120 and all(one["waiting"] == 6 for one in shown[:-1])
    assert thinned([]) == []
