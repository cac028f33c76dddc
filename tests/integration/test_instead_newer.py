"""Jobs that are moved instead of preempting others, on Slurm 24.11."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.test_power_budgets import (
    Site,
    _clear,
    power_site,
    test_others_are_moved_or_preempted_by_what_that_costs,
)
from tests.integration.versions import NATIVE_FIRST

__all__ = ["_clear", "test_others_are_moved_or_preempted_by_what_that_costs"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.trixie,
    pytest.mark.skipif(not NATIVE_FIRST[1:], reason="make test-trixie"),
]


@pytest.fixture(scope="module")
def site(trixie_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    yield from power_site(make_shared_cluster, root=trixie_root)
