"""Writes: what goes to root's helper, and what is refused before."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.client import models
from sluice.controllerd.snapshot import job_row
from sluice.exchange.acts import MOST_BODY, MOST_SCRIPT, ActError
from sluice.exchange.snapshot import parse_answer
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import PREFIX
from sluice.web.login import Proxy
from tests.unit.controllerd.slurm_objects import a_job
from tests.unit.web.test_access import Web

SUBMIT = {"script": "#!/bin/sh\n"}
WRITES = [one for one in ENDPOINTS if one.scope == "write"]
BODIES: dict[str, dict[str, Any]] = {
    "JobRequest": SUBMIT,
    "JobChange": {"comment": "x"},
    "ReturnRequest": {"node": "n1"},
    "SilenceRequest": {"rule": "x"},
    "BudgetRequest": {"name": "hall"},
    "PolicyText": {"text": "tenants: {}"},
    "ApplyRequest": {"hash": "0" * 64},
    "ServiceChange": {"most": 2},
    "ProfileRequest": {"seconds": 30},
    "ProfileQuery": {"step": "0"},
}


def send(
    web: Web, path: str, body: Any = None, user: str = "alice", *, method: str = "POST", scopes: tuple[str, ...] = (),
    content: bytes | None = None, **headers: str,
) -> httpx.Response:  # fmt: skip
    _, token = web.site.login.tokens.create(user, scopes or ("read", "write"), now=time.time(), seconds=60)

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(web.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
            sent = json.dumps(body).encode() if content is None and body is not None else content
            mine = {"authorization": f"Bearer {token}", **({"content-type": "application/json"} if sent else {})}
            return await client.request(method, PREFIX + path, content=sent, headers={**mine, **headers})

    return asyncio.run(call())


@pytest.mark.parametrize("one", WRITES, ids=lambda one: f"{one.method} {one.path}")
def test_each_write_needs_a_proof_that_may_write_and_passes_it_on(tmp_path: Path, one: Any) -> None:
    web = Web(tmp_path, [])
    path = one.path.format(job="3", silence="12345678", service="own")
    body = None if one.body is None else BODIES[one.body.__name__]
    said = send(web, path, body, "root", method=one.method, scopes=("read",))
    assert said.status_code == 403 and "--scope write" in said.json()["remedy"]
    assert web.get(path, method=one.method).status_code == 401
    assert (send(web, path, body, "alice", method=one.method).status_code == 403) is one.operators
    assert bool(web.acted) is not one.operators
    web.acted.clear()
    send(web, path, body, "root", method=one.method, **{"idempotency-key": "k 1"})
    (asked,) = web.acted
    assert asked.proof.kind == "sluice" and asked.proof.text.startswith("sluice_") and asked.key == "k 1"
    assert asked.request_id and asked.words.items() >= (body or {}).items()


def test_what_the_helper_says_is_the_answer(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.acts["submit"] = {"schema_version": 1, "job_id": 17, "messages": []}
    said = send(web, "/jobs", SUBMIT)
    assert said.status_code == 201 and models.Submitted.model_validate(said.json()).job_id == 17
    assert said.headers["cache-control"] == "no-store"
    web.acts["submit"] = ActError(429, "too many", remedy="wait", retry_after=3)
    said = send(web, "/jobs", SUBMIT)
    assert said.status_code == 429 and said.headers["retry-after"] == "3" and said.json()["remedy"] == "wait"


def test_that_there_is_a_job_of_another_is_not_said(tmp_path: Path) -> None:
    web = Web(tmp_path, ["jobs"])
    web.acts["cancel"] = ActError(403, "Access/permission denied")
    assert send(web, "/jobs/3/cancel", user="alice").status_code == 404, "it is mallory's"
    assert send(web, "/jobs/3/cancel", user="oscar").status_code == 403
    task = send(web, "/jobs/17_4/cancel", user="alice").json()
    web.acts["cancel"] = ActError(404, "Invalid job id specified")
    none = send(web, "/jobs/17_4/cancel", user="alice").json()
    assert task["status"] == 404 and task["detail"] == none["detail"], "it has a number of its own, or is very new"
    web.acts["cancel"] = ActError(403, "Access/permission denied")
    web.snapshot.put("jobs", {"21": job_row(a_job(21, user="alice", array_id=17, array_tasks="4"))})
    web.site.store.apply(parse_answer(web.snapshot.after("", 0)))
    assert send(web, "/jobs/17_4/cancel", user="alice").status_code == 403, "its own"
    web = Web(tmp_path, [])
    web.acts["cancel"] = ActError(403, "Access/permission denied")
    assert send(web, "/jobs/3/cancel", user="alice").status_code == 403


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"{", {}),
        (400, b"\xff\xfe", {}),
        (400, b"[" * 100_000, {}),
        (415, b"{}", {"content-type": "text/plain"}),
        (415, b"script=x", {"content-type": "application/x-www-form-urlencoded"}),
        (422, b"{}", {}),
        (422, b"[]", {}),
        (422, b'{"script": "#!/bin/sh", "uid": 0}', {}),
        (422, b'{"script": "#!/bin/sh", "name": "a\\nb"}', {}),
        (422, b'{"script": "#!/bin/sh", "account": "--uid=0"}', {}),
        (422, b'{"script": "#!/bin/sh", "partition": "-x"}', {}),
        (422, b'{"script": "#!/bin/sh", "time_limit": "5 --uid=0"}', {}),
        (422, b'{"script": "#!/bin/sh", "work_dir": "etc"}', {}),
        (422, b'{"script": "#!/bin/sh", "gres": "gpu:1 x"}', {}),
        (422, b'{"script": "#!/bin/sh", "environment": {"A=B": "x"}}', {}),
        (422, b'{"script": "#!/bin/sh", "environment": {"A": "x\\u0000y"}}', {}),
        (422, json.dumps({"script": "x" * (MOST_SCRIPT + 1)}).encode(), {}),
        (422, b'{"script": "#!/bin/sh", "gpus_per_node": true}', {}),
        (422, b'{"script": "#!/bin/sh", "ntasks": "2"}', {}),
        (422, b'{"script": "#!/bin/sh", "ntasks": 2.5}', {}),
        (422, b'{"script": "#!/bin/sh", "gpu_spread": "yes"}', {}),
        (413, b" " * (MOST_BODY + 1), {}),
        (400, b'{"script": "#!/bin/sh"}', {"idempotency-key": ""}),
        (400, b'{"script": "#!/bin/sh"}', {"idempotency-key": "x" * 129}),
    ],
)
def test_bad_requests_do_not_reach_the_helper(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str]
) -> None:
    web = Web(tmp_path, [])
    said = send(web, "/jobs", content=body, **headers)
    assert said.status_code == status, said.text
    assert models.Problem.model_validate(said.json()).remedy and not web.acted


def test_a_number_is_a_number_and_one_point_zero_is_one(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    for watts in (b"false", b'"0"', b"0.5"):
        said = send(web, "/power/budget", user="root", content=b'{"name": "hall", "watts": %s}' % watts)
        assert said.status_code == 422 and not web.acted, "a budget of no watts"
    assert send(web, "/power/budget", user="root", content=b'{"name": "hall", "watts": 5.0e3}').status_code == 200
    assert web.acted[-1].words["watts"] == 5000


def test_large_bodies_are_for_scripts_alone(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    body = json.dumps({"comment": "x" * (65 << 10)}).encode()
    assert send(web, "/jobs/3", content=body, method="PATCH").status_code == 413
    web.acts["submit"] = {"schema_version": 1, "job_id": 1, "messages": []}
    assert send(web, "/jobs", {"script": "#!/bin/sh\n" + "\n" * (MOST_SCRIPT - 10)}).status_code == 201


def test_who_holds_large_bodies_gets_no_more(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    with web.site.acts.bodies.room("alice", MOST_BODY), web.site.acts.bodies.room("alice", MOST_BODY):
        assert send(web, "/jobs", SUBMIT).status_code == 429
        web.acts["submit"] = {"schema_version": 1, "job_id": 1, "messages": []}
        assert send(web, "/jobs", SUBMIT, "mallory").status_code == 201
    assert send(web, "/jobs", SUBMIT).status_code == 201


def test_whom_a_proxy_names_can_only_read(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.site.login.proxy = Proxy([ipaddress.ip_network("127.0.0.1")])
    said = web.get("/whoami", **{"x-remote-user": "root"})
    assert said.status_code == 200
    for one in WRITES:
        said = web.get(
            one.path.format(job="1", silence="12345678", service="own"), method=one.method, **{"x-remote-user": "root"}
        )
        assert said.status_code == 403 and "proxy" in said.json()["detail"], one.path
    assert not web.acted


def test_a_helper_that_is_away_is_503_and_says_so(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    del web.site.acts._send
    said = send(web, "/jobs", SUBMIT)
    assert said.status_code == 503 and "actd" in said.json()["remedy"] and said.headers["retry-after"]
