"""Slurm versions of tests: the newer ones of the longest modules under `make soak` and a target of their own only.

`make test` has a little of each of them on Debian 13's in test_journal_newer.py, and what test_placement_hook.py has
`on_both_versions`. Debian sid's, of which only `SLUICE_SID=require` (`make test-sid`) and `make soak` have anything, is
26.05 or a later one: sid moves. `SLUICE_TEST_SLURM=PREFIX` runs single modules, by hand, on a Slurm that was built from
its tag: docs/plugins.md has what was tried so.
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


PREFIX = Path(os.environ["SLUICE_TEST_SLURM"]) if os.environ.get("SLUICE_TEST_SLURM") else None
"""A prefix that tools/build-slurm made: tests take its Slurm for that of this system."""
SID: list[Any] = _wanted("sid")
NATIVE_FIRST: list[Any] = ["native", *_wanted("trixie")]
TREES: list[Any] = [] if PREFIX else [pytest.param("trixie", marks=pytest.mark.trixie), *SID]
