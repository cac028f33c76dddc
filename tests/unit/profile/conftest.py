from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_sim"))

from profiled import LIBRARY, Profiled
from sim_node import Node

from gpu_sim import library_dir, load_platform, write_node_state


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    if not LIBRARY.exists() or not (library_dir() / "libcupti.so.12").exists():
        pytest.fail("not built; run: make build", pytrace=False)


@pytest.fixture(scope="session")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Node:
    folder = tmp_path_factory.mktemp("nodes") / "n1"
    write_node_state(folder, load_platform("h100x1"), "n1")
    return Node(folder)


@pytest.fixture(scope="session")
def mi300x(tmp_path_factory: pytest.TempPathFactory) -> Node:
    folder = tmp_path_factory.mktemp("nodes") / "n2"
    write_node_state(folder, load_platform("mi300x-platform"), "n2")
    return Node(folder)


@pytest.fixture(scope="session")
def max1550(tmp_path_factory: pytest.TempPathFactory) -> Node:
    folder = tmp_path_factory.mktemp("nodes") / "n3"
    write_node_state(folder, load_platform("intel-max-1550x4"), "n3")
    return Node(folder)


@pytest.fixture
def vendor() -> str:
    """Whose GPUs the programs use."""
    return "nvidia"


@pytest.fixture
def make(tmp_path: Path, h100: Node, mi300x: Node, max1550: Node, vendor: str) -> Iterator[Callable[..., Profiled]]:
    """A program on a simulated node, into which the driver loads the library."""
    node = {"nvidia": h100, "amd": mi300x, "intel": max1550}[vendor]
    started: list[Profiled] = []

    def start(code: str, *arguments: object, folder: Path | None = None, **environment: str) -> Profiled:
        folder = folder or tmp_path / "profile"
        folder.mkdir(exist_ok=True)
        started.append(Profiled.start(node, folder, code, *arguments, vendor=vendor, **environment))
        return started[-1]

    yield start
    for program in started:
        program.end()
