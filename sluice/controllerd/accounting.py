"""A job's record in short, in the AdminComment of Slurm's accounting, where users of sacct find it.

``sluice:v=1,rung=limiter,gpus=2,asked=10240,peak=9216,refused=1,ended=0``: words without quotes, as sacctmgr changes
quotes. What else stands in the field is kept. Written by the controllers' daemon alone, as the field is one for a job
of many nodes, and once slurmctld has told slurmdbd of the job's end, as it would write its own again.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from prolog_epilog.record import JobRecord
from slurm_client import Commands
from usage.controllerd import Site
from usage.job_records import JobRecords, Key, key_of
from usage.job_runs import Began, nearest, runs_of

_MIB = 1 << 20
_QUIET_S = 1.0  # after a record came, its job's others may be on their way
_KEPT_S = 600.0  # how long a job's records are at hand for one that comes late
_AGAIN_S = 15.0  # when slurmdbd does not know yet that the job ended
_GIVE_UP_S = 86400.0
_BATCH = 100
_EARLIER_S = 60.0  # clocks of nodes and controller may differ so much
_OURS = re.compile(r"(?:^|\s)sluice:([A-Za-z0-9_=,.+-]*)")
_UNSAFE = re.compile(r"""['"\\`\x00-\x1f\x7f]""")

log = logging.getLogger("sluice.admin_comment")


def render(records: Iterable[JobRecord]) -> str:
    """The words for one run of a job, of its records on all nodes. Memory is in MiB of one GPU, the largest of all."""
    records = list(records)
    grants = [grant for record in records for grant in record.grants]
    events = [event.action for record in records for event in record.events]
    asked = [grant.asked for grant in grants if grant.asked is not None]
    limits = [grant.limit for grant in grants if grant.limit is not None]
    facts: dict[str, object] = {
        "v": 1,
        "rung": "+".join(sorted({grant.rung for grant in grants})) or "none",
        "gpus": len({(record.node, grant.uuid) for record in records for grant in record.grants}),
        "asked": max(asked) // _MIB if asked else None,
        "limit": max(limits) // _MIB if limits else None,
        "peak": max((-(-grant.peak // _MIB) for grant in grants), default=0),
        "refused": sum(grant.refused for grant in grants),
        "ended": events.count("end"),
        "unclean": sum(grant.clean is False for grant in grants) or None,
        **_measured(records),
    }
    return "sluice:" + ",".join(f"{name}={value}" for name, value in facts.items() if value is not None)


_MEASURED = ("gs", "us", "is", "ej", "ts")


def _measured(records: list[JobRecord]) -> dict[str, object]:
    """GPU-seconds measured, used and idle, joules, and throttled seconds: sums over nodes of what they know."""
    found: dict[str, object] = {}
    for name in _MEASURED:
        values = [record.usage[name] for record in records if record.usage and _is_number(record.usage.get(name))]
        if values:
            found[name] = round(sum(values))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e15


def parse(comment: str) -> dict[str, str] | None:
    """Our words in an AdminComment; None where there are none."""
    match = _OURS.search(comment)
    if match is None:
        return None
    return dict(word.split("=", 1) for word in match[1].split(",") if "=" in word)


def merge(comment: str, ours: str) -> str:
    """The field with our words in place of earlier ones of ours, and all else as it was."""
    others = _OURS.sub("", comment).strip()
    return f"{others} {ours}" if others else ours


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
    name: str  # "7", "7_3" of an array, "7+1" of a heterogeneous job: by its number alone the first stands for all
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
