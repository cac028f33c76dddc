"""Combines the sources of a report: the accounting database, rolled-up days and the jobs' records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

from policy.compiled import FILE_NAME, parse
from policy.node import FILE_NAME as NODE_FILE
from policy.node import NodePolicyFile
from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.pool_costs import PoolCosts, read_costs
from sluice.exchange.record import JobRecord
from sluice.report import rollup
from sluice.report.count import Counter, Span, gpu_type
from sluice.report.fleet import Fleet
from sluice.report.rollup import Rollup, midnight
from sluice.report.summaries import JobUse, Uses
from sluice.report.tally import Key, Tally
from sluice.slurm import Commands, SlurmClient, connect
from sluice.slurm.allocations import Allocation, stream

WINDOW_S = 86_400
_MANY = 150_000  # jobs of a window; then the next one is shorter
_SHORTEST_S = 3600
_DAY_S = 86_400
_RECORD_S = 7200  # a record is written at most this long after the job's end

STATES = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED", "R": "RUNNING", "RQ": "REQUEUED", "RS": "RESIZING",
    "RV": "REVOKED", "S": "SUSPENDED", "TO": "TIMEOUT",
}  # fmt: skip
"""sacct's short and long names."""


class Records(Protocol):
    """The controllers' store of jobs' records."""

    def between(self, start: float, end: float) -> Iterator[JobRecord]:
        """Those that ended within a time."""

    def of_job(self, job: int, since: float | None = None) -> list[JobRecord]:
        """Those of one job, one a node and run, that ended at or after `since`."""


AskRunning = Callable[[Iterable[int] | None], list[JobRecord]]
"""The records until now of running jobs (None: of all) that the caller may see. Raises SluiceError."""


@dataclass(frozen=True)
class Selection:
    """Which jobs; an empty field does not select. Names are compared as they are."""

    accounts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    gpu_types: frozenset[str] = frozenset()

    def takes(self, key: Key) -> bool:
        """Whether jobs of the key are meant."""
        return (
            (not self.accounts or key.account in self.accounts)
            and (not self.users or key.user in self.users)
            and (not self.partitions or key.partition in self.partitions)
            and (not self.states or key.state in self.states)
            and (not self.gpu_types or not self.gpu_types.isdisjoint(key.gpu_type.split("+")))
        )


def parse_states(text: str) -> frozenset[str]:
    """``CD,failed`` as full names. Raises UsageError for what is not a state."""
    found = set()
    for word in text.split(","):
        name = STATES.get(word.strip().upper(), word.strip().upper())
        if name not in STATES.values():
            raise UsageError(
                f"--state {word[:40]!r}: not a state of a job", remedy=f"use {', '.join(STATES)} or their long names"
            )
        found.add(name)
    return frozenset(found)


def known_pools(costs: Callable[[], Mapping[str, PoolCosts]], note: Callable[[str], None]) -> Mapping[str, PoolCosts]:
    """What fleetd knows of pools; nothing where that cannot be read."""
    try:
        return costs()
    except SluiceError as error:
        note(f"types of untyped GPUs and shares of nodes that were deleted are not known: {error}")
        return {}


@dataclass
class Source:
    """Where figures come from. `records` and `rolled` are None where the caller may not read them."""

    client: SlurmClient
    commands: Commands
    records: Records | None = None
    rolled: Rollup | None = None
    now: float = field(default_factory=time.time)
    note: Callable[[str], None] = lambda _: None  # something that the reader should know
    running: AskRunning | None = None  # asked when the first running job is met
    costs: Callable[[], Mapping[str, PoolCosts]] = read_costs  # of pools
    window_s: int = WINDOW_S
    _days: Span | None = None
    _uses: Uses = field(default_factory=Uses)

    @cached_property
    def fleet(self) -> Fleet:
        """The nodes of now, and those of pools that were; none where slurmctld is down, since the database alone is
        enough for most reports.
        """
        try:
            return Fleet.of(self.client.nodes(), known_pools(self.costs, self.note)).with_classes(self.classes())
        except SluiceError as error:
            self.note(f"slurmctld does not report its nodes ({error}); types of untyped GPUs and shares are not known")
            return Fleet()

    @cached_property
    def price_kwh(self) -> float:
        """By the policy in force; 0: it has none, or is not to be read here."""
        try:
            return NodePolicyFile(self._conf_folder() / NODE_FILE).current().power_control.price_kwh
        except SluiceError:
            return 0.0

    @cached_property
    def _running(self) -> Uses:
        """What the running jobs have used until now; empty where no controllers' daemon reports it."""
        return self._ask_running(None)

    def _ask_running(self, jobs: Iterable[int] | None) -> Uses:
        return Uses(self.running_records(jobs))

    def running_records(self, jobs: Iterable[int] | None = None) -> list[JobRecord]:
        """The records until now of running jobs; none where no controllers' daemon reports them."""
        try:
            return [] if self.running is None else self.running(jobs)
        except (SluiceError, OSError):
            return []

    def _find(self, uses: Uses, job: Allocation) -> JobUse | None:
        """What a job of a window used, or has used until now."""
        found = None if job.state == "PENDING" else uses.find(job.id, job.start, job.end, job.admin_comment)
        if found is None and job.end is None and job.start is not None and self.running is not None:
            found = self._running.find(job.id, job.start)
        return found

    def classes(self) -> dict[str, list[str]]:
        """The GPU types of each class of the policy in force."""
        try:
            policy, _ = parse((self._conf_folder() / FILE_NAME).read_bytes())
        except (OSError, SluiceError):
            return {}  # no policy, or not this user's to read: types are classes
        return {one.name: list(one.gpu_types) for one in policy.classes}

    def _conf_folder(self) -> Path:
        return Path(self.client.config().get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent

    # ---- jobs one by one ----

    def jobs(
        self, span: Span, selection: Selection, *, ids: Sequence[str] = (), steps: bool = False, names: bool = False
    ) -> Iterator[tuple[Allocation, JobUse | None]]:
        """The jobs of a span with their use, each once: by the windows of their ends, those that run on last.

        With `ids` only these, whenever they ran.
        """
        if ids:
            for job in self._stream(span, selection, ids=ids, steps=steps, names=names):
                if selection.takes(self._key(job)):
                    yield job, None if "." in job.label else self.use_of(job)
            return
        for window in self._windows(span):
            number, uses, last = 0, self.uses(window), window.end >= span.end
            for job in self._stream(window, selection, steps=steps, names=names):
                number += 1
                if belongs(job, window, last=last) and selection.takes(self._key(job)):
                    step = "." in job.label
                    yield job, None if step else self._find(uses, job)
            self._pace(number)

    def _key(self, job: Allocation) -> Key:
        return Key(job.account, job.user, job.partition, job.qos, job.state, gpu_type(job, self.fleet))

    def _stream(
        self, span: Span, selection: Selection, *, ids: Iterable[str] = (), steps: bool = False, names: bool = False
    ) -> Iterator[Allocation]:
        return stream(
            self.commands,
            start=span.start,
            end=span.end,
            ids=ids,
            users=sorted(selection.users),
            accounts=sorted(selection.accounts),
            partitions=sorted(selection.partitions),
            steps=steps,
            names=names,
        )

    def uses(self, span: Span) -> Uses:
        """What the records say of the jobs that ended in a span. Kept for the next span of the same days."""
        if self.records is None:
            return Uses()
        days = Span(span.start // _DAY_S * _DAY_S, -(-span.end // _DAY_S) * _DAY_S)
        if self._days != days:
            self._uses = Uses(self.records.between(days.start, days.end + _RECORD_S))
            self._days = days
        return self._uses

    def use_of(self, job: Allocation) -> JobUse | None:
        """What one job used, or has used until now."""
        if job.end is None and job.start is not None:
            return self._ask_running([job.id]).find(job.id, job.start)
        records = [] if self.records is None else self.records.of_job(job.id, _earlier(job.start))
        found = Uses(records).find(job.id, job.start, job.end)
        return found or Uses().find(job.id, job.start, job.end, job.admin_comment)

    # ---- sums ----

    def cells(self, span: Span, selection: Selection, *, by_node: bool = False) -> dict[Key, Tally]:
        """All sums of a span, by key. `by_node`: nodes too, which the rolled-up days do not have."""
        total: dict[Key, Tally] = {}
        days = [] if by_node else self._rolled_days(span)
        begin, rolled_end = (midnight(days[0]), midnight(days[-1] + timedelta(days=1))) if days else (0, 0)
        whole_end = span.end if span.end >= rolled_end else midnight(rollup.day_of(span.end))
        if not days or whole_end <= begin:
            self._count(total, span, span, selection, by_node=by_node)
            return total
        first = span.start >= begin
        if not first:
            self._count(total, Span(span.start, begin), Span(span.start, begin), selection)
        self._add_rolled(total, days, whole_end, selection, first=first)
        # Jobs that ended since the last file, or still run: what they used on its days is in no file yet.
        since = Span(rolled_end, max(int(self.now), span.end, rolled_end + 1))
        self._count(total, Span(begin, whole_end), since, selection, first=first)
        if whole_end < span.end:
            last = Span(whole_end, span.end)
            self._count(total, last, last, selection, first=False)
        return total

    def _rolled_days(self, span: Span) -> list[date]:
        """The days that have a file, from the span's first whole day on without a gap."""
        if self.rolled is None:
            return []
        first = rollup.day_of(span.start)
        if midnight(first) < span.start:
            first += timedelta(days=1)
        try:
            return self.rolled.unbroken(first)
        except SluiceError as error:
            self.note(str(error))
            return []

    def _add_rolled(
        self, total: dict[Key, Tally], days: list[date], end: int, selection: Selection, *, first: bool
    ) -> None:
        assert self.rolled is not None  # noqa: S101 - there are days
        last = rollup.day_of(end - 1)
        for day in days:
            for on, key, values in self.rolled.read(day):
                if not days[0] <= on <= last or not selection.takes(key):
                    continue
                if not (first and on == days[0]):
                    values["ran"] = values.get("started", 0)
                if key not in total:
                    total[key] = Tally()
                total[key].add_document(values)

    def _count(
        self,
        total: dict[Key, Tally],
        span: Span,
        asked: Span,
        selection: Selection,
        *,
        first: bool = True,
        by_node: bool = False,
    ) -> None:
        """Count, for `span`, the jobs that ended in `asked` or run on beyond it: each once, whole."""
        counter = Counter(self.fleet, by_node=by_node)
        for window in self._windows(asked):
            jobs, last = 0, window.end >= asked.end
            uses = self.uses(window)
            for job in self._stream(window, selection):
                jobs += 1
                if job.state == "PENDING":
                    if last and span.end >= int(self.now):
                        counter.add(job, span, None)
                elif belongs(job, window, last=last):
                    use = self._find(uses, job)
                    counter.add(job, self._so_far(span, job), use, first=first)
            self._pace(jobs)
        for key, tally in counter.cells.items():
            if selection.takes(key):
                _add(total, key, tally)

    def _so_far(self, span: Span, job: Allocation) -> Span:
        """A job that still runs has run until now."""
        return Span(span.start, min(span.end, int(self.now))) if job.end is None else span

    def _windows(self, span: Span) -> Iterator[Span]:
        at = span.start
        while at < span.end:
            window = Span(at, min(span.end, at + self.window_s))
            yield window
            at = window.end

    def _pace(self, jobs: int) -> None:
        """Shorter windows where one has very many jobs, so that neither sacct nor slurmdbd holds them all at once."""
        if jobs > _MANY and self.window_s > _SHORTEST_S:
            self.window_s = max(_SHORTEST_S, self.window_s // 2)


def _earlier(start: int | None) -> float | None:
    """A day before a job's start: no record of it ended before, whatever its nodes' clocks are."""
    return None if start is None else start - _DAY_S


def belongs(job: Allocation, window: Span, *, last: bool) -> bool:
    """Whether a job is this window's: that of its end, or the last where it runs on or waits."""
    if job.end is not None and job.end < window.end:
        return job.end >= window.start
    return last


def _add(total: dict[Key, Tally], key: Key, tally: Tally) -> None:
    if key in total:
        total[key].add(tally)
    else:
        total[key] = tally


def roll_up(source: Source, days: Iterable[date]) -> Iterator[tuple[date, int]]:
    """Count days and keep them; each with its number of jobs. Raises SluiceError, OSError."""
    assert source.rolled is not None  # noqa: S101 - the caller gave it
    for day in days:
        span = rollup.span_of(day)
        count = rollup.count_day(day, source.jobs(span, Selection()), source.fleet)
        source.rolled.save(day, count)
        yield day, count.jobs


def open_source(
    conf: Path | None,
    prefix: Path | None,
    *,
    records: Records | None = None,
    rolled_folder: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Source:
    """The source of the cluster of a slurm.conf."""
    client = connect(conf=conf, prefix=prefix, timeout=120)
    source = Source(client, Commands(prefix=prefix, conf=conf, timeout=120), records, note=note)
    if rolled_folder is not None:
        source.rolled = Rollup(rolled_folder, cluster_name(source))
    return source


def cluster_name(source: Source) -> str:
    """Slurm's ClusterName; empty where slurmctld does not report it."""
    try:
        return source.client.config().get("ClusterName", "").lower()
    except SluiceError:
        return ""
