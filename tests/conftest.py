"""What all tests share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def full_scale() -> bool:
    """True under `make soak`: the full counts instead of the reduced ones, through the same code."""
    return os.environ.get("SLUICE_TEST_SCALE") == "full"
