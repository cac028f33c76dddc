"""Submissions, and GPUs granted to and returned by jobs, from Slurm's accounting into the audit log; refusals from
slurmctld's.

A batch ends with an entry `collect` that says up to when; it is written in one step with the batch, so that each event
is recorded once, even if a collection is killed. Accounting has no refusals: job_submit/sluice writes each into
slurmctld's log, one line without control characters. Slurm's own messages repeat users' words with their line breaks,
so that a user can add such lines: what is read from the log is no proof, and never prevents the rest from being
recorded.
"""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from policy.audit import AuditEvent, AuditLog
from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.slurm import SlurmClient
from sluice.slurm.answers import AccountingJob

_DAY_S = 86400
_DATED = re.compile(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[^\]]*\] ")
_REFUSED = re.compile(
    r"(?:\[(?P<stamp>[^\]]*)\]|slurmctld:) (?:info: )?job_submit/sluice: refused "
    r"(?P<what>job|change of a job) of user (?P<uid>\d+), account (?P<account>\S+): (?P<why>.*)"
)


def collect(
    log: AuditLog,
    client: SlurmClient,
    *,
    user: str,
    delay_s: float = 60,
    now: float | None = None,
    slurmctld_logs: Sequence[Path] = (),
) -> int:
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
    happened = [event for job in jobs for event in events(job)]
    happened += [event for path in slurmctld_logs for event in refusals(path)]
    found = sorted((event for event in happened if since < event.time <= until), key=lambda event: event.time)
    marker = AuditEvent(time=until, user=user, action="collect", subject="slurmdbd", detail={"events": len(found)})
    log.add([*found, marker])
    return len(found)


def last_collected(log: AuditLog, default: int) -> int:
    """Up to when events are in the log."""
    for path in reversed(log.files()):
        found = default
        for entry in log.entries_of(path):
            if entry.action == "collect":
                found = max(found, int(entry.time))
        if found > default:
            return found
    return default


def events(job: AccountingJob) -> Iterator[AuditEvent]:
    """What a job did: submitted; GPUs granted and returned, where it had any."""
    about: dict[str, Any] = {"account": job.account, "qos": job.qos}
    gpus = job.tres_allocated.get("gres/gpu", 0)
    shards = job.tres_allocated.get("gres/shard", 0)
    held = about | {"gpus": gpus, "gpu_memory_mib": shards, "nodes": job.nodes[:512]}
    if job.submit_time is not None:
        asked = {
            name: count for name, count in job.tres_requested.items() if name.startswith(("gres/gpu", "gres/shard"))
        }
        yield AuditEvent(time=job.submit_time, user=job.user, action="submit", subject=job.label, detail=about | asked)
    if (gpus or shards) and job.start_time is not None:
        yield AuditEvent(time=job.start_time, user=job.user, action="grant", subject=job.label, detail=held)
        if job.end_time is not None:
            detail = held | {"state": job.state}
            yield AuditEvent(time=job.end_time, user=job.user, action="return", subject=job.label, detail=detail)


def refusals(path: Path) -> Iterator[AuditEvent]:
    """Jobs, and changes of jobs, that job_submit/sluice refused, from a slurmctld.log. Raises SluiceError."""
    dated, undated = False, ""
    try:
        with path.open(errors="replace") as file:
            for number, line in enumerate(file, 1):
                dated = dated or _DATED.match(line) is not None
                if match := _REFUSED.match(line.rstrip("\n")):
                    if (when := _time(match["stamp"] or "")) is None:
                        undated = undated or f"{path}:{number}: {one_line(match['stamp'] or '')!r}"
                    else:
                        yield _refusal(match, when)
    except OSError as error:
        raise SluiceError(
            f"{path}: {error.strerror}", remedy="name slurmctld's log, as a user who may read it"
        ) from error
    if undated and not dated:
        raise SluiceError(
            f"{undated} is not an ISO time",
            remedy="name the file of SlurmctldLogFile, with LogTimeFormat=iso8601_ms (the default) in slurm.conf",
        )


def _time(stamp: str) -> float | None:
    try:
        when = datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        return None
    return when if when >= 0 else None


def _refusal(match: re.Match[str], when: float) -> AuditEvent:
    try:
        user = pwd.getpwuid(int(match["uid"])).pw_name
    except (KeyError, OverflowError, ValueError):
        user = match["uid"]
    detail = {"account": match["account"], "what": match["what"], "why": match["why"][:1000]}
    return AuditEvent(time=when, user=user[:128], action="refuse", subject=match["account"][:256], detail=detail)
