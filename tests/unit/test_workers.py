"""How the workers of `tools/run-tests` share the modules."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.remote import Producer

from tests.workers import pytest_xdist_make_scheduler

DAEMONS = [f"tests/integration/test_{name}.py::test_it" for name in "abcdef"]
OTHERS = [f"tests/unit/test_{name}.py::test_it" for name in "uvwxyz"]


class Worker:
    """A worker, as the scheduler has it, that runs a test when it is sent one."""

    def __init__(self, number: int, count: int) -> None:
        self.workerinput = {"workerid": f"gw{number}", "workercount": count}
        self.gateway = self
        self.id = f"gw{number}"
        self.config = None
        self.waits: list[int] = []
        self.ran: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waits += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Run:
    """Of `count` workers."""

    def __init__(self, config: pytest.Config, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> None:
        monkeypatch.setattr(config.option, "tx", ["popen"] * count)
        monkeypatch.setattr(config.option, "loadscopereorder", False)
        self.scheduler: Any = pytest_xdist_make_scheduler(config, Producer("test", enabled=False))
        self.workers = [Worker(number, count) for number in range(count)]
        for worker in self.workers:
            self.scheduler.add_node(worker)
            self.scheduler.add_node_collection(worker, DAEMONS + OTHERS)
        self.scheduler.schedule()

    def next(self, worker: Worker) -> None:
        """Its next test is run."""
        index = worker.waits.pop(0)
        worker.ran.append((DAEMONS + OTHERS)[index])
        self.scheduler.mark_test_complete(worker, index)

    def all(self, *workers: Worker) -> None:
        """These workers run tests in turns until they have none."""
        while any(worker.waits for worker in workers):
            for worker in workers:
                if worker.waits:
                    self.next(worker)


def test_a_single_worker_runs_all(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(pytestconfig, monkeypatch, 1)
    run.all(*run.workers)
    assert run.workers[0].ran == DAEMONS + OTHERS and run.scheduler.tests_finished


@pytest.mark.parametrize("died", [0, 2])
def test_what_a_worker_that_died_had_is_run_by_the_others(run: Run, died: int) -> None:
    dead = run.workers.pop(died)
    left = [(DAEMONS + OTHERS)[index] for index in dead.waits]
    assert run.scheduler.remove_node(dead) == left[0]
    run.all(*run.workers)
    ran = [test for worker in run.workers for test in worker.ran]
    assert sorted([*ran, *dead.ran]) == DAEMONS + OTHERS and run.scheduler.tests_finished


@pytest.fixture
def run(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(pytestconfig, monkeypatch)


def test_the_last_worker_takes_modules_from_the_end_those_of_daemons_last(run: Run) -> None:
    first, second, last = run.workers
    while len(last.ran) < len(OTHERS) + 1:
        run.next(last)
    assert last.ran == [*OTHERS[::-1], DAEMONS[-1]]
    run.all(*run.workers)
    assert sorted(first.ran + second.ran + last.ran) == DAEMONS + OTHERS
    assert first.ran[0] == DAEMONS[0] and run.scheduler.tests_finished


def test_the_others_help_when_no_daemons_are_left(run: Run) -> None:
    first, second, last = run.workers
    run.all(first, second)
    assert last.waits and sorted([*first.ran, *second.ran])[: len(DAEMONS)] == DAEMONS
    run.all(last)
    assert sorted(first.ran + second.ran + last.ran) == DAEMONS + OTHERS
    assert last.ran[0] == OTHERS[-1] and not set(last.ran) & set(DAEMONS)
