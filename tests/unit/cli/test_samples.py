"""The samples in etc/ are read by the code that they are samples for."""

from __future__ import annotations

from pathlib import Path

from dev_cluster.description import load_description
from policy.grouping import load_grouping

EXAMPLES = Path(__file__).parents[3] / "etc" / "examples"


def test_the_cluster_file() -> None:
    assert load_description(EXAMPLES / "cluster.yaml").hosts == ["h100-1", "h100-2", "mi300x-1", "l40s-1", "cpu-1"]


def test_the_policy_file() -> None:
    assert [strategy.by for strategy in load_grouping(EXAMPLES / "sluice.yaml").strategies] == [
        "memory",
        "link-domain",
        "expression",
    ]


def test_every_sample_is_tried_here() -> None:
    policies = {path.name for path in EXAMPLES.glob("policy-*.yaml")}  # tests/unit/policy, tests/integration
    assert {path.name for path in EXAMPLES.iterdir()} == {"cluster.yaml", "sluice.yaml"} | policies
