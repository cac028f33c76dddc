"""At level off, and without a policy at any level, every scheduling result is stock Slurm's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugin_site import POLICY, PluginSite

from dev_cluster.cluster import DevCluster

pytestmark = pytest.mark.cluster

_DESCRIPTION: dict[str, Any] = {
    "nodes": [{"names": "g[1-4]", "platform": "dgx-h100"}, {"names": "n2", "platform": "none"}],
    "controllers": 1,
    "accounting": False,
    "users": [{"name": "alice"}],
    # Times as of a quiet machine: jobs are looked at in one pass, in the order of submission.
    "slurm_conf": "SchedulerParameters=bf_interval=2,defer\nPriorityType=priority/basic\n",
}
# What jobs ask for: GPUs and parts of them, several nodes, whole nodes, named and excluded ones.
_ASKED = [
    "--gres=gpu:1",
    "--gres=gpu:3",
    "--gres=shard:10240",
    "--gres=gpu:8",
    "-N2 --gres=gpu:2",
    "--gres=shard:40960",
    "-n4 --gpus-per-task=1",
    "--gpus=2 -c4",
    "-N1 --exclusive --gres=gpu:1",
    "--gres=gpu:1 -w g3",
    "--gres=gpu:2 --mem=100G",
    "-N2 -n2 -c2",
    "--gres=gpu:1 -x g1",
    "--gres=gpu:6",
    "--gres=gpu:8",
    "--gres=gpu:1",
]


def placements(cluster: DevCluster) -> dict[str, str]:
    """Submit all held, release them at once; when all is decided, each job's nodes and GPUs by its name."""
    jobs = []
    for number, asked in enumerate(_ASKED):
        command = ["sbatch", "--parsable", "--hold", "-J", f"j{number}", "-o", "/dev/null", *asked.split()]
        jobs.append(cluster.run([*command, "--wrap", "sleep 1000"], user="alice").stdout.strip())
    cluster.run(["scontrol", "release", *jobs])

    def shown() -> dict[str, str]:
        found = {}
        for line in cluster.run(["scontrol", "show", "job", "-d", "-o"]).stdout.splitlines():
            words = line.split()
            pairs = [word for word in words if word.startswith(("JobState=", "Nodes=", "GRES=", "CPU_IDs=", "Reason="))]
            found[next(word for word in words if word.startswith("JobName="))] = " ".join(pairs)
        return found

    waiter = PluginSite.__new__(PluginSite)
    waiter.cluster = cluster
    seen: list[dict[str, str]] = []

    def settled() -> bool:
        """All jobs looked at, and nothing new since the look before, over several passes of backfill."""
        seen.append(shown())
        undecided = any("PENDING" in job and "Reason=None" in job for job in seen[-1].values())
        return len(seen) > 30 and seen[-1] == seen[-25] and not undecided

    waiter.wait(settled, seconds=180)
    cluster.run(["scancel", *jobs])
    waiter.wait(lambda: not cluster.run(["squeue", "-h"]).stdout)
    cluster.wait_idle(timeout=90)
    return seen[-1]


def test_off_is_stock(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    stock = placements(make_cluster(_DESCRIPTION))
    assert sum("JobState=RUNNING" in job for job in stock.values()) >= 8
    assert any("JobState=PENDING" in job for job in stock.values())
    off = {**_DESCRIPTION, "sluice": {"level": "off", "policy": POLICY.render()}}
    cluster = make_cluster(off)
    assert placements(cluster) == stock
    (cluster.layout.slurm / "sluice.policy").write_text("")
    (cluster.layout.slurm / "sluice.level").write_text("place\n")
    site = PluginSite.__new__(PluginSite)
    site.cluster = cluster
    site.wait(lambda: site.report()["level_asked"] == "place" and site.report()["policy"] is None)
    assert site.report()["level"] == "off"
    assert placements(cluster) == stock
