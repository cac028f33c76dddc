"""Job traces: what was submitted when, asked for what, and ran how long.

`read_trace` reads five formats, distinguished by their first line unless one is named:

    openb    Alibaba cluster-trace-gpu-v2023, pod list (CSV)
    muri     Muri (SIGCOMM 2022) trace (CSV)
    philly   Philly jobs with deadlines and best-effort flags, as published with Chronus (CSV)
    swf      Standard Workload Format, version 2
    sacct    ``sacct --parsable2`` output of a real site

Any error in a file is a UsageError that names the file, the line and the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sluice.base.errors import UsageError

MICROSECOND = 1_000_000  # ticks of a second: times are whole microseconds, so that every format is exact


@dataclass(slots=True)
class TraceJob:
    """One job. Times in microseconds since the trace's own beginning; sizes are for the whole job."""

    name: str
    submit: int
    run: int
    gpus: int = 0  # whole GPUs
    nodes: int = 0  # 0: as many as it takes
    share: int = 0  # of one GPU, in the trace's `share_unit`; then gpus is 1
    cpus_milli: int = 0
    memory_mib: int = 0
    models: tuple[str, ...] = ()  # accepted GPU models; none: all
    estimate: int = 0  # what the user said; 0: nothing
    deadline: int = 0  # by when it should end; 0: none
    best_effort: bool = False
    tenant: str = ""
    user: str = ""
    kind: str = ""  # program or model, where the trace has it


@dataclass
class Trace:
    """Jobs in order of submission, and how many rows were left out for which reason."""

    format: str
    jobs: list[TraceJob]
    share_unit: str = "milli"  # thousandths of a GPU, or "mib"
    left_out: Counter[str] = field(default_factory=Counter)


def read_trace(path: Path, format_name: str = "auto") -> Trace:
    """Read a file; `format_name` is one of `FORMATS`, or auto."""
    from sluice.simulate.traces import csv_formats, sacct, swf

    readers: dict[str, Callable[[Path, str], Trace]] = {
        "openb": csv_formats.read_openb,
        "muri": csv_formats.read_muri,
        "philly": csv_formats.read_philly,
        "swf": swf.read_swf,
        "sacct": sacct.read_sacct,
    }
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"trace {path}: {error.strerror}", remedy="name a file that can be read") from error
    name = detect(text) if format_name == "auto" else format_name
    if name not in readers:
        raise UsageError(
            f"trace {path}: its first line {text.partition(chr(10))[0][:60]!r} is not of a known format",
            remedy=f"name it with --format: {', '.join(FORMATS)}",
        )
    trace = readers[name](path, text)
    if not trace.jobs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in trace.left_out.items())
        raise UsageError(
            f"trace {path}: no job to replay{f' ({reasons})' if reasons else ''}",
            remedy="check --format, and that its jobs ended and have GPUs",
        )
    first = min(job.submit for job in trace.jobs)
    for job in trace.jobs:
        job.submit -= first
        if job.deadline:
            job.deadline -= first
    trace.jobs.sort(key=lambda job: job.submit)
    return trace


FORMATS = ("openb", "muri", "philly", "swf", "sacct")


def detect(text: str) -> str:
    """The format that the first lines look like; empty if none."""
    first = text.lstrip("\ufeff").partition("\n")[0].strip()
    columns = first.split(",")
    if "gpu_milli" in columns and "creation_time" in columns:
        return "openb"
    if "expect_time_list" in columns:
        return "philly"
    if "iteration_time" in columns:
        return "muri"
    if "|" in first and {"Submit", "State"} <= set(first.split("|")):
        return "sacct"
    meat = next((line for line in text.splitlines() if line.strip() and not line.startswith(";")), "")
    return "swf" if first.startswith(";") or len(meat.split()) == 18 else ""
