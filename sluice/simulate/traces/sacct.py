"""What Slurm's accounting says about a site's own jobs.

    sacct --allusers --duplicates --parsable2 --starttime 2026-10-01 --endtime 2026-11-01 \\
        --format JobIDRaw,Account,User,QOS,Submit,Start,End,ElapsedRaw,State,Timelimit,NNodes,ReqTRES,AllocTRES

Columns may be in any order, and there may be more. Needed are JobIDRaw (or JobID), Submit, Start, State, and
AllocTRES or ReqTRES; and ElapsedRaw or Elapsed or End. What is done with rows that are not simply one finished run:

    steps                 left out: the job's own row counts
    pending, or cancelled before the start
                          left out: how long it would have run is not known
    running               counts with the time that it ran so far
    requeued              the last run counts, submitted when the first was
    array tasks           a job each; tasks that have not started are left out
    heterogeneous jobs    each component is a job of its own
    names with "|" or line breaks
                          put together again, if JobName is the only such column; better leave it out
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.sizes import parse_mib
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob
from sluice.simulate.traces.rows import MAX_SECONDS, Row

_UNKNOWN = {"", "Unknown", "None", "N/A", "INVALID"}
_NO_LIMIT = {"", "UNLIMITED", "Partition_Limit", "INVALID"}
_FREE_TEXT = "JobName"
_MAX_LINES = 16  # that one row may be spread over by line breaks in a name


def read_sacct(path: Path, text: str) -> Trace:
    """Jobs of ``sacct --parsable2``, see above. A shard counts as one MiB of GPU memory."""
    trace = Trace("sacct", [], share_unit="mib")
    last: dict[str, TraceJob] = {}
    for row in _rows(path, text):
        job = _job(row, trace)
        if job is None:
            continue
        earlier = last.get(job.name)
        if earlier is not None:
            trace.left_out["earlier runs of requeued jobs"] += 1
            job.submit = min(job.submit, earlier.submit)
        last[job.name] = job
    trace.jobs = list(last.values())
    return trace


def _rows(path: Path, text: str) -> Iterator[Row]:
    lines = text.lstrip("\ufeff").split("\n")
    header = lines[0].rstrip("\r").split("|")
    for wanted in (
        ("JobIDRaw", "JobID"),
        ("Submit",),
        ("Start",),
        ("State",),
        ("AllocTRES", "ReqTRES"),
        ("ElapsedRaw", "Elapsed", "End"),
    ):
        if not set(wanted) & set(header):
            raise UsageError(f"{path}:1: column {' or '.join(wanted)} is missing", remedy="add it to sacct --format")
    free = header.index(_FREE_TEXT) if _FREE_TEXT in header else None
    at = 1
    while at < len(lines):
        begin, line = at, lines[at].rstrip("\r")
        at += 1
        if not line:
            continue
        while line.count("|") < len(header) - 1 and free is not None and at - begin < min(_MAX_LINES, len(lines)):
            if at == len(lines):
                break
            line += " " + lines[at].rstrip("\r")
            at += 1
        values = line.split("|")
        extra = len(values) - len(header)
        if extra > 0 and free is not None:
            values[free : free + extra + 1] = ["|".join(values[free : free + extra + 1])]
        if len(values) != len(header):
            raise UsageError(
                f"{path}:{begin + 1}: {len(values)} fields {line[:40]!r}: the header has {len(header)}",
                remedy="leave columns with free text, such as Comment, out of sacct --format",
            )
        yield Row(path, begin + 1, dict(zip(header, values, strict=True)))


def _job(row: Row, trace: Trace) -> TraceJob | None:
    name = row.text("JobIDRaw") or row.text("JobID")
    if "." in name:
        return None  # a step
    state = row.text("State").partition(" ")[0]
    start = _time(row, "Start")
    if state in {"PENDING", "REVOKED"} or start is None:
        trace.left_out["never started"] += 1
        return None
    run = _elapsed(row, start)
    if run is None:
        trace.left_out["running, without a time so far"] += 1
        return None
    if state == "RUNNING":
        trace.left_out["(counted with the time so far) running"] += 1
    submit = _time(row, "Submit")
    if submit is None:
        raise row.wrong("Submit", row.text("Submit"), "a time")
    gpus, shards, model, tres = _gpus(row)
    return TraceJob(
        name=name,
        submit=submit,
        run=run,
        gpus=1 if shards else gpus,
        nodes=max(1, _amount(row, "node", tres)),
        share=shards,
        cpus_milli=1000 * _amount(row, "cpu", tres),
        memory_mib=_memory(row, tres),
        models=model,
        estimate=_limit(row),
        tenant=row.text("Account"),
        user=row.text("User"),
        kind=row.text(_FREE_TEXT),
    )


def _tres(row: Row) -> dict[str, str]:
    """AllocTRES, or what was asked where nothing is recorded, e.g. ``billing=8,cpu=8,gres/gpu:a100=2,mem=64G``."""
    text = row.text("AllocTRES") or row.text("ReqTRES")
    amounts = {}
    for word in filter(None, text.split(",")):
        name, equals, amount = word.partition("=")
        if not equals:
            raise row.wrong("TRES", word, "written as name=amount")
        amounts[name] = amount
    return amounts


def _amount(row: Row, name: str, tres: dict[str, str]) -> int:
    if name == "node" and name not in tres:
        nodes = row.text("NNodes") or row.text("AllocNodes")
        return Row(row.path, row.line, {"NNodes": nodes}).integer("NNodes") if nodes else 1
    return Row(row.path, row.line, {name: tres.get(name, "0")}).integer(name)


def _gpus(row: Row) -> tuple[int, int, tuple[str, ...], dict[str, str]]:
    """Whole GPUs, shards, the GPU model that was asked, and all amounts."""
    tres = _tres(row)
    typed = {name.partition(":")[2]: name for name in tres if name.startswith("gres/gpu:")}
    asked = row.text("ReqTRES")  # what was allocated has a type even where any would have done
    models = re.findall(r"gres/gpu:([^=,]+)=", asked) if asked else typed
    gpus = _amount(row, "gres/gpu", tres) or sum(_amount(row, name, tres) for name in typed.values())
    shards = _amount(row, "gres/shard", tres)
    if gpus and shards:
        raise row.wrong("TRES", row.text("AllocTRES"), "GPUs or shards, not both")
    return gpus, shards, tuple(models) if gpus else (), tres


def _memory(row: Row, tres: dict[str, str]) -> int:
    text = tres.get("mem", "0")
    try:
        return parse_mib(text)
    except SluiceError:
        raise row.wrong("mem", text, "a size, e.g. 64G") from None


def _time(row: Row, name: str) -> int | None:
    """Local time as written, e.g. 2026-10-01T12:00:00, or seconds (SLURM_TIME_FORMAT=%s); None where not known."""
    text = row.text(name)
    if text in _UNKNOWN:
        return None
    if text.isdecimal():
        return row.ticks(name)
    try:
        moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise row.wrong(name, text, "a time, e.g. 2026-10-01T12:00:00") from None
    seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    if seconds < 0:
        raise row.wrong(name, text, "after 1970")
    return int(seconds) * MICROSECOND


def _duration(row: Row, name: str) -> int:
    """``[days-]hours:minutes:seconds``, as sacct prints it (sacct's own Timelimit may lack the hours)."""
    match = re.fullmatch(r"(?:(\d{1,7})-)?(?:(\d{1,7}):)?(\d{1,7}):(\d{1,7})(?:\.\d+)?", row.text(name), re.ASCII)
    if not match:
        raise row.wrong(name, row.text(name), "written as [days-]hours:minutes:seconds")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > MAX_SECONDS:
        raise row.wrong(name, row.text(name), f"at most {MAX_SECONDS} s")
    return total * MICROSECOND


def _elapsed(row: Row, start: int) -> int | None:
    if row.text("ElapsedRaw") not in _UNKNOWN:
        return row.ticks("ElapsedRaw")
    if row.text("Elapsed") not in _UNKNOWN:
        return _duration(row, "Elapsed")
    end = _time(row, "End")
    if end is not None and end < start:
        raise row.wrong("End", row.text("End"), "after Start")
    return None if end is None else end - start


def _limit(row: Row) -> int:
    return 0 if row.text("Timelimit") in _NO_LIMIT else _duration(row, "Timelimit")
