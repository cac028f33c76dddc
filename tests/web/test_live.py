"""Live parts of pages in a real browser: whatever gets lost on the way, what is shown becomes what is so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.controllerd.snapshot import job_row
from sluice.web.access import Viewer
from sluice.web.problems import ProblemError
from sluice.web.stream import Stream
from tests.integration.settled import until
from tests.web.browser import Browser, browsing, require_browser
from tests.web.demo_site import Demo, DemoSite

JOB = 9001


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DemoSite:
    require_browser()
    return DemoSite(Demo(40), tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def browser(site: DemoSite) -> Iterator[Browser]:
    with site.serving() as base, browsing(base) as window:
        window.enter(site.token("alice"))
        yield window


def change(site: DemoSite, reason: str) -> None:
    """alice's job waits for something else."""
    if JOB not in site.demo.jobs:
        site.demo.add_job(JOB, "alice", "physics", "waits")
    site.snapshot.put_one("jobs", str(JOB), job_row(site.demo.jobs[JOB]) | {"reason": reason})
    site.apply()


def shows(browser: Browser, text: str) -> None:
    """The page, which is not loaded again."""
    until(lambda: browser.text("#state"), lambda seen: text in seen, timeout=20)


@pytest.fixture
def opened(site: DemoSite, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """The job's page; the job changed after the page was made and before its stream began."""
    enter = site.site.streams.enter

    def changed_first(viewer: Viewer, topics: frozenset[str], *, rows: bool = True) -> Stream:
        change(site, "Licenses")
        return enter(viewer, topics, rows=rows)

    change(site, "None")
    with monkeypatch.context() as patched:
        patched.setattr(site.site.streams, "enter", changed_first)
        patched.setattr(site.site.streams, "changed", lambda changes: None)  # it was told to those who followed then
        browser.open(f"/jobs/{JOB}")
        assert "licence" not in browser.text("#state")
        shows(browser, "licence")
    return browser


def test_a_change_before_the_stream_begins_is_shown(opened: Browser) -> None:
    assert opened.errors() == []


def test_a_refresh_that_fails_is_tried_again(site: DemoSite, opened: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1, 1]  # one for each part of the page that shows the job

    def refused_once(user: str) -> None:
        if left:
            left.pop()
            raise ProblemError(429, "too many requests of this user", remedy="ask less often")

    monkeypatch.setattr(site.site.rates, "spend_user", refused_once)
    change(site, "Dependency")
    shows(opened, "another job")
    assert not left
    opened.errors()


def test_a_stream_that_is_silent_is_opened_again(
    site: DemoSite, opened: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.site.streams, "_note", lambda stream, changes: None)  # nothing comes through
    change(site, "Priority")
    opened.driver.execute_script("const now = Date.now; Date.now = () => now() + 60000")
    shows(opened, "higher priority")
    assert opened.errors() == []
