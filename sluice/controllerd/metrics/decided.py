"""From submission to the first decision: what the placement hook's decisions say, followed as they are written."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from sluice.explain.decisions import (
    DECISION,
    ENTRY_HEAD,
    HEADER_BYTES,
    DecisionError,
    JobFacts,
    Mode,
    check_header,
    job_and_mode,
    list_files,
)

_AT_ONCE = 16 << 20  # bytes read in one pass; the rest is for the next one
_LATEST = 1000  # jobs over which percentiles are taken
_MOST_JOBS = 500_000


class Decided:
    """Jobs by their first decision. Those submitted before this object was made, at `began` (s since 1970), count
    nowhere, as their first decision may have been before. Without decisions, e.g. at level off, there is nothing."""

    def __init__(self, folder: Path, began: float) -> None:
        self._folder = folder
        self._floor = int(began) + 1  # Slurm keeps submission in whole seconds
        self._file = ""
        self._at = 0
        self._seen: dict[tuple[int, int], None] = {}  # job or array, submission; oldest first
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self.totals: dict[str, tuple[int, float]] = {}  # account -> jobs, seconds that they waited

    def look(self) -> None:
        """Follow the entries that were written since the last look. Raises DecisionError where they cannot be read."""
        room = _AT_ONCE
        for path in list_files(self._folder):
            if path.name < self._file or room <= 0:
                continue
            if path.name != self._file:
                self._file, self._at = path.name, 0
            room -= self._follow(path, room)

    def percentile(self, share: float) -> float | None:
        """Of the latest jobs, in seconds; None before the first."""
        if not self._latest:
            return None
        return sorted(self._latest)[min(len(self._latest) - 1, int(share * len(self._latest)))]

    def _follow(self, path: Path, room: int) -> int:
        """Parse a piece of a file; the number of bytes that were used."""
        try:
            with path.open("rb") as file:
                if self._at == 0:
                    header = file.read(HEADER_BYTES)
                    if len(header) < HEADER_BYTES:
                        return 0
                    check_header(path, header)
                    self._at = HEADER_BYTES
                file.seek(self._at)
                data = file.read(max(room, 1 << 20))
                if len(data) >= ENTRY_HEAD.size:  # a topology may be larger than a piece
                    data += file.read(max(0, ENTRY_HEAD.unpack_from(data)[0] + ENTRY_HEAD.size + 4 - len(data)))
        except FileNotFoundError:
            return 0  # rotated away just now
        except OSError as error:
            raise DecisionError(f"{path}: {error.strerror}") from error
        for time_s, payload in self._decisions(path, data):
            job, mode = job_and_mode(payload)
            if mode != Mode.TEST_ONLY:
                self._take(job, time_s)
        return len(data)

    def _decisions(self, path: Path, data: bytes) -> Iterator[tuple[float, bytes]]:
        """Times and payloads of the decisions in whole entries; moves `_at` behind each entry."""
        at = 0
        while at + ENTRY_HEAD.size <= len(data):
            length, kind, _, _, time_us = ENTRY_HEAD.unpack_from(data, at)
            end = at + ENTRY_HEAD.size + length
            if end + 4 > len(data):
                return
            self._at += end + 4 - at
            if kind == DECISION:
                if zlib.crc32(data[at:end]) != int.from_bytes(data[end : end + 4], "little"):
                    self._file += "~"  # go on with the next file
                    raise DecisionError(f"{path}: byte {self._at}: checksum wrong: the file is damaged")
                yield time_us / 1e6, data[at + ENTRY_HEAD.size : end]
            at = end + 4

    def _take(self, job: JobFacts, time_s: float) -> None:
        key = job.array_id or job.id, job.submit  # an array is decided with its first task
        if job.submit < self._floor or key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > _MOST_JOBS:
            oldest = sorted(submit for _, submit in self._seen)[_MOST_JOBS // 2]
            self._floor = oldest + 1
            self._seen = {one: None for one in self._seen if one[1] > oldest}
        wait = max(0.0, time_s - job.submit)
        self._latest.append(wait)
        jobs, waited_s = self.totals.get(job.account, (0, 0.0))
        self.totals[job.account] = jobs + 1, waited_s + wait
