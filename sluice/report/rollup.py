"""Days of the past, counted once: a file for each day on which jobs ended.

A job belongs to the day of its end. Its file has, for each day on which it ran, what it used on that day, so that a
report of any whole days adds up the files from its first day on. Jobs that still run, and those that ended since the
last file, are counted again by each report. Days are local ones, as Slurm's own roll-up has them.

What jobs used of each node is in a file of its own next to it, the jobs of all users together: by user and node the
sums would be as many as the jobs.

A day is counted when it is over for `SETTLED_S`: slurmctld reports a job's end to slurmdbd late where slurmdbd was
down.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.report.count import Counter, Span
from sluice.report.fleet import Fleet
from sluice.report.summaries import JobUse
from sluice.report.tally import Key
from sluice.slurm.allocations import Allocation

SCHEMA_VERSION = 1
SETTLED_S = 86_400
DEFAULT_FOLDER = Path("/var/lib/sluice/controllerd/report")
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})\.jsonl\Z")
_NODES = ".nodes.jsonl"


def midnight(day: date) -> int:
    """When a local day begins, in seconds since 1970."""
    return int(datetime(day.year, day.month, day.day).timestamp())


def span_of(day: date) -> Span:
    """A local day; 23 or 25 hours long where the clock changes."""
    return Span(midnight(day), midnight(day + timedelta(days=1)))


def day_of(seconds: float) -> date:
    """The local day of a time."""
    return datetime.fromtimestamp(seconds).date()


def whole_days(span: Span, now: float) -> Span:
    """All of the days of a span, until now."""
    return Span(midnight(day_of(span.start)), min(max(int(now), span.end), span_of(day_of(span.end - 1)).end))


@dataclass
class DayCount:
    """What the jobs that ended on one day used, by the days of use."""

    jobs: int = 0
    cells: dict[date, Counter] = field(default_factory=dict)
    nodes: dict[date, Counter] = field(default_factory=dict)

    def add(self, job: Allocation, use: JobUse | None, fleet: Fleet, last: date, until: float | None = None) -> None:
        """A job on each day on which it ran, up to `last`; `until`: where it still runs, it has run until then."""
        self.jobs += 1
        first = last if job.start is None else min(last, day_of(job.start))
        for number in range((last - first).days + 1):
            on = first + timedelta(days=number)
            span = span_of(on)
            if until is not None and job.end is None:
                span = Span(span.start, min(span.end, int(until)))
            if on not in self.cells:
                self.cells[on], self.nodes[on] = Counter(fleet), Counter(fleet, nodes_alone=True)
            self.cells[on].add(job, span, use)
            self.nodes[on].add(job, span, use)


def count_day(day: date, jobs: Iterable[tuple[Allocation, JobUse | None]], fleet: Fleet) -> DayCount:
    """Count the jobs that ended on the day; others are passed over."""
    whole, found = span_of(day), DayCount()
    for job, use in jobs:
        if job.end is None or not whole.start <= job.end < whole.end or job.state in ("PENDING", "RUNNING"):
            continue
        found.add(job, use, fleet, day)
    return found


def count_open(first: date, jobs: Iterable[tuple[Allocation, JobUse | None]], fleet: Fleet, now: float) -> DayCount:
    """Count the jobs that ended on `first` or later, run or wait: what no file of the days before `first` has."""
    found, since = DayCount(), midnight(first)
    for job, use in jobs:
        if job.end is None:
            found.add(job, use, fleet, day_of(now), now)
        elif job.end >= since:
            found.add(job, use, fleet, day_of(job.end))
    return found


class Rollup:
    """The folder of the days' files."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self.folder = folder
        self.cluster = cluster

    def days(self) -> list[date]:
        """The days that are counted. Raises SluiceError where the folder cannot be read; none where there is none."""
        try:
            names = [match[1] for path in self.folder.iterdir() if (match := _NAME.match(path.name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SluiceError(
                f"{self.folder}: {error.strerror}",
                remedy="run it as root or SlurmUser, or name another folder with --rolled",
            ) from error
        return sorted(date.fromisoformat(name) for name in names)

    def unbroken(self, first: date) -> list[date]:
        """The counted days from `first` on, up to the first one that is missing."""
        found, known = [], set(self.days())
        while first in known:
            found.append(first)
            first += timedelta(days=1)
        return found

    def save(self, day: date, count: DayCount) -> None:
        """Write a day. Raises OSError."""
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        head = self._head(day, count.jobs)
        self._write(f"{day}{_NODES}", head, count.nodes)
        self._write(f"{day}.jsonl", head, count.cells)  # last, as a day with this file is not counted again

    def _head(self, day: date, jobs: int) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "cluster": self.cluster,
            "day": str(day),
            "jobs": jobs,
            "zone": time.strftime("%z", time.localtime(midnight(day))),
        }

    def _write(self, name: str, head: dict[str, Any], days: Mapping[date, Counter]) -> None:
        lines = [json.dumps(head)]
        for on, counter in sorted(days.items()):
            for key, tally in counter.cells.items():
                names = key if counter.nodes_alone else key[:6]
                lines.append(json.dumps([str(on), *names, tally.document()], separators=(",", ":")))
        write_atomic(self.folder / name, "\n".join(lines) + "\n", mode=0o640, follow_links=False)

    def has_nodes(self, day: date) -> bool:
        """Whether a counted day has the sums of nodes, which earlier versions did not count."""
        return (self.folder / f"{day}{_NODES}").is_file()

    def read(self, day: date, *, nodes: bool = False) -> Iterator[tuple[date, Key, dict[str, Any]]]:
        """The cells of a day's file by day of use, for `Tally.add_document`; `nodes`: of nodes.

        Raises SluiceError for a file that cannot be used.
        """
        path = self.folder / f"{day}{_NODES if nodes else '.jsonl'}"
        remedy = "remove it and run: sluice report roll-up"
        try:
            with path.open(encoding="utf-8") as file:
                head = json.loads(file.readline())
                zone = time.strftime("%z", time.localtime(midnight(day)))
                if (head.get("schema_version"), head.get("cluster"), head.get("zone")) != (
                    SCHEMA_VERSION,
                    self.cluster,
                    zone,
                ):
                    raise SluiceError(f"{path}: of another version, cluster or time zone", remedy=remedy)
                for line in file:
                    on, *key, values = json.loads(line)
                    if not isinstance(values, dict):
                        raise ValueError("a cell without figures")
                    yield date.fromisoformat(on), Key(*key), values
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise SluiceError(f"{path}: not a rolled-up day: {error}", remedy=remedy) from error

    def prune(self, before: date) -> None:
        """Remove days."""
        for day in self.days():
            if day < before:
                for end in (".jsonl", _NODES):
                    with suppress(FileNotFoundError):
                        (self.folder / f"{day}{end}").unlink()


def missing_days(rollup: Rollup, days: int, now: float) -> list[date]:
    """Which of the last `days` that are settled have no file, the oldest first."""
    last = day_of(now - SETTLED_S) - timedelta(days=1)
    known = set(rollup.days())
    wanted = [last - timedelta(days=number) for number in range(days)]
    return sorted(day for day in wanted if day not in known)


def status(rollup: Rollup) -> dict[str, Any]:
    """For people: first and last day and how many."""
    days = rollup.days()
    return {
        "folder": str(rollup.folder),
        "days": len(days),
        "first": str(days[0]) if days else None,
        "last": str(days[-1]) if days else None,
    }
