"""Slurm's answers, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.slurm.answers import Job, Node

_JOB = Job(
    id=1, array_id=None, array_tasks="", name="train", user="alice", uid=1001, account="physics", qos="physics",
    partition="main", state="RUNNING", reason="", nodes="n1", node_count=1, cpus=4, submit_time=100,
    eligible_time=100, start_time=110, end_time=None, time_limit_s=3600, priority=7, tres={"gres/gpu": 1},
    tres_per_node="", tres_per_job="", tres_per_task="", features="", dependency="", reservation="", comment="",
    work_dir="/home/alice",
)  # fmt: skip
_NODE = Node(
    name="n1", address="n1", hostname="n1", state="mixed", flags=frozenset(), reason="", cpus=64, cpus_allocated=4,
    sockets=2, cores_per_socket=32, threads_per_core=1, memory_mib=1000, memory_allocated_mib=0, memory_free_mib=None,
    gres="gpu:h100:4", gres_used="", features=(), active_features=(), partitions=("main",), weight=1, version="24.11.5",
    tres={"gres/gpu": 4}, tres_allocated={"gres/gpu": 1},
)  # fmt: skip


def a_job(number: int, **changes: Any) -> Job:
    return replace(_JOB, id=number, **changes)


def a_node(name: str, **changes: Any) -> Node:
    return replace(_NODE, name=name, **changes)
