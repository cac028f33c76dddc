"""Nodes, GPUs, inventories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site


class NodesQuery(BaseModel, extra="forbid"):
    """Which nodes."""

    node: str = Field("", max_length=256, description="One node.")


def _nodes(site: Site, viewer: Viewer, query: NodesQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("nodes").values() if viewer.sees_nodes else ()
    return {**site.viewed("nodes"), "nodes": [row for row in rows if query.node in ("", row["name"])]}


def _gpus(site: Site, viewer: Viewer, query: NodesQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = (viewer.gpu(row) for row in site.store.rows("gpus").values() if query.node in ("", row["node"]))
    return {**site.viewed("nodes"), "gpus": [row for row in rows if row is not None]}


def _inventory(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("inventory") if viewer.sees_nodes else {}
    nodes = [row["inventory"] for row in rows.values() if "inventory" in row]
    failures = {name: row["failure"] for name, row in rows.items() if "failure" in row}
    return {**site.viewed("inventory"), "nodes": nodes, "failures": failures}


ENDPOINTS = (
    Endpoint("/nodes", _nodes, models.NodeList, "Nodes", NodesQuery),
    Endpoint("/gpus", _gpus, models.GpuList, "GPUs", NodesQuery),
    Endpoint("/inventory", _inventory, models.Inventory, "What nodes were probed to have"),
)
