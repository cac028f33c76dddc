"""The spool: in order, bounded, nothing lost or doubled, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.base.errors import SluiceError
from sluice.metrics.influx import RejectedError, TooLargeError
from sluice.metrics.sender import Sender
from sluice.metrics.spool import MAX_BATCH, Place, Reader, Writer

KIB = 1 << 10


def drain(reader: Reader, now: float = 0.0) -> list[bytes]:
    found = []
    while (one := reader.next(1)) is not None:
        found.append(one[0])
        reader.taken(one[1], now)
    return found


def batches(first: int, last: int) -> list[bytes]:
    return [f"batch {number}\n".encode() for number in range(first, last)]


def fill(writer: Writer, these: list[bytes]) -> None:
    for one in these:
        writer.append(one)


def test_in_order_and_once(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, 1 << 20), Reader(tmp_path)
    assert reader.next() is None
    fill(writer, batches(0, 10))
    assert drain(reader) == batches(0, 10) and drain(reader) == []
    fill(writer, batches(10, 20))
    joined = reader.next(1 << 20)
    assert joined is not None and joined[0] == b"".join(batches(10, 20))


def test_goes_on_after_restarts_of_both(tmp_path: Path) -> None:
    fill(Writer(tmp_path, 1 << 20), batches(0, 5))
    reader = Reader(tmp_path)
    first = reader.next(1)
    assert first is not None
    reader.taken(first[1])
    second = reader.next(1)  # sent, but ended before the database acknowledged it
    assert second is not None
    fill(Writer(tmp_path, 1 << 20), batches(5, 7))
    assert drain(Reader(tmp_path)) == batches(1, 7)


def test_bounded_by_dropping_the_oldest(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, 1 << 20), Reader(tmp_path)
    sent = [bytes([number % 251]) * (60 * KIB) for number in range(60)]
    fill(writer, sent)
    assert writer.size <= 1 << 20 and writer.dropped > 2 << 20
    got = drain(reader)
    assert got == sent[-len(got) :] and len(got) >= 10  # the newest, in order
    assert writer.dropped == sum(len(one) + 8 for one in sent[: -len(got)])


def test_a_reader_whose_segment_goes(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, 1 << 20), Reader(tmp_path)
    fill(writer, [b"x" * (60 * KIB)] * 4)
    one = reader.next(1)
    assert one is not None
    reader.taken(one[1])
    fill(writer, [b"y" * (60 * KIB)] * 60)
    assert set(drain(reader)) == {b"y" * (60 * KIB)}


def test_sent_segments_are_removed_but_not_at_once(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, 64 << 20), Reader(tmp_path, keep_s=60)
    for now in range(0, 200, 10):
        fill(writer, [b"z" * (200 * KIB)] * 30)
        drain(reader, float(now))
    kept = len(list(tmp_path.glob("*.spool")))
    assert kept * 4 // 6 + 6 >= 6 and kept < 20


def test_rewind_gives_the_last_minute_again(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, 1 << 20), Reader(tmp_path, keep_s=60)
    for now in range(0, 200, 5):
        writer.append(f"{now}\n".encode())
        drain(reader, float(now))
    assert reader.rewind(200.0)
    again = [int(one) for one in drain(Reader(tmp_path), 200.0)]
    assert again == list(range(again[0], 200, 5)) and 130 <= again[0] <= 145


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 12])
def test_a_torn_tail_is_skipped_and_nothing_else(tmp_path: Path, cut: int) -> None:
    fill(Writer(tmp_path, 1 << 20), batches(0, 3))
    (segment,) = tmp_path.glob("*.spool")
    os.truncate(segment, segment.stat().st_size - cut)
    reader = Reader(tmp_path)
    assert drain(reader) == batches(0, 2)
    fill(Writer(tmp_path, 1 << 20), batches(3, 5))
    assert drain(reader) == batches(3, 5) and reader.damaged > 0


@given(st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=150)
def test_a_flipped_byte_never_gives_a_wrong_batch(place: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(Writer(folder, 1 << 20), batches(0, 20))
        (segment,) = folder.glob("*.spool")
        data = bytearray(segment.read_bytes())
        data[place % len(data)] ^= flip
        segment.write_bytes(data)
        writer = Writer(folder, 1 << 20)
        fill(writer, batches(20, 25))
        got = drain(Reader(folder))
        assert got[-5:] == batches(20, 25) and got[:-5] == batches(0, len(got) - 5)


@given(st.binary(max_size=300), st.binary(max_size=200))
@settings(max_examples=100)
def test_files_of_any_content(segment: bytes, place: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "0000000003.spool").write_bytes(segment)
        (folder / "sent.json").write_bytes(place)
        (folder / "nonsense.spool").write_bytes(b"x")
        writer, reader = Writer(folder, 1 << 20), Reader(folder)
        writer.append(b"new")
        reader._place = min(reader._place, Place(4, 0))  # beyond the end only a new folder helps
        assert drain(reader)[-1:] == [b"new"]


def test_a_full_disk_leaves_nothing_half(tmp_path: Path) -> None:
    """In a process with a limit on the size of files, which fails as a full disk does."""
    code = f"""
import resource, signal
from pathlib import Path
from sluice.metrics.spool import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = Writer(Path({str(tmp_path)!r}), 1 << 20)
writer.append(b"a" * 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
try:
    writer.append(b"b" * 1000)
    raise SystemExit("it was written")
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
writer.append(b"c" * 1000)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert drain(Reader(tmp_path)) == [b"a" * 1000, b"c" * 1000]


def test_a_batch_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the most"):
        Writer(tmp_path, 1 << 20).append(b"x" * (MAX_BATCH + 1))


class Database:
    """Takes what its script says; a killed one loses what it had not yet written."""

    def __init__(self, script: Iterator[Exception | None]) -> None:
        self.script = script
        self.got: list[bytes] = []

    def write(self, lines: bytes) -> None:
        answer = next(self.script, None)
        if answer is not None:
            raise answer
        self.got += lines.splitlines(keepends=True)


def sender_of(folder: Path, database: Database) -> tuple[Sender, list[str]]:
    said: list[str] = []
    return Sender(Reader(folder), lambda: database, said.append, folder), said


def run(sender: Sender, steps: int) -> list[float]:
    return [sender.step() for _ in range(steps)]


def test_a_database_that_is_away_gets_all_in_order(tmp_path: Path) -> None:
    away = SluiceError("refused")
    database = Database(iter([away, away, away, None]))
    sender, said = sender_of(tmp_path, database)
    fill(Writer(tmp_path, 1 << 20), batches(0, 9))
    waits = run(sender, 6)
    assert waits[:3] == [1.0, 2.0, 4.0] and database.got == batches(0, 9)
    assert len(said) == 2 and "wait on disk" in said[0] and "again" in said[1]
    assert sender.status.problem == ""


def test_what_a_killed_database_had_in_memory_comes_again(tmp_path: Path) -> None:
    database = Database(iter([None, SluiceError("killed"), None, None]))
    sender, _ = sender_of(tmp_path, database)
    writer = Writer(tmp_path, 1 << 20)
    fill(writer, batches(0, 3))
    run(sender, 1)
    assert database.got == batches(0, 3)
    database.got = []  # it was killed
    fill(writer, batches(3, 6))
    run(sender, 3)
    assert database.got == batches(0, 6) and sender.status.resent == 1


def test_lines_that_are_refused_stop_no_others(tmp_path: Path) -> None:
    database = Database(iter([RejectedError("400 bad line"), None]))
    sender, said = sender_of(tmp_path, database)
    writer = Writer(tmp_path, 1 << 20)
    fill(writer, batches(0, 1))
    run(sender, 1)
    fill(writer, batches(1, 2))
    run(sender, 1)
    assert database.got == batches(1, 2) and sender.status.rejected == len(batches(0, 1)[0]) and "400" in said[0]


def test_requests_that_are_too_large_become_smaller(tmp_path: Path) -> None:
    class Small(Database):
        def write(self, lines: bytes) -> None:
            if len(lines) > 3000:
                raise TooLargeError("413")
            super().write(lines)

    database = Small(iter([]))
    sender, _ = sender_of(tmp_path, database)
    these = [f"{number:0900}\n".encode() for number in range(50)]
    fill(Writer(tmp_path, 1 << 20), these)
    run(sender, 80)
    assert database.got == these and sender.status.rejected == 0
