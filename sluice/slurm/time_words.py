"""The words for times that Slurm's commands take with ``-S`` and ``-E``, as sacct(1) lists them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from sluice.base.errors import UsageError

_CLOCKS = {"midnight": (0, 0), "elevenses": (11, 0), "noon": (12, 0), "fika": (15, 0), "teatime": (16, 0)}
_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604_800}
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(am|pm)?\Z")
_ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})(?:t(.+))?\Z")
_AMERICAN = re.compile(r"(\d{1,2})[/.](\d{1,2})(?:[/.](\d{2}|\d{4}))?(?:-(.+))?\Z")
_PACKED = re.compile(r"(\d{2})(\d{2})(\d{2})?\Z")
_RELATIVE = re.compile(r"now(?:\s*([+-])\s*(\d{1,9})\s*([a-z]*))?\Z")
_REMEDY = "write it as 2026-11-01, 2026-11-01T14:30, 11/01, 14:30, today, midnight, noon, now or now-7days"


def parse_time(text: str, now: float) -> int:
    """A time in seconds since 1970, local where the text says none.

    `now`: seconds since 1970. A clock alone is today's; a day without a year is this year's; a day alone is its
    midnight. Raises UsageError for anything else.
    """
    word = text.strip().lower()
    today = datetime.fromtimestamp(now).replace(microsecond=0)
    try:
        absolute = _absolute(word, int(now))
        if absolute is not None:
            datetime.fromtimestamp(absolute)  # raises for what is out of range
            return absolute
        found = _parse(word, today)
        if found is not None:
            return int(found.timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"time {text[:60]!r}: {error}", remedy=_REMEDY) from error
    raise UsageError(f"time {text[:60]!r}: not a time", remedy=_REMEDY)


def _absolute(word: str, now: int) -> int | None:
    """Offsets in seconds, independent of daylight saving time, as in Slurm."""
    if match := _RELATIVE.match(word):
        return now + (_offset_s(match) if match[1] else 0)
    if word.startswith("uts") and word[3:].isascii() and word[3:].isdecimal():
        return int(word[3:])
    return None


def _parse(word: str, now: datetime) -> datetime | None:
    midnight = now.replace(hour=0, minute=0, second=0)
    if word in _DAYS:
        return midnight + timedelta(days=_DAYS[word])
    if match := _ISO.match(word):
        return _at_clock(datetime(int(match[1]), int(match[2]), int(match[3])), match[4])
    if match := _AMERICAN.match(word):
        return _at_clock(datetime(_year(match[3], now), int(match[1]), int(match[2])), match[4])
    if match := _PACKED.match(word):
        return datetime(_year(match[3], now), int(match[1]), int(match[2]))
    return _at_clock(midnight, word) if word in _CLOCKS or _CLOCK.match(word) else None


def _offset_s(match: re.Match[str]) -> int:
    unit = match[3] or "second"
    known = next((name for name in _SECONDS if len(unit) >= 1 and f"{name}s".startswith(unit)), None)
    if known is None:
        raise ValueError(f"{unit!r} is not a unit of time; use seconds, minutes, hours, days or weeks")
    return int(match[2]) * _SECONDS[known] * (1 if match[1] == "+" else -1)


def _year(text: str | None, now: datetime) -> int:
    if text is None:
        return now.year
    return int(text) + 2000 if len(text) == 2 else int(text)


def _at_clock(day: datetime, clock: str | None) -> datetime:
    if clock is None:
        return day
    if clock in _CLOCKS:
        hour, minute = _CLOCKS[clock]
        return day.replace(hour=hour, minute=minute)
    match = _CLOCK.match(clock)
    if match is None:
        raise ValueError(f"{clock!r} is not a time of day")
    hour = int(match[1])
    if match[4]:
        if not 1 <= hour <= 12:
            raise ValueError(f"{clock!r}: an hour with {match[4]} is from 1 to 12")
        hour = hour % 12 + (12 if match[4] == "pm" else 0)
    return day.replace(hour=hour, minute=int(match[2]), second=int(match[3] or 0))
