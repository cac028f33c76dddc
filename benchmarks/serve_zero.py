"""From no replica to the first token: a cluster, a service whose replicas are jobs, and the `openai` package."""

from __future__ import annotations

import time
from typing import Any

from openai import OpenAI

from benchmarks.serve_cluster import SERVICE, serve_cluster
from benchmarks.serve_site import quantile
from dev_cluster.cluster import DevCluster
from sluice.base.errors import SluiceError
from sluice.exchange.serving import JOB_PREFIX
from tests.serve_models import counted, word

_WAIT_S = 120.0
_SERVICE: dict[str, Any] = {
    "options": ["--ctx-size", "4096", "--threads", "1"], "replicas": {"least": 0, "most": 1, "slots": 4}, "idle": "2s",
    "walltime": "10m", "ready_within": "60s", "drain_within": "2s",
}  # fmt: skip


def measure(figures: dict[str, float], times: int) -> None:
    """So many starts, each from no job of the service in Slurm. Raises SluiceError."""
    with serve_cluster(_SERVICE) as site:
        host, port = site.gateway()
        client = OpenAI(base_url=f"http://{host}:{port}/v1", api_key=site.key, timeout=_WAIT_S)
        client.models.list()
        took = []
        for number in range(times):
            _empty(site.cluster)
            began = time.monotonic()
            took.append(_first(client, 1 + number) - began)
    figures["from_zero_p50_s"] = quantile(took, 0.5)
    figures["from_zero_p95_s"] = quantile(took, 0.95)
    figures["from_zero_starts"] = len(took)


def _first(client: OpenAI, start: int) -> float:
    """When the first token came, of a stream that is whole."""
    first, text = 0.0, ""
    for chunk in client.chat.completions.create(
        model=SERVICE, messages=[{"role": "user", "content": word(start)}], max_tokens=5, temperature=0, stream=True
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
