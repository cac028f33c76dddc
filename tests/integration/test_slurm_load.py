"""What the benchmarks on real daemons stand on: a load is submitted in time, and what became of it is told truly."""

from __future__ import annotations

import pytest

from benchmarks.slurm_load import Arm, Job, Ran, allocation, percentile
from sluice_base.errors import SluiceError

pytestmark = pytest.mark.cluster


def test_a_load_runs_and_is_told() -> None:
    jobs = [Job(number / 2, ("-N1", "--gres=gpu:8"), 3, 1, 8, number) for number in range(3)]
    with Arm(2, None) as arm:
        ran, until = arm.run(jobs, settle_s=60)
        with pytest.raises(SluiceError, match="gpu:9"):
            arm.run([Job(0, ("-N1", "--gres=gpu:9"), 1, 1, 9)], settle_s=1)
    assert [one.job.group for one in ran] == [0, 1, 2]
    starts = [one.started for one in ran]
    assert all(start is not None for start in starts)
    waits = [one.wait(until) for one in ran]
    assert waits[2] >= 1  # two nodes: the third had to wait for one of the others
    assert allocation(ran, 16, ran[0].submitted, until) > 30


def test_figures_of_a_load() -> None:
    job = Job(0, (), 10, 1, 4)
    ran = [Ran(job, "1", 100, 110, 120, "COMPLETED"), Ran(job, "2", 100)]
    assert allocation(ran, 8, 100, 120) == 25
    assert ran[0].wait(105) == 5
    assert ran[0].wait(200) == 10
    assert ran[1].wait(150) == 50
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([], 95) == 0
