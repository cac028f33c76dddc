"""All views of the page: what the tests of accessibility and `make screenshots` go through."""

from __future__ import annotations

from dataclasses import dataclass

from tests.web.demo_site import Demo


@dataclass(frozen=True, slots=True)
class View:
    """One view. `user`: who looks at it; `needs_gpus`: there is none at a site without."""

    name: str
    path: str
    user: str = "alice"
    needs_gpus: bool = False


def views(demo: Demo) -> list[View]:
    """The views of a demo."""
    always = [
        View("login", "/login", ""),
        View("overview", "/"),
        View("jobs", "/jobs?user=alice"),
        View("submit", "/submit"),
        View("tenants", "/tenants"),
        View("services", "/services"),
        View("reports", "/reports", "root"),
        View("reports-services", "/reports?report=services", "root"),
        View("nodes", "/nodes"),
        View("health", "/health", "oper"),
        View("alerts", "/alerts", "oper"),
        View("power", "/power", "oper"),
        View("failover", "/failover", "oper"),
        View("policy", "/policy", "root"),
        View("audit", "/audit", "root"),
        View("events", "/events", "oper"),
        View("search", "/search?q=al"),
        View("missing", "/nowhere"),
    ]
    if not demo.gpus:
        return always
    mine = [job for job in demo.jobs.values() if job.user == "alice"]
    state_first = {job.state: job.id for job in reversed(mine)}
    more = [View(f"job-{state.lower()}", f"/jobs/{state_first[state]}") for state in state_first]
    return [
        *always,
        *more,
        View("overview-operator", "/", "oper"),
        View("jobs-operator", "/jobs", "oper"),
        View("tenant", "/tenants/physics"),
        View("service", "/services/deepseek-7b", "root"),
        View("service-failed", "/services/llava-34b"),
        View("service-paused", "/services/whisper-large", "root"),
        View("node", f"/nodes/{next(iter(demo.nodes))}"),
        View("node-out", f"/nodes/{list(demo.nodes)[2]}", "oper"),
        *(
            [View("node-mig", "/nodes/gpu05", "oper"), View("node-amd", "/nodes/gpu04", "oper")]
            if demo.gpus == 40
            else []
        ),
    ]
