"""Which jobs a node had when it stopped responding; Slurm itself requeues them when it takes the node for down."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.health import running as module
from sluice.controllerd.health.controller import Controller
from sluice.exchange.saves import SAVES_FILE, Saves, read_saves
from tests.unit.controllerd.slurm_objects import a_job, a_node

LISTING_S = 2.0  # of very many jobs: it is made every 30 s
SILENT = frozenset({"not_responding"})


class FakeSite(SimpleNamespace):
    """What a daemon's objects are found by."""

    __hash__ = object.__hash__


class Slurm:
    """Two nodes and their running jobs, by a clock that only listings and tests move."""

    def __init__(self, folder: Path) -> None:
        self.now, self.listings = 100.0, 0
        self.nodes_now = {"n1": a_node("n1"), "n2": a_node("n2")}
        self.jobs_now = {1: a_job(1, nodes="n1")}
        self.events = folder / "events"
        self.ran: list[tuple[str, ...]] = []
        site = FakeSite(
            client=self, commands=self, conf_folder=folder, state_save=folder, events=self.events, host="ctl1"
        )
        self.controller = Controller(cast(Site, site))

    def monotonic(self) -> float:
        return self.now

    def nodes(self) -> list[Any]:
        return list(self.nodes_now.values())

    def jobs(self, *, states: list[str]) -> list[Any]:
        assert states == ["RUNNING"]
        self.now, self.listings = self.now + LISTING_S, self.listings + 1
        return list(self.jobs_now.values())

    def partitions(self) -> list[Any]:
        return []

    def output(self, *words: str) -> str:
        raise SluiceError(f"{words[0]}: not now", remedy="try again")

    def run(self, *words: str, check: bool) -> None:
        assert not check, "a job that ended meanwhile is no error"
        self.ran.append(words)

    def step(self, state: str = "mixed", flags: frozenset[str] = frozenset()) -> None:
        """Five seconds later, with n1 in this state."""
        self.now += 5.0
        self.nodes_now["n1"] = a_node("n1", state=state, flags=flags)
        self.controller.step(self.controller.site)

    def lost(self) -> list[str]:
        return [str(one.fields["reason"]) for one in events.read(self.events) if one.kind == "health.down"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path)
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_job_that_began_just_before_its_node_fell_silent_is_among_those_it_had(slurm: Slurm) -> None:
    slurm.step()
    slurm.jobs_now = {2: a_job(2, nodes="n[1-2]")}  # 1 has ended
    slurm.step(flags=SILENT)
    slurm.jobs_now = {}  # Slurm has requeued it
    slurm.step("down", SILENT)
    assert slurm.lost() == ["not responding; jobs 2"]
    assert set(slurm.controller.keeper.state.jobs) == {2}


def test_a_node_that_stays_silent_costs_one_listing(slurm: Slurm) -> None:
    slurm.step()
    for _ in range(3):
        slurm.step(flags=SILENT)
    assert slurm.listings == 2
    slurm.step()
    slurm.step(flags=SILENT)
    assert slurm.listings == 3, "silent again, perhaps with other jobs"


def test_failures_under_jobs_are_counted_and_outlive_the_daemon(
    slurm: Slurm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = slurm.controller.site
    path = tmp_path / SAVES_FILE
    slurm.controller.signal(site)
    assert not path.exists(), "there is nothing to keep"
    slurm.step()
    slurm.step("down", SILENT)  # with job 1
    slurm.step("down", SILENT)
    slurm.step()
    slurm.jobs_now = {}
    slurm.now += 60.0
    slurm.step()
    slurm.step("down", SILENT)  # without one
    slurm.controller.signal(site)
    assert [one.failures for one in read_saves(path).classes.values()] == [1]
    slurm.controller = Controller(site)
    slurm.step()
    slurm.controller.signal(site)
    assert [one.failures for one in read_saves(path).classes.values()] == [1]
    path.write_text("damaged")
    slurm.controller = Controller(site)
    slurm.jobs_now = {1: a_job(1, nodes="n1")}
    slurm.now += 60.0
    slurm.step()
    slurm.controller.signal(site)
    assert caplog.text.count(str(path)) == 1 and [one.failures for one in read_saves(path).classes.values()] == [0]


def test_many_jobs_are_signalled_at_once_and_a_full_disk_keeps_no_signal_back(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    slurm.jobs_now = {number: a_job(number, comment="sluice:checkpoint=20m", start_time=9) for number in range(1, 1002)}
    monkeypatch.setattr(Saves, "write", write)
    with pytest.raises(OSError, match="No space"):
        slurm.controller.signal(slurm.controller.site)
    assert [words[:4] for words in slurm.ran] == [
        ("scancel", "--signal=USR1", "--full", str(first)) for first in (1, 501, 1001)
    ]
    assert sum(len(words) - 3 for words in slurm.ran) == 1001
