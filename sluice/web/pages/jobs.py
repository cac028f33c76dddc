"""Jobs: the list, and all that is known of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from sluice.client import models
from sluice.profile.summary import render
from sluice.web.access import Viewer
from sluice.web.api.jobs import JobsQuery
from sluice.web.endpoint import Site
from sluice.web.pages.view import Done, Form, Seen, View, ask, soon, whole, write
from sluice.web.problems import ProblemError

ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "PREEMPTED",
    "DEADLINE",
    "BOOT_FAIL",
)
CHIPS = (("", "all"), ("PENDING", "waiting"), ("RUNNING", "running"), (",".join(ENDED), "ended"))
ACTS = {
    "cancel": "The job was cancelled.",
    "hold": "The job is held.",
    "release": "The job was released.",
    "requeue": "The job waits again.",
    "profile": "The job is profiled for 30 s.",
}
_PROFILE_S = 30
_RUNS = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED")
_PAGE = "50"
_PATIENCE_S = 0.7
"""How long a page waits for what the daemon has to find out; after that the page asks for it again by itself."""


def label(job: Mapping[str, Any]) -> str:
    """A job as users write it."""
    if job["array_id"] is None or not job["array_tasks"]:
        return str(job["id"])
    tasks = job["array_tasks"]
    return f"{job['array_id']}_{tasks}" if tasks.isdecimal() else f"{job['array_id']}_[{tasks}]"


def _jobs(site: Site, viewer: Viewer, request: Request) -> Seen:
    given = {name: value for name, value in request.query_params.items() if name in JobsQuery.model_fields and value}
    found = ask(site, viewer, "/jobs", {"limit": _PAGE, **given})
    seen = viewer.seen_jobs()
    jobs = site.store.jobs
    return {
        "found": found, "given": given, "label": label, "chips": CHIPS,
        "title_of": "My jobs" if given.get("user") == viewer.user else "Jobs",
        "choices": {name: sorted(jobs.words(name, seen))[:200] for name in ("account", "partition", "qos")},
    }  # fmt: skip


async def _job(site: Site, viewer: Viewer, request: Request) -> Seen | Done:
    name = request.path_params["job"]
    patience = 10.0 if "wait" in request.query_params else _PATIENCE_S
    try:
        page = ask(site, viewer, "/jobs/{job}", job=name)
    except ProblemError as error:
        if error.status != 404:
            raise
        page = None  # slurmctld has forgotten it; the accounting may know it
    explanation, report = await asyncio.gather(
        soon(None if page is None else ask(site, viewer, "/jobs/{job}/explanation", job=name), patience),
        soon(ask(site, viewer, "/jobs/{job}/report", job=name), 10.0 if page is None else patience),
    )
    if page is None and report[0] is None:
        raise ProblemError(
            404, f"job {name[:40]}: not known, or you may not see it",
            remedy="look at the list of them; one that was just submitted is there in some seconds",
        )  # fmt: skip
    job = None if page is None else page["job"]
    document = whole(models.JobReport, report[0])
    return {
        "job": job, "gpus": [] if page is None else page["gpus"], "explanation": explanation[0], "report": document,
        "not_explained": explanation[1], "not_reported": report[1], "label": name if job is None else label(job),
        "title": name if job is None else label(job), "series": _series(site, viewer, job),
        "acts": _acts(viewer, job), "name": name, "times": spans(job, None if document is None else document["job"]),
    }  # fmt: skip


def spans(job: Mapping[str, Any] | None, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """A job's life as pieces of a bar of 1,000 units, from what slurmctld knows, else from the accounting."""
    if job is not None:
        submit, eligible, start, end = (job[f"{name}_time"] for name in ("submit", "eligible", "start", "end"))
        state, limit = job["state"], job["time_limit_s"]
    elif facts is not None:
        submit, eligible, start, end = (facts[name] for name in ("submit", "eligible", "start", "end"))
        state, limit = facts["state"], None
    else:
        return {"spans": []}
    now = time.time()
    waits, runs = state == "PENDING", state in _RUNS
    begun = None if waits else start
    until = now if waits or runs else end or now
    pieces = []
    if submit:
        ready = min(max(eligible or submit, submit), begun or until)
        pieces += [("held", "held or not due", ready - submit), ("wait", "waiting", (begun or until) - ready)]
    if begun:
        pieces.append(("run", "running", until - begun))
        if runs and limit is not None and limit > 0:
            pieces.append(("limit", "left of its limit", begun + limit - now))
    pieces = [one for one in pieces if one[2] >= 1]
    total = sum(seconds for _, _, seconds in pieces) or 1
    found: list[dict[str, Any]] = []
    at = 0
    for look, name, seconds in pieces:
        width = max(4, round(1000 * seconds / total))
        found.append({"look": look, "name": name, "seconds": seconds, "x": at, "width": width})
        at += width
    return {
        "spans": found, "submit": submit, "start": start, "end": end, "limit_s": limit, "waits": waits, "runs": runs,
    }  # fmt: skip


def _series(site: Site, viewer: Viewer, job: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Of each moment the mean use of the job's GPUs and their memory."""
    if job is None or job["state"] != "RUNNING":
        return []
    found = ask(site, viewer, "/jobs/{job}/series", job=str(job["id"]))
    rows = []
    for at, moment in enumerate(found["times"]):
        percent = [one["utilisation_percent"][at] for one in found["gpus"]]
        memory = [one["memory_used_mib"][at] for one in found["gpus"]]
        known = [one for one in percent if one is not None]
        sizes = [one for one in memory if one is not None]
        if known:
            rows.append(
                {"time": moment, "percent": sum(known) / len(known), "memory_mib": sum(sizes) if sizes else None}
            )
    return rows


def _acts(viewer: Viewer, job: Mapping[str, Any] | None) -> list[str]:
    """What may be done with a job now, as far as this server can know: Slurm decides."""
    if job is None or not (viewer.operator or job["user"] == viewer.user or job["account"] in viewer.coordinates):
        return []
    if job["state"] == "PENDING":
        return ["cancel", "release" if job["reason"].startswith("JobHeld") else "hold"]
    if job["state"] not in ("RUNNING", "SUSPENDED"):
        return ["requeue"]
    may_profile = viewer.operator or job["user"] == viewer.user
    return ["cancel", "requeue", *(["profile"] if may_profile and job["gpus"] else [])]


async def _profile(site: Site, viewer: Viewer, request: Request) -> Seen:
    name = request.path_params["job"]
    found, problem = await soon(ask(site, viewer, "/jobs/{job}/profile", job=name), 60.0)
    lines = None if found is None else render(found)
    return {"name": name, "lines": lines, "not_profiled": problem or "no answer in time", "title": name}


async def _act(site: Site, viewer: Viewer, form: dict[str, str], path: Mapping[str, str]) -> Done:
    do, name = path["act"], path["job"]
    if do not in ACTS:
        raise ProblemError(404, f"{do[:40]!r}: no such thing to do", remedy=f"use one of {', '.join(ACTS)}")
    if do == "profile":
        await write(site, viewer, "POST", "/jobs/{job}/profile/start", {"seconds": _PROFILE_S}, job=name)
        return Done(f"/jobs/{name}/profile", ACTS[do])
    done = await write(site, viewer, "POST", f"/jobs/{{job}}/{do}", job=name)
    return Done(f"/jobs/{name}", "; ".join(done["messages"]) or ACTS[do])


VIEWS = (
    View("/jobs", _jobs, "jobs.html", "Jobs", nav="/jobs"),
    View("/jobs/{job}", _job, "job.html", "Job", nav="/jobs"),
    View("/jobs/{job}/profile", _profile, "profile.html", "Profile", nav="/jobs"),
)
FORMS = (Form("/jobs/{job}/{act}", _act, "error.html", "Job", nav="/jobs"),)
