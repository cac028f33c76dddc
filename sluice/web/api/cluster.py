"""The cluster in one look, the caller, and what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.metrics.names import MEASUREMENTS
from sluice.web.access import LEVELS, Viewer
from sluice.web.api.tenants import of_list
from sluice.web.endpoint import Endpoint, Site, known
from sluice.web.store import Waits

_MOST_REASONS = 20
_OF_GPUS = ("gpus", "gpus_in_use", "gpus_out", "gpu_types")


class EventsQuery(BaseModel, extra="forbid"):
    """Which events."""

    after: int = Field(0, ge=0, description="Only those with a greater `seq`.")


def sequence(row: Mapping[str, Any]) -> int:
    """The order of events."""
    return int(row["seq"])


def _overview(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    cluster = known(site, "cluster", "cluster")
    return {
        "schema_version": 1,
        **{name: cluster[name] for name in ("cluster", "slurm_version", "private_data")},
        "connected": site.store.connected,
        "parts": {name: viewer.part(site.store.part(name)) for name in sorted(site.store.rows("parts"))},
        "jobs_by_state": site.store.jobs.counts(viewer.seen_jobs()),
        **(_gpus(site) if viewer.sees_nodes else dict.fromkeys(_OF_GPUS)),
        "waiting_by_reason": _most_frequent(site.store.jobs.waiting(viewer.seen_jobs())),
    }


def _gpus(site: Site) -> dict[str, Any]:
    """The figures of the GPUs, which are the same for all who see nodes."""

    def count() -> dict[str, Any]:
        gpus, nodes = site.store.rows("gpus").values(), site.store.rows("nodes")
        in_use, out = sum(row["use"] != "free" for row in gpus), sum(row["health"] == "out" for row in gpus)
        types = gpu_types(gpus, nodes, site.store.one("cluster").get("gpu_classes", {}))
        return dict(zip(_OF_GPUS, (len(gpus), in_use, out, types), strict=True))

    return site.store.once("gpus", ("gpus", "nodes", "cluster"), count)


def _most_frequent(waits: Waits) -> dict[str, int]:
    often = sorted(((jobs, reason) for reason, (jobs, _) in waits.items()), reverse=True)
    return {reason or "None": jobs for jobs, reason in often[:_MOST_REASONS]}


def gpu_types(
    gpus: Iterable[Mapping[str, Any]], nodes: Mapping[str, Mapping[str, Any]], classes: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    """How many GPUs of each type there are, and what is free of them."""
    of_type = {kind: name for name, kinds in classes.items() for kind in kinds}
    found: dict[str, dict[str, Any]] = {}
    whole: dict[str, int] = {}
    for gpu in gpus:
        kind = gpu["type"]
        one = found.setdefault(
            kind,
            {"type": kind, "gpu_class": of_type.get(kind, kind), "total": 0, "whole": 0, "shared": 0, "out": 0,
             "free": 0, "free_mib": 0},
        )  # fmt: skip
        one["total"] += 1
        one[gpu["use"]] += gpu["use"] != "free"
        one["out"] += not gpu["available"]
        one["free"] += gpu["use"] == "free" and gpu["available"]
        if gpu["use"] == "whole" or not gpu["available"]:
            whole[gpu["node"]] = whole.get(gpu["node"], 0) + 1
    for name, node in nodes.items():
        if node["available"] and node["gpus"] and node["gpu_types"]:
            kind = max(node["gpu_types"], key=lambda one: node["gpu_types"][one])
            left = node["gpu_mem_mib"] * (node["gpus"] - whole.get(name, 0)) // node["gpus"]
            if kind in found:
                found[kind]["free_mib"] += max(0, left - node["gpu_mem_allocated_mib"])
    return sorted(found.values(), key=lambda one: str(one["type"]))


def _whoami(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    nodes = site.store.rows("nodes").values() if viewer.sees_nodes else ()
    return {
        "schema_version": 1,
        "user": viewer.user,
        "level": LEVELS[viewer.level],
        "coordinates": sorted(viewer.coordinates),
        "accounts": sorted(viewer.accounts),
        "gpu_types": sorted({kind for row in nodes for kind in row["gpu_types"] if kind}),
        "tenants": [
            _mine(viewer, row) for row in site.store.rows("tenants").values() if row["name"] in viewer.accounts
        ],
    }


def _mine(viewer: Viewer, row: Mapping[str, Any]) -> dict[str, Any]:
    found = viewer.tenant(row) or {}
    members = [one for one in row["members"] if one == viewer.user]
    return {**of_list(found), "members": members, "quota": found["quota"], "example": row.get("example", "")}


def _events(site: Site, viewer: Viewer, query: EventsQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted((row for row in site.store.rows("events").values() if row["seq"] > query.after), key=sequence)
    return {**site.viewed("events"), "events": [one for row in rows if (one := viewer.event(row)) is not None]}


def _metric_names(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {"schema_version": 1, "measurements": _MEASUREMENTS}


_MEASUREMENTS = [
    {name: getattr(one, name) for name in ("name", "side", "help")}
    | {"tags": dict(one.tags), "metrics": [asdict(metric) for metric in one.metrics]}
    for one in MEASUREMENTS
]

ENDPOINTS = (
    Endpoint("/overview", _overview, models.Overview, "The cluster in one look"),
    Endpoint("/whoami", _whoami, models.Whoami, "The caller"),
    Endpoint("/metrics", _metric_names, models.MetricNames, "Every metric that there is"),
    Endpoint("/events", _events, models.EventList, "What happened", EventsQuery),
)
