"""Budgets are kept by caps, jobs give way in the policy's order, and watts are never given twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from sluice.controllerd.power.caps import GpuState, fill
from sluice.controllerd.power.keeper import GUARANTEED, Decision, Gpu, Keeper, Limit, PowerJob

LEAST, LOWEST, MOST, IDLE = 100.0, 240.0, 400.0, 50.0


def state(key: str, *, rank: int = 0, drawn: float = 400, cap: float = 400, busy: bool = True) -> GpuState:
    return GpuState(key, rank, IDLE, LEAST, LOWEST, MOST, cap, drawn, busy)


def test_all_get_what_they_want_where_there_is_room() -> None:
    assert fill(800, [state("a"), state("b")]).caps == {"a": 400, "b": 400}


def test_who_draws_less_gives_first() -> None:
    found = fill(640, [state("a"), state("b", drawn=200)])
    assert found.caps["b"] == pytest.approx(220)
    assert found.caps["a"] == 400
    assert found.short_w == 0


def test_the_lowest_rank_comes_down_first() -> None:
    found = fill(700, [state("a", rank=0), state("b", rank=1)])
    assert found.caps == {"a": pytest.approx(300), "b": 400}
    found = fill(600, [state("a", rank=0), state("b", rank=1)])
    assert found.caps == {"a": pytest.approx(240), "b": pytest.approx(360)}


def test_below_the_policys_lowest_cap_and_the_hardwares() -> None:
    gpus = [state("a"), state("b", rank=1)]
    found = fill(400, gpus)
    assert (found.caps["a"], found.caps["b"]) == (pytest.approx(160), pytest.approx(240))
    assert (found.below_w, found.short_w) == (pytest.approx(80), 0)
    assert fill(150, gpus).short_w == pytest.approx(50)


class Cluster:
    """GPUs that follow orders at the next report."""

    def __init__(self, count: int, demand: float = 400, jobs: int | None = None) -> None:
        self.keeper = Keeper()
        self.now = 0.0
        self.demand = {f"g{number}": demand for number in range(count)}
        self.caps = dict.fromkeys(self.demand, MOST)
        self.jobs = {f"g{number}": (number + 1,) for number in range(count if jobs is None else jobs)}
        self.of = {number + 1: PowerJob(number + 1, 0, float(number)) for number in range(count)}
        self.booked = LOWEST
        self.silent: set[str] = set()
        self.planned: dict[str, float] = {}
        self.elsewhere = 0.0

    def draws(self) -> float:
        return sum(min(self.caps[key], self.demand[key]) if key in self.jobs else IDLE for key in self.caps)

    def step(self, watts: float | Mapping[str, float]) -> Decision:
        limits = [
            Limit(name, one, {f"n/{key}": 1.0 for key in self.caps}, self.elsewhere)
            for name, one in ({"hall": watts} if isinstance(watts, float | int) else watts).items()
        ]
        gpus = [
            Gpu("n", key, cap, LEAST, LOWEST, MOST, IDLE, min(cap, self.demand[key]) if key in self.jobs else IDLE,
                self.booked, self.jobs.get(key, ()), key in self.silent, self.planned.get(key))
            for key, cap in self.caps.items()
        ]  # fmt: skip
        found = self.keeper.step(self.now, gpus, self.of, limits)
        self.now += 1
        orders = found.caps.get("n", {})
        lifted = found.lifted.get("n", frozenset())
        self.planned = {key: cap for key, cap in self.planned.items() if lifted.isdisjoint(self.jobs[key])}
        self.caps = {
            key: cap if key in self.silent else min(orders.get(key, MOST), self.planned.get(key, MOST))
            for key, cap in self.caps.items()
        }
        return found


def test_a_lowered_budget_is_met_by_the_next_report_and_room_is_given_back_once() -> None:
    cluster = Cluster(4)
    cluster.step(1600)
    assert not cluster.step(1600).caps
    cluster.step(1200)
    assert cluster.draws() <= 1200
    seen = []
    for _ in range(30):
        assert not cluster.step(1600).stop
        seen.append(cluster.draws())
        assert seen[-1] <= 1600
    assert seen[0] <= 1200  # not at once
    assert seen[-1] == 1600
    assert seen == sorted(seen)  # and it does not swing


def test_a_cap_that_was_planned_for_a_start_becomes_an_order_and_is_raised_when_there_is_room() -> None:
    cluster = Cluster(4)
    cluster.planned = {"g3": 250.0}
    cluster.caps["g3"] = 250.0
    first = cluster.step(1600)
    assert first.caps["n"]["g3"] == 250 and first.lifted["n"] == {4} and not cluster.planned
    seen = []
    for _ in range(10):
        assert not cluster.step(1450).lifted
        seen.append(cluster.caps["g3"])
        assert sum(cluster.caps.values()) <= 1450
    assert seen[:3] == [250.0] * 3 and seen[-1] == pytest.approx(1450 / 4, abs=1)  # not at once, and as all others
    for _ in range(10):
        cluster.step(1600)
    assert cluster.caps["g3"] == MOST


def test_a_planned_cap_is_lowered_like_any_other_and_of_a_silent_node_stays() -> None:
    cluster = Cluster(2)
    cluster.planned, cluster.caps["g1"] = {"g1": 300.0}, 300.0
    cluster.silent = {"g1"}
    assert cluster.step(800).caps.get("n", {}).get("g1", 300.0) == 300.0
    cluster.silent = set()
    cluster.step(500)
    assert cluster.draws() <= 500


def test_an_older_order_lifts_no_planned_cap_of_a_node_that_fell_silent() -> None:
    cluster = Cluster(4)
    assert cluster.step(1450).caps["n"]["g3"] > 250  # before the job that started with less
    cluster.planned, cluster.caps["g3"], cluster.silent = {"g3": 250.0}, 250.0, {"g3"}
    assert not cluster.step(1450).lifted
    cluster.silent = set()
    assert cluster.step(1450).lifted == {"n": {4}} and cluster.caps["g3"] == 250


def test_jobs_are_stopped_only_where_a_budget_was_lowered() -> None:
    cluster = Cluster(4)
    for _ in range(10):
        assert not cluster.step(800).stop  # constant: caps below the lowest one, and nobody is stopped
    assert cluster.draws() <= 800
    cluster = Cluster(4)
    cluster.of[4] = replace(cluster.of[4], rank=GUARANTEED)
    cluster.step(1600)
    stopped: list[int] = []
    for _ in range(5):
        stopped += cluster.step(800).stop
    assert stopped == [3]  # the last one that began of those that may be stopped: 3 * 240 + 50 is less than 800
    assert cluster.draws() <= 800


def test_a_job_that_draws_little_while_it_saves_gives_way_all_the_same() -> None:
    cluster = Cluster(4)
    cluster.step(1600)
    assert [job for _ in range(5) for job in cluster.step(850).stop] == [4]
    cluster.demand["g3"] = 60
    for _ in range(60):
        cluster.step(850)
        assert not cluster.keeper.kept
    del cluster.jobs["g3"]
    cluster.step(850)
    assert cluster.keeper.kept and cluster.draws() <= 850


def test_the_next_daemon_stops_what_was_to_give_way() -> None:
    cluster = Cluster(4)
    cluster.step(1600)
    assert not cluster.step(800).stop  # and it dies
    for met, stopped in ((cluster.keeper.met, [4]), ({"hall": 800.0}, []), ({}, [])):
        cluster.keeper = Keeper()
        cluster.keeper.adopt({}, met)
        assert [job for _ in range(5) for job in cluster.step(800).stop] == stopped


def test_what_other_nodes_may_draw_is_no_lowering() -> None:
    cluster = Cluster(4)
    cluster.step(1600)
    cluster.elsewhere = 800  # e.g. of a node that starts, and has not reported
    for _ in range(5):
        assert not cluster.step(1600).stop
    assert cluster.draws() <= 800


def test_a_lowered_budget_is_met_while_nodes_report_for_the_first_time() -> None:
    cluster = Cluster(4)
    cluster.elsewhere = 200
    cluster.step(1800)
    cluster.step(900)
    cluster.elsewhere = 100
    assert [cluster.step(900).stop for _ in range(3)] != [(), (), ()]


def test_no_job_is_stopped_for_a_gpu_that_draws_on() -> None:
    cluster = Cluster(4)
    cluster.of[3] = replace(cluster.of[3], rank=GUARANTEED)
    cluster.of[5] = PowerJob(5, 0, 9.0)
    cluster.jobs["g2"] = (3, 5)  # shared with a guaranteed one
    cluster.step(1600)
    cluster.silent = {"g3"}
    stopped: list[int] = []
    for _ in range(5):
        stopped += cluster.step(1000).stop
    assert stopped == [2]


def test_of_equal_jobs_those_that_lose_least_are_stopped_first() -> None:
    cluster = Cluster(4)
    cluster.of[2] = replace(cluster.of[2], kept=99.0)
    cluster.of[4] = replace(cluster.of[4], kept=100.0, rank=1)
    cluster.step(1600)
    stopped: list[int] = []
    for _ in range(3):
        stopped += cluster.step(700).stop
    assert stopped == [2, 3]


def test_a_budget_that_is_taken_out_keeps_no_other_from_being_kept() -> None:
    cluster = Cluster(4)
    cluster.step({"hall": 1600, "row": 1600})
    cluster.step({"hall": 1600, "row": 700})
    assert not cluster.keeper.kept and not cluster.keeper.exceeded
    cluster.step({"hall": 1600, "row": 4 * LEAST - 1})
    assert cluster.keeper.exceeded
    cluster.step({"hall": 1600})
    assert cluster.keeper.kept and not cluster.keeper.exceeded


def test_guaranteed_jobs_are_never_stopped() -> None:
    cluster = Cluster(2)
    cluster.of = {number: replace(job, rank=GUARANTEED) for number, job in cluster.of.items()}
    cluster.step(800)
    for _ in range(20):
        found = cluster.step(150)
        assert not found.stop
    assert found.uses[0].short_w == pytest.approx(50)
    assert set(cluster.caps.values()) == {LEAST}


def test_a_new_job_starts_low_and_gets_what_it_is_booked_with() -> None:
    cluster = Cluster(4, jobs=3)
    cluster.booked = 300
    for _ in range(40):
        cluster.step(1300)
    assert cluster.caps["g3"] == LEAST
    before = cluster.draws()
    cluster.jobs["g3"] = (4,)
    assert cluster.draws() == before - IDLE + LEAST
    for _ in range(40):
        assert cluster.draws() <= 1300
        cluster.step(1300)
    assert cluster.caps["g3"] > LOWEST


def test_the_planner_counts_jobs_with_what_they_can_be_lowered_to() -> None:
    cluster = Cluster(2)
    for _ in range(20):
        published = cluster.step(700).published
    assert set(cluster.caps.values()) == {350}
    assert published == {1: LOWEST, 2: LOWEST}
    for _ in range(20):
        published = cluster.step(800).published
    assert published == {1: MOST, 2: MOST}


def test_a_silent_node_keeps_its_caps_and_counts() -> None:
    cluster = Cluster(2)
    cluster.step(800)
    cluster.silent = {"g0"}
    cluster.step(660)
    assert cluster.caps == {"g0": 400, "g1": pytest.approx(260)}


def test_a_gpu_in_two_budgets_has_the_lower_cap() -> None:
    cluster = Cluster(2)
    cluster.step({"hall": 800, "row": 800})
    cluster.step({"hall": 700, "row": 600})
    assert cluster.draws() <= 600


def test_orders_of_an_earlier_daemon_stay_until_there_is_room() -> None:
    cluster = Cluster(2)
    cluster.caps = {"g0": 250.0, "g1": 250.0}
    cluster.keeper.adopt({"n/g0": 250.0, "n/g1": 250.0}, {})
    assert cluster.step(500).caps == {"n": {"g0": 250, "g1": 250}}
