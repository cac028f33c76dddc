"""A development cluster with one model service, `counting`, whose replicas are jobs, for benchmarks of its life."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.description import parse_description
from sluice.base.tokens import DEFAULT_FILE
from tests.serve_models import make_model

SERVICE = "counting"
_CLUSTER: dict[str, Any] = {
    "nodes": [{"names": "n[1-2]", "platform": "none"}],
    "controllerd": True,
    "serve": True,
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "slurm_conf": "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1\n",
}


@dataclass
class ServeCluster:
    """One that runs, and a key for its gateways."""

    cluster: DevCluster
    key: str

    def gateway(self, host: str = "ctl1") -> tuple[str, int]:
        """Where a controller's listens."""
        return ADDRESSES[host], int(self.cluster.facts["environment"]["SLUICE_GATEWAY_PORT"])


@contextmanager
def serve_cluster(service: dict[str, Any], *, controllers: int = 1, **model: Any) -> Iterator[ServeCluster]:
    """`service`: more of its policy; `model`: what makes it slower. Raises SluiceError."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = make_model(folder / "counting.gguf", "counting", **model)
        described = {**_CLUSTER, "controllers": controllers, "policy": json.dumps(_policy(path, service), indent=1)}
        cluster = DevCluster(folder / "cluster")
        cluster.up(parse_description(yaml.safe_dump(described), source="benchmark"), attached=True, timeout=600)
        try:
            words = ["sluice", "token", "create", "alice", "--for", "1d", "--scope", "serve"]
            key = cluster.run(words, node="ctl1", cwd="/").stdout.split()[-1]
            for host in [f"ctl{1 + number}" for number in range(controllers)]:
                cluster.run(["chown", "root:sluice-gateway", str(DEFAULT_FILE)], node=host, cwd="/")
                cluster.run(["chmod", "640", str(DEFAULT_FILE)], node=host, cwd="/")
            yield ServeCluster(cluster, key)
        finally:
            cluster.down()


def _policy(model: Path, service: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "tenant": "physics", "user": "alice", "engine": "llama.cpp", "model": str(model), "cpus": 1, "memory": "500M",
        "callers": ["physics"],
    }  # fmt: skip
    return {
        "version": 1, "tenants": {"physics": {"members": ["alice"]}}, "services": {SERVICE: {**usual, **service}},
    }  # fmt: skip
