"""Jobs: lists, one job, why it waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import MOST_TEXT, Endpoint, Plain, Site, words_of
from sluice.web.problems import ProblemError, not_found
from sluice.web.store import MOST_CURSOR, SORTS, Job, Query, text_of


class JobsQuery(BaseModel, extra="forbid"):
    """Which jobs; several values with commas."""

    user: str = Field("", max_length=MOST_TEXT)
    account: str = Field("", max_length=MOST_TEXT)
    partition: str = Field("", max_length=MOST_TEXT)
    state: str = Field("", max_length=MOST_TEXT, description="As Slurm writes it: PENDING,RUNNING.")
    qos: str = Field("", max_length=MOST_TEXT)
    name: str = Field("", max_length=MOST_TEXT, description="Part of the name.")
    node: str = Field("", max_length=256, description="One node.")
    sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id"
    order: Literal["ascending", "descending"] = "descending"
    limit: int = Field(100, ge=1, le=1000)
    cursor: str = Field("", max_length=MOST_CURSOR, description="`next` of the page before.")


def query_of(query: JobsQuery) -> Query:
    """What was asked, as the store takes it."""
    return Query(
        words_of(query.user), words_of(query.account), words_of(query.partition), words_of(query.state.upper()),
        words_of(query.qos), query.name, query.node, query.sort, query.order == "descending", query.limit, query.cursor,
    )  # fmt: skip


def _page(site: Site, viewer: Viewer, query: JobsQuery) -> tuple[list[Job], dict[str, Any]]:
    """The jobs, and the rest of the answer."""
    page = site.store.jobs.page(query_of(query), viewer.seen_jobs())
    return page.jobs, {**site.viewed("jobs"), "total": page.total, "next": page.next}


def _jobs(site: Site, viewer: Viewer, query: JobsQuery, path: Mapping[str, str]) -> dict[str, Any]:
    jobs, rest = _page(site, viewer, query)
    return {**rest, "jobs": [job.document() for job in jobs]}


def _jobs_text(site: Site, viewer: Viewer, query: JobsQuery, path: Mapping[str, str]) -> Plain:
    jobs, rest = _page(site, viewer, query)
    head = json.dumps(rest, separators=(",", ":")).removesuffix("}")
    return Plain(f'{head},"jobs":[{",".join(map(text_of, jobs))}]}}', "application/json")


def job_number(text: str) -> int:
    """The number of a job in a path. Raises ProblemError."""
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise ProblemError(400, f"job {text[:40]!r}: not a job's number", remedy="write it as 17")
    return int(text)


def _job(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    number = job_number(path["job"])
    job = site.store.jobs.by_id.get(number)
    if job is None or not viewer.sees_job(job):
        raise not_found(f"job {number}")
    names = models.JobGpu.model_fields
    mine = (row for row in site.store.rows("gpus").values() if number in row["jobs"] and viewer.gpu(row) is not None)
    gpus = [{name: row[name] for name in names} for row in mine]
    return {**site.viewed("jobs", "nodes"), "job": job.document(), "gpus": gpus}


def _series(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    number = job_number(path["job"])
    job = site.store.jobs.by_id.get(number)
    if job is None or not viewer.sees_job(job):
        raise not_found(f"job {number}")
    rows = {key: row for key, row in site.store.rows("gpus").items() if number in row["jobs"] and viewer.gpu(row)}
    times, found = site.store.series.since(job.start_time or 0, rows)
    gpus = [
        {"node": rows[key]["node"], "index": rows[key]["index"], "utilisation_percent": one, "memory_used_mib": other}
        for key, (one, other) in found.items()
    ]
    return {**site.viewed("nodes"), "times": [round(time, 1) for time in times], "gpus": gpus}


async def _explanation(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    number = job_number(path["job"])
    job = site.store.jobs.by_id.get(number)
    if job is None or not viewer.sees_job(job):
        raise not_found(f"job {number}")
    document = (await site.feed.ask("explain", job=str(number)))["explanation"]
    if document is None or document.get("account", job.account) != job.account:
        document = {"schema_version": 1, "job": str(number)}
    names = ("name", "user", "account", "partition", "state", "reason", "priority", "submit_time", "eligible_time",
             "start_time", "end_time", "time_limit_s", "nodes", "refused")  # fmt: skip
    document["slurm"] = {"job_id": number, **{name: getattr(job, name) for name in names}}
    viewer.withhold_from(document)
    return dict(document)


ENDPOINTS = (
    Endpoint("/jobs", _jobs, models.JobList, "Jobs", JobsQuery, text=_jobs_text),
    Endpoint("/jobs/{job}", _job, models.JobPage, "One job"),
    Endpoint("/jobs/{job}/series", _series, models.JobSeries, "The use of a running job's GPUs over time"),
    Endpoint("/jobs/{job}/explanation", _explanation, models.Explanation, "Why a job waits, or has its place"),
)

assert set(SORTS) == set(JobsQuery.model_fields["sort"].annotation.__args__)  # type: ignore[union-attr]  # noqa: S101
