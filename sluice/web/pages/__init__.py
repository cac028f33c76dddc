"""The page: server-rendered views of what the API answers. Works without scripts; with them it is live."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.web.pages import jobs, operators, overview, reports, search, services, submit, tenants
from sluice.web.pages.view import Form, View


@dataclass(frozen=True)
class Entry:
    """An entry of the navigation. `key`: what is typed after ``g``; `writes`: of those who may write."""

    path: str
    title: str
    key: str
    operators: bool = False
    writes: bool = False
    mine: bool = False
    """The path gets the viewer's name."""


NAVIGATION = (
    Entry("/", "Overview", "o"),
    Entry("/jobs", "My jobs", "j", mine=True),
    Entry("/submit", "Submit", "s", writes=True),
    Entry("/services", "Services", "v"),
    Entry("/tenants", "Tenants", "t"),
    Entry("/reports", "Reports", "r"),
    Entry("/nodes", "Nodes", "n"),
    Entry("/health", "Health", "h", operators=True),
    Entry("/alerts", "Alerts", "a", operators=True),
    Entry("/power", "Power", "w", operators=True),
    Entry("/failover", "Failover", "f", operators=True),
    Entry("/policy", "Policy", "p", operators=True),
    Entry("/audit", "Audit", "u", writes=True),
    Entry("/events", "Events", "e"),
)

VIEWS: tuple[View, ...] = (
    *overview.VIEWS, *jobs.VIEWS, *submit.VIEWS, *services.VIEWS, *tenants.VIEWS, *reports.VIEWS, *search.VIEWS,
    *operators.VIEWS,
)  # fmt: skip
FORMS: tuple[Form, ...] = (*jobs.FORMS, *submit.FORMS, *services.FORMS, *operators.FORMS)
