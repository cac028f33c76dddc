"""Tenants: limits and use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import not_found

_SHOWN = models.TenantInList.model_fields


def of_list(row: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant as lists have it."""
    return {name: row[name] for name in _SHOWN}


def _tenants(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = [found for row in site.store.rows("tenants").values() if (found := viewer.tenant(row)) is not None]
    return {**site.viewed("tenants", "users"), "tenants": [of_list(row) for row in rows]}


def _tenant_row(site: Site, viewer: Viewer, name: str) -> dict[str, Any]:
    row = site.store.rows("tenants").get(name)
    found = None if row is None else viewer.tenant(row)
    if found is None:
        raise not_found(f"tenant {name[:80]!r}")
    return found


def _tenant(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {"schema_version": 1, **of_list(_tenant_row(site, viewer, path["tenant"]))}


def _quota(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _tenant_row(site, viewer, path["tenant"])
    return {"schema_version": 1, "tenant": row["name"], "quota": row["quota"], "budget": row.get("budget")}


def _usage(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _tenant_row(site, viewer, path["tenant"])
    return {"schema_version": 1, "tenant": row["name"], "members": row["member_use"]}


ENDPOINTS = (
    Endpoint("/tenants", _tenants, models.TenantList, "Tenants"),
    Endpoint("/tenants/{tenant}", _tenant, models.Tenant, "One tenant"),
    Endpoint("/tenants/{tenant}/quota", _quota, models.Quota, "What a tenant may use, and uses"),
    Endpoint("/tenants/{tenant}/usage", _usage, models.TenantUsage, "What a tenant's members use"),
)
