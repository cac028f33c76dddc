"""An idle node that stands by for preflights of others: when it asks, what it measures, and how a job ends that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.preflight import NodePreflight
from prolog_epilog import cgroups, preflight
from prolog_epilog.preflight_spare import Spare
from prolog_epilog.state import Settings, State
from sluice.base.duties import NotYet
from sluice.base.errors import SluiceError
from sluice.exchange.record import JobRecord
from tests.unit.prolog_epilog.examples import device

JOIN = {"state": "join", "job": 9}
TEST = {"state": "test", "batch": 2, "rounds": [[{"id": "1", "role": "ask", "tool": "tcp"}]]}
DONE = {"state": "done", "text": "slow", "faults": {"fabric_link": ["slow"]}, "drained": False}
HELLO = 'import sys; print(\'{"port": 4000, "tools": ["tcp"]}\'); sys.stdout.flush(); sys.stdin.readline()\n'
MEASURES = HELLO + 'print(\'{"id": "1", "gbs": 40.0, "us": 2.0}\'); sys.stdout.flush(); sys.stdin.read()\n'
HANGS = HELLO + "sys.stdin.read()\n"


class Idle:
    """An idle node, and controllers that give these answers; the last one again and again."""

    def __init__(self, folder: Path, answers: list[dict[str, Any] | SluiceError]) -> None:
        settings = Settings(run=folder / "run", records=folder / "records", policy=folder / "sluice.policy")
        self.state = State(settings)
        self.state.devices = [device(type="h100", nics=("mlx5_0",))]
        self.policy = NodePreflight.model_validate({"when": "always", "bound_s": 20})
        self.asked: list[dict[str, Any]] = []
        self._answers = answers
        self.spare = Spare(self.state, lambda: self.policy, self.send, lambda: "eth0")

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, SluiceError):
            raise answer
        return answer


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Idle]]:
    program = tmp_path / "program.py"
    monkeypatch.setattr(preflight, "PROGRAM", program)
    monkeypatch.setattr(cgroups, "jobs_here", lambda: set[int]())

    def make(*answers: dict[str, Any] | SluiceError, text: str = MEASURES) -> Idle:
        program.write_text(text)
        program.chmod(0o644)
        return Idle(tmp_path, list(answers))

    yield make


def test_the_controllers_say_how_often_it_asks(idle: Callable[..., Idle]) -> None:
    made = idle({"state": "wait", "again_s": 1.0}, {"state": "wait", "again_s": 1e9})
    assert made.spare.run() == 1.0
    assert made.spare.run() == 600.0
    assert [one["do"] for one in made.asked] == ["preflight-spare"] * 2


def test_without_a_policy_or_with_a_job_it_does_not_ask(
    idle: Callable[..., Idle], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = idle(JOIN)
    made.policy = NodePreflight()
    assert isinstance(made.spare.run(), NotYet)
    made.policy = NodePreflight(when="always")
    made.state.records[7] = JobRecord(7, 1000, "ann", "physics", "main", "n1", 1.0)
    assert isinstance(made.spare.run(), NotYet)
    made.state.records.clear()
    monkeypatch.setattr(cgroups, "jobs_here", lambda: {8})  # of before the agent was started
    assert isinstance(made.spare.run(), NotYet)
    monkeypatch.setattr(cgroups, "jobs_here", lambda: set[int]())
    made.spare.leave()  # a prolog has just begun
    assert isinstance(made.spare.run(), NotYet)
    assert made.asked == []


@pytest.mark.parametrize("why", ["no GPUs", "GPUs of another class"])
def test_a_node_that_no_tested_job_is_like_does_not_ask(idle: Callable[..., Idle], why: str) -> None:
    made = idle(JOIN)
    if why == "no GPUs":
        made.state.devices = []
    else:
        made.policy = NodePreflight(when="always", types=("a100",))
    assert isinstance(made.spare.run(), NotYet)
    assert made.asked == []


def test_a_job_without_gpus_ends_its_part_before_the_next_question(
    idle: Callable[..., Idle], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = idle(JOIN, {"state": "wait", "again_s": 0.1})
    monkeypatch.setattr(cgroups, "jobs_here", lambda: {8} if len(made.asked) > 3 else set())
    assert made.spare.run() == 0.0
    assert [one.get("leaves", False) for one in made.asked] == [False] * 4 + [True]


def test_it_measures_until_the_verdict_which_is_not_of_this_node(idle: Callable[..., Idle]) -> None:
    made = idle(JOIN, TEST, DONE)
    assert made.spare.run() == 0.0
    first, joins, measured = made.asked
    assert first["do"] == "preflight-spare"
    assert (joins["do"], joins["job"], joins["port"], joins["tools"]) == ("preflight", 9, 4000, ["tcp"])
    assert (joins["interface"], joins["alone"], "begins" in joins) == ("eth0", False, False)
    assert (measured["batch"], measured["results"]) == (2, {"1": [40.0, 2.0]})


def test_a_job_that_comes_ends_what_is_measured_at_once(
    idle: Callable[..., Idle], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = idle(JOIN, TEST, {"state": "wait", "again_s": 0.1}, text=HANGS)
    duty = threading.Thread(target=made.spare.run)
    duty.start()
    end = time.monotonic() + 30
    while len(made.asked) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    measuring = made.spare._measuring
    assert measuring is not None
    killed: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (killed.append(group), kill(group, number)))
    made.spare.leave()
    assert measuring._program is not None
    assert measuring._program.poll() is not None  # before the job's prolog goes on
    assert isinstance(made.spare.run(), NotYet)
    duty.join(15)  # it does not wait for what was killed, which has 20 s
    assert not duty.is_alive()
    assert killed == [measuring._program.pid]  # once: afterwards the number may be another process's
    assert made.asked[-1] == {"version": 1, "do": "preflight", "node": made.state.node, "job": 9, "leaves": True}


@pytest.mark.parametrize("answer", [{}, {"state": "test", "rounds": []}, SluiceError("no controller")])
def test_what_makes_no_sense_ends_its_part(idle: Callable[..., Idle], answer: dict[str, Any] | SluiceError) -> None:
    made = idle(JOIN, answer, {})
    assert made.spare.run() == 0.0
    assert made.asked[-1]["leaves"] is True
