"""Reports and the pages of single jobs for `sluice web`.

No request waits for one: it gets what is there, or is answered that it is being made, and asks again. Duties make them,
one after the other, once for all who ask for the same, so that neither slurmdbd nor this daemon has more to do for a
hundred viewers than for one. Days that are over come from the rolled-up ones; what ended since, runs or waits is read
from the accounting by a duty of its own, and reports say when that was.

What a viewer may not see is taken out here, before sums are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

from policy.quota_use import TenantUse
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.service_jobs import ServicesFile
from sluice.base.errors import SluiceError, UsageError
from sluice.base.rates import FewLines
from sluice.base.text import one_line
from sluice.controllerd.daemon import Duty, Site
from sluice.controllerd.readings import running_of
from sluice.exchange.job_records import FOLDER as RECORDS
from sluice.exchange.job_records import JobRecords
from sluice.exchange.pool_costs import read_costs
from sluice.exchange.snapshot import render_answer
from sluice.explain.decisions import FOLDER as DECISIONS
from sluice.explain.explanation import explain_job, parse_job
from sluice.explain.shadow import report as shadow_report
from sluice.report.build import GROUPS, build, each_gpu, job_rows
from sluice.report.collect import Selection, Source
from sluice.report.count import Counter, Span
from sluice.report.fields import FIELDS, GROUPED_BY, Row, fields_of
from sluice.report.fleet import Fleet
from sluice.report.job_page import NoJobError, job_page
from sluice.report.output import head_of, row_document
from sluice.report.rollup import Rollup, count_open, day_of, midnight
from sluice.report.services import GROUPS as SERVICE_GROUPS
from sluice.report.services import KEPT, USUAL, RequestDays, ServiceKey, ServiceSelection, services_report
from sluice.report.tally import Key, Tally
from sluice.report.tenants import ancestors, below
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.allocations import Allocation

MOST_DAYS = 400
MOST_JOB_DAYS = 31
MOST_ROWS = 2000
_MOST_NAMES = 100
_RECENT_DAYS = 3  # days that are not rolled up for longer are missing
_RECENT_S = 60.0
_RECENT_SHARE = 20.0  # what is read from the accounting is read at most every so many times as it takes
_ASKED_S = 600.0  # it is read again while somebody asked so recently
_LOOK_S = 5.0
_KEPT_S = 30.0
_SHADOW_KEPT_S = 300.0
_FAILED_S = 3.0
_MOST_KEPT = 16 << 20  # bytes
_MOST_SUMS = 4
_MOST_WAITING = 64
_MOST_OF_USER = 4
_PAUSE_SHARE = 3.0  # after work, so that the desks have a quarter of a processor
_LONGEST_PAUSE_S = 2.0
_SACCT_S = 30
_WAITS = render_answer({"waits": True})

log = logging.getLogger("sluice.snapshot")
log.addFilter(FewLines())


class BusyError(SluiceError):
    """Too much is being made already."""


class Desk:
    """Takes orders of what lasts a while, makes one after the other, and keeps what was made for some time."""

    def __init__(self, make: Callable[[Any], dict[str, Any] | None], kept_s: float = _KEPT_S) -> None:
        self._make = make
        self._kept_s = kept_s
        self._turn = threading.Condition()
        self._orders: OrderedDict[Hashable, str] = OrderedDict()  # and who gave them; the first is being made
        self._made: OrderedDict[Hashable, tuple[float, bytes | SluiceError]] = OrderedDict()

    def ask(self, what: Hashable, who: str) -> bytes | None:
        """The answer with what was made; None: it is being made. Raises SluiceError where it cannot be made now."""
        with self._turn:
            until, found = self._made.get(what, (0.0, None))
            if time.monotonic() < until:
                if isinstance(found, SluiceError):
                    raise found
                return found
            if what not in self._orders:
                if len(self._orders) >= _MOST_WAITING or list(self._orders.values()).count(who) >= _MOST_OF_USER:
                    raise BusyError("reports of this user, or of all, are being made", remedy="try again soon")
                self._orders[what] = who
                self._turn.notify()
        return None

    def step(self, wait_s: float) -> float:
        """Make the oldest order, if one comes in time; seconds of a processor that it took."""
        with self._turn:
            if not self._orders and not self._turn.wait(wait_s):
                return 0.0
            what = next(iter(self._orders))
        began = time.thread_time()
        found: bytes | SluiceError
        try:
            found = render_answer({"document": self._make(what)})
        except SluiceError as error:
            found = error
        except (OSError, ValueError, KeyError) as error:
            log.exception("a report: unexpected")
            found = SluiceError(one_line(str(error)), remedy="see the daemon's log")
        kept = _FAILED_S if isinstance(found, SluiceError) else self._kept_s
        with self._turn:
            del self._orders[what]
            self._made.pop(what, None)
            self._made[what] = time.monotonic() + kept, found
            while sum(_size(one) for _, one in self._made.values()) > _MOST_KEPT:
                self._made.popitem(last=False)
        return time.thread_time() - began

    def serve(self, site: Site) -> None:
        """A duty that lasts."""
        while not site.stopping.is_set():
            took = self.step(1.0)
            site.stopping.wait(min(_LONGEST_PAUSE_S, _PAUSE_SHARE * took))


def _size(made: bytes | SluiceError) -> int:
    return 1000 + len(made) if isinstance(made, bytes) else 1000


# ---- what is asked ----


@dataclass(frozen=True)
class Seen:
    """What a viewer sees: the use of `user` and of `accounts`, the quotas of `tenants`, and whether it sees nodes."""

    user: str
    accounts: frozenset[str]
    tenants: frozenset[str]


@dataclass(frozen=True)
class Wanted:
    """A report: whole days, the last included. `seen`: by whom; None: everybody's use."""

    kind: str
    first: date
    last: date
    by: tuple[str, ...]
    selection: Selection
    seen: Seen | None
    nodes: bool
    """Whether the viewer sees nodes, and so how many GPUs there are."""
    limit: int
    services: frozenset[str] = frozenset()
    each: bool = False
    """Of `gpus`: a line for each GPU, from the jobs' records."""

    @property
    def by_node(self) -> bool:
        """Whether it is of nodes, which are counted for all users together."""
        return "node" in (self.by or GROUPED_BY.get(self.kind, ()))


def parse_wanted(request: Mapping[str, Any]) -> Wanted:
    """Raises UsageError."""
    kind = request.get("report")
    if kind not in (*GROUPED_BY, "jobs", "services"):
        raise UsageError(f"report {one_line(str(kind), limit=40)!r}: not known", remedy=f"use {', '.join(GROUPED_BY)}")
    by = _names(request, "by")
    groups = SERVICE_GROUPS if kind == "services" else GROUPS
    for name in by - set(groups):
        raise UsageError(f"by {name[:40]!r}: cannot group by that", remedy=f"use {', '.join(groups)}")
    selection = Selection(
        _names(request, "accounts"), _names(request, "users"), _names(request, "partitions"),
        gpu_types=_names(request, "gpu_types"),
    )  # fmt: skip
    first, last = _day(request, "from"), _day(request, "until")
    if not first <= last < first + timedelta(days=MOST_DAYS):
        raise UsageError(f"from {first} until {last}: not 1 to {MOST_DAYS} days", remedy="ask for fewer days")
    most = MOST_JOB_DAYS if selection.users or selection.accounts or request.get("seen") else 1
    each = request.get("each") is True
    if each and (kind != "gpus" or by):
        raise UsageError("each: a line for each GPU is in the report of GPUs alone", remedy="leave it out, or `by`")
    if each and last - first >= timedelta(days=MOST_JOB_DAYS):
        raise UsageError(
            f"from {first} until {last}: more than {MOST_JOB_DAYS} days of single GPUs", remedy="ask for fewer days"
        )
    if kind == "jobs" and last - first >= timedelta(days=most):
        raise UsageError(
            f"from {first} until {last}: more than {most} days of single jobs", remedy="name a user or an account"
        )
    seen = request.get("seen")
    mine = None
    if seen is not None:
        mine = Seen(str(seen.get("user")), _names(seen, "accounts"), _names(seen, "tenants"))
    limit = request.get("limit")
    most = limit if type(limit) is int and 0 < limit <= MOST_ROWS else MOST_ROWS
    wanted = Wanted(
        str(kind), first, last, tuple(sorted(by)), selection, mine, bool(request.get("nodes")), most,
        _names(request, "services"), each,
    )  # fmt: skip
    if wanted.by_node and (selection != Selection() or len(by) > 1):
        raise UsageError(
            "nodes are counted for all jobs together", remedy="leave out the other filters and groups, or `node`"
        )
    return wanted


def _names(request: Mapping[str, Any], name: str) -> frozenset[str]:
    given = request.get(name) or ()
    if not isinstance(given, list | tuple) or len(given) > 100 * _MOST_NAMES:
        raise UsageError(f"{name}: not a list, or too long")
    return frozenset(str(one)[:1024] for one in given)


def _day(request: Mapping[str, Any], name: str) -> date:
    text = str(request.get(name))
    try:
        found = date.fromisoformat(text)
        if not 2000 <= found.year < 2200:
            raise ValueError
    except ValueError as error:
        raise UsageError(f"{name} {one_line(text, limit=40)!r}: not a day", remedy="write it as 2026-11-24") from error
    return found


# ---- what was used ----


@dataclass
class Recent:
    """What no rolled-up day has: what jobs used, by day, that ended on `first` or later, run or wait."""

    first: date
    at: float
    cells: Mapping[date, Counter] = field(default_factory=dict)
    nodes: Mapping[date, Counter] = field(default_factory=dict)


class History:
    """The rolled-up days, and what the accounting had of the days since when it was last read."""

    def __init__(self, site: Site, fleet: Callable[[], Fleet]) -> None:
        self.site = site
        self.fleet = fleet
        self.recent: Recent | None = None
        self.problem = ""
        self.stale_since: float | None = None
        self.asked = 0.0  # monotonic
        self._due = 0.0
        self._reading = threading.Lock()
        self._sums: OrderedDict[Hashable, dict[Key, Tally]] = OrderedDict()

    def rolled(self) -> Rollup:
        """Raises SluiceError."""
        return Rollup(self.site.state / "report", self.site.config().get("ClusterName", "").lower())

    def refresh(self, _: Site) -> None:
        """A duty: read what is not rolled up, while somebody asks for reports."""
        if self.asked and time.monotonic() - self.asked < _ASKED_S:
            self.read_recent()

    def read_recent(self) -> None:
        """Read it unless that was done recently; a failure leaves what was known."""
        with self._reading:
            began = time.monotonic()
            if began < self._due:
                return
            now = time.time()
            try:
                self.recent = self._read(now)
                self.problem, self.stale_since = "", None
            except (SluiceError, OSError) as error:
                self.problem = one_line(str(error), limit=300)
                self.stale_since = self.stale_since or (self.recent.at if self.recent is not None else now)
                log.warning("reports: the accounting cannot be read: %s", self.problem)
            took = time.monotonic() - began
            self._due = time.monotonic() + max(_RECENT_S, _RECENT_SHARE * took)

    def _read(self, now: float) -> Recent:
        if not self.site.config().get("AccountingStorageType", "").endswith("slurmdbd"):
            raise SluiceError("there is no accounting", remedy="see AccountingStorageType in slurm.conf")
        today = day_of(now)
        earliest = today - timedelta(days=_RECENT_DAYS)
        days = self.rolled().days()
        first = max(days[-1] + timedelta(days=1), earliest) if days else earliest
        source = source_of(self.site, self.fleet(), now)
        jobs = source.jobs(Span(midnight(first), max(int(now), midnight(first) + 1)), Selection())
        count = count_open(first, jobs, source.fleet, now)
        return Recent(first, now, count.cells, count.nodes)

    def cells(self, first: date, last: date, *, nodes: bool) -> dict[Key, Tally]:
        """What was used on these days. Raises SluiceError for a rolled-up day that cannot be read."""
        total = dict(self._rolled_sum(first, last, nodes))
        recent = self.recent
        if recent is not None:
            for on, counter in (recent.nodes if nodes else recent.cells).items():
                for key, made in counter.cells.items() if first <= on <= last else ():
                    total[key] = _sum(total.get(key), made, first=on == first)
        return total

    def _rolled_sum(self, first: date, last: date, nodes: bool) -> dict[Key, Tally]:
        rolled = self.rolled()
        until = self.recent.first if self.recent is not None else date.max
        days = [day for day in rolled.days() if first <= day < until and (not nodes or rolled.has_nodes(day))]
        name = (first, last, nodes, tuple(days))
        if name not in self._sums:
            total: dict[Key, Tally] = {}
            for day in days:
                for on, key, values in rolled.read(day, nodes=nodes):
                    if first <= on <= last:
                        if on != first:
                            values["ran"] = values.get("started", 0)
                        total.setdefault(key, Tally()).add_document(values)
            self._sums[name] = total
            while len(self._sums) > _MOST_SUMS:
                self._sums.popitem(last=False)
        self._sums.move_to_end(name)
        return self._sums[name]

    def missing(self, first: date, last: date, *, nodes: bool) -> list[str]:
        """Days of which something is not known: they are neither rolled up nor recent."""
        rolled = self.rolled()
        known = {day for day in rolled.days() if not nodes or rolled.has_nodes(day)}
        until = self.recent.first if self.recent is not None else day_of(time.time()) + timedelta(days=1)
        days = [first + timedelta(days=number) for number in range((min(last + timedelta(days=1), until) - first).days)]
        return [str(day) for day in days if day not in known]


def _sum(before: Tally | None, more: Tally, *, first: bool) -> Tally:
    """A job that runs for several days counts on the first of them."""
    found = Tally()
    found.add(more)
    if not first:
        found.ran = more.started
    if before is not None:
        found.add(before)
    return found


class _Config:
    """Slurm's configuration as the daemon knows it: a report asks slurmctld for nothing."""

    def __init__(self, site: Site) -> None:
        self.config = site.config


def source_of(site: Site, fleet: Fleet, now: float) -> Source:
    """The accounting, with the records of this controller."""
    commands = Commands(prefix=site.commands.prefix, conf=site.commands.conf, timeout=_SACCT_S)
    found = Source(cast(SlurmClient, _Config(site)), commands, JobRecords(site.state_save / RECORDS), now=now)
    found.running = running_of(site).records
    found.__dict__["fleet"] = fleet.with_classes(found.classes())
    return found


class _Counted(Source):
    """A source whose sums are there."""

    counted: dict[Key, Tally]

    def cells(self, span: Span, selection: Selection, *, by_node: bool = False) -> dict[Key, Tally]:
        return self.counted


class Reports:
    """What viewers of `sluice web` are answered."""

    def __init__(self, site: Site, fleet: Callable[[], Fleet], tenants: Callable[[], Mapping[str, TenantUse]]) -> None:
        self.site = site
        self.tenants = tenants
        self.history = History(site, fleet)
        self._services_file: ServicesFile | None = None
        self._requests: RequestDays | None = None
        self.reports = Desk(self._report)
        self.pages = Desk(self._page)
        self.shadows = Desk(self._shadow, _SHADOW_KEPT_S)

    def report(self, request: Mapping[str, Any]) -> bytes:
        """The answer with a report's document, or ``waits``. Raises UsageError, SluiceError."""
        wanted = parse_wanted(request)
        if wanted.each or wanted.kind in ("jobs", "services"):
            return self.pages.ask(wanted, str(request.get("who"))) or _WAITS
        self.history.asked = time.monotonic()
        return self.reports.ask(wanted, str(request.get("who"))) or _WAITS

    def page(self, request: Mapping[str, Any]) -> bytes:
        """The same with the page of a job as operators see it; null where there is no such job."""
        return self.pages.ask(str(request.get("job"))[:40], str(request.get("who"))) or _WAITS

    def shadow(self, request: Mapping[str, Any]) -> bytes:
        """The same with the report of level shadow. Raises UsageError."""
        hours = request.get("hours")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours < 1e6):
            raise UsageError("hours: not a number of hours")
        return self.shadows.ask(hours, str(request.get("who"))) or _WAITS

    def duties(self) -> list[Duty]:
        """For the daemon."""
        return [
            Duty("snapshot-reports", 10.0, self.reports.serve, everywhere=True, lasting=True),
            Duty("snapshot-pages", 10.0, self.pages.serve, everywhere=True, lasting=True),
            Duty("snapshot-shadow", 10.0, self.shadows.serve, everywhere=True, lasting=True),
            Duty("snapshot-recent", _LOOK_S, self.history.refresh, everywhere=True),
        ]

    def _report(self, wanted: Wanted) -> dict[str, Any]:
        history = self.history
        if history.recent is None:
            history.read_recent()
        now = time.time()
        source = _Counted(cast(SlurmClient, _Config(self.site)), self.site.commands, now=now, costs=read_costs)
        source.__dict__["fleet"] = self._fleet(wanted)
        known = _known(self.tenants(), wanted.seen)
        selection = replace(wanted.selection, accounts=self._accounts(wanted))
        if wanted.by_node:
            mine = wanted.seen is None and wanted.nodes
            source.counted = history.cells(wanted.first, wanted.last, nodes=True) if mine else {}
        else:
            cells = history.cells(wanted.first, wanted.last, nodes=False)
            source.counted = {
                key: made for key, made in cells.items() if selection.takes(key) and _sees(wanted.seen, key)
            }
        end = min(midnight(wanted.last + timedelta(days=1)), int(now))
        span = Span(midnight(wanted.first), max(end, midnight(wanted.first) + 1))
        idle = wanted.seen is None and wanted.nodes and wanted.selection == Selection()
        notes: list[str] = []
        source.note = notes.append
        made = build(source, wanted.kind, span, Selection(), by=wanted.by, tenants=lambda: known, idle=idle)
        fields = [one for one in FIELDS if not one.jobs]
        rows = [_known_values(row_document(fields, row)) for row in made.rows[: wanted.limit]]
        recent = history.recent
        head = {
            "stale_since": history.stale_since, "problem": history.problem, "start": span.start, "end": span.end,
            "made": int(now), "recent_at": None if recent is None else round(recent.at, 2), "total": len(made.rows),
            "missing": history.missing(wanted.first, min(wanted.last, day_of(now)), nodes=wanted.by_node), **made.extra,
            "notes": notes,
        }  # fmt: skip
        return head_of(wanted.kind, {**head, "rows": rows})

    def classes(self) -> dict[str, list[str]]:
        """The types of each class of the policy in force."""
        return Source(cast(SlurmClient, _Config(self.site)), self.site.commands).classes()

    def _fleet(self, wanted: Wanted) -> Fleet:
        everything = wanted.nodes and wanted.seen is None  # the part of one of what there is says something else
        return (self.history.fleet() if everything else Fleet()).with_classes(self.classes())

    def _accounts(self, wanted: Wanted) -> frozenset[str]:
        """Those that were asked for; of tenants with those below."""
        asked = wanted.selection.accounts
        tree = wanted.kind in ("tenants", "fairness") and not wanted.by
        return below(asked, self.tenants()) if asked and tree else asked

    def _shadow(self, hours: float | None) -> dict[str, Any]:
        since = time.time() - hours * 3600 if hours else 0.0
        return shadow_report(self.site.state_save / DECISIONS, since=since).document()

    def source(self, now: float) -> Source:
        """The accounting."""
        return source_of(self.site, self.history.fleet(), now)

    def _jobs(self, wanted: Wanted) -> dict[str, Any]:
        """Single jobs, from the accounting: the latest ones, each as its viewer may see it."""
        now, seen, selection = time.time(), wanted.seen, wanted.selection
        if seen is not None and not seen.accounts:
            selection = replace(selection, users=frozenset({seen.user}))
        source = self.source(now)
        start = midnight(wanted.first)
        span = Span(start, max(start + 1, min(midnight(wanted.last + timedelta(days=1)), int(now))))
        rows: deque[dict[str, Any]] = deque(maxlen=wanted.limit)
        total = 0
        for row in job_rows(source, span, selection):
            names = row.names
            key = Key(names["account"], names["user"], names["partition"], names["qos"], "", names["gpu_type"])
            if _sees(seen, key) and wanted.selection.takes(key):
                total += 1
                rows.append(_known_values(row_document(FIELDS, row)))
        head = {"start": span.start, "end": span.end, "made": int(now), "total": total}
        return head_of("jobs", {**head, "rows": list(rows)})

    def _services(self, wanted: Wanted) -> dict[str, Any]:
        """Requests to services, each as its viewer may see it; the GPU time is from the accounting."""
        if self._services_file is None:
            self._services_file = ServicesFile(self.site.conf_folder / SERVICES_FILE)
        policy, now, chosen = self._services_file.current(), time.time(), wanted.selection
        folder = Path(policy.requests)
        if self._requests is None or self._requests.folder != folder:
            self._requests = RequestDays(folder, self.site.state / "report" / KEPT, writes=True)
        selection = ServiceSelection(wanted.services, chosen.accounts, chosen.users)
        try:
            made = services_report(
                self.source(now), self._requests, policy, wanted.first, wanted.last,
                lambda key: selection.takes(key) and _sees(wanted.seen, key), wanted.by or USUAL,
            )  # fmt: skip
        except PermissionError as error:
            raise SluiceError(f"{error.filename}: {error.strerror}", remedy="let Slurm's user read it") from error
        fields = fields_of("services")
        rows = [_known_values(row_document(fields, row)) for row in made.rows[: wanted.limit]]
        head = {"start": made.span.start, "end": made.span.end, "made": int(now), "total": len(made.rows)}
        return head_of("services", {**head, "rows": rows})

    def _each_gpu(self, wanted: Wanted) -> dict[str, Any]:
        """Every GPU, from the records of jobs: who sees no nodes, or not everybody's use, those that its jobs had."""
        now, seen = time.time(), wanted.seen
        source = self.source(now)
        start = midnight(wanted.first)
        span = Span(start, max(start + 1, min(midnight(wanted.last + timedelta(days=1)), int(now))))
        rows: list[Row] = []
        if wanted.nodes or seen is not None:  # as of nodes
            made = each_gpu(source, span, wanted.selection, None if seen is None else lambda key: _sees(seen, key))
            rows = made.rows
        fields = [one for one in FIELDS if not one.jobs]
        head = {"start": span.start, "end": span.end, "made": int(now), "total": len(rows)}
        shown = [_known_values(row_document(fields, row)) for row in rows[: wanted.limit]]
        return head_of("gpus", {**head, "rows": shown})

    def _page(self, name: str | Wanted) -> dict[str, Any] | None:
        if isinstance(name, Wanted):
            make = self._each_gpu if name.each else self._jobs if name.kind == "jobs" else self._services
            return make(name)
        source = self.source(time.time())
        folder = self.site.state_save / DECISIONS

        def explain(job: Allocation) -> dict[str, Any]:
            found = explain_job(folder, parse_job(job.label.partition("+")[0]), submit=job.submit, known_id=job.id)
            if found is None:
                raise SluiceError("nothing is recorded of it", remedy="jobs are recorded from level shadow on")
            return found

        try:
            return job_page(source, name, explain)
        except NoJobError:
            return None


def _sees(seen: Seen | None, key: Key | ServiceKey) -> bool:
    return seen is None or key.user == seen.user or key.account in seen.accounts


def _known(tenants: Mapping[str, TenantUse], seen: Seen | None) -> Mapping[str, TenantUse]:
    """The tenants that a viewer sees, without the use of those above, which would be their neighbours'."""
    if seen is None:
        return tenants
    mine = [name for name in tenants if name in seen.tenants]
    above = {one for name in mine for one in ancestors(name, tenants)} - seen.tenants
    bare = {name: replace(tenants[name], used={}, minutes={}, limits={}, member_use={}) for name in above}
    return {name: bare.get(name, tenants[name]) for name in tenants if name in bare or name in seen.tenants}


def _known_values(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
