"""A cluster with services of models, and gateways that this process plays."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from dev_cluster.layout import INSIDE, THIS_SYSTEM, python_in_tree
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON
from sluice.exchange.serving import JOB_PREFIX
from sluice.exchange.snapshot import ask
from tests.integration.settled import until
from tests.integration.stand_in_replica import REAL

_SERVICE = {
    "tenant": "physics",
    "user": "alice",
    "engine": "openai",
    "command": ["/bin/true"],
    "cpus": 1,
    "memory": "100M",
    "replicas": {"least": 0, "most": 2, "slots": 4},
    "idle": "2s",
    "walltime": "10m",
    "ready_within": "20s",
    "drain_within": "5s",
    "target": {"queue_delay": "500ms"},
}
ENGINE = "small_engine.py"
SERVICES: dict[str, dict[str, Any]] = {
    "words": {},
    "short": {"walltime": "60s", "replicas": {"least": 1, "most": 1, "slots": 4}, "drain_within": "1s"},
    "broken": {"partition": "nowhere"},
    REAL: {"command": ["/usr/bin/python3", ENGINE, "{socket}", "{service}"], "replicas": {"least": 0, "most": 1}},
}


def policy(services: Mapping[str, dict[str, Any]], *, in_tree: bool = False) -> dict[str, Any]:
    """The policy file. `in_tree`: of a cluster of another system's tree."""
    engine = f"{THIS_SYSTEM if in_tree else ''}{Path(__file__).with_name('small_engine.py')}"
    found = {name: _SERVICE | own for name, own in services.items()}
    for one in found.values():
        one["command"] = [engine if word == ENGINE else word for word in one["command"]]
    return {
        "version": 1,
        "tenants": {"physics": {"members": ["alice"]}, "chemistry": {"members": ["mallory"]}},
        "services": found,
        "serving": {"parts_network": "trusted"},
    }


@dataclass
class Gateway:
    """What a gateway's worker says, again and again."""

    site: ServeSite
    service: str
    words: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        usual = {"waiting": 0, "oldest_s": 0.0, "in_flight": 0, "tokens_in_flight": 0, "delay_s": 0.0}
        return {"service": self.service, "worker": "test:1", **usual, **self.words}


@dataclass
class ServeSite:
    """The cluster; `needs`: of each service, what its gateways say."""

    cluster: DevCluster
    needs: dict[str, Gateway] = field(default_factory=dict)
    gateways: str = "ctl1"
    """Where they are."""
    short: list[set[str]] = field(default_factory=list)
    """Launches of the service `watched` that were ready, at each look."""
    watched: str = "short"  # whose replicas are replaced again and again
    stopping: threading.Event = field(default_factory=threading.Event)

    def socket(self, host: str = "ctl1") -> Path:
        """Where the gateways of a controller ask; through its process, as /run is the host's own."""
        (daemon,) = (one for one in self.cluster.daemons() if one.name == f"replicad@{host}")
        return Path(f"/proc/{init_pid(self.cluster.layout)}/root/proc/{daemon.pid}/root/run/sluice-serve/socket")

    def ask(self, do: str = "changes", host: str = "ctl1", **words: Any) -> dict[str, Any]:
        return ask(self.socket(host), do, **words)

    def rows(self, section: str, host: str = "ctl1") -> dict[str, dict[str, Any]]:
        """What gateways have; nothing while nobody answers."""
        try:
            found = self.ask(host=host, epoch="", last=0)["rows"]
        except (SluiceError, OSError, ValueError):
            return {}
        return {key: row for name, key, row in found if name == section and row is not None}

    def replicas(self, service: str = "words", *states: str, host: str = "ctl1") -> dict[str, dict[str, Any]]:
        rows = self.rows("replicas", host)
        return {
            key: one
            for key, one in rows.items()
            if one["service"] == service and one["state"] in (states or ("ready",))
        }

    def need(self, service: str = "words", **words: Any) -> None:
        """What gateways say from now on; without words: nothing any more."""
        if words:
            self.needs[service] = Gateway(self, service, words)
        else:
            self.needs.pop(service, None)

    def say(self) -> None:
        """A thread: each gateway's words, and what it gets, three times a second."""
        while not self.stopping.wait(0.3):
            with suppress(SluiceError, OSError, ValueError):
                said = [one.message() for one in list(self.needs.values())]
                found = self.ask("changes", self.gateways, epoch="", last=0, demand=said)["rows"]
                rows = [row for section, _, row in found if section == "replicas" and row["service"] == self.watched]
                self.short.append({row["launch"] for row in rows if row["state"] == "ready"})

    def jobs(self, service: str = "words", *states: str) -> list[tuple[int, str, str]]:
        """Number, state and launch of each job that is in Slurm's queue, the oldest first."""
        shape = [
            "squeue",
            "--noheader",
            "--all",
            "--format=%i %T %j",
            *(["--states=" + ",".join(states)] if states else []),
        ]
        lines = [line.split() for line in self.cluster.run(shape).stdout.splitlines()]
        begin = f"{JOB_PREFIX}{service}."
        mine = [(int(number), state, name) for number, state, name in lines if name.startswith(begin)]
        return sorted((number, state, name.removeprefix(begin)) for number, state, name in mine)

    def tell(self, name: str, **words: Any) -> None:
        """What replicas of a service, or one launch, do."""
        (self.folder / f"{name}.json").write_text(json.dumps(words))

    @property
    def folder(self) -> Path:
        return self.cluster.layout.folder / "told"

    def kill(self, name: str = "replicad@ctl1") -> None:
        """SIGKILL, and start it again."""
        self.cluster.stop_daemon(name, number=signal.SIGKILL)
        self.cluster.start_daemon(name)

    def pause(self, service: str, *, paused: bool) -> None:
        """As an administrator does."""
        self.cluster.run(["sluice", "serve", "pause" if paused else "resume", service, "--yes"], node="ctl1", cwd="/")

    def audited(self, action: str, host: str = "ctl1") -> list[dict[str, Any]]:
        path = self.cluster.folder / "hosts" / host / "audit"
        if not path.is_dir():
            return []
        lines = [line for file in sorted(path.iterdir()) for line in file.read_text().splitlines()]
        return [one for line in lines if line.startswith("{") and (one := json.loads(line)).get("action") == action]

    def logs(self) -> str:
        daemons = ("replicad@ctl1", "replicad@ctl2", "actd@ctl1", "controllerd@ctl1")
        names = [one.name for one in self.cluster.daemons() if one.name in daemons]
        return "\n".join(f"{name}: {self.cluster.log_tail(name, 25)}" for name in names)

    def until(self, look: Callable[[], Any], good: Callable[[Any], Any] = bool, timeout: float = 60.0) -> Any:
        return until(look, good, timeout, shows=self.logs)

    def empty(self, service: str = "words") -> None:
        """No need, and no job of a service is left."""
        self.need(service)
        self.until(lambda: self.jobs(service), lambda jobs: not jobs)


def stand_in(cluster: DevCluster) -> None:
    """Replicas are `stand_in_replica.py`."""
    script = Path(__file__).with_name("stand_in_replica.py")
    told = str(INSIDE / "told")
    folder = cluster.layout.folder / "told"
    folder.mkdir()
    folder.chmod(0o1777)
    tree = cluster.facts["root"]
    words = [*PYTHON, str(script), told] if tree is None else python_in_tree([f"{THIS_SYSTEM}{script}", told])
    program = cluster.layout.programs / "sluice-replica"
    program.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")


def serve_site(
    make_cluster: Callable[..., DevCluster],
    *,
    controllers: int = 1,
    services: Mapping[str, dict[str, Any]] = SERVICES,
    prepare: Callable[[DevCluster], None] = stand_in,
    platform: str = "none",
    tenants: Mapping[str, dict[str, Any]] | None = None,
    **options: Any,
) -> Iterator[ServeSite]:
    """For a fixture. `prepare`: before replicas come; `tenants`: more of the policy's fields."""
    document = policy(services, in_tree=bool(options.get("root")))
    for name, words in (tenants or {}).items():
        document["tenants"][name] = document["tenants"].get(name, {}) | words
    cluster = make_cluster(
        {
            "nodes": [{"names": "n[1-2]", "platform": platform}],
            "controllers": controllers,
            "controllerd": True,
            "serve": True,
            "accounts": [{"name": name} for name in document["tenants"]],
            "users": [
                {"name": user, "accounts": [name]}
                for name, tenant in document["tenants"].items()
                for user in tenant["members"]
            ]
            + [
                {"name": "sluice-web", "accounts": ["chemistry"]},
            ],
            "slurm_conf": "PrivateData=jobs,usage,users,accounts\n"
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1\n",
            "policy": json.dumps(document, indent=1),
        },
        **options,
    )
    site = ServeSite(cluster)
    prepare(cluster)
    thread = threading.Thread(target=site.say, daemon=True)
    thread.start()
    site.until(lambda: site.rows("services"), lambda rows: set(rows) == set(services))
    yield site
    site.stopping.set()
    thread.join()


__all__ = ["ServeSite", "serve_site", "time"]
