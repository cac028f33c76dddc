"""For operators: health, alerts, the policy, the controllers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.api.cluster import sequence
from sluice.web.endpoint import Endpoint, Site, known


def _health(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    head = known(site, "health", "cluster-health")
    return {**site.viewed("health"), **head, "rows": list(site.store.rows("health").values())}


def _health_history(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted(site.store.rows("events").values(), key=sequence)
    found = [{"time": row["time"], "kind": row["kind"], **row["fields"]} for row in rows]
    return {"schema_version": 1, "events": [one for one in found if one["kind"].startswith("health.")]}


def _alerts(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("alerts"), **known(site, "alerts", "alerts")}


def _policy(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("policy"), "policy": known(site, "policy", "policy")}


def _failover(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("failover"), **known(site, "failover", "failover")}


ENDPOINTS = (
    Endpoint("/health", _health, models.HealthList, "Faults, and what is out of service", operators=True),
    Endpoint("/health/history", _health_history, models.HealthHistory, "What health did", operators=True),
    Endpoint("/alerts", _alerts, models.AlertList, "Alerts and silences", operators=True),
    Endpoint("/policy", _policy, models.PolicyShown, "The policy file", operators=True),
    Endpoint("/failover", _failover, models.FailoverStatus, "The controllers", operators=True),
)
