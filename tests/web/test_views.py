"""Every view in a real browser, over a filled site without Slurm: accessible, quiet, and not moved by hostile texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser, browsing, require_browser
from tests.web.demo_site import Demo, DemoSite
from tests.web.views import View, views

HOSTILE = Demo(40, hostile=True)
EMPTY = Demo(0)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[DemoSite, Browser]]]:
    require_browser()
    found: dict[int, tuple[DemoSite, Browser]] = {}
    stack = []
    for demo in (HOSTILE, EMPTY):
        site = DemoSite(demo, tmp_path_factory.mktemp("site"))
        serving = site.serving()
        window = browsing(serving.__enter__())
        found[demo.gpus] = site, window.__enter__()
        stack += [serving, window]
    yield found
    for one in reversed(stack):
        one.__exit__(None, None, None)


@pytest.mark.parametrize("view", views(HOSTILE), ids=lambda view: view.name)
def test_a_view_of_a_hostile_site_is_accessible_and_runs_nothing(
    sites: dict[int, tuple[DemoSite, Browser]], view: View
) -> None:
    look_at(*sites[40], view)


@pytest.mark.parametrize("view", views(EMPTY), ids=lambda view: view.name)
def test_a_view_of_a_site_on_its_first_day_is_accessible(
    sites: dict[int, tuple[DemoSite, Browser]], view: View
) -> None:
    look_at(*sites[0], view)


def look_at(site: DemoSite, browser: Browser, view: View) -> None:
    browser.enter(site.token(view.user) if view.user else "")
    browser.errors()
    browser.look()
    browser.open(view.path)
    browser.settle()
    for dark in (False, True):
        browser.look(dark=dark)
        assert browser.axe() == []
        assert browser.driver.execute_script("return window.marker === undefined"), "a text was run"
    browser.look(width=360)
    assert browser.overflows() <= 0, "wider than a phone"
    expected = [f"{view.path} - Failed to load resource"] if view.name == "missing" else []
    errors = [one for one in browser.errors() if not any(text in one for text in expected)]
    assert errors == []
