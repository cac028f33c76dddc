"""The tests in C: as one test among the others, as compiling needs the processors while tests of daemons wait."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_all_in_c_pass_under_sanitizers() -> None:
    """Behind all others, who wait for so many seconds."""
    done = subprocess.run(
        ["nice", "-n", "5", "tools/native-test"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
