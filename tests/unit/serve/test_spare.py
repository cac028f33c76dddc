"""Room for usage records while the disk is full."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sluice.exchange.requests import RequestLog, RequestRecord, parse
from sluice.serve.gateway import spare
from sluice.serve.gateway.spare import Spare, recover


def a_record(number: int, model: str = "m") -> RequestRecord:
    return RequestRecord(
        f"{number:032x}", 1.5, 2.5, "k", "alice", "physics", model, 7, 1, 2, 0, "ok", 200, 0.0, None, 1.0, "/v1/x"
    )


def recovered(folder: Path) -> list[RequestRecord]:
    """What is in the log once it has been recovered."""
    log = RequestLog(folder, "h")
    count = recover(folder, log)
    log.close()
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    records = [record for line in lines if (record := parse(line)) is not None]
    assert len(records) == len(lines) == count
    return records


def test_what_a_killed_process_had_kept_is_read_up_to_its_end(tmp_path: Path) -> None:
    one = Spare(tmp_path)
    for number in range(20):
        one.keep(a_record(number, "long" * 50))
    one.clear()
    hostile = [a_record(n, model) for n, model in enumerate(("\0", "\n", '"},{"v":1', "\u2028"), 100)]
    for record in hostile:
        one.keep(record)
    assert recover(tmp_path, RequestLog(tmp_path, "h")) == 0  # it lives
    os.close(one._descriptor)
    assert recovered(tmp_path) == hostile and not list(tmp_path.glob(".*"))


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    """Whoever recovers is killed between a record and the end of the file that has it."""
    one = Spare(tmp_path)
    for number in range(5):
        one.keep(a_record(number))
    os.close(one._descriptor)
    log = RequestLog(tmp_path, "h")
    for number in (0, 2, 4):
        log.write(a_record(number))
    assert recover(tmp_path, log) == 2
    log.close()
    (path,) = tmp_path.glob("*.jsonl")
    assert [parse(line) for line in path.read_bytes().splitlines()] == [a_record(n) for n in (0, 2, 4, 1, 3)]


def test_a_file_that_recover_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, between = fcntl.flock, [True]

    def late(descriptor: int, how: int) -> None:
        if between:
            between.clear()
            recover(tmp_path, RequestLog(tmp_path, "h"))
            assert not list(tmp_path.iterdir())
        flock(descriptor, how)

    monkeypatch.setattr(spare.fcntl, "flock", late)
    one = Spare(tmp_path)
    one.keep(a_record(1))
    os.close(one._descriptor)
    assert recovered(tmp_path) == [a_record(1)]


def test_a_disk_that_copies_what_is_written_and_is_full_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    one = Spare(tmp_path)
    one.keep(a_record(1))
    monkeypatch.setattr(os, "pwrite", full)
    one.clear()
    one.keep(a_record(2))
    one.close()
    assert not list(tmp_path.glob(".*"))
