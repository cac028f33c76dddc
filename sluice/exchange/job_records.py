"""The controllers' store of job records: what nodes sent for each job, kept next to slurmctld's own state.

One append-only file a UTC day of the job's end, ``2026-11-21.jsonl``, one record (`sluice.exchange.record`, schema 1) a
line. A job has one record for each node and run. A node that gets no answer sends again, so a record may be there
twice: readers drop the earlier line. Both controllers see StateSaveLocation, and only the leading one writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.exchange.record import JobRecord

FOLDER = "sluice.jobs"
"""Below StateSaveLocation."""
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})\.jsonl\Z")
_MOST_LINE = 1 << 20

Key = tuple[int, str, float]


def key_of(record: JobRecord) -> Key:
    """What identifies a record: the job, the node, and when it started there (a job that is requeued starts again)."""
    return record.job, record.node, record.started


class JobRecords:
    """The store in a folder. `damaged` counts the lines that the last reading left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = 0

    def append(self, records: Iterable[JobRecord]) -> None:
        """Add records; on disk when this returns. Raises OSError, e.g. on a full file system, and SluiceError."""
        lines: dict[date, list[str]] = {}
        for record in records:
            if record.ended is None:
                raise SluiceError(f"job {record.job} on {record.node}: a record without an end", remedy="send it later")
            lines.setdefault(_day(record.ended), []).append(record.to_json())
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for day, texts in lines.items():
            _append(self.folder / f"{day}.jsonl", "".join(texts).encode())

    def between(self, start: float, end: float) -> Iterator[JobRecord]:
        """Records of jobs that ended at or after `start` and before `end` (Unix times), day by day. Raises OSError."""
        self.damaged = 0
        for day, path in self._files():
            if _day(start) <= day <= _day(end):
                for record in self._of_file(path).values():
                    if record.ended is not None and start <= record.ended < end:
                        yield record

    def of_job(self, job: int, since: float | None = None) -> list[JobRecord]:
        """A job's records, one for each node and run, by start; ended at or after `since`. Raises OSError."""
        self.damaged = 0
        mark = f'"job": {job},'
        found: dict[Key, JobRecord] = {}
        for day, path in self._files():
            if since is None or day >= _day(since):
                found |= self._of_file(path, mark)
        records = [one for one in found.values() if one.job == job and (since is None or (one.ended or 0) >= since)]
        return sorted(records, key=lambda one: (one.started, one.node))

    def prune(self, before: float) -> None:
        """Remove the days that ended before a time."""
        for day, path in self._files():
            if day < _day(before):
                with suppress(FileNotFoundError):
                    path.unlink()

    def _files(self) -> list[tuple[date, Path]]:
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.match(path.name), path) for path in self.folder.iterdir())
        found = []
        for match, path in matches:
            with suppress(ValueError):
                if match:
                    found.append((date.fromisoformat(match[1]), path))
        return sorted(found)

    def _of_file(self, path: Path, mark: str = "") -> dict[Key, JobRecord]:
        """A day's records; `mark`: only of lines that contain it."""
        found: dict[Key, JobRecord] = {}
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), b""), start=1):
                text = line.decode(errors="replace").strip()
                if not text or mark not in text:
                    continue
                try:
                    record = JobRecord.from_json(text, f"{path}:{number}")
                except SluiceError:
                    self.damaged += 1
                    continue
                found.pop(key_of(record), None)
                found[key_of(record)] = record
        return found


def check_record(record: JobRecord, *, running: bool = False) -> None:
    """Raise SluiceError unless the fields that readers rely on have the right types. `running`: it has no end yet."""
    whole = isinstance(record.job, int) and isinstance(record.uid, int)
    texts = all(isinstance(text, str) for text in (record.user, record.account, record.partition, record.node))
    ended = record.ended is None if running else _is_time(record.ended)
    clocks = (record.restarts, record.begun, record.started_uptime, record.ran_s, record.saved)
    known = all(_is_time(one) for one in (record.started, *clocks) if one is not None)
    events = all(_is_time(one.time) and isinstance(one.times, int) for one in record.events)
    times = record.started is not None and ended and known and events
    sizes = all(
        isinstance(number, int) and number >= 0
        for grant in record.grants
        for number in (grant.total, grant.peak, grant.refused, grant.limit or 0, grant.asked or 0)
    )
    stages = all(
        isinstance(one.name, str) and len(one.name) <= 64 and _is_length(one.after_s) and _is_length(one.took_s)
        for one in record.stages
    )
    if not (whole and texts and times and sizes and stages):
        raise SluiceError(f"record of job {one_line(str(record.job))[:20]}: fields of the wrong type")


def _is_time(seconds: object) -> bool:
    """Not beyond the year 2106, so that sums of times and lengths are times, too, for who stores or sends them."""
    return isinstance(seconds, int | float) and 0 <= seconds < 1 << 32


def _is_length(seconds: object) -> bool:
    return isinstance(seconds, int | float) and abs(seconds) < 1e9


def _day(seconds: float) -> date:
    try:
        return datetime.fromtimestamp(seconds, UTC).date()
    except (OverflowError, ValueError, OSError) as error:
        raise SluiceError(f"time {seconds!r}: out of range", remedy="check the clock of the node") from error


def _append(path: Path, data: bytes) -> None:
    """Add complete lines and sync; a partial line that a crash left gets an end of line first."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
