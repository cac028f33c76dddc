"""What a node's agent logs of controllers that do not answer: one line for all that it sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sluice.base.duties import Duties
from sluice.base.errors import SluiceError
from sluice.exchange import courier, uplink
from sluice.exchange.courier import AnswerError, Controllers
from sluice.exchange.uplink import Uplink

REFUSED = SluiceError("no controller accepts requests (sluice1: Connection refused)", remedy="start it")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def attempt(clock: Clock, capsys: pytest.CaptureFixture[str]) -> Callable[[SluiceError | None], str]:
    """One attempt that ends with an error, or with none; what is logged."""
    way = Uplink(clock)

    def attempt(error: SluiceError | None) -> str:
        try:
            with way.asking():
                if error is not None:
                    raise error
        except SluiceError as raised:
            assert raised is error
        return capsys.readouterr().err

    return attempt


def test_an_outage_is_logged_once_and_so_is_its_end(clock: Clock, attempt: Callable[[SluiceError | None], str]) -> None:
    assert attempt(None) == ""
    assert "Connection refused); start it" in attempt(REFUSED)
    for _ in range(5000):
        clock.now += 1
        assert attempt(REFUSED) == ""
    assert 'action=recovered what="controllers accept requests again" seconds=5000' in attempt(None)
    assert attempt(None) == ""
    assert "Connection refused" in attempt(REFUSED)


def test_a_reason_that_changes_costs_a_line_a_minute(
    clock: Clock, attempt: Callable[[SluiceError | None], str]
) -> None:
    lines = [attempt(SluiceError("closed the connection"))]
    for second in range(600):
        clock.now += 1
        lines.append(attempt(SluiceError(f"try {second}: Connection timed out")))
    assert sum(map(bool, lines)) == 11
    assert not any(lines[1:60]) and lines[60]


def test_controllers_that_come_and_go_cost_few_lines(
    clock: Clock, attempt: Callable[[SluiceError | None], str]
) -> None:
    lines = []
    for _ in range(600):
        clock.now += 1
        lines += [attempt(REFUSED), attempt(None)]
    assert sum("action=problem" in line for line in lines) <= 4 + 10
    assert sum("action=recovered" in line for line in lines) <= 4 + 10


def test_a_controller_that_refuses_a_request_is_there(attempt: Callable[[SluiceError | None], str]) -> None:
    """What it refuses is logged by what sent it."""
    refused = AnswerError("no controller accepts requests (sluice1: unknown: do)")
    assert attempt(refused) == "" and not refused.logged
    attempt(REFUSED)
    assert REFUSED.logged
    assert "action=recovered" in attempt(refused)


def test_many_duties_without_a_controller_log_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a health report, records of jobs and what runs now, each said it."""

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("sluice.slurm.munge_service.connect", refuse)
    monkeypatch.setattr(uplink, "controllers", lambda: Controllers(("sluice1",), frozenset({0})))
    stopping, way, tries = threading.Event(), Uplink(), []

    def send() -> None:
        tries.append(1)
        way.send({"do": "nothing"})

    def other() -> None:
        raise SluiceError("something else")

    duties = Duties(stopping)
    for name in ("courier", "health-report", "live-reports"):
        duties.add(name, 0.01, send)
    duties.add("other", 0.01, other)
    duties.start()
    until = time.monotonic() + 20
    while len(tries) < 30 and time.monotonic() < until:
        time.sleep(0.01)
    stopping.set()
    lines = capsys.readouterr().err.splitlines()
    assert len(tries) >= 30
    assert sum(f"no controller accepts requests on port {courier.port()} (sluice1: " in line for line in lines) == 1
    assert sum("something else" in line for line in lines) == 1
    assert len(lines) == 2
