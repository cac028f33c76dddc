"""Models as services: which there are, how they are, and how many replicas they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.base.errors import SluiceError
from sluice.client import models
from sluice.exchange.serving import SCOPE
from sluice.web.access import Viewer
from sluice.web.endpoint import Endpoint, Site
from sluice.web.problems import ProblemError, not_found

_SHOWN = models.ServiceInList.model_fields
_RATES = ("requests_per_minute", "tokens_per_minute")
_AMOUNTS = (*_RATES, "concurrent", "queued", "tokens")
_MOST_KEYS = 100


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
    written, use, open_ = (site.store.rows(f"serving-{name}") for name in ("limits", "use", "open"))
    serving = site.store.one("serving") or {}
    counted, whole = serving.get("counted", False), serving.get("open_whole", False)

    def limit(kind: str, name: str) -> dict[str, Any]:
        subject = f"{kind}/{name}"
        row = written.get(subject) or written.get(f"{kind}/*") or {}
        shown = kind != "tenant" or name in viewer.coordinates or not viewer.withholds("usage")
        used = use.get(subject, {})
        now = open_[subject]["requests"] if subject in open_ else 0 if whole else None
        return {
            "kind": kind,
            "name": name,
            **{one: row.get(one) for one in _AMOUNTS},
            **{f"used_{one}": used.get(one, 0) if shown and counted and kind != "key" else None for one in _RATES},
            "used_concurrent": now if shown else None,
        }

    tenants = set(viewer.accounts | viewer.coordinates)
    if viewer.operator:
        tenants |= {subject.removeprefix("tenant/") for subject in (*written, *open_) if subject.startswith("tenant/")}
    found = [("user", viewer.user), *(("key", name) for name in _keys(site, viewer, written, open_))]
    found += [("tenant", name) for name in sorted(tenants - {"*"})]
    return {**site.viewed("services", "policy"), "limits": [limit(*one) for one in found]}


def _keys(site: Site, viewer: Viewer, written: Mapping[str, Any], open_: Mapping[str, Any]) -> list[str]:
    """Those of the viewer's keys that have a limit or are in use; none where its tokens cannot be read here."""
    try:
        tokens = site.login.tokens.tokens()
    except SluiceError:
        return []
    known = (subject.removeprefix("key/") for subject in (*written, *open_) if subject.startswith("key/"))
    names = tokens.keys() if "key/*" in written else tokens.keys() & set(known)
    return sorted(one for one in names if tokens[one].user == viewer.user and SCOPE in tokens[one].scopes)[:_MOST_KEYS]


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
