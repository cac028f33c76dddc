"""Live parts of pages in a real browser: whatever gets lost on the way, what is shown becomes what is so; what somebody
types meanwhile stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait

from sluice.controllerd.snapshot import job_row
from sluice.web.access import Viewer
from sluice.web.problems import ProblemError
from sluice.web.stream import Stream
from tests.integration.settled import until
from tests.web.browser import Browser, browsing, require_browser
from tests.web.demo_site import Demo, DemoSite

JOB = 9001
# Before the page's own scripts run: what they change comes later.
KEEP_MADE = """
document.addEventListener("readystatechange", () => window.made ??= document.getElementById("state")?.textContent);
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DemoSite:
    require_browser()
    return DemoSite(Demo(40), tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def browser(site: DemoSite) -> Iterator[Browser]:
    with site.serving() as base, browsing(base) as window:
        window.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": KEEP_MADE})
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
    until(lambda: browser.text("#state"), lambda seen: text in seen)


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
        made = browser.driver.execute_script("return window.made")
        assert "Why it waits" in made and "licence" not in made
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


# ---- what somebody does while a part is refreshed ----

FIRST = "#alerts-now tbody tr:first-child"


@pytest.fixture
def alerts(site: DemoSite, browser: Browser) -> Browser:
    """An operator's page of alerts, with the first alert's form open."""
    browser.enter(site.token("oper"))
    browser.open("/alerts")
    browser.settle()
    browser.driver.execute_script(
        f"const row = document.querySelector('{FIRST}'); window.first = row.id; row.querySelector('summary').click()"
    )
    return browser


def fire(site: DemoSite, browser: Browser, subject: str) -> None:
    """One more alert, before all others."""
    now = site.snapshot.get("alerts", "alerts")
    newest = {**now["alerts"][0], "subject": subject, "since": site.demo.now}
    site.snapshot.put_one("alerts", "alerts", {**now, "alerts": [newest, *now["alerts"]]})
    site.snapshot.put_one("parts", "alerts", {"at": time.time(), "stale_since": None, "problem": subject})
    browser.driver.execute_script("document.getElementById('alerts-now').dataset.pace = 0")
    site.apply()


def in_form(browser: Browser, script: str) -> Any:
    """What a script gives of the row that was the first."""
    return browser.driver.execute_script(f"const row = document.getElementById(window.first); return {script}")


def shows_alert(browser: Browser, subject: str) -> None:
    until(lambda: browser.text("#alerts-now tbody"), lambda seen: subject in seen)


def test_an_update_waits_while_somebody_types(site: DemoSite, alerts: Browser) -> None:
    alerts.fill("comment", "fan is ", within=FIRST)
    fire(site, alerts, "gpu01/1")
    time.sleep(1.5)
    alerts.driver.switch_to.active_element.send_keys("replaced")
    assert in_form(alerts, "document.activeElement.value") == "fan is replaced"
    assert "gpu01/1" not in alerts.text("#alerts-now tbody")
    assert alerts.text("#live").endswith("live; your form waits")
    alerts.driver.execute_script("document.activeElement.blur()")
    shows_alert(alerts, "gpu01/1")
    until(lambda: alerts.text("#live"), lambda said: said.endswith("live"), timeout=5)
    assert in_form(alerts, "row.querySelector('[name=comment]').value") == "fan is replaced"
    assert alerts.errors() == []


def test_an_update_waits_while_a_button_is_pressed(site: DemoSite, browser: Browser) -> None:
    """A browser clicks on what the pointer went down and up on: the page asks about the job, as it would without."""
    change(site, "None")
    browser.enter(site.token("alice"))
    browser.open(f"/jobs/{JOB}")
    browser.settle()
    mouse = ActionChains(browser.driver)
    mouse.click_and_hold(browser.enter_element("#act-cancel")).perform()
    change(site, "Licenses")
    shows(browser, "licence")
    until(lambda: browser.text("#live"), lambda said: said.endswith("your form waits"))
    mouse.release().perform()
    question = WebDriverWait(browser.driver, 60).until(alert_is_present())
    assert str(JOB) in question.text
    question.dismiss()
    assert browser.errors() == []


def test_what_was_chosen_stays_with_its_row_when_others_change(site: DemoSite, alerts: Browser) -> None:
    week = str(7 * 86400)
    alerts.fill("seconds", week, within=FIRST)
    alerts.driver.execute_script("document.activeElement.blur()")
    fire(site, alerts, "gpu01/2")
    shows_alert(alerts, "gpu01/2")
    assert in_form(alerts, "row.querySelector('[name=seconds]').value") == week
    assert in_form(alerts, "document.querySelectorAll('tr details[open]').length") == 1
    assert in_form(alerts, "row.querySelector('details').open")
    assert alerts.errors() == []


def test_a_row_that_is_gone_does_not_hold_up_the_others(site: DemoSite, alerts: Browser) -> None:
    alerts.fill("seconds", str(7 * 86400), within=FIRST)
    alerts.driver.execute_script("document.activeElement.blur()")
    subject = in_form(alerts, "row.querySelector('[name=subject]').value")
    now = site.snapshot.get("alerts", "alerts")
    left = [one for one in now["alerts"] if one["subject"] != subject]
    site.snapshot.put_one("alerts", "alerts", {**now, "alerts": left})
    fire(site, alerts, "gpu01/4")
    shows_alert(alerts, "gpu01/4")
    assert in_form(alerts, "row") is None
    assert alerts.errors() == []


def test_who_goes_by_keyboard_stays_where_they_are(site: DemoSite, alerts: Browser) -> None:
    in_form(alerts, "row.querySelector('summary').focus()")
    fire(site, alerts, "gpu01/3")
    shows_alert(alerts, "gpu01/3")
    assert in_form(alerts, "document.activeElement === row.querySelector('summary')")
    assert alerts.errors() == []
