"""Reports of jobs that run: with what their nodes have reported, which is asked for once, and only if a job runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.job_records import JobRecords
from sluice.exchange.record import Grant, JobRecord
from sluice.report import collect
from sluice.report.build import each_gpu, job_rows
from sluice.report.collect import Selection, Source
from sluice.report.count import Span
from sluice.report.fields import BY_NAME
from sluice.report.summaries import of_records
from sluice.slurm.allocations import Allocation
from tests.unit.report.test_report_collect import FLEET, NOW, FakeSlurm

START = NOW - 1000
DAY = Span(NOW - 50_000, NOW)


def job(number: int, end: int | None = None) -> Allocation:
    state = "RUNNING" if end is None else "COMPLETED"
    return Allocation(
        number, str(number), "job", "alice", "physics", "normal", "main", state, "0:0", START, START, START, end,
        (end or NOW) - START, 3600, 1, "n1", "gres/gpu=1", "cpu=2,gres/gpu=1,gres/gpu:h100=1", "",
    )  # fmt: skip


def record(number: int, ended: float | None = None, seconds: float = 900.0) -> JobRecord:
    made = JobRecord(number, 1000, "alice", "physics", "main", "n1", START + 1.0, ended)
    made.grants = [Grant(number % 8, "GPU-0", "nvidia", "H100", 80 << 30, peak=9 << 30)]
    use = {
        "seconds": seconds,
        "utilisation": {"mean": 40.0, "peak": 90.0},
        "now": {"utilisation": 12.5, "memory": 1 << 30},
    }
    made.usage = {"gpus": {"GPU-0": use}, "gs": seconds, "us": 0.4 * seconds}
    if ended is None:
        made.usage["at"] = NOW - 30.0
    return made


class Daemon:
    """What the controllers' daemon answers."""

    def __init__(self, *records: JobRecord) -> None:
        self.records = records
        self.asked = 0
        self.away = False

    def __call__(self, jobs: Iterable[int] | None) -> list[JobRecord]:
        self.asked += 1
        if self.away:
            raise SluiceError("no controller answers")
        return [one for one in self.records if jobs is None or one.job in jobs]


def source(monkeypatch: pytest.MonkeyPatch, daemon: Daemon, *jobs: Allocation) -> Source:
    monkeypatch.setattr(collect, "stream", FakeSlurm(list(jobs)).stream)
    found = Source(cast(Any, None), cast(Any, None), now=NOW, running=daemon)
    found.__dict__ |= {"fleet": FLEET, "price_kwh": 0.5}
    return found


def value(row: Any, name: str) -> Any:
    return BY_NAME[name.lower()].value(row)


def test_a_running_job_counts_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(record(7), record(8))
    one = source(monkeypatch, daemon, job(7), job(8), job(9), job(10, end=NOW - 10))
    rows = {row.job.id: row for row in job_rows(one, DAY, Selection()) if row.job is not None}
    assert daemon.asked == 1
    assert value(rows[7], "Utilisation") == pytest.approx(40) and value(rows[7], "UtilNow") == 12.5
    assert value(rows[7], "GPUMemNow") == 1024 and value(rows[7], "GPUMemPeak") == 9 * 1024
    for number in (9, 10):
        assert value(rows[number], "Utilisation") is value(rows[number], "UtilNow") is None
    (tally,) = one.cells(DAY, Selection(states=frozenset({"RUNNING"}))).values()
    assert (tally.ran, tally.device_s, tally.busy_s, tally.measured_jobs) == (3, 1800, 720, 2)
    use = one.use_of(job(8))
    assert use is not None and use.reported_at == NOW - 30


def test_a_job_has_saved_when_all_its_nodes_say_so() -> None:
    one, other = record(7), record(7)
    assert of_records([]).saved_at is of_records([one]).saved_at is None
    one.saved = START + 60.0
    assert (of_records([one]).saved_at, of_records([one, other]).saved_at) == (START + 60.0, None)
    other.saved = START + 50.0
    assert of_records([one, other]).saved_at == START + 50.0


def test_of_the_past_nobody_is_asked_and_without_a_daemon_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(record(7))
    list(job_rows(source(monkeypatch, daemon, job(10, end=NOW - 10)), DAY, Selection()))
    assert daemon.asked == 0
    daemon.away = True
    (row,) = job_rows(source(monkeypatch, daemon, job(7)), DAY, Selection())
    assert row.use is None and daemon.asked == 1


def test_an_earlier_run_of_a_requeued_job_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = record(7)
    old.started = START - 5000.0
    (row,) = job_rows(source(monkeypatch, Daemon(old), job(7)), DAY, Selection())
    assert row.use is None


def test_every_gpu_with_running_jobs_and_a_clock_that_was_set_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job counts once also if its node reported just before its end; an end before its start is ignored."""
    one = source(monkeypatch, Daemon(record(1), record(2)))
    store = JobRecords(tmp_path)
    store.append([record(2, ended=NOW - 1.0), record(3, ended=START - 3600.0 + 901, seconds=900.0)])
    one.records = store
    all_rows = each_gpu(one, DAY).rows
    assert [row.names["gpu"] for row in all_rows] == list("01234567"), "also those that nobody had"
    rows = {row.names["gpu"]: row for row in all_rows if row.tally.ran}
    assert {gpu: round(row.tally.gpu_s) for gpu, row in rows.items()} == {"1": 999, "2": 998, "3": 900}
    assert {row.tally.ran for row in rows.values()} == {1}
    assert rows["1"].tally.busy_s == pytest.approx(360)


def test_every_gpu_with_a_clock_that_was_set_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An hour, while jobs of 900 seconds ran: one has ended, one still runs."""
    ended, running = record(1, ended=NOW - 50.0), record(2)
    for one in (ended, running):
        one.started, one.ran_s = NOW - 950.0 - 3600, 900.0
    assert running.usage is not None
    running.usage["at"] = NOW - 50.0
    store = JobRecords(tmp_path)
    store.append([ended])
    found = source(monkeypatch, Daemon(running))
    found.records = store
    rows = {row.names["gpu"]: row.tally for row in each_gpu(found, DAY).rows if row.tally.ran}
    assert {gpu: (round(one.gpu_s), one.device_s) for gpu, one in rows.items()} == {"1": (900, 900), "2": (950, 900)}
    assert [one.busy_s for one in rows.values()] == [pytest.approx(360)] * 2
    half = each_gpu(found, Span(int(NOW) - 500, int(NOW))).rows[1].tally
    assert round(half.gpu_s) == 450 and half.device_s == pytest.approx(450, abs=1)


def test_every_gpu_of_a_selection_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine, others = record(1, ended=NOW - 50.0), record(2, ended=NOW - 50.0)
    others.user, others.account = "bob", "biology"
    found = source(monkeypatch, Daemon())
    found.records = JobRecords(tmp_path)
    found.records.append([mine, others])

    def gpus(**chosen: str) -> list[str]:
        selection = Selection(**{name: frozenset({value}) for name, value in chosen.items()})
        return [row.names["gpu"] for row in each_gpu(found, DAY, selection).rows]

    assert gpus(users="bob") == gpus(accounts="biology") == ["2"]
    assert gpus(users="carol") == gpus(partitions="other") == gpus(gpu_types="a100") == []
    assert gpus(gpu_types="h100") == list("01234567")
