"""Times to the first decision, out of files that the plugins' own recorder wrote."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from sluice.controllerd.metrics.decided import Decided
from sluice.controllerd.spans import waits
from sluice.controllerd.spans.waits import Waits
from sluice.explain.decisions import PLAN, Decision, Mode, Outcome, list_files, read_entries
from tests.unit.explain.decision_files import forge, run_churn


def test_what_is_followed_is_what_is_recorded(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    run_churn(churn, folder, 5, steps=400)
    first: dict[tuple[int, int], str] = {}
    for path in list_files(folder):
        for entry in read_entries(path):
            if isinstance(entry.body, Decision) and entry.body.mode != Mode.TEST_ONLY:
                job = entry.body.job
                first.setdefault((job.array_id or job.id, job.submit), job.account)
    assert len(first) > 20
    decided = Decided(folder, -2.0)
    decided.look()
    assert {account: jobs for account, (jobs, _) in decided.totals.items()} == Counter(first.values())


def test_how_jobs_started_is_found_again(churn: Path, tmp_path: Path) -> None:
    run_churn(churn, tmp_path, 5, steps=400)
    expected: dict[tuple[int, int | None], list[tuple[float, float]]] = defaultdict(list)
    for path in list_files(tmp_path):
        for entry in read_entries(path):
            body = entry.body
            if not isinstance(body, Decision) or body.mode != Mode.RUN_NOW:
                continue
            if body.outcome not in (Outcome.REFUSED, Outcome.RESERVED):
                job = body.job
                expected[job.array_id or job.id, job.array_task].append((entry.time, body.core_ns / 1e9))
    assert len(expected) > 20
    followed = Waits(tmp_path)
    followed.look()
    for (number, task), starts in expected.items():
        assert [(one.time, one.core_s) for one in followed.starts_of(number, task)] == starts[-8:]


def plan(job: int, gang: int, planned: int) -> tuple[int, bytes]:
    """An entry of a plan without a start: all numbers are below 64, one byte each."""
    no_start = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f"
    return PLAN, struct.pack("BB", job, gang) + no_start + struct.pack("BBB", 0, 0, planned)


def test_members_of_a_gang_are_those_of_one_plan(tmp_path: Path) -> None:
    entries = [plan(1, 1, 10), plan(2, 1, 10), plan(3, 2, 10), plan(5, 0, 10), plan(4, 2, 10), plan(2, 1, 20)]
    (tmp_path / "decisions.000000000001").write_bytes(forge(entries))
    followed = Waits(tmp_path)
    followed.look()
    assert [followed.gang_of(job) for job in range(1, 7)] == [[1, 2], [1, 2], [3, 4], [3, 4], [], []]


def test_a_gang_of_which_some_members_are_planned_otherwise_is_whole(tmp_path: Path) -> None:
    entries = [plan(job, 1, 10) for job in (1, 2, 3)] + [plan(job, 1, 20) for job in (1, 3)]
    (tmp_path / "decisions.000000000001").write_bytes(forge(entries))
    others = [plan(job, 1, 30) for job in (1, 3, 4)]
    followed = Waits(tmp_path)
    followed.look()
    assert [followed.gang_of(job) for job in range(1, 5)] == [[1, 2, 3]] * 3 + [[]]
    (tmp_path / "decisions.000000000002").write_bytes(forge(others))
    followed.look()
    assert [followed.gang_of(job) for job in (1, 3, 4)] == [[1, 3, 4]] * 3


def test_gangs_of_two_passes_within_a_second_are_not_one(tmp_path: Path) -> None:
    """The first gang has started, and the second one has its number now."""
    passes = [plan(1, 1, 10), plan(2, 1, 10), plan(3, 2, 10), plan(4, 2, 10)], [plan(3, 1, 10), plan(4, 1, 10)]
    for number, entries in enumerate(passes):
        (tmp_path / f"decisions.00000000000{number}").write_bytes(forge(entries, number * 500_000))
    followed = Waits(tmp_path)
    followed.look()
    assert [followed.gang_of(job) for job in range(1, 5)] == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_what_is_known_of_starts_and_gangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_MOST_JOBS", 4)
    entries = [plan(job, job // 2 + 1, 10) for job in range(2, 40)]
    (tmp_path / "decisions.000000000001").write_bytes(forge(entries))
    followed = Waits(tmp_path)
    followed.look()
    assert [job for job in range(40) if followed.gang_of(job)] == [36, 37, 38, 39]
