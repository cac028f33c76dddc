"""Reports of the web: made once for all, from rolled-up days, within bounds, and of what their viewer may see."""

from __future__ import annotations

import asyncio
import csv
import io
import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.controllerd import published_reports as module
from sluice.controllerd.published_reports import BusyError, Desk, History, Recent, parse_wanted
from sluice.exchange.pool_costs import PoolCosts, Spent
from sluice.report import collect
from sluice.report.collect import Selection, roll_up
from sluice.report.count import Span
from sluice.report.rollup import Rollup, count_open, midnight
from sluice.report.tally import SUMS, Key, Tally
from sluice.web.api import reports
from sluice.web.endpoint import Site
from tests.unit.report.test_report_collect import FLEET, NOW, TODAY, FakeSlurm, make_jobs, source
from tests.unit.web.reported import YESTERDAY, Reported
from tests.unit.web.test_access import Web

DAYS = f"since={YESTERDAY}&until={date.today()}"


def figures(cells: dict[Key, Tally]) -> dict[Any, Any]:
    return {
        key: {name: round(value, 3) for name in SUMS if (value := getattr(made, name))} for key, made in cells.items()
        if any(getattr(made, name) for name in SUMS)
    }  # fmt: skip


def test_any_days_are_what_counting_all_of_them_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled up or recent, of users or of nodes."""
    monkeypatch.setattr(collect, "stream", FakeSlurm(make_jobs(600, 3)).stream)
    rolled = Rollup(tmp_path, "c")
    first = TODAY - timedelta(days=12)
    list(roll_up(source(rolled), [first + timedelta(days=number) for number in range(10)]))
    until = TODAY - timedelta(days=2)
    history = History(cast(Any, None), lambda: FLEET)
    monkeypatch.setattr(history, "rolled", lambda: rolled)
    count = count_open(until, source().jobs(Span(midnight(until), NOW), Selection()), FLEET, NOW)
    history.recent = Recent(until, NOW, count.cells, count.nodes)
    choose = random.Random(5)
    for _ in range(12):
        start = first + timedelta(days=choose.randrange(12))
        last = min(TODAY, start + timedelta(days=choose.randrange(9)))
        span = Span(midnight(start), min(midnight(last + timedelta(days=1)), int(NOW)))
        wanted = source().cells(span, Selection())
        found = history.cells(start, last, nodes=False)
        assert figures(found) == figures(wanted), (start, last)
        of_nodes = history.cells(start, last, nodes=True)[Key("", "", "", "", "", "", "n1")]
        assert of_nodes.gpu_s == pytest.approx(sum(made.gpu_s for made in wanted.values()))
    assert history.missing(first - timedelta(days=2), TODAY, nodes=False) == [
        str(first - timedelta(days=2)), str(first - timedelta(days=1)),
    ]  # fmt: skip


def test_a_hundred_viewers_cost_what_one_does(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    for user in ("alice", "bob", "oscar"):
        for _ in range(34):
            assert web.get(f"/reports/users?{DAYS}", user).status_code in (200, 429)
            web.site.rates.__init__()  # type: ignore[misc]
    assert web.daemon.sacct == 1, "for the first one, later by a duty"
    history = web.daemon.reports.history
    history._due = 0.0
    for _ in range(100):
        history.refresh(web.daemon.site)
    assert web.daemon.sacct == 2
    made: list[str] = []
    page = web.daemon.reports.pages._make
    web.daemon.reports.pages._make = lambda name: made.append(name) or page(name)  # type: ignore[func-returns-value]
    for user in ("alice", "bob", "oscar"):
        assert web.get("/jobs/3/report", user).status_code == 200
    assert made == ["3"]


def test_nothing_is_read_from_the_accounting_while_nobody_asks_for_reports(tmp_path: Path) -> None:
    daemon = Reported(tmp_path)
    daemon.reports.history.refresh(daemon.site)
    assert daemon.sacct == 0


def test_what_slurmdbd_does_not_answer_stays_and_says_since_when(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    history = web.daemon.reports.history
    history.read_recent()
    good = web.get(f"/reports/users?{DAYS}", "root").json()
    assert good["stale_since"] is None and good["recent_at"] and good["missing"] == []
    assert {row["user"]: row["gpu_s"] for row in good["rows"]} == {"alice": 10800, "bob": 5400, "mallory": 5400}
    web.daemon.fails, history._due = True, 0.0
    history.read_recent()
    web.daemon.reports.reports._made.clear()
    stale = web.get(f"/reports/users?{DAYS}", "root").json()
    assert (
        stale["rows"] == good["rows"] and "slurmdbd" in stale["problem"] and stale["stale_since"] == history.recent.at
    )  # type: ignore[union-attr]
    web.daemon.fails, history._due = False, 0.0
    history.read_recent()
    web.daemon.reports.reports._made.clear()
    assert web.get(f"/reports/users?{DAYS}", "root").json()["stale_since"] is None


@pytest.mark.parametrize("kind", ["tenants", "users", "gpus", "nodes", "efficiency", "waste", "fairness", "jobs"])
def test_each_report_is_json_and_csv(tmp_path: Path, kind: str) -> None:
    web = Web(tmp_path, [])
    document = web.get(f"/reports/{kind}", "root").json()
    assert document["report"] == kind and document["rows"]
    text = web.get(f"/reports/{kind}?format=csv", "root")
    assert text.headers["content-type"].startswith("text/csv")
    rows = list(csv.reader(io.StringIO(text.text)))
    assert len(rows) == 1 + len(document["rows"]) and all(len(row) == len(rows[0]) for row in rows)


def test_costs_of_pools_are_divided_by_use_and_idle_time_is_the_operators_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {YESTERDAY.isoformat(): Spent(machine_s=3600.0, cost=90.0, unpriced_s=1800.0)}
    pools = {"p5": PoolCosts("of-alice", 8, 192, spent)}
    monkeypatch.setattr(module, "read_costs", lambda: pools)

    def costs(web: Web, who: str, more: str = "") -> dict[str, float]:
        rows = web.get(f"/reports/cost?{DAYS}{more}", who).json()["rows"]
        return {row["account"]: row["cost"] for row in rows if row["partition"] == "of-alice"}

    web = Web(tmp_path, [])
    used = costs(web, "root")["physics"]
    assert "50.0% of the machine-hours" in web.get(f"/reports/cost?{DAYS}", "root").json()["notes"][0]
    assert 0 < used < 90 and costs(web, "root") == {"physics": used, "(idle)": 90 - used}
    assert costs(web, "root", "&account=physics") == {"physics": used}
    private = Web(tmp_path / "private", ["usage"])
    assert costs(private, "alice") == {"physics": used} and costs(private, "mallory") == {}
    notes = {who: private.get(f"/reports/cost?{DAYS}", who).json()["notes"] for who in ("alice", "mallory")}
    assert len(notes["alice"]) == 1 and notes["mallory"] == []  # of no pool that none of their jobs has used
    assert web.get(f"/reports/cost?{DAYS}&format=csv", "root").text.splitlines()[0].endswith("MachineHours,Cost")


def test_filters_and_bounds(tmp_path: Path) -> None:
    web = Web(tmp_path, [])

    def users(query: str) -> set[str]:
        return {row["user"] for row in web.get(f"/reports/users?{DAYS}&{query}", "root").json()["rows"]}

    assert users("user=bob,mallory") == {"bob", "mallory"} and users("account=chemistry") == {"mallory"}
    assert users("partition=of-alice") == {"alice"} and users("gpu_type=nothing") == set()
    by = web.get(f"/reports/waste?{DAYS}&by=partition,account", "root").json()["rows"]
    assert {(row["account"], row["partition"]) for row in by} >= {("chemistry", "of-mallory")}
    cut = web.get(f"/reports/users?{DAYS}&limit=1", "root").json()
    assert len(cut["rows"]) == 1 and cut["total"] == 3
    for bad in (
        "since=2026-01-02&until=2026-01-01",
        "since=2024-01-01&until=2026-01-01",
        "since=x",
        "by=node",
        "limit=9999",
    ):
        assert web.get(f"/reports/users?{bad}", "root").status_code == 400, bad
    assert web.get("/reports/jobs?since=2026-01-01&until=2026-01-05", "root").status_code == 400, "a day of all users"
    assert web.get("/reports/jobs?since=2026-01-01&until=2026-01-05&user=bob", "root").status_code == 200
    month = web.get("/reports/gpus/each?since=2026-01-01", "root").json()
    assert month["end"] - month["start"] == 31 * 86400, "as many days as it may"
    assert web.get("/reports/gpus/each?since=2026-01-01&until=2026-02-01", "root").status_code == 400
    assert web.get("/reports/nothing", "root").status_code == 404


def test_where_use_is_private_a_users_own_is_all_that_leaves_the_daemon(tmp_path: Path) -> None:
    web = Web(tmp_path, ["usage", "jobs"])
    tenants = web.get(f"/reports/tenants?{DAYS}", "alice").json()["rows"]
    assert [(row["account"], row["gpu_s"]) for row in tenants] == [("physics", 2 * (3600.0 + 1800.0))]
    assert tenants[0]["gpu_limit"] == 100
    web.daemon.asked.clear()
    web.get(f"/reports/jobs?user=mallory,alice&{DAYS}", "alice")
    assert set(web.daemon.asked) == {frozenset({"alice"})}, "slurmdbd is asked for no other's jobs"
    page = web.get("/jobs/1/report", "alice").json()
    assert page["host"]["cpu_s"] == 1.0
    web = Web(tmp_path / "b", ["usage"])
    assert web.get("/jobs/3/report", "alice").json()["host"]["cpu_s"] is None, "what it used is its user's"


def test_a_desk_is_bounded_for_each_and_for_all_and_keeps_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(lambda what: {"rows": "x" * 1000})
    for number in range(4):
        assert desk.ask(number, "mallory") is None
    with pytest.raises(BusyError):
        desk.ask(99, "mallory")
    assert desk.ask(0, "alice") is None and desk.ask(5, "alice") is None, "another's places are another's"
    for number in range(100, 170):
        try:
            desk.ask(number, f"user{number}")
        except BusyError:
            break
    assert len(desk._orders) == 64
    monkeypatch.setattr(module, "_MOST_KEPT", 10_000)
    while desk._orders:
        desk.step(0.0)
    assert len(desk._made) <= 6

    def fails(what: Any) -> dict[str, Any]:
        raise SluiceError("sacct: no answer")

    broken = Desk(fails)
    assert broken.ask(1, "alice") is None
    broken.step(0.0)
    with pytest.raises(SluiceError, match="no answer"):
        broken.ask(1, "alice")


def test_who_waits_too_long_is_sent_away_and_may_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web(tmp_path, [])
    monkeypatch.setattr(reports, "_PATIENCE_S", 0.1)

    async def waits(do: str, **words: Any) -> dict[str, Any]:
        return {"waits": True}

    async def busy(do: str, **words: Any) -> dict[str, Any]:
        return {"busy": "too many"}

    for ask in (waits, busy):
        web.site.feed.ask = ask  # type: ignore[method-assign]
        said = web.get("/reports/users", "root")
        assert said.status_code == 503 and said.headers["retry-after"] and said.json()["remedy"]


@pytest.mark.parametrize(
    "words",
    [
        {"report": "x"}, {"by": ["x"]}, {"by": "x"}, {"from": "x"}, {"from": "0001-01-01"}, {"until": None},
        {"accounts": [1] * 20_000}, {"report": "nodes", "users": ["a"]}, {"report": "nodes", "by": ["node", "user"]},
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        parse_wanted({"report": "users", "from": "2026-01-01", "until": "2026-01-02", **words})


def test_the_use_over_time_is_that_of_the_jobs_own_gpus(tmp_path: Path) -> None:
    web = Web(tmp_path, ["jobs", "nodes"])
    series, rows = web.site.store.series, web.site.store.rows("gpus")
    series.note(web.site.store.answered + 10, rows)
    series.note(web.site.store.answered + 60, {key: {**row, "utilisation_percent": 70.4} for key, row in rows.items()})
    series.note(web.site.store.answered + 120, {key: {**row, "memory_used_mib": None} for key, row in rows.items()})
    found = web.get("/jobs/1/series", "alice").json()
    assert found["gpus"] == [
        {"node": "n1", "index": 1, "utilisation_percent": [5, 70, 5], "memory_used_mib": [1, 1, None]}
    ]
    assert len(found["times"]) == 3 and web.get("/jobs/3/series", "alice").status_code == 404


def test_an_unknown_job_and_one_of_anothers_are_alike(tmp_path: Path) -> None:
    web = Web(tmp_path, ["jobs"])
    web.site.store.jobs.remove(3)  # slurmctld has forgotten it
    unknown, hidden = (web.get(f"/jobs/{number}/report", "alice").json() for number in (77, 3))
    assert {**unknown, "request_id": "", "detail": ""} == {**hidden, "request_id": "", "detail": ""}
    assert web.get("/jobs/3/report", "mallory").status_code == 200


def test_waiting_is_not_the_event_loops() -> None:
    """Many who wait for what is being made hold up nobody."""

    class _Feed:
        async def ask(self, do: str, **words: Any) -> dict[str, Any]:
            return {"waits": True}

    site = cast(Site, type("S", (), {"feed": _Feed()}))

    async def many() -> float:
        viewer = type("V", (), {"user": "alice"})
        waiting = [asyncio.create_task(reports.made(site, cast(Any, viewer), "report")) for _ in range(500)]
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        took = asyncio.get_running_loop().time() - began
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return took

    assert asyncio.run(many()) < 2.0
