"""What machines of pools cost, divided among those who used them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.pool_costs import PoolCosts, Spent, read_costs, render_costs
from sluice.report.costs import IDLE, cost_rows, unpriced_words
from sluice.report.count import Span
from sluice.report.rollup import midnight, whole_days
from sluice.report.tally import Key, Tally

DAY = date(2026, 5, 4)
SPAN = Span(midnight(DAY), midnight(DAY + timedelta(days=1)))
POOLS = {
    "p5": PoolCosts("burst", 8, 192, {"2026-05-03": Spent(3600, 90), "2026-05-04": Spent(10 * 3600, 1000)}),
    "cpu": PoolCosts("cheap", 0, 4, {"2026-05-04": Spent(3600, 1)}),
}


def key(account: str, partition: str, user: str = "u") -> Key:
    return Key(account, user, partition, "q", "COMPLETED", "h100")


CELLS = {
    key("nlp", "burst"): Tally(ran=2, gpu_s=8 * 4 * 3600.0),
    key("nlp", "burst", "v"): Tally(ran=1, shared_gpu_s=4 * 3600.0),
    key("bio", "burst"): Tally(ran=1, gpu_s=8 * 3600.0),
    key("bio", "cheap"): Tally(ran=1, cpu_s=2 * 3600.0),
    key("bio", "owned"): Tally(ran=1, gpu_s=8 * 3600.0),
}


def test_parts_of_machines_and_what_nobody_used_add_up_to_what_was_paid() -> None:
    rows = cost_rows(POOLS, CELLS, ("partition", "account"), SPAN, idle=True)
    found = {tuple(row.names.values()): (row.extra["machine_s"] / 3600, round(row.extra["cost"], 6)) for row in rows}
    assert found == {
        ("burst", "nlp"): (4.5, 450.0), ("burst", "bio"): (1.0, 100.0), ("burst", IDLE): (4.5, 450.0),
        ("cheap", "bio"): (0.5, 0.5), ("cheap", IDLE): (0.5, 0.5),
    }  # fmt: skip
    assert {row.tally.ran for row in rows if row.names["account"] == "nlp"} == {3}


def test_a_pool_that_was_renamed_has_the_costs_of_both_names() -> None:
    pools = {**POOLS, "p6": PoolCosts("burst", 8, 192, {"2026-05-04": Spent(5 * 3600, 200)})}
    rows = cost_rows(pools, CELLS, ("partition", "account"), SPAN, idle=True)
    assert sum(row.extra["cost"] for row in rows if row.names["partition"] == "burst") == pytest.approx(1200)


def test_who_sees_only_some_jobs_sees_no_idle_time_and_the_same_cost_of_them() -> None:
    rows = cost_rows(POOLS, {key("bio", "burst"): CELLS[key("bio", "burst")]}, ("account",), SPAN, idle=False)
    assert [(row.names["account"], row.extra["cost"]) for row in rows] == [("bio", 100.0)]


def test_a_report_is_of_whole_days_until_now() -> None:
    now = SPAN.start + 7200
    assert whole_days(Span(SPAN.start + 100, now), now) == Span(SPAN.start, now)
    assert whole_days(Span(SPAN.start + 100, SPAN.start + 200), SPAN.end + 5) == Span(SPAN.start, SPAN.end)


def test_days_that_are_too_old_are_forgotten() -> None:
    pool = PoolCosts()
    for number in range(410):
        pool.book(SPAN.start + number * 86_400.0, SPAN.start + number * 86_400.0 + 60, 1.0)
    assert len(pool.days) == 400 and DAY.isoformat() not in pool.days


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert read_costs(path) == {}
    path.write_bytes(render_costs(POOLS))
    assert read_costs(path) == POOLS
    path.write_text("nonsense")
    with pytest.raises(SluiceError, match="not what fleetd writes"):
        read_costs(path)


def test_costs_of_machines_without_a_price_are_named_and_not_0() -> None:
    pool = PoolCosts("burst", 8, 192)
    pool.book(SPAN.start, SPAN.start + 36_000, None)
    rows = cost_rows({"p5": pool}, CELLS, ("account",), SPAN, idle=False)
    assert {row.names["account"]: row.extra["cost"] for row in rows} == {"nlp": None, "bio": None}
    assert unpriced_words({"p5": pool, "cpu": POOLS["cpu"]}, SPAN) == [
        "pool p5: costs are without 100.0% of the machine-hours: fleetd took machines over whose shape the policy does "
        "not have"
    ]
    pool.book(SPAN.start, SPAN.start + 36_000, 30.0)
    rows = cost_rows({"p5": pool}, CELLS, ("account",), SPAN, idle=False)
    assert {row.names["account"]: row.extra["cost"] for row in rows} == {"nlp": 300 * 4.5 / 20, "bio": 300 / 20}
