"""How reports are printed: aligned, parsable, CSV or JSON, in the units that were asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from sluice.base.errors import UsageError
from sluice.base.sizes import format_mib
from sluice.report.fields import BY_NAME, Field, Row, fields_of
from sluice.report.output import Units, csv_lines, head_of, header, plain, row_document


@dataclass(frozen=True)
class Chosen:
    """One column: its field and width; 0: as wide as needed, below 0: aligned to the left."""

    field: Field
    width: int = 0


def choose(text: str, kind: str) -> list[Chosen]:
    """``Account%-12,GPUHours`` as columns. Raises UsageError for a field that the report has not."""
    chosen = []
    known = {one.name.lower(): one for one in fields_of(kind)}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:%(-?\d{1,4}))?\s*", word)
        found = known.get(match[1].lower()) if match else None
        if match is None or found is None:
            single = match is not None and match[1].lower() in BY_NAME and BY_NAME[match[1].lower()].jobs
            where = "of single jobs only; see sluice report jobs" if single else "see --helpformat"
            raise UsageError(f"--format: no field {word.strip()[:40]!r} in this report", remedy=where)
        chosen.append(Chosen(found, int(match[2] or 0)))
    return chosen


def help_format(kind: str) -> list[str]:
    """All fields with what they say."""
    return [f"{one.name:<18} {one.says}" for one in fields_of(kind)]


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
    fields = [one.field for one in columns]
    for line in csv_lines(fields, ([one.value(row) for one in fields] for row in rows), units, header_line=header_line):
        sys.stdout.write(line)
    sys.stdout.flush()


def print_json(kind: str, head: dict[str, Any], rows: Iterable[Row]) -> None:
    """One object; rows are written as they come. Amounts are in the units of their keys, unknown values null."""
    fields = fields_of(kind)
    head = head_of(kind, head)
    sys.stdout.write(json.dumps(head, indent=2)[:-2] + ',\n  "rows": [')
    for place, row in enumerate(rows):
        sys.stdout.write(("," if place else "") + "\n    " + json.dumps(row_document(fields, row)))
    sys.stdout.write("\n  ]\n}\n")
    sys.stdout.flush()
