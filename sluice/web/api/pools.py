"""Nodes that come and go: for who may see nodes, with the jobs that they may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import not_found


def _pools(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("pools") if viewer.sees_nodes else {}
    return {**site.viewed("pools"), "pools": [rows[name] for name in sorted(rows)]}


def _row(site: Site, viewer: Viewer, section: str, name: str, what: str) -> dict[str, Any]:
    row = site.store.rows(section).get(name) if viewer.sees_nodes else None
    if row is None:
        raise not_found(f"{what} {name[:80]!r}")
    return dict(row)


def _node(viewer: Viewer, row: Mapping[str, Any]) -> dict[str, Any]:
    """A node without the jobs that the viewer may not see."""
    return {**row, "jobs": [one for one in row["jobs"] if viewer.sees_number(one)]}


def _pool(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _row(site, viewer, "pools", path["pool"], "pool")
    nodes = [_node(viewer, one) for one in site.store.rows("pool-nodes").values() if one["pool"] == row["name"]]
    shown = [{name: one[name] for name in models.PoolNode.model_fields} for one in nodes]
    return {**site.viewed("pools"), **row, "node_list": shown}


def _history(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("pools"), **_row(site, viewer, "pool-events", path["pool"], "pool")}


def _why(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _row(site, viewer, "pool-nodes", path["node"], "node of a pool")
    return {**site.viewed("pools"), **_node(viewer, row)}


ENDPOINTS = (
    Endpoint("/pools", _pools, models.PoolList, "Pools of nodes that come and go"),
    Endpoint("/pools/{pool}", _pool, models.Pool, "One pool and its nodes"),
    Endpoint("/pools/{pool}/history", _history, models.PoolHistory, "What happened in a pool"),
    Endpoint("/nodes/{node}/pool", _why, models.PoolNodeWhy, "Why a node of a pool is as it is"),
)
