"""Jobs of which a preflight found a node at fault: when they are let start again, and when Slurm's pause holds."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.preflight_restarts import FIRST_FILE, Restarts
from sluice.exchange.plugin_list import items_of
from sluice.exchange.preflight_jobs import AtFault, JobPreflight
from sluice.slurm.answers import Job
from tests.unit.controllerd.slurm_objects import a_job

FOUND = JobPreflight("ann", 1e9, "n[1-3]", 4, 2.0, "perftest", "fault", "words", [AtFault("n3", "link slow")])
HAD = a_job(7, state="RUNNING", node_count=3, tres={"node": 3, "cpu": 12, "gres/gpu": 3}, tres_per_node="gres:gpu:1")


class Slurm:
    """One job that is followed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now = 100.0
        self.state_save = folder
        monkeypatch.setattr("sluice.controllerd.preflight_restarts.time.monotonic", lambda: self.now)
        self.client = self.commands = self
        self.job: Job | None = replace(HAD, priority=5, eligible_time=10)
        self.others: list[Job] = []
        self.boot = "2026-11-29T10:00:00"
        self.asked: list[str] = []
        self.kept: list[JobPreflight] = []
        self.fails = False
        self.restarts = Restarts(cast(Site, self), lambda _, preflight: self.kept.append(preflight))
        self.restarts.follow(7, FOUND, HAD)
        self.restarts.refused(7)

    def jobs(self, *, ids: list[int], states: list[str]) -> list[Job]:
        assert (ids, states) == ([7], ["all"])
        if self.fails:
            raise SluiceError("squeue: timed out")
        return [] if self.job is None else [*self.others, self.job]

    def config(self) -> dict[str, str]:
        return {"BOOT_TIME": self.boot}

    def output(self, *words: str) -> str:
        self.asked.append(" ".join(words))
        return ""

    def first(self) -> list[tuple[int, int]]:
        """What slurmctld's planner reads."""
        path = self.state_save / FIRST_FILE
        text = path.read_text()
        line = re.compile(r"(\d+) (\d+)")
        found = items_of(text, head="sluice-first 1\n", line=line, what="a job", source=str(path), remedy="")
        return [(int(job), int(until)) for job, until in found]

    def after(self, seconds: float, **changes: Any) -> list[str]:
        """What was asked of Slurm in a look at the job, after this time."""
        self.now += seconds
        if self.job is not None:
            self.job = replace(self.job, **changes)
        self.asked.clear()
        self.restarts.run()
        return list(self.asked)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    return Slurm(monkeypatch, tmp_path)


RELEASED = ["scontrol update JobId=7 StartTime=now"]


def test_a_job_starts_again_a_second_after_its_first_run_has_ended_on_all_nodes(slurm: Slurm) -> None:
    assert slurm.after(0.5) == []
    assert slurm.after(90, state="COMPLETING") == []
    assert slurm.after(0.5, state="PENDING", eligible_time=321) == []
    assert slurm.after(0.5) == []  # the second may be the one in which it ended
    assert slurm.after(0.5) == RELEASED
    requeued, released = slurm.kept
    assert requeued.requeued is not None and requeued.released is None
    assert released.requeued == requeued.requeued and released.released is not None
    assert slurm.after(0.5) == []


def test_until_it_runs_it_goes_before_all_others_for_five_minutes_at_most(slurm: Slurm) -> None:
    [(job, until)] = slurm.first()
    assert job == 7 and time.time() + 290 < until <= time.time() + 300
    for seconds, changes in ((0.5, {}), (1, {"state": "PENDING", "eligible_time": 321}), (1, {}), (5, {})):
        slurm.after(seconds, **changes)
        assert slurm.first() == [(7, until)]
    slurm.after(1, state="RUNNING")
    assert slurm.first() == []
    for number in (8, 7):
        slurm.restarts.follow(number, FOUND, HAD)
        slurm.restarts.refused(number)
    assert [job for job, _ in slurm.first()] == [7, 8]


def test_a_job_that_its_user_requeues_as_no_node_was_drained_is_like_any_other(slurm: Slurm) -> None:
    """In shadow mode it could do so each time that a preflight finds the same node."""
    slurm.restarts.follow(7, FOUND, HAD)
    assert slurm.first() == [] == slurm.after(0.5)
    for seconds in (0.5, 2, 2):
        assert slurm.after(seconds, state="PENDING", eligible_time=321) == []
    assert slurm.first() == [] == slurm.kept


def test_a_node_that_asks_again_makes_it_no_longer(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    before = slurm.first()
    monkeypatch.setattr("sluice.controllerd.preflight_restarts.time.time", lambda: 4e9)
    slurm.restarts.refused(7)
    slurm.restarts.refused(8)  # is not followed
    assert slurm.first() == before


@pytest.mark.parametrize("seconds", [0.0, 3.0])
@pytest.mark.parametrize(
    "changes", [{"node_count": 200}, {"tres": {"node": 3, "gres/gpu": 24}}, {"tres_per_node": "gres:gpu:8"}]
)
def test_a_job_that_its_user_makes_larger_does_not_go_first(
    slurm: Slurm, seconds: float, changes: dict[str, Any]
) -> None:
    slurm.after(0.5, state="PENDING", eligible_time=321)
    slurm.after(seconds)
    slurm.after(0.5, **changes)
    assert slurm.first() == []


@pytest.mark.parametrize("changes", [{"priority": 0}, {"eligible_time": 4_000_000_000}])
def test_a_job_that_its_user_puts_off_once_it_may_start_keeps_no_place(slurm: Slurm, changes: dict[str, Any]) -> None:
    slurm.after(0.5, state="PENDING", eligible_time=321)
    assert slurm.after(1) == RELEASED
    slurm.after(0.5, eligible_time=int(time.time()) + 1)
    assert slurm.first()
    slurm.after(0.5, **changes)
    assert slurm.first() == []


def test_a_job_that_does_not_start_in_time_waits_like_any_other(slurm: Slurm) -> None:
    for seconds in (0.5, 1, 250):
        slurm.after(seconds, state="PENDING", eligible_time=321)
        assert slurm.first()
    slurm.after(60)
    assert slurm.first() == []


def test_a_full_disk_costs_the_place_alone(slurm: Slurm, tmp_path: Path) -> None:
    slurm.state_save = tmp_path / "none"
    slurm.after(0.5, state="PENDING", eligible_time=321)
    assert slurm.after(1) == RELEASED


def test_a_job_whose_node_was_not_drained_starts_where_it_is(slurm: Slurm) -> None:
    assert slurm.after(59) == slurm.after(2) == []
    assert slurm.after(1, state="PENDING", eligible_time=321) == slurm.after(2) == []  # for another reason, later
    assert slurm.kept == []


@pytest.mark.parametrize("changes", [{"priority": 0}, {"eligible_time": 99_999}, {"eligible_time": None}])
def test_what_is_held_or_has_another_time_keeps_it(slurm: Slurm, changes: dict[str, Any]) -> None:
    slurm.after(1, state="PENDING", eligible_time=321)
    assert slurm.after(2, **changes) == []
    assert [one.released for one in slurm.kept] == [None]


def test_after_a_restart_of_slurmctld_its_pause_holds(slurm: Slurm) -> None:
    """It may not know that nodes still end the job."""
    slurm.after(0.5)
    slurm.boot = "2026-11-29T10:05:00"
    assert slurm.after(0.5, state="PENDING", eligible_time=321) == slurm.after(2) == []


def test_an_array_s_task_is_meant_alone(slurm: Slurm) -> None:
    slurm.after(1, state="PENDING", eligible_time=321, array_id=6, array_tasks="2")
    assert slurm.after(2) == ["scontrol update JobId=6_2 StartTime=now"]


def test_a_job_that_is_gone_or_cannot_be_asked_for_is_given_up(slurm: Slurm) -> None:
    slurm.fails = True
    assert slurm.after(1) == []
    slurm.fails = False
    assert slurm.after(1, state="PENDING", eligible_time=321) == []
    slurm.job = None
    assert slurm.after(1) == []
    slurm.job = replace(HAD, state="PENDING", priority=5, eligible_time=321)
    assert slurm.after(2) == []


def test_an_array_s_last_task_is_not_taken_for_another_one(slurm: Slurm) -> None:
    """It has the array's number, for which Slurm shows all of its tasks."""
    slurm.others = [replace(a_job(9), state="PENDING", priority=5, eligible_time=99, array_id=7, array_tasks="1")]
    assert slurm.after(1, state="RUNNING", array_id=7, array_tasks="4") == []
    slurm.after(1, state="PENDING", eligible_time=321)
    assert slurm.after(2) == ["scontrol update JobId=7_4 StartTime=now"]


def test_a_daemon_that_is_killed_leaves_slurm_s_pause_and_the_place_for_its_time(slurm: Slurm) -> None:
    slurm.after(0.5, state="PENDING", eligible_time=321)
    before = slurm.first()
    slurm.restarts = Restarts(cast(Site, slurm), lambda _, preflight: slurm.kept.append(preflight))
    slurm.restarts.refused(7)
    assert slurm.after(2) == slurm.after(2) == []
    assert slurm.first() == before
    slurm.restarts.follow(8, FOUND, HAD)
    assert slurm.first() == []
