"""The two ends of the gateway's benchmark: what the load generator reports is what the engine did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve_site import Load, _certificate, build_load, engine, free_port, parse_answers, quantile


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield build_load(tmp_path_factory.mktemp("load"))


def test_streams_are_whole_and_every_token_is_timed(program: Path, tmp_path: Path) -> None:
    port = free_port()
    with engine(program, port, 2000, 1000):
        answers = Load(program, tmp_path, port, ["a", "b"], 4, 0.5, max_tokens=5, stream=True).wait()
    assert answers.good and len(answers.good) == len(answers.rows)
    assert {row[4] for row in answers.good} == {5} and len(answers.held) == 5 * len(answers.good)
    for _, status, first, total, _, _ in answers.good:
        assert status == 200 and first >= 2000 and total >= 6000
    assert min(answers.held) >= 0


def test_a_rate_is_kept_and_slots_bound_what_runs_at_once(program: Path, tmp_path: Path) -> None:
    port = free_port()
    with engine(program, port, 20_000, 0, 2):
        slow = Load(program, tmp_path, port, ["a"], 8, 0.5, max_tokens=5).wait()
        paced = Load(program, tmp_path, port, ["a"], 8, 1.0, rate=20, max_tokens=5).wait()
    # 2 slots of 20 ms: 100 a second at most, and the last ones wait for 8 clients' turns
    assert 0 < len(slow.good) <= 2 * 25 + 8 and quantile([row[3] for row in slow.good], 0.9) >= 60_000
    assert 10 <= len(paced.good) <= 21


def test_a_replica_wants_its_secret(program: Path, tmp_path: Path) -> None:
    port = free_port()
    certificate, _ = _certificate(tmp_path)
    with engine(program, port, 0, 0, 8, certificate, certificate, "5" * 64):
        answers = Load(program, tmp_path, port, ["a"], 1, 0.3, max_tokens=5).wait()  # plain, so it is hung up on
    assert not answers.good


def test_what_was_printed_is_read() -> None:
    found = parse_answers("5 200 10 20 3 1\n7 429 0 4 0 1\nh 12\n9 200 1 2 1 0\nfailed 2\n")
    assert [row[1] for row in found.rows] == [200, 429, 200] and found.good == [(5, 200, 10, 20, 3, True)]
    assert (found.held, found.unconnected) == ([12], 2)
