"""What requests to services used: the gateways' records, and the GPU time of the replicas' jobs.

The GPU time of a service on a day is divided among those who called it by their tokens; of a day without tokens it is
its own tenant's. Tokens of batches have no part in it: a batch's job is its caller's own. Days are local ones.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from policy.service_jobs import ServicesPolicy, parse_job_name
from sluice.base.errors import UsageError
from sluice.base.files import write_atomic
from sluice.exchange.requests import BATCHES, Added, Outcome, RequestRecord, files_of
from sluice.report.build import Report
from sluice.report.collect import Selection, Source
from sluice.report.count import Span, tally
from sluice.report.fields import Row
from sluice.report.fleet import Fleet
from sluice.report.request_ids import LATE_DAYS, DayIds, Earlier, holds
from sluice.report.rollup import day_of, midnight
from sluice.report.summaries import JobUse
from sluice.report.tally import Histogram, Tally, bucket_of
from sluice.slurm.allocations import Allocation

GROUPS = ("service", "account", "user", "day")
"""What --by takes."""
USUAL = ("service", "account")
VERSION = 3
KEPT = "services"
"""Below the folder of rolled-up days."""
_MOST_DAYS_KEPT = 62
_MOST_IDS_KEPT = LATE_DAYS + 1  # of a day with two million requests 16 MB
_OUTCOMES: dict[Outcome, str] = {
    "ok": "answered",
    "refused-limit": "refused",
    "cancelled": "cancelled",
    "failed": "failed",
    "expired": "expired",
}
SUMS = (
    "requests",
    *_OUTCOMES.values(),
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "batch_tokens",
    "resumed",
)


class ServiceKey(NamedTuple):
    """What lines are for; the account is that of the caller."""

    service: str
    account: str
    user: str
    day: str


@dataclass(slots=True)
class ServiceTally:
    """The sums of one key; first tokens in milliseconds."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    batch_tokens: int = 0
    resumed: int = 0
    gpu_s: float = 0.0
    shared_gpu_s: float = 0.0
    first: Histogram = field(default_factory=Histogram)

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def count(self, one: RequestRecord, times: int = 1) -> None:
        """One more request; -1: one that another record replaces."""
        self.requests += times
        name = _OUTCOMES[one.outcome]
        setattr(self, name, getattr(self, name) + times)
        self.prompt_tokens += times * one.prompt_tokens
        self.completion_tokens += times * one.completion_tokens
        self.cached_tokens += times * one.cached_tokens
        if one.endpoint == BATCHES:
            self.batch_tokens += times * (one.prompt_tokens + one.completion_tokens)
        self.resumed += times * (one.resumed > 0)
        if one.first_token_s is not None:
            bucket = bucket_of(round(one.first_token_s * 1000))
            self.first.merge(Histogram({bucket: times}))

    def document(self) -> dict[str, Any]:
        """For a file: without GPU time, which is the accounting's."""
        first = {str(bucket): count for bucket, count in self.first.counts.items()}
        return {**{name: getattr(self, name) for name in SUMS}, "first": first}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServiceTally:
        """What `document` gave. Raises ValueError, KeyError, TypeError, AttributeError for what is none."""
        first = {int(bucket): int(count) for bucket, count in values["first"].items()}
        return cls(**{name: int(values[name]) for name in SUMS}, first=Histogram(first))

    def add(self, other: ServiceTally) -> None:
        """All of another."""
        for name in (*SUMS, "gpu_s", "shared_gpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first.merge(other.first)


Cells = dict[ServiceKey, ServiceTally]
Stamp = dict[str, int]
"""The sizes of files by their names, which have the day."""
T = TypeVar("T")


class _Files:
    """Those of a folder by UTC days, and how large they were before any was read."""

    def __init__(self, folder: Path) -> None:
        self.of: dict[date, list[Path]] = {}
        self._sizes: dict[date, Stamp] = {}
        for day, path in files_of(folder):
            self.of.setdefault(day, []).append(path)
            self._sizes.setdefault(day, {})[path.name] = path.stat().st_size

    def sizes(self, days: Iterable[date]) -> Stamp:
        """Of these days."""
        return {name: size for day in days for name, size in self._sizes[day].items()}

    def before(self, day: date) -> list[date]:
        """Days whose records may have ids that come again on this one, the oldest first."""
        return [one for one in sorted(self.of) if timedelta(0) < day - one <= timedelta(days=LATE_DAYS)]


@dataclass(slots=True)
class _Day:
    """What was counted of a UTC day, and of which files: its own, and those of earlier days, which may have the same
    ids."""

    stamp: Stamp
    cells: Cells
    kept: bool = False

    def is_of(self, files: _Files, day: date, earlier: list[date]) -> bool:
        """Whether the files are as they were. Those of earlier days that were removed since are missed by nobody."""
        own = files.sizes([day])
        return own == {name: self.stamp.get(name) for name in own} and all(
            self.stamp.get(name) == size for name, size in files.sizes(earlier).items()
        )


@dataclass(slots=True)
class _Open:
    """The latest day, of which only what is added is read."""

    day: date
    earlier: Earlier
    before: Stamp
    added: Added = field(default_factory=Added)
    cells: Cells = field(default_factory=dict)
    ids: DayIds = field(default_factory=DayIds)


class RequestDays:
    """Sums of the records of a folder. Not thread-safe.

    Each record is read once: of the latest day what was added since, of others nothing while their files, and those of
    LATE_DAYS before, stay as they are. An id counts once, on the day of the bill that holds: a day's sums take back
    what its records replace on earlier ones. `kept`: folder in which sums of days that are over are found; `writes`:
    and put.
    """

    def __init__(self, folder: Path, kept: Path | None = None, *, writes: bool = False) -> None:
        self.folder = folder
        self._kept = kept
        self._writes = writes and kept is not None
        self._days: OrderedDict[date, _Day] = OrderedDict()
        self._ids: OrderedDict[date, tuple[Stamp, DayIds]] = OrderedDict()
        self._open: _Open | None = None

    def cells(self, first: date, last: date) -> Cells:
        """Requests that ended on these local days. Raises OSError."""
        found: Cells = {}
        files = _Files(self.folder)
        begin, end = (datetime.fromtimestamp(at, UTC).date() for at in (midnight(first), midnight(last) + 90_000))
        end += timedelta(days=LATE_DAYS)
        for day in (one for one in sorted(files.of) if begin <= one <= end):
            for key, made in self._of_day(day, files).cells.items():
                if first <= date.fromisoformat(key.day) <= last:
                    found.setdefault(key, ServiceTally()).add(made)
        return found

    def _of_day(self, day: date, files: _Files) -> _Day:
        earlier, latest = files.before(day), day == max(files.of)
        known = self._days.get(day) or self._load(day)
        if known is None or not known.is_of(files, day, earlier):
            known = self._count(day, earlier, files)
        if not latest:
            if self._open is not None and self._open.day == day:
                self._open = None  # what was met needs memory
            if self._writes and not known.kept:
                self._save(day, known, self._ids_of(day, files))
        _remember(self._days, day, known, _MOST_DAYS_KEPT)
        return known

    def _count(self, day: date, earlier: list[date], files: _Files) -> _Day:
        before, own = files.sizes(earlier), files.sizes([day])
        if self._open is None or self._open.day != day or self._open.before != before:
            self._open = _Open(day, Earlier(earlier, lambda one: self._ids_of(one, files)), before)
        one = self._open
        _add(one.cells, one.ids.follow(one.added, files.of[day]), one.earlier)
        _remember(self._ids, day, (own, one.ids), _MOST_IDS_KEPT)
        return _Day(before | own, one.cells)

    def _ids_of(self, day: date, files: _Files) -> DayIds:
        """Those of a day, whatever earlier ones have. Raises OSError."""
        sizes = files.sizes([day])
        known = self._ids.get(day)
        if known is None or known[0] != sizes:
            document = self._document(day)
            if document is not None and document[0].is_of(files, day, []):
                known = sizes, document[1]
            else:
                known = sizes, DayIds()
                for _ in known[1].follow(Added(), files.of[day]):
                    pass
        _remember(self._ids, day, known, _MOST_IDS_KEPT)
        return known[1]

    def _load(self, day: date) -> _Day | None:
        document = self._document(day)
        return None if document is None else document[0]

    def _document(self, day: date) -> tuple[_Day, DayIds] | None:
        """What is kept of a day."""
        if self._kept is None:
            return None
        try:
            document = json.loads((self._kept / f"{day}.json").read_text())
            if document["version"] != VERSION:
                return None
            cells = {ServiceKey(*map(str, names)): ServiceTally.of(values) for names, values in document["cells"]}
            return _Day(dict(document["files"]), cells, kept=True), DayIds.of(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # they are counted again

    def _save(self, day: date, made: _Day, ids: DayIds) -> None:
        assert self._kept is not None  # noqa: S101 - the caller has looked
        rows = [[list(key), one.document()] for key, one in made.cells.items()]
        document = {"version": VERSION, "files": made.stamp, "cells": rows, **ids.document()}
        self._kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._kept / f"{day}.json", json.dumps(document), mode=0o600, follow_links=False)
        made.kept = True


def _remember(known: OrderedDict[date, T], day: date, one: T, most: int) -> None:
    known[day] = one
    known.move_to_end(day)
    while len(known) > most:
        known.popitem(last=False)


def _add(cells: Cells, records: Iterable[tuple[RequestRecord, RequestRecord | None]], earlier: Earlier) -> None:
    names: dict[int, str] = {}  # local days by quarters of an hour, in which none ends

    def count(one: RequestRecord, times: int) -> None:
        quarter = int(one.ended // 900)
        if quarter not in names:
            names[quarter] = str(day_of(quarter * 900))
        key = ServiceKey(one.service, one.tenant, one.user, names[quarter])
        made = cells.get(key)
        if made is None:
            made = cells[key] = ServiceTally()
        made.count(one, times)

    for record, bill in records:
        known = earlier.find(record)
        before, after = holds(known, bill), holds(known, record)
        if isinstance(after, RequestRecord) and after is not before:
            count(after, 1)
            if isinstance(before, RequestRecord):
                count(before, -1)


def add_gpu_time(
    cells: Cells,
    jobs: Iterable[tuple[Allocation, JobUse | None]],
    policy: ServicesPolicy,
    span: Span,
    *,
    fleet: Fleet,
    now: float,
) -> None:
    """Divide the GPU time of replicas' jobs among the keys of their services and days."""
    times: dict[tuple[str, str], Tally] = {}
    owners: dict[str, str] = {name: one.tenant for name, one in policy.services.items()}
    for job, use in jobs:
        named = parse_job_name(job.name)
        if named is None or job.start is None:
            continue
        service = policy.services.get(named[0])
        if service is not None and (job.user, job.account) != (service.user, service.tenant):
            continue  # anybody may give a job such a name
        owners.setdefault(named[0], job.account)
        if owners[named[0]] != job.account:
            continue
        end = min(span.end, int(now)) if job.end is None else span.end
        for day in _days(max(span.start, job.start), min(end, job.end or end)):
            part = Span(max(span.start, midnight(day)), min(end, midnight(day + timedelta(days=1))))
            made = tally(job, part, use, fleet) if part.end > part.start else None
            if made is not None:
                times.setdefault((named[0], str(day)), Tally()).add(made)
    keys: dict[tuple[str, str], list[ServiceKey]] = {}
    for key in cells:
        keys.setdefault((key.service, key.day), []).append(key)
    for place, made in times.items():
        _divide(cells, keys.get(place, []), ServiceKey(place[0], owners[place[0]], "", place[1]), made)


def _divide(cells: Cells, callers: list[ServiceKey], owner: ServiceKey, made: Tally) -> None:
    used = {key: cells[key].tokens - cells[key].batch_tokens for key in callers}
    tokens = sum(used.values())
    shares = {key: one / tokens for key, one in used.items()} if tokens else {owner: 1.0}
    for key, share in shares.items():
        into = cells.setdefault(key, ServiceTally())
        into.gpu_s += made.gpu_s * share
        into.shared_gpu_s += made.shared_gpu_s * share


def _days(start: int, end: int) -> Iterable[date]:
    day = day_of(start)
    while midnight(day) < end:
        yield day
        day += timedelta(days=1)


# ---- the report ----


@dataclass(frozen=True)
class ServiceSelection:
    """Which requests; an empty field does not select."""

    services: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()

    def takes(self, key: ServiceKey) -> bool:
        """Whether requests of the key are meant."""
        return (
            (not self.services or key.service in self.services)
            and (not self.accounts or key.account in self.accounts)
            and (not self.users or key.user in self.users)
        )


def parse_groups(text: str) -> tuple[str, ...]:
    """``service,day`` as names. Raises UsageError."""
    names = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    for name in names:
        if name not in GROUPS:
            raise UsageError(f"--by {name[:40]!r}: cannot group by that", remedy=f"use {', '.join(GROUPS)}")
    return names


def services_report(
    source: Source,
    days: RequestDays,
    policy: ServicesPolicy,
    first: date,
    last: date,
    takes: Callable[[ServiceKey], bool],
    by: tuple[str, ...] = USUAL,
) -> Report:
    """Of whole local days, the last included. `takes`: which keys. Raises SluiceError, OSError."""
    end = min(midnight(last + timedelta(days=1)), int(source.now))
    span = Span(midnight(first), max(end, midnight(first) + 1))
    cells = days.cells(first, last)
    users = frozenset(one.user for one in policy.services.values())
    if users:  # jobs of others are no replicas
        jobs = source.jobs(span, Selection(users=users), names=True)
        add_gpu_time(cells, jobs, policy, span, fleet=source.fleet, now=source.now)
    return Report("services", span, rows_of(cells, takes, by))


def rows_of(
    cells: Mapping[ServiceKey, ServiceTally], takes: Callable[[ServiceKey], bool], by: tuple[str, ...]
) -> list[Row]:
    """The lines of a report, in the order of their names."""
    found: dict[tuple[str, ...], ServiceTally] = {}
    for key, made in cells.items():
        if takes(key):
            found.setdefault(tuple(getattr(key, name) for name in by), ServiceTally()).add(made)
    return [_row(dict(zip(by, names, strict=True)), found[names]) for names in sorted(found)]


def _row(names: dict[str, str], made: ServiceTally) -> Row:
    gpu_s = made.gpu_s + made.shared_gpu_s
    extra = {name: getattr(made, name) for name in SUMS}
    extra |= {f"first_token_p{percent}_ms": made.first.percentile(percent) for percent in (50, 95, 99)}
    extra |= {"tokens": made.tokens, "tokens_per_gpu_hour": round(made.tokens / gpu_s * 3600) if gpu_s else None}
    return Row(Tally(gpu_s=made.gpu_s, shared_gpu_s=made.shared_gpu_s), names, extra)
