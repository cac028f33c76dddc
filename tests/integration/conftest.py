"""Real Slurm clusters for tests: one `demo` that all share, and small ones that a test may break."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.description import ClusterDescription, parse_description
from sluice.plugin.sources import SourcesUnavailableError
from tests.integration.beds import NEWER, Bed, beds
from tests.integration.ran_on import ran_on
from tests.integration.versions import PREFIX, SID, TREES

MakeCluster = Callable[..., DevCluster]

if PREFIX is not None:  # for daemons and commands that tests start without a cluster
    os.environ["PATH"] = f"{PREFIX}/sbin:{PREFIX}/bin:{os.environ['PATH']}"


@pytest.fixture(scope="session", autouse=True)
def _needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("real daemons in namespaces of their own need root")


@pytest.fixture(scope="session")
def cluster_folders() -> Iterator[Path]:
    """A folder for state folders: in memory where there is such a place, as thousands of small files go there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sluice-", dir=memory if memory.is_mount() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def demo(cluster_folders: Path) -> Iterator[DevCluster]:
    """The shipped cluster `demo`, up. Shared: leave no job behind, and stop nothing."""
    cluster = DevCluster(cluster_folders / "demo")
    cluster.up("demo", attached=True, slurm_prefix=PREFIX)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def make_shared_cluster(cluster_folders: Path) -> Iterator[MakeCluster]:
    """Like `make_cluster`, for clusters that the tests of a module share."""
    yield from _factory(cluster_folders)


@pytest.fixture
def make_cluster(cluster_folders: Path) -> Iterator[MakeCluster]:
    """A function that brings up a cluster of one's own: ``make_cluster(description, **options of DevCluster.up)``.

    The description is a file's path, a shipped name or a dictionary. The cluster is brought down with the test.
    """
    yield from _factory(cluster_folders)


def _factory(folders: Path) -> Iterator[MakeCluster]:
    made: list[DevCluster] = []

    def make(description: str | Path | dict[str, Any], **options: Any) -> DevCluster:
        parsed: str | Path | ClusterDescription
        if isinstance(description, dict):
            parsed = parse_description(yaml.safe_dump(description), source="test")
        else:
            parsed = description
        cluster = DevCluster(Path(tempfile.mkdtemp(dir=folders)))
        made.append(cluster)
        try:
            own = {} if options.get("root") else {"slurm_prefix": PREFIX}
            cluster.up(parsed, **{"attached": True, **own, **options})
        except SourcesUnavailableError as error:  # a machine without network: the plugins cannot be built
            pytest.skip(f"no sources of Slurm: {error}")
        return cluster

    yield make
    for cluster in made:
        cluster.down()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note what a test ran on."""
    if call.when == "call" and (where := ran_on(getattr(item, "funcargs", {}).values())):
        item.user_properties.append(("ran_on", where))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of clusters made on a `bed` run on version 2 of cgroups, those marked `cgroup1` on version 1 as well.

    At full scale all run on both, and there and by `make test-trixie` on version 2 with Slurm 24.11. At full scale
    those marked run on version 1 with that Slurm, too.
    """
    if "bed" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("cgroup1")
        of_v1 = {} if mark is None else mark.kwargs
        metafunc.parametrize("bed", beds(v1=mark is not None, **of_v1), indirect=True, scope="module")


@pytest.fixture(scope="module")
def bed(request: pytest.FixtureRequest) -> Bed:
    """See `pytest_generate_tests`."""
    return Bed(request.param, request.getfixturevalue("trixie_root") if NEWER in request.param else None)


@pytest.fixture(scope="session")
def trixie_root() -> Path:
    """A Debian 13 tree with its own Slurm, made on first use and kept in build/trixie."""
    return _debian_tree("trixie")


@pytest.fixture(scope="session")
def bookworm_root() -> Path:
    """The same of Debian 12: for machines that boot, as clusters run this system's Slurm."""
    return _debian_tree("bookworm")


@pytest.fixture(scope="session")
def sid_root() -> Path:
    """A tree of Debian sid, likewise. Made by `make test-sid` and `make soak` only: it takes minutes."""
    if not SID:
        pytest.skip("Debian sid's Slurm: make test-sid")
    return _debian_tree("sid")


@pytest.fixture(scope="module", params=TREES or [None])
def newer_root(request: pytest.FixtureRequest) -> Path | None:
    """The tree of each Slurm that is newer than this system's; None: one that was built from its tag."""
    if request.param is None:
        return None
    tree: Path = request.getfixturevalue(f"{request.param}_root")
    return tree


def _debian_tree(suite: str) -> Path:
    tree = Path(__file__).parents[2] / "build" / suite
    with (tree.parent / f"{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest-xdist may make it just now
        made = subprocess.run(
            ["tools/debian-tree", "--suite", suite, str(tree)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if made.returncode != 0:
        reason = f"no tree of Debian {suite}: {made.stderr.strip()[-500:]}"
        if os.environ.get(f"SLUICE_{suite.upper()}") == "require":
            pytest.fail(reason)
        pytest.skip(reason)
    return tree
