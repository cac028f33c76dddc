"""A cluster with a pool whose machines are nodes of the cluster itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.base.files import write_atomic
from sluice.exchange.fleet import FleetStatus, NodeStatus, read_status
from sluice.explain.decisions import FOLDER, Decision, Mode, Outcome, list_files, read_entries

STOCK, NOTICES = "stock.json", "notices.json"

POLICY = f"""
version: 1
tenants:
  physics: {{members: [alice]}}
failover: {{controller_timeout: 6s}}
fleet: {{programs: {INSIDE}/bin, look_every: 1s}}
pools:
  burst:
    driver: local
    settings: {{stock: {INSIDE}/{STOCK}, boot: "1"}}
    nodes: burst-[1-3]
    shapes:
    - {{name: big, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G, price: 10}}
    - {{name: old, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G, price: 6}}
    zones: [a, b]
    idle: 1s
    list_every: 1s
    end_within: 1s
    boot_within: 60s
    give_back_within: 1s
    back_off: 3s
    node_options: Sockets=1 CoresPerSocket=56 ThreadsPerCore=2
  spare:
    driver: local
    settings: {{notices: {INSIDE}/{NOTICES}, boot: "1"}}
    nodes: spare-[1-3]
    shapes:
    - {{name: big, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G, price: 20}}
    idle: 1s
    list_every: 1s
    end_within: 1s
    weight: 1000
    node_options: Sockets=1 CoresPerSocket=56 ThreadsPerCore=2
  odd:
    driver: local
    nodes: odd-1
    shapes:
    - {{name: big, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G}}
    idle: 1s
    list_every: 1s
    end_within: 1s
    node_options: Sockets=1 CoresPerSocket=56 ThreadsPerCore=2
  slow:
    driver: local
    settings: {{boot: "20"}} # slurmctld saves its state every five seconds
    nodes: slow-[1-2]
    shapes:
    - {{name: big, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G}}
    idle: 1s
    list_every: 1s
    end_within: 1s
    node_options: Sockets=1 CoresPerSocket=56 ThreadsPerCore=2
"""

DESCRIPTION: dict[str, Any] = {
    "nodes": [
        {"names": "fixed-1", "platform": "none"},
        {"names": "burst-[1-3]", "platform": "h100x1", "pool": True},
        {"names": "spare-[1-3]", "platform": "h100x1", "pool": True},
        {"names": "slow-[1-2]", "platform": "h100x1", "pool": True},
        {"names": "odd-1", "platform": "h100x1", "pool": True, "config": "own"},
    ],
    "partitions": [{"name": "main", "nodes": "fixed-1"}],
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "controllers": 2,
    "sluice": {"level": "admit", "policy": ""},
    "slurm_conf": "SlurmctldParameters=power_save_interval=1\n"
    "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0\n",
    "shards": False,  # with them, slurmd itself refuses to start on a node with fewer GPUs
    "controllerd": True,
    "policy": POLICY,
}


def status(cluster: DevCluster) -> FleetStatus:
    """What fleetd says."""
    return read_status(cluster.folder / "fleet/status.json")


def nodes(cluster: DevCluster) -> dict[str, NodeStatus]:
    """Its nodes by name."""
    return {one.node: one for one in status(cluster).nodes}


def placed_by_core(cluster: DevCluster, job: str) -> bool:
    """Whether the placement hook gave a job its nodes, as recorded in slurmctld."""
    files = list_files(cluster.layout.state / FOLDER)
    decisions = [one.body for path in files for one in read_entries(path) if isinstance(one.body, Decision)]
    return any(one.job.id == int(job) and one.mode == Mode.RUN_NOW and one.outcome == Outcome.USED for one in decisions)


def set_stock(cluster: DevCluster, **stock: int) -> None:
    """How many machines there are, by shape, or by shape__zone."""
    document = {name.replace("__", "/"): count for name, count in stock.items()}
    write_atomic(Path(cluster.folder) / STOCK, json.dumps(document))


def set_notices(cluster: DevCluster, notices: dict[str, str]) -> None:
    """Why machines are taken back soon, by machine."""
    write_atomic(Path(cluster.folder) / NOTICES, json.dumps(notices))
