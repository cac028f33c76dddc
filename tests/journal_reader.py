"""The failover journal, read outside slurmctld: docs/failover.md; slurm_plugin/journal/entry.h has the format.

Only the kind and owner of an entry: its content stays with slurmctld, as scripts and environments are their users'.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError

FOLDER = "sluice.journal"
"""Below StateSaveLocation."""
REPLAYS = "replays.jsonl"

_HEADER = struct.Struct("<4sHHIIQqI")
_FORMAT = 1
_MAX_PAYLOAD = 32 * 1024 * 1024
_MAX_SEGMENT = 64 * 1024 * 1024
_NAME = re.compile(r"([0-9a-f]{16})\.journal")
_KINDS = ("unknown", "open", "submit", "start", "end", "requeue", "void", "modify", "array")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, without its content."""

    sequence: int
    at: float
    """Unix time."""
    kind: str
    job_id: int
    bytes: int


@dataclass(slots=True)
class Journal:
    """All that can be read of a journal."""

    entries: list[Entry] = field(default_factory=list)
    segments: int = 0
    bytes: int = 0
    torn_bytes: int = 0
    """At the end of segments: an entry whose write was cut off."""
    lost_bytes: int = 0
    """After what is corrupt or missing: not used by a replay."""
    late_bytes: int = 0
    """Written by a controller after another one had taken over."""
    problem: str = ""


def _decode(data: bytes, at: int) -> tuple[Entry | None, int, bool]:
    """The entry at `at`, where the next begins, and whether the data only ends too early."""
    if len(data) - at < _HEADER.size:
        return None, at, b"SLJR".startswith(data[at : at + 4])
    magic, kind, version, length, job_id, sequence, at_us, given = _HEADER.unpack_from(data, at)
    if magic != b"SLJR" or length > _MAX_PAYLOAD:
        return None, at, False
    end = at + _HEADER.size + length
    if end > len(data):
        return None, at, True
    header = zlib.crc32(data[at : at + _HEADER.size - 4])
    rotated = ((header << 1) | (header >> 31)) & 0xFFFFFFFF
    if zlib.crc32(data[at + _HEADER.size : end]) ^ rotated != given or version != _FORMAT or not sequence:
        return None, at, False
    name = _KINDS[kind] if kind < len(_KINDS) else _KINDS[0]
    return Entry(sequence, at_us / 1e6, name, job_id, end - at), end, False


def _goes_on(data: bytes, at: int, expected: int) -> bool:
    """Whether a good entry follows a damaged one: then that one was not left by a write that was cut off."""
    most = expected + (len(data) - at) // _HEADER.size
    place = data.find(b"SLJR", at)
    while place >= 0:
        sequence = _HEADER.unpack_from(data, place)[5] if len(data) - place >= _HEADER.size else 0
        if expected < sequence <= most and _decode(data, place)[0] is not None:
            return True
        place = data.find(b"SLJR", place + 1)
    return False


def read_journal(folder: Path) -> Journal:
    """Read all segments in order, by slurmctld's own rules. Raises SluiceError for a folder that is shut."""
    journal = Journal()
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        found = [(int(match[1], 16), folder / name) for name in names if (match := _NAME.fullmatch(name))]
        expected, used = None, True
        for i, (first, path) in enumerate(found):
            if path.stat().st_size > _MAX_SEGMENT:
                raise SluiceError(f"{path}: larger than any segment of the journal", remedy="move it away")
            data = path.read_bytes()
            journal.segments += 1
            journal.bytes += len(data)
            if used and expected not in (None, first):
                used = False
                journal.problem = journal.problem or f"{path.name}: entries before it are missing"
            end = found[i + 1][0] if i + 1 < len(found) else None
            expected = _read_segment(journal, path.name, data, first, end, used) if used else expected
            if not used:
                journal.lost_bytes += len(data)
    except PermissionError as error:
        raise SluiceError(f"{error.filename}: {error.strerror}", remedy="run it as root or SlurmUser") from error
    except FileNotFoundError:
        pass  # a segment that has just been removed, as Slurm's own state has caught up
    return journal


def _read_segment(journal: Journal, name: str, data: bytes, first: int, end: int | None, used: bool) -> int:
    """Add the good entries of a segment; returns the sequence number that has to come next."""
    at, expected, late = 0, first, False
    while at < len(data):
        entry, after, torn = _decode(data, at)
        if entry is None or entry.sequence != expected:
            if torn and not _goes_on(data, at, expected):
                journal.torn_bytes += len(data) - at
            else:
                journal.lost_bytes += len(data) - at
                journal.problem = journal.problem or f"{name}: corrupt at byte {at} of {len(data)}"
            break
        if end is not None and entry.sequence >= end:
            late = True
            journal.late_bytes += len(data) - at
            journal.problem = journal.problem or f"{name}: another controller wrote to it after one had taken over"
            break
        if used:
            journal.entries.append(entry)
        at, expected = after, expected + 1
    return end if late and end is not None else expected


def read_replays(folder: Path) -> list[dict[str, Any]]:
    """What each replay has done, oldest first. Raises SluiceError for a folder that is shut."""
    reports: list[dict[str, Any]] = []
    for name in (f"{REPLAYS}.1", REPLAYS):
        try:
            lines = (folder / name).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise SluiceError(f"{error.filename}: {error.strerror}", remedy="run it as root or SlurmUser") from error
        for line in lines:
            try:
                report: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict) and report.get("schema_version") == 1:
                reports.append(report)
    return reports
