"""Nodes and their GPUs as viewers get them. Rows are made of those nodes only of which something has changed: of a
thousand nodes few have, and making all rows each second keeps the threads waiting that answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policy.live import gpus_in_use, gpus_of
from sluice.exchange.live import GpuNow, Live
from sluice.exchange.snapshot import Snapshot, encode
from sluice.slurm.answers import Node

_MOST_TEXT = 1024


@dataclass(frozen=True, slots=True)
class NodeNow:
    """All that the rows of a node and its GPUs are made of; the mappings are by a GPU's number."""

    node: Node
    gpus: Mapping[int, GpuNow]
    jobs: Mapping[int, list[int]]
    out: Mapping[int, str]
    """Why a GPU is out of service."""


def nodes_now(nodes: Iterable[Node], live: Live, out: Mapping[tuple[str, int], str]) -> Iterator[NodeNow]:
    """What is known of each node."""
    jobs: dict[str, dict[int, list[int]]] = {}
    for job, places in live.jobs.items():
        for place in places:
            jobs.setdefault(place.node, {}).setdefault(place.index, []).append(job)
    reasons: dict[str, dict[int, str]] = {}
    for (name, index), reason in out.items():
        reasons.setdefault(name, {})[index] = reason
    for node in nodes:
        yield NodeNow(node, live.gpus.get(node.name, {}), jobs.get(node.name, {}), reasons.get(node.name, {}))


class NodeRows:
    """Publishes the sections `nodes` and `gpus`. One thread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._before: dict[str, NodeNow] = {}

    def publish(self, nodes: Iterable[NodeNow]) -> None:
        """Make these all nodes."""
        now = {one.node.name: one for one in nodes}
        changed = {name: one for name, one in now.items() if self._before.get(name) != one}
        gone = self._before.keys() - now.keys()
        rows = {name: encode("nodes", name, node_row(one.node)) for name, one in changed.items()}
        gpus = {key: encode("gpus", key, row) for one in changed.values() for key, row in gpu_rows(one).items()}
        before = {key for name in (*changed, *gone) if name in self._before for key in gpu_rows(self._before[name])}
        self._snapshot.change("nodes", rows, gone)
        self._snapshot.change("gpus", gpus, before - gpus.keys())
        self._before = now


def node_row(node: Node) -> dict[str, Any]:
    """A node as viewers get it."""
    types, shards = gpus_of(node)
    return {
        "name": node.name,
        "state": node.state,
        "flags": sorted(node.flags),
        "available": node.available,
        "reason": node.reason[:_MOST_TEXT],
        "gpu_types": types,
        "gpus": sum(types.values()),
        "gpus_allocated": node.tres_allocated.get("gres/gpu", 0),
        "gpu_mem_mib": shards,
        "gpu_mem_allocated_mib": node.tres_allocated.get("gres/shard", 0),
        "cpus": node.cpus,
        "cpus_allocated": node.cpus_allocated,
        "memory_mib": node.memory_mib,
        "memory_allocated_mib": node.memory_allocated_mib,
        "features": list(node.active_features),
        "partitions": list(node.partitions),
        "slurm_version": node.version,
    }


def gpu_rows(now: NodeNow) -> dict[str, dict[str, Any]]:
    """The GPUs of a node as viewers get them, by their keys."""
    node = now.node
    types = [kind for kind, count in gpus_of(node)[0].items() for _ in range(count)]
    whole, shared = gpus_in_use(node.gres_used, "gpu"), gpus_in_use(node.gres_used, "shard")
    rows = {}
    for index, kind in enumerate(types):
        seen, why = now.gpus.get(index, GpuNow()), now.out.get(index)
        rows[f"{node.name}/{index}"] = {
            "node": node.name,
            "index": index,
            "type": kind,
            "use": "shared" if index in shared else "whole" if index in whole else "free",
            "available": node.available and why is None,
            "health": "ok" if why is None else "out",
            "reason": why or "",
            "jobs": sorted(now.jobs.get(index, ())),
            "utilisation_percent": seen.percent,
            "memory_used_mib": seen.used_mib,
            "memory_total_mib": seen.total_mib,
            "temperature_c": seen.temperature_c,
        }
    return rows
