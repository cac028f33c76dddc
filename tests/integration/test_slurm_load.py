"""What the benchmarks on real daemons are based on: a load is submitted in time, its outcome is reported."""

from __future__ import annotations

import pytest

from benchmarks.slurm_load import Arm, Job, Ran, allocation, held_gpus, in_use, percentile
from sluice.base.errors import SluiceError

pytestmark = pytest.mark.cluster


def test_a_load_runs_and_is_reported() -> None:
    jobs = [Job(number / 2, ("-N1", "--gres=gpu:8"), 5, 1, 8, number) for number in range(3)]
    with Arm(2, None) as arm:
        ran, until = arm.run(jobs, settle_s=60)
        with pytest.raises(SluiceError, match="gpu:9"):
            arm.run([Job(0, ("-N1", "--gres=gpu:9"), 1, 1, 9)], settle_s=1)
    assert [one.job.group for one in ran] == [0, 1, 2]
    starts = [one.started for one in ran]
    assert all(start is not None for start in starts)
    ended = [one for one in ran if one.ended is not None]
    assert ended
    for one in ended:
        assert one.started is not None and one.script is not None and one.ended is not None
        assert one.started <= one.script < one.ended
    waits = [one.wait(until) for one in ran]
    assert waits[2] >= 1  # two nodes: the third had to wait for one of the others
    assert allocation(ran, 16, ran[0].submitted, until) > 30
    assert {len(one.gpus) for one in ran[:2]} == {8}  # each on a node of its own
    used, twice = in_use(ran, 16, ran[0].submitted, until)
    assert 30 < used < 100
    assert twice == 0


def test_figures_of_a_load() -> None:
    job = Job(0, (), 10, 1, 4)
    ran = [Ran(job, "1", 100, 110, 120, "COMPLETED"), Ran(job, "2", 100)]
    assert allocation(ran, 8, 100, 120) == 25
    assert ran[0].wait(105) == 5
    assert ran[0].wait(200) == 10
    assert ran[1].wait(150) == 50
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([], 95) == 0


def test_a_gpu_that_is_given_out_twice_counts_once() -> None:
    line = "JobState=RUNNING  Nodes=n[1-2] CPU_IDs=0 Mem=1 GRES=gpu:h100:3(IDX:0,2-3)  Nodes=n4 CPU_IDs=1 Mem=1 GRES="
    whole = [(node, index, 1.0) for node in ("n1", "n2") for index in (0, 2, 3)]
    assert held_gpus(f"{line}shard:32000(IDX:1) MinCPUsNode=1") == (*whole, ("n4", 1, 0.4))
    job = Job(0, (), 10, 1, 1)
    first = Ran(job, "1", 100, 100, 112, "COMPLETED", (("n1", 0, 1.0),))
    other = Ran(job, "2", 100, 105, 116, "COMPLETED", (("n1", 0, 0.5),))
    unseen = Ran(job, "3", 100, 105, 116, "COMPLETED")
    assert in_use([first], 2, 100, 120) == (25, 0)  # ten seconds, as long as it was to run
    assert in_use([first, other], 1, 100, 120) == (62.5, 1)
    assert in_use([first, unseen], 2, 100, 120) == (50, 0)
