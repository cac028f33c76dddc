"""Budgets of watts on Slurm 24.11: what the controller that takes over knows of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def type_shards(cluster: DevCluster) -> None:
    """Give shards their GPUs' type in slurm.conf. Without one the backup of stock Slurm 24.11.5 that takes over calls
    the nodes invalid ("gres/shard type (h100) reported but not configured") and drains them."""
    for host in ("ctl2", "ctl1"):
        cluster.stop_daemon(f"slurmctld@{host}")
    config = cluster.layout.slurm / "slurm.conf"
    config.write_text(re.sub(r",shard:(\d)", r",shard:h100:\1", config.read_text()))
    for host in ("ctl1", "ctl2"):
        cluster.start_daemon(f"slurmctld@{host}")


@pytest.fixture(scope="module")
def site(trixie_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    def make(*description: Any, **options: Any) -> DevCluster:
        cluster = make_shared_cluster(*description, **options)
        type_shards(cluster)
        return cluster

    yield from power_site(make, root=trixie_root)
