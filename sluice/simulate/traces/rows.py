"""Fields of a trace file, with errors that name their place."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import UsageError
from sluice.simulate.traces import MICROSECOND

MAX_SECONDS = 10**10  # 317 years
MAX_COUNT = 10**7


@dataclass(frozen=True)
class Row:
    """One row: its fields by name, and its place for errors."""

    path: Path
    line: int
    fields: Mapping[str, str]

    def wrong(self, name: str, value: object, expected: str) -> UsageError:
        """The error about one field."""
        return UsageError(f"{self.path}:{self.line}: {name} {value!r}: must be {expected}")

    def text(self, name: str) -> str:
        """The field as it is, without blanks around it; empty where it is missing."""
        return (self.fields.get(name) or "").strip()

    def number(self, name: str, low: float = 0, high: float = MAX_SECONDS) -> float:
        """A finite number within bounds."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(name, text, "a number") from None
        if not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(name, text, f"between {low:g} and {high:g}")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_COUNT) -> int:
        """A whole number within bounds."""
        text = self.text(name)
        try:
            value = int(text)
        except ValueError:
            raise self.wrong(name, text[:40], "a whole number") from None
        if not low <= value <= high:
            raise self.wrong(name, text[:40], f"between {low} and {high}")
        return value

    def ticks(self, name: str, low: float = 0) -> int:
        """Seconds as microseconds."""
        return round(self.number(name, low=low) * MICROSECOND)


def csv_rows(path: Path, text: str, required: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a CSV file with a header line."""
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff"), newline=""))
    try:
        missing = [name for name in required if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path}:1: column {missing[0]!r} is missing", remedy="check --format, or add the column")
        for fields in reader:
            if None in fields or any(value is None for value in fields.values()):
                raise UsageError(f"{path}:{reader.line_num}: the number of fields differs from the header's")
            yield Row(path, reader.line_num, fields)
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: {error}") from error
