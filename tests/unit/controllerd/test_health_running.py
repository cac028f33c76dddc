"""A listing of jobs costs slurmctld as much as it has jobs: it is made seldom where it is dear."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from sluice.controllerd.health import running as module
from sluice.controllerd.health.running import Running
from sluice.slurm import SlurmClient
from sluice.slurm.answers import Job
from tests.unit.controllerd.slurm_objects import a_job


class Slurm:
    """A listing takes `took` seconds of a clock that only it moves."""

    def __init__(self, took: float) -> None:
        self.took, self.now, self.listings = took, 100.0, 0

    def monotonic(self) -> float:
        return self.now

    def jobs(self, *, states: Iterable[str]) -> list[Job]:
        assert list(states) == ["RUNNING"]
        self.now += self.took
        self.listings += 1
        return [a_job(self.listings)]


@pytest.mark.parametrize(("took", "kept"), [(0.01, 0.2), (1.0, 20.0), (9.0, 30.0)])
def test_a_listing_serves_all_until_it_may_be_made_again(
    monkeypatch: pytest.MonkeyPatch, took: float, kept: float
) -> None:
    slurm = Slurm(took)
    monkeypatch.setattr(module, "time", slurm)
    running, began = Running(cast(SlurmClient, slurm)), slurm.now
    assert [job.id for job in running.jobs()] == [1]
    slurm.now = began + 0.99 * kept
    assert [job.id for job in running.jobs()] == [1]
    slurm.now = began + 1.01 * kept
    assert [job.id for job in running.jobs()] == [2]
