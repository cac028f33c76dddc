"""Tenants: what they may use, what they use, and where that leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.view import Seen, View, ask, whole

_GPU = "gres/gpu"


def in_order(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each tenant after the one above it, with its depth."""
    below: dict[str, list[dict[str, Any]]] = {}
    names = {row["name"] for row in rows}
    for row in sorted(rows, key=lambda one: str(one["name"])):
        below.setdefault(row["parent"] if row["parent"] in names else "", []).append(row)
    found: list[tuple[int, dict[str, Any]]] = []
    left = [(0, row) for row in reversed(below.get("", []))]
    while left:
        depth, row = left.pop()
        found.append((depth, row))
        left += [(depth + 1, one) for one in reversed(below.pop(row["name"], []))]
    return found


def _tenants(site: Site, viewer: Viewer, request: Request) -> Seen:
    document = ask(site, viewer, "/tenants")
    rows = [
        (depth, row, _gpus(ask(site, viewer, "/tenants/{tenant}/quota", tenant=row["name"])))
        for depth, row in in_order(document["tenants"])
    ]
    return {"rows": rows}


def _gpus(quota: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((one for one in quota["quota"] if one["what"] == _GPU), None)


def _tenant(site: Site, viewer: Viewer, request: Request) -> Seen:
    name = request.path_params["tenant"]
    tenant = ask(site, viewer, "/tenants/{tenant}", tenant=name)
    quota = ask(site, viewer, "/tenants/{tenant}/quota", tenant=name)
    use = ask(site, viewer, "/tenants/{tenant}/usage", tenant=name)["members"]
    return {
        "tenant": tenant, "quota": quota["quota"], "budget": whole(models.Budget, quota["budget"]), "use": use,
        "title": tenant["name"],
        "below": [row["name"] for row in ask(site, viewer, "/tenants")["tenants"] if row["parent"] == name],
        "without": sorted(set(tenant["members"]) - {one["user"] for one in use}),
    }  # fmt: skip


VIEWS = (
    View("/tenants", _tenants, "tenants.html", "Tenants", nav="/tenants"),
    View("/tenants/{tenant}", _tenant, "tenant.html", "Tenant", nav="/tenants"),
)
