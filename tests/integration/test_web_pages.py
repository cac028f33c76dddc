"""The page in a real browser, next to a real controller: what tenants and operators do, from the log-in on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dev_cluster.cluster import DevCluster
from gpu_sim.fields import set_values
from tests.integration.jobs import shown, submit
from tests.integration.settled import until
from tests.integration.web_site import Site, web_site
from tests.web.browser import Browser, browsing, require_browser

pytestmark = pytest.mark.cluster

HOT = 7
"""The GPU of n1 that is taken out of service."""
POLICY = """\
# The lab's policy.
health: {interval: 1s, passes: 500, checks: {temperature: {window: 0s}}}
monitoring: {interval: 1s, running: 5s}
tenants:
  physics: {members: [alice], limit: {gpus: 3}}
  chemistry: {members: [mallory, oper, root2, sluice-web]}
"""
ATTACK = '"><script>window.marker=1</script><img src=x onerror=window.marker=1>{{7*7}}'
SCRIPT = "#!/bin/sh\nsleep 600\n"


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    require_browser()
    yield from web_site(make_shared_cluster, policy=POLICY, sluice={"level": "place", "policy": ""})


@pytest.fixture(scope="module")
def base(site: Site) -> str:
    return f"http://127.0.0.1:{site.port}"


@pytest.fixture(scope="module")
def tenant(site: Site, base: str) -> Iterator[Browser]:
    with browsing(base) as browser:
        log_in(browser, site.tokens["alice"])
        yield browser


@pytest.fixture
def operator(site: Site, base: str) -> Iterator[Browser]:
    with browsing(base) as browser:
        yield browser


def log_in(browser: Browser, token: str) -> None:
    browser.open("/jobs")
    assert browser.path.startswith("/login")
    browser.fill("token", token)
    browser.send("form.login button")
    assert browser.path == "/jobs", browser.text()


def waits_for(browser: Browser, text: str, selector: str = "main") -> None:
    """Until the page shows a text, without a reload."""
    browser.driver.execute_script("window.kept = 1")
    until(lambda: browser.text(selector), lambda seen: text in seen, timeout=60)
    assert browser.driver.execute_script("return window.kept") == 1, "the page was loaded again"


def test_a_tenant_finds_why_a_job_waits(site: Site, tenant: Browser) -> None:
    tenant.open("/jobs?user=alice")
    tenant.follow(f"/jobs/{site.jobs['waits']}")
    waits_for(tenant, "Why it waits")
    until(lambda: tenant.text("#state").lower(), lambda seen: "limit" in seen)
    assert "mallory" not in tenant.driver.page_source
    tenant.open(f"/jobs/{site.jobs['mallory']}")
    assert "no such page" in tenant.text() and "mallory" not in tenant.text("main")
    tenant.errors()  # a page that is not there is one


def test_a_tenant_submits_watches_and_cancels_a_job(site: Site, tenant: Browser) -> None:
    tenant.open("/submit")
    for name, value in {"name": "by-hand", "gpus": "1", "memory": "10M", "time_limit": "30", "script": SCRIPT}.items():
        tenant.fill(name, value)
    tenant.send("button[value=try]")
    assert "It would " in tenant.text("#tried") and "refused" not in tenant.text("#tried"), tenant.text()
    tenant.send("button[value=submit]")
    number = int(tenant.path.removeprefix("/jobs/").partition("?")[0])
    site.jobs["by hand"] = number
    waits_for(tenant, "RUNNING")
    assert shown(site.cluster, number)["JobName"] == "by-hand"
    until(lambda: site.get(f"/jobs/{number}", "alice")["gpus"])
    tenant.open(f"/jobs/{number}")
    assert "n1" in tenant.text("#gpus") and "GiB" in tenant.text("#gpus"), tenant.text("#gpus")
    tenant.press("form[action$=cancel] button")
    sure(tenant)
    waits_for(tenant, "CANCELLED")
    assert shown(site.cluster, number)["JobState"] == "CANCELLED"
    assert tenant.errors() == []


def sure(browser: Browser) -> None:
    """Agree to what the page asks before it does something."""
    from selenium.webdriver.support.expected_conditions import alert_is_present
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser.driver, 60).until(alert_is_present()).accept()


def test_what_tenants_name_is_text_and_nothing_else(site: Site, tenant: Browser) -> None:
    site.jobs["hostile"] = int(
        submit(site.cluster, "-Aphysics", f"-J{ATTACK}", f"--comment={ATTACK}", "--mem=10M", "-H", cwd="/")
    )
    until(lambda: site.ask(f"/jobs/{site.jobs['hostile']}", "alice")[0] == 200)
    for path in ("/jobs?user=alice", f"/jobs/{site.jobs['hostile']}", "/search?q=%3Cscript%3E", "/"):
        tenant.open(path)
        tenant.settle()
        assert tenant.driver.execute_script(
            "return window.marker === undefined && !document.querySelector('img[src=x]')"
        )
        assert "49" not in tenant.text("h1") and tenant.axe() == []
    assert tenant.errors() == []


def test_an_operator_returns_a_gpu_to_service(site: Site, operator: Browser) -> None:
    folder = site.cluster.layout.gpu_sim("n1")
    set_values(folder, HOT, {"temperature": "96"})
    until(lambda: site.get("/health")["rows"], lambda rows: any(row["state"] == "out" for row in rows), shows=site.logs)
    set_values(folder, HOT, {"temperature": "35"})
    log_in(operator, site.tokens["oper"])
    operator.open("/nodes/n1")
    waits_for(operator, "out")
    assert operator.axe() == []
    operator.open("/health")
    operator.fill("reason", "fan replaced")
    operator.send("form[action='/health/return'] button")
    assert operator.path.startswith("/health")
    until(
        lambda: site.get("/health")["rows"],
        lambda rows: not any(row["state"] == "out" for row in rows),
        shows=site.logs,
    )
    waits_for(operator, "health.return")
    assert operator.errors() == []


def test_an_administrator_checks_plans_and_applies_a_policy(site: Site, operator: Browser) -> None:
    log_in(operator, site.tokens["root2"])
    operator.open("/policy")
    assert operator.one("textarea").get_attribute("value") == POLICY
    operator.fill("text", POLICY.replace("gpus: 3", "gpus: -3"))
    operator.send("button[value=plan]")
    assert "Line 5" in operator.text() and not operator.all("ins")
    operator.fill("text", POLICY.replace("gpus: 3", "gpus: 5"))
    operator.send("button[value=plan]")
    assert "gres/gpu=5" in " ".join(operator.texts("ins")), operator.text()
    assert "gres/gpu=3" in " ".join(operator.texts("del"))
    assert operator.axe() == []
    operator.send("button[value=apply]")
    assert "Applied" in operator.text()
    limits = site.cluster.run(["sacctmgr", "-nP", "show", "assoc", "account=physics", "user=", "format=GrpTRES"])
    assert "gres/gpu=5" in limits.stdout
    until(lambda: site.get("/tenants/physics/quota")["quota"], lambda rows: any(row["limit"] == 5 for row in rows))
    operator.open("/audit")
    assert "root2" in operator.text("main") and "alice" in operator.text("main")
    assert operator.errors() == []


def test_without_scripts_a_tenant_logs_in_lists_and_submits(site: Site, base: str) -> None:
    with browsing(base, javascript=False) as browser:
        log_in(browser, site.tokens["alice"])
        browser.open("/jobs?user=alice")
        assert str(site.jobs["alice"]) in browser.text("main")
        browser.open("/submit")
        browser.fill("script", SCRIPT)
        browser.fill("memory", "10M")
        browser.send("button[value=submit]")
        number = int(browser.path.removeprefix("/jobs/").partition("?")[0])
        site.jobs["plain"] = number
        assert shown(site.cluster, number)["UserId"].startswith("alice(")
        until(lambda: (browser.open(f"/jobs/{number}"), browser.text("main"))[1], lambda seen: "RUNNING" in seen)
        browser.send("form[action$=cancel] button")
        until(lambda: (browser.open(f"/jobs/{number}"), browser.text("main"))[1], lambda seen: "CANCELLED" in seen)
        browser.send("form[action='/logout'] button")
        browser.open("/jobs")
        assert browser.path.startswith("/login")


def test_the_audit_log_has_it_all(site: Site) -> None:
    entries = site.get("/audit", "root2")["entries"]
    done = {
        ("alice", "web submit"),
        ("alice", "web cancel"),
        ("oper", "web health-return"),
        ("root2", "web policy-apply"),
    }
    assert done <= {(one["user"], one["action"]) for one in entries}
