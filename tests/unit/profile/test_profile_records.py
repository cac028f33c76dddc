"""Files of profiles, which are their users' claims."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from benchmarks.profile_files import SECOND, Writer, training
from sluice.base.errors import SluiceError
from sluice.profile.records import Kind, read


def written(folder: Path, writer: Writer) -> Path:
    path = folder / writer.file_name
    path.write_bytes(writer.content())
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer = Writer(rank=3)
    name = writer.name("gemm" * 40)
    writer.device(2, b"u" * 16)
    writer.kernel(name, 10, 30, device=2, stream=9)
    writer.copy(20, 25, 1 << 20)
    writer.record(7, 5, 5, struct.pack("<QQBB", 512, 0xABC, 3, 1))
    writer.record(9, 5, 50, struct.pack("<IiQQ", 1, 0, 4096, 7), name=name)
    writer.lost(12, 6)
    writer.end(SECOND, reason=2, cost=5)
    found = read(written(tmp_path, writer))
    assert (found.host, found.pid, found.rank, found.job, found.program) == ("n1", 100, 3, 17, "train")
    assert found.devices == {2: ((b"u" * 16).hex(), "NVIDIA H100")}
    kernel, copy, memory, collective = found.events
    assert (kernel.kind, kernel.device, kernel.stream, found.name(kernel.name)) == (Kind.KERNEL, 2, 9, "gemm" * 40)
    assert (kernel.start - found.started, kernel.end - found.started) == (10, 30)
    assert (copy.size, copy.places, memory.size, memory.places) == (1 << 20, (2, 3), 512, (3, 1))
    assert collective.size == 4096
    assert [loss.events for loss in found.losses] == [12]
    assert found.ended is not None and (found.ended.reason, found.ended.cost, found.damaged) == (2, 5, 0)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 200])
def test_a_file_that_was_cut_off_has_what_is_whole(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, training(Writer(), 40, 1))
    whole = read(path)
    os.truncate(path, path.stat().st_size - cut)
    found = read(path)
    assert 0 < len(whole.events) - len(found.events) + 1 <= 2 + cut // 64
    assert found.events == whole.events[: len(found.events)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a profile"),
        (b"SLUPROF1", "not a profile"),
        (b"x" * 400, "not a profile"),
        (Writer().content()[:8] + struct.pack("<I", 2) + Writer().content()[12:], "version 2"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.profile"
    path.write_bytes(content)
    with pytest.raises(SluiceError, match=words):
        read(path)


def test_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    link, pipe = tmp_path / "a.profile", tmp_path / "b.profile"
    link.symlink_to(written(tmp_path, Writer()))
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="symbolic"):
        read(link)
    with pytest.raises(SluiceError, match="not a regular file"):
        read(pipe)


def test_no_number_in_a_file_decides_how_much_is_kept(tmp_path: Path) -> None:
    writer = Writer()
    name = writer.name("k")
    writer.record(1, slots=0xFFFF, name=2, body=struct.pack("<Q", 1 << 60))  # a name that takes the rest
    found = read(written(tmp_path, writer))
    assert (found.damaged, list(found.names)) == (1, [name])
    writer = Writer()
    for start, end in ((5, 4), (-(1 << 62), 9), (0, 1 << 62)):
        writer.records.append(struct.pack("<HHIQQIIII24s", 3, 0, 0, start % (1 << 64), end, 0, 0, 0, 0, b""))
    writer.records.append(struct.pack("<HHIQQIIII24s", 3, 0, 0, 0, 0, 0, 0, 0, 0, b""))  # without times
    assert (read(written(tmp_path, writer)).damaged, read(written(tmp_path, writer)).events) == (4, [])
    found = read(written(tmp_path, training(Writer(), 400, 1)), most=100)
    assert len(found.events) == 100 and found.left_out >= 300


def test_texts_are_printable(tmp_path: Path) -> None:
    writer = Writer(program="\x1b[31mx\n", host="n\x071")
    writer.kernel(writer.name("\x1b]0;title\x07k\u202e\n"), 1, 2)
    found = read(written(tmp_path, writer))
    assert (found.program, found.host, found.names[1]) == ("[31mx", "n 1", "]0;title k")
