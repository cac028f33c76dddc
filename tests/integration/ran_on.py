"""What tests ran on, and how many passed: build/tested-on.json, of which tools/tested_on.py makes docs/tested-on.md."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.files import write_atomic
from sluice.base.slurm_version import format_slurm_version
from tests.integration.booted import Machine

RESULTS = Path(__file__).resolve().parents[2] / "build/tested-on.json"
Counts = dict[tuple[str, str], Counter[str]]
"""Outcomes by what tests ran on and their module."""


def ran_on(fixtures: Iterable[Any]) -> str:
    """Slurm, version of cgroups, init and Debian's release of a test's cluster or machine; "" where it has none."""
    for fixture in fixtures:
        value = getattr(fixture, "machine", fixture)
        if isinstance(value, Machine):
            return _words(value.tree, "v2", value.init)
        cluster = getattr(value, "cluster", value)
        if isinstance(cluster, DevCluster):
            facts = cluster.facts
            root = facts["root"]
            return _words(root and Path(root), facts["cgroup"], "sluice cluster", Path(facts["slurm_prefix"]))
    return ""


@cache
def _words(root: Path | None, cgroup: str, init: str, prefix: Path = Path("/usr")) -> str:
    tree = SlurmTree(prefix, root)
    tag = "" if tree.is_distribution else " (tag)"
    return "|".join((format_slurm_version(tree.version()) + tag, cgroup, init, tree.suite()))


def keep(counts: Counts, path: Path = RESULTS) -> None:
    """Replace what is known of these modules."""
    known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    for (where, module), outcomes in counts.items():
        known.setdefault(where, {})[module] = {"day": day, **outcomes}
    write_atomic(path, json.dumps(known, indent=1, sort_keys=True) + "\n")
