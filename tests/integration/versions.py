"""Slurm versions of the longest modules: the newer one under `make soak` and `make test-trixie` only.

`make test` has a little of each of them on the newer one in test_journal_newer.py, and what test_placement_hook.py has
`on_both_versions`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

_NEWER = os.environ.get("SLUICE_TEST_SCALE") == "full" or os.environ.get("SLUICE_TRIXIE") == "require"
NATIVE_FIRST: list[Any] = ["native", *([pytest.param("trixie", marks=pytest.mark.trixie)] if _NEWER else [])]
