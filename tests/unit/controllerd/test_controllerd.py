"""The controller-side daemon: who leads, and duties that are kept apart."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Controllerd, Duty, Site, collect
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.answers import Controller
from sluice.slurm.leader import leads

TWO = {"SlurmctldHost[0]": "ctl1.site(10.0.0.1)", "SlurmctldHost[1]": "ctl2", "SlurmctldTimeout": "60 sec"}


def beat(folder: Path, index: int, written: float) -> None:
    (folder / "heartbeat").write_bytes(struct.pack(">QQ", int(written), index))


def two(folder: Path) -> dict[str, str]:
    return {**TWO, "StateSaveLocation": str(folder)}


@pytest.mark.parametrize(
    ("index", "age", "host", "expected"),
    [
        (0, 1, "ctl1", True),
        (0, 1, "ctl2", False),
        (1, 59, "ctl2", True),
        (1, 61, "ctl2", False),
        (0, -61, "ctl1", False),
        (2, 1, "ctl1", False),
        (0, 1, "login", False),
    ],
)
def test_leads_by_heartbeat(tmp_path: Path, index: int, age: int, host: str, expected: bool) -> None:
    beat(tmp_path, index, 1_000_000 - age)
    assert leads(two(tmp_path), host, lambda: True, now=1_000_000) is expected


def test_heartbeat_missing_or_torn(tmp_path: Path) -> None:
    assert not leads(two(tmp_path), "ctl1", lambda: True)
    (tmp_path / "heartbeat").write_bytes(b"\0" * 7)
    assert not leads(two(tmp_path), "ctl1", lambda: True)


@pytest.mark.parametrize("up", [True, False])
def test_single_controller_leads_when_it_answers(up: bool) -> None:
    assert leads({"SlurmctldHost[0]": "ctl1"}, "ctl1", lambda: up) is up


def make_site(folder: Path, config: Any = None) -> Site:
    def ask() -> dict[str, str]:
        if config is None:
            return {"SlurmctldHost[0]": "ctl1"}
        return cast(dict[str, str], config())

    client = SimpleNamespace(config=ask, ping=lambda: [Controller("ctl1", "primary", True)])
    return Site(cast(SlurmClient, client), Commands(), folder / "state", events=folder / "events.jsonl", host="ctl1")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = make_site(tmp_path)
    yield made
    made.stopping.set()


def serve(daemon: Controllerd) -> threading.Thread:
    thread = threading.Thread(target=daemon.serve)
    thread.start()
    return thread


def until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_duty_that_fails_or_hangs_stops_no_other(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    hang = threading.Event()

    def fail(_: Site) -> None:
        raise SluiceError("no such luck")

    def crash(_: Site) -> None:
        raise KeyError("surprise")

    daemon = Controllerd(
        site,
        [
            Duty("hangs", 0.05, lambda _: bool(hang.wait(30)) and None),
            Duty("fails", 0.05, fail),
            Duty("crashes", 0.05, crash),
            Duty("works", 0.05, lambda _: runs.append(1)),
        ],
    )
    with caplog.at_level(logging.WARNING):
        thread = serve(daemon)
        until(
            lambda: len(runs) >= 3 and daemon.states["fails"].failures >= 3 and daemon.states["crashes"].failures >= 3
        )
        daemon.stop()
        hang.set()
        thread.join(10)
    assert not thread.is_alive()
    assert sum("no such luck" in record.getMessage() for record in caplog.records) == 1  # said once
    report = json.loads((site.state / "status.json").read_text())
    problems = {duty["name"]: duty["problem"] for duty in report["duties"]}
    assert "no such luck" in problems["fails"] and "surprise" in problems["crashes"] and problems["works"] == ""


def test_nothing_runs_where_the_controller_does_not_lead(tmp_path: Path) -> None:
    beat(tmp_path, 1, time.time())
    site = make_site(tmp_path, lambda: two(tmp_path))
    ran: list[str] = []
    daemon = Controllerd(
        site,
        [
            Duty("leader", 0.02, lambda _: ran.append("leader")),
            Duty("all", 0.02, lambda _: ran.append("all"), everywhere=True),
        ],
    )
    thread = serve(daemon)
    until(lambda: ran.count("all") > 5)
    assert "leader" not in ran
    beat(tmp_path, 0, time.time())  # it takes over
    until(lambda: "leader" in ran)
    daemon.stop()
    thread.join(10)


def test_wake_runs_a_duty_before_its_time(site: Site) -> None:
    ran: list[float] = []
    daemon = Controllerd(site, [Duty("rare", 3600, lambda _: ran.append(time.monotonic()))])
    thread = serve(daemon)
    until(lambda: len(ran) == 1)
    daemon.wake("rare")
    until(lambda: len(ran) == 2)
    daemon.stop()
    thread.join(10)


def test_config_survives_a_controller_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, str] | None] = [None, {"ClusterName": "x"}, None]

    def ask() -> dict[str, str]:
        answer = answers.pop(0)
        if answer is None:
            raise SluiceError("no answer")
        return answer

    site = make_site(tmp_path, ask)
    monkeypatch.setattr("sluice.controllerd.daemon._CONFIG_S", -1)
    with pytest.raises(SluiceError):
        site.config()
    assert site.config() == {"ClusterName": "x"}
    assert site.config() == {"ClusterName": "x"}


def test_a_part_that_cannot_begin_is_left_out(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def fails(site: Site) -> list[Duty]:
        raise SluiceError("no folder")

    one = Duty("one", 1.0, lambda site: None)
    assert collect({"bad": fails, "good": lambda site: [one]}, site) == [one]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["bad"]
