from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_sim"))

from limited import MIB, Job, new_job
from sim_node import Node

from gpu_sim import library_dir, load_platform, write_node_state
from sluice.core.limit import Device, library_path

TOTAL = 81008 * MIB  # of the simulated H100: what its driver reports to programs
CONTEXT = 520 * MIB


@pytest.fixture(scope="session", autouse=True)
def _ready() -> None:
    if os.geteuid() != 0:
        pytest.skip("a job's region is root's, and its place is a mount namespace: needs root")
    if not library_path().exists() or not (library_dir() / "libcuda.so.1").exists():
        pytest.fail("not built; run: make build", pytrace=False)


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture
def make_node(tmp_path: Path, trees: Path) -> Callable[[str], Node]:
    def make(platform: str) -> Node:
        folder = tmp_path / platform
        write_node_state(folder, load_platform(platform), "n1", shared=trees)
        folder.chmod(0o755)
        return Node(folder)

    return make


@pytest.fixture
def dgx(make_node: Callable[[str], Node]) -> Node:
    return make_node("dgx-h100")


@pytest.fixture
def make_job(tmp_path: Path, dgx: Node) -> Iterator[Callable[..., Job]]:
    """A job on the first GPUs of a DGX, limited to so many MiB each: ``make_job(1000, 2000)``."""
    jobs: list[Job] = []

    def make(*limits: int, spill: int = 0, node: Node = dgx, **more: Any) -> Job:
        devices = [
            Device(TOTAL, limit * MIB, CONTEXT, uuid=node.get(i, "uuid"), spill=spill * MIB)
            for i, limit in enumerate(limits)
        ]
        for parent in tmp_path.parents:
            if parent.name.startswith("pytest") and parent.owner() == "root":
                parent.chmod(parent.stat().st_mode | 0o055)
        tmp_path.chmod(0o755)
        job = new_job(tmp_path / f"region{len(jobs)}", node.environment(), devices, **more)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.end()
