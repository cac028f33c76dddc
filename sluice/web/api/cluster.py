"""The cluster in one look, the caller, and what happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.web.access import LEVELS, Viewer
from sluice.web.endpoint import Endpoint, Site, known


class EventsQuery(BaseModel, extra="forbid"):
    """Which events."""

    after: int = Field(0, ge=0, description="Only those with a greater `seq`.")


def sequence(row: Mapping[str, Any]) -> int:
    """The order of events."""
    return int(row["seq"])


def _overview(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    cluster = known(site, "cluster", "cluster")
    gpus = list(site.store.rows("gpus").values()) if viewer.sees_nodes else None
    return {
        "schema_version": 1,
        **{name: cluster[name] for name in ("cluster", "slurm_version", "private_data")},
        "connected": site.store.connected,
        "parts": {name: viewer.part(site.store.part(name)) for name in sorted(site.store.rows("parts"))},
        "jobs_by_state": site.store.jobs.counts(viewer.seen_jobs()),
        "gpus": None if gpus is None else len(gpus),
        "gpus_in_use": None if gpus is None else sum(row["use"] != "free" for row in gpus),
        "gpus_out": None if gpus is None else sum(row["health"] == "out" for row in gpus),
    }


def _whoami(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "user": viewer.user,
        "level": LEVELS[viewer.level],
        "coordinates": sorted(viewer.coordinates),
        "accounts": sorted(viewer.accounts),
    }


def _events(site: Site, viewer: Viewer, query: EventsQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted((row for row in site.store.rows("events").values() if row["seq"] > query.after), key=sequence)
    return {**site.viewed("events"), "events": [one for row in rows if (one := viewer.event(row)) is not None]}


ENDPOINTS = (
    Endpoint("/overview", _overview, models.Overview, "The cluster in one look"),
    Endpoint("/whoami", _whoami, models.Whoami, "The caller"),
    Endpoint("/events", _events, models.EventList, "What happened", EventsQuery),
)
