"""Figures of a job while it runs, as reports and the live view show them to its user, to another, and to root."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicy
from tests.integration.jobs import sbatch
from tests.integration.metrics_site import load
from tests.integration.settled import until

MIB, PERCENT = 10_000, 40


def check_live(cluster: DevCluster, node: str, user: str, other: str, end: Callable[[int], object]) -> int:
    """A job that keeps 40 percent of a GPU busy is seen to do so; `end` is called with its number while it runs."""
    (cluster.layout.slurm / FILE_NAME).write_text(NodePolicy(metrics=NodeMetrics(running=5)).render())
    script = "#!/bin/sh\nexec " + shlex.join(load("cuda", MIB, (10 * PERCENT, 600.0))) + "\n"
    ask = ("-n1", "--mem=100M", "-w", node, "--gres=gpu:1")
    number = int(sbatch(cluster, *ask, user=user, cwd="/", input_text=script))

    def sluice(*words: str, user: str) -> str:
        return cluster.run(["sluice", *words], user=user, cwd="/", timeout=60).stdout

    def row(user: str) -> dict[str, Any] | None:
        rows = json.loads(sluice("report", "jobs", "-a", "-j", str(number), "--json", user=user))["rows"]
        return dict(rows[0]) if rows else None

    def seen(user: str) -> bool:
        found = row(user)
        return bool(found) and found["utilisation_now_percent"] == pytest.approx(PERCENT, abs=1)

    for who in ("root", user):
        until(lambda who=who: seen(who))
        found = row(who)
        assert found is not None and found["state"] == "RUNNING"
        assert MIB < found["gpu_mem_now_mib"] < MIB + 1024 and found["gpu_mem_peak_mib"] >= found["gpu_mem_now_mib"]
        assert 0 < found["utilisation_percent"] <= PERCENT + 1
    foreign = row(other)
    assert foreign is None or foreign["utilisation_now_percent"] is foreign["utilisation_percent"] is None
    page = sluice("report", "job", str(number), user=user)
    assert re.search(r"^Used until 20", page, re.MULTILINE) and re.search(
        r"^    now +(39|40|41)%, 1\d", page, re.MULTILINE
    )
    mine = re.compile(rf"^{number} .* (39|40|41)% +1[\d.]+G ", re.MULTILINE)
    until(lambda: mine.search(sluice("top", "--once", "--part", "jobs", user=user)))
    device = re.compile(rf"^{node} .* whole +(39|40|41)% +1[\d.]+G +\d+\.?\d*G .* {number}$", re.MULTILINE)
    on_controller = ["sluice", "top", "--once", "--part", "devices"]
    until(lambda: device.search(cluster.run(on_controller, node="ctl1").stdout))
    assert not device.search(sluice("top", "--once", "--part", "devices", user=other))
    end(number)
    return number
