"""Nodes, GPUs, inventories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import not_found


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


def _topology(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    from gres_probe.inventory import Inventory
    from gres_probe.topology import topology_document

    name = path["node"]
    row = site.store.rows("inventory").get(name, {}) if viewer.sees_nodes else {}
    if "inventory" not in row:
        raise not_found(f"node {name[:80]!r}")
    return dict(topology_document(Inventory.from_json(json.dumps(row["inventory"]), source=name)))


def _classes(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for row in site.store.rows("classes").values() if viewer.sees_nodes else ():
        name = row["name"]
        one = found.setdefault(name, {"name": name, "feature": row["feature"], "nodes": [], "gpus": []})
        one["nodes"].append(row["node"])
        one["gpus"] += row["gpus"]
    return {**site.viewed("inventory"), "classes": [found[name] for name in sorted(found)]}


def _switches(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("topology") if viewer.sees_nodes else {}
    return {**site.viewed("topology"), "switches": [rows[name] for name in sorted(rows)]}


ENDPOINTS = (
    Endpoint("/nodes", _nodes, models.NodeList, "Nodes", NodesQuery),
    Endpoint("/gpus", _gpus, models.GpuList, "GPUs", NodesQuery),
    Endpoint("/nodes/{node}/topology", _topology, models.Topology, "How the GPUs of a node are joined"),
    Endpoint("/topology", _switches, models.NetworkTopology, "How nodes are joined"),
    Endpoint("/classes", _classes, models.ClassList, "GPUs that are alike"),
    Endpoint("/inventory", _inventory, models.Inventory, "What nodes were probed to have"),
)
