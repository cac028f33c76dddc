"""Models as services: which the viewer may call and how, how they are, and how many replicas they have."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from starlette.requests import Request

from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.view import Done, Form, Seen, View, ask, soon, write
from sluice.web.problems import ProblemError

REPLICAS = ("ready", "starting", "queued", "draining", "failed")
"""Their states."""
OUTCOMES = {
    "requests": "Requests", "answered": "Answered", "failed": "Failed", "expired": "Waited too long",
    "refused": "Refused by a limit", "cancelled": "Cancelled by callers",
}  # fmt: skip
LIMITS = {
    "requests_per_minute": "Requests a minute", "tokens_per_minute": "Tokens a minute",
    "concurrent": "Requests at once", "queued": "Requests that wait",
}  # fmt: skip
OWN_LIMITS = {**LIMITS, "tokens": "Tokens in the period"}
ACTS = {"scale": "The service was scaled.", "pause": "The service is paused.", "resume": "The service was resumed."}
_NO_ADDRESS = "https://ADDRESS/v1"
_PATIENCE_S = 0.7
_MOST_POINTS = 120


class Limit(NamedTuple):
    """What is limited, and how much of it is used. `tenant`, `key`: whose, if it is not a service's or the viewer's."""

    title: str
    used: float | None
    limit: float | None
    tenant: str = ""
    key: str = ""


def _services(site: Site, viewer: Viewer, request: Request) -> Seen:
    found = ask(site, viewer, "/services")
    names = [one["name"] for one in found["services"]]
    return {
        **found, **_first_call(viewer, found["address"], names[0] if names else ""), "replica_states": REPLICAS,
        "own_limits": _own_limits(ask(site, viewer, "/limits")["limits"]),
    }  # fmt: skip


def _own_limits(rows: Iterable[Mapping[str, Any]]) -> list[Limit]:
    """Those that there are, of the viewer and then of its keys and tenants, and who has requests now."""
    return [
        Limit(title, row.get(f"used_{name}"), row[name], **{row["kind"]: row["name"]} if row["kind"] != "user" else {})
        for row in rows
        for name, title in OWN_LIMITS.items()
        if row[name] is not None or (name == "concurrent" and row["used_concurrent"])
    ]


async def _service(site: Site, viewer: Viewer, request: Request) -> Seen:
    name = request.path_params["service"]
    service = ask(site, viewer, "/services/{service}", service=name)
    moments = ask(site, viewer, "/services/{service}/series", service=name)["moments"]
    today = {"service": name, "by": "service", "since": str(datetime.now().date())}
    patience = 10.0 if "wait" in request.query_params else _PATIENCE_S
    report, why = await soon(ask(site, viewer, "/reports/services", today), patience)
    return {
        "service": service, "title": name, "series": thinned(moments), "limits": _limits(site, viewer, service),
        "today": None if report is None else _sums(report["rows"]), "outcomes": OUTCOMES, "not_reported": why,
        **_first_call(viewer, ask(site, viewer, "/services")["address"], name), "replica_states": REPLICAS,
        "may_change": viewer.level >= 2,
    }  # fmt: skip


def _first_call(viewer: Viewer, address: str, service: str) -> Seen:
    """How to get a key, and what to type with it."""
    body = json.dumps({"model": service, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    return {
        "address": address,
        "make_key": f"sluice token create {shlex.quote(viewer.user)} --scope serve --for 90d",
        "call": f"curl {address or _NO_ADDRESS}/chat/completions -H \"authorization: Bearer $OPENAI_API_KEY\" \\\n"
        f"  -H 'content-type: application/json' -d {shlex.quote(body)}",
    }  # fmt: skip


def thinned(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """So many moments as a plot has room for: of several that are next to each other the busiest."""
    size = -(-len(moments) // _MOST_POINTS)
    groups = (moments[at : at + size] for at in range(0, len(moments), size or 1))
    return [max(some, key=lambda one: (one["tokens_per_minute"] or 0, one["waiting"] or 0)) for some in groups]


def _sums(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found = dict.fromkeys(OUTCOMES, 0)
    for row in rows:
        for name in OUTCOMES:
            found[name] += row.get(name) or 0
    return found


def _limits(site: Site, viewer: Viewer, service: Mapping[str, Any]) -> list[Limit]:
    """Limits of it that the viewer may see, each next to what is used."""
    found = [Limit("Replicas", service["ready"] + service["starting"] + service["queued"], service["most"])]
    if service["ready"]:
        found.append(Limit("Requests that are worked on", service["in_flight"], service["ready"] * service["slots"]))
    with suppress(ProblemError):  # a tenant that is not the viewer's
        quota = ask(site, viewer, "/tenants/{tenant}/quota", tenant=service["tenant"])["quota"]
        found += [
            Limit("GPUs of its tenant", one["used"], one["limit"])
            for one in quota if one["what"] == "gres/gpu" and one["limit"] is not None
        ]  # fmt: skip
    if viewer.operator:
        with suppress(ProblemError):  # the policy is not known
            written = ask(site, viewer, "/policy")["policy"].get("services", {}).get(service["name"], {})
            limits, used = written.get("limits", {}), _used(service)
            found += [Limit(title, used[name], limits[name]) for name, title in LIMITS.items() if limits.get(name)]
    return found


def _used(service: Mapping[str, Any]) -> dict[str, int | None]:
    waits, works = service["waiting"], service["in_flight"]
    return {
        **{name: service[name] for name in ("requests_per_minute", "tokens_per_minute")},
        "concurrent": None if waits is None or works is None else waits + works, "queued": waits,
    }  # fmt: skip


async def _act(site: Site, viewer: Viewer, form: dict[str, str], path: Mapping[str, str]) -> Done:
    do, name = path["change"], path["service"]
    if do not in ACTS:
        raise ProblemError(404, f"{do[:40]!r}: no such thing to do", remedy=f"use one of {', '.join(ACTS)}")
    body: dict[str, Any] = {"paused": do == "pause"}
    if do == "scale":
        body = {key: form[key] for key in ("least", "most") if form.get(key)}
    await write(site, viewer, "PATCH", "/services/{service}", body, service=name)
    return Done(f"/services/{name}", ACTS[do])


VIEWS = (
    View("/services", _services, "services.html", "Services", nav="/services"),
    View("/services/{service}", _service, "service.html", "Service", nav="/services"),
)
FORMS = (Form("/services/{service}/{change}", _act, "error.html", "Service", nav="/services", operators=True),)
