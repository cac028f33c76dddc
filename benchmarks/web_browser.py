"""The page of jobs in Chromium with a new profile: when it can be used, and what comes over the network."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sluice.base.errors import SluiceError

_RUNS = 5
_WATCH_S = 20.0
_PATH = "/jobs"
_COOKIE = "sluice"
_ROWS = "return document.querySelectorAll('table tbody tr').length"
_TIMES = """
const page = performance.getEntriesByType('navigation')[0];
const paint = performance.getEntriesByName('first-contentful-paint')[0];
const parts = performance.getEntriesByType('resource').filter(one => one.initiatorType !== 'eventsource');
return [page.loadEventEnd, paint ? paint.startTime : 0, page.transferSize,
        parts.map(one => [one.name, one.startTime, one.transferSize])];
"""


@contextmanager
def browser_at() -> Iterator[Any]:
    """Chromium with a new profile. Raises SluiceError where there is no selenium."""
    try:
        from selenium import webdriver
    except ModuleNotFoundError as error:
        raise SluiceError("selenium: not installed", remedy="make test-packages") from error
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
            options.add_argument(word)
        browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            yield browser
        finally:
            browser.quit()


def measure(url: str, token: str) -> dict[str, float]:
    """Medians of some new profiles. Raises SluiceError where there is no selenium or Chromium."""
    usable: list[float] = []
    first: list[float] = []
    refreshes: list[float] = []
    for _ in range(_RUNS):
        with browser_at() as browser:
            _log_in(browser, url, token)
            browser.get(url + _PATH)
            rows = browser.execute_script(_ROWS)
            loaded, painted, size, parts = browser.execute_script(_TIMES)
            if rows < 50:
                raise SluiceError(f"{_PATH}: shows {rows} jobs", remedy="see the web process's log")
            usable.append(max(loaded, painted) / 1000)
            first.append(size + sum(one[2] for one in parts))
            time.sleep(_WATCH_S if not refreshes else 0)
            later = browser.execute_script(_TIMES)[3][len(parts) :]
            refreshes += [one[2] for one in later if one[2]]
    return {
        "page_usable_s": statistics.median(usable),
        "page_first_kib": max(first) / 1024,
        "page_refresh_kib": max(refreshes, default=0) / 1024,
        "page_refreshes_a_minute": 60 * len(refreshes) / _WATCH_S,
    }


def _log_in(browser: Any, url: str, token: str) -> None:
    """As the log-in page does: the cookie is the token."""
    browser.execute_cdp_cmd("Network.enable", {})
    cookie = {"name": _COOKIE, "value": f"sluice:{token}", "url": url, "httpOnly": True}
    if not browser.execute_cdp_cmd("Network.setCookie", cookie)["success"]:
        raise SluiceError(f"{url}: Chromium takes no cookie", remedy="see chromedriver's log")
