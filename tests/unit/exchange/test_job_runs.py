"""Runs of one job: distinguished by what Slurm reports of them, and as long as the monotonic clock says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.job_records import check_record
from sluice.exchange.job_runs import Began, from_to, nearest, runs_of
from sluice.exchange.record import Event, Grant, JobRecord, Stage
from sluice.report.summaries import Uses

T = 1_790_000_000


def record(node: str, started: float, ended: float | None = None, **more: Any) -> JobRecord:
    made = JobRecord(7, 1000, "alice", "physics", "main", node, T + started, None if ended is None else T + ended)
    made.grants = [Grant(0, f"GPU-{node}", "nvidia", "H100", 80 << 30)]
    for name, value in more.items():
        setattr(made, name, value)
    return made


def placed(records: list[JobRecord]) -> list[list[tuple[str, float]]]:
    return [[(one.node, round(one.started - T, 3)) for one in run] for run in runs_of(records)]


def nodes_of(records: list[JobRecord], start: int, end: int | None) -> list[str]:
    use = Uses(records).find(7, T + start, None if end is None else T + end)
    return [] if use is None else [gpu.node for gpu in use.gpus]


def test_a_job_that_is_requeued_at_once_has_each_run_by_itself() -> None:
    """Three runs within a minute, the first two on other nodes than the third."""
    records = [
        record("n1", 0.4, 20, restarts=0),
        record("n2", 1.2, 20, restarts=0),
        record("n3", 22.3, 40, restarts=1),
        record("n4", 41.9, 90, restarts=2),
        record("n1", 42.0, 90, restarts=2),
    ]
    expected = [[("n1", 0.4), ("n2", 1.2)], [("n3", 22.3)], [("n4", 41.9), ("n1", 42.0)]]
    random.Random(1).shuffle(records)
    assert placed(records) == expected
    for start, end, nodes in (
        (0, 20, ["n1", "n2"]),
        (22, 40, ["n3"]),
        (41, 90, ["n4", "n1"]),
        (41, None, ["n4", "n1"]),
    ):
        assert nodes_of(records, start, end) == nodes


def test_a_run_without_records_does_not_get_those_of_the_next() -> None:
    """Its node died before the agent wrote any."""
    second = record("n2", 30.5, 90, restarts=1)
    assert nodes_of([second], 0, 20) == []
    assert nodes_of([second], 30, 90) == ["n2"]
    first = record("n1", 0.5, 20, restarts=0)
    assert nodes_of([first], 30, 90) == []


def test_slurms_own_start_goes_before_the_clocks_of_nodes() -> None:
    """One is an hour wrong. Two runs have one count after a takeover by a controller that does not know the first."""
    records = [
        record("n1", -3600.0, -3580, restarts=0, begun=T),
        record("n2", 1.0, 20, restarts=0, begun=T),
        record("n3", 30.2, 90, restarts=0, begun=T + 30),
    ]
    assert placed(records) == [[("n1", -3600), ("n2", 1)], [("n3", 30.2)]]
    assert nodes_of(records, 0, 20) == ["n1", "n2"]
    assert nodes_of(records, 30, 90) == ["n3"]


def test_records_of_earlier_agents_are_distinguished_by_node_and_time() -> None:
    records = [record("n1", 0.4, 20), record("n2", 0.8, 20), record("n1", 60.0, 90), record("n2", 60.5, 90)]
    records.append(record("n3", 3600.0, 3700))
    assert placed(records) == [[("n1", 0.4), ("n2", 0.8)], [("n1", 60), ("n2", 60.5)], [("n3", 3600)]]
    assert nodes_of(records, 60, 90) == ["n1", "n2"]
    assert nodes_of(records, 0, 20) == ["n1", "n2"]


def test_of_several_that_fit_the_nearest_is_meant() -> None:
    runs = [(Began((T + at,)), at) for at in (0.0, 40.0, 80.0)]
    assert [nearest(runs, T + at, None) for at in (-121, -120, 0, 38, 77, 85, 86)] == [None, 0, 0, 40, 80, 80, None]
    assert nearest(runs, T - 900, None, late=float("inf")) == 0
    assert nearest(runs, T + 900, None, late=float("inf")) is None


@pytest.mark.parametrize("step", [-7200.0, -50.0, 0.0, 50.0, 7200.0])
def test_a_clock_that_is_set_lengthens_and_shortens_nothing(step: float) -> None:
    """Set right while the job ran: its hundred seconds are those before the end that was reported."""
    ended = record("n1", -step + 1, 101, ran_s=100.0)
    assert from_to(ended, T + 500) == pytest.approx((T + 1, T + 101))
    assert nodes_of([ended], 0, 101) == ["n1"]
    running = record("n1", -step + 1, ran_s=100.0, usage={"at": T + 101.0, "gpus": {}})
    assert from_to(running, T + 150) == (T + 1, T + 150)
    assert nodes_of([running], 0, None) == ["n1"]
    ended.begun = running.begun = T
    ended.ended = T + 101 + 9999.0  # set wrong: Slurm's controllers know
    assert from_to(ended, T + 500) == (T, T + 100)
    assert from_to(running, T + 150) == (T, T + 150)


def test_a_record_without_a_length_is_as_long_as_its_times_say() -> None:
    assert from_to(record("n1", 0, 100), T + 500) == (T, T + 100)
    back = record("n1", 0, -3500, usage={"gpus": {"GPU-n1": {"seconds": 99.0}}})
    assert from_to(back, T + 500) == (T, T + 99)
    assert from_to(record("n1", 0), T + 500) == (T, T + 500)


@pytest.mark.parametrize(
    "wrong",
    [
        {"restarts": "1"},
        {"restarts": -1},
        {"begun": "x"},
        {"begun": 1e300},
        {"ran_s": float("nan")},
        {"ran_s": -1.0},
        {"started_uptime": []},
        {"ran_s": 9e11},
        {"started": float("nan")},
        {"started": -1.0},
        {"started": None},
        {"ended": 2.5e11},
        {"events": [Event("x", "grant")]},
        {"events": [Event(float("nan"), "grant")]},
        {"events": [Event(T, "grant", times=[1])]},
        {"stages": [Stage("x" * 65, 0.0, 0.0)]},
    ],
)
def test_fields_of_the_wrong_kind_are_not_taken(wrong: dict[str, Any]) -> None:
    check_record(record("n1", 0, 10, restarts=0, begun=T, ran_s=10.0, started_uptime=5.5))
    with pytest.raises(SluiceError, match="wrong type"):
        check_record(replace(record("n1", 0, 10), **wrong))
