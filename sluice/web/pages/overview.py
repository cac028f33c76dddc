"""The cluster in one look: GPUs, what is free, who waits for what, and what needs attention."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request

from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.heat import Rack, draw, natural, rack_names
from sluice.web.pages.view import Seen, View, ask

_MOST_LISTED = 8
_KEPT_S = 5.0
_KINDS = ("all", "free", "shared", "whole", "off", "out")

_drawn: WeakKeyDictionary[Site, tuple[float, dict[str, Any]]] = WeakKeyDictionary()


def gpus_seen(site: Site, viewer: Viewer) -> dict[str, Any]:
    """The GPUs as figures, by class, and as a heat map; what all who see nodes see is made once in a while for all."""
    if not viewer.sees_nodes:
        return _gpus(ask(site, viewer, "/gpus")["gpus"], {})
    at, made = _drawn.get(site, (0.0, {}))
    if not made or time.monotonic() - at > _KEPT_S:
        made = _gpus(
            site.store.rows("gpus").values(),
            rack_names(site.store.rows("nodes").values(), site.store.rows("topology").values()),
        )
        _drawn[site] = time.monotonic(), made
    return made


def _gpus(gpus: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    gpus = list(gpus)
    classes: dict[str, Counter[str]] = {}
    memory: dict[str, int] = {}
    for one in gpus:
        kind = classes.setdefault(one["type"], Counter())
        kind["all"] += 1
        kind[_kind(one)] += 1
        memory[one["type"]] = max(memory.get(one["type"], 0), one["memory_total_mib"] or 0)
    racks: list[Rack] = draw(gpus, names)
    return {
        "total": sum(classes.values(), Counter()),
        "classes": [
            {"name": name, "memory_mib": memory[name] or None, **{kind: classes[name][kind] for kind in _KINDS}}
            for name in sorted(classes)
        ],
        "racks": racks,
        "out": sorted((one for one in gpus if one["health"] == "out"), key=lambda one: natural(one["node"])),
    }


def _kind(gpu: Mapping[str, Any]) -> str:
    if gpu["health"] == "out":
        return "out"
    if gpu["use"] == "free":
        return "free" if gpu["available"] else "off"
    return str(gpu["use"])


def waiting(site: Site, viewer: Viewer) -> list[tuple[str, int, int]]:
    """Why jobs wait: Slurm's reason, how many jobs, and GPUs."""
    jobs: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for said, (many, wanted) in site.store.jobs.waiting(viewer.seen_jobs()).items():
        reason = said if said not in ("", "None") else "Priority"
        jobs[reason] += many
        gpus[reason] += wanted
    return [(reason, many, gpus[reason]) for reason, many in jobs.most_common(12)]


def _alerts(site: Site, viewer: Viewer) -> list[dict[str, Any]]:
    if not viewer.operator or site.store.one("alerts") is None:
        return []
    return [one for one in ask(site, viewer, "/alerts")["alerts"] if one["state"] == "firing"]


def _faults(site: Site, viewer: Viewer) -> list[dict[str, Any]]:
    if not viewer.operator or site.store.one("cluster-health") is None:
        return []
    return [one for one in ask(site, viewer, "/health")["rows"] if one["state"] not in ("warning", "out")]


def _overview(site: Site, viewer: Viewer, request: Request) -> Seen:
    document = ask(site, viewer, "/overview")
    mine = {
        state: ask(site, viewer, "/jobs", {"user": viewer.user, "state": state, "limit": "1"})["total"]
        for state in ("RUNNING", "PENDING")
    }
    gpus = gpus_seen(site, viewer)
    return {
        "overview": document, "mine": mine, "gpus": gpus, "waiting": waiting(site, viewer),
        "alerts": _alerts(site, viewer)[:_MOST_LISTED], "faults": _faults(site, viewer)[:_MOST_LISTED],
        "out": gpus["out"][:_MOST_LISTED],
    }  # fmt: skip


VIEWS = (View("/", _overview, "overview.html", "Overview", nav="/"),)
