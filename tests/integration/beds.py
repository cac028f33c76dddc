"""What the clusters of a module are made on: a version of cgroups, and Debian 12's Slurm or Debian 13's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NEWER = "24.11"
_FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
_NEWER = _FULL or os.environ.get("SLUICE_TRIXIE") == "require"


@dataclass(frozen=True)
class Bed:
    """`name` is a version of cgroups, after a word for the newer Slurm; `root` is that one's tree."""

    name: str
    root: Path | None = None

    @property
    def description(self) -> dict[str, Any]:
        """Fields for the cluster's description."""
        return {"cgroup": self.name.split()[-1]}

    @property
    def options(self) -> dict[str, Any]:
        """Options of `DevCluster.up`."""
        return {} if self.root is None else {"root": self.root}


def beds(*, v1: bool, alone: bool = False) -> list[Any]:
    """On which beds a test runs; `v1`: version 1 of cgroups makes a difference for it; `alone`: it is of that one."""
    if alone:
        return ["v1"]
    native = ["v2", *(["v1"] if v1 or _FULL else [])]
    newer = [*(["v2"] if _NEWER else []), *(["v1"] if v1 and _FULL else [])]
    return [*native, *(pytest.param(f"{NEWER} {version}", marks=pytest.mark.trixie) for version in newer)]
