"""Writes a summary of a job's record into the AdminComment of Slurm's accounting (`sluice.exchange.admin_comment`).

Only the controllers' daemon does this, as a job of many nodes has one such field, and only after slurmctld reported
the job's end to slurmdbd, as slurmctld would overwrite it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.controllerd.daemon import Site
from sluice.exchange.admin_comment import merge, render
from sluice.exchange.job_records import JobRecords, Key, key_of
from sluice.exchange.job_runs import Began, nearest, runs_of
from sluice.exchange.record import JobRecord
from sluice.slurm import Commands

_QUIET_S = 1.0  # after a record came, its job's others may be on their way
_KEPT_S = 600.0  # how long a job's records are at hand for one that comes late
_AGAIN_S = 15.0  # when slurmdbd does not know yet that the job ended
_GIVE_UP_S = 86400.0
_BATCH = 100
_EARLIER_S = 60.0  # clocks of nodes and controller may differ this much
_UNSAFE = re.compile(r"""['"\\`\x00-\x1f\x7f]""")

log = logging.getLogger("sluice.admin_comment")


@dataclass
class _Pending:
    records: dict[Key, JobRecord] = field(default_factory=dict)
    due: float | None = None  # monotonic; None: written
    last: float = 0.0
    first: float = 0.0


class Comments:
    """What is to be written, and the duty that does. Records that came to an earlier daemon are found in the store."""

    def __init__(self, store: JobRecords) -> None:
        self._store = store
        self._jobs: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._began = False
        self._said = False

    def arrived(self, record: JobRecord) -> None:
        """A record was stored."""
        now = time.monotonic()
        with self._lock:
            known = self._jobs.get(record.job)
            if known is None:
                known = self._jobs[record.job] = _Pending(first=now)
                if self._began:  # a node that was away for long
                    known.records = {key_of(one): one for one in self._store.of_job(record.job, record.started)}
            known.records[key_of(record)] = record
            known.due, known.last = now + _QUIET_S, now

    def run(self, site: Site) -> None:
        """A duty of the controllers' daemon. Raises SluiceError when accounting cannot be asked."""
        if site.config().get("AccountingStorageType", "").endswith("/none"):
            if not self._said:
                log.warning("no accounting: AdminComment is not written")
                self._said = True
            return
        if not self._began:
            now = time.time()
            for record in self._store.between(now - _GIVE_UP_S, now + _GIVE_UP_S):
                self.arrived(record)
            self._began = True
        due = self._due()
        for start in range(0, len(due), _BATCH):
            self._write(site, due[start : start + _BATCH])

    def _due(self) -> list[int]:
        now = time.monotonic()
        with self._lock:
            for job in [job for job, one in self._jobs.items() if one.due is None and now - one.last > _KEPT_S]:
                del self._jobs[job]
            return sorted(job for job, one in self._jobs.items() if one.due is not None and one.due <= now)

    def _write(self, site: Site, jobs: list[int]) -> None:
        states = _accounted(site.commands, jobs)
        for job in jobs:
            if site.stopping.is_set():
                return
            known = states.get(job)
            with self._lock:
                pending = self._jobs[job]
                records, last = list(pending.records.values()), pending.last
            if known is None or not known.ended:
                self._later(job)
                continue
            ours = _of_run(records, known.start)
            wanted = merge(known.comment, render(ours))
            if _UNSAFE.search(known.comment):
                log.warning("job %d: AdminComment has quotes, which sacctmgr would change: left as it is", job)
            elif ours and wanted != known.comment:
                site.commands.run(
                    "sacctmgr", "-i", "modify", "job", "where", f"jobid={known.name}", "set", f"AdminComment={wanted}"
                )
            with self._lock:
                if pending.last == last:
                    pending.due = None

    def _later(self, job: int) -> None:
        now = time.monotonic()
        with self._lock:
            pending = self._jobs[job]
            pending.due = None if now - pending.first > _GIVE_UP_S else now + _AGAIN_S


def _of_run(records: Iterable[JobRecord], start: float) -> list[JobRecord]:
    """Those of the run that accounting has from `start`, its job's last one."""
    runs = [(Began.of(run), run) for run in runs_of(records)]
    return nearest(runs, start, None, early=_EARLIER_S, late=math.inf) or []


@dataclass(frozen=True, slots=True)
class _Accounted:
    name: str  # "7", "7_3" of an array, "7+1" of a heterogeneous job: 7 alone means all its parts
    ended: bool
    start: float
    comment: str


def _accounted(commands: Commands, jobs: list[int]) -> dict[int, _Accounted]:
    """What accounting has of the last run of jobs. Raises SluiceError."""
    numbers = ",".join(map(str, jobs))
    fields = "JobIDRaw,JobID,State,Start,End,AdminComment"
    said = commands.output("sacct", "-n", "-P", "-X", "-a", "-j", numbers, "-o", fields)
    found = {}
    for line in said.splitlines():
        number, name, state, start, end, comment = (*line.split("|", 5), "", "", "", "", "", "")[:6]
        if not number.isdecimal():
            continue
        ended = end.isdecimal() and state.split()[:1] not in (["RUNNING"], ["PENDING"], ["SUSPENDED"], ["REQUEUED"])
        found[int(number)] = _Accounted(name, ended, float(start) if start.isdecimal() else 0.0, comment)
    return found
