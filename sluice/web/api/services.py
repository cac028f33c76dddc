"""Models as services: which there are, how they are, and how many replicas they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import ProblemError, not_found

_SHOWN = models.ServiceInList.model_fields
_RATES = ("requests_per_minute", "tokens_per_minute")
_AMOUNTS = (*_RATES, "concurrent", "queued", "tokens")


def _services(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("services")
    seen = [found for name in sorted(rows) if (found := viewer.service(rows[name])) is not None]
    services = [{name: value for name, value in one.items() if name in _SHOWN} for one in seen]
    address = (site.store.one("serving") or {}).get("address", "")
    return {**site.viewed("services"), "address": address, "services": services}


def _seen(site: Site, viewer: Viewer, name: str) -> dict[str, Any]:
    """A service as the viewer sees it. Raises ProblemError 404."""
    row = site.store.rows("services").get(name)
    found = None if row is None else viewer.service(row)
    if found is None:
        raise not_found(f"service {name[:80]!r}")
    return found


def _service(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("services"), **_seen(site, viewer, path["service"])}


def _limits(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    written, use = site.store.rows("serving-limits"), site.store.rows("serving-use")
    counted = (site.store.one("serving") or {}).get("counted", False)

    def limit(kind: str, name: str) -> dict[str, Any]:
        row = written.get(f"{kind}/{name}") or written.get(f"{kind}/*") or {}
        shown = counted and (kind == "user" or name in viewer.coordinates or not viewer.withholds("usage"))
        used = use.get(f"{kind}/{name}", {})
        return {
            "kind": kind,
            "name": name,
            **{one: row.get(one) for one in _AMOUNTS},
            **{f"used_{one}": used.get(one, 0) if shown else None for one in _RATES},
        }

    tenants = [limit("tenant", name) for name in sorted(viewer.accounts)]
    return {**site.viewed("services", "policy"), "limits": [limit("user", viewer.user), *tenants]}


def _series(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    seen = _seen(site, viewer, path["service"])
    moments = site.store.service_series.of(path["service"])
    if not viewer.sees_use_of_service(seen):
        moments = [{**one, "waiting": None, "in_flight": None, "tokens_per_minute": None} for one in moments]
    return {**site.viewed("services"), "moments": moments}


async def _change(site: Site, viewer: Viewer, body: models.ServiceChange, path: Mapping[str, str]) -> dict[str, Any]:
    words = body.model_dump(exclude_unset=True)
    if not words:
        raise ProblemError(
            422, "nothing to change", remedy=f"send one of {', '.join(models.ServiceChange.model_fields)}"
        )
    name = path["service"]
    _seen(site, viewer, name)
    return await site.acts.ask(viewer, "service-change", service=name, **words)


ENDPOINTS = (
    Endpoint("/services", _services, models.ServiceList, "Models that run as services"),
    Endpoint("/limits", _limits, models.CallerLimits, "What gateways of services let through of the caller"),
    Endpoint("/services/{service}", _service, models.Service, "One service and its replicas"),
    Endpoint("/services/{service}/series", _series, models.ServiceSeries, "How a service was over the last day"),
    Endpoint(
        "/services/{service}", _change, models.ServiceChanged,
        "Scale, pause or resume a service: in the policy file, and applied", method="PATCH", scope="write",
        body=models.ServiceChange, operators=True,
    ),
)  # fmt: skip
