"""A Slurm that was built from its tag, of a release with which job_submit and SPANK admit and no more.

`SLUICE_TEST_SLURM=PREFIX pytest tests/integration/test_tags.py`, with a PREFIX that tools/build-slurm made.
docs/plugins.md names the other modules that are run there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.slurm_tree import SlurmTree
from policy.compiled import CompiledPolicy, Tenant
from sluice.plugin.builder import ADMITTED
from tests.integration.settled import until
from tests.integration.versions import PREFIX

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(PREFIX is None, reason="no Slurm built from its tag: SLUICE_TEST_SLURM"),
]


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    """Level admit, the node agent, accounting."""
    policy = CompiledPolicy(source="test", tenants=[Tenant(account="physics", run_time_s=600)])
    description = {
        "nodes": [{"names": "n1", "platform": "dgx-h100"}],
        "controllers": 1,
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "agent": True,
        "sluice": {"level": "admit", "policy": policy.render()},
    }
    return make_shared_cluster(description)


def test_the_plugins_are_those_of_public_headers(cluster: DevCluster) -> None:
    if PREFIX is None or SlurmTree(PREFIX).version()[:2] not in ADMITTED:
        pytest.skip("has plugins with private headers")
    names = {path.name for path in (cluster.layout.folder / "plugins").glob("*.so")}
    assert "job_submit_sluice.so" in names and "site_factor_sluice.so" not in names


def test_they_admit(cluster: DevCluster) -> None:
    def sbatch(*words: str) -> str:
        command = ["sbatch", "-o", "/dev/null", "-H", "-A", "physics", *words, "--wrap", "true"]
        done = cluster.run(command, user="alice", check=False)
        return done.stderr or done.stdout

    assert "may run a job for 00:10:00 at most" in sbatch("-t", "20")
    assert "Submitted batch job" in sbatch("-t", "5")
    assert "Submitted batch job" in sbatch("-t", "5", "--gpu-mem=10G")
    cluster.run(["scancel", "-u", "alice"])


def test_gpu_memory_becomes_shards_that_are_granted_and_accounted(cluster: DevCluster) -> None:
    done = cluster.run(
        ["srun", "-A", "physics", "-t", "5", "--gpu-mem=10G", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], user="alice"
    )
    assert len(done.stdout.split()) == 1, done.stdout
    sacct = ["sacct", "-a", "-X", "-n", "-P", "-o", "AllocTRES"]
    until(lambda: "gres/shard=10240" in cluster.run(sacct).stdout)
