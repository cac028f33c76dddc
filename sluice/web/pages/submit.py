"""The form that submits a job: it knows what the viewer may use, and shows what a request would become."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from sluice.exchange.acts import MOST_BODY
from sluice.web.access import Viewer
from sluice.web.endpoint import Site
from sluice.web.pages.jobs import label
from sluice.web.pages.view import Done, Form, Seen, View, ask, write
from sluice.web.problems import ProblemError

FIELDS = (
    "script", "name", "account", "partition", "qos", "time_limit", "nodes", "ntasks", "cpus_per_task", "memory", "gpu_type",
    "gpus", "gpu_mem", "array", "dependency", "begin", "constraint", "comment", "work_dir", "output",
)  # fmt: skip
MORE = (
    ("nodes", "Nodes", "1"), ("ntasks", "Tasks", "1"), ("array", "Array", "0-15%4"),
    ("dependency", "Dependency", "afterok:4711"), ("begin", "Begin", "now+2hours"), ("constraint", "Features", "h100"),
    ("output", "Output file", "run-%j.out"), ("work_dir", "Folder", "/home/me/run"), ("comment", "Comment", ""),
)  # fmt: skip
_PUBLISHED_S, _LOOK_S = 5.0, 0.1
_SCRIPT = "#!/bin/bash\n\nsrun nvidia-smi\n"


def request_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """The request that a filled form is; what is empty is Slurm's to choose."""
    words: dict[str, Any] = {name: fields[name].strip() for name in FIELDS if fields.get(name, "").strip()}
    if "script" in fields:
        words["script"] = fields["script"].replace("\r\n", "\n")
    kind = words.pop("gpu_type", "")
    if kind and "gpus" in words and ":" not in words["gpus"]:
        words["gpus"] = f"{kind}:{words['gpus']}"
    elif kind and "gpus" not in words and "gpu_mem" in words and "constraint" not in words:
        words["constraint"] = kind
    return words


def _known(site: Site, viewer: Viewer) -> Seen:
    """What the form offers."""
    who = ask(site, viewer, "/whoami")
    nodes = site.store.rows("nodes").values() if viewer.sees_nodes else ()
    partitions = sorted({name for node in nodes for name in node["partitions"]})
    return {
        "tenants": who.get("tenants", []), "accounts": who["accounts"], "gpu_types": who.get("gpu_types", []),
        "partitions": partitions, "qos": sorted({one for row in who.get("tenants", []) for one in row["qos"]}),
        "more": MORE,
    }  # fmt: skip


def _like(site: Site, viewer: Viewer, number: str) -> dict[str, str]:
    """The fields of a job's request, as far as slurmctld's list has them."""
    job = ask(site, viewer, "/jobs/{job}", job=number)["job"]
    limit = job["time_limit_s"]
    found = {
        "name": job["name"], "account": job["account"], "partition": job["partition"], "qos": job["qos"],
        "gpus": str(job["gpus"] or ""), "gpu_mem": f"{job['gpu_mem_mib']}M" if job["gpu_mem_mib"] else "",
        "nodes": str(job["node_count"]) if job["node_count"] > 1 else "", "constraint": job["features"],
        "time_limit": str(max(1, limit // 60)) if limit is not None and limit > 0 else "",
        "memory": f"{job['memory_mib'] // max(1, job['node_count'])}M" if job["memory_mib"] else "",
        "work_dir": job["work_dir"], "comment": job["comment"],
    }  # fmt: skip
    return {name: str(value or "") for name, value in found.items()} | {"like": label(job)}


def _seen(site: Site, viewer: Viewer, fields: Mapping[str, str], **more: Any) -> Seen:
    filled = {name: fields.get(name, "") for name in FIELDS}
    return {
        **_known(site, viewer), "fields": filled, "like": fields.get("like", ""), "tried": None, "kept": "",
        "more_open": any(filled[name] for name, _, _ in MORE), **more,
    }  # fmt: skip


def _show(site: Site, viewer: Viewer, request: Request) -> Seen:
    given = {name: value for name, value in request.query_params.items() if name in FIELDS and name != "script"}
    number = request.query_params.get("from", "")
    fields = {"script": _SCRIPT, **(_like(site, viewer, number) if number else {}), **given}
    return _seen(site, viewer, fields)


async def _published(site: Site, number: int) -> None:
    """Wait until the snapshot has a job that slurmctld has: its page is what the browser asks for next."""
    for _ in range(int(_PUBLISHED_S / _LOOK_S)):
        if number in site.store.jobs.by_id:
            return
        await asyncio.sleep(_LOOK_S)


async def _submit(site: Site, viewer: Viewer, form: dict[str, str], path: Mapping[str, str]) -> Seen | Done:
    del path
    try:
        if form.get("do") == "submit":
            done = await write(site, viewer, "POST", "/jobs", request_of(form))
            await _published(site, int(done["job_id"]))
            return Done(f"/jobs/{done['job_id']}", "; ".join(done["messages"]))
        if form.get("do") == "smaller":
            form = form | {name: form[f"smaller-{name}"] for name in FIELDS if f"smaller-{name}" in form}
        return _seen(site, viewer, form, tried=await write(site, viewer, "POST", "/what-if", request_of(form)))
    except ProblemError as error:
        unknown = error.status >= 500 or error.status == 408  # it may have been done: the same key finds out
        kept = viewer.asked.key or "" if unknown else ""
        return _seen(site, viewer, form, problem=error, status=error.status, kept=kept)


VIEWS = (View("/submit", _show, "submit.html", "Submit a job", nav="/submit"),)
FORMS = (Form("/submit", _submit, "submit.html", "Submit a job", nav="/submit", most=MOST_BODY),)
