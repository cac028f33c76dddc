"""The same cluster on Slurm 24.11, in a Debian 13 tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster

pytestmark = [pytest.mark.cluster, pytest.mark.trixie]


@pytest.fixture(scope="module")
def trixie(trixie_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[DevCluster]:
    description = {
        "nodes": [
            {"names": "h100-1", "platform": "dgx-h100"},
            {"names": "mi300x-1", "platform": "mi300x-platform", "config": "own"},
            {"names": "n1", "platform": "none", "config": "configless"},
        ],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
    }
    before = sorted(trixie_root.rglob("*"))
    cluster = make_shared_cluster(description, root=trixie_root)
    yield cluster
    cluster.down()
    assert sorted(trixie_root.rglob("*")) == before  # the tree is as it was


def test_it_is_another_slurm(trixie: DevCluster) -> None:
    assert trixie.run(["sinfo", "--version"]).stdout.startswith("slurm-wlm 24.11")
    assert trixie.run(["cat", "/etc/debian_version"], node="h100-1").stdout.startswith("13")


def test_jobs_run_across_nodes_and_are_accounted(trixie: DevCluster) -> None:
    assert sorted(trixie.run(["srun", "-N3", "hostname"], user="alice").stdout.split()) == ["h100-1", "mi300x-1", "n1"]
    assert "alice" in trixie.run(["sacct", "-a", "-X", "-n", "-P", "-o", "User"]).stdout


def test_generated_gres_is_accepted(trixie: DevCluster) -> None:
    gres = {status.name: status.gres for status in trixie.node_states()}
    assert gres["h100-1"].startswith("gpu:h100:8")
    assert gres["mi300x-1"].startswith("gpu:mi300x:8")
    assert "shard" in gres["h100-1"]


@pytest.mark.parametrize(("node", "pattern"), [("h100-1", "/dev/nvidia[0-7]"), ("mi300x-1", "/dev/dri/renderD*")])
def test_a_job_opens_the_gpus_that_it_was_given_and_no_other(trixie: DevCluster, node: str, pattern: str) -> None:
    attempt = f'for f in {pattern}; do (exec 3<>$f) 2>&1 | grep -o "not permitted\\|No such device"; done'
    said = trixie.run(["srun", "-w", node, "--gres=gpu:3", "bash", "-c", attempt], user="alice").stdout.splitlines()
    assert said.count("No such device") == 3
    assert said.count("not permitted") == 5
