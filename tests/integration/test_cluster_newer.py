"""The same cluster on Slurm 24.11, in a Debian 13 tree, and on 26.05, in one of Debian sid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.slurm_version import parse_slurm_version

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def newer(newer_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[DevCluster]:
    description = {
        "nodes": [
            {"names": "h100-1", "platform": "dgx-h100"},
            {"names": "mi300x-1", "platform": "mi300x-platform", "config": "own"},
            {"names": "n1", "platform": "none", "config": "configless"},
        ],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
    }
    before = sorted(newer_root.rglob("*"))
    cluster = make_shared_cluster(description, root=newer_root)
    yield cluster
    cluster.down()
    assert sorted(newer_root.rglob("*")) == before  # the tree is as it was


def test_it_is_another_slurm(newer: DevCluster) -> None:
    assert parse_slurm_version(newer.run(["sinfo", "--version"]).stdout) >= (24, 11, 0)
    assert newer.run(["cat", "/etc/debian_version"], node="h100-1").stdout >= "13"


def test_jobs_run_across_nodes_and_are_accounted(newer: DevCluster) -> None:
    assert sorted(newer.run(["srun", "-N3", "hostname"], user="alice").stdout.split()) == ["h100-1", "mi300x-1", "n1"]
    assert "alice" in newer.run(["sacct", "-a", "-X", "-n", "-P", "-o", "User"]).stdout


def test_generated_gres_is_accepted(newer: DevCluster) -> None:
    gres = {status.name: status.gres for status in newer.node_states()}
    assert gres["h100-1"].startswith("gpu:h100:8")
    assert gres["mi300x-1"].startswith("gpu:mi300x:8")
    assert "shard" in gres["h100-1"]


@pytest.mark.parametrize(("node", "pattern"), [("h100-1", "/dev/nvidia[0-7]"), ("mi300x-1", "/dev/dri/renderD*")])
def test_a_job_opens_the_gpus_that_it_was_given_and_no_other(newer: DevCluster, node: str, pattern: str) -> None:
    attempt = f'for f in {pattern}; do (exec 3<>$f) 2>&1 | grep -o "not permitted\\|No such device"; done'
    said = newer.run(["srun", "-w", node, "--gres=gpu:3", "bash", "-c", attempt], user="alice").stdout.splitlines()
    assert said.count("No such device") == 3
    assert said.count("not permitted") == 5
