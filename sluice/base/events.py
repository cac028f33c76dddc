"""What happened on a controller: an append-only file of JSON lines that alerts and `history` commands read.

One event a line: ``{"seq": 7, "time": 1763740000.25, "kind": "takeover", ...}``. Any number of processes may append at
the same time. The file is bounded: at `LIMIT` bytes it becomes ``NAME.1``, the oldest of `KEPT` such files is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError

DEFAULT_PATH = Path("/var/lib/sluice/controllerd/events.jsonl")
"""In the folder of the controllers' daemon, which is SlurmUser's: root's commands append there, too."""
LIMIT = 4 << 20
"""Bytes of one file."""
KEPT = 3
"""Full files in addition to the one that is written."""
_LINE = 16 << 10
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OWN = frozenset({"seq", "time", "kind"})


@dataclass(frozen=True)
class Event:
    """`seq` grows by one with each event of a file, regardless of the clock; `time` is seconds since 1970."""

    seq: int
    time: float
    kind: str
    fields: dict[str, Any]


def append(path: Path, kind: str, *, fsync: bool = False, **fields: Any) -> Event:
    """Add an event; with `fsync` it survives a power cut once this returns. The folder must exist.

    `kind` is words of a-z, 0-9 and ``_.-``; `fields` are whatever JSON can hold (else TypeError), 16 KiB in all. A file
    that root makes is the folder's owner's. Raises SluiceError for a file that is not a plain file of this user's, of
    root's or, for root, of the folder's owner, and for what is too long; OSError as the system does.
    """
    if not _KIND.fullmatch(kind):
        raise SluiceError(f"event kind {kind!r}: not a word", remedy="use a-z, 0-9, '_', '.' and '-'")
    for name in fields:
        if not _NAME.fullmatch(name) or name in _OWN:
            raise SluiceError(f"event {kind}: field {name!r} cannot be used", remedy="use another name")
    if len(_line(Event(0, 0.0, kind, fields))) > _LINE - 64:
        raise SluiceError(f"event {kind}: longer than {_LINE} bytes", remedy="shorten its fields")
    descriptor = _open_locked(path)
    try:
        event = Event(_last_seq(descriptor, path) + 1, round(time.time(), 3), kind, fields)
        line = _line(event)
        size = os.fstat(descriptor).st_size
        if size and size + len(line) > LIMIT:
            _rotate(path)
            os.close(descriptor)  # and with it the lock; a process that waited for it sees that the file is another
            descriptor = -1
            descriptor = _open_locked(path)
            event = Event(max(event.seq, _last_seq(descriptor, path) + 1), event.time, kind, fields)
            line = _line(event)
        if _is_torn(descriptor):
            line = b"\n" + line
        before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, line)
        except OSError as error:  # a full disk: no partial line stays
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            error.filename = str(path)
            raise
        if fsync:
            os.fsync(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return event


def read(path: Path, since: int = 0) -> list[Event]:
    """Every event that is still kept with a seq above `since`, oldest first; none when there is no file.

    Lines that are no events (torn by a crash, written by others) are left out. Raises OSError.
    """
    found: dict[int, Event] = {}
    for file in [*(_old(path, number) for number in range(KEPT, 0, -1)), path]:
        with suppress(FileNotFoundError):
            for event in _events(file):
                if event.seq > since:
                    found.setdefault(event.seq, event)
    return [found[seq] for seq in sorted(found)]


def _line(event: Event) -> bytes:
    document = {"seq": event.seq, "time": event.time, "kind": event.kind, **event.fields}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _parse(line: bytes) -> Event | None:
    try:
        document = json.loads(line)
        seq, moment, kind = document.pop("seq"), document.pop("time"), document.pop("kind")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    if type(seq) is not int or not 0 < seq < 1 << 62 or not isinstance(moment, int | float) or isinstance(moment, bool):
        return None
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or not abs(moment) < 1e12:
        return None
    return Event(seq, float(moment), kind, document)


def _events(file: Path) -> Iterator[Event]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for line in stream.read(2 * LIMIT).splitlines():
            event = _parse(line) if len(line) <= _LINE else None
            if event is not None:
                yield event


def _open_locked(path: Path) -> int:
    """The file, opened to append and locked, which is still the one of that name."""
    while True:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o640)
        try:
            facts = os.fstat(descriptor)
            owners = {0, os.geteuid()}
            if os.geteuid() == 0:
                folder = path.parent.stat()
                owners.add(folder.st_uid)
                if facts.st_size == 0 and facts.st_uid == 0:
                    os.fchown(descriptor, folder.st_uid, folder.st_gid)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in owners:
                raise SluiceError(f"{path}: not a regular file of this user", remedy="move it away")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.stat(path, follow_symlinks=False).st_ino == facts.st_ino:  # noqa: PTH116
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was rotated while we waited


def _last_seq(descriptor: int, path: Path) -> int:
    seq = _last_in(descriptor)
    if seq is None:
        with suppress(OSError):
            older = os.open(_old(path, 1), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                seq = _last_in(older)
            finally:
                os.close(older)
    return seq or 0


def _last_in(descriptor: int) -> int | None:
    """The last seq in a file, searched from its end."""
    end = os.fstat(descriptor).st_size
    rest = b""
    while end > 0:
        begin = max(0, end - 4 * _LINE)
        rest = os.pread(descriptor, end - begin, begin) + rest[:_LINE]
        lines = rest.split(b"\n")
        for line in reversed(lines if begin == 0 else lines[1:]):
            event = _parse(line)
            if event is not None:
                return event.seq
        end, rest = begin, lines[0]
    return None


def _is_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _rotate(path: Path) -> None:
    for number in range(KEPT, 1, -1):
        with suppress(FileNotFoundError):
            _old(path, number - 1).replace(_old(path, number))
    path.replace(_old(path, 1))


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
