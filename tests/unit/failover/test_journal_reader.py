"""The failover journal as administrators read it: by the same rules as slurmctld."""

from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.journal_reader import read_journal, read_replays


def entry(
    sequence: int, kind: int = 2, job: int = 7, payload: bytes = b"script", at_us: int = 1_700_000_000_000_000
) -> bytes:
    header = struct.pack("<4sHHIIQq", b"SLJR", kind, 1, len(payload), job, sequence, at_us)
    crc = zlib.crc32(header)
    rotated = ((crc << 1) | (crc >> 31)) & 0xFFFFFFFF
    return header + struct.pack("<I", zlib.crc32(payload) ^ rotated) + payload


def segment(folder: Path, first: int, data: bytes) -> None:
    (folder / f"{first:016x}.journal").write_bytes(data)


def test_entries_of_several_segments(tmp_path: Path) -> None:
    segment(tmp_path, 1, entry(1, kind=1, job=0) + entry(2) + entry(3, kind=4, job=9))
    segment(tmp_path, 4, entry(4, kind=1, job=0) + entry(5, kind=99))
    (tmp_path / "replays.jsonl").write_text("")
    journal = read_journal(tmp_path)
    assert [(one.sequence, one.kind, one.job_id) for one in journal.entries] == [
        (1, "open", 0),
        (2, "submit", 7),
        (3, "end", 9),
        (4, "open", 0),
        (5, "unknown", 7),
    ]
    assert journal.entries[1].at == 1_700_000_000.0
    assert (journal.segments, journal.torn_bytes, journal.lost_bytes, journal.problem) == (2, 0, 0, "")


def test_a_torn_end_is_counted(tmp_path: Path) -> None:
    segment(tmp_path, 1, entry(1) + entry(2)[:-3])
    journal = read_journal(tmp_path)
    assert len(journal.entries) == 1
    assert journal.torn_bytes == len(entry(2)) - 3
    assert journal.problem == ""


def test_what_is_behind_damage_is_not_used(tmp_path: Path) -> None:
    data = bytearray(entry(1) + entry(2) + entry(3))
    data[len(entry(1)) + 40] ^= 1
    segment(tmp_path, 1, bytes(data))
    segment(tmp_path, 4, entry(4))
    journal = read_journal(tmp_path)
    assert len(journal.entries) == 1
    assert "corrupt" in journal.problem
    assert journal.lost_bytes == len(entry(2)) * 2 + len(entry(4))


def test_a_damaged_length_is_no_torn_end(tmp_path: Path) -> None:
    data = bytearray(entry(1) + entry(2) + entry(3))
    data[len(entry(1)) + 10] ^= 1  # 64 KiB more
    segment(tmp_path, 1, bytes(data))
    journal = read_journal(tmp_path)
    assert "corrupt" in journal.problem
    assert (journal.torn_bytes, journal.lost_bytes) == (0, 2 * len(entry(2)))
    forged = entry(2, payload=entry(3000, job=60_000_000))  # a user's script, cut off behind it
    segment(tmp_path, 1, entry(1) + forged[:-1])
    journal = read_journal(tmp_path)
    assert (journal.torn_bytes, journal.problem) == (len(forged) - 1, "")


def test_what_an_earlier_controller_still_wrote_is_late(tmp_path: Path) -> None:
    segment(tmp_path, 1, entry(1) + entry(2) + entry(3, job=99))
    segment(tmp_path, 3, entry(3))
    journal = read_journal(tmp_path)
    assert [one.job_id for one in journal.entries] == [7, 7, 7]
    assert journal.late_bytes == len(entry(3))
    assert "another controller" in journal.problem


def test_nothing_there(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none").entries == []
    assert read_replays(tmp_path) == []


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        segment(Path(name), 1, entry(1) + data)
        journal = read_journal(Path(name))
        assert journal.entries[0].sequence == 1
        assert sum(one.bytes for one in journal.entries) + journal.torn_bytes + journal.lost_bytes == journal.bytes


def test_reports_of_replays(tmp_path: Path) -> None:
    (tmp_path / "replays.jsonl.1").write_text('{"schema_version": 1, "at": 1}\n')
    (tmp_path / "replays.jsonl").write_text('{"schema_version": 1, "at": 2}\nnonsense\n{"schema_version": 2}\n[]\n')
    assert [report["at"] for report in read_replays(tmp_path)] == [1, 2]
