"""A queue of batches on disk: in order, bounded, and whole after a crash, a full disk or a damaged tail.

Segments are files NNNNNNNNNN.spool of records: length and CRC-32 of the batch, then the batch. One process writes, one
reads; they may be the same. The reader keeps its place in `sent.json`. A segment stays until all of it was taken and is
older than `keep_s`, as a database that is killed may lose what it had acknowledged but not yet written.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sluice.base.files import write_atomic

_HEAD = struct.Struct("<II")
MAX_BATCH = 1 << 20
_SUFFIX = ".spool"


def _segments(folder: Path) -> list[tuple[int, Path]]:
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            stem, suffix = os.path.splitext(entry.name)  # noqa: PTH122
            if suffix == _SUFFIX and stem.isdecimal():
                found.append((int(stem), Path(entry.path)))
    return sorted(found)


def _records(data: bytes) -> int:
    """Bytes of whole, undamaged records at the beginning."""
    place = 0
    while True:
        end = _record_end(data, place)
        if end is None:
            return place
        place = end


def _record_end(data: bytes, place: int) -> int | None:
    if len(data) - place < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, place)
    end = place + _HEAD.size + int(length)
    if length > MAX_BATCH or end > len(data) or zlib.crc32(data[place + _HEAD.size : end]) != checksum:
        return None
    return end


class Writer:
    """Appends batches. `limit`: bytes of all segments; beyond it the oldest go, and `dropped` counts their bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.dropped = 0
        self._segment_bytes = max(64 << 10, min(4 << 20, limit // 8))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        existing = _segments(folder)
        self._number = existing[-1][0] if existing else 0
        self._path = folder / f"{self._number:010}{_SUFFIX}"
        self._size = self._mend()

    def _mend(self) -> int:
        """Cut off what a crash left of a last record; the size of the last segment."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        good = _records(data)
        if good < len(data):
            self._next()  # the reader skips what is damaged; nothing is appended behind it
            return 0
        return good

    def _next(self) -> None:
        self._number += 1
        self._path = self.folder / f"{self._number:010}{_SUFFIX}"

    def append(self, batch: bytes) -> None:
        """Add a batch; nothing of it stays when this raises OSError, e.g. on a full disk. Raises ValueError."""
        if len(batch) > MAX_BATCH:
            raise ValueError(f"a batch of {len(batch)} bytes; {MAX_BATCH} are the most")
        if self._size >= self._segment_bytes:
            self._next()
            self._size = 0
        record = _HEAD.pack(len(batch), zlib.crc32(batch)) + batch
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            try:
                written = 0
                while written < len(record):
                    written += os.write(descriptor, record[written:])
            except OSError:
                try:
                    os.ftruncate(descriptor, before)
                except OSError:
                    self._next()  # what is behind something damaged is not found
                    self._size = 0
                raise
        finally:
            os.close(descriptor)
        self._size = before + len(record)
        self._bound()

    def _bound(self) -> None:
        sizes = []
        for number, path in _segments(self.folder):
            with suppress(FileNotFoundError):
                sizes.append((number, path, path.stat().st_size))
        total = sum(size for _, _, size in sizes)
        for number, path, size in sizes:
            if total <= self.limit or number == self._number:
                return
            with suppress(FileNotFoundError):
                path.unlink()
                self.dropped += size if not _was_sent(self.folder, number) else 0
            total -= size

    @property
    def size(self) -> int:
        """Bytes on disk."""
        total = 0
        for _, path in _segments(self.folder):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total


def _was_sent(folder: Path, number: int) -> bool:
    return _read_place(folder / "sent.json")[0].segment > number


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Behind which byte of which segment."""

    segment: int
    offset: int


def _read_place(path: Path) -> tuple[Place, list[tuple[float, Place]]]:
    try:
        kept = json.loads(path.read_text())
        marks = [(float(when), Place(int(one), int(two))) for when, one, two in kept["marks"]]
        return Place(int(kept["segment"]), int(kept["offset"])), marks
    except (OSError, ValueError, KeyError, TypeError):
        return Place(0, 0), []


@dataclass
class Reader:
    """Takes batches in order. `damaged` counts bytes that were skipped.

    `keep_s`: how long what was taken can be had again by `rewind`; the place and marks of that time survive a restart.
    """

    folder: Path
    keep_s: float = 60.0
    damaged: int = 0
    _place: Place = field(init=False)
    _marks: list[tuple[float, Place]] = field(init=False)
    _skipped_open: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._place, self._marks = _read_place(self.folder / "sent.json")

    def next(self, most: int = 128 << 10) -> tuple[bytes, Place] | None:
        """Batches, joined, of about `most` bytes, and the place behind them for `taken`; None when there are none."""
        joined: list[bytes] = []
        size = 0
        place = self._place
        segments = _segments(self.folder)
        for position, (number, path) in enumerate(segments):
            if number < place.segment:
                continue
            if number > place.segment:
                place = Place(number, 0)
            try:
                with path.open("rb") as file:
                    file.seek(place.offset)
                    data = file.read(most + MAX_BATCH + _HEAD.size)
            except FileNotFoundError:
                continue  # the writer needed the room
            at = 0
            while size < most and (end := _record_end(data, at)) is not None:
                joined.append(data[at + _HEAD.size : end])
                size += end - at
                at = end
            place = Place(number, place.offset + at)
            if size >= most:
                break
            last = position == len(segments) - 1
            if at < len(data) and not last:  # damaged: nothing was appended behind it
                rest = path.stat().st_size - place.offset if path.exists() else 0
                if number != self._skipped_open:
                    self.damaged += max(0, rest)
                    self._skipped_open = number
        return (b"".join(joined), place) if joined else None

    def taken(self, place: Place, now: float | None = None) -> None:
        """All before `place` has arrived. Raises OSError."""
        now = time.time() if now is None else now
        if not self._marks:
            self._marks.append((now, self._place))
        self._place = place
        if now - self._marks[-1][0] >= 5 or now < self._marks[-1][0]:
            self._marks.append((now, place))
        while len(self._marks) > 1 and self._marks[1][0] <= now - self.keep_s:
            self._marks.pop(0)
        self._save()
        kept = min(self._marks[0][1].segment, place.segment)
        for number, path in _segments(self.folder):
            if number < kept:
                with suppress(FileNotFoundError):
                    path.unlink()

    def rewind(self, now: float | None = None) -> bool:
        """Go back to what was taken `keep_s` ago, as the database may have lost what came since; whether it did."""
        now = time.time() if now is None else now
        before = self._place
        for when, place in self._marks:
            if when >= now - self.keep_s - 5 and place < self._place:
                self._place = place
                break
        self._marks = [(now, self._place)]
        self._save()
        return self._place < before

    def _save(self) -> None:
        kept = {
            "segment": self._place.segment,
            "offset": self._place.offset,
            "marks": [(when, place.segment, place.offset) for when, place in self._marks],
        }
        write_atomic(self.folder / "sent.json", json.dumps(kept), mode=0o600, follow_links=False)
