"""Reports: what was used, by whom, and how well, as tables, bars and files for spreadsheets."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.requests import Request

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.show import NOTHING
from sluice.web.pages.view import Seen, View, ask, whole
from sluice.web.problems import ProblemError

KINDS = ("tenants", "users", "gpus", "nodes", "efficiency", "waste", "fairness", "cost", "services")
_PLOTTED_DAYS = 31
_AT_A_TIME = 4
_HIDDEN = ("state",)
# What lines are compared by: field, what makes one unit of it, title, and that of its plot and of the largest ones.
GPU_HOURS = ("gpu_s", 3600, "GPU hours", "GPU hours a day", "Most GPU hours")
TOKENS = ("tokens", 1, "Tokens", "Tokens a day", "Most tokens")
# Fields of a report's rows, how each is shown, and its title; what no row has is left out.
COLUMNS = (
    ("service", "text", "Service"), ("account", "text", "Tenant"), ("user", "text", "User"), ("partition", "text", "Partition"), ("qos", "text", "QOS"),
    ("gpu_type", "text", "GPU class"), ("gpu_class", "text", "GPU class"), ("node", "text", "Node"), ("gpu", "text", "GPU"),
    ("gpu_s", "hours", "GPU hours"), ("allocated_percent", "percent", "Allocated"),
    ("utilisation_percent", "percent", "Busy"), ("efficiency_percent", "percent", "Efficiency"),
    ("wasted_gpu_s", "hours", "Wasted GPU hours"), ("idle_gpu_s", "hours", "Idle GPU hours"),
    ("jobs", "number", "Jobs"), ("failed", "number", "Failed"), ("cpu_s", "hours", "CPU hours"),
    ("gpu_energy_j", "energy", "Energy"), ("wait_p50_s", "duration", "Half wait less than"),
    ("wait_p95_s", "duration", "95 % wait less than"), ("entitled_percent", "percent", "Entitled to"),
    ("got_percent", "percent", "Got"), ("got_ratio", "number", "Got of it"), ("capacity_gpu_s", "hours", "Capacity"),
    ("unallocated_gpu_s", "hours", "Not allocated"), ("requests", "number", "Requests"), ("tokens", "number", "Tokens"),
    ("refused", "number", "Refused by a limit"), ("expired", "number", "Waited too long"),
    ("first_token_p50_ms", "milliseconds", "Half begin within"),
    ("first_token_p95_ms", "milliseconds", "95 % begin within"),
    ("tokens_per_gpu_hour", "number", "Tokens a GPU hour"),
)  # fmt: skip


def _period(request: Request) -> tuple[date, date]:
    """The days that are asked for: the last 30 where none are. Raises ProblemError."""
    today = datetime.now(UTC).date()
    given = request.query_params
    try:
        until = date.fromisoformat(given["until"]) if given.get("until") else today
        since = date.fromisoformat(given["since"]) if given.get("since") else until - timedelta(days=29)
    except (ValueError, OverflowError) as error:
        raise ProblemError(400, f"a day: {error}"[:200], remedy="write it as 2026-11-24") from error
    if since > until:
        raise ProblemError(400, "the first day is after the last one", remedy="exchange them")
    return since, until


async def _reports(site: Site, viewer: Viewer, request: Request) -> Seen:
    given = request.query_params
    kind = given.get("report", "users")
    if kind not in KINDS:
        raise ProblemError(404, f"report {kind[:40]!r}: not known", remedy=f"use one of {', '.join(KINDS)}")
    since, until = _period(request)
    query = {
        "since": str(since),
        "until": str(until),
        "account": given.get("account", ""),
        "user": given.get("user", ""),
    }
    if kind == "services":
        query["service"] = given.get("service", "")
    measure = TOKENS if kind == "services" else GPU_HOURS
    found, why = None, None
    try:
        found = await _asked(site, viewer, kind, query)
    except ProblemError as error:
        if error.status not in (403, 503):
            raise
        why = error
    rows = [] if found is None else found["rows"]
    columns = [one for one in COLUMNS if any(row.get(one[0]) is not None for row in rows)]
    sizes = sorted(rows, key=lambda row: -(row.get(measure[0]) or 0))[:12]
    daily = _tokens_of_days if kind == "services" else _days
    days = await daily(site, viewer, query, since, until) if "days" in given else None
    return {
        "kinds": KINDS, "kind": kind, "since": since, "until": until, "asked": query, "found": found, "rows": rows,
        "columns": columns, "sizes": [row for row in sizes if row.get(measure[0])], "why": why, "days": days,
        "most": max((row.get(measure[0]) or 0 for row in rows), default=0), "name_of": name_of, "measure": measure,
        "few_days": (until - since).days < _PLOTTED_DAYS,
        "accounts": sorted(row["name"] for row in ask(site, viewer, "/tenants")["tenants"]),
    }  # fmt: skip


def name_of(row: Mapping[str, Any]) -> str:
    """What a line is of."""
    return (
        " / ".join(
            str(row[name]) for name in ("service", "account", "user", "node", "gpu_type", "gpu") if row.get(name)
        )
        or NOTHING
    )


async def _asked(site: Site, viewer: Viewer, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
    """A report with all fields of its model."""
    path, model = (
        ("/reports/services", models.ServicesReport) if kind == "services" else ("/reports/{report}", models.Report)
    )
    found = whole(model, await ask(site, viewer, path, query, **({} if kind == "services" else {"report": kind})))
    return found or {}


async def _tokens_of_days(
    site: Site, viewer: Viewer, query: Mapping[str, str], since: date, until: date
) -> list[tuple[float, float]]:
    """Tokens of each day, which one report has."""
    first = max(since, until - timedelta(days=_PLOTTED_DAYS - 1))
    found = await ask(site, viewer, "/reports/services", {**query, "since": str(first), "by": "day"})
    tokens = {row["day"]: row.get("tokens") or 0 for row in found["rows"]}
    days = (first + timedelta(days=count) for count in range((until - first).days + 1))
    return [(_noon(day), tokens.get(str(day), 0)) for day in days]


def _noon(day: date) -> float:
    return datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp()


async def _days(
    site: Site, viewer: Viewer, query: Mapping[str, str], since: date, until: date
) -> list[tuple[float, float]]:
    """GPU hours of each day: of as many of the last days as are plotted."""
    count = min(_PLOTTED_DAYS, (until - since).days + 1)
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def of(day: date) -> tuple[float, float]:
        async with turns:
            found = await ask(
                site, viewer, "/reports/{report}", {**query, "since": str(day), "until": str(day)}, report="users"
            )
        return _noon(day), sum(row.get("gpu_s") or 0 for row in found["rows"]) / 3600

    return list(await asyncio.gather(*(of(until - timedelta(days=age)) for age in reversed(range(count)))))


VIEWS = (View("/reports", _reports, "reports.html", "Reports", nav="/reports"),)
