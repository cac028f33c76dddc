"""Decisions followed as they are written, without those that were read before."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from sluice.explain.decisions import ENTRY_HEAD, HEADER_BYTES, DecisionError, check_header, list_files

_AT_ONCE = 16 << 20  # bytes read in one pass; the rest is for the next one


class FollowedDecisions:
    """The files of a folder, from the oldest on. Nothing is remembered of what they say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = ""
        self._at = 0
        self.behind = False
        """Whether the last look left something for the next one."""

    def look(self, kinds: Collection[int]) -> Iterator[tuple[int, float, bytes]]:
        """Kinds, times and payloads of entries since the last look, 16 MiB of them. Raises DecisionError."""
        room, place = _AT_ONCE, (self._file, self._at)
        for path in list_files(self._folder):
            if path.name < self._file or room <= 0:
                continue
            if path.name != self._file:
                self._file, self._at = path.name, 0
            data = self._read(path, room)
            room -= len(data)
            yield from self._entries(path, data, kinds)
        self.behind = room <= 0 and (self._file, self._at) != place

    def _read(self, path: Path, room: int) -> bytes:
        try:
            with path.open("rb") as file:
                if self._at == 0:
                    header = file.read(HEADER_BYTES)
                    if len(header) < HEADER_BYTES:
                        return b""
                    check_header(path, header)
                    self._at = HEADER_BYTES
                file.seek(self._at)
                data = file.read(max(room, 1 << 20))
                if len(data) >= ENTRY_HEAD.size:  # a topology may be larger than a piece
                    data += file.read(max(0, ENTRY_HEAD.unpack_from(data)[0] + ENTRY_HEAD.size + 4 - len(data)))
        except FileNotFoundError:
            return b""  # rotated away just now
        except OSError as error:
            raise DecisionError(f"{path}: {error.strerror}") from error
        return data

    def _entries(self, path: Path, data: bytes, kinds: Collection[int]) -> Iterator[tuple[int, float, bytes]]:
        """Whole entries of the kinds; moves `_at` behind each entry."""
        at = 0
        while at + ENTRY_HEAD.size <= len(data):
            length, kind, _, _, time_us = ENTRY_HEAD.unpack_from(data, at)
            end = at + ENTRY_HEAD.size + length
            if end + 4 > len(data):
                return
            self._at += end + 4 - at
            if kind in kinds:
                if zlib.crc32(data[at:end]) != int.from_bytes(data[end : end + 4], "little"):
                    self._file += "~"  # go on with the next file
                    raise DecisionError(f"{path}: byte {self._at}: checksum wrong: the file is damaged")
                yield kind, time_us / 1e6, data[at + ENTRY_HEAD.size : end]
            at = end + 4
