"""`sluice web` next to a real controller: who sees what, tokens, the stream, and what stays while slurmctld is away."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.jobs import submit
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

WEB = "sluice-web"
STORE = "/etc/sluice/tokens.json"
USERS = {"alice": "physics", "mallory": "chemistry", "oper": "chemistry", WEB: "chemistry"}
POLICY = "[global]\nweight.size = 800\nsize-full-gpus = 8\nplacement = sluice\n[tenant physics]\n[tenant chemistry]\n"


@dataclass
class Site:
    """The cluster, its web process, and a token of each user."""

    cluster: DevCluster
    port: int
    tokens: dict[str, str]
    jobs: dict[str, int]
    """A job of each user, by the user's name or what it is for."""

    def sluice(self, *words: str) -> str:
        return self.cluster.run(["sluice", *words], node="ctl1", cwd="/").stdout

    def create(self, user: str) -> str:
        return self.sluice("token", "create", user, "--for", "1h").strip()

    def request(self, path: str, token: str, *, timeout: float = 20) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1{path}")
        request.add_header("Authorization", f"Bearer {token}")
        return urllib.request.urlopen(request, timeout=timeout)

    def ask(self, path: str, user: str = "oper", token: str = "") -> tuple[int, dict[str, Any]]:
        """Status and document."""
        try:
            with self.request(path, token or self.tokens[user]) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except urllib.error.URLError as error:  # not yet there
            return 0, {"detail": str(error.reason)}

    def get(self, path: str, user: str = "oper") -> dict[str, Any]:
        status, document = self.ask(path, user)
        assert status == 200, (path, user, status, document)
        return document

    def seen(self, user: str, query: str = "") -> set[int]:
        """Numbers of the jobs that a user sees."""
        document = self.get(f"/jobs?{query}", user)
        found = {job["id"] for job in document["jobs"]}
        assert document["total"] == len(found)
        return found

    def logs(self) -> str:
        return self.cluster.log_tail("web", 20) + self.cluster.log_tail("controllerd@ctl1", 20)


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    cluster = make_shared_cluster(
        {
            "nodes": [{"names": "n1", "platform": "dgx-h100"}],
            "controllers": 1,
            "agent": True,
            "controllerd": True,
            "accounts": [{"name": "physics"}, {"name": "chemistry"}],
            "users": [{"name": user, "accounts": [account]} for user, account in USERS.items()],
            "slurm_conf": "PrivateData=jobs,usage,users,accounts\nAccountingStorageTRES=gres/gpu\n"
            "AccountingStorageEnforce=associations,limits\n"
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1\n",
            "sluice": {"policy": POLICY},
        }
    )
    cluster.run(["sacctmgr", "-i", "modify", "user", "oper", "set", "AdminLevel=Operator"])
    cluster.run(["sacctmgr", "-i", "modify", "account", "physics", "set", "GrpTRES=gres/gpu=3"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    one = Site(cluster, port, {}, {})
    one.tokens = {user: one.create(user) for user in ("alice", "mallory", "oper")}
    cluster.run(["chgrp", WEB, STORE], node="ctl1", cwd="/")
    cluster.start_program("web", ["sluice", "web", "--port", str(port), "-v"], node="ctl1", user=WEB)
    one.jobs = {
        "alice": int(submit(cluster, "-Aphysics", "--gres=gpu:h100:2", "--mem=10M", cwd="/")),
        "mallory": int(submit(cluster, "-Achemistry", "--gres=gpu:h100:1", "--mem=10M", user="mallory", cwd="/")),
        "waits": int(submit(cluster, "-Aphysics", "--gres=gpu:h100:2", "--mem=10M", cwd="/")),
    }
    until(lambda: one.ask("/jobs?state=RUNNING")[1].get("total"), lambda count: count == 2, shows=one.logs)
    yield one
    cluster.run(["scancel", *map(str, one.jobs.values())], check=False)


def test_it_runs_without_any_right(site: Site) -> None:
    (pid,) = site.cluster.run(["pgrep", "-u", WEB, "-f", "sluice web"], node="ctl1", cwd="/").stdout.split()
    status = site.cluster.run(["cat", f"/proc/{pid}/status"], node="ctl1", cwd="/").stdout
    capabilities = {line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff"))}
    assert capabilities == {"0" * 16}


def test_tenants_see_their_own_jobs_and_operators_all(site: Site) -> None:
    alice, mallory, waits = (site.jobs[name] for name in ("alice", "mallory", "waits"))
    assert site.seen("alice") == {alice, waits}
    assert site.seen("mallory") == {mallory}
    assert site.seen("oper") == {alice, mallory, waits}
    assert site.seen("alice", "user=mallory") == set()
    assert site.seen("alice", "node=n1") == {alice} and site.seen("oper", "node=n1") == {alice, mallory}
    assert site.seen("oper", "account=physics&state=PENDING") == {waits}
    assert site.ask(f"/jobs/{mallory}", "alice")[0] == 404
    assert site.ask(f"/jobs/{mallory}/explanation", "alice")[0] == 404
    assert site.get("/overview", "mallory")["jobs_by_state"] == {"RUNNING": 1}
    assert site.get("/whoami", "oper")["level"] == "operator"


def test_nodes_gpus_and_one_job(site: Site) -> None:
    (node,) = site.get("/nodes", "alice")["nodes"]
    assert (node["name"], node["gpus"], node["gpus_allocated"]) == ("n1", 8, 3)
    number = site.jobs["alice"]
    page = until(
        lambda: site.get(f"/jobs/{number}", "alice"), lambda one: len(one["gpus"]) == 2, shows=site.logs
    )  # the agent's report is some seconds old
    assert page["job"]["nodes"] == "n1" and page["job"]["gpus"] == 2
    gpus = site.get("/gpus", "alice")["gpus"]
    assert len(gpus) == 8 and [gpu["use"] for gpu in gpus].count("free") == 5
    assert {job for gpu in gpus for job in gpu["jobs"]} == {number}, "others' jobs are not named"
    assert all(gpu["memory_total_mib"] for gpu in gpus)


def test_why_a_job_waits(site: Site) -> None:
    found = until(
        lambda: site.get(f"/jobs/{site.jobs['waits']}/explanation", "alice"),
        lambda one: "order" in one and one["slurm"]["reason"] == "AssocGrpGRES",
    )
    assert found["job"] == str(site.jobs["waits"]) and found["slurm"]["account"] == "physics"
    assert site.get(f"/jobs/{site.jobs['waits']}/explanation", "oper")["order"]


def test_tenants_and_their_quota(site: Site) -> None:
    assert {one["name"] for one in site.get("/tenants", "alice")["tenants"]} == {"physics"}
    assert {"physics", "chemistry"} <= {one["name"] for one in site.get("/tenants")["tenants"]}
    assert site.ask("/tenants/chemistry/quota", "alice")[0] == 404
    quota = until(
        lambda: site.get("/tenants/physics/quota", "alice")["quota"],
        lambda rows: any(row["used"] == 2 for row in rows),
        shows=site.logs,
    )
    (gpus,) = (row for row in quota if row["limit"] == 3)
    assert gpus["left"] == 1
    (member,) = (one for one in site.get("/tenants/physics/usage", "alice")["members"] if one["running"])
    assert member["user"] == "alice"


def test_what_operators_have(site: Site) -> None:
    assert site.get("/health")["rows"] == []
    for path in ("/health/history", "/alerts", "/failover"):
        assert site.get(path)
        assert site.ask(path, "alice")[0] == 403
    assert list(site.get("/inventory")["nodes"])
    parts = site.get("/overview")["parts"]
    late = {name: part["problem"] for name, part in parts.items() if part["problem"]}
    assert set(late) <= {"policy"}, late  # this cluster has no policy file


def test_the_stream_shows_a_job_that_starts_to_whom_it_is(site: Site) -> None:
    events: dict[str, list[dict[str, Any]]] = {"alice": [], "mallory": []}

    def follow(user: str, answer: Any) -> None:
        for line in answer:
            if line.startswith(b"data: "):
                events[user].append(json.loads(line[6:]))

    answers = {user: site.request("/stream?topics=jobs", site.tokens[user], timeout=60) for user in events}
    for user, answer in answers.items():
        threading.Thread(target=follow, args=(user, answer), daemon=True).start()
    job = submit(site.cluster, "-Achemistry", "--mem=10M", user="mallory", cwd="/")
    site.jobs["streamed"] = int(job)

    def states(user: str) -> list[str]:
        return [one["row"]["state"] for one in list(events[user]) if one["key"] == job and "row" in one]

    until(lambda: "RUNNING" in states("mallory"), shows=lambda: (events, site.logs()))
    site.cluster.run(["scancel", job])
    until(lambda: "CANCELLED" in states("mallory"), shows=lambda: (events, site.logs()))
    assert not [one for one in events["alice"] if one["key"] == job]


def test_a_token_holds_until_it_is_revoked(site: Site) -> None:
    token = site.create("alice")
    assert site.ask("/whoami", token=token)[1]["user"] == "alice"
    rows = json.loads(site.sluice("token", "list", "--json"))["tokens"]
    assert token not in json.dumps(rows) and {"alice"} <= {row["user"] for row in rows}
    stream = site.request("/stream?topics=parts", token)
    assert next(line for line in stream if line.startswith(b"data: "))
    site.sluice("token", "revoke", token.split("_")[1])
    status, problem = site.ask("/whoami", token=token)
    assert status == 401 and problem["remedy"]
    begun = time.monotonic()
    for _ in stream:  # until it ends
        assert time.monotonic() < begun + 60, "a stream goes on after its token"
    assert site.ask("/whoami", token="a.b.c")[0] == 401
    assert site.ask("/whoami", token="sluice_nothing")[0] == 401


def test_what_is_known_stays_while_slurmctld_is_away(site: Site) -> None:
    before = site.seen("oper")
    assert site.get("/jobs")["stale_since"] is None
    killed = time.time()
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    try:
        stale = until(lambda: site.get("/jobs"), lambda one: one["stale_since"], shows=site.logs)
        assert killed - 5 < stale["stale_since"] <= time.time() and stale["problem"]
        assert site.seen("oper") == before and site.seen("alice") < before
        assert site.get("/nodes", "alice")["nodes"], "roles and PrivateData stay known"
    finally:
        site.cluster.start_daemon("slurmctld@ctl1")
    until(lambda: site.get("/jobs"), lambda one: one["stale_since"] is None, shows=site.logs)


def test_the_daemon_reports_no_problem(site: Site) -> None:
    report = json.loads(site.sluice("controllerd", "status", "--json"))
    problems = {duty["name"]: duty["problem"] for duty in report["duties"] if duty["name"].startswith("snapshot")}
    assert len(problems) == 5 and not any(problems.values()), problems


def test_a_controllerd_that_is_away_is_reported_too(site: Site) -> None:
    site.cluster.stop_daemon("controllerd@ctl1")
    try:
        stale = until(lambda: site.get("/jobs"), lambda one: one["stale_since"], shows=site.logs)
        assert "socket" in stale["problem"] and stale["jobs"]
        assert site.ask(f"/jobs/{site.jobs['alice']}/explanation")[0] == 503
    finally:
        site.cluster.start_daemon("controllerd@ctl1")
    until(lambda: site.get("/jobs"), lambda one: one["stale_since"] is None, shows=site.logs)
