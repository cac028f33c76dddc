"""Standard Workload Format (https://www.cs.huji.ac.il/labs/parallel/workload/swf.html)."""

from __future__ import annotations

from pathlib import Path

from sluice.base.errors import UsageError
from sluice.simulate.traces import Trace, TraceJob
from sluice.simulate.traces.rows import Row

# The eighteen fields, in order.
_FIELDS = (
    "job", "submit", "wait", "run", "allocated", "cpu_used", "memory_used", "processors", "estimate",
    "memory", "status", "user", "group", "program", "queue", "partition", "preceding", "think",
)  # fmt: skip
_KIB_PER_MIB = 1024


def read_swf(path: Path, text: str) -> Trace:
    """A processor counts as one GPU; -1 means unknown. Jobs that never ran are left out.

    Fields that are used: submit (2), run (4), allocated or requested processors (5, 8), requested time (9) and memory
    in KiB for each processor (10), user (12), group (13, the tenant) and program (14).
    """
    trace = Trace("swf", [])
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith(";"):
            continue
        if len(words) != len(_FIELDS):
            raise UsageError(
                f"{path}:{number}: {len(words)} fields {line[:40]!r}: must be {len(_FIELDS)}",
                remedy="check --format, or correct the line",
            )
        row = Row(path, number, dict(zip(_FIELDS, words, strict=True)))
        run, processors = row.number("run", low=-1), row.integer("processors", low=-1)
        if processors < 1:
            processors = row.integer("allocated", low=-1)
        if run < 0 or processors < 1:
            trace.left_out["never ran"] += 1
            continue
        estimate, memory = row.number("estimate", low=-1), row.number("memory", low=-1)
        trace.jobs.append(
            TraceJob(
                name=row.text("job"),
                submit=row.ticks("submit"),
                run=row.ticks("run"),
                gpus=processors,
                memory_mib=int(max(memory, 0) * processors / _KIB_PER_MIB),
                estimate=row.ticks("estimate") if estimate > 0 else 0,
                tenant=_known(row.text("group")),
                user=_known(row.text("user")),
                kind=_known(row.text("program")),
            )
        )
    return trace


def _known(text: str) -> str:
    return "" if text == "-1" else text
