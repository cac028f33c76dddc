"""The published traces that are CSV files."""

from __future__ import annotations

from pathlib import Path

from sluice.simulate.traces import MICROSECOND, Trace, TraceJob
from sluice.simulate.traces.rows import MAX_SECONDS, Row, csv_rows


def read_openb(path: Path, text: str) -> Trace:
    """Pods of Alibaba's cluster-trace-gpu-v2023; a pod without a scheduled or deletion time never ran.

    The column gpu_spec may be missing: any model will do.
    """
    columns = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    trace = Trace("openb", [])
    for row in csv_rows(path, text, (*columns, "creation_time", "deletion_time", "scheduled_time")):
        if not row.text("scheduled_time") or not row.text("deletion_time"):
            trace.left_out["never ran"] += 1
            continue
        submit, start = row.ticks("creation_time"), row.ticks("scheduled_time")
        gpus, milli = row.integer("num_gpu", high=16), row.integer("gpu_milli", high=1000)
        trace.jobs.append(
            TraceJob(
                name=row.text("name"),
                submit=submit,
                run=max(0, row.ticks("deletion_time") - max(submit, start)),
                gpus=gpus,
                nodes=1,
                share=milli if gpus == 1 and milli < 1000 else 0,
                cpus_milli=row.integer("cpu_milli", high=10**9),
                memory_mib=row.integer("memory_mib", high=2**30),
                models=tuple(filter(None, row.text("gpu_spec").split("|"))),
                tenant=row.fields.get("qos") or "",
            )
        )
    return trace


def read_muri(path: Path, text: str) -> Trace:
    """Muri's traces: the service time is iterations * iteration_time * 1.015, the latter in ms (the simulator's own
    factor for running alone), submission is in ms.
    """
    trace = Trace("muri", [])
    for row in csv_rows(path, text, ("job_id", "num_gpu", "submit_time", "iterations", "iteration_time", "model_name")):
        service = row.integer("iterations", high=10**12) * row.integer("iteration_time", high=10**9) * 1015
        if service > MAX_SECONDS * MICROSECOND:
            raise row.wrong("iterations", row.text("iterations"), "so few that the job ends")
        trace.jobs.append(
            TraceJob(
                name=row.text("job_id"),
                submit=row.integer("submit_time", high=MAX_SECONDS * 1000) * 1000,
                run=service,
                gpus=row.integer("num_gpu", low=1),
                kind=row.text("model_name"),
            )
        )
    return trace


def read_philly(path: Path, text: str) -> Trace:
    """Philly's jobs with the deadlines of Chronus: `expect_time_list` is the time that the job may take, in seconds
    from its submission; `best_effort` jobs have no deadline. The user column names the virtual cluster, a tenant.
    """
    trace = Trace("philly", [])
    for row in csv_rows(
        path, text, ("job_id", "user", "num_gpu", "submit_time", "duration", "expect_time_list", "best_effort")
    ):
        submit, best_effort = row.ticks("submit_time"), row.integer("best_effort", high=1) == 1
        trace.jobs.append(
            TraceJob(
                name=row.text("job_id"),
                submit=submit,
                run=row.ticks("duration"),
                gpus=row.integer("num_gpu", low=0),
                deadline=0 if best_effort else submit + _least_time(row),
                best_effort=best_effort,
                tenant=row.text("user"),
                user=row.text("user"),
                kind=row.text("model_name"),
            )
        )
    return trace


def _least_time(row: Row) -> int:
    """The first of a list of times, which is the one that counts in full."""
    first = row.text("expect_time_list").split("-")[0]
    return Row(row.path, row.line, {"expect_time_list": first}).ticks("expect_time_list")
