"""How reports are printed: aligned, parsable, CSV or JSON, in the units that were asked for."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from sluice.base.errors import UsageError
from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.report.fields import BY_NAME, FIELDS, JOULES_PER_KWH, Field, Row

SCHEMA_VERSION = 1
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_MEMORY = {"M": 1, "G": 1024, "T": 1024**2}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Chosen:
    """One column: its field and width; 0: as wide as needed, below 0: aligned to the left."""

    field: Field
    width: int = 0


@dataclass(frozen=True)
class Units:
    """How amounts are shown."""

    time: str = "hours"
    memory: str = ""  # M, G, T; empty: whichever is readable


def choose(text: str, *, jobs: bool) -> list[Chosen]:
    """``Account%-12,GPUHours`` as columns. Raises UsageError for a field that the report has not."""
    chosen = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:%(-?\d{1,4}))?\s*", word)
        found = BY_NAME.get(match[1].lower()) if match else None
        if match is None or found is None or (found.jobs and not jobs):
            where = "of single jobs only; see sluice report jobs" if found is not None else "see --helpformat"
            raise UsageError(f"--format: no field {word.strip()[:40]!r} in this report", remedy=where)
        chosen.append(Chosen(found, int(match[2] or 0)))
    return chosen


def help_format(*, jobs: bool) -> list[str]:
    """All fields with what they say."""
    return [f"{one.name:<18} {one.says}" for one in FIELDS if jobs or not one.jobs]


def header(field: Field, units: Units, *, bare: bool = False) -> str:
    """The field's name with the unit that is shown; `bare`: the values have none."""
    name = field.name.replace("Hours", units.time.capitalize()) if field.unit in ("gpu_s", "mib_s") else field.name
    unit = {"mib_s": "GiB", "j": "kWh", "mib": f"{units.memory or 'M'}iB" if bare else ""}.get(field.unit, "")
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
    if field.unit == "ratio":
        return number(value, 3, even=even)
    if field.unit == "mib":
        return number(value / _MEMORY[units.memory], 2) if units.memory else str(int(value))
    return one_line(str(value), limit=None)


def shown(field: Field, value: Any, units: Units) -> str:
    """A value for people."""
    if value is None or value == "":
        return "-"
    if field.unit == "mib" and not units.memory:
        return format_mib(int(value))
    if field.unit == "mib":
        return plain(field, value, units) + units.memory
    if field.unit == "percent":
        return plain(field, value, units, even=True) + "%"
    return plain(field, value, units, even=True)


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


def print_aligned(columns: Sequence[Chosen], rows: Iterable[Row], units: Units, *, header_line: bool) -> None:
    """For people. Columns with widths are cut as sacct cuts, with a + at the end."""
    lines = [[shown(one.field, one.field.value(row), units) for one in columns] for row in rows]
    heads = [header(one.field, units) for one in columns]
    widths = [
        abs(one.width) or max((len(line[place]) for line in [heads, *lines]), default=0)
        for place, one in enumerate(columns)
    ]
    if header_line:
        lines = [heads, ["-" * width for width in widths], *lines]
    for line in lines:
        cells = []
        for text, width, one in zip(line, widths, columns, strict=True):
            cut = text if len(text) <= width else text[: width - 1] + "+"
            left = one.width < 0 or (not one.width and one.field.unit == "text")
            cells.append(cut.ljust(width) if left else cut.rjust(width))
        click.echo(" ".join(cells).rstrip())


def print_parsable(columns: Sequence[Chosen], rows: Iterable[Row], units: Units, *, header_line: bool) -> None:
    """Values separated by '|', row by row."""
    write = sys.stdout.write
    if header_line:
        write("|".join(header(one.field, units, bare=True) for one in columns) + "\n")
    for row in rows:
        write("|".join(plain(one.field, one.field.value(row), units).replace("|", " ") for one in columns) + "\n")
    sys.stdout.flush()


def print_csv(columns: Sequence[Chosen], rows: Iterable[Row], units: Units, *, header_line: bool) -> None:
    """RFC 4180; a text that a spreadsheet would take for a formula gets an apostrophe before it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    if header_line:
        writer.writerow([header(one.field, units, bare=True) for one in columns])
    for row in rows:
        values = [plain(one.field, one.field.value(row), units) for one in columns]
        writer.writerow(
            [harmless(text) if one.field.unit == "text" else text for one, text in zip(columns, values, strict=True)]
        )
        sys.stdout.write(buffer.getvalue())
        buffer.seek(0)
        buffer.truncate()
    sys.stdout.write(buffer.getvalue())
    sys.stdout.flush()


def harmless(text: str) -> str:
    """The text, never a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def print_json(kind: str, head: dict[str, Any], rows: Iterable[Row], *, jobs: bool) -> None:
    """One object; rows are written as they come. Amounts are in the units of their keys, unknown values null."""
    fields = [one for one in FIELDS if jobs or not one.jobs]
    head = {"schema_version": SCHEMA_VERSION, "report": kind, **head}
    sys.stdout.write(json.dumps(head, indent=2)[:-2] + ',\n  "rows": [')
    for place, row in enumerate(rows):
        values = {one.key: value for one in fields if (value := _json(one, row)) is not None or one.unit != "text"}
        sys.stdout.write(("," if place else "") + "\n    " + json.dumps(values))
    sys.stdout.write("\n  ]\n}\n")
    sys.stdout.flush()


def _json(field: Field, row: Row) -> Any:
    value = field.value(row)
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value
