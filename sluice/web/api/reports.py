"""What was used, by whom, and how well: reports of days, and of single jobs. The controllers' daemon makes them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from sluice.client import models
from sluice.report.fields import DEFAULTS, EACH_GPU, GROUPED_BY, fields_of
from sluice.report.output import Units, csv_lines
from sluice.report.services import GROUPS as SERVICE_GROUPS
from sluice.report.services import USUAL as SERVICES_BY
from sluice.web.access import Viewer
from sluice.web.endpoint import MOST_TEXT, Endpoint, Plain, Site, words_of
from sluice.web.problems import ProblemError, not_found

_PATIENCE_S = 8.0
_FIRST_S, _LONGEST_S = 0.05, 0.5  # until it is asked again
_MOST, _MOST_OF_EACH = timedelta(days=399), timedelta(days=30)  # from the first day to the last
_FIRST, _LAST = date(2000, 1, 1), date(2199, 12, 31)
_BY = "(account|user|partition|qos|state|gpu_type)"
_BY_REQUEST = "(service|account|user|day)"
_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,10})?")


def _written_as_a_day(text: object) -> object:
    """pydantic takes a number for seconds since 1970."""
    if isinstance(text, str) and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        raise ValueError("write it as 2026-01-31")
    return text


Day = Annotated[date, BeforeValidator(_written_as_a_day)]


class DaysQuery(BaseModel, extra="forbid"):
    """Which days."""

    since: Day | None = Field(None, description="The first day, of the controller's time; else that of the month.")
    until: Day | None = Field(None, description="The last day, which is included; else today, or 400 days.")
    limit: int = Field(1000, ge=1, le=2000, description="Lines.")
    format: Literal["json", "csv"] = "json"


class ReportQuery(DaysQuery, extra="forbid"):
    """Which days and jobs; several values with commas."""

    account: str = Field("", max_length=MOST_TEXT, description="In `tenants` and `fairness` with those below.")
    user: str = Field("", max_length=MOST_TEXT)
    partition: str = Field("", max_length=MOST_TEXT)
    gpu_type: str = Field("", max_length=MOST_TEXT)
    by: str = Field("", max_length=256, pattern=f"^({_BY}(,{_BY})*)?$", description="What lines are for.")


class JobsReportQuery(DaysQuery, extra="forbid"):
    """Which days and jobs; several values with commas. More than a day of a user or an account alone."""

    since: Day | None = Field(None, description="The first day, of the controller's time; else the last, or today.")
    until: Day | None = Field(None, description="The last day, which is included, at most the 31st; else the first.")
    account: str = Field("", max_length=MOST_TEXT)
    user: str = Field("", max_length=MOST_TEXT)
    partition: str = Field("", max_length=MOST_TEXT)


class ServicesQuery(DaysQuery, extra="forbid"):
    """Which days and requests; several values with commas."""

    service: str = Field("", max_length=MOST_TEXT)
    account: str = Field("", max_length=MOST_TEXT, description="Of the callers.")
    user: str = Field("", max_length=MOST_TEXT)
    by: str = Field("", max_length=256, pattern=f"^({_BY_REQUEST}(,{_BY_REQUEST})*)?$", description="Lines for each.")


class EachGpuQuery(DaysQuery, extra="forbid"):
    """Which days, 31 at most, and whose jobs; several values with commas."""

    until: Day | None = Field(None, description="The last day, which is included; else today, or the 31st.")
    account: str = Field("", max_length=MOST_TEXT, description="Only GPUs that jobs of these had.")
    user: str = Field("", max_length=MOST_TEXT)
    partition: str = Field("", max_length=MOST_TEXT)
    gpu_type: str = Field("", max_length=MOST_TEXT)


async def made(site: Site, viewer: Viewer, do: str, **words: Any) -> Any:
    """What the daemon makes, which may take it a while. Raises ProblemError 503 with Retry-After, SluiceError."""
    until, pause = time.monotonic() + _PATIENCE_S, _FIRST_S
    while time.monotonic() < until:
        found = await site.feed.ask(do, who=viewer.user, **words)
        if "document" in found:
            return found["document"]
        if "busy" in found:
            raise ProblemError(503, str(found["busy"]), remedy="try again soon", headers={"retry-after": "2"})
        await asyncio.sleep(pause)
        pause = min(_LONGEST_S, 2 * pause)
    raise ProblemError(503, "it is still being made", remedy="ask again", headers={"retry-after": "5"})


async def _report(site: Site, viewer: Viewer, query: ReportQuery, path: Mapping[str, str]) -> Any:
    kind = path["report"]
    if kind not in GROUPED_BY:
        raise not_found(f"report {kind[:40]!r}")
    by = sorted(words_of(query.by))
    words = {
        "accounts": sorted(words_of(query.account)),
        "users": sorted(words_of(query.user)),
        "partitions": sorted(words_of(query.partition)),
        "gpu_types": sorted(words_of(query.gpu_type)),
        "by": by,
        "seen": viewer.seen_use(by or GROUPED_BY[kind]),
    }
    return await _of_days(site, viewer, query, kind, **words)


async def _services(site: Site, viewer: Viewer, query: ServicesQuery, path: Mapping[str, str]) -> Any:
    by = [name for name in SERVICE_GROUPS if name in words_of(query.by)]
    words = {
        "services": sorted(words_of(query.service)),
        "accounts": sorted(words_of(query.account)),
        "users": sorted(words_of(query.user)),
        "by": by,
        "seen": viewer.seen_use(by or SERVICES_BY),
    }
    return await _of_days(site, viewer, query, "services", **words)


async def _nodes(site: Site, viewer: Viewer, query: DaysQuery, path: Mapping[str, str]) -> Any:
    return await _of_days(site, viewer, query, "nodes", seen=viewer.seen_use(()))


async def _each_gpu(site: Site, viewer: Viewer, query: EachGpuQuery, path: Mapping[str, str]) -> Any:
    words = {
        "accounts": sorted(words_of(query.account)),
        "users": sorted(words_of(query.user)),
        "partitions": sorted(words_of(query.partition)),
        "gpu_types": sorted(words_of(query.gpu_type)),
        "seen": viewer.seen_jobs_used(),
        "each": True,
    }
    return await _of_days(site, viewer, query, "gpus", **words)


async def _jobs(site: Site, viewer: Viewer, query: JobsReportQuery, path: Mapping[str, str]) -> Any:
    words = {
        "accounts": sorted(words_of(query.account)),
        "users": sorted(words_of(query.user)),
        "partitions": sorted(words_of(query.partition)),
        "seen": viewer.seen_jobs_used(),
    }
    since = query.since or query.until or datetime.now().date()
    days = query.model_copy(update={"since": since, "until": query.until or since})
    return await _of_days(site, viewer, days, "jobs", **words)


async def _of_days(site: Site, viewer: Viewer, query: DaysQuery, kind: str, **words: Any) -> Any:
    first, last = days_of(query, datetime.now().date(), _MOST_OF_EACH if words.get("each") else _MOST)
    asked = {"from": str(first), "until": str(last), "limit": query.limit, "nodes": viewer.sees_nodes, **words}
    document = await made(site, viewer, "report", report=kind, **asked)
    if query.format == "csv":
        shown = EACH_GPU if words.get("each") else ""
        return Plain(csv_of(document, kind, words.get("by", ()), shown), "text/csv; charset=utf-8; header=present")
    return document


def days_of(query: DaysQuery, today: date, most: timedelta = _MOST) -> tuple[date, date]:
    """The first and last day of a report. Raises ProblemError."""
    since = query.since and min(max(query.since, _FIRST), _LAST)
    until = query.until or (max(since, min(today, since + most)) if since else today)
    until = min(max(until, _FIRST), _LAST)
    since = since or until.replace(day=1)
    if not timedelta() <= until - since <= _MOST:
        raise ProblemError(400, f"from {since} until {until}: not 1 to 400 days", remedy="ask for fewer days")
    return since, until


def csv_of(document: Mapping[str, Any], kind: str, by: Any, shown: str = "") -> str:
    """A report for spreadsheets, with the columns that the command prints."""
    of_key = {one.key: one for one in fields_of(kind)}
    of_name = {one.name: one for one in of_key.values()}
    groups = SERVICE_GROUPS if kind == "services" else GROUPED_BY.get(kind, ())
    grouping = {*by, *groups} if by else set()
    usual = [of_name[word] for word in (shown or DEFAULTS[kind]).split(",")]
    fields = [of_key[name] for name in by] + [one for one in usual if one.key not in grouping]
    rows = ([row.get(one.key) for one in fields] for row in document["rows"])
    return "".join(csv_lines(fields, rows, Units()))


async def _job_report(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> Any:
    name = path["job"]
    if not _JOB.fullmatch(name):
        raise ProblemError(400, f"job {name[:40]!r}: not a job's number", remedy="write it as 17, 17_3 or 17+1")
    known = site.store.jobs.by_id.get(int(name)) if name.isdecimal() else None
    if known is not None and not viewer.sees_job(known):
        raise not_found(f"job {name}")
    document = await made(site, viewer, "job-page", job=name)
    whose = None if document is None else (document["job"]["user"], document["job"]["account"])
    if whose is None or not viewer.sees_job_of(*whose):
        raise not_found(f"job {name}")
    if not viewer.sees_use_of(*whose):
        nothing = dict.fromkeys(document["host"])
        document |= {"used": None, "host": nothing, "limits_hit": [], "advice": None}
    explanation = document["waited"].get("explanation")
    if explanation is not None:
        viewer.withhold_from(explanation)
    return document


ENDPOINTS = (
    Endpoint("/reports/nodes", _nodes, models.Report, "What was used of each node", DaysQuery),
    Endpoint("/reports/gpus/each", _each_gpu, models.Report, "What was used of each GPU", EachGpuQuery),
    Endpoint("/reports/jobs", _jobs, models.JobsReport, "Single jobs, ended ones included", JobsReportQuery),
    Endpoint("/reports/services", _services, models.ServicesReport, "What requests to services used", ServicesQuery),
    Endpoint("/reports/{report}", _report, models.Report, "What was used, by whom, and how well", ReportQuery),
    Endpoint("/jobs/{job}/report", _job_report, models.JobReport, "Everything that is known of one job"),
)
