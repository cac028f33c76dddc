"""The file of events: order, bounds, many writers, and incomplete or foreign lines."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from sluice.base import events
from sluice.base.errors import SluiceError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def _many(path: str, number: int) -> None:
    for turn in range(50):
        events.append(Path(path), "busy", writer=number, turn=turn, text="x" * 300)


def test_what_was_appended_is_read_in_order(path: Path) -> None:
    first = events.append(path, "takeover", by="ctl2", lost=0)
    second = events.append(path, "node.drained", fsync=True, node="n1", reason='say "no"\n')
    assert events.read(path) == [first, second]
    assert [first.seq, second.seq] == [1, 2]
    assert events.read(path, since=1) == [second]
    assert events.read(path, since=2) == []
    assert len(path.read_text().splitlines()) == 2


def test_no_file_means_no_events(path: Path) -> None:
    assert events.read(path) == []


def test_it_is_rotated_and_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LIMIT", 2000)
    for number in range(200):
        events.append(path, "tick", number=number)
    kept = events.read(path)
    assert kept[-1].fields == {"number": 199}
    assert [event.seq for event in kept] == list(range(kept[0].seq, 201))
    assert len(kept) > 60
    files = sorted(file.name for file in path.parent.iterdir())
    assert files == ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert all(file.stat().st_size <= 2000 for file in path.parent.iterdir())


def test_writers_side_by_side_lose_nothing_over_rotations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LIMIT", 40_000)  # forked children have it too: 200 events are two files
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_many, [str(path)] * 4, range(4)))
    found = events.read(path)
    assert [event.seq for event in found] == list(range(1, 201))
    assert {(e.fields["writer"], e.fields["turn"]) for e in found} == {(w, t) for w in range(4) for t in range(50)}
    assert path.with_name("events.jsonl.1").exists()


def test_a_torn_line_costs_itself_only(path: Path) -> None:
    events.append(path, "one")
    with path.open("ab") as file:
        file.write(b'{"seq":2,"time":1')
    events.append(path, "three")
    assert [(event.seq, event.kind) for event in events.read(path)] == [(1, "one"), (2, "three")]


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"seq":true,"time":1,"kind":"a"}',
        b'{"seq":-3,"time":1,"kind":"a"}',
        b'{"seq":9,"time":"1","kind":"a"}',
        b'{"seq":9,"time":NaN,"kind":"a"}',
        b'{"seq":9,"time":1,"kind":"A B"}',
        b'{"seq":9,"kind":"a"}',
        b'{"seq":9,"time":1,"kind":"a","x":"' + b"x" * 20_000 + b'"}',
    ],
)
def test_lines_that_are_no_events_are_left_out(path: Path, line: bytes) -> None:
    events.append(path, "one")
    with path.open("ab") as file:
        file.write(line + b"\n")
    assert [event.seq for event in events.read(path)] == [1]
    events.append(path, "two")
    assert events.read(path)[-1].kind == "two"


def test_links_and_other_things_are_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        events.append(path, "one")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SluiceError, match="not a regular file"):
        events.append(path, "one")
    assert events.read(path) == []


@pytest.mark.parametrize(("kind", "fields"), [("A", {}), ("", {}), ("a", {"seq": 1}), ("a", {"x": "y" * 20_000})])
def test_what_cannot_be_an_event_is_refused(path: Path, kind: str, fields: dict[str, object]) -> None:
    with pytest.raises(SluiceError):
        events.append(path, kind, **fields)
    assert not path.exists()


def test_a_clock_that_steps_back_keeps_the_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2000.0)
    events.append(path, "one")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    events.append(path, "two")
    assert [(event.seq, event.time) for event in events.read(path)] == [(1, 2000.0), (2, 1000.0)]


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events.append(path, "one")
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 10:
            return real(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left"):
        events.append(path, "two", text="long enough")
    monkeypatch.undo()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["one"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_appends_is_the_folders_owners(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    path = tmp_path / "events.jsonl"
    events.append(path, "drill")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
    assert events.append(path, "drill").seq == 2
    os.chown(path, 12345, 12345)
    with pytest.raises(SluiceError, match="not a regular file"):
        events.append(path, "drill")
