"""How the agent uses what its guard recorded: job records, suspects, and a node that is drained or not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from prolog_epilog.outages import Outage, Outages, after_one_death, read
from prolog_epilog.state import Settings, State
from sluice.base.run import CommandError
from sluice.exchange.record import JobRecord
from sluice.slurm.commands import Commands

NOW = 1_800_000_000.0


class Slurm(Commands):
    """Records the commands; `fails` says which ones fail, and what they print."""

    def __init__(self, **fails: str) -> None:
        super().__init__()
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "fails", fails)

    def run(self, name: str, *arguments: str, check: bool = True, **_: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(" ".join([name, *arguments]))  # type: ignore[attr-defined]
        word = arguments[0] if name == "scontrol" else name
        said = self.fails.get(word)  # type: ignore[attr-defined]
        if said is not None and check:
            raise CommandError(said, stderr=said)
        shown = f"JobId={arguments[-1]} {self.fails.get('shows', 'JobState=RUNNING')}"  # type: ignore[attr-defined]
        return subprocess.CompletedProcess([name], said is not None, shown if word == "show" else "", said or "")


class Site:
    """A node whose guard recorded what `remembers` says."""

    def __init__(self, folder: Path, **fails: str) -> None:
        self.state = State(Settings(run=folder, records=folder / "records"))
        self.state.node = "n1"
        self.state.jobs.folder.mkdir(parents=True)
        self.slurm = Slurm(**fails)
        self.path = folder / "guard"
        self.held: list[tuple[int, str]] = []
        self.full = False
        self.outages = Outages(
            self.state,
            self.path,
            bound=lambda: 10,
            hold=self.hold,
            commands=self.slurm,
            today=lambda: NOW,
        )

    def hold(self, record: JobRecord, why: str) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.held.append((record.job, why))

    def remembers(self, *lines: str) -> None:
        self.path.write_text("\n".join(["sluice-guard 1", *lines, ""]))

    def job(self, number: int, started: float = NOW - 300) -> JobRecord:
        record = JobRecord(number, 1000, "alice", "a", "p", "n1", started)
        self.state.records[number] = record
        return record


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def death(number: int, ago: float, about: str = "-", lasted: int = 500, cause: str = "signal-7") -> str:
    return f"outage {number} {(NOW - ago) * 1000:.0f} {cause} {lasted} - {about}"


def details(record: JobRecord, action: str) -> list[dict[str, Any]]:
    return [event.detail for event in record.events if event.action == action]


def test_what_is_remembered_is_read_and_all_else_left_out(site: Site) -> None:
    site.remembers(
        "outage 3 1799999990500 stalled 2500 12,13 -",
        "outage 4 1799999995000 exit-1 -1 - 7",
        "frozen 12 1 /sys/fs/cgroup/job_12",
        "outage 5 x signal-9 1 - -",
        "outage 6 1 signal-9 1 - - more",
        "outage 7 1 melted 1 - -",
    )
    assert read(site.path) == [
        Outage(3, NOW - 9.5, "stalled", 2.5, (12, 13), ()),
        Outage(4, NOW - 5, "exit-1", None, (), (7,)),
    ]
    assert site.outages.last() == (3, "it gave no sample; jobs unwatched for 2.5 s; frozen: job 12,13")
    site.path.unlink()
    assert read(site.path) == [] and site.outages.last() == (0, "")


def test_records_say_once_for_how_long_their_job_was_unwatched(site: Site) -> None:
    old, new = site.job(12), site.job(13, started=NOW - 5)
    site.remembers(
        "outage 1 1799999000000 signal-9 400 - -", "outage 2 1799999990000 hung 15500 12 -", death(3, 1, lasted=-1)
    )
    site.outages.run()
    site.outages.run()
    assert details(old, "unwatched") == [{"outage": 2, "cause": "hung", "seconds": 15.5, "frozen": True}]
    assert details(new, "unwatched") == []
    kept = site.state.jobs.load(12)
    assert details(kept, "unwatched") == details(old, "unwatched")
    site.outages.ended(new)  # it ends while nobody has watched it again
    assert details(new, "unwatched") == [{"outage": 3, "cause": "signal-7", "seconds": 1.0, "frozen": False}]


@pytest.mark.parametrize(
    "lines",
    [
        [death(1, 10, "7"), death(2, 5, "7")],
        [death(1, 70, "7"), death(2, 10, "7"), death(3, 5, "7")],
        [death(1, 10, cause="stalled"), death(2, 5, cause="stalled"), death(3, 1, cause="stalled")],
        [death(1, -100), death(2, -90), death(3, -80)],  # the clock was set back
    ],
)
def test_less_than_three_deaths_in_a_minute_are_nobodys(site: Site, lines: list[str]) -> None:
    site.remembers(*lines)
    site.outages.judge()
    site.outages.run()
    assert site.slurm.asked == [] and site.state.suspects == set()  # type: ignore[attr-defined]


def test_jobs_whose_data_was_read_are_suspects_and_the_node_is_spared(site: Site) -> None:
    record = site.job(7)
    site.remembers(death(1, 10, "7"), death(2, 5), death(3, 1, "7,8"))
    site.outages.judge()
    assert site.state.suspects == {7}  # 8 was there once
    site.outages.run()
    [(job, why)] = site.held
    assert job == 7 and "died 3 times within a minute" in why
    assert details(record, "suspect") == [{"why": why}]
    site.outages.run()
    assert len(site.held) == 1 and site.slurm.asked == []  # type: ignore[attr-defined]


def test_jobs_that_take_turns_are_suspects_all_of_them(site: Site) -> None:
    site.remembers(death(1, 10, "7"), death(2, 5, "8"), death(3, 1, "7"))
    site.outages.judge()
    assert site.state.suspects == {7, 8}


def test_without_anybodys_data_the_node_is_drained(site: Site) -> None:
    site.job(7)
    site.remembers(*(death(number, number) for number in (3, 2, 1)))
    site.outages.judge()
    assert site.state.suspects == set()
    site.outages.run()
    [drain] = site.slurm.asked  # type: ignore[attr-defined]
    assert drain.startswith("scontrol update NodeName=n1 State=DRAIN Reason=sluice: the node agent died 3 times")


def test_a_hold_that_cannot_be_written_is_tried_again(site: Site) -> None:
    site.job(7)
    site.remembers(*(death(number, number, "7") for number in (3, 2, 1)))
    site.outages.judge()
    site.full = True
    with pytest.raises(OSError):
        site.outages.run()
    site.full = False
    site.outages.run()
    assert [job for job, _ in site.held] == [7]


def test_one_death_is_no_reason_to_ask_slow_drivers_again(site: Site) -> None:
    assert not after_one_death(site.path, lambda: NOW)
    site.remembers(death(1, 400, lasted=300), death(2, 1, lasted=-1))
    assert after_one_death(site.path, lambda: NOW)
    site.remembers(death(1, 40, lasted=300), death(2, 1, lasted=-1))
    assert not after_one_death(site.path, lambda: NOW)
    site.remembers(death(1, 4, lasted=300))  # the restart after it was asked for
    assert not after_one_death(site.path, lambda: NOW)
