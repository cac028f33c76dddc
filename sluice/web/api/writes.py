"""What changes something. Root's helper does it as the caller, whose own proof it verifies (`sluice.web.acts`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from sluice.client import models
from sluice.exchange.acts import MOST_BODY, MOST_POLICY
from sluice.web.access import Viewer
from sluice.web.endpoint import Answer, Endpoint, Site
from sluice.web.problems import ProblemError, not_found

_JOB = re.compile(r"([0-9]{1,10})(?:_[0-9]{1,10})?\Z")
_SILENCE = re.compile(r"[0-9a-f]{8,64}\Z")
_POLICY_BODY = 2 * MOST_POLICY + (64 << 10)


def _words(body: Any) -> dict[str, Any]:
    return dict(body.model_dump(exclude_unset=True, exclude_none=True))


async def _submit(site: Site, viewer: Viewer, body: models.JobRequest, path: Mapping[str, str]) -> dict[str, Any]:
    return await site.acts.ask(viewer, "submit", **_words(body))


async def _what_if(site: Site, viewer: Viewer, body: models.JobRequest, path: Mapping[str, str]) -> dict[str, Any]:
    return await site.acts.ask(viewer, "what-if", **_words(body))


async def _on_job(site: Site, viewer: Viewer, do: str, name: str, words: dict[str, Any]) -> dict[str, Any]:
    match = _JOB.match(name)
    if match is None:
        raise ProblemError(400, f"job {name[:40]!r}: not a job's number", remedy="write it as 17, or a task as 17_4")
    try:
        return await site.acts.ask(viewer, do, job=name, **words)
    except ProblemError as error:
        if error.status in (403, 404) and viewer.withholds("jobs") and not _is_seen(site, viewer, int(match[1])):
            raise not_found(f"job {name}") from error  # whether there is one is not its to know
        raise


def _is_seen(site: Site, viewer: Viewer, number: int) -> bool:
    """Whether it may see a job, or a task of an array, whose own number is another one."""
    jobs = site.store.jobs.by_id
    return any(number in (one, jobs[one].array_id) for one in viewer.seen_jobs() or ())


def _act(do: str) -> Answer:
    async def answer(site: Site, viewer: Viewer, body: Any, path: Mapping[str, str]) -> dict[str, Any]:
        return await _on_job(site, viewer, do, path["job"], {})

    return answer


async def _update(site: Site, viewer: Viewer, body: models.JobChange, path: Mapping[str, str]) -> dict[str, Any]:
    words = _words(body)
    if not words:
        raise ProblemError(422, "nothing to change", remedy=f"send one of {', '.join(models.JobChange.model_fields)}")
    return await _on_job(site, viewer, "update", path["job"], words)


def _change_profile(do: str) -> Answer:
    async def answer(site: Site, viewer: Viewer, body: Any, path: Mapping[str, str]) -> dict[str, Any]:
        return await _on_job(site, viewer, f"profile-{do}", path["job"], _words(body))

    return answer


async def _profile(site: Site, viewer: Viewer, query: models.ProfileQuery, path: Mapping[str, str]) -> dict[str, Any]:
    return await _on_job(site, viewer, "profile-summary", path["job"], query.model_dump())


def _pass_on(do: str) -> Answer:
    async def answer(site: Site, viewer: Viewer, body: Any, path: Mapping[str, str]) -> dict[str, Any]:
        return await site.acts.ask(viewer, do, **_words(body))

    return answer


async def _end_silence(site: Site, viewer: Viewer, body: Any, path: Mapping[str, str]) -> dict[str, Any]:
    if not _SILENCE.match(path["silence"]):
        raise not_found(f"silence {path['silence'][:80]!r}")
    return await site.acts.ask(viewer, "silence-end", id=path["silence"])


_write = functools.partial(Endpoint, method="POST", scope="write")


async def _audit(site: Site, viewer: Viewer, query: models.AuditQuery, path: Mapping[str, str]) -> dict[str, Any]:
    return await site.acts.ask(viewer, "audit", **query.model_dump())


async def _drift(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return await site.acts.ask(viewer, "policy-drift")


ENDPOINTS = (
    Endpoint(
        "/audit", _audit, models.AuditList, "What the caller did; to administrators, who did what", models.AuditQuery,
        by_proof=True,
    ),
    Endpoint(
        "/policy/drift", _drift, models.PolicyDrift, "What was changed by hand since a policy was applied",
        operators=True, by_proof=True,
    ),
    _write("/jobs", _submit, models.Submitted, "Submit a job", body=models.JobRequest, status=201, most_body=MOST_BODY),
    _write(
        "/what-if", _what_if, models.WhatIf, "Would a request start, when, where; what smaller one would sooner",
        body=models.JobRequest, most_body=MOST_BODY,
    ),
    *(
        _write(f"/jobs/{{job}}/{do}", _act(do), models.JobDone, f"{do.capitalize()} a job, or a task as 17_4")
        for do in ("cancel", "hold", "release", "requeue")
    ),
    _write(
        "/jobs/{job}/profile/start", _change_profile("start"), models.ProfileDone, "Start a profile of a job",
        body=models.ProfileRequest,
    ),
    _write(
        "/jobs/{job}/profile/stop", _change_profile("stop"), models.ProfileDone, "Stop the profile of a job",
        body=models.ProfileQuery,
    ),
    Endpoint(
        "/jobs/{job}/profile", _profile, models.ProfileSummary,
        "What the GPUs of a job, or of a step, did while they were profiled", models.ProfileQuery, by_proof=True,
    ),
    _write("/jobs/{job}", _update, models.JobDone, "Change a job", method="PATCH", body=models.JobChange),
    _write(
        "/health/return", _pass_on("health-return"), models.Returned, "Return GPUs to service",
        body=models.ReturnRequest, operators=True,
    ),
    _write(
        "/power/budget", _pass_on("power-budget"), models.BudgetLowered, "Lower a budget of watts for a while",
        body=models.BudgetRequest, operators=True,
    ),
    _write(
        "/alerts/silences", _pass_on("silence"), models.Silenced, "Send no notices of a rule for a while",
        body=models.SilenceRequest, status=201, operators=True,
    ),
    _write(
        "/alerts/silences/{silence}", _end_silence, models.Silenced, "End a silence",
        method="DELETE", operators=True,
    ),
    _write(
        "/policy/check", _pass_on("policy-check"), models.PolicyChecked, "The mistakes of a policy file",
        body=models.PolicyText, operators=True, most_body=_POLICY_BODY,
    ),
    _write(
        "/policy/plan", _pass_on("policy-plan"), models.PolicyPlan, "What a policy would change",
        body=models.PolicyText, operators=True, most_body=_POLICY_BODY,
    ),
    _write(
        "/policy/apply", _pass_on("policy-apply"), models.PolicyApplied, "Apply a plan that was seen",
        body=models.ApplyRequest, operators=True,
    ),
)  # fmt: skip
