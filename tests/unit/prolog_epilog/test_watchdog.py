"""Who is warned and ended: limits of jobs against what processes hold."""

from __future__ import annotations

from collections.abc import Callable

from prolog_epilog import watchdog
from prolog_epilog.cgroups import Place
from prolog_epilog.owners import Owner
from prolog_epilog.sampling import Usage
from prolog_epilog.watchdog import OUTSIDE, Act
from sluice.exchange.record import JobRecord
from tests.unit.prolog_epilog.examples import GIB, granted


def places(found: dict[int, Place], users: dict[int, int] | None = None) -> Callable[[int], Owner]:
    """Whose processes are; those of jobs are of the user that `record` has."""
    return lambda pid: Owner(found.get(pid), (users or {}).get(pid, 1000 if pid in found else None))


def judge(usage: Usage, records: dict[int, JobRecord], owner_of: Callable[[int], Owner]) -> list[Act]:
    return watchdog.judge(usage, records, owner_of).acts


def test_a_job_is_warned_once_at_nine_tenths_and_ended_above() -> None:
    one, here = granted(10 * GIB), places({1: Place(7, "0")})
    assert list(judge([("GPU-0", 1, 9 * GIB - 1)], {7: one}, here)) == []
    [act] = judge([("GPU-0", 1, 9 * GIB)], {7: one}, here)
    assert (act.action, act.charged, act.limit) == ("warn", 9 * GIB, 10 * GIB)
    one.grants[0].warned = True
    assert list(judge([("GPU-0", 1, 10 * GIB)], {7: one}, here)) == []  # to the last byte
    [act] = judge([("GPU-0", 1, 10 * GIB + 1)], {7: one}, here)
    assert (act.action, act.step, act.pids) == ("end", "0", (1,))
    assert one.grants[0].peak == 10 * GIB + 1


def test_processes_of_a_job_count_together_and_the_largest_step_ends() -> None:
    here = places({1: Place(7, "0"), 2: Place(7, "1"), 3: Place(7, "1"), 4: Place(8, "0")})
    usage = [("GPU-0", 1, 4 * GIB), ("GPU-0", 2, 3 * GIB), ("GPU-0", 3, 4 * GIB), ("GPU-0", 4, 50 * GIB)]
    [act] = judge(usage, {7: granted(10 * GIB), 8: granted(60 * GIB, job=8)}, here)
    assert (act.job, act.step, act.charged, act.pids) == (7, "1", 11 * GIB, (3, 2))


def test_a_gpu_that_was_not_granted_may_not_be_used_and_strangers_are_left_alone() -> None:
    [act] = judge([("GPU-1", 1, 1)], {7: granted(None)}, places({1: Place(7, "0")}))
    assert (act.action, act.limit) == ("end", 0)
    assert list(judge([("GPU-0", 1, 90 * GIB)], {7: granted(None)}, places({1: Place(7, "0")}))) == []
    assert (
        list(judge([("GPU-0", 1, 90 * GIB), ("GPU-0", 2, 90 * GIB)], {7: granted(1)}, places({2: Place(9, "0")}))) == []
    )


def test_what_a_jobs_user_runs_outside_of_it_counts_to_it() -> None:
    """E.g. a program that came by ssh, past pam_slurm_adopt."""
    here = places({1: Place(7, "0")}, {2: 1000, 3: 1001, 4: 0})
    usage = [("GPU-0", 1, 6 * GIB), ("GPU-0", 2, 7 * GIB), ("GPU-0", 3, 50 * GIB), ("GPU-0", 4, GIB)]
    [act] = judge(usage, {7: granted(10 * GIB)}, here)
    assert (act.action, act.step, act.charged, act.pids) == ("end", OUTSIDE, 13 * GIB, (2,))
    [act] = judge([("GPU-1", 2, 1)], {7: granted(10 * GIB)}, here)
    assert (act.action, act.step, act.limit) == ("end", OUTSIDE, 0)
    [act] = judge([("GPU-0", 2, 5 * GIB)], {6: granted(GIB, job=6), 7: granted(None)}, here)
    assert act.job == 6
    assert list(judge([("GPU-0", 4, 90 * GIB)], {7: granted(1, uid=0)}, here)) == []  # root's
