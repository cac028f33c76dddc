"""Slurm's core numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gres_probe.cores import expand_ranges, fold_ranges, number_cores, slurm_cores, usual_numbering
from sluice.base.errors import SluiceError


@given(st.sets(st.integers(0, 300)))
def test_ranges_fold_and_expand(numbers: set[int]) -> None:
    assert expand_ranges(fold_ranges(numbers)) == sorted(numbers)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0-99999999999", "1-70000", "٣"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(SluiceError):
        expand_ranges(text)


def test_threads_after_cores() -> None:
    """2 sockets x 4 cores x 2 threads, numbered as by Linux on x86: 8-15 are the second threads."""
    cpus = {cpu: (cpu % 8 // 4, cpu % 8) for cpu in range(16)}
    assert number_cores(cpus) == usual_numbering(8, 2) == [*range(8), *range(8)]


def test_threads_side_by_side() -> None:
    """CPUs 0 and 1 are one core, as on POWER."""
    assert number_cores({cpu: (cpu // 8, cpu // 2) for cpu in range(16)}) == [cpu // 2 for cpu in range(16)]


def test_sockets_alternate() -> None:
    """Even CPUs on one socket, odd ones on the other, as some BIOSes number them."""
    numbering = number_cores({cpu: (cpu % 2, cpu) for cpu in range(8)})
    assert numbering == [0, 4, 1, 5, 2, 6, 3, 7]
    assert slurm_cores("0,2,4,6", numbering) == [0, 1, 2, 3]


def test_absent_cpus() -> None:
    numbering = number_cores({0: (0, 0), 2: (0, 1)})
    assert numbering == [0, -1, 1]
    assert slurm_cores("0-99", numbering) == [0, 1]


def test_no_cpus() -> None:
    assert number_cores({}) == []
    assert usual_numbering(0, 2) == []
