"""What a report is as JSON and as CSV: for the commands and for the REST API."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sluice.base.text import one_line
from sluice.report.fields import JOULES_PER_KWH, Field, Row

SCHEMA_VERSION = 1
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_MEMORY = {"M": 1, "G": 1024, "T": 1024**2}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Units:
    """How amounts are shown."""

    time: str = "hours"
    memory: str = ""  # M, G, T; empty: whichever is readable


def head_of(kind: str, head: dict[str, Any]) -> dict[str, Any]:
    """A report's object without its rows."""
    return {"schema_version": SCHEMA_VERSION, "report": kind, **head}


def row_document(fields: Iterable[Field], row: Row) -> dict[str, Any]:
    """A row by the fields' keys: amounts are in the keys' units, unknown values null, unknown texts left out."""
    return {one.key: value for one in fields if (value := _json(one, row)) is not None or one.unit != "text"}


def _json(field: Field, row: Row) -> Any:
    value = field.value(row)
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


def csv_lines(
    fields: Sequence[Field], rows: Iterable[Sequence[Any]], units: Units, *, header_line: bool = True
) -> Iterator[str]:
    """RFC 4180, a line at a time. `rows`: the fields' values. Text that a spreadsheet takes for a formula is none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")

    def line(words: Iterable[str]) -> str:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(words)
        return buffer.getvalue()

    if header_line:
        yield line(header(one, units, bare=True) for one in fields)
    for row in rows:
        texts = [plain(one, value, units) for one, value in zip(fields, row, strict=True)]
        yield line(harmless(text) if one.unit == "text" else text for one, text in zip(fields, texts, strict=True))


def header(field: Field, units: Units, *, bare: bool = False) -> str:
    """The field's name with the unit that is shown; `bare`: the values have none."""
    name = field.name.replace("Hours", units.time.capitalize()) if field.unit in ("gpu_s", "mib_s") else field.name
    unit = {"mib_s": "GiB", "j": "kWh", "ms": "ms", "mib": f"{units.memory or 'M'}iB" if bare else ""}.get(
        field.unit, ""
    )
    return f"{name}({unit})" if unit else name


def plain(field: Field, value: Any, units: Units, *, even: bool = False) -> str:
    """A value for programs: times as ISO, amounts as numbers without a unit; empty: not known.

    `even`: amounts with as many digits as others of the field.
    """
    if value is None or value == "":
        return ""
    if field.unit == "at":
        return moment(value)
    if field.unit == "s":
        return value if isinstance(value, str) else duration(value)
    if field.unit in ("gpu_s", "mib_s"):
        amount = value / TIME_UNITS[units.time] / (1024 if field.unit == "mib_s" else 1)
        return number(amount, 2, even=even and units.time != "seconds")
    if field.unit == "j":
        return number(value / JOULES_PER_KWH, 3, even=even)
    if field.unit == "percent":
        return number(value, 1, even=even)
    if field.unit == "price":
        return number(value, 2, even=even)
    if field.unit == "ratio":
        return number(value, 3, even=even)
    if field.unit == "mib":
        return number(value / _MEMORY[units.memory], 2) if units.memory else str(int(value))
    return one_line(str(value), limit=None)


def number(value: float, digits: int, *, even: bool = False) -> str:
    """Without a fraction where it is whole (`even`: where it is 0); what is more than 0 is not shown as nothing."""
    if not math.isfinite(value):
        return ""
    if value and (even or abs(value) < 10**-digits / 2):
        return f"{value:.{digits}f}"
    return str(round(value)) if abs(value - round(value)) < 10**-digits / 2 else f"{value:.{digits}f}"


def moment(seconds: float) -> str:
    """Local time as Slurm writes it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")


def duration(seconds: float) -> str:
    """As Slurm writes it: [D-]HH:MM:SS."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02}:{minute:02}:{second:02}"


def harmless(text: str) -> str:
    """The text, never a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
