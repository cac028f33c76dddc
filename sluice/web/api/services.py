"""Models as services: which there are, and how they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import not_found

_SHOWN = models.ServiceInList.model_fields


def _services(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("services")
    seen = [found for name in sorted(rows) if (found := viewer.service(rows[name])) is not None]
    services = [{name: value for name, value in one.items() if name in _SHOWN} for one in seen]
    return {**site.viewed("services"), "services": services}


def _service(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = site.store.rows("services").get(path["service"])
    found = None if row is None else viewer.service(row)
    if found is None:
        raise not_found(f"service {path['service'][:80]!r}")
    return {**site.viewed("services"), **found}


ENDPOINTS = (
    Endpoint("/services", _services, models.ServiceList, "Models that run as services"),
    Endpoint("/services/{service}", _service, models.Service, "One service and its replicas"),
)
