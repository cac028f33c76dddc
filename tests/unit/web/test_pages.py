# ruff: noqa: E501 - tables
"""The page: each role sees its own and nothing else, in valid HTML that runs nothing, small, and in each language."""

from __future__ import annotations

import ast
import asyncio
import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import html5lib
import httpx
import pytest
from jinja2 import nodes

from sluice.controllerd.published_nodes import NodeRows, nodes_now
from sluice.controllerd.snapshot import job_row
from sluice.exchange.acts import ActError
from sluice.web.pages import FORMS, NAVIGATION, VIEWS, heat, jobs, reports, services, show, static, submit, why, words
from sluice.web.pages.routes import POLICY, local, templates
from sluice.web.pages.show import Ui, parse_have
from sluice.web.pages.words import catalogue, choose, say_in
from sluice.web.problems import ProblemError
from tests.unit.web.test_access import OWNERS, Web
from tests.web.demo_site import HOSTILE, Demo, DemoSite

PATHS = {"job": "3", "tenant": "chemistry", "node": "n1", "act": "cancel", "silence": "0" * 12, "service": "own",
         "change": "pause"}  # fmt: skip
QUERIES = {
    "/search": ("?q=secret", "?q=3"),
    "/submit": ("?from=3",),
    "/reports": tuple(f"?days=1&since=2026-01-01&until=2026-01-02{more}" for more in ("", "&report=services")),
}
KB = 1024


def fetch(
    web: Any, path: str, user: str = "", form: dict[str, str] | None = None, scopes: tuple[str, ...] = ("read", "write"),
    **headers: str,
) -> httpx.Response:  # fmt: skip
    """A page as a browser gets it, with a session's cookie."""
    from sluice.web.app import make_app

    if user:
        kept = web.__dict__.setdefault("_kept", {})
        if (user, scopes) not in kept:
            kept[user, scopes] = web.site.login.tokens.create(user, scopes, now=time.time(), seconds=60)[1]
        headers = {**headers, "cookie": f"sluice=sluice:{kept[user, scopes]}; {headers.get('cookie', '')}"}
    app = web.__dict__.setdefault("_app", make_app(web.site, follow=False))

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
            if form is None:
                return await client.get(path, headers=headers)
            kind = {"content-type": "application/x-www-form-urlencoded"}
            return await client.post(path, headers={**headers, **kind}, content=urlencode(form))

    return asyncio.run(call())


def tree_of(said: httpx.Response) -> Any:
    """The page's tree. Raises for what is not valid HTML."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parse(said.text) if "<!doctype" in said.text[:20] else parser.parseFragment(said.text)


def check_inert(tree: Any) -> None:
    """Nothing in it is run, and each form that writes has the value against forgery."""
    for one in tree.iter():
        if not isinstance(one.tag, str):
            continue
        assert one.tag not in ("style", "iframe", "object", "embed", "base"), one.tag
        assert not [
            name for name in one.attrib if name.startswith("on") or name in ("style", "srcdoc", "hx-on")
        ], one.attrib
        assert not [name for name in one.attrib if name.startswith("hx-on") or name in ("hx-vals", "hx-vars")]
        for name in ("href", "src", "action", "hx-get", "hx-post"):
            value = one.attrib.get(name, "/")
            assert re.match(r"(/(?![/\\])|#|\?)", value), (name, value)
        if one.tag == "script":
            assert one.attrib["src"].startswith("/static/")
            assert not one.text
        if one.tag == "form" and one.attrib.get("method") == "post":
            assert any(each.attrib.get("name") == "csrf" and each.attrib["value"] for each in one.iter("input"))


def shown(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda name: PATHS[name[1]], path)


@pytest.mark.parametrize("private", [[], ["accounts", "events", "jobs", "nodes", "usage", "users"]], ids=str)
@pytest.mark.parametrize("user", ["alice", "bob", "mallory", "oscar", "root", "stranger"])
def test_every_view_shows_each_role_its_own_and_nothing_else(tmp_path: Path, user: str, private: list[str]) -> None:
    web = Web(tmp_path, private)
    operator = user in ("oscar", "root")
    hidden = {
        f"secret-of-{u}" for u, a in OWNERS.values()
        if u != user and not operator and "jobs" in private and (user, a) != ("bob", "physics")
    } | (set() if operator else {"secret-of-ops"})  # fmt: skip
    for view in VIEWS:
        for query in ("", *QUERIES.get(view.path, ())):
            said = fetch(web, shown(view.path) + query, user)
            assert said.status_code in (200, 303, 403, 404), (view.path, said.text)
            if view.operators and not operator:
                assert said.status_code == 403, view.path
            assert not [one for one in hidden if one in said.text], (view.path, query)
            if private and not operator and user != "mallory":
                assert "mallory" not in said.text.replace('value="mallory"', ""), (view.path, query)
            if said.status_code != 303:
                check_inert(tree_of(said))
                assert said.headers.get_list("content-security-policy") == [POLICY]
    own = fetch(web, "/jobs", user)
    mine = {n for n, (u, _) in OWNERS.items() if u == user or not private or operator}
    assert {n for n in OWNERS if f'id="j{n}"' in own.text} >= mine


def test_without_a_session_every_view_leads_to_the_log_in(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    for view in VIEWS:
        said = fetch(web, shown(view.path) + "?a=%2F%2Fevil", "")
        assert said.status_code == 303
        assert said.headers["location"].startswith("/login?next=%2F")
    assert fetch(web, "/jobs", "", **{"hx-request": "true"}).headers["hx-redirect"] == "/login?next=%2Fjobs"
    assert "secret" not in fetch(web, "/nowhere").text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.path)
def test_a_form_needs_its_session_and_a_token_that_can_write(tmp_path: Path, form: Any) -> None:
    web = Web(tmp_path, [])
    for user in ("alice", "root"):
        wrong: list[tuple[dict[str, str], tuple[str, ...]]] = [
            ({}, ("read", "write")), ({"csrf": "0" * 96}, ("read", "write")), ({"csrf": "x"}, ("read",)),
        ]  # fmt: skip
        for fields, scopes in wrong:
            assert fetch(web, shown(form.path), user, fields, scopes).status_code == 403
    assert fetch(web, shown(form.path), "", {"csrf": "x"}).status_code == 401
    assert web.acted == []


def field_of(said: httpx.Response, name: str) -> str:
    (value,) = set(re.findall(rf'name="{name}" value="([^"]+)"', said.text)[:1])
    return str(value)


def test_a_form_that_is_sent_twice_has_one_key_and_what_was_filled_in_stays(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["submit"] = {"schema_version": 1, "job_id": 2, "messages": []}
    page = fetch(web, "/submit", "alice")
    form = {
        "csrf": field_of(page, "csrf"), "key": field_of(page, "key"), "do": "submit", "gpus": "2", "gpu_type": "h100",
        "script": "#!/bin/sh\r\necho '<\u200b>'\r\n", "nodes": "", "account": "physics",
    }  # fmt: skip
    for _ in range(2):
        said = fetch(web, "/submit", "alice", form)
        assert (said.status_code, said.headers["location"]) == (303, "/jobs/2")
    first, second = web.acted
    assert first.key == second.key == form["key"]
    assert first.words == {"script": "#!/bin/sh\necho '<\u200b>'\n", "gpus": "h100:2", "account": "physics"}
    web.acts["submit"] = ActError(422, "gpus: 2 are more than <b>1</b>", remedy="ask for less")
    said = fetch(web, "/submit", "alice", form)
    assert said.status_code == 422
    assert "gpus: 2 are more than &lt;b&gt;1" in said.text
    assert "echo &#39;&lt;\u200b&gt;&#39;" in said.text, "a script is not changed"
    assert field_of(said, "key") != form["key"]
    web.acts["submit"] = ActError(503, "no answer")
    assert field_of(fetch(web, "/submit", "alice", form), "key") == form["key"], "it may have been done"


def test_a_try_shows_what_a_request_becomes(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["what-if"] = {
        "schema_version": 1, "accepted": True, "refused": [], "messages": ["a remark"], "start_time": time.time() + 3600,
        "starts_now": False, "nodes": "n1", "partition": "main", "cpus": 8, "becomes": {"memory": "64G"},
        "smaller": {"changed": {"gpus": "1"}, "start_time": None, "nodes": "n1"},
    }  # fmt: skip
    page = fetch(web, "/submit", "alice")
    form = {"csrf": field_of(page, "csrf"), "do": "try", "script": "#!/bin/sh\n", "gpus": "4"}
    said = fetch(web, "/submit", "alice", form)
    check_inert(tree_of(said))
    for text in (
        "It would be accepted and wait",
        "<strong>64G</strong>",
        "A smaller request would start now",
        "a remark",
    ):
        assert text in said.text
    smaller = {**form, "do": "smaller", "gpu_type": "h100", "smaller-gpus": field_of(said, "smaller-gpus")}
    assert 'name="gpus" value="1"' in fetch(web, "/submit", "alice", smaller).text
    assert web.acted[-1].words == {"script": "#!/bin/sh\n", "gpus": "h100:1"}
    web.acts["what-if"] |= {"accepted": False, "refused": ["no <i>"], "smaller": None}
    assert "<li>no &lt;i&gt;</li>" in fetch(web, "/submit", "alice", form).text


def test_a_job_is_cancelled_and_the_page_says_so_once(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["cancel"] = {"schema_version": 1, "job": "1", "did": "cancel", "messages": []}
    page = fetch(web, "/jobs/1", "alice")
    form = {"csrf": field_of(page, "csrf"), "key": field_of(page, "key")}
    said = fetch(web, "/jobs/1/cancel", "alice", form)
    assert (said.status_code, said.headers["location"]) == (303, "/jobs/1")
    (asked,) = web.acted
    assert (asked.do, asked.words, asked.key) == ("cancel", {"job": "1"}, form["key"])
    cookie = said.headers["set-cookie"].partition(";")[0]
    after = fetch(web, "/jobs/1", "alice", cookie=cookie)
    assert "The job was cancelled." in after.text
    assert "said=; Max-Age=0" in after.headers["set-cookie"]
    assert fetch(web, "/jobs/1/explode", "alice", form).status_code == 404


# ---- hostile texts ----


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> DemoSite:
    demo = Demo(40, hostile=True)
    long = next(iter(demo.jobs.values()))
    demo.jobs[9999] = type(long)(**{
        **{name: getattr(long, name) for name in long.__slots__}, "id": 9999, "name": "w" * 1024, "comment": "\u202egnp.exe\x00\x1b[31m",
    })  # fmt: skip
    return DemoSite(demo, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.path)
def test_texts_of_tenants_are_shown_and_do_nothing(hostile: DemoSite, view: Any) -> None:
    named = {**PATHS, "tenant": "physics", "node": next(iter(hostile.demo.nodes))}
    for number in ("9999", *(str(job) for job in list(hostile.demo.jobs)[:40:8])):
        path = re.sub(r"{(\w+)}", lambda name, job=number: {**named, "job": job}[name[1]], view.path)  # type: ignore[misc]
        for query in ("", "?" + urlencode({"q": HOSTILE, "name": HOSTILE, "user": HOSTILE, "next": "//evil"})):
            said = fetch(hostile, path + query, "root")
            assert said.status_code in (200, 404), path
            check_inert(tree_of(said))
            assert "<script>window" not in said.text
            assert "49" not in re.findall(r"\{\{7\*7\}\}|>49<", said.text)
            assert not re.search("[\u202a-\u202e\x00-\x08\x1b]", said.text)
        if "{job}" not in view.path:
            return


def test_spreadsheets_get_no_formulas(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    said = web.get("/reports/users?format=csv", "root")
    cells = [cell for line in said.text.splitlines() for cell in line.split(",")]
    assert not [cell for cell in cells if re.match(r'"?[=+@\t\r-](?![0-9.]*$)', cell)]


# ---- sizes ----


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> DemoSite:
    demo = Demo(8192)
    some = next(iter(demo.jobs.values()))
    slots = {name: getattr(some, name) for name in some.__slots__}
    for number in range(20_000, 30_000):
        demo.jobs[number] = type(some)(**{**slots, "id": number, "name": f"job-{number}", "priority": number})
    return DemoSite(demo, tmp_path_factory.mktemp("large"))


def packed(said: httpx.Response) -> int:
    return len(gzip.compress(said.content, 5))


def test_the_first_view_is_small(large: DemoSite) -> None:
    files = [one.packed for name, one in static.assets().items() if "uPlot" not in name]
    for path in ("/", "/jobs", "/nodes", "/search?q=job", "/reports?days=1"):
        said = fetch(large, path, "root")
        assert len(said.content) < 150 * KB, (path, len(said.content))
        total = packed(said) + sum(
            map(len, files if "reports" not in path else [one.packed for one in static.assets().values()])
        )
        assert total < 100 * KB, (path, total)
    assert len(fetch(large, "/", "root").content) < 100 * KB


def have(text: str) -> str:
    """What app.js says that it has."""
    return " ".join(f"{name}.{digest}" for name, digest in re.findall(r'id="([^"]+)" data-v="([^"]+)"', text))


def live_blocks(text: str) -> list[str]:
    return re.findall(r'id="([\w-]+)"[^>]* hx-get="[^"]*" hx-trigger="sluice', text)


@pytest.mark.parametrize("path", ["/", "/jobs", "/jobs?state=PENDING", "/tenants", "/tenants/physics", "/jobs/20000"])
def test_a_refresh_is_small_also_when_everything_has_changed(large: DemoSite, path: str) -> None:
    page = fetch(large, path, "root").text
    blocks = live_blocks(page)
    assert blocks
    busy = {node: {index: type(now)(99.0 - now.percent, now.used_mib, now.total_mib, now.temperature_c)
                   for index, now in of.items()} for node, of in large.demo.live.gpus.items()}  # fmt: skip
    for block in blocks:
        headers = {"hx-request": "true", "hx-target": block, "x-have": have(page)}
        same = fetch(large, path, "root", **headers)
        assert packed(same) <= 5 * KB, (block, "nothing has changed", packed(same))
        assert f'id="{block}"' in same.text
        assert "<nav" not in same.text
        check_inert(tree_of(same))
    live, large.demo.live.gpus = large.demo.live.gpus, busy
    try:
        NodeRows(large.snapshot).publish(nodes_now(large.demo.nodes.values(), large.demo.live, {}))
        for number in list(large.demo.jobs)[-60:]:
            large.snapshot.put_one(
                "jobs", str(number), {**job_row(large.demo.jobs[number]), "state": "RUNNING", "nodes": "gpu0001"}
            )
        large.apply()
        from sluice.web.pages import overview

        overview._drawn.clear()
        for block in blocks:
            headers = {"hx-request": "true", "hx-target": block, "x-have": have(page)}
            changed = fetch(large, path, "root", **headers)
            assert packed(changed) <= 5 * KB, (block, "all has changed", packed(changed))
    finally:
        large.demo.live.gpus = live


def test_a_list_stays_small_whatever_tenants_write(tmp_path: Path) -> None:
    demo = Demo(40)
    some = next(iter(demo.jobs.values()))
    slots = {name: getattr(some, name) for name in some.__slots__}
    for number in range(20_000, 20_100):
        noise = hashlib.sha512(str(number).encode()).hexdigest() * 8
        texts = dict.fromkeys(("name", "comment", "work_dir", "features", "reason"), noise)
        demo.jobs[number] = type(some)(**{**slots, **texts, "id": number, "state": "PENDING", "nodes": noise * 16})
    site = DemoSite(demo, tmp_path)
    page = fetch(site, "/jobs", "root")
    assert len(page.content) < 64 * KB
    assert packed(fetch(site, "/jobs", "root", **{"hx-request": "true", "hx-target": "list"})) <= 9 * KB
    assert len(fetch(site, "/", "root").content) < 64 * KB
    assert len(fetch(site, "/search?q=a", "root").content) < 64 * KB


def test_what_a_browser_has_is_not_sent_again(large: DemoSite) -> None:
    page = fetch(large, "/jobs", "root").text
    again = fetch(large, "/jobs", "root", **{"hx-request": "true", "hx-target": "list", "x-have": have(page)}).text
    assert again.count("data-keep") == 50
    number = next(iter(re.findall(r'id="j(\d+)"', page)))
    large.snapshot.put_one("jobs", number, {**job_row(large.demo.jobs[int(number)]), "name": "another"})
    large.apply()
    again = fetch(large, "/jobs", "root", **{"hx-request": "true", "hx-target": "list", "x-have": have(page)}).text
    assert again.count("data-keep") == 49
    assert ">another<" in again
    assert len(parse_have("a.b " * 5000)) == 1
    assert len(parse_have(" ".join(f"a{n}.b" for n in range(5000)))) <= 2001


# ---- languages ----


def texts_of_templates() -> Iterator[str]:
    for path in sorted(words.TEMPLATES.glob("*.html")):
        for call in templates().parse(path.read_text(encoding="utf-8")).find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == "t":
                yield from _constants(call.args[0])


def _constants(node: Any) -> Iterator[str]:
    """The texts that an argument may be: not what it is chosen by."""
    if isinstance(node, nodes.Const):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, nodes.CondExpr):
        yield from _constants(node.expr1)
        yield from _constants(node.expr2)
    elif isinstance(node, nodes.Dict):
        for pair in node.items:
            yield from _constants(pair.value)
    elif isinstance(node, nodes.Getitem | nodes.Getattr | nodes.Call):
        yield from _constants(node.node)


def texts_of_python() -> Iterator[str]:
    for path in sorted(Path(words.__file__).parent.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                if name in ("t", "say") and isinstance(call.args[0].value, str):
                    yield call.args[0].value
    yield from (one.title for one in (*NAVIGATION, *VIEWS, *FORMS))
    yield from (name for _, name in jobs.CHIPS)
    yield from (*jobs.ACTS.values(), *services.ACTS.values(), *services.OUTCOMES.values(), *services.LIMITS.values())
    yield from (*services.REPLICAS, *(title for one in (reports.GPU_HOURS, reports.TOKENS) for title in one[2:]))
    yield from (title for _, title, _ in submit.MORE)
    yield from (title for _, _, title in reports.COLUMNS)
    yield from (*reports.KINDS, *show.STATES, *show.REASONS.values(), *show.RESOURCES.values(), *why._SMALLER.values())
    yield from (said for _, said in show._REASONS_BEGIN)
    yield from ("auto", "light", "dark", "held or not due", "waiting", "running", "left of its limit")
    yield from (
        "jobs",
        "nodes",
        "tenants",
        "users",
        "cluster",
        "events",
        "health",
        "alerts",
        "policy",
        "inventory",
        "failover",
        "services",
        "power",
    )


@pytest.mark.parametrize("language", [one for one in words.LANGUAGES if one != "en"])
def test_every_text_is_translated(language: str) -> None:
    known = catalogue(language)
    missing = sorted({text for text in (*texts_of_templates(), *texts_of_python()) if text and text not in known})
    assert missing == []
    for text, said in known.items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", said)), text


@pytest.mark.parametrize(
    ("accepted", "language"),
    [("", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("en-US,en;q=0.9,zh;q=0.1", "en"), ("fr, zh;q=0.2", "zh"),
     ("zh;q=x", "en"), ("zh;q=0", "en"), ("," * 9999, "en")],
)  # fmt: skip
def test_the_language_is_the_browsers(accepted: str, language: str) -> None:
    assert choose(accepted) == language


def test_languages_and_themes_are_chosen_by_a_link(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    said = fetch(web, "/jobs?user=alice&lang=zh&theme=dark", "alice")
    assert (said.status_code, said.headers["location"]) == (303, "/jobs?user=alice")
    assert [one.partition(";")[0] for one in said.headers.get_list("set-cookie")] == ["lang=zh", "theme=dark"]
    page = fetch(web, "/jobs", "alice", cookie="lang=zh; theme=dark").text
    assert '<html lang="zh-Hans" data-theme="dark">' in page
    assert "我的作业" in page
    assert 'data-theme="auto"' in fetch(web, "/jobs", "alice", cookie='theme="><script>').text
    assert fetch(web, "/jobs?lang=xx", "alice").status_code == 200


# ---- pieces ----


@pytest.mark.parametrize(
    ("where", "found"),
    [("/jobs/1", "/jobs/1"), ("//evil", "/"), ("/\\evil", "/"), ("https://evil", "/"), ("", "/"), ("/a\nb", "/"),
     ("/a\\b", "/"), ("javascript:x", "/"), ("/%0d%0aset-cookie", "/%0d%0aset-cookie")],
)  # fmt: skip
def test_nobody_is_sent_elsewhere(where: str, found: str) -> None:
    assert local(where) == found


def test_static_files_are_kept_by_browsers_and_pinned(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    pins = json.loads((static.FOLDER / "vendor/pins.json").read_text())
    files = {name: digest for pin in pins.values() for name, digest in pin["files"].items()}
    there = {one.name for one in (static.FOLDER / "vendor").iterdir()} - {"pins.json"}
    assert set(files) == there
    for name, digest in files.items():
        assert hashlib.sha256((static.FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest
    for one in static.assets().values():
        said = fetch(web, one.address, "", **{"accept-encoding": "gzip"})
        assert said.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert said.content == one.plain
    assert fetch(web, "/static/000000000000/app.css", "alice").status_code == 404
    assert fetch(web, "/static/000000000000/../../templates/base.html", "alice").status_code == 404


def test_pieces_of_different_names_have_different_ids() -> None:
    ui = Ui(say_in("en"), "/")
    names = ["a-gpu01_1", "a-gpu01/1", "a-gpu01:1", "n" * 64, "n" * 65, "n" * 66, "\u00e9", "\u00e8", 7]
    ids = re.findall(r'id="([A-Za-z0-9_-]{1,64})" data-v', "".join(ui.piece("tr", name, lambda: "") for name in names))
    assert len(set(ids)) == len(names)
    assert ids[0] == "a-gpu01_1" and ids[1].startswith("a-gpu01_1-")


def test_numbers_and_times_have_units() -> None:
    ui = Ui(say_in("en"), "/")
    assert [ui.mib(one) for one in (None, 512, 81559, 2_063_000)] == [
        "\u2013",
        "512\u00a0MiB",
        "79.6\u00a0GiB",
        "2\u00a0TiB",
    ]
    assert [ui.duration(one) for one in (None, -1, 0, 59, 3700, 90061)] == [
        "\u2013", "no limit", "0\u00a0s", "59\u00a0s", "1\u00a0h 1\u00a0min", "1\u00a0d 1\u00a0h",
    ]  # fmt: skip
    assert str(ui.time(1.7e9)) == '<time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13 UTC</time>'
    assert [str(ui.time(one)) for one in (None, 0, 1e300, float("-inf"))] == ["\u2013"] * 4
    assert 'width="50"' in ui.bar(5, 10)
    assert str(ui.bar(5, 0)) == ""


def test_the_heat_map_has_a_cell_for_each_gpu() -> None:
    free = {"health": "ok", "use": "free", "available": True, "utilisation_percent": 0.0}
    gpus = [{"node": f"n{node}", "index": index, **free} for node in (10, 9) for index in range(8)]
    gpus[3] |= {"health": "out"}
    gpus[9] |= {"use": "whole", "utilisation_percent": 100.0}
    (rack,) = heat.draw(gpus, {"n9": "r", "n10": "r"})
    assert rack.nodes == ["n9", "n10"]
    assert rack.paths["4"] == f"M{rack.left + rack.pitch} 10h20"
    assert rack.crosses.count("M") == 1
    cells = sum(int(one) + 4 for lines in rack.paths.values() for one in re.findall(r"h(\d+)", lines)) / rack.pitch
    assert cells == 16
    nodes_there = [
        {"name": f"n{n}", "features": ["rack-1"] if n == 1 else [], "gpu_types": {"h100": 8}} for n in range(1, 5)
    ]
    switches = [{"name": "s0", "level": 0, "nodes": "n[1-2]"}, {"name": "top", "level": 1, "nodes": "n[1-4]"}]
    names = heat.rack_names(nodes_there, switches)
    assert names == {"n1": "rack-1", "n2": "s0", "n3": "n3 \u2013 n4", "n4": "n3 \u2013 n4"}
    assert sorted(["n10", "n9", "a", "n9b"], key=heat.natural) == ["a", "n9", "n9b", "n10"]


def test_stale_parts_are_said_in_words(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.site.store.rows("parts")["jobs"] = {
        "at": 1.7e9,
        "stale_since": 1.7e9,
        "problem": "slurmctld: line 7 of secret-of-ops",
    }
    said = fetch(web, "/jobs", "alice").text
    assert "This has not been read again:" in said
    assert "2023-11-14T22:13:20Z" in said
    assert "secret-of-ops" not in said
    assert "secret-of-ops" in fetch(web, "/jobs", "root").text


def test_what_the_daemon_finds_out_slowly_does_not_hold_the_page_up(tmp_path: Path) -> None:
    web = Web(tmp_path, [])

    async def slow(do: str, **words: Any) -> dict[str, Any]:
        await asyncio.sleep(30)
        raise AssertionError

    web.site.feed.ask = slow  # type: ignore[method-assign]
    began = time.monotonic()
    said = fetch(web, "/jobs/1", "alice")
    assert time.monotonic() - began < 5
    assert said.status_code == 200
    assert 'hx-trigger="load delay' in said.text or "That is known when it has run." in said.text

    async def broken(do: str, **words: Any) -> dict[str, Any]:
        raise ProblemError(503, "the daemon is away")

    web.site.feed.ask = broken  # type: ignore[method-assign]
    assert "the daemon is away" in fetch(web, "/jobs/1", "alice").text


def test_the_page_of_a_job_says_when_it_last_saved(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    answer = web.daemon.answer
    used: dict[str, Any] = {
        "gpus": [], "utilisation_percent": None, "gpu_memory_asked_mib": None, "gpu_memory_peak_mib": None,
        "idle_gpu_s": None, "gpu_energy_j": None, "throttled_s": None, "refused": 0, "rung": "", "reported_at": None,
        "saved_at": 1_780_000_000.0,
    }  # fmt: skip

    async def with_use(do: str, **words: Any) -> dict[str, Any]:
        found = answer(do, **words)
        return found | {"document": found["document"] | {"used": used}} if do == "job-page" else found

    web.site.feed.ask = with_use  # type: ignore[method-assign]
    assert "<dt>Last saved its state</dt><dd><time" in fetch(web, "/jobs/1", "alice").text
    used["saved_at"] = None
    assert "Last saved" not in fetch(web, "/jobs/1", "alice").text


def test_the_page_of_a_job_says_which_tasks_were_far_from_their_gpus(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    answer = web.daemon.answer
    used: dict[str, Any] = {
        "gpus": [], "utilisation_percent": None, "gpu_memory_asked_mib": None, "gpu_memory_peak_mib": None,
        "idle_gpu_s": None, "gpu_energy_j": None, "throttled_s": None, "refused": 0, "rung": "", "reported_at": None,
        "saved_at": None,
    }  # fmt: skip
    near = {"node": "n1", "step": "0", "tasks": 2, "gpu_nodes": "1", "cpus": 4, "cpus_near": 4, "cpu_nodes": "1",
            "memory_nodes": "0-1", "agrees": True}  # fmt: skip
    cpus = near | {"node": "<n2>", "cpus_near": 1, "cpu_nodes": "0-1", "agrees": False}
    memory = near | {"node": "n3", "memory_nodes": "0", "agrees": False}

    async def with_use(do: str, **words: Any) -> dict[str, Any]:
        found = answer(do, **words)
        return found | {"document": found["document"] | {"used": used}} if do == "job-page" else found

    def shown(*bindings: dict[str, Any]) -> str:
        used["bindings"] = list(bindings)
        text = re.search(r"<dt>CPUs and memory</dt><dd>(.*?)</dd>", fetch(web, "/jobs/1", "alice").text, re.DOTALL)
        return " ".join(re.sub(r"<[^>]*>", " ", text[1]).split()) if text else ""

    web.site.feed.ask = with_use  # type: ignore[method-assign]
    assert shown() == ""
    assert shown(near) == "The CPUs of all tasks are near their GPUs, and so may be their memory."
    assert shown(near, cpus, memory) == (
        "Tasks are not near their GPUs, which makes copies to and from these slower. "
        "&lt;n2&gt; step 0: 3 of 4 CPUs on other NUMA nodes than the GPUs NUMA nodes: GPUs 1, CPUs 0-1, memory 0-1 "
        "n3 step 0: memory on other NUMA nodes than the GPUs NUMA nodes: GPUs 1, CPUs 1, memory 0 "
        "Try: --gres-flags=enforce-binding"
    )


def test_the_page_of_a_job_says_which_gpu_is_slow_and_what_its_interfaces_counted(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    answer = web.daemon.answer
    counts = {"transmit_bytes": 5000, "link_downs": 2}
    used: dict[str, Any] = {
        "gpus": [], "utilisation_percent": None, "gpu_memory_asked_mib": None, "gpu_memory_peak_mib": None,
        "idle_gpu_s": None, "gpu_energy_j": None, "throttled_s": None, "refused": 0, "rung": "", "reported_at": None,
        "saved_at": None, "nics": [{"node": "<n1>", "nic": "mlx5_0", "shared": True, "counts": counts}],
        "slowest": {"node": "<n1>", "index": 3, "why": "power", "value": 650.4, "others": 330.0},
    }  # fmt: skip

    async def with_use(do: str, **words: Any) -> dict[str, Any]:
        found = answer(do, **words)
        return found | {"document": found["document"] | {"used": used}} if do == "job-page" else found

    web.site.feed.ask = with_use  # type: ignore[method-assign]
    text = " ".join(re.sub(r"<[^>]*>", " ", fetch(web, "/jobs/1", "alice").text).split())
    assert "Slowest GPU &lt;n1&gt; GPU 3: draws 650" in text
    assert "&lt;n1&gt; mlx5_0: shared with other jobs transmit bytes 5,000, link downs 2" in text


def test_the_page_of_a_job_that_waits_says_what_its_priority_is_made_of_and_what_pools_do(tmp_path: Path) -> None:
    demo = Demo(40)
    number = next(job.id for job in demo.jobs.values() if job.state == "PENDING")
    web = DemoSite(demo, tmp_path)

    async def explained(do: str, **words: Any) -> dict[str, Any]:
        more = {"pools": ["waits for p1, which boots"], "preflights": [{"text": "preflight at 3: 4 nodes are <good>"}]}
        return {"explanation": demo.explain(number)["explanation"] | more}

    web.site.feed.ask = explained  # type: ignore[method-assign]
    text = fetch(web, f"/jobs/{number}", "root").text
    order = re.search(r'<section id="order".*?</section>', text, re.DOTALL)
    assert order is not None and "<dt>fair-share</dt><dd>500 of 1,000</dd>" in order[0]
    assert "<li>It waits for p1, which boots</li>" in text
    assert "<li>Preflight at 3: 4 nodes are &lt;good&gt;</li>" in text


@pytest.mark.parametrize("known", [None, {"schema_version": 1, "job": "1"}], ids=["nothing", "nothing of its order"])
def test_a_job_that_waits_has_its_page_before_it_was_looked_at(tmp_path: Path, known: dict[str, Any] | None) -> None:
    demo = Demo(40)
    number = next(job.id for job in demo.jobs.values() if job.state == "PENDING")
    web = DemoSite(demo, tmp_path)

    async def explained(do: str, **words: Any) -> dict[str, Any]:
        return {"explanation": known}

    web.site.feed.ask = explained  # type: ignore[method-assign]
    said = fetch(web, f"/jobs/{number}", "root")
    assert said.status_code == 200 and "What its priority is made of" not in said.text


def test_the_page_of_a_job_says_whether_it_can_be_saved(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    answer = web.daemon.answer
    checkpoint: dict[str, Any] = {"mode": "no", "saved": None}

    async def with_saves(do: str, **words: Any) -> dict[str, Any]:
        found = answer(do, **words)
        return {"explanation": found["explanation"] | {"checkpoint": checkpoint}} if do == "explain" else found

    def card(number: int = 1) -> str:
        text = fetch(web, f"/jobs/{number}", "root").text
        found = re.search(r'<section id="saves".*?</section>', text, re.DOTALL)
        return "" if found is None else " ".join(re.sub("<[^>]*>", " ", found[0]).split())

    assert card() == ""
    web.site.feed.ask = with_saves  # type: ignore[method-assign]
    assert "costs all its work" in card()
    checkpoint = {
        "mode": "app", "signal": "USR1", "daly": False, "interval_s": None, "saved": None, "signals": 0, "answers": 0,
        "save_s": None, "mttf_s": None,
    }  # fmt: skip
    assert card().endswith("when it gets the signal USR1. It gets it before it is ended only. It has had no signal yet:"
                           " it is not known whether it can be saved.")  # fmt: skip
    checkpoint |= {"interval_s": 1200, "signals": 4}
    assert "every 20 min." in card() and "none of 4 signals" in card()
    checkpoint |= {"saved": 1_780_000_000.0, "answers": 3, "daly": True, "save_s": 8.0, "mttf_s": 864_000.0}
    assert "a save takes 8" in card() and "Last saved: 2026-05-" in card() and "answered 3 of 4" in card()


# ---- a form that was left open, and errors of the outermost layer ----


def test_a_form_that_outlives_its_session_loses_nothing(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["submit"] = {"schema_version": 1, "job_id": 17, "messages": []}
    page = fetch(web, "/submit", "alice")
    form = {
        "csrf": field_of(page, "csrf"), "key": field_of(page, "key"), "do": "submit", "account": "",
        "script": "#!/bin/sh\necho '<b>\"1\"'\n", "name": "x" * 100,
    }  # fmt: skip
    browser = {"accept": "text/html"}
    assert fetch(web, "/submit", "", form).status_code == 401, "a program gets no page"
    said = fetch(web, "/submit", "", form, **browser)
    assert said.status_code == 401 and "session has ended" in said.text and not web.acted

    def sent(said: httpx.Response) -> dict[str, str]:
        (made,) = (one for one in tree_of(said).iter("form") if one.attrib.get("action") == "/submit")
        fields = {one.attrib["name"]: one.attrib.get("value", "") for one in made.iter("input")}
        # the parser keeps the line break that HTML drops after <textarea>
        return fields | {one.attrib["name"]: (one.text or "").removeprefix("\n") for one in made.iter("textarea")}

    typed = {name: value for name, value in form.items() if name != "csrf"}
    assert sent(said) == typed
    said = fetch(web, "/submit", "alice", sent(said), **browser)  # logged in again, in another tab
    assert said.status_code == 403 and not web.acted, "it counts once its user has looked at it"
    check_inert(tree_of(said))
    assert sent(said).items() >= typed.items()
    said = fetch(web, "/submit", "alice", sent(said), **browser)
    assert said.status_code == 303 and web.acted[-1].words["script"] == form["script"]
    assert web.acted[-1].key == form["key"]


def test_browsers_get_pages_also_from_the_outermost_layer(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    fetch(web, "/", "alice")
    browser = {"accept": "text/html", "accept-language": "zh-CN"}

    def ask(method: str, path: str, **headers: str) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(web.__dict__["_app"])
            async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(call())

    for method, path, status, more in (
        ("PUT", "/jobs", 405, {}), ("DELETE", "/jobs", 405, {}), ("POST", "/submit", 413, {"content-length": "9" * 12}),
    ):  # fmt: skip
        said = ask(method, path, **browser, **more)
        assert said.status_code == status and said.headers["content-type"].startswith("text/html"), (method, path)
        assert "text/html" in said.headers["content-type"] and said.headers["content-security-policy"] == POLICY
        check_inert(tree_of(said))
        assert re.search("不允许|请求正文", said.text), said.text
        said = ask(method, "/api/v1" + path, **browser, **more)
        assert said.headers["content-type"] == "application/problem+json"


def test_problems_are_said_in_the_viewers_language(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    said = fetch(web, "/jobs/4000000", "alice", cookie="lang=zh")
    assert "job 4000000" in said.text and "不存在" in said.text and "请查看列表" in said.text
    assert "not known" in fetch(web, "/jobs/4000000", "alice").text
    known = json.loads((words.TEMPLATES / "problems-zh.json").read_text(encoding="utf-8"))
    for text, chinese in known.items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", chinese)), text
    assert words.translate_problem("zh", "this token can only read") == "此令牌只能读取"
    assert words.translate_problem("zh", "sbatch: error: x") == "sbatch: error: x"
