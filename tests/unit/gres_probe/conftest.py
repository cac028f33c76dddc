"""What the probe's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_node import LIBRARIES, Simulate, SimulatedNode

from gpu_sim import library_dir, load_platform, write_node_state


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the machines' /sys and /proc are kept, once for all machines of a platform."""
    return tmp_path_factory.mktemp("trees")


@pytest.fixture
def simulate(tmp_path: Path, trees: Path) -> Simulate:
    """A function that makes a machine of a platform; skips where a library that it needs is not built."""

    def make(platform: str) -> SimulatedNode:
        loaded = load_platform(platform)
        for vendor in {loaded.model_of(index).vendor for index in range(len(loaded.gpus))}:
            if not (library_dir() / LIBRARIES[vendor]).exists():
                pytest.skip(f"{LIBRARIES[vendor]} is not built: make build")
        folder = tmp_path / platform
        write_node_state(folder, loaded, "n1", shared=trees)
        return SimulatedNode(folder)

    return make
