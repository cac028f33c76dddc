"""Jobs that are saved as they run, on Slurm 24.11: a job with a GPU, saved, requeued, and resumed on another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.gpu_saved_jobs import goes_on_on_another_gpu, gpu_site

pytestmark = [pytest.mark.cluster, pytest.mark.trixie]


@pytest.fixture(scope="module")
def cluster(
    trixie_root: Path, make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory
) -> DevCluster:
    return gpu_site(make_shared_cluster, tmp_path_factory.mktemp("platform"), trixie_root)


def test_a_job_goes_on_on_another_gpu(cluster: DevCluster) -> None:
    goes_on_on_another_gpu(cluster)
