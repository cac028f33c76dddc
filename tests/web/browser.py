"""Debian's Chromium, without a screen: what the browser tests and `make screenshots` drive."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
    WebDriverException,
)
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

ROOT = Path(__file__).parents[2]
AXE = ROOT / "build/web-tests/node_modules/axe-core/axe.min.js"
WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
_PROGRAMS = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
# As root, and without a network besides loopback.
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--font-render-hinting=none",
)  # fmt: skip
_RUN_AXE = """
const done = arguments[arguments.length - 1];
const options = {
    runOnly: {type: "tag", values: arguments[0]}, rules: {"target-size": {enabled: true}}, resultTypes: ["violations"],
};
axe.run(document, options).then(
    found => done(found.violations.map(one => ({
        rule: one.id, help: one.help,
        nodes: one.nodes.slice(0, 5).map(node => node.target.join(" ") + ": " + node.failureSummary),
    }))),
    error => done([{rule: "axe", help: String(error), nodes: []}]));
"""

# Found and focused in one step: the page's parts are replaced at any time, but for forms that have the focus.
_ENTER = """
const [one, more] = document.querySelectorAll(arguments[0]);
if (!one || more) throw Error(`${arguments[0]}: not one element`);
one.focus();
one.select?.();
return one;
"""
_TEXTS = "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)"


class ElementGoneError(Exception):
    """An element's page, or the part of it, was replaced."""


@contextmanager
def _of_a_page_that_goes() -> Iterator[None]:
    """Raises ElementGoneError for what ChromeDriver says of such an element; it has no error of its own for one that
    goes while it is looked at."""
    try:
        yield
    except StaleElementReferenceException as error:
        raise ElementGoneError from error
    except WebDriverException as error:
        if "does not belong to the document" not in str(error):
            raise
        raise ElementGoneError from error


def require_browser() -> None:
    """Skip the tests where there is no browser, or fail with SLUICE_BROWSER=require, as in `make test`."""
    missing = [str(path) for path in (*_PROGRAMS, AXE) if not path.exists()]
    if missing and os.environ.get("SLUICE_BROWSER") != "require":
        pytest.skip(f"{', '.join(missing)}: not there; `make test` installs it")
    assert not missing, missing


class Browser:
    """One window with a profile of its own."""

    def __init__(self, base: str, driver: Chrome) -> None:
        self.base = base
        self.driver = driver
        self._axe = AXE.read_text(encoding="utf-8") if AXE.exists() else ""

    # ---- going somewhere ----

    def open(self, path: str) -> None:
        """Open a path, and wait until it is loaded."""
        self.driver.get(self.base + path)

    def settle(self, seconds: float = 10) -> None:
        """Wait until scripts have done what they do when a page is opened: no request is under way."""
        quiet = "return !document.querySelector('.htmx-request, .htmx-swapping, .htmx-settling')"
        end = time.monotonic() + seconds
        time.sleep(0.15)
        while not self.driver.execute_script(quiet) and time.monotonic() < end:
            time.sleep(0.05)

    @property
    def path(self) -> str:
        """Where it is, without the host."""
        return self.driver.current_url.removeprefix(self.base)

    def follow(self, path: str) -> None:
        """Follow a link of the page by where it goes; one that is replaced before the click is looked for again."""
        selector = f"main a[href={json.dumps(path)}]"
        for _ in range(20):
            with suppress(ElementGoneError), _of_a_page_that_goes():
                self.driver.find_element(By.CSS_SELECTOR, selector).click()
                return
            time.sleep(0.1)
        raise AssertionError(f"{selector}: replaced again and again")

    def enter(self, token: str) -> None:
        """Be who has this token, without the form; empty: nobody."""
        self._cdp("Network.enable")
        self._cdp("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {token}"} if token else {})

    # ---- looking ----

    def all(self, selector: str) -> list[WebElement]:
        """All elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """The one element of a CSS selector."""
        (found,) = self.all(selector)
        return found

    def text(self, selector: str = "body") -> str:
        """The visible text of an element; of the page that comes where one is just going."""
        for _ in range(20):
            with suppress(NoSuchElementException, ElementGoneError), _of_a_page_that_goes():
                return self.driver.find_element(By.CSS_SELECTOR, selector).text
            time.sleep(0.1)
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def texts(self, selector: str) -> list[str]:
        """The visible text of each element."""
        found: list[str] = self.driver.execute_script(_TEXTS, selector)
        return found

    def errors(self) -> list[str]:
        """What the console reported as an error since the last call, violations of the CSP among it."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]

    def axe(self) -> list[dict[str, Any]]:
        """Violations of WCAG 2.2 AA of the page as it is."""
        if not self.driver.execute_script("return 'axe' in window"):
            self.driver.execute_script(self._axe)
        found: list[dict[str, Any]] = self.driver.execute_async_script(_RUN_AXE, list(WCAG))
        return found

    def overflows(self, seconds: float = 3) -> int:
        """By how many pixels the page is wider than the window, once plots have followed a change of its width."""
        wider = "const e = document.documentElement; return e.scrollWidth - innerWidth"
        end = time.monotonic() + seconds
        while (found := int(self.driver.execute_script(wider))) > 0 and time.monotonic() < end:
            time.sleep(0.05)
        return found

    # ---- doing ----

    def fill(self, name: str, value: str, *, within: str = "main") -> None:
        """Fill a field of a form by its name, as with the keyboard: a field that has the focus is not replaced."""
        self.settle()
        field = self.enter_element(f"{within} [name={json.dumps(name)}]")
        if field.tag_name == "select":
            Select(field).select_by_value(value)
            return
        field.send_keys(value or Keys.DELETE)

    def enter_element(self, selector: str) -> WebElement:
        """The one element of a CSS selector, with the focus: what is in a form stays there as long as it has it."""
        found: WebElement = self.driver.execute_script(_ENTER, selector)
        return found

    def press(self, selector: str) -> None:
        """Click on a button of a form, once."""
        self.enter_element(selector).click()

    def send(self, selector: str) -> None:
        """Click on what sends a form, and wait for the page that answers."""
        before = self.one("html")
        self.press(selector)

        def is_gone(_: Chrome) -> bool:
            try:
                with _of_a_page_that_goes():
                    before.is_enabled()
            except ElementGoneError:
                return True
            return False

        WebDriverWait(self.driver, 60).until(is_gone)

    # ---- how it looks ----

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """The window's size and theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme, still])

    def picture(self, path: Path, *, most_height: int = 4000) -> None:
        """The whole page as a PNG, down to so many pixels."""
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self._cdp("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most_height), "scale": 1}
        made = self._cdp("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _cdp(self, command: str, **words: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, words)


@contextmanager
def browsing(base: str, *, javascript: bool = True, languages: str = "en") -> Iterator[Browser]:
    """A browser at a site, until the block ends. `base`: http://HOST:PORT."""
    folder = tempfile.mkdtemp(prefix="sluice-chromium-")
    options = ChromeOptions()
    options.binary_location = str(_PROGRAMS[0])
    for flag in (*_FLAGS, f"--user-data-dir={folder}", f"--lang={languages.partition(',')[0]}"):
        options.add_argument(flag)
    options.add_experimental_option(
        "prefs",
        {
            "intl.accept_languages": languages,
            "profile.managed_default_content_settings.javascript": 1 if javascript else 2,
        },
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(_PROGRAMS[1])))
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(120)
        browser = Browser(base, driver)
        browser.look()
        yield browser
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)
