"""What jobs draw is learnt, bounded by users and classes, and outlives the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.control_power import ControlBudget, ControlPower
from sluice.base.errors import SluiceError
from sluice.controllerd.power import estimates, lowered
from sluice.controllerd.power.estimates import HALF_LIFE_S, LEAST_S, Estimates, booked
from sluice.exchange.power_plan import LoweredBudget, render


def test_a_higher_draw_counts_at_once_and_a_lower_one_slowly() -> None:
    known = Estimates()
    known.learn(1000, "a100", 200, LEAST_S / 2, 0)
    assert known.watts(1000, "a100") is None
    known.learn(1000, "a100", 300, LEAST_S, 0)
    assert known.watts(1000, "a100") == 300
    known.learn(1000, "a100", 100, HALF_LIFE_S, 0)
    assert known.watts(1000, "a100") == 200
    assert known.watts(1001, "a100") == 200  # nothing is known of this user: as anybody
    assert known.watts(1001, "h100") is None


def test_users_make_no_more_than_an_entry_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "MOST", 10)
    known = Estimates()
    for number in range(100):
        known.learn(number, "a100", 100, LEAST_S, number)
        known.learn(number, "a100", 100, LEAST_S, number)
    assert sorted(user for user, _, _ in known.known()) == [-1, *range(91, 100)]


def test_estimates_outlive_the_daemon_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "estimates.json"
    assert list(Estimates.load(path).known()) == []
    known = Estimates()
    known.learn(1000, "a100", 321.04, LEAST_S, 5)
    known.save(path)
    assert Estimates.load(path).watts(1000, "a100") == 321
    path.write_text('{"estimates": [[1]]}')
    with pytest.raises(SluiceError, match="damaged"):
        Estimates.load(path)


def test_a_job_is_booked_with_the_lowest_cap_at_most_where_watts_are_short() -> None:
    assert booked(None, 240, 400, binding=False) == 400
    assert booked(None, 240, 400, binding=True) == 240
    assert booked(100, 240, 400, binding=True) == pytest.approx(110)
    assert booked(395, 240, 400, binding=False) == 400


def test_the_planners_file_has_budgets_first() -> None:
    text = render([(None, "a100", 240.2), (1000, "a100", 110)], {17: 300.5}, {"hall": LoweredBudget(60_000, 99.5)})
    assert text.splitlines()[:-1] == [
        "sluice-power 1", "budget hall 60000 99", "job 17 301", "estimate - a100 241", "estimate 1000 a100 110",
    ]  # fmt: skip


POLICY = ControlPower(budgets=(ControlBudget(name="hall", nodes="*", watts=9000, hours=((0, 60, 12_000),)),))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("row", 1000, 60), "not in the policy \\(known: hall\\)"),
        (("hall", "5kW", 60), "not an amount of watts"),
        (("hall", True, 60), "not an amount of watts"),
        (("hall", 12_000, 60), "not less than the policy's 12.0 kW"),
        (("hall", 500, 60), "less than the 800 W that its GPUs draw"),
        (("hall", 5000, 0), "not a time of at most 30 days"),
        (("hall", 5000, None), "not a time of at most 30 days"),
    ],
)
def test_a_budget_that_cannot_be_lowered_so(words: tuple[object, object, object], said: str) -> None:
    with pytest.raises(SluiceError, match=said):
        lowered.check(POLICY, *words, 800)


def test_lowered_budgets_end_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "lowered.json"
    assert lowered.read(path, 0) == {}
    lowered.write(path, {"hall": LoweredBudget(5000, 100, "root", 1)})
    assert lowered.read(path, 99)["hall"].watts == 5000 and lowered.read(path, 101) == {}
    path.write_text("[]")
    with pytest.raises(SluiceError, match="damaged"):
        lowered.read(path, 0)
