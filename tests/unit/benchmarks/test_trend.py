"""benchmarks.trend: known slopes are found, and noise, waves and restarts are not taken for growth."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import pytest

from benchmarks.trend import LEAST_SAMPLES, Reading, TooShortError, trend


def correlated(seed: int, count: int, step: float = 1.0, memory: float = 0.9) -> list[float]:
    """Noise in which each value is correlated with the one before."""
    draw = random.Random(seed)
    values = [0.0]
    for _ in range(count - 1):
        values.append(memory * values[-1] + draw.gauss(0, step))
    return values


def readings(values: list[float], hours: float = 2.0, life: str = "") -> list[Reading]:
    return [Reading(hours * number / len(values), value, life) for number, value in enumerate(values)]


@pytest.mark.parametrize("slope", [5.0, 50.0, -20.0])
def test_a_known_slope_is_within_three_errors(slope: float) -> None:
    for seed in range(20):
        noise = readings(correlated(seed, 500))
        found = trend([Reading(one.hours, 1000 + slope * one.hours + one.value) for one in noise])
        assert abs(found.slope - slope) < 4 * found.error
        assert found.error < 5
    assert found.exceeds(slope / 2) == (slope >= 50)


def test_correlated_noise_without_a_slope_is_no_leak() -> None:
    """If its readings were taken as independent, every third run would report a leak."""
    found = []
    for seed in range(200):
        with suppress(TooShortError):
            found.append(trend(readings(correlated(seed, 400, memory=0.95))).exceeds(0))
    assert len(found) > 180 and sum(found) <= 4


def test_waves_of_the_load_are_no_leak() -> None:
    waves = [math.sin(12 * math.pi * number / 400) for number in range(400)]
    assert not trend(readings(waves)).exceeds(0)


def test_an_exact_line_has_no_error() -> None:
    found = trend(readings([3.0 * number / 50 for number in range(100)]))
    assert found.slope == pytest.approx(3.0)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert (found.samples, found.mean) == (100, pytest.approx(2.97))
    assert found.exceeds(2.9) and not found.exceeds(3.1)


def test_a_constant_has_neither_slope_nor_error() -> None:
    found = trend(readings([7.0] * 100))
    assert (found.slope, found.error, found.exceeds(0)) == (0, 0, False)


def test_a_new_life_begins_at_its_own_level() -> None:
    """It is less after a restart, and its growth is the same: 10 an hour."""
    first = [Reading(number / 50, 500 + number / 5, "a") for number in range(50)]
    second = [Reading(1 + number / 50, 100 + number / 5, "b") for number in range(50)]
    assert trend(first + second).slope == pytest.approx(10)


def test_many_lives_are_still_a_series() -> None:
    """As of the leader, which is killed every other hour for days."""
    noise = correlated(5, 36 * 100)
    lives = [Reading(number / 50, 300 + number % 100 + noise[number], str(number // 100)) for number in range(3600)]
    found = trend(lives, warm_up_hours=0.5)
    assert abs(found.slope - 50) < 4 * found.error and found.error < 3


def test_the_warm_up_of_each_life_is_left_out() -> None:
    def life(name: str, begin: float) -> list[Reading]:
        return [Reading(begin + number / 100, min(number, 20) * 10, name) for number in range(100)]

    found = trend(life("a", 0) + life("b", 1), warm_up_hours=0.2)
    assert (found.slope, found.samples) == (0, 160)


def test_one_wave_is_too_short_for_a_slope() -> None:
    """There is no way to know what it does next."""
    with pytest.raises(TooShortError, match=r"400 readings are worth \d\.\d independent ones; run for longer"):
        trend(readings([math.cos(math.pi * number / 400) for number in range(400)]))


def test_too_few_readings_are_refused() -> None:
    with pytest.raises(TooShortError, match=f"9 readings after the warm-up: a slope needs {LEAST_SAMPLES}; run for"):
        trend(readings([1.0] * 90), warm_up_hours=1.8)
    with pytest.raises(TooShortError, match="each life has one block of readings"):
        trend([Reading(number, 1.0, str(number)) for number in range(50)])
