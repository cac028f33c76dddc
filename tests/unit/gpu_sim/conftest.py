from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sim_node import LIBRARIES, Node

from gpu_sim import library_dir, load_platform, write_node_state


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    missing = [name for name in LIBRARIES if not (library_dir() / name).exists()]
    if missing:
        pytest.fail(f"not built: {', '.join(missing)}; run: make build", pytrace=False)


@pytest.fixture(scope="session")
def shared_trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture
def make_node(tmp_path: Path, shared_trees: Path) -> Callable[..., Node]:
    def make(platform: str, name: str = "n1") -> Node:
        folder = tmp_path / name
        write_node_state(folder, load_platform(platform), name, shared=shared_trees)
        return Node(folder)

    return make


@pytest.fixture
def dgx(make_node: Callable[..., Node]) -> Node:
    return make_node("dgx-h100")
