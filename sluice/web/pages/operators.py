"""Nodes, and operators' views: what their templates get, and what their forms do."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import yaml
from starlette.requests import Request

from policy.power import show_watts
from sluice.exchange.acts import MOST_POLICY
from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.heat import natural
from sluice.web.pages.topology import draw, link_text
from sluice.web.pages.view import Done, Form, Seen, View, ask, write
from sluice.web.problems import not_found

ON_A_PAGE = 100
SILENCE_S = (3600, 4 * 3600, 86400, 7 * 86400)
_HEALTH_KINDS = "health."
_MOST_EVENTS = 200
_MOST_DIFF = 2000  # lines of a file's difference

Words = Mapping[str, str]
"""The parameters of an address, or the fields of a form."""


def number_of(text: str, most: int) -> int:
    """A page's number in an address; what is none is the first."""
    return max(1, min(int(text[:6]), most)) if text.isascii() and text.isdecimal() else 1


# ---- nodes ----


def nodes_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Nodes: `state` all, free, busy or out; `type` of GPU; `q` part of the name; `page`."""
    found = ask(site, viewer, "/nodes")
    rows, state = sorted(found["nodes"], key=lambda row: natural(row["name"])), words.get("state", "")
    counts = Counter(_node_state(row) for row in rows)
    types = sorted({kind for row in rows for kind in row["gpu_types"]})
    chosen = [
        row for row in rows
        if state in ("", _node_state(row))
        if words.get("type", "") in ("", *row["gpu_types"])
        if words.get("q", "").lower() in row["name"].lower()
    ]  # fmt: skip
    pages = max(1, -(-len(chosen) // ON_A_PAGE))
    page = number_of(words.get("page", "1"), pages)
    return {
        **found, "nodes": chosen[(page - 1) * ON_A_PAGE : page * ON_A_PAGE], "total": len(chosen), "all": len(rows),
        "counts": counts, "types": types, "page": page, "pages": pages, "state_word": state_word,
        "sees": viewer.sees_nodes,
    }  # fmt: skip


def _node_state(row: Mapping[str, Any]) -> str:
    """In a word: what new jobs find."""
    if not row["available"]:
        return "out"
    return "busy" if row["gpus"] and row["gpus_allocated"] >= row["gpus"] else "free"


def state_word(row: Mapping[str, Any]) -> str:
    """A node's state in a word, as sinfo has it: a drained one is that first."""
    if "drain" in row["flags"]:
        return "draining" if row["gpus_allocated"] or row["cpus_allocated"] else "drained"
    return "down" if "not_responding" in row["flags"] else str(row["state"])


def node_view(site: Site, viewer: Viewer, name: str) -> Seen:
    """One node. Raises ProblemError 404 where the viewer may not see it."""
    if len(name) > 256:
        raise not_found("node")
    found = ask(site, viewer, "/nodes", {"node": name})
    if not found["nodes"]:
        raise not_found(f"node {name[:80]!r}")
    gpus = sorted(ask(site, viewer, "/gpus", {"node": name})["gpus"], key=lambda gpu: gpu["index"])
    row = site.store.rows("inventory").get(name, {})
    inventory = row.get("inventory")
    running = ask(site, viewer, "/jobs", {"node": name, "state": "RUNNING,COMPLETING,CONFIGURING"})
    faults = ask(site, viewer, "/health")["rows"] if viewer.operator else []
    return {
        **found, "title": name, "node": found["nodes"][0], "gpus": gpus,
        "by_index": {gpu["index"]: gpu for gpu in gpus},
        "inventory": inventory, "failure": row.get("failure", ""), "drawing": inventory and draw(inventory),
        "instances": {gpu["index"]: _instances(gpu) for gpu in inventory["gpus"]} if inventory else {},
        "link_text": link_text, "state_word": state_word, "jobs": running["jobs"], "job_total": running["total"],
        "health": [fault for fault in faults if fault["node"] == name],
        "history": _events_of(site, viewer, _HEALTH_KINDS, node=name)[:50],
    }  # fmt: skip


def _instances(gpu: Mapping[str, Any]) -> list[str]:
    """A GPU's instances in words: ``7 x 1g.10gb``."""
    counts = Counter(one["profile"] for one in gpu["partitions"])
    return [f"{count} x {profile}" for profile, count in counts.items()]


# ---- health, alerts ----


def health_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Faults and what is out of service, and what health did lately."""
    found = ask(site, viewer, "/health")
    order = {"out": 0, "drained": 1, "fault": 2, "held back": 3, "silent": 4, "warning": 5}
    rows = sorted(found["rows"], key=lambda row: (order.get(row["state"], 9), row["node"], row["gpu"]))
    return {**found, "rows": rows, "history": _events_of(site, viewer, _HEALTH_KINDS)[:50]}


async def return_form(site: Site, viewer: Viewer, form: Words, path: Words) -> Seen | Done:
    """Return GPUs or a node to service."""
    gpus = [one.strip() for one in form.get("gpus", "").split(",") if one.strip()]
    fields = {"node": form.get("node", ""), "gpus": gpus, "reason": form.get("reason", "")}
    done = await write(site, viewer, "POST", "/health/return", fields)
    return Done(_back(form, "/health"), "; ".join(done["done"]) or done["node"])


def alerts_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Alerts, those that fire first, and silences."""
    found = ask(site, viewer, "/alerts")
    order = {"firing": 0, "waiting": 1, "silenced": 2}
    rows = sorted(found["alerts"], key=lambda row: (order[row["state"]], -row["since"]))
    return {**found, "alerts": rows, "durations": SILENCE_S, "now": time.time()}


async def silence_form(site: Site, viewer: Viewer, form: Words, path: Words) -> Seen | Done:
    """Silence a rule."""
    fields: dict[str, Any] = {"rule": form.get("rule", ""), "subject": form.get("subject") or "*"}
    fields |= {"seconds": form.get("seconds", ""), "comment": form.get("comment", "")}
    await write(site, viewer, "POST", "/alerts/silences", fields)
    return Done("/alerts")


async def end_silence_form(site: Site, viewer: Viewer, form: Words, path: Words) -> Seen | Done:
    """End a silence."""
    await write(site, viewer, "DELETE", "/alerts/silences/{silence}", silence=path["silence"])
    return Done("/alerts")


def _back(form: Words, usual: str) -> str:
    """The page that the form was on: that of its node, or the usual one."""
    return f"/nodes/{quote(form['node'], safe='')}" if form.get("back") == "node" and "node" in form else usual


# ---- power ----


def power_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Budgets, and what tenants and nodes draw, those that draw most first."""
    drawn = ask(site, viewer, "/power/drawn")
    tenants, nodes = (sorted(drawn[what], key=lambda row: -row["power_w"]) for what in ("tenants", "nodes"))
    return {
        **ask(site, viewer, "/power"), "tenants": tenants[:ON_A_PAGE], "nodes": nodes[:ON_A_PAGE],
        "left_out": max(0, len(nodes) - ON_A_PAGE), "watts": show_watts,
    }  # fmt: skip


# ---- the controllers ----


def failover_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Who leads, and what a takeover needs; the last takeovers and drills."""
    found = ask(site, viewer, "/failover")
    order = {"problem": 0, "remark": 1, "ok": 2}
    findings = sorted(found["findings"], key=lambda one: order[one["kind"]])
    history = [one for kind in ("takeover", "failover", "drill") for one in _events_of(site, viewer, kind)]
    return {**found, "findings": findings, "history": sorted(history, key=lambda one: -one["seq"])[:20]}


# ---- policy ----


def policy_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """The policy file, and the form to change it."""
    found = ask(site, viewer, "/policy")
    text = found.get("text") or yaml.safe_dump(found["policy"], sort_keys=False, allow_unicode=True)
    return {
        **found,
        "text": text,
        "may_apply": viewer.level >= 2,
        "did": "",
        "checked": None,
        "plan": None,
        "changes": [],
        "applied": None,
    }


async def policy_form(site: Site, viewer: Viewer, form: Words, path: Words) -> Seen | Done:
    """Check a document, plan it, or apply the plan that was seen; what `policy_view` gives, with what came of it."""
    given = policy_view(site, viewer, {})
    do = form.get("do", "")
    if do == "apply":
        applied = await write(site, viewer, "POST", "/policy/apply", {"hash": form.get("hash", "")})
        return {**given, "did": "apply", "applied": applied}
    given["text"] = form.get("text", "").replace("\r\n", "\n")
    body = {"text": given["text"]}
    given |= {"did": "check", "checked": await write(site, viewer, "POST", "/policy/check", body)}
    if do == "plan" and not given["checked"]["mistakes"]:
        plan = await write(site, viewer, "POST", "/policy/plan", body)
        given |= {"did": "plan", "plan": plan, "changes": [changed(one) for one in plan["changes"]]}
    return given


def changed(change: Mapping[str, Any]) -> dict[str, Any]:
    """A change of a plan with its lines: each a sign, `+`, `-` or a space, and a text."""
    lines: list[tuple[str, str]] = []
    for name, field in change["fields"].items():
        old, new = field["from"], field["to"]
        if change["kind"] == "file" and name == "content":
            lines += [(line[:1], line[1:]) for line in _difference(old, new)]
            continue
        if old:
            lines.append(("-", f"{name}: {old}"))
        if new:
            lines.append(("+", f"{name}: {new}"))
    return {**change, "sign": {"add": "+", "change": "~", "remove": "-"}.get(change["action"], "~"), "lines": lines}


def _difference(old: str, new: str) -> list[str]:
    found = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)
    return [line for line in found if not line.startswith(("---", "+++", "@@"))][:_MOST_DIFF]


# ---- events ----


def events_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Events, the newest first: `kind` is how their kinds begin, `q` a text in them."""
    found = ask(site, viewer, "/events")
    kinds = sorted({one["kind"].partition(".")[0] for one in found["events"]})
    rows = _events_of(site, viewer, words.get("kind", ""), text=words.get("q", ""))
    return {**found, "events": rows[:_MOST_EVENTS], "total": len(rows), "kinds": kinds, "most": _MOST_EVENTS}


def _events_of(site: Site, viewer: Viewer, kind: str, *, node: str = "", text: str = "") -> list[dict[str, Any]]:
    """Those that the viewer may see, the newest first."""
    found = ask(site, viewer, "/events")["events"]
    return [
        one for one in reversed(found)
        if one["kind"].startswith(kind)
        if node in ("", one["fields"].get("node"))
        if not text or text.lower() in " ".join(map(str, (one["kind"], *one["fields"].values()))).lower()
    ]  # fmt: skip


# ---- the audit log ----


async def audit_view(site: Site, viewer: Viewer, words: Words) -> Seen:
    """Who did what, the newest first: `user`, `action`, `request_id`; `before`: older than this entry."""
    given = {name: words[name] for name in ("user", "action", "request_id", "before") if words.get(name)}
    found = await ask(site, viewer, "/audit", {**given, "limit": ON_A_PAGE})
    older = found["entries"][-1]["seq"] if len(found["entries"]) == ON_A_PAGE else 0
    return {**found, "older": older}


# ---- the tables ----

_Shown = Seen | Awaitable[Seen]


def _with_words(view: Callable[[Site, Viewer, Words], _Shown]) -> Callable[[Site, Viewer, Request], _Shown]:
    return lambda site, viewer, request: view(site, viewer, request.query_params)


def _node(site: Site, viewer: Viewer, request: Request) -> Seen:
    return node_view(site, viewer, request.path_params["node"])


VIEWS = (
    View("/nodes", _with_words(nodes_view), "nodes.html", "Nodes", "/nodes"),
    View("/nodes/{node}", _node, "node.html", "Node", "/nodes"),
    View("/events", _with_words(events_view), "events.html", "Events", "/events"),
    View("/audit", _with_words(audit_view), "audit.html", "Audit log", "/audit"),
    *(
        View(path, _with_words(view), f"{path[1:]}.html", title, path, operators=True)
        for path, view, title in (
            ("/health", health_view, "Health"),
            ("/alerts", alerts_view, "Alerts"),
            ("/power", power_view, "Power"),
            ("/failover", failover_view, "Failover"),
            ("/policy", policy_view, "Policy"),
        )
    ),
)
FORMS = (
    Form("/health/return", return_form, "health.html", "Health", "/health", operators=True),
    Form("/alerts/silences", silence_form, "alerts.html", "Alerts", "/alerts", operators=True),
    Form("/alerts/silences/{silence}/end", end_silence_form, "alerts.html", "Alerts", "/alerts", operators=True),
    Form("/policy", policy_form, "policy.html", "Policy", "/policy", operators=True, most=4 * MOST_POLICY),
)
