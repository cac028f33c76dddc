"""Search by job, user, node and tenant: only what the viewer may see is found, or suggested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.heat import natural
from sluice.web.pages.jobs import label
from sluice.web.pages.view import Done, Seen, View
from sluice.web.store import Query

_MOST = 20
_SUGGESTED = 4
_MOST_TEXT = 128


def users_seen(site: Site, viewer: Viewer) -> set[str]:
    """Users of whom the viewer sees jobs, or tenants' members."""
    found = set(site.store.jobs.words("user", viewer.seen_jobs()))
    for row in site.store.rows("tenants").values():
        if (seen := viewer.tenant(row)) is not None:
            found.update(seen["members"])
    return found


def _matches(names: Iterable[str], text: str, most: int) -> list[str]:
    """Names that begin with a text before those that have it elsewhere."""
    found = [name for name in names if text in name.lower()]
    return sorted(found, key=lambda name: (not name.lower().startswith(text), natural(name)))[:most]


def find(site: Site, viewer: Viewer, text: str, most: int) -> dict[str, list[Any]]:
    """What a text finds, by kind."""
    low = text.lower()
    tenants = [row["name"] for row in site.store.rows("tenants").values() if viewer.tenant(row) is not None]
    jobs = []
    if text.isascii() and text.isdecimal() and len(text) <= 10 and viewer.sees_number(int(text)):
        jobs.append(site.store.jobs.by_id[int(text)])
    elif not text.isdecimal():
        jobs += site.store.jobs.page(Query(name=text, limit=most), viewer.seen_jobs()).jobs
    return {
        "jobs": [{**job.document(), "label": label(job.document())} for job in jobs],
        "users": _matches(users_seen(site, viewer), low, most),
        "nodes": _matches(site.store.rows("nodes") if viewer.sees_nodes else (), low, most),
        "tenants": _matches(tenants, low, most),
    }


def _search(site: Site, viewer: Viewer, request: Request) -> Seen | Done:
    text = request.query_params.get("q", "").strip()[:_MOST_TEXT]
    asks = "hx-request" in request.headers
    found = find(site, viewer, text, _SUGGESTED if asks else _MOST) if text else {}
    if not asks and text.isdecimal() and found["jobs"]:
        return Done(f"/jobs/{int(text)}")
    return {"text": text, "results": found, "any": any(found.values())}


VIEWS = (View("/search", _search, "search.html", "Search"),)
