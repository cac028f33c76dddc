"""Submissions, and GPUs granted to and returned by jobs, from Slurm's accounting into the audit log; refusals from
slurmctld's.

A batch ends with a record `collect` that says up to when; it is written together with the batch, so that each event is
recorded once, whenever a collection was killed. Refusals are in no accounting: job_submit/sluice writes each into
slurmctld's log, one line without control characters, so that no submitter can make one up.
"""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from policy.audit import AuditLog, Entry
from sluice_base.errors import SluiceError
from slurm_client import SlurmClient
from slurm_client.model import AccountingJob

_DAY_S = 86400
_REFUSED = re.compile(
    r"(?:\[(?P<stamp>[^\]]*)\]|slurmctld:) (?:info: )?job_submit/sluice: refused "
    r"(?P<what>job|change of a job) of user (?P<uid>\d+), account (?P<account>\S+): (?P<why>.*)"
)


def collect(
    log: AuditLog, client: SlurmClient, *, user: str, delay_s: float = 60, now: float | None = None,
    slurmctld_logs: Sequence[Path] = (),
) -> int:  # fmt: skip
    """Record what happened since the last collection (at first: within a day); how many events that were.

    `delay_s`: events younger than that are left to the next one, as slurmdbd may not have them yet. `slurmctld_logs`:
    where refusals are read from. Raises SluiceError, recording nothing, when something cannot be read.
    """
    log.refuse_unwritable()
    until = int((time.time() if now is None else now) - delay_s)
    since = last_collected(log, until - _DAY_S)
    if until <= since:
        return 0
    jobs = client.accounting_jobs(start=since, end=until + 1)
    happened = [entry for job in jobs for entry in events(job)]
    happened += [entry for path in slurmctld_logs for entry in refusals(path)]
    found = sorted((entry for entry in happened if since < entry.time <= until), key=lambda entry: entry.time)
    marker = Entry(time=until, user=user, action="collect", subject="slurmdbd", detail={"events": len(found)})
    log.add([*found, marker])
    return len(found)


def last_collected(log: AuditLog, default: int) -> int:
    """Up to when events are in the log."""
    for path in reversed(log.files()):
        found = default
        for record in log.records_of(path):
            if record.action == "collect":
                found = max(found, int(record.time))
        if found > default:
            return found
    return default


def events(job: AccountingJob) -> Iterator[Entry]:
    """What a job did: submitted; GPUs granted and returned, where it had any."""
    about: dict[str, Any] = {"account": job.account, "qos": job.qos}
    gpus = job.tres_allocated.get("gres/gpu", 0)
    shards = job.tres_allocated.get("gres/shard", 0)
    held = about | {"gpus": gpus, "gpu_memory_mib": shards, "nodes": job.nodes[:512]}
    if job.submit_time is not None:
        asked = {
            name: count for name, count in job.tres_requested.items() if name.startswith(("gres/gpu", "gres/shard"))
        }
        yield Entry(time=job.submit_time, user=job.user, action="submit", subject=job.label, detail=about | asked)
    if (gpus or shards) and job.start_time is not None:
        yield Entry(time=job.start_time, user=job.user, action="grant", subject=job.label, detail=held)
        if job.end_time is not None:
            detail = held | {"state": job.state}
            yield Entry(time=job.end_time, user=job.user, action="return", subject=job.label, detail=detail)


def refusals(path: Path) -> Iterator[Entry]:
    """Jobs, and changes of jobs, that job_submit/sluice refused, from a slurmctld.log. Raises SluiceError."""
    try:
        with path.open(errors="replace") as file:
            for number, line in enumerate(file, 1):
                if match := _REFUSED.match(line.rstrip("\n")):
                    yield _refusal(match, f"{path}:{number}")
    except OSError as error:
        raise SluiceError(
            f"{path}: {error.strerror}", remedy="name slurmctld's log, as a user who may read it"
        ) from error


def _refusal(match: re.Match[str], place: str) -> Entry:
    stamp = match["stamp"] or ""
    try:
        when = datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise SluiceError(
            f"{place}: {stamp!r} is no ISO time",
            remedy="name the file of SlurmctldLogFile, with LogTimeFormat=iso8601_ms (the default) in slurm.conf",
        ) from None
    try:
        user = pwd.getpwuid(int(match["uid"])).pw_name
    except (KeyError, OverflowError):
        user = match["uid"]
    detail = {"account": match["account"], "what": match["what"], "why": match["why"][:1000]}
    return Entry(time=when, user=user[:128], action="refuse", subject=match["account"][:256], detail=detail)
