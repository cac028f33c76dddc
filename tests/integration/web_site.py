"""A cluster with `sluice web` and `sluice actd` on its controller, and a token of each user."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from tests.integration.jobs import submit
from tests.integration.private_slurm import free_ports
from tests.integration.settled import until

WEB = "sluice-web"
STORE = "/etc/sluice/tokens.json"
USERS = {"alice": "physics", "mallory": "chemistry", "oper": "chemistry", "root2": "chemistry", WEB: "chemistry"}
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

    def create(self, user: str, *scopes: str) -> str:
        words = [word for scope in scopes or ("read", "write") for word in ("--scope", scope)]
        return self.sluice("token", "create", user, "--for", "1h", *words).strip()

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

    def send(
        self, path: str, body: Any = None, user: str = "alice", *, method: str = "POST", token: str = "", key: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """Status and document of a write; 0 where nobody answers."""
        headers = {"Authorization": f"Bearer {token or self.tokens[user]}", **({"Idempotency-Key": key} if key else {})}
        data = b"" if body is None else json.dumps(body).encode()
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = f"http://127.0.0.1:{self.port}/api/v1{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=130) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, {"detail": str(error)}

    def start_web(self) -> None:
        """The web process; it dies with the cluster."""
        words = ["sluice", "web", "--port", str(self.port), "-v"]
        self.cluster.start_program("web", words, node="ctl1", user=WEB)

    def start_actd(self) -> None:
        """Root's helper."""
        self.cluster.start_program("actd", ["sluice", "actd", "-v"], node="ctl1")

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
        return "\n".join(self.cluster.log_tail(name, 20) for name in ("web", "actd", "controllerd@ctl1"))


def web_site(
    make_shared_cluster: Callable[..., DevCluster], *, root: Path | None = None, **more: Any
) -> Iterator[Site]:
    """For a fixture. `root`: a tree with another Slurm; `more`: of the cluster's description."""
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
            **more,
        },
        **({} if root is None else {"root": root}),
    )
    cluster.run(["sacctmgr", "-i", "modify", "user", "oper", "set", "AdminLevel=Operator"])
    cluster.run(["sacctmgr", "-i", "modify", "user", "root2", "set", "AdminLevel=Administrator"])
    cluster.run(["sacctmgr", "-i", "modify", "account", "physics", "set", "GrpTRES=gres/gpu=3"])
    (port,) = free_ports(1)  # it is listened on again after each kill
    one = Site(cluster, port, {}, {})
    one.tokens = {user: one.create(user) for user in ("alice", "mallory", "oper", "root2")}
    cluster.run(["chgrp", WEB, STORE], node="ctl1", cwd="/")
    one.start_actd()
    one.start_web()
    one.jobs = {
        "alice": int(submit(cluster, "-Aphysics", "--gres=gpu:h100:2", "--mem=10M", cwd="/")),
        "mallory": int(submit(cluster, "-Achemistry", "--gres=gpu:h100:1", "--mem=10M", user="mallory", cwd="/")),
        "waits": int(submit(cluster, "-Aphysics", "--gres=gpu:h100:2", "--mem=10M", "-t60", cwd="/")),
    }
    until(lambda: one.ask("/jobs?state=RUNNING")[1].get("total"), lambda count: count == 2, shows=one.logs)
    yield one
    cluster.run(["scancel", *map(str, one.jobs.values())], check=False)
