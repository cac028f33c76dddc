"""For operators: health, alerts, the policy, the controllers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.api.cluster import sequence
from sluice.web.api.reports import made
from sluice.web.endpoint import Endpoint, Site, known


def _health(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    head = known(site, "health", "cluster-health")
    return {**site.viewed("health"), **head, "rows": list(site.store.rows("health").values())}


class HistoryQuery(BaseModel, extra="forbid"):
    """Which events."""

    node: str = Field("", max_length=256, description="Only those of one node.")


class ShadowQuery(BaseModel, extra="forbid"):
    """Which decisions."""

    hours: float | None = Field(None, gt=0, lt=1e6, description="Only those of the last so many hours.")


def _health_history(site: Site, viewer: Viewer, query: HistoryQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted(site.store.rows("events").values(), key=sequence)
    found = [{"time": row["time"], "kind": row["kind"], **row["fields"]} for row in rows]
    return {
        "schema_version": 1,
        "events": [one for one in found if one["kind"].startswith("health.") and query.node in ("", one.get("node"))],
    }


def _power(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("power"), **known(site, "power", "power")}


def _power_drawn(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    known(site, "power", "power")
    rows = {what: list(site.store.rows(f"power-{what}").values()) for what in ("nodes", "tenants")}
    return {**site.viewed("power"), **rows}


def _alerts(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("alerts"), **known(site, "alerts", "alerts")}


def _policy(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    shown = known(site, "policy", "policy")
    return {**site.viewed("policy"), "policy": shown, "text": site.store.one("policy-text") or ""}


def _failover(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("failover"), **known(site, "failover", "failover")}


def _failover_history(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("failover-history")
    return {**site.viewed("failover"), "events": [rows[key] for key in sorted(rows)]}


async def _shadow(site: Site, viewer: Viewer, query: ShadowQuery, path: Mapping[str, str]) -> Any:
    return await made(site, viewer, "shadow", hours=query.hours)


ENDPOINTS = (
    Endpoint("/health", _health, models.HealthList, "Faults, and what is out of service", operators=True),
    Endpoint("/health/history", _health_history, models.HealthHistory, "What health did", HistoryQuery, operators=True),
    Endpoint("/power", _power, models.PowerShown, "Budgets of watts, and what is drawn", operators=True),
    Endpoint("/power/drawn", _power_drawn, models.PowerDrawn, "What nodes and tenants draw", operators=True),
    Endpoint("/alerts", _alerts, models.AlertList, "Alerts and silences", operators=True),
    Endpoint("/policy", _policy, models.PolicyShown, "The policy file", operators=True),
    Endpoint("/failover", _failover, models.FailoverStatus, "The controllers", operators=True),
    Endpoint("/failover/history", _failover_history, models.FailoverHistory, "What happened to them", operators=True),
    Endpoint("/shadow", _shadow, models.ShadowReport, "What Sluice would have decided", ShadowQuery, operators=True),
)
