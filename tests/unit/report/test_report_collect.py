"""That rolled-up days and counting directly give the same figures for any time of the report."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.report import collect
from sluice.report.collect import Selection, Source, parse_states, roll_up
from sluice.report.count import Span
from sluice.report.fleet import Fleet, NodeGpus
from sluice.report.rollup import Rollup, midnight, missing_days
from sluice.report.tally import SUMS, Key, Tally
from sluice.slurm.allocations import Allocation

TODAY = date(2026, 11, 21)
NOW = midnight(TODAY) + 50_000
FLEET = Fleet({"n1": NodeGpus("h100", {"h100": 8}, 8, 8 * 81_920)})


def make_jobs(count: int, seed: int) -> list[Allocation]:
    chance = random.Random(seed)
    jobs = []
    for number in range(1, count + 1):
        submit = midnight(TODAY - timedelta(days=9)) + chance.randrange(0, 9 * 86_400 + 50_000)
        start: int | None = submit + chance.randrange(0, 4000)
        end: int | None = (start or 0) + chance.choice([0, 5, 3600, 90_000, 200_000])
        state = chance.choice(["COMPLETED", "FAILED", "TIMEOUT"])
        if number % 11 == 0:
            start, end, state = None, start, "CANCELLED"
        if number % 13 == 0:  # ends as a day does
            end = midnight(collect.rollup.day_of(submit) + timedelta(days=2))
            start = submit + 1
            state = "COMPLETED"
        if end is not None and end > NOW:
            end, state = None, "RUNNING"
        if start is not None and start > NOW:
            start, end, state = None, None, "PENDING"
        jobs.append(
            Allocation(
                number, str(number), "job", chance.choice(["alice", "bob"]), chance.choice(["physics", "biology"]),
                "normal", "main", state, "0:0", submit, submit, start, end,
                0 if start is None else (end or NOW) - start, 3600, 1, "n1" if start else "", "cpu=1",
                chance.choice(["cpu=2,gres/gpu=2,gres/gpu:h100=2", "cpu=1,gres/shard=10240", "cpu=4,mem=1G"]), "",
            )
        )  # fmt: skip
    return jobs


class FakeSlurm:
    """slurmdbd's answer to sacct: jobs that were eligible before the end and did not end before the start."""

    def __init__(self, jobs: list[Allocation]) -> None:
        self.jobs = jobs
        self.asked: list[Span] = []

    def stream(self, commands: object, *, start: int, end: int, **filters: Any) -> Iterator[Allocation]:
        self.asked.append(Span(start, end))
        for job in self.jobs:
            if (job.eligible or 0) < end and (job.end is None or job.end >= start):
                yield job


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(make_jobs(600, 3))
    monkeypatch.setattr(collect, "stream", fake.stream)
    return fake


def source(rolled: Rollup | None = None) -> Source:
    found = Source(cast(Any, None), cast(Any, None), rolled=rolled, now=NOW)
    found.__dict__ |= {"fleet": FLEET, "price_kwh": 0.5}
    return found


def figures(cells: dict[Key, Tally]) -> dict[Key, Any]:
    found = {}
    for key, tally in cells.items():
        values = {name: round(getattr(tally, name), 6) for name in SUMS}
        if any(values.values()):
            found[key] = values, tally.waits.counts
    return found


@pytest.fixture
def rolled(tmp_path: Path, slurm: FakeSlurm) -> Rollup:
    made = Rollup(tmp_path / "rolled", "test")
    days = missing_days(made, 8, NOW)
    assert days[-1] == TODAY - timedelta(days=2)  # yesterday is not settled yet
    assert [day for day, _ in roll_up(source(made), days)] == days
    assert not missing_days(made, 8, NOW)
    return made


def test_any_span_gives_the_same_figures_both_ways(slurm: FakeSlurm, rolled: Rollup) -> None:
    chance = random.Random(8)
    first = midnight(TODAY - timedelta(days=8))
    spans = [Span(first, NOW), Span(first + 1, NOW), Span(first, midnight(TODAY - timedelta(days=4)))]
    for _ in range(60):
        begin, end = sorted(chance.sample(range(first, NOW), 2))
        spans.append(Span(begin, end))
    for span in spans:
        assert figures(source(rolled).cells(span, Selection())) == figures(source().cells(span, Selection())), span


def test_windows_of_any_length_give_the_same_figures(slurm: FakeSlurm) -> None:
    span = Span(midnight(TODAY - timedelta(days=6)) + 777, NOW)
    expected = figures(source().cells(span, Selection()))
    for seconds in (3600, 10_000, 10 * 86_400):
        one = source()
        one.window_s = seconds
        assert figures(one.cells(span, Selection())) == expected


def test_rolled_days_are_not_asked_for_again(slurm: FakeSlurm, rolled: Rollup) -> None:
    slurm.asked.clear()
    source(rolled).cells(Span(midnight(TODAY - timedelta(days=8)), NOW), Selection())
    assert min(span.start for span in slurm.asked) == midnight(TODAY - timedelta(days=1))


def test_selections_hold_for_both_ways(slurm: FakeSlurm, rolled: Rollup) -> None:
    span = Span(midnight(TODAY - timedelta(days=7)), NOW)
    for selection in (
        Selection(accounts=frozenset({"physics"})),
        Selection(users=frozenset({"bob"}), states=frozenset({"FAILED", "RUNNING"})),
        Selection(gpu_types=frozenset({"h100"})),
    ):
        found = figures(source(rolled).cells(span, selection))
        assert found == figures(source().cells(span, selection))
        assert found
        assert all(selection.takes(key) for key in found)


def test_each_job_is_listed_once(slurm: FakeSlurm) -> None:
    span = Span(midnight(TODAY - timedelta(days=6)), NOW)
    found = [job.id for job, _ in source().jobs(span, Selection())]
    assert len(found) == len(set(found))
    assert set(found) == {job.id for job in slurm.stream(None, start=span.start, end=span.end)}


def test_a_day_of_another_cluster_is_refused(slurm: FakeSlurm, rolled: Rollup) -> None:
    other = Rollup(rolled.folder, "elsewhere")
    with pytest.raises(SluiceError, match="another version, cluster or time zone"):
        source(other).cells(Span(midnight(TODAY - timedelta(days=5)), NOW), Selection())


@pytest.mark.parametrize("text", ["", "{}\n", "[1,2]\n", "not json\n", '{"schema_version": 1, "cluster": "test"}\n'])
def test_a_damaged_day_is_named(rolled: Rollup, text: str) -> None:
    day = rolled.days()[0]
    (rolled.folder / f"{day}.jsonl").write_text(text)
    with pytest.raises(SluiceError, match=str(day)):
        list(rolled.read(day))


def test_hostile_names_go_through_a_file_unchanged(tmp_path: Path) -> None:
    from sluice.report.count import Counter
    from sluice.report.rollup import DayCount

    job = make_jobs(1, 1)[0]
    key = Key('a"\n|,=x', "u\x1b[31m\u202e", "p\t", "q", "COMPLETED", "")
    counter = Counter(FLEET)
    counter.cells[key] = Tally(ran=1, wall_s=5)
    made = Rollup(tmp_path / "rolled", "test")
    made.save(TODAY, DayCount(1, {TODAY: counter}))
    assert [(on, one, values["wall_s"]) for on, one, values in made.read(TODAY)] == [(TODAY, key, 5)]
    assert job.id == 1


def test_states() -> None:
    assert parse_states("CD,oom,failed") == {"COMPLETED", "OUT_OF_MEMORY", "FAILED"}
    with pytest.raises(UsageError, match="not a state"):
        parse_states("CD,asleep")


def test_days_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        from sluice.report.rollup import span_of

        lengths = {
            day: (span_of(day).end - span_of(day).start) // 3600 for day in (date(2026, 11, 1), date(2026, 3, 8))
        }
        assert lengths == {date(2026, 11, 1): 25, date(2026, 3, 8): 23}
        assert datetime.fromtimestamp(span_of(TODAY).start).isoformat() == "2026-11-21T00:00:00"
    finally:
        monkeypatch.undo()
        time.tzset()
