"""Amounts as people write them in a policy file: sizes, durations, dates."""

from __future__ import annotations

import datetime
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from sluice.base.errors import UsageError
from sluice.base.sizes import parse_mib

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_seconds(text: str) -> int:
    """``90s``, ``15m``, ``48h``, ``7d``, ``1d12h`` or Slurm's ``1-12:00:00`` in seconds. Raises ValueError."""
    word = text.strip().lower()
    if re.fullmatch(r"(?:\d{1,9}[smhdw])+", word):
        return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", word))
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,5}):([0-5]\d)(?::([0-5]\d))?", word)
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"{text!r} is not a duration: write e.g. 90s, 15m, 48h, 7d or 1-12:00:00")


def _seconds(value: object) -> object:
    if isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} has no unit: write e.g. {value}s or {value}m")
    return parse_seconds(value) if isinstance(value, str) else value


def _mib(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        try:
            return parse_mib(str(value))
        except UsageError as error:
            raise ValueError(str(error)) from error
    return value


def _date(value: object) -> object:
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not a date: write it as 2027-12-31") from error
    return value


def _zoned(value: datetime.date) -> datetime.date:
    """Check that a date is a valid time in every time zone."""
    if not 1970 < value.year < 9999:
        raise ValueError(f"{value} is out of range; use a day from 1971-01-01 to 9998-12-31")
    return value


def show_seconds(seconds: int) -> str:
    """The shortest form of a duration: ``48h``, ``90m``."""
    for unit in ("w", "d", "h", "m"):
        if seconds and seconds % _UNITS[unit] == 0 and not (unit in "wd" and seconds < 3 * _UNITS[unit]):
            return f"{seconds // _UNITS[unit]}{unit}"
    return f"{seconds}s"


Seconds = Annotated[int, BeforeValidator(_seconds), Field(ge=0, le=10 * 365 * 86400)]
Mib = Annotated[int, BeforeValidator(_mib), Field(ge=0, le=2**40)]
Date = Annotated[datetime.date, BeforeValidator(_date), AfterValidator(_zoned)]
Gpus = Annotated[int, Field(ge=0, le=10_000_000)]
Hours = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=100_000_000)]
Percent = Annotated[float, Field(ge=0, le=100)]
Ratio = Annotated[float, Field(ge=0, le=1)]
