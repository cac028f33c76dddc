"""The words for times, as sacct(1) lists them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from sluice.base.errors import UsageError
from sluice.slurm.text import _times
from sluice.slurm.time_words import parse_time

NOW = datetime(2026, 11, 21, 14, 30, 15).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", "2026-11-21T14:30:15"),
        ("NOW", "2026-11-21T14:30:15"),
        ("now-1hour", "2026-11-21T13:30:15"),
        ("now-90", "2026-11-21T14:28:45"),
        ("now+2days", "2026-11-23T14:30:15"),
        ("now - 1 weeks", "2026-11-14T14:30:15"),
        ("now-5m", "2026-11-21T14:25:15"),
        ("today", "2026-11-21T00:00:00"),
        ("midnight", "2026-11-21T00:00:00"),
        ("yesterday", "2026-11-20T00:00:00"),
        ("tomorrow", "2026-11-22T00:00:00"),
        ("elevenses", "2026-11-21T11:00:00"),
        ("noon", "2026-11-21T12:00:00"),
        ("fika", "2026-11-21T15:00:00"),
        ("teatime", "2026-11-21T16:00:00"),
        ("09:15", "2026-11-21T09:15:00"),
        ("09:15:42", "2026-11-21T09:15:42"),
        ("9:15PM", "2026-11-21T21:15:00"),
        ("12:00am", "2026-11-21T00:00:00"),
        ("12:00pm", "2026-11-21T12:00:00"),
        ("2026-02-03", "2026-02-03T00:00:00"),
        ("2026-02-03T04:05", "2026-02-03T04:05:00"),
        ("2026-02-03T04:05:06", "2026-02-03T04:05:06"),
        ("02/03", "2026-02-03T00:00:00"),
        ("02/03/25", "2025-02-03T00:00:00"),
        ("02.03.25", "2025-02-03T00:00:00"),
        ("02/03/25-18:30", "2025-02-03T18:30:00"),
        ("0203", "2026-02-03T00:00:00"),
        ("020325", "2025-02-03T00:00:00"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert datetime.fromtimestamp(parse_time(text, NOW)).isoformat() == expected


def test_hours_that_clocks_skip_or_have_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2026 Berlin's clocks go from 3:00 back to 2:00 on 25 October, and from 2:00 to 3:00 on 29 March."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        again = int(datetime(2026, 10, 25, 1, 10, tzinfo=UTC).timestamp())  # 2:10 for the second time
        for text, seconds in (("now", 0), ("now-10minutes", 600), ("now-30minutes", 1800), ("now-1day", 86_400)):
            assert parse_time(text, again) == again - seconds
        assert parse_time(f"uts{again}", 0) == again
        assert (parse_time("tomorrow", again) - parse_time("today", again)) == 25 * 3600
        spring = int(datetime(2026, 3, 29, 1, 30, tzinfo=UTC).timestamp())  # 3:30, an hour after 1:30
        assert parse_time("now-1hour", spring) == spring - 3600
        assert parse_time("tomorrow", spring) - parse_time("today", spring) == 23 * 3600
        first = again - 3600
        assert _times(first, again) == [f"--starttime=uts{first}", f"--endtime=uts{again}"]
        assert _times(again + 3600, None) == ["--starttime=2026-10-25T03:10:00"]
        assert _times(spring, None) == ["--starttime=2026-03-29T03:30:00"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_seconds_since_1970() -> None:
    assert parse_time("uts1700000000", NOW) == 1_700_000_000


@pytest.mark.parametrize(
    "text",
    ["", "soon", "25:00", "13:00pm", "2026-13-01", "2026-02-30", "now-5parsecs", "now-", "99/99", "2026-01-01Tx",
     "\x1b[31mnow", "uts" + "9" * 40, "1" * 400],
)  # fmt: skip
def test_what_is_no_time_is_named(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_time(text, NOW)
    assert "time" in str(error.value)
    assert "\x1b" not in str(error.value)
