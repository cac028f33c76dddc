"""The node's part in a preflight: what it asks and believes, and where a job starts without a verdict."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.preflight import NodePreflight
from prolog_epilog import preflight
from prolog_epilog.preflight import Measuring, Preflights
from prolog_epilog.server import Peer
from prolog_epilog.state import Settings, State
from sluice.base.errors import SluiceError
from sluice.exchange.record import JobRecord

ROOTS = Peer(os.getpid(), 0)
Answers = list[dict[str, Any] | SluiceError]
GOOD = {"state": "done", "text": "preflight: good", "faults": {}, "good": True, "drained": False}
FAULTY = {"state": "done", "text": "slow", "faults": {"fabric_link": ["slow"]}, "drained": False}


def policy_of(when: str) -> NodePreflight:
    return NodePreflight.model_validate({"when": when, "bound_s": 5})


class Node:
    """A node with one job, and controllers that give these answers; the last one again and again."""

    def __init__(self, folder: Path, when: str, answers: Answers) -> None:
        settings = Settings(run=folder / "run", records=folder / "records", policy=folder / "sluice.policy")
        self.state = State(settings)
        self.state.jobs.prepare()
        self.state.records[7] = JobRecord(7, 1000, "ann", "physics", "main", "n1", 1.0)
        self.asked: list[dict[str, Any]] = []
        self._answers = answers
        self.policy = policy_of(when)
        self.preflights = Preflights(self.state, lambda: self.policy, self.send, lambda: "eth0")

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, SluiceError):
            raise answer
        return answer

    def run(self) -> dict[str, Any]:
        return self.preflights.run(peer=ROOTS, job=7)

    def noted(self) -> list[str]:
        return [one.detail["what"] for one in self.state.records[7].events if one.action == "preflight"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    monkeypatch.setattr(preflight, "_DRAIN_S", 0.5)

    def make(*answers: dict[str, Any] | SluiceError, when: str = "always") -> Node:
        return Node(tmp_path, when, list(answers))

    return make


def test_without_a_policy_nobody_is_asked(node: Callable[..., Node]) -> None:
    made = node(GOOD, when="never")
    assert made.run() == {}
    assert made.asked == []
    assert made.preflights.found() is None


def test_the_verdict_is_in_the_jobs_record(node: Callable[..., Node]) -> None:
    made = node(GOOD)
    assert made.run() == {}
    assert made.noted() == ["preflight: good"]
    assert made.preflights.found() == {}


@pytest.mark.parametrize(
    "answer", [SluiceError("no controller"), {}, {"state": "test", "batch": 0, "rounds": []}, {"state": "none"}]
)
def test_a_job_starts_where_no_controller_says_anything_of_use(node: Callable[..., Node], answer: Any) -> None:
    made = node(answer)
    assert made.run() == {}
    assert made.noted() == []


def test_a_job_does_not_wait_longer_than_the_bound(node: Callable[..., Node]) -> None:
    made = node({"state": "wait", "again_s": 0.5})
    assert made.run() == {}
    assert made.noted() == []
    assert 5 <= len(made.asked) <= 12


def test_a_faulty_node_refuses_the_job_when_it_is_drained(node: Callable[..., Node]) -> None:
    made = node(FAULTY, FAULTY, FAULTY | {"drained": True})
    due: list[list[str]] = []
    made.preflights.on_found = lambda checks: due.append(list(checks))
    assert made.run() == {"fault": "slow; see: sluice fabric check, sluice health list"}
    assert due == [["fabric_link"]]
    assert made.preflights.found() == {"fabric_link": ["slow"]}


def test_what_is_found_holds_also_where_the_disk_is_full(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = node(FAULTY, FAULTY | {"drained": True})

    def full(record: JobRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(made.state.jobs, "save", full)
    assert made.run()["fault"].startswith("slow")
    assert made.preflights.found() == {"fabric_link": ["slow"]}


def test_a_preflight_without_a_verdict_does_not_end_what_an_earlier_one_found(node: Callable[..., Node]) -> None:
    made = node(FAULTY)
    made.run()
    made._answers = [{"state": "done", "text": "no answer from h4 in time", "faults": {}, "good": False}]
    made.run()
    assert made.preflights.found() == {"fabric_link": ["slow"]}


def test_what_was_found_is_not_found_again_when_the_policy_has_preflights_again(node: Callable[..., Node]) -> None:
    """A person may have resumed the node meanwhile: only another preflight drains it again."""
    made = node(FAULTY)
    made.run()
    made.policy = policy_of("never")
    assert made.preflights.found() is None
    made.policy = policy_of("always")
    assert made.preflights.found() is None
    made.run()
    assert made.preflights.found() == {"fabric_link": ["slow"]}


def test_a_controller_that_hangs_keeps_the_job_no_longer_than_the_bound(node: Callable[..., Node]) -> None:
    made = node(GOOD)
    made.preflights._send = lambda _: time.sleep(30) or {}
    began = time.monotonic()
    assert made.run() == {}
    assert time.monotonic() - began < 9


def test_without_a_policy_the_prolog_is_not_told_to_ask(node: Callable[..., Node]) -> None:
    assert node(GOOD, when="never").preflights.longest_s() == 0
    assert 5 < node(GOOD).preflights.longest_s() < 20


def test_a_faulty_node_that_nobody_drains_runs_the_job(node: Callable[..., Node]) -> None:
    """A policy in shadow, or a breaker that is open."""
    made = node(FAULTY)
    assert made.run() == {}
    assert made.noted() == ["slow"]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Measuring]]:
    """A measuring program that says something else."""
    program = tmp_path / "program.py"
    monkeypatch.setattr(preflight, "PROGRAM", program)
    monkeypatch.setattr(preflight, "_START_S", 3.0)
    with Measuring() as measuring:

        def make(text: str) -> Measuring:
            program.write_text(f"import sys\n{text}\nsys.stdout.flush()\nsys.stdin.read()\n")
            program.chmod(0o644)
            return measuring

        yield make


@pytest.mark.parametrize("text", ["print('{')", "print('[1]')", "print('x' * 9999)", "pass", "sys.exit(3)"])
def test_a_program_that_says_nothing_of_use_is_no_answer(says: Callable[[str], Measuring], text: str) -> None:
    with pytest.raises(SluiceError):
        says(text).start()


def test_only_figures_of_own_tests_are_believed(says: Callable[[str], Measuring]) -> None:
    hello = 'print(\'{"port": 1, "tools": ["tcp"]}\'); sys.stdout.flush(); sys.stdin.readline()'
    lines = [
        '{"id": "2", "gbs": 99.0}', '{"id": "3", "gbs": 99.0, "us": 1.0}', '{"id": "1", "gbs": "48", "us": true}',
    ]  # fmt: skip
    measuring = says("\n".join([hello, *(f"print({line!r})" for line in lines)]))
    assert measuring.start() == {"port": 1, "tools": ["tcp"]}
    rounds = [[{"id": "1", "role": "ask"}, {"id": "2", "role": "serve"}]]
    assert measuring.measure(rounds, preflight.time.monotonic() + 5) == {"1": [None, None]}


def test_what_the_program_started_ends_with_it(says: Callable[[str], Measuring], tmp_path: Path) -> None:
    """perftest that waits for a peer would wait for ever."""
    child = "import subprocess; one = subprocess.Popen(['sleep', '600'])"
    measuring = says(f'{child}; print(\'{{"port": %d, "tools": []}}\' % one.pid)')
    pid = measuring.start()["port"]
    measuring.__exit__()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}/status").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_program_does_not_start_when_time_is_over(says: Callable[[str], Measuring]) -> None:
    measuring = says("pass")
    measuring.__exit__()
    with pytest.raises(SluiceError, match="time is over"):
        measuring.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_the_program_runs_as_a_user_that_services_do_not_share_and_ends_with_the_preflight() -> None:
    with Measuring() as measuring:
        assert measuring.start()["port"] > 0
        program = measuring._program
        assert program is not None
        status = Path(f"/proc/{program.pid}/status").read_text()
        assert "Uid:\t65533\t65533\t65533\t65533" in status
        assert "Groups:\t \n" in status or "Groups:\t\n" in status
    assert program.poll() is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives other users more")
def test_rdma_may_lock_more_memory_than_systemd_gives_to_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 8 MiB UCX cannot register its buffers with an interface."""
    given = []
    monkeypatch.setattr(resource, "prlimit", lambda *words: given.append(words))
    with Measuring() as measuring:
        measuring.start()
        assert measuring._program is not None
        assert given == [(measuring._program.pid, resource.RLIMIT_MEMLOCK, (1 << 30, 1 << 30))]
