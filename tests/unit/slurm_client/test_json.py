"""The JSON backend on documents of both forms: plain numbers (22.05), and numbers that say whether they are set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice_base.errors import SluiceError
from slurm_client import SlurmClient, connect
from slurm_client.model import UNLIMITED


def install(folder: Path, version: str, answers: dict[str, Any]) -> SlurmClient:
    (folder / "bin").mkdir()
    for name in ("squeue", "sinfo", "scontrol", "sacct"):
        (folder / f"{name}.json").write_text(json.dumps(answers.get(name, {})))
        script = folder / "bin" / name
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "slurm {version}" && exit\ncat "{folder}/{name}.json"\n'
        )
        script.chmod(0o755)
    return connect(prefix=folder, backend="json")


def is_set(number: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": number}


UNSET = {"set": False, "infinite": False, "number": 0}
INFINITE = {"set": False, "infinite": True, "number": 0}


def test_newer_nodes(tmp_path: Path) -> None:
    record = {
        "name": "n1",
        "state": ["MIXED", "DRAIN"],
        "reason": "x",
        "cpus": 8,
        "alloc_cpus": 2,
        "sockets": 1,
        "cores": 4,
        "threads": 2,
        "real_memory": 100,
        "alloc_memory": 0,
        "free_mem": is_set(50),
        "gres": "gpu:1",
        "features": ["a"],
        "active_features": ["a"],
        "partitions": ["p"],
        "weight": 3,
        "version": "24.11.5",
        "tres": "cpu=8,mem=100M",
        "tres_used": "cpu=2",
        "address": "n1",
        "hostname": "n1",
    }
    [node] = install(tmp_path, "24.11.5", {"scontrol": {"nodes": [record], "errors": []}}).nodes()
    assert (node.state, node.flags, node.memory_free_mib) == ("mixed", frozenset({"drain"}), 50)
    assert (node.features, node.partitions, node.tres["mem"]) == (("a",), ("p",), 100)


def test_newer_jobs(tmp_path: Path) -> None:
    record = {
        "job_id": 7,
        "array_job_id": is_set(5),
        "array_task_id": is_set(2),
        "array_task_string": "",
        "name": "None",
        "job_state": ["RUNNING"],
        "time_limit": INFINITE,
        "start_time": is_set(10),
        "end_time": is_set(99),
        "submit_time": is_set(9),
        "eligible_time": UNSET,
        "priority": is_set(4),
        "node_count": is_set(1),
        "cpus": is_set(2),
        "tres_alloc_str": "cpu=2,gres/gpu=1",
        "user_id": 1000,
        "user_name": "u",
    }
    [job] = install(tmp_path, "24.11.5", {"squeue": {"jobs": [record], "errors": []}}).jobs()
    assert (job.id, job.array_id, job.array_tasks) == (7, 5, "2")
    assert (job.time_limit_s, job.end_time, job.eligible_time) == (UNLIMITED, None, None)
    assert job.tres == {"cpu": 2, "gres/gpu": 1}


def test_accounting(tmp_path: Path) -> None:
    record = {
        "job_id": 3,
        "name": "j",
        "user": "u",
        "state": {"current": ["FAILED"]},
        "exit_code": {"return_code": is_set(3), "signal": {"id": UNSET}},
        "nodes": "None assigned",
        "allocation_nodes": 0,
        "time": {"start": 0, "elapsed": 5, "limit": is_set(10), "submission": 7},
        "tres": {
            "allocated": [{"type": "gres", "name": "gpu", "count": 2}, {"type": "energy", "name": "", "count": 0}],
            "requested": [],
        },
        "array": {"job_id": 1, "task_id": is_set(4)},
        "het": {},
    }
    [job] = install(tmp_path, "24.11.5", {"sacct": {"jobs": [record], "errors": []}}).accounting_jobs()
    assert (job.state, job.exit_code, job.exit_signal, job.time_limit_s) == ("FAILED", 3, 0, 600)
    assert (job.label, job.start_time, job.nodes) == ("1_4", None, "")
    assert job.tres_allocated == {"gres/gpu": 2}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no json",
        "[]",
        '{"jobs": []',
        '{"nodes": []}',
        '{"jobs": [], "errors": ["no"]}',
        '{"jobs": [], "errors": [{"error": "Unable"}]}',
    ],
)
def test_answers_that_are_none(tmp_path: Path, answer: str) -> None:
    client = install(tmp_path, "22.05.8", {})
    (tmp_path / "squeue.json").write_text(answer)
    with pytest.raises(SluiceError, match="squeue --json"):
        client.jobs()


def test_partitions_are_read_as_text(tmp_path: Path) -> None:
    client = install(tmp_path, "22.05.8", {})
    (tmp_path / "scontrol.json").write_text(
        "PartitionName=p Default=YES State=UP Nodes=n1 TotalNodes=1 MaxTime=UNLIMITED\n"
    )
    [partition] = client.partitions()
    assert (partition.name, partition.default, partition.max_time_s) == ("p", True, UNLIMITED)
