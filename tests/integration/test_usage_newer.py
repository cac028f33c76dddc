"""Who used which GPU under newer Slurm (24.11, 26.05): running figures, records, reports, controllers' daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from sluice.exchange.job_records import FOLDER, JobRecords
from tests.integration.live_figures import PERCENT, check_live
from tests.integration.settled import until

pytestmark = pytest.mark.cluster


def test_a_job_while_it_runs_and_when_it_has_ended(
    newer_root: Path, make_shared_cluster: Callable[..., DevCluster]
) -> None:
    cluster = make_shared_cluster(
        {
            "nodes": [{"names": "g-1", "platform": "dgx-h100"}],
            "controllers": 1,
            "accounts": [{"name": "physics"}],
            "users": [{"name": "alice", "accounts": ["physics"]}, {"name": "mallory", "accounts": ["physics"]}],
            "slurm_conf": "PrivateData=jobs,usage\n",
            "agent": True,
            "controllerd": True,
        },
        root=newer_root,
    )
    number = check_live(
        cluster, "g-1", "alice", "mallory", lambda job: cluster.run(["scancel", str(job)], user="alice")
    )
    store = JobRecords(cluster.layout.state / FOLDER)
    until(lambda: store.of_job(number))
    (record,) = store.of_job(number)
    assert record.usage is not None and record.ended is not None
    begun = cluster.run(["sacct", "-X", "-n", "-P", "-j", str(number), "-o", "Start"]).stdout.strip()
    assert record.restarts == 0 and record.begun is not None
    assert f"{datetime.fromtimestamp(record.begun):%FT%T}" == begun
    (use,) = record.usage["gpus"].values()
    assert use["utilisation"]["p50"] == pytest.approx(PERCENT, abs=1) and use["seconds"] > 5

    def sluice(*words: str, user: str = "root") -> str:
        return cluster.run(["sluice", *words], user=user, cwd="/", timeout=60).stdout

    def summary() -> bool:
        (row,) = json.loads(sluice("report", "jobs", "-j", str(number), "--json", user="alice"))["rows"]
        return row["utilisation_percent"] is not None and row["state"] == "CANCELLED"

    until(summary)  # from AdminComment, as alice may not read the records
    page = sluice("report", "job", str(number))
    assert re.search(r"p50 (39|40|41)%", page) and re.search(r"peak 1[\d.]+G", page)
    (tenant,) = json.loads(sluice("report", "tenants", "-S", "now-1hour", "--json"))["rows"]
    assert tenant["account"] == "physics" and tenant["utilisation_percent"] > 0
    status = sluice("controllerd", "--state", "/run/sluice-cluster/controllerd/ctl1", "status")
    assert "ctl1: leads" in status and "job-records: " in status
    assert all(line.endswith("; ok") for line in status.splitlines()[1:]), status
