"""Every endpoint with every role: no row that is not the caller's to see, and all that are."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections import OrderedDict, defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from gres_probe.inventory import Inventory
from policy.model import Policy
from policy.service_jobs import ServicePolicy, ServicesPolicy, compile_services
from policy.service_use import service_documents
from sluice.base.errors import SluiceError
from sluice.client import models
from sluice.controllerd.published_nodes import node_row
from sluice.controllerd.snapshot import job_row
from sluice.exchange import fleet
from sluice.exchange.acts import ActError, Request, parse_request, render_answer, render_error
from sluice.exchange.recent_use import CallerUse
from sluice.exchange.serve_status import ReplicaStatus, Status
from sluice.exchange.serving import State
from sluice.exchange.snapshot import Snapshot, parse_answer
from sluice.web import limits
from sluice.web.access import Viewer
from sluice.web.api import ENDPOINTS
from sluice.web.app import description, make_app
from sluice.web.endpoint import PREFIX, Site
from sluice.web.login import Proxy
from sluice.web.pages.view import ask
from sluice.web.problems import ProblemError
from sluice.web.serve import make_site
from sluice.web.stream import TOPICS
from tests.unit.controllerd.slurm_objects import a_job, a_node
from tests.unit.web.reported import OWNERS, Reported
from tests.web.demo_reports import profile

LAUNCH = "0123456789abcdef"
BUDGET = {
    "name": "secret-of-ops", "nodes": "*", "accounts": [], "policy_w": 9000, "changes": None, "lowered_w": 5000,
    "lowered_until": 9.0, "lowered_by": "oscar", "watts": 5000, "measured_w": 4000.0, "bound_w": 4900.0,
    "capped_gpus": 2, "silent_gpus": 0, "short_w": 0.0,
}  # fmt: skip
PATHS = {"job": "3", "tenant": "chemistry", "node": "n1", "report": "users", "service": "own", "pool": "p5"}


FLEET = fleet.FleetStatus(
    5.0,
    pools={"p5": fleet.PoolStatus("ec2", "n1", 1, 0, "p5")},
    nodes=[fleet.NodeStatus("n1", "p5", "on", "registered", "i-1", jobs=tuple(OWNERS))],
    history=[fleet.Event(1.0, "n1", "p5", "asked")],
)


SERVED = Policy.model_validate(
    {
        "serving": {
            "each_user": {"requests_per_minute": 10, "concurrent": 4},
            "users": {"alice": {"requests_per_minute": 60}},
            "each_tenant": {"concurrent": 32},
            "tenants": {"physics": {"tokens_per_minute": 50_000}},
        },
        "tenants": {"physics": {"members": ["alice"]}},
    }
)


def service_rows() -> dict[str, Any]:
    """One for the tenant alone, one for another tenant, one for all; each with a replica, which is job 3."""
    status = Status({}, {LAUNCH: ReplicaStatus("own", LAUNCH, 3, "n1", State.READY, 16, 3, 1, 10, 20, None, "none", 5.0,
                                               None)})  # fmt: skip
    made = {
        name: ServicePolicy(name=name, tenant="chemistry", user="mallory", engine="vllm", callers=callers,
                            model="/secret-of-chemistry")
        for name, callers in {"own": ("chemistry",), "for-physics": ("physics", "other"), "for-all": ("*",)}.items()
    }  # fmt: skip
    jobs = [
        a_job(3, user="mallory", account="chemistry", name=f"sluice-serve.{name}.{launch}", nodes="n1", state="RUNNING")
        for name, launch in (("own", LAUNCH), ("for-physics", "1" * 16), ("for-all", "2" * 16))
    ]
    return {row["name"]: row for row in service_documents(ServicesPolicy(services=made), jobs, status)}


def a_snapshot(private: list[str]) -> Snapshot:
    made = Snapshot()
    made.put(
        "jobs", {str(n): job_row(a_job(n, user=u, account=a, name=f"secret-of-{u}")) for n, (u, a) in OWNERS.items()}
    )
    made.put("nodes", {"n1": node_row(a_node("n1"))})
    gpu = {"node": "n1", "type": "h100", "use": "whole", "available": True, "health": "ok", "reason": "",
           "utilisation_percent": 5.0, "memory_used_mib": 1, "memory_total_mib": 2, "temperature_c": 30.0}  # fmt: skip
    made.put("gpus", {f"n1/{n}": {**gpu, "index": n, "jobs": [n]} for n in OWNERS})
    tenant = {"parent": "", "shares": "1", "qos": [], "default_qos": "", "borrow": False, "guarantee": {}, "limits": {},
              "running": 1, "submitted": 1, "used": {"gres/gpu": 77}, "used_minutes": {}}  # fmt: skip
    for name in ("physics", "chemistry"):
        users = sorted({u for u, a in OWNERS.values() if a == name})
        use = [{"user": u, "running": 1, "submitted": 1, "used": {}, "used_minutes": {}} for u in users]
        quota = [{"what": "gres/gpu", "guaranteed": None, "limit": 100, "used": 77, "left": 23}]
        made.put_one(
            "tenants",
            name,
            {
                **tenant,
                "name": name,
                "members": users,
                "quota": quota,
                "member_use": use,
                "budget": {"gpus_now": 77, "shares": "1"},
                "example": "sbatch job.sh",
            },
        )
    users = {
        "alice": (0, []), "bob": (0, ["physics"]), "mallory": (0, []), "oscar": (1, []), "root": (2, []),
    }  # fmt: skip
    accounts = {"alice": ["physics"], "bob": ["physics"], "mallory": ["chemistry"]}
    made.put(
        "users", {u: {"level": lv, "coordinates": c, "accounts": accounts.get(u, [])} for u, (lv, c) in users.items()}
    )
    made.put_one(
        "cluster",
        "cluster",
        {"cluster": "c", "slurm_version": "24.11", "private_data": private, "gpu_classes": {"large": ["h100"]}},
    )
    made.put("classes", {"h100/n1": {"name": "h100", "feature": "h100", "node": "n1", "gpus": [{"node": "n1", "index": 0, "uuid": "GPU-1"}]}})  # fmt: skip  # noqa: E501
    made.put("topology", {"s1": {"name": "s1", "kind": "switch", "level": 0, "nodes": "n1", "switches": ""}})
    made.put("failover-history", {"1": {"time": 1.0, "what": "drill", "host": "", "good": True, "detail": "secret-of-ops"}})  # fmt: skip  # noqa: E501
    made.put("inventory", {"n1": {"inventory": asdict(Inventory("n1"))}})
    made.put("events", {str(n): {"seq": n, "time": 1.0, "kind": "health.requeue", "fields": {"job": n, "reason": f"secret-of-{u}"}}  # noqa: E501
                        for n, (u, _) in OWNERS.items()})  # fmt: skip
    made.put("health", {"n1": {"node": "n1", "gpu": "", "state": "fault", "severity": "fatal", "check": "xid", "since": 1.0, "reason": "secret-of-ops", "uuid": ""}})  # fmt: skip  # noqa: E501
    made.put("services", service_rows())
    limits = [*compile_services(SERVED).limits]
    made.put("serving-limits", {f"{one.kind}/{one.name}": one.model_dump() for one in limits if one.kind != "key"})
    made.put("serving-use", {"user/alice": asdict(CallerUse(3, 900)), "tenant/physics": asdict(CallerUse(7, 2000))})
    made.put("serving-open", {"user/alice": {"requests": 2}, "tenant/physics": {"requests": 6}, "tenant/biology": {"requests": 1}})  # fmt: skip  # noqa: E501
    made.put_one("serving", "serving", {"address": "", "counted": True, "open_whole": True})
    made.put("pools", {row["name"]: row for row in fleet.pool_documents(FLEET)})
    made.put("pool-nodes", {"n1": fleet.why_document(FLEET, "n1")})
    made.put("pool-events", {"p5": fleet.history_document(FLEET, "p5")})
    made.put_one("cluster-health", "health", {"mode": "warn", "breaker_since": None, "left_out": 0, "healthy": ""})
    made.put_one("alerts", "alerts", {"schema_version": 1, "alerts": [], "undelivered": 0, "silences": []})
    made.put_one("power", "power", {"budgets": [BUDGET], "stopped": 0})
    drawn = {"gpus": 8.0, "power_w": 900.0, "bound_w": 2400.0, "capped_gpus": 8.0, "silent_gpus": 0.0}
    made.put("power-nodes", {"n1": {"name": "n1", **drawn}})
    made.put("power-tenants", {"chemistry": {"name": "secret-of-ops", **drawn}})
    made.put_one("policy", "policy", {"tenants": {"chemistry": {"description": "secret-of-ops"}}})
    made.put_one("failover", "failover", {"schema_version": 1, "hosts": ["a"], "leader": "a", "up": {"a": True}, "lease": None, "journal": {}, "findings": []})  # fmt: skip  # noqa: E501
    for part in (
        "jobs",
        "nodes",
        "tenants",
        "users",
        "events",
        "health",
        "alerts",
        "policy",
        "power",
        "failover",
        "cluster",
        "inventory",
        "services",
        "pools",
    ):
        made.put_one("parts", part, {"at": 1.0, "stale_since": None, "problem": ""})
    return made


class Web:
    """The application in this process."""

    def __init__(self, folder: Path, private: list[str]) -> None:
        self.site: Site = make_site(folder / "socket", folder / "tokens.json", Proxy())
        self.snapshot = a_snapshot(private)
        self.site.store.apply(parse_answer(self.snapshot.after("", 0)))
        self.app = make_app(self.site, follow=False)

        self.daemon = Reported(folder)

        async def asked(do: str, **words: Any) -> dict[str, Any]:
            return self.daemon.answer(do, **words)

        self.site.feed.ask = asked  # type: ignore[method-assign]
        self.acted: list[Request] = []
        """What root's helper was asked."""
        drift = {
            "schema_version": 1,
            "cluster": "c",
            "file": "applied.json",
            "version": "1",
            "changes": [],
            "notes": [],
        }
        audit = {"schema_version": 1, "entries": []}
        self.acts: dict[str, Any] = defaultdict(
            dict, {"audit": audit, "policy-drift": drift, "profile-summary": profile(1, "gemm")}
        )
        """What it answers, or the error that it raises."""

        async def send(line: bytes) -> bytes:
            self.acted.append(asked := parse_request(line))
            found = self.acts[asked.do]
            return render_error(found) if isinstance(found, ActError) else render_answer(found)

        self.site.acts._send = send  # type: ignore[method-assign]
        self.tokens: dict[str, str] = {}

    def token(self, user: str) -> str:
        if user not in self.tokens:
            _, text = self.site.login.tokens.create(user, ["read"], now=time.time(), seconds=60)
            self.tokens[user] = text
        return self.tokens[user]

    def get(self, path: str, user: str = "", method: str = "GET", **headers: str) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
                mine = {"authorization": f"Bearer {self.token(user)}"} if user else {}
                return await client.request(method, PREFIX + path, headers={**mine, **headers})

        return asyncio.run(call())


class Role:
    """A user of the tests, and what it may see by Slurm's rules: written here again, not taken from what is tested."""

    def __init__(self, user: str, private: list[str]) -> None:
        self.user, self.private = user, set(private)
        self.operator = user in ("oscar", "root")

    def all_or_mine(self, *words: str) -> set[int]:
        """Jobs of the owners whose things it sees, where these words of PrivateData would keep them from it."""
        every = self.operator or not self.private & set(words)
        return {n for n, (u, a) in OWNERS.items() if every or u == self.user or (self.user, a) == ("bob", "physics")}

    @property
    def jobs(self) -> set[Any]:
        return self.all_or_mine("jobs")

    @property
    def jobs_used(self) -> set[Any]:
        return self.all_or_mine("jobs", "usage")

    @property
    def gpus_used(self) -> set[Any]:
        """By the numbers of the jobs that had them."""
        whole = self.operator or not self.private & {"jobs", "usage"}
        return self.jobs_used if self.nodes or not whole else set()

    @property
    def jobs_on_gpus(self) -> set[Any]:
        own = {n for n in self.jobs if OWNERS[n][0] == self.user}
        return self.jobs if self.operator or "nodes" not in self.private else own

    @property
    def nodes(self) -> set[Any]:
        return {"n1"} if self.operator or "nodes" not in self.private else set()

    @property
    def node_use(self) -> set[Any]:
        return self.nodes if self.operator or "usage" not in self.private else set()

    @property
    def accounts(self) -> set[Any]:
        return {OWNERS[n][1] for n in self.all_or_mine("accounts")}

    @property
    def members(self) -> set[Any]:
        """Of chemistry, whose use it sees."""
        found = {OWNERS[n][0] for n in self.all_or_mine("usage", "users")} & {"mallory"}
        return found if "chemistry" in self.accounts else set()

    @property
    def users(self) -> set[Any]:
        """Of a report of users in accounts."""
        return {OWNERS[n][0] for n in self.all_or_mine("usage", "users", "accounts")}

    @property
    def requests(self) -> set[Any]:
        """Accounts of a report of requests by service and account."""
        return {OWNERS[n][1] for n in self.all_or_mine("usage", "accounts")}

    @property
    def services(self) -> set[Any]:
        """That it may call or looks after, whatever PrivateData says."""
        accounts = {a for u, a in OWNERS.values() if u == self.user}
        found = {"for-all"} | ({"for-physics"} if "physics" in accounts else set())
        return {"own", "for-physics", "for-all"} if self.operator or "chemistry" in accounts else found

    @property
    def limits(self) -> set[Any]:
        """Its own, and those of its tenants; for operators those of all that have any or are served."""
        mine = {a for u, a in OWNERS.values() if u == self.user} if not self.operator else {"physics", "biology"}
        return {("user", self.user)} | {("tenant", one) for one in mine}

    def own(self, path: str) -> bool:
        """Whether it sees the object of a path."""
        values = {
            "{service}": "own" in self.services,
            "{job}": 3 in self.jobs,
            "{tenant}": "chemistry" in self.accounts,
            "{node}": bool(self.nodes),
            "{pool}": bool(self.nodes),
        }
        return all(sees for name, sees in values.items() if name in path)


def names(field: str, name: str) -> Any:
    return lambda document: {row[name] for row in document[field]}


ROWS: dict[str, tuple[Any, str]] = {
    "/jobs": (names("jobs", "id"), "jobs"),
    "/events": (lambda document: {row["fields"]["job"] for row in document["events"]}, "jobs"),
    "/gpus": (lambda document: {n for row in document["gpus"] for n in row["jobs"]}, "jobs_on_gpus"),
    "/nodes": (names("nodes", "name"), "nodes"),
    "/inventory": (names("nodes", "node"), "nodes"),
    "/topology": (names("switches", "nodes"), "nodes"),
    "/classes": (lambda document: {name for row in document["classes"] for name in row["nodes"]}, "nodes"),
    "/tenants": (names("tenants", "name"), "accounts"),
    "/tenants/{tenant}/usage": (names("members", "user"), "members"),
    "/reports/jobs": (names("rows", "job_id_raw"), "jobs_used"),
    "/reports/nodes": (names("rows", "node"), "node_use"),
    "/reports/services": (names("rows", "account"), "requests"),
    "/services": (names("services", "name"), "services"),
    "/limits": (lambda document: {(row["kind"], row["name"]) for row in document["limits"]}, "limits"),
    "/pools": (names("pools", "nodes"), "nodes"),
    "/reports/gpus/each": (lambda document: {int(row["gpu"]) + 1 for row in document["rows"]}, "gpus_used"),
    "/reports/{report}": (names("rows", "user"), "users"),
}
"""Of endpoints with rows of several owners: whose they are, and the property of `Role` that says whose they must be."""
OBJECTS = {
    "/jobs/{job}", "/jobs/{job}/explanation", "/jobs/{job}/report", "/jobs/{job}/series", "/nodes/{node}/topology",
    "/services/{service}", "/services/{service}/series", "/tenants/{tenant}", "/tenants/{tenant}/quota",
    "/nodes/{node}/pool", "/pools/{pool}", "/pools/{pool}/history",
}  # fmt: skip
"""Of one object, which is there for who may see it."""
NO_ROWS = {
    "/overview": "counts, which the test below compares",
    "/whoami": "of the caller alone",
    "/audit": "root's helper decides whose (test_proofs.py)",
    "/jobs/{job}/profile": "root's helper decides whose (integration/test_web.py)",
    "/metrics": "names of what there is in every cluster",
}


@pytest.mark.parametrize("private", [[], ["jobs"]])
def test_a_node_of_a_pool_shows_the_jobs_that_the_viewer_sees(tmp_path: Path, private: list[str]) -> None:
    web = Web(tmp_path, private)
    for user in ("alice", "oscar"):
        seen = {row["id"] for row in web.get("/jobs", user).json()["jobs"]}
        assert set(web.get("/nodes/n1/pool", user).json()["jobs"]) == seen
        assert set(web.get("/pools/p5", user).json()["node_list"][0]["jobs"]) == seen


def test_every_endpoint_that_reads_has_a_rule() -> None:
    """One without fails here, so that none is forgotten in the walk below."""
    reads = {one.path for one in ENDPOINTS if one.method == "GET" and not one.operators}
    assert sorted(reads ^ ({*ROWS, *NO_ROWS} | OBJECTS)) == []


@pytest.mark.parametrize("private", [[], ["usage"]])
def test_a_caller_sees_its_own_limits_and_what_is_used_of_them(tmp_path: Path, private: list[str]) -> None:
    web = Web(tmp_path, private)

    def seen(user: str) -> dict[str, list[int | None]]:
        rows = web.get("/limits", user).json()["limits"]
        fields = (
            "requests_per_minute",
            "used_requests_per_minute",
            "tokens_per_minute",
            "used_tokens_per_minute",
            "concurrent",
            "used_concurrent",
        )
        return {f"{row['kind']}/{row['name']}": [row[name] for name in fields] for row in rows}

    neighbours = [None, None, None] if private else [7, 2000, 6]
    assert seen("alice") == {
        "user/alice": [60, 3, None, 900, 4, 2],
        "tenant/physics": [None, neighbours[0], 50_000, neighbours[1], 32, neighbours[2]],
    }
    assert seen("bob")["tenant/physics"] == [None, 7, 50_000, 2000, 32, 6], "its coordinator"
    assert seen("mallory")["user/mallory"] == [10, 0, None, 0, 4, 0], "no line of its own"
    assert seen("oscar")["tenant/biology"] == [None, 0, None, 0, 32, 1], "an operator"
    web.site.store.sections["serving"]["serving"] = {"address": "", "open_whole": False}
    assert seen("alice")["user/alice"] == [60, None, None, None, 4, 2], "there are no records here"
    assert seen("mallory")["user/mallory"][-1] is None, "the busiest alone are known"


def test_a_caller_sees_its_own_keys_that_have_limits_or_are_in_use(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    create = partial(web.site.login.tokens.create, now=time.time(), seconds=60)
    busy, limited, idle, other = (
        create(user, [scope])[0].id
        for user, scope in (("alice", "serve"), ("alice", "serve"), ("alice", "serve"), ("mallory", "serve"))
    )
    sections = web.site.store.sections
    sections["serving-open"] |= {f"key/{one}": {"requests": 3} for one in (busy, other)}
    sections["serving-limits"][f"key/{limited}"] = {"concurrent": 9}

    def keys(user: str) -> dict[str, Any]:
        rows = web.get("/limits", user).json()["limits"]
        return {row["name"]: (row["concurrent"], row["used_concurrent"]) for row in rows if row["kind"] == "key"}

    assert keys("alice") == {busy: (None, 3), limited: (9, 0)}
    assert keys("oscar") == {}, "an operator's own, and it has none"
    sections["serving-limits"]["key/*"] = {"concurrent": 5}
    assert keys("alice") == {busy: (5, 3), limited: (9, 0), idle: (5, 0)}


WORDS = ["accounts", "events", "jobs", "nodes", "usage", "users"]


@pytest.mark.parametrize("private", [[], WORDS, *([word] for word in WORDS)], ids=",".join)
@pytest.mark.parametrize("user", ["alice", "bob", "mallory", "oscar", "root", "stranger"])
def test_every_endpoint_shows_each_role_its_own_and_nothing_else(tmp_path: Path, user: str, private: list[str]) -> None:
    web, role = Web(tmp_path, private), Role(user, private)
    hidden = {f"secret-of-{u}" for n, (u, _) in OWNERS.items() if n not in role.jobs}
    hidden |= set() if role.operator else {"secret-of-ops"}
    for one in (one for one in ENDPOINTS if one.method == "GET"):
        said = web.get(one.path.format(**PATHS), user)
        wanted = (
            403 if one.operators and not role.operator else 200 if one.path in NO_ROWS or role.own(one.path) else 404
        )
        assert said.status_code == wanted, (one.path, said.text)
        assert not [secret for secret in hidden if secret in said.text], (one.path, said.text)
        if said.status_code != 200:
            models.Problem.model_validate(said.json())
            continue
        one.model.model_validate(said.json(), strict=False)
        assert set(said.json()) <= set(one.model.model_fields), f"{one.path} gives what its model has not"
        if one.path in ROWS:
            whose, by = ROWS[one.path]
            assert whose(said.json()) == getattr(role, by), one.path
    assert web.get("/jobs?limit=1000", user).json()["total"] == len(role.jobs)
    overview = web.get("/overview", user).json()
    assert sum(overview["jobs_by_state"].values()) == len(role.jobs)
    assert (overview["gpu_types"] is not None) is bool(role.nodes)
    assert {one["name"] for one in web.get("/whoami", user).json()["tenants"]} == {
        a for u, a in OWNERS.values() if u == user
    }
    for number in OWNERS:
        for path in (path for path in OBJECTS if "{job}" in path):
            code = web.get(path.format(job=number), user).status_code
            assert (code == 200) is (number in role.jobs), (path, number)


@pytest.mark.parametrize("private", [[], ["jobs"], ["nodes"], ["usage"]], ids=",".join)
@pytest.mark.parametrize("user", ["alice", "mallory", "oscar", "stranger"])
def test_callers_of_other_tenants_see_that_a_service_is_there_and_nothing_of_its_jobs(
    tmp_path: Path, user: str, private: list[str]
) -> None:
    web, role = Web(tmp_path, private), Role(user, private)
    found = web.get("/services/for-all", user).json()
    own = user in ("mallory", "oscar")
    assert found["callers"] == ["*"] and found["state"] == "running"
    assert ("secret-of-chemistry" in json.dumps(found)) is own and (found["user"] == "mallory") is own
    assert [one["job"] for one in found["replicas"]] == ([3] if 3 in role.jobs else [])
    assert all(one["nodes"] == ("n1" if role.nodes else "") for one in found["replicas"])
    if user == "alice":
        assert web.get("/services/for-physics", user).json()["callers"] == ["physics"]
    busy = {**service_rows()["for-all"], "waiting": 4, "in_flight": 2}
    web.site.store.sections["services"]["for-all"] = busy
    hidden = not own and "usage" in private
    assert (web.get("/services/for-all", user).json()["waiting"] is None) is hidden


def test_what_is_not_known_is_private(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.site.store.sections["cluster"].clear()
    assert {job["id"] for job in web.get("/jobs", "alice").json()["jobs"]} == {1, 4}
    web.site.store.sections["users"].clear()
    assert web.get("/alerts", "root").status_code == 403


def test_what_is_used_above_a_tenant_is_not_shown_where_usage_is_private(tmp_path: Path) -> None:
    for private, used in (([], 99), (["usage"], None)):
        web = Web(tmp_path, private)
        rows = web.site.store.sections["tenants"]
        rows["division"] = {**rows["physics"], "name": "division", "used": {"gres/gpu": 99}, "members": []}
        rows["physics"] = {**rows["physics"], "parent": "division"}
        assert web.get("/tenants/division", "alice").json()["used"].get("gres/gpu") == used
        assert web.get("/tenants/physics", "alice").json()["used"] == {"gres/gpu": 77}
        quota = web.get("/tenants/division/quota", "alice").json()["quota"]
        assert bool(quota) is (used is not None), "less its own, it would be its neighbours'"


def test_gpus_of_others_jobs_are_private_with_the_nodes(tmp_path: Path) -> None:
    web = Web(tmp_path, ["nodes"])
    assert web.get("/jobs/3", "mallory").json()["gpus"] and web.get("/jobs/3", "oscar").json()["gpus"]
    assert web.get("/jobs/3", "alice").json()["job"]["id"] == 3 and not web.get("/jobs/3", "alice").json()["gpus"]


def test_why_a_part_cannot_be_read_is_for_operators(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    part = {"at": 1.0, "stale_since": 1.0, "problem": "secret-of-ops"}
    web.site.store.sections["parts"]["policy"] = part
    assert web.get("/overview", "oscar").json()["parts"]["policy"] == part
    assert web.get("/overview", "alice").json()["parts"]["policy"] == {**part, "problem": ""}


def test_a_stream_tells_nothing_of_what_is_kept_from_its_viewer(tmp_path: Path) -> None:
    web = Web(tmp_path, ["jobs", "usage"])
    store, streams = web.site.store, web.site.streams
    viewer = Viewer("alice", store)
    stream = streams.enter(viewer, frozenset(TOPICS))

    def change(section: str, key: str, row: Any) -> list[tuple[str, str, Any, Any]]:
        answer = {"reset": False, "epoch": "e", "last": 1, "more": False, "rows": [(section, key, row)]}
        streams.changed(found := store.apply(answer))
        return found

    theirs = job_row(a_job(3, user="mallory", account="chemistry", state="COMPLETED"))
    change("jobs", "3", theirs)
    change("jobs", "99", {**theirs, "id": 99})
    change("events", "9", {"seq": 9, "time": 1.0, "kind": "x", "fields": {"job": 3}})
    change("tenants", "chemistry", {**store.rows("tenants")["chemistry"], "used": {"gres/gpu": 78}, "running": 5})
    change("services", "own", {**service_rows()["own"], "why": "secret"})
    change("services", "for-all", {**service_rows()["for-all"], "waiting": 7, "why": "secret"})
    assert not stream.pending and not stream.wake.is_set(), "not even that something happened"
    change("jobs", "1", job_row(a_job(1, user="alice", account="physics", name="a\nevent: x\n\ndata: \x1b[2J\u2028")))
    change("tenants", "physics", {**store.rows("tenants")["physics"], "running": 5})
    change("services", "for-all", {**service_rows()["for-all"], "ready": 1, "why": "secret"})
    sent = streams._batch(stream).decode()
    events = [piece.split("\n") for piece in sent.rstrip("\n").split("\n\n")]
    assert sorted(lines[0] for lines in events) == ["event: jobs", "event: services", "event: tenants"]
    assert "secret" not in sent
    assert sent.isascii() and "\x1b" not in sent and all(len(lines) == 2 for lines in events), "one line of JSON each"
    streams.leave(stream)


def test_log_in_and_refusals(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    assert web.get("/jobs").status_code == 401
    for bad in ("Bearer x", "Bearer sluice_0123456789abcdef_" + "A" * 43, "Basic eDp5", "Bearer " + "x" * 9000):
        assert web.get("/jobs", authorization=bad).status_code in (401,), bad
    assert web.get("/jobs", **{"x-remote-user": "root"}).status_code == 401, "no proxy was named"
    text = web.token("alice")
    assert web.get("/whoami", "alice").json()["user"] == "alice"
    web.site.login.tokens.revoke([text.split("_")[1]])
    assert web.get("/whoami", "alice").status_code == 401, "at once"
    assert text.split("_", 2)[2] not in (tmp_path / "tokens.json").read_text(), "no secret is kept"


def test_a_list_of_jobs_is_the_same_to_programs_and_to_pages(tmp_path: Path) -> None:
    """Programs get it of texts that are kept; what changes is in the next answer."""
    web = Web(tmp_path, [])
    for reason in ("Priority", 'Prolog: "no"'):
        row = next(iter(web.site.store.jobs.by_id.values())).document() | {"reason": reason}
        web.site.store.jobs.put(row)
        viewer = Viewer("alice", web.site.store)
        assert web.get("/jobs", "alice").json() == ask(web.site, viewer, "/jobs")
        assert reason in [job["reason"] for job in web.get("/jobs", "root").json()["jobs"]]


def test_bounds_and_headers(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    assert web.get("/nodes", "alice", method="POST").status_code == 405
    assert web.get("/jobs", "alice", method="PUT").status_code == 405
    assert web.get("/jobs", "alice", **{"content-length": str(1 << 30)}).status_code == 413
    assert web.get("/nothing", "alice").status_code == 404
    said = web.get("/jobs", "alice")
    assert (
        said.headers["x-content-type-options"] == "nosniff"
        and "default-src 'none'" in said.headers["content-security-policy"]
    )
    assert web.get("/jobs", "alice", **{"if-none-match": said.headers["etag"]}).status_code == 304
    for bad in ("?x=1", "?limit=0", "?limit=1&limit=2", "?sort=user", "?cursor=AAAA", "?cursor=%00"):
        problem = web.get(f"/jobs{bad}", "alice")
        assert problem.status_code == 400 and problem.json()["remedy"], bad
    codes = [web.get("/whoami", authorization="Bearer x").status_code for _ in range(60)]
    assert codes[0] == 401 and codes[-1] == 429


def test_the_description_is_what_is_committed() -> None:
    committed = Path(__file__).parents[3] / "docs/openapi.json"
    assert json.loads(committed.read_text()) == description(), "run: tools/openapi_reference.py"


def test_a_request_that_fails_is_a_problem_with_the_id_of_the_log(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    web.site.store.jobs.page = None  # type: ignore[assignment, method-assign]

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(web.app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
            return await client.get(PREFIX + "/jobs", headers={"authorization": f"Bearer {web.token('alice')}"})

    said = asyncio.run(call())
    assert said.status_code == 500 and said.headers["x-request-id"] in said.json()["remedy"]


def test_one_who_fails_locks_out_nobody_else_at_the_address(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    asked = []

    async def ask(do: str, **words: Any) -> dict[str, Any]:
        asked.append(words["token"])
        if words["token"].startswith("good"):
            return {"user": "alice", "expires": time.time() + 60}
        raise SluiceError("token: its signature is not of this cluster's key")

    web.site.feed.ask = ask  # type: ignore[method-assign]

    async def away(do: str, **words: Any) -> dict[str, Any]:
        raise SluiceError("socket: connection refused")

    assert web.get("/whoami", **{"x-slurm-user-token": "good.b.c"}).json()["user"] == "alice"
    codes = [web.get("/whoami", **{"x-slurm-user-token": f"{n}.b.c"}).status_code for n in range(100)]
    assert codes[0] == 401 and codes[-1] == 429 and len(asked) < 50, "the daemon is not asked more"
    web.site.store.lost("the daemon is away")
    codes = [web.get("/whoami", **{"x-slurm-user-token": "good.b.c"}).status_code]
    web.site.login._known = OrderedDict((key, (user, 0.0)) for key, (user, _) in web.site.login._known.items())
    web.site.feed.ask = away  # type: ignore[method-assign]
    codes += [web.get("/whoami", **{"x-slurm-user-token": "good.b.c"}).status_code]
    assert codes == [200, 503], "a token that cannot be checked was not refused"
    web.site.feed.ask = ask  # type: ignore[method-assign]
    with pytest.raises(ProblemError, match="too many requests"):
        for _ in range(100_000):
            web.site.rates.spend_address("127.0.0.1")
    assert web.get("/nothing").status_code == 429
    assert web.get("/openapi.json").status_code == 429
    assert web.get("/whoami", "bob").status_code == 200
    assert web.get("/whoami", **{"x-slurm-user-token": "good.b.c"}).status_code == 200


def test_a_request_that_takes_long_counts_as_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 1e-7)
    web = Web(tmp_path, [])
    codes = [web.get("/jobs?name=x", "alice").status_code for _ in range(5)]
    assert codes[0] == 200 and codes[-1] == 429
    assert web.get("/jobs", "bob").status_code == 200


def test_a_name_of_the_proxy_is_its_own_and_one(tmp_path: Path) -> None:
    site = make_site(tmp_path / "socket", tmp_path / "tokens.json", Proxy([ipaddress.ip_network("10.0.0.5")]))

    def named(peer: str, *names: str) -> str:
        raw = [(b"x-remote-user", name.encode()) for name in names]
        try:
            return asyncio.run(site.login.viewer(Headers(raw=raw), peer, peer)).user
        except ProblemError as error:
            assert error.status == 401
            return ""

    assert named("10.0.0.5", "alice") == "alice"
    assert [named("10.0.0.6", "alice"), named("", "alice"), named("10.0.0.5", "root", "alice")] == [""] * 3
    assert [named("10.0.0.5", bad) for bad in ("", "a b", "a,b", "../x", "a\n", "-x")] == [""] * 6
    proxy = site.login.proxy
    assert proxy.client("10.0.0.5", "1.1.1.1, 2.2.2.2") == "2.2.2.2" and proxy.client("9.9.9.9", "1.1.1.1") == "9.9.9.9"


def test_errors_are_not_cached_and_parameters_are_few(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    assert web.get("/jobs/77", "alice").headers["cache-control"] == "no-store"
    many = "&".join(f"a{n}" for n in range(2000))
    problem = web.get(f"/jobs?{many}", "alice")
    assert problem.status_code == 400 and "too many" in problem.json()["detail"]
