"""Budgets that are earned again, and lines of a log that others cause."""

from __future__ import annotations

import logging

import pytest

from sluice.base import line_server, rates
from sluice.base.rates import Budgets, FewLines, Lines, Owner, Rate
from sluice.exchange import inbox
from sluice.explain import explain_service


def spend(budgets: Budgets, owner: Owner, now: float) -> int:
    """Takes all that there is."""
    taken = 0
    while not budgets.wait(owner, now):
        budgets.forget(now)
        budgets.take(owner, now)
        taken += 1
    return taken


def test_what_is_earned_comes_every_half_second_for_all_at_once() -> None:
    budgets = Budgets(Rate(1000, 100), Rate(8, 4))
    assert spend(budgets, ("ann",), 100.1) == 8 and spend(budgets, ("bob",), 100.3) == 8
    assert budgets.wait(("ann",), 100.1) == pytest.approx(0.4) and budgets.wait(("bob",), 100.3) == pytest.approx(0.2)
    assert spend(budgets, ("ann",), 100.5) == 2 and spend(budgets, ("ann",), 100.9) == 0
    assert sum(spend(budgets, ("ann",), 101 + tenth / 10) for tenth in range(100)) == pytest.approx(40, abs=2)
    budgets.forget(1000.0)
    assert spend(budgets, ("ann",), 1000.0) == 8


def test_all_together_have_a_rate_too_and_what_is_paid_does_not_count() -> None:
    budgets = Budgets(Rate(10, 2), Rate(8, 4))
    assert [spend(budgets, (name,), 50.0) for name in "abc"] == [8, 2, 0]
    assert budgets.wait(("c",), 50.0) == pytest.approx(0.5) and budgets.wait(("c",), 50.0, paid=1) == 0
    assert budgets.wait(("a",), 50.0, paid=1) > 0 and budgets.wait(("a",), 50.0, paid=2) == 0


def test_lines_are_few_then_one_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(rates.time, "monotonic", lambda: clock[0])
    lines = Lines(100, 4)
    assert [lines.left_out((7,)) for _ in range(10)] == [0] * 4 + [None] * 6
    assert lines.left_out((8,)) == 6, "another owner's is written, and tells"
    clock[0] += 61
    assert [lines.left_out((7,)) for _ in range(3)] == [0, None, None]


def test_a_flood_of_one_line_leaves_others_in_a_daemons_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test.rates")
    log.addFilter(FewLines())
    with caplog.at_level(logging.INFO, logger="test.rates"):
        for number in range(100):
            log.error("uid %d: refused", number)
        log.error("the disk is full")
    assert len(caplog.messages) == 17 and caplog.messages[-1] == "the disk is full (84 lines were left out)"


@pytest.mark.parametrize("log", [line_server.log, explain_service.log, inbox.log], ids=lambda log: log.name)
def test_daemons_that_users_ask_write_few_lines(log: logging.Logger) -> None:
    assert any(isinstance(one, FewLines) for one in log.filters)
