"""The same cluster on Slurm 24.11, in a Debian 13 tree, on 26.05, in one of Debian sid, or on a Slurm of a tag."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.slurm_version import parse_slurm_version
from sluice.metrics.names import MEASUREMENTS
from tests.integration.settled import until
from tests.integration.versions import PREFIX

pytestmark = pytest.mark.cluster
METRICS_SINCE = (25, 11, 0)


@pytest.fixture(scope="module")
def newer(newer_root: Path | None, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[DevCluster]:
    description: dict[str, Any] = {
        "nodes": [
            {"names": "h100-1", "platform": "dgx-h100"},
            {"names": "mi300x-1", "platform": "mi300x-platform", "config": "own"},
            {"names": "n1", "platform": "none", "config": "configless"},
        ],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
    }
    if SlurmTree(root=newer_root, prefix=PREFIX or Path("/usr")).version() >= METRICS_SINCE:
        description["slurm_conf"] = "MetricsType=metrics/openmetrics\n"
    before = sorted(newer_root.rglob("*")) if newer_root else []
    cluster = make_shared_cluster(description, root=newer_root)
    yield cluster
    cluster.down()
    assert (sorted(newer_root.rglob("*")) if newer_root else []) == before  # the tree is as it was


def test_it_is_another_slurm(newer: DevCluster, newer_root: Path | None) -> None:
    found = parse_slurm_version(newer.run(["sinfo", "--version"]).stdout)
    if newer_root is None:
        assert PREFIX is not None and found == SlurmTree(PREFIX).version()
        return
    assert found >= (24, 11, 0)
    assert newer.run(["cat", "/etc/debian_version"], node="h100-1").stdout >= "13"


def test_jobs_run_across_nodes_and_are_accounted(newer: DevCluster) -> None:
    assert sorted(newer.run(["srun", "-N3", "hostname"], user="alice").stdout.split()) == ["h100-1", "mi300x-1", "n1"]
    until(lambda: "alice" in newer.run(["sacct", "-a", "-X", "-n", "-P", "-o", "User"]).stdout)


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


def test_what_slurmctlds_own_metrics_are_called(newer: DevCluster) -> None:
    """docs/metrics.md says which of ours are the same figure, and that no name is both ours and Slurm's."""
    if parse_slurm_version(newer.run(["sinfo", "--version"]).stdout) < METRICS_SINCE:
        pytest.skip("no OpenMetrics in slurmctld")
    place = f"http://{ADDRESSES['ctl1']}:{newer.facts['ports']['slurmctld']}/metrics"
    names: set[str] = set()
    for what in ("jobs", "nodes", "partitions", "scheduler"):
        with urlopen(f"{place}/{what}", timeout=30) as answer:
            names |= set(re.findall(r"^# TYPE (\S+) gauge$", answer.read().decode(), re.MULTILINE))
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    pairs = re.findall(r"^\| `(sluice_\w+)` \| `(slurm_\w+)`", page, re.MULTILINE)
    assert len(pairs) == 7
    assert {theirs for _, theirs in pairs} <= names
    ours = {f"{one.name}_{metric.field}" for one in MEASUREMENTS for metric in one.metrics}
    assert {mine for mine, _ in pairs} <= ours and not ours & names
