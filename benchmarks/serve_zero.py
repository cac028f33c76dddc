"""From no replica to the first token: a cluster, a service whose replicas are jobs, and the `openai` package."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from openai import OpenAI

from benchmarks.serve_site import quantile
from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.description import parse_description
from sluice.base.errors import SluiceError
from sluice.base.tokens import DEFAULT_FILE
from sluice.exchange.serving import JOB_PREFIX
from tests.serve_models import counted, make_model, word

_WAIT_S = 120.0
_CLUSTER: dict[str, Any] = {
    "nodes": [{"names": "n[1-2]", "platform": "none"}],
    "controllers": 1,
    "controllerd": True,
    "serve": True,
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "slurm_conf": "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1\n",
}


def _policy(model: Path) -> dict[str, Any]:
    service = {
        "tenant": "physics", "user": "alice", "engine": "llama.cpp", "model": str(model), "cpus": 1, "memory": "500M",
        "options": ["--ctx-size", "4096", "--threads", "1"], "callers": ["physics"],
        "replicas": {"least": 0, "most": 1, "slots": 4}, "idle": "2s", "walltime": "10m", "ready_within": "60s",
        "drain_within": "2s",
    }  # fmt: skip
    return {"version": 1, "tenants": {"physics": {"members": ["alice"]}}, "services": {"counting": service}}


def measure(figures: dict[str, float], times: int) -> None:
    """So many starts, each from no job of the service in Slurm. Raises SluiceError."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        model = make_model(folder / "counting.gguf", "counting")
        described = {**_CLUSTER, "policy": json.dumps(_policy(model), indent=1)}
        cluster = DevCluster(folder / "cluster")
        cluster.up(parse_description(yaml.safe_dump(described), source="benchmark"), attached=True, timeout=600)
        try:
            words = ["sluice", "token", "create", "alice", "--for", "1d", "--scope", "serve"]
            key = cluster.run(words, node="ctl1", cwd="/").stdout.split()[-1]
            cluster.run(["chown", "root:sluice-gateway", str(DEFAULT_FILE)], node="ctl1", cwd="/")
            cluster.run(["chmod", "640", str(DEFAULT_FILE)], node="ctl1", cwd="/")
            client = OpenAI(base_url=f"{_gateway(cluster)}/v1", api_key=key, timeout=_WAIT_S)
            client.models.list()
            took = []
            for number in range(times):
                _empty(cluster)
                began = time.monotonic()
                took.append(_first(client, 1 + number) - began)
        finally:
            cluster.down()
    figures["from_zero_p50_s"] = quantile(took, 0.5)
    figures["from_zero_p95_s"] = quantile(took, 0.95)
    figures["from_zero_starts"] = len(took)


def _first(client: OpenAI, start: int) -> float:
    """When the first token came, of a stream that is whole."""
    first, text = 0.0, ""
    for chunk in client.chat.completions.create(
        model="counting", messages=[{"role": "user", "content": word(start)}], max_tokens=5, temperature=0, stream=True
    ):
        said = "".join(choice.delta.content or "" for choice in chunk.choices)
        first = first or (time.monotonic() if said else 0.0)
        text += said
    if text.strip() != counted(start, 5).strip():
        raise SluiceError(f"the stream said {text!r}", remedy=f"it should be {counted(start, 5)!r}")
    return first


def _empty(cluster: DevCluster) -> None:
    """Until Slurm has no job of the service."""
    end = time.monotonic() + _WAIT_S
    while JOB_PREFIX in cluster.run(["squeue", "--noheader", "--all", "--format=%j"]).stdout:
        if time.monotonic() > end:
            raise SluiceError("replicas that nobody needs do not end", remedy="see the log of replicad")
        time.sleep(0.2)


def _gateway(cluster: DevCluster) -> str:
    """Where it listens."""
    port = cluster.run(["printenv", "SLUICE_GATEWAY_PORT"], node="ctl1", cwd="/").stdout.strip()
    return f"http://{ADDRESSES['ctl1']}:{port}"
