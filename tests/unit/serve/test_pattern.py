"""The daily pattern."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sluice.serve.replicad.pattern import Pattern, Patterns, Quarter, quarter_of

MONDAY = Quarter(20_409, 36)  # 2025-11-17, 9 o'clock
DAY = 86_400


def test_a_day_is_that_of_the_local_calendar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert quarter_of(1_763_366_400.0) == MONDAY  # 08:00 UTC
        assert quarter_of(1_763_366_400.0 + 899) == MONDAY and not MONDAY.weekend
        assert quarter_of(1_763_416_800.0) == Quarter(20_409, 92) and quarter_of(1_763_420_400.0).day == 20_410
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert [Quarter(MONDAY.day + n, 0).weekend for n in range(7)] == [False] * 5 + [True] * 2


def test_what_is_usual_is_the_middle_of_days_of_its_kind() -> None:
    pattern = Pattern()
    for day, needed in ((-3, 1), (-4, 9), (-5, 3), (-2, 50), (-1, 50)):  # Friday, Thursday, Wednesday, weekend
        pattern.record(Quarter(MONDAY.day + day, MONDAY.number), needed)
    assert pattern.usual(MONDAY) == 3, "neither of the weekend, nor of one day that was unlike the others"
    assert pattern.usual(Quarter(MONDAY.day, 37)) == 0 and pattern.usual(Quarter(MONDAY.day + 5, 36)) == 0


def test_too_few_days_are_no_pattern() -> None:
    pattern = Pattern()
    for day in (-3, -4):
        pattern.record(Quarter(MONDAY.day + day, 36), 5)
    assert pattern.usual(MONDAY) == 0


def test_it_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    nine = MONDAY.day * DAY + 9 * 3600.0
    pattern = Pattern()
    for week in range(1, 6):
        pattern.record(quarter_of(nine - week * 7 * DAY), 4)
        for other in range(1, 5):
            pattern.record(quarter_of(nine - week * 7 * DAY + other * DAY), 4)
    assert pattern.ahead(nine - 1200, 600) == 0
    assert pattern.ahead(nine - 500, 600) == 4 and pattern.ahead(nine + 899, 1) == 4
    assert pattern.ahead(nine + 901, 60) == 0
    monkeypatch.delenv("TZ")
    time.tzset()


def test_a_quarter_without_need_is_known_as_such() -> None:
    pattern = Pattern()
    for day in (-3, -4, -5):
        pattern.record(Quarter(MONDAY.day + day, 36), 0)
    pattern.record(Quarter(MONDAY.day - 6, 36), 9)
    assert pattern.usual(MONDAY) == 0


def test_the_file_is_bounded_and_survives_what_is_not_one(tmp_path: Path) -> None:
    patterns = Patterns(tmp_path / "patterns.json")
    patterns.load()
    for day in range(100):
        patterns.record("words", NOW + day * DAY, 2)
    patterns.record("gone", NOW, 1)
    patterns.save({"words": None})
    again = Patterns(tmp_path / "patterns.json")
    again.load()
    assert again.of == patterns.of and set(again.of) == {"words"} and len(again.of["words"].days) == 35
    before = (tmp_path / "patterns.json").stat().st_mtime_ns
    patterns.save({"words": None})
    assert (tmp_path / "patterns.json").stat().st_mtime_ns == before, "unchanged is not written"
    for text in ("", "{", "[]", '{"services": []}', '{"services": {"a": {"x": [1]}}}', '{"services": {"a": 1}}'):
        (tmp_path / "patterns.json").write_text(text)
        other = Patterns(tmp_path / "patterns.json")
        other.load()
        assert not other.of


NOW = 1_750_000_000.0
