"""The endpoints of /api/v1. One table; OpenAPI and the tests are made from it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.base.errors import SluiceError
from sluice.client import models
from sluice.web.access import LEVELS, Viewer
from sluice.web.feed import Feed
from sluice.web.limits import Guard, Rates
from sluice.web.login import Login
from sluice.web.openapi import document
from sluice.web.problems import ProblemError, not_found, response
from sluice.web.store import MOST_CURSOR, SORTS, Query, Store
from sluice.web.stream import TOPICS, Streams

PREFIX = "/api/v1"
_WORDS = 1024


class NoQuery(BaseModel, extra="forbid"):
    """No parameters."""


class JobsQuery(BaseModel, extra="forbid"):
    """Which jobs; several values with commas."""

    user: str = Field("", max_length=_WORDS)
    account: str = Field("", max_length=_WORDS)
    partition: str = Field("", max_length=_WORDS)
    state: str = Field("", max_length=_WORDS, description="As Slurm writes it: PENDING,RUNNING.")
    qos: str = Field("", max_length=_WORDS)
    name: str = Field("", max_length=_WORDS, description="Part of the name.")
    node: str = Field("", max_length=256, description="One node.")
    sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id"
    order: Literal["ascending", "descending"] = "descending"
    limit: int = Field(100, ge=1, le=1000)
    cursor: str = Field("", max_length=MOST_CURSOR, description="`next` of the page before.")


class NodesQuery(BaseModel, extra="forbid"):
    """Which nodes."""

    node: str = Field("", max_length=256, description="One node.")


class EventsQuery(BaseModel, extra="forbid"):
    """Which events."""

    after: int = Field(0, ge=0, description="Only those with a greater `seq`.")


class StreamQuery(BaseModel, extra="forbid"):
    """What to follow."""

    topics: str = Field(",".join(TOPICS), max_length=_WORDS, description=f"Of {', '.join(TOPICS)}, with commas.")


class Site:
    """What all endpoints use."""

    def __init__(self, store: Store, feed: Feed, login: Login) -> None:
        self.store = store
        self.feed = feed
        self.login = login
        self.rates = Rates()
        login.may_fail = self.rates.may_fail
        self.streams = Streams(store)

    def viewed(self, *parts: str) -> dict[str, Any]:
        """The head of an answer from these parts."""
        found = [self.store.part(name) for name in parts]
        stale = [one for one in found if one["stale_since"] is not None]
        return {
            "schema_version": 1,
            "stale_since": min((one["stale_since"] for one in stale), default=None),
            "problem": next((one["problem"] for one in stale), ""),
        }


Answer = Callable[[Site, Viewer, Any, Mapping[str, str]], Any]


@dataclass(frozen=True)
class Endpoint:
    """One path. `operators`: for nobody else."""

    path: str
    answer: Answer
    model: type[BaseModel]
    summary: str
    query: type[BaseModel] = NoQuery
    operators: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in text.split(",") if word)


def query_of(query: JobsQuery) -> Query:
    """What was asked, as the store takes it."""
    return Query(
        _words(query.user), _words(query.account), _words(query.partition), _words(query.state.upper()),
        _words(query.qos), query.name, query.node, query.sort, query.order == "descending", query.limit, query.cursor,
    )  # fmt: skip


def _jobs(site: Site, viewer: Viewer, query: JobsQuery, path: Mapping[str, str]) -> dict[str, Any]:
    del path
    page = site.store.jobs.page(query_of(query), viewer.seen_jobs())
    jobs = [job.document() for job in page.jobs]
    return {**site.viewed("jobs"), "jobs": jobs, "total": page.total, "next": page.next}


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise ProblemError(400, f"job {text[:40]!r}: not a job's number", remedy="write it as 17")
    return int(text)


def _job(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    number = _number(path["job"])
    job = site.store.jobs.by_id.get(number)
    if job is None or not viewer.sees_job(job):
        raise not_found(f"job {number}")
    names = models.JobGpu.model_fields
    mine = (row for row in site.store.rows("gpus").values() if number in row["jobs"] and viewer.gpu(row) is not None)
    gpus = [{name: row[name] for name in names} for row in mine]
    return {**site.viewed("jobs", "nodes"), "job": job.document(), "gpus": gpus}


async def _explanation(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    from sluice.explain.explain_service import withhold_from

    number = _number(path["job"])
    job = site.store.jobs.by_id.get(number)
    if job is None or not viewer.sees_job(job):
        raise not_found(f"job {number}")
    document = (await site.feed.ask("explain", job=str(number)))["explanation"]
    if document is None or document.get("account", job.account) != job.account:
        document = {"schema_version": 1, "job": str(number)}
    names = ("name", "user", "account", "partition", "state", "reason", "priority", "submit_time", "eligible_time",
             "start_time", "end_time", "time_limit_s", "nodes", "refused")  # fmt: skip
    document["slurm"] = {"job_id": number, **{name: getattr(job, name) for name in names}}
    withhold_from(document, set(viewer.private), lambda account: viewer.operator or account in viewer.coordinates)
    return dict(document)


def _nodes(site: Site, viewer: Viewer, query: NodesQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("nodes").values() if viewer.sees_nodes else ()
    return {**site.viewed("nodes"), "nodes": [row for row in rows if query.node in ("", row["name"])]}


def _gpus(site: Site, viewer: Viewer, query: NodesQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = (viewer.gpu(row) for row in site.store.rows("gpus").values() if query.node in ("", row["node"]))
    return {**site.viewed("nodes"), "gpus": [row for row in rows if row is not None]}


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _tenants(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = [found for row in site.store.rows("tenants").values() if (found := viewer.tenant(row)) is not None]
    return {**site.viewed("tenants", "users"), "tenants": [_without(row, "quota", "member_use") for row in rows]}


def _tenant_row(site: Site, viewer: Viewer, name: str) -> dict[str, Any]:
    row = site.store.rows("tenants").get(name)
    found = None if row is None else viewer.tenant(row)
    if found is None:
        raise not_found(f"tenant {name[:80]!r}")
    return found


def _tenant(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {"schema_version": 1, **_without(_tenant_row(site, viewer, path["tenant"]), "quota", "member_use")}


def _quota(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _tenant_row(site, viewer, path["tenant"])
    return {"schema_version": 1, "tenant": row["name"], "quota": row["quota"]}


def _usage(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    row = _tenant_row(site, viewer, path["tenant"])
    return {"schema_version": 1, "tenant": row["name"], "members": row["member_use"]}


def _events(site: Site, viewer: Viewer, query: EventsQuery, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted((row for row in site.store.rows("events").values() if row["seq"] > query.after), key=_seq)
    return {**site.viewed("events"), "events": [one for row in rows if (one := viewer.event(row)) is not None]}


def _seq(row: Mapping[str, Any]) -> int:
    return int(row["seq"])


def _one(site: Site, part: str, section: str) -> Any:
    found = site.store.one(section)
    if found is None:
        said = site.store.part(part)["problem"]
        raise ProblemError(503, f"{part}: not known: {said}", remedy="see: sluice controllerd status")
    return found


def _health(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    head = _one(site, "health", "cluster-health")
    return {**site.viewed("health"), **head, "rows": list(site.store.rows("health").values())}


def _health_history(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted(site.store.rows("events").values(), key=_seq)
    found = [{"time": row["time"], "kind": row["kind"], **row["fields"]} for row in rows]
    return {"schema_version": 1, "events": [one for one in found if one["kind"].startswith("health.")]}


def _alerts(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("alerts"), **_one(site, "alerts", "alerts")}


def _policy(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("policy"), "policy": _one(site, "policy", "policy")}


def _failover(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {**site.viewed("failover"), **_one(site, "failover", "failover")}


def _inventory(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    rows = site.store.rows("inventory") if viewer.sees_nodes else {}
    nodes = [row["inventory"] for row in rows.values() if "inventory" in row]
    failures = {name: row["failure"] for name, row in rows.items() if "failure" in row}
    return {**site.viewed("inventory"), "nodes": nodes, "failures": failures}


def _whoami(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "user": viewer.user,
        "level": LEVELS[viewer.level],
        "coordinates": sorted(viewer.coordinates),
        "accounts": sorted(viewer.accounts),
    }


def _overview(site: Site, viewer: Viewer, query: Any, path: Mapping[str, str]) -> dict[str, Any]:
    cluster = _one(site, "cluster", "cluster")
    gpus = list(site.store.rows("gpus").values()) if viewer.sees_nodes else None
    return {
        "schema_version": 1,
        **{name: cluster[name] for name in ("cluster", "slurm_version", "private_data")},
        "connected": site.store.connected,
        "parts": {name: viewer.part(site.store.part(name)) for name in sorted(site.store.rows("parts"))},
        "jobs_by_state": site.store.jobs.counts(viewer.seen_jobs()),
        "gpus": None if gpus is None else len(gpus),
        "gpus_in_use": None if gpus is None else sum(row["use"] != "free" for row in gpus),
        "gpus_out": None if gpus is None else sum(row["health"] == "out" for row in gpus),
    }


ENDPOINTS = (
    Endpoint("/overview", _overview, models.Overview, "The cluster in one look"),
    Endpoint("/whoami", _whoami, models.Whoami, "The caller"),
    Endpoint("/jobs", _jobs, models.JobList, "Jobs", JobsQuery),
    Endpoint("/jobs/{job}", _job, models.JobPage, "One job"),
    Endpoint("/jobs/{job}/explanation", _explanation, models.Explanation, "Why a job waits, or has its place"),
    Endpoint("/nodes", _nodes, models.NodeList, "Nodes", NodesQuery),
    Endpoint("/gpus", _gpus, models.GpuList, "GPUs", NodesQuery),
    Endpoint("/tenants", _tenants, models.TenantList, "Tenants"),
    Endpoint("/tenants/{tenant}", _tenant, models.Tenant, "One tenant"),
    Endpoint("/tenants/{tenant}/quota", _quota, models.Quota, "What a tenant may use, and uses"),
    Endpoint("/tenants/{tenant}/usage", _usage, models.TenantUsage, "What a tenant's members use"),
    Endpoint("/events", _events, models.EventList, "What happened", EventsQuery),
    Endpoint("/inventory", _inventory, models.Inventory, "What nodes were probed to have"),
    Endpoint("/health", _health, models.HealthList, "Faults, and what is out of service", operators=True),
    Endpoint("/health/history", _health_history, models.HealthHistory, "What health did", operators=True),
    Endpoint("/alerts", _alerts, models.AlertList, "Alerts and silences", operators=True),
    Endpoint("/policy", _policy, models.PolicyShown, "The policy file", operators=True),
    Endpoint("/failover", _failover, models.FailoverStatus, "The controllers", operators=True),
)
STREAM = f"{PREFIX}/stream"


def description() -> dict[str, Any]:
    """The API's description."""
    return document(PREFIX, ENDPOINTS, StreamQuery)


def parse_query(model: type[BaseModel], request: Request) -> Any:
    """The parameters of a request. Raises ProblemError."""
    given = request.query_params
    try:
        if len(given) > len(model.model_fields) + 1:
            raise ProblemError(
                400, "too many parameters", remedy=f"known are: {', '.join(model.model_fields) or 'none'}"
            )
        if len(given) != len(given.multi_items()):
            raise ProblemError(400, "a parameter is given twice", remedy="give several values with commas")
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ProblemError(
            400,
            f"parameter {name[:80]!r}: {first['msg']}",
            remedy=f"known are: {', '.join(model.model_fields) or 'none'}",
        ) from error


def make_app(site: Site, *, follow: bool = True) -> Guard:
    """The application. `follow`: with the daemon's snapshot, until it ends."""

    async def caller(request: Request) -> Viewer:
        peer = request.client.host if request.client else ""
        viewer = await site.login.viewer(request.headers, peer, request.state.address)
        site.rates.spend_user(viewer.user)
        if not site.store.complete:
            raise ProblemError(
                503, f"there is no snapshot yet: {site.store.problem or 'it is being read'}", remedy="try again",
                headers={"retry-after": "2"},
            )  # fmt: skip
        return viewer

    def route(endpoint: Endpoint) -> Route:
        async def handle(request: Request) -> Response:
            viewer = await caller(request)
            if endpoint.operators and not viewer.operator:
                raise ProblemError(403, f"{request.url.path}: for operators of Slurm", remedy="ask one of them")
            began = time.thread_time()
            try:
                found = endpoint.answer(site, viewer, parse_query(endpoint.query, request), request.path_params)
                if isinstance(found, Awaitable):
                    found = await found
                    began = time.thread_time()
                body = json.dumps(found, separators=(",", ":")).encode()
            except ProblemError:
                raise
            except SluiceError as error:
                raise ProblemError(400 if error.usage else 503, error.what, remedy=error.remedy) from error
            finally:
                site.rates.spend_time(viewer.user, time.thread_time() - began)
            tag = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            headers = {"etag": tag, "cache-control": "private, no-cache", "vary": ", ".join(site.login.credentials)}
            if tag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(body, headers=headers, media_type="application/json")

        return Route(PREFIX + endpoint.path, handle, methods=["GET"])

    async def stream(request: Request) -> Response:
        viewer = await caller(request)
        topics = _words(parse_query(StreamQuery, request).topics)
        if not topics or not topics <= set(TOPICS):
            raise ProblemError(400, "topics: not known", remedy=f"use {', '.join(TOPICS)}")
        one = site.streams.enter(viewer, topics)
        host = request.client.host if request.client else ""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}

        async def again() -> Viewer:
            return await site.login.viewer(request.headers, host, request.state.address)

        return StreamingResponse(site.streams.send(one, again), headers=headers, media_type="text/event-stream")

    async def missing(request: Request, error: Exception) -> Response:
        gone = ProblemError(404, f"{request.url.path[:200]}: no such path", remedy=f"see {PREFIX}/openapi.json")
        try:
            site.rates.spend_address(request.state.address)
        except ProblemError as too_many:
            gone = too_many
        return response(gone, request.state.request_id)

    async def openapi(request: Request) -> Response:
        site.rates.spend_address(request.state.address)
        return Response(json.dumps(description()), media_type="application/json")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        import asyncio

        site.feed._changed = site.streams.changed
        task = asyncio.create_task(site.feed.follow()) if follow else None
        yield
        if task is not None:
            task.cancel()

    routes = [Route(f"{PREFIX}/openapi.json", openapi), Route(STREAM, stream), *map(route, ENDPOINTS)]

    async def broken(request: Request, error: Exception) -> Response:
        known = request.state.request_id
        return response(ProblemError(500, "this request failed", remedy=f"see the log for {known}"), known)

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)  # noqa: S101 - it is the handler of these
        if error.status == 401:
            try:
                site.rates.failed(request.state.address)
            except ProblemError as too_many:
                error = too_many
        return response(error, request.state.request_id)

    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={404: missing, Exception: broken, ProblemError: problem}
    )
    return Guard(app, site.login.proxy.client)


assert set(SORTS) == set(JobsQuery.model_fields["sort"].annotation.__args__)  # type: ignore[union-attr]  # noqa: S101
