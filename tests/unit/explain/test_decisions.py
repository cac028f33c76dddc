"""Decisions: what the plugins' own code writes is read and replayed, and nonsense is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from sluice.explain import decisions
from sluice.explain.decisions import (
    Decision,
    DecisionError,
    Image,
    Lost,
    Replay,
    Start,
    check_file,
    list_files,
    read_entries,
)
from tests.unit.explain.decision_files import forge, raw_entries, run_churn


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_decision_replays(churn: Path, tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "decisions"
    counters = run_churn(churn, folder, seed, file_bytes=100_000)
    assert counters["dropped"] == counters["failed"] == 0
    files = list_files(folder)
    assert len(files) > 1, "a file ends at its bound, and the next one replays alone"
    checks = [check_file(path) for path in files]
    assert [check.different for check in checks] == [()] * len(files)
    assert sum(check.replayed for check in checks) > 500
    assert sum(check.not_replayable + check.lost for check in checks) == 0


def test_files_are_bounded_and_private(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    run_churn(churn, folder, 4, steps=3000, file_bytes=40_000)
    files = list_files(folder)
    assert len(files) == 4
    assert all(path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size < 60_000 for path in files)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert int(files[-1].name[-12:]) > 4, "the oldest ones are gone"


def test_a_full_ring_loses_entries_but_never_the_truth(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    counters = run_churn(churn, folder, 5, steps=4000, ring=8192)
    assert counters["dropped"] > 0
    checks = [check_file(path) for path in list_files(folder)]
    assert all(check.different == () for check in checks)
    assert sum(check.replayed for check in checks) > 50
    assert sum(check.lost for check in checks) == counters["dropped"], "the files say how many are missing"


def test_a_folder_of_another_user_is_not_written_to(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    counters = run_churn(churn, folder, 6, steps=100)
    assert counters["failed"] > 0
    assert list_files(folder) == []


def test_explanations_come_from_the_replay(sample: Path) -> None:
    replay = Replay()
    refused = placed = 0
    for entry in read_entries(sample):
        replay.feed(entry)
        if not isinstance(entry.body, Decision):
            continue
        explanation = replay.explain(entry.body)
        assert explanation.verdict == entry.body.verdict
        assert sum(explanation.by_reason.values()) == explanation.nodes == 70
        assert explanation.placement == entry.body.placement
        refused += explanation.placement is None
        placed += explanation.placement is not None
    assert refused and placed
    assert replay.topology is not None
    assert replay.topology.node_names[:2] == ["node-000", "node-001"]


def test_compute_nics_and_segments_of_one_decision(sample: Path) -> None:
    found = [entry.body for entry in read_entries(sample) if isinstance(entry.body, Decision)]
    asked = [decision for decision in found if decision.request.segment == 2 and decision.request.gpu_compute_percent]
    placed = [decision.placement for decision in asked if decision.placement]
    assert placed
    for decision in asked:
        request = decision.request
        assert (request.gpu_compute_percent, request.nics, request.nics_per_gpu, request.nic_kinds) == (10, 0, 2, 1)
    for placement in placed:
        assert len(placement.parts) == 4
        assert {(part.gpu_compute_percent, part.nics.bit_count()) for part in placement.parts} == {(10, 2)}


def test_a_changed_image_changes_the_answer(sample: Path) -> None:
    """The replay would notice: with other node images the decisions come out otherwise."""
    replay, different = Replay(), 0
    for entry in read_entries(sample):
        if isinstance(entry.body, Image):
            continue
        replay.feed(entry)
        if isinstance(entry.body, Decision):
            different += not replay.agrees(entry.body)
    assert different > 10


def test_a_file_that_is_still_written_ends_at_its_last_whole_entry(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    whole = len(list(read_entries(sample)))
    cut = tmp_path / "decisions.000000000001"
    for length in (0, 5, 16, 20, len(data) - 1, len(data) - 30):
        cut.write_bytes(data[:length])
        assert len(list(read_entries(cut))) < whole


def test_damage_is_refused(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    path = tmp_path / "decisions.000000000001"
    path.write_bytes(b"something else entirely")
    with pytest.raises(DecisionError, match="not a file of decisions"):
        list(read_entries(path))
    path.write_bytes(data[:8] + struct.pack("<I", 9) + data[12:])
    with pytest.raises(DecisionError, match="format 9"):
        list(read_entries(path))
    path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    with pytest.raises(DecisionError, match="damaged"):
        list(read_entries(path))
    with pytest.raises(DecisionError, match="No such file"):
        list(read_entries(tmp_path / "none"))


def test_hostile_payloads_raise_nothing_but_decision_errors(sample: Path, tmp_path: Path) -> None:
    """Mutated and random payloads under correct checksums: every one is read, skipped or refused."""
    rng = random.Random(8)
    good = raw_entries(sample)
    path = tmp_path / "decisions.000000000001"
    refused = 0
    for _ in range(1500):
        kind, payload = rng.choice(good[:200])
        mutated = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            what = rng.randrange(4)
            if what == 0 and mutated:
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            elif what == 1:
                del mutated[rng.randrange(len(mutated) + 1) :]
            elif what == 2:
                mutated += rng.randbytes(rng.randrange(12))
            else:
                mutated[rng.randrange(len(mutated) + 1) : 0] = b"\xff" * rng.randrange(12)
        if rng.random() < 0.1:
            kind = rng.randrange(9)
        first = [] if kind == 1 else good[:1]
        path.write_bytes(forge([*first, (kind, bytes(mutated)), *good[1:90:30]]))
        try:
            check_file(path)
        except DecisionError:
            refused += 1
    assert refused > 200


def test_the_reader_of_numbers() -> None:
    read = decisions.Fields(b"\x00\x7f\x80\x01" + b"\xff" * 9 + b"\x01")
    assert [read.number(), read.number(), read.number(), read.signed()] == [0, 127, 128, -1]
    for bad in (b"", b"\x80", b"\xff" * 11, b"\xff" * 9 + b"\x02"):
        with pytest.raises(DecisionError):
            decisions.Fields(bad).number()
    with pytest.raises(DecisionError):
        decisions.Fields(b"\x05\x13").bitmap()  # 4 words of ones announced as 4, none follow
    assert decisions.parse_entry(77, b"of a later version") is None


def test_starts_and_losses_are_read(sample: Path) -> None:
    bodies = [entry.body for entry in read_entries(sample)]
    starts = [body for body in bodies if isinstance(body, Start)]
    assert starts
    assert starts[0].job.account == "physics"
    assert starts[0].job.limit_s is None
    assert starts[0].rank is None
    with_roles = [start for start in starts if start.roles]
    assert {start.job.id % 3 for start in with_roles} == {0}
    for start in with_roles:
        assert list(start.roles) == ["learner", "actor"]
        for part, learner, actor in zip(start.parts, *start.roles.values(), strict=True):
            assert (learner | actor, learner & actor, learner.bit_count()) == (part.gpus, 0, min(part.gpus, 1))
    assert not any(isinstance(body, Lost) for body in bodies)
