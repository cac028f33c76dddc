"""The statistics of job-overhead, on measurements whose result is known."""

from __future__ import annotations

import random
from math import exp

import pytest

from benchmarks.job_overhead import Estimate, Slice, Taken, Window, _located, judge


def test_where_values_lie_as_published() -> None:
    """Hollander and Wolfe, Nonparametric Statistical Methods, table 3.1: 0.46, and from 0.010 to 0.786."""
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    found = _located([one - other for one, other in zip(before, after, strict=True)])
    assert (found.value, found.low, found.high) == pytest.approx((0.46, 0.010, 0.786))


def test_the_interval_has_the_truth_as_often_as_it_says() -> None:
    chance, held = random.Random(7), 0
    for _ in range(400):
        found = _located([1 + chance.gauss(0, 1) * (10 if chance.random() < 0.05 else 1) for _ in range(40)])
        held += found.low <= 1 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_a_sum_of_estimates() -> None:
    both = Estimate(1.0, 0.7, 1.4).plus(Estimate(2.0, 1.6, 2.3))
    assert (both.value, both.low, both.high) == pytest.approx((3.0, 2.5, 3.5))


def _taken(slower: float, rate: float, waits: float = 0.0) -> Taken:
    """Rounds whose processes are faster or slower by some percent, as the place of their memory makes them."""
    chance, taken = random.Random(5), Taken()
    for _ in range(100):
        own, pairs = exp(chance.gauss(0, 0.01)), []
        for _ in range(8):
            bare, job = (0.1 * exp(chance.gauss(0, 0.005)) for _ in range(2))
            job *= own * (1 + slower)
            pairs.append((Slice(bare * (1 + waits), bare), Slice(job * (1 + waits), job)))
        taken.rounds.append(pairs)
    taken.windows = [Window(31, 31 * rate * exp(chance.gauss(0, 0.1)), 0.0) for _ in range(12)]
    taken.whole = {
        name: [at + chance.gauss(0, 0.01) for _ in range(60)] for name, at in (("stock", 0.1), ("job", 0.25))
    }
    return taken


def test_what_costs_less_than_a_percent_is_distinguished_from_what_costs_more() -> None:
    little, much = judge(_taken(0.001, 0.004)), judge(_taken(0.012, 0.004))
    assert little.figures["cost_percent"] == pytest.approx(0.5, abs=0.25)
    assert little.figures["cost_percent_high"] < 1 < much.figures["cost_percent"]
    assert much.spread["cost_percent"][0] > 1 and "one_percent_job_s" not in much.figures
    assert little.figures["elapsed_percent"] == pytest.approx(little.figures["program_cpu_percent"], abs=0.01)


def test_how_long_a_job_has_to_be() -> None:
    found = judge(_taken(0.0, 0.005))
    figures = found.figures
    assert figures["fixed_ms"] == pytest.approx(150, abs=5) and figures["whole_ms"] == pytest.approx(250, abs=5)
    left = (1 - figures["cost_percent"]) / 100
    assert figures["one_percent_job_s"] == pytest.approx(figures["fixed_ms"] / 1000 / left, rel=0.01)
    assert figures["one_percent_bare_s"] == pytest.approx(figures["whole_ms"] / 1000 / left, rel=0.01)
    assert found.spread["one_percent_job_s"][1] > figures["one_percent_job_s"]


def test_the_clock_says_nothing_where_processors_were_waited_for() -> None:
    figures = judge(_taken(0.0, 0.005, waits=0.05)).figures
    assert "elapsed_percent" not in figures and figures["waited_percent"] == 100
