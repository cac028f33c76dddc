"""Budgets of watts on Slurm 24.11: what the controller that takes over knows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.test_power_budgets import (
    Site,
    power_site,
    second_leads,
    test_who_takes_over_knows_budgets_caps_estimates_and_who_holds_what,
)
from tests.integration.versions import NATIVE_FIRST

__all__ = ["second_leads", "test_who_takes_over_knows_budgets_caps_estimates_and_who_holds_what"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.trixie,
    pytest.mark.skipif(not NATIVE_FIRST[1:], reason="make test-trixie"),
]


@pytest.fixture(scope="module")
def site(trixie_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    yield from power_site(make_shared_cluster, root=trixie_root)
