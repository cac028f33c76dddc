"""The spans of jobs that have ended, a duty of controllerd: from accounting, records and decisions into a spool.

What a job's spans are made of is written by others anyway. State and spool are in StateSaveLocation, where the next
leader finds them. Spans are in the spool before the state says so: a daemon that is killed in between writes them
again, with the same IDs.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from policy.node import FILE_NAME, NodePolicyFile
from policy.traces import NodeTraces
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.controllerd.daemon import Duty, Site, of_site
from sluice.controllerd.spans.happened import Happened
from sluice.controllerd.spans.job_spans import GOING, MOST_LINKS, Hidden, JobLife, base_of, lives, spans_of, task_of
from sluice.controllerd.spans.span import Span
from sluice.controllerd.spans.waits import Waits
from sluice.exchange.job_records import FOLDER as RECORDS
from sluice.exchange.job_records import JobRecords, key_of
from sluice.exchange.record import JobRecord
from sluice.explain.decisions import FOLDER as DECISIONS
from sluice.explain.decisions import DecisionError
from sluice.metrics.output import SenderProcess
from sluice.metrics.spool import Writer
from sluice.slurm.allocations import Allocation, stream

FOLDER = "sluice.spans"
"""Below StateSaveLocation."""
_STATE = "state.json"
_PERIOD_S = 1.0
_LEAST_S = 1.0  # between two looks into accounting
_SHARE = 0.05  # the part of the time that the duty may be busy
_OVERLAP_S = 600.0  # slurmctld's reports to slurmdbd may be this late
_ROW_S = 60.0  # slurmctld sends what a job was every 5 s: what ended before that has a row without partition till then
_RECORDS_S = 86_400.0  # how old a record may be that is at hand
_MOST_JOBS = 100_000  # whose records are at hand, the newest: some 350 MB
_BATCH = 50  # jobs
_SAVE_S = 30.0  # the state has all jobs of the last minutes: too much for each batch
_PIECE = 256 << 10  # bytes of the spool's batches, which a receiver may get joined
_MOST_DEPENDENT = 50_000
_ALL = 1 << 30  # records
_ENDED = ("BF", "CA", "CD", "DL", "F", "NF", "OOM", "PR", "RQ", "TO")
_DEPENDENCY = re.compile(r"[a-z]{5,15}:(\d{1,10})(?:[_+][*\d]{1,10})?(?:\+\d{1,6})?(?:\(\w{1,20}\))?")

log = logging.getLogger("sluice.spans")


@dataclass
class State:
    """What the duty knows of what it did; on disk after each look, and now and then during a long one."""

    cursor: float
    """All that ended before is in the spool."""
    done: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Jobs that are in the spool: their ends, and how many records of nodes they had then."""
    waits_for: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of waiting jobs, and of those that they wait for."""
    again: set[int] = field(default_factory=set)
    """Jobs to look at again, whenever they ended: a node reported late, or they wait to run again."""
    dropped_bytes: int = 0
    """What was never sent, as the spool was full."""

    @classmethod
    def read(cls, path: Path, now: float) -> State:
        """The state, or one that begins now. Raises OSError."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            kept = json.loads(path.read_text())
            done = {str(key): (float(end), int(count)) for key, (end, count) in kept["done"].items()}
            again = set(map(int, kept["again"]))
            return cls(float(kept["cursor"]), done, dict(kept["waits_for"]), again, int(kept["dropped_bytes"]))
        return cls(now)

    def write(self, path: Path) -> None:
        """Replace the file. Raises OSError."""
        kept = asdict(self) | {"again": sorted(self.again)}
        write_atomic(path, json.dumps(kept) + "\n", mode=0o600, follow_links=False)

    def forget(self) -> None:
        """What a look into accounting does not find again."""
        self.done = {key: one for key, one in self.done.items() if one[0] >= self.cursor - _OVERLAP_S}
        for number in list(self.waits_for)[:-_MOST_DEPENDENT]:
            del self.waits_for[number]


class _Work:
    """What a leading controller has open; made again when it leads again."""

    def __init__(self, site: Site, settings: NodeTraces) -> None:
        self.folder = site.state_save / FOLDER
        self.writer = Writer(self.folder, settings.spool << 20)
        self.sender = SenderProcess("sluice.controllerd.spans.sender", self.folder)
        self.state = State.read(self.folder / _STATE, time.time())
        self.waiting: set[int] = set()
        self.waits = Waits(site.state_save / DECISIONS)
        self.dropped = self.state.dropped_bytes
        self.settings = settings
        self.saved = time.monotonic()

    def save(self) -> None:
        """The state as it is now. Raises OSError."""
        if self.dropped + self.writer.dropped != self.state.dropped_bytes:
            log.error("the receiver took nothing for too long: %d bytes of spans were dropped", self.writer.dropped)
            self.state.dropped_bytes = self.dropped + self.writer.dropped
        self.state.write(self.folder / _STATE)
        self.saved = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at what ended: the time it asks for, in seconds since 1970, and what is the same for all its jobs."""

    since: float
    until: float
    hidden: Hidden
    late: Set[int]  # jobs whose records came late
    happened: Happened

    def has(self, number: int, state: str, end: float) -> bool:
        """Whether the life of a job that ended so is to be written in this look."""
        return state not in GOING - {"REQUEUED"} and (end >= self.since or number in self.late)


class Spans:
    """The duty. `arrived` may be called by other threads."""

    def __init__(self) -> None:
        self._policy: NodePolicyFile | None = None
        self._work: _Work | None = None
        self._due = 0.0
        self._off = False
        self._lock = threading.Lock()
        self._records: dict[int, dict[tuple[int, str, float], JobRecord]] = defaultdict(dict)
        self._late: set[int] = set()

    def arrived(self, record: JobRecord) -> None:
        """A node's record was stored."""
        with self._lock:
            if self._work is not None:
                self._records[record.job][key_of(record)] = record
                self._late.add(record.job)
                if len(self._records) > _MOST_JOBS:
                    oldest = next(iter(self._records))
                    del self._records[oldest]
                    self._late.discard(oldest)

    def run(self, site: Site) -> None:
        """Look for jobs that have ended. Raises SluiceError, OSError."""
        settings = self._settings(site)
        if not settings.endpoint or not site.leads():
            self._stop()
            if not settings.endpoint:
                self._switch_off(site)
            return
        self._off = False
        if self._work is None or self._work.settings != settings:
            self._stop()
            self._start(site, settings)
        assert self._work is not None  # noqa: S101 - made just now
        self._work.sender.keep(settings.model_dump())
        began = time.monotonic()
        if began < self._due:
            return
        try:
            self._look(site, self._work)
        finally:
            took = time.monotonic() - began
            self._due = began + max(_LEAST_S, settings.settle / 2, took / _SHARE)

    def _settings(self, site: Site) -> NodeTraces:
        if self._policy is None:
            self._policy = NodePolicyFile(site.conf_folder / FILE_NAME)
        return self._policy.current().traces

    def _switch_off(self, site: Site) -> None:
        """Forget what was sent: what ends from now on is not, however late somebody switches it on again."""
        if not self._off and self._policy is not None and self._policy.loaded and site.leads():
            (site.state_save / FOLDER / _STATE).unlink(missing_ok=True)
            self._off = True

    def _stop(self) -> None:
        if self._work is not None:
            self._work.sender.stop()
        with self._lock:
            self._work = None
            self._records.clear()
            self._late.clear()

    def _start(self, site: Site, settings: NodeTraces) -> None:
        work = _Work(site, settings)
        work.save()  # what ends from now on is sent, whenever this daemon is killed
        with self._lock:
            self._work = work
        since = work.state.cursor - _RECORDS_S
        for record in JobRecords(site.state_save / RECORDS).between(since, time.time() + _RECORDS_S):
            self.arrived(record)
        known: dict[int, int] = {}  # how many records were written, at most
        for key, (_, count) in work.state.done.items():
            job = int(key.partition(":")[0])
            known[job] = max(count, known.get(job, 0))
        with self._lock:
            self._late = {job for job in self._late if known.get(job, _ALL) < len(self._records[job])}

    def _look(self, site: Site, work: _Work) -> None:
        hidden = hidden_by(site.config().get("PrivateData", ""), work.settings)
        if not site.config().get("AccountingStorageType", "").endswith("slurmdbd"):
            raise SluiceError(
                "traces: spans need accounting", remedy="set AccountingStorageType=accounting_storage/slurmdbd"
            )
        until = time.time() - work.settings.settle
        work.waiting.clear()
        for number, others in _waiting(site.commands.output("squeue", *_WAITING)):
            work.waiting.add(number)
            if others:
                work.state.waits_for[str(number)] = others
        work.state.forget()
        with suppress(DecisionError):  # reported by the metrics' duty and `sluice explain`
            work.waits.look()
        since = work.state.cursor - _OVERLAP_S
        late = self._take_late(work)
        rows = stream(site.commands, start=int(since), end=int(until) + 1, states=_ENDED)
        ended = sorted({row.id for row in rows if not self._is_done(work.state, row)} | late)
        look = _Look(since, until, hidden, late, Happened(site.state_save, site.events))
        for at in range(0, len(ended), _BATCH):
            if site.stopping.is_set() or not site.leads():
                return
            self._write(site, work, ended[at : at + _BATCH], look)
            if time.monotonic() - work.saved > _SAVE_S:
                work.save()
        work.state.cursor = max(work.state.cursor, until)
        work.save()
        self._forget(work.state.cursor - _RECORDS_S)

    def _take_late(self, work: _Work) -> frozenset[int]:
        with self._lock:
            late, self._late = self._late, set()
        if not late <= work.state.again:
            work.state.again |= late
            work.save()  # nothing else says after a restart that they are to be written again
        return frozenset(work.state.again)

    def _is_done(self, state: State, row: Allocation) -> bool:
        """Whether a job of one attempt is in the spool as it is now."""
        now = (float(row.end or 0), len(self._records_of(row.id)))
        return state.done.get(f"{row.id}:{row.submit}") == now

    def _forget(self, before: float) -> None:
        with self._lock:
            for job in [
                job for job, found in self._records.items() if all((r.ended or 0) < before for r in found.values())
            ]:
                del self._records[job]

    def _write(self, site: Site, work: _Work, numbers: Sequence[int], look: _Look) -> None:
        """Spans of jobs that ended within a time, or whose records came late, into the spool."""
        cluster = site.config().get("ClusterName", "")
        rows, steps = _rows(site, numbers)
        others = self._waited_for(site, work, rows)
        gangs = self._gangs(site, work, numbers)
        lines: list[bytes] = []
        done: dict[str, tuple[float, int]] = {}
        again: set[int] = set()
        for number in numbers:
            records = self._records_of(number)
            for life in lives(rows[number]):
                first, last = life[0], life[-1]
                if last.end is None or not look.has(number, last.state, last.end):
                    continue
                if last.end > look.until or (last.state == "REQUEUED" and number in work.waiting):
                    again.add(number)  # its nodes may still report, or accounting has no row of its next attempt yet
                    continue
                if not last.partition and last.end > look.until - _ROW_S:
                    again.add(number)
                    continue
                key, now = f"{number}:{first.submit}", (float(last.end), len(records))
                if work.state.done.get(key) == now:
                    continue
                done[key] = now
                whole = JobLife(
                    cluster=cluster,
                    rows=life,
                    steps=steps[number],
                    records=records,
                    reasons=work.waits.of_jobs({number, base_of(first)}),
                    decisions=work.waits.starts_of(*task_of(first)),
                    happened=look.happened.to_job(number),
                    journalled=look.happened.journalled({number, base_of(first)}, float(first.submit or 0)),
                    saves=look.happened.saves_of(number),
                    waited_for=others[number],
                    gang=gangs[number],
                    hidden=look.hidden,
                )
                lines += [span.to_line() for span in sampled(spans_of(whole), work.settings.sample)]
        for piece in _pieces(lines):
            work.writer.append(piece)
        work.state.done |= done
        work.state.again = work.state.again.difference(numbers) | again

    def _records_of(self, job: int) -> list[JobRecord]:
        with self._lock:
            return list(self._records.get(job, {}).values())

    def _waited_for(
        self, site: Site, work: _Work, rows: Mapping[int, Sequence[Allocation]]
    ) -> dict[int, list[Allocation]]:
        """The jobs that each waited for; an array's tasks wait as one, under its number."""
        known = work.state.waits_for
        wanted = {
            number: known.get(str(number)) or known.get(str(base_of(found[0])), []) if found else []
            for number, found in rows.items()
        }
        return self._first_rows(site, wanted)

    def _gangs(self, site: Site, work: _Work, numbers: Sequence[int]) -> dict[int, list[Allocation]]:
        """The other members of each job's gang."""
        return self._first_rows(
            site,
            {
                number: [one for one in sorted(set(work.waits.gang_of(number))) if one != number][:MOST_LINKS]
                for number in numbers
            },
        )

    def _first_rows(self, site: Site, wanted: Mapping[int, Sequence[int]]) -> dict[int, list[Allocation]]:
        """The first row in accounting of each wanted job, the newest of its number."""
        others, _ = _rows(site, sorted({other for found in wanted.values() for other in found}))
        first = {number: [life[0] for life in lives(found)] for number, found in others.items()}
        return {number: [first[one][-1] for one in found if first[one]] for number, found in wanted.items()}


_WAITING = ("--noheader", "--all", "--states=PENDING", "--format=%A|%E")


def _waiting(listing: str) -> Iterator[tuple[int, list[int]]]:
    """Waiting jobs, and the first of those that they wait for, of squeue's listing; a user may name any number."""
    for line in listing.splitlines():
        number, _, words = line.partition("|")
        found = [int(match[1]) for match in islice(_DEPENDENCY.finditer(words), MOST_LINKS)]
        if number.isdecimal():
            yield int(number), found


def _rows(site: Site, numbers: Sequence[int]) -> tuple[dict[int, list[Allocation]], dict[int, list[Allocation]]]:
    """The rows and the steps of jobs by number."""
    rows: dict[int, list[Allocation]] = {number: [] for number in numbers}
    steps: dict[int, list[Allocation]] = {number: [] for number in numbers}
    for row in stream(site.commands, ids=map(str, numbers), steps=True) if numbers else ():
        if row.id in rows:
            (steps if "." in row.label else rows)[row.id].append(row)
    return rows, steps


def hidden_by(private_data: str, settings: NodeTraces) -> Hidden:
    """What must not leave. Raises SluiceError where nothing may."""
    kept = settings.hidden(private_data)
    if "jobs" in kept:
        raise SluiceError(
            f"traces: nothing is sent, as jobs are private (PrivateData={private_data})",
            remedy="add jobs to traces.private if their spans may leave",
        )
    return Hidden(users="users" in kept, accounts="accounts" in kept, nodes="nodes" in kept)


def sampled(spans: Iterable[Span], share: float) -> list[Span]:
    """Those of the traces that are sent, chosen as OpenTelemetry's TraceIdRatioBased does."""
    return [span for span in spans if int(span.trace[16:], 16) < share * (1 << 64)]


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if size + len(line) > _PIECE and piece:
            yield b"".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield b"".join(piece)


spans_of_site = of_site(lambda _: Spans())
"""The duty of this daemon."""


def duties(site: Site) -> list[Duty]:
    """One duty; it does nothing without `traces.endpoint`."""
    return [Duty("spans", _PERIOD_S, spans_of_site(site).run, everywhere=True)]
