"""Slurm versions of tests: the newer ones of the longest modules under `make soak` and a target of their own only.

`make test` has a little of each of them on Debian 13's in test_journal_newer.py, and what test_placement_hook.py has
`on_both_versions`. Debian sid's, of which only `SLUICE_SID=require` (`make test-sid`) and `make soak` have anything, is
26.05 or a later one: sid moves.

`SLUICE_SLURM_PREFIX=DIR` makes every cluster that would run this system's Slurm run the one installed in DIR, whose
configured sources are in DIR/src. It is for single modules, by hand: docs/plugins.md has what was tried so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def _wanted(suite: str) -> list[Any]:
    """The suite as a parameter, where it is asked for."""
    if os.environ.get("SLUICE_TEST_SCALE") != "full" and os.environ.get(f"SLUICE_{suite.upper()}") != "require":
        return []
    return [pytest.param(suite, marks=getattr(pytest.mark, suite))]


BUILT: dict[str, Any] = {"slurm_prefix": Path(prefix)} if (prefix := os.environ.get("SLUICE_SLURM_PREFIX")) else {}
"""Options of `DevCluster.up` for the Slurm that was asked for; none: this system's."""
SID: list[Any] = _wanted("sid")
NATIVE_FIRST: list[Any] = ["native", *_wanted("trixie")]
TREES: list[Any] = [pytest.param("trixie", marks=pytest.mark.trixie), *SID]
