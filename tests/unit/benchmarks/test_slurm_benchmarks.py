"""The figures that the benchmarks on real daemons compute from what they record."""

from __future__ import annotations

import pytest

from benchmarks.slurm_fragmentation import scheduler_parameters
from benchmarks.slurm_gang import in_part
from benchmarks.slurm_load import Job, Ran
from benchmarks.slurm_throughput import hook_p99_us
from sluice.base.errors import SluiceError

NO_TIMES = {"select.hook_us_to_5": 0, "select.hook_us_to_20": 0, "select.hook_us_to_100": 0, "select.hook_us_more": 0}


def test_the_hooks_own_time_is_of_the_decisions_of_one_phase() -> None:
    before = NO_TIMES | {"select.hook_us_to_5": 90000, "select.refused": 90000}
    after = before | {"select.hook_us_to_20": 296, "select.hook_us_to_100": 4}
    assert hook_p99_us(after, NO_TIMES) == 5  # the few that start do not change the figure of the many that wait
    assert hook_p99_us(after, before) == 100
    assert hook_p99_us(after | {"select.hook_us_to_20": 396}, before) == 20  # 99 of 100
    assert hook_p99_us(after | {"select.hook_us_more": 4}, before) > 1e6
    assert hook_p99_us(after, {}) == hook_p99_us(after, NO_TIMES)


def test_a_phase_without_decisions_has_no_figure() -> None:
    for before in (NO_TIMES, {}):
        with pytest.raises(SluiceError, match="decided nothing"):
            hook_p99_us(before, before)


def test_all_of_slurms_periods_are_compressed_as_the_jobs_are() -> None:
    def periods(speed_up: float) -> dict[str, int]:
        words = dict(word.partition("=")[::2] for word in scheduler_parameters(speed_up).split(","))
        assert words["bf_window"] == "1440"
        return {
            name: int(words[name]) for name in ("bf_interval", "bf_resolution", "sched_interval", "batch_sched_delay")
        }

    by_itself = {"bf_interval": 30, "bf_resolution": 60, "sched_interval": 60, "batch_sched_delay": 3}
    assert periods(1) == by_itself
    assert periods(10) == {"bf_interval": 3, "bf_resolution": 6, "sched_interval": 6, "batch_sched_delay": 1}


def _gang(*members: tuple[float | None, float | None]) -> list[Ran]:
    """Members that got their nodes at the first time, and whose script began at the second."""
    job = Job(0, (), 10, 1, 8, 1)
    return [Ran(job, str(number), 100, start, script=script) for number, (start, script) in enumerate(members)]


def test_a_gang_starts_in_part_where_a_script_runs_while_a_member_has_no_nodes() -> None:
    assert not in_part(_gang((110, 112.3), (112, 112.1)))  # the first waited for the second's nodes
    assert in_part(_gang((110, 110.2), (112, 112.1)))  # the first did not
    assert in_part(_gang((110, 110.2), (None, None)))
    assert in_part(_gang((None, 110.2), (None, None)))  # and was queued again since
    assert in_part(_gang((110, None), (None, None)))
    assert in_part(_gang((110, 117), (116, 117)))
    assert not in_part(_gang((110, 110.0), (110, 110.9)))  # one second: starts are reported in whole ones
    assert not in_part(_gang((110, None), (110, None)))  # scripts are about to begin
    assert not in_part(_gang((None, None), (None, None)))
