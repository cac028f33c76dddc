"""Reads the files that the injected library writes (native/include/sluice/profile.h).

A file is its user's claim: what is not as the format says is skipped and counted, and no number in it decides how much
is read or kept.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from sluice.base.errors import SluiceError
from sluice.base.text import one_line

MAGIC = b"SLUPROF1"
VERSION, HEADER_BYTES, RECORD_BYTES = 1, 256, 64
UNKNOWN = 0xFFFFFFFF
HEADER = struct.Struct("<8sIIIIQQIIIIIIII64s64s40s16x")
RECORD = struct.Struct("<HHIQQIIII24s")
BYTES_OF_EVENT = 2 * RECORD_BYTES
"""That are read for each one that is kept: as much again for names."""
MOST_NAME = 4096
_MOST_NAMES = 65_536
_MOST_SPAN_NS = 31 * 86400 * 10**9  # an event further from the profile's start is damage
assert HEADER.size == HEADER_BYTES and RECORD.size == RECORD_BYTES  # noqa: S101


class Kind(IntEnum):
    """Of a record."""

    NAME = 1
    DEVICE = 2
    KERNEL = 3
    COPY = 4
    FILL = 5
    SYNC = 6
    MEMORY = 7
    CALL = 8
    COLLECTIVE = 9
    SAMPLE = 10
    CLOCK = 11
    GAP = 12
    LOST = 13
    END = 14


class Reason(IntEnum):
    """Why a profile ended, or why events are missing."""

    STOPPED = 1
    TIME = 2
    EXIT = 3
    QUOTA = 4
    DISK = 5
    BUDGET = 6
    BUFFERS = 7
    LIBRARY = 8
    OCCUPIED = 9
    FORBIDDEN = 10
    RECORDED = 11


PLACES = ("unknown", "pageable", "pinned", "device", "array", "managed")
_EVENTS = frozenset(
    {Kind.KERNEL, Kind.COPY, Kind.FILL, Kind.SYNC, Kind.MEMORY, Kind.CALL, Kind.COLLECTIVE, Kind.SAMPLE}
)
_COPIES = frozenset({Kind.COPY, Kind.FILL})
_LOSS = struct.Struct("<QIIQ")
_CLOCK = struct.Struct("<QQ")


class Event(NamedTuple):
    """Times are ns of the node's CLOCK_MONOTONIC; `stream` is of the device, or (SAMPLE) the thread.

    `size` is in bytes; `places`: from where and to where a copy went; of MEMORY, where it is and whether it was
    released.
    """

    kind: int
    start: int
    end: int
    device: int
    stream: int
    name: int
    size: int
    places: tuple[int, int]


class Loss(NamedTuple):
    """Events that are missing, or (END) the end of a profile and what it cost, in ns."""

    start: int
    end: int
    events: int
    reason: int
    cost: int
    name: int


class Clock(NamedTuple):
    """What time of day it was."""

    monotonic: int
    time_of_day: int


@dataclass(slots=True)
class Profile:
    """What one process wrote.

    `damaged`: records that are not as the format says, or have no times; `left_out`: those that had no room here;
    `not_timed`: kernels and copies that ran from command lists that were recorded while nothing was collected.
    """

    path: Path
    host: str
    program: str
    boot: str
    pid: int
    number: int
    job: int
    step: int
    rank: int | None
    started: int
    time_of_day: int
    names: dict[int, str] = field(default_factory=dict)
    devices: dict[int, tuple[str, str]] = field(default_factory=dict)
    """UUID and name."""
    events: list[Event] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    ended: Loss | None = None
    damaged: int = 0
    left_out: int = 0
    not_timed: int = 0

    def name(self, number: int) -> str:
        """Of a kernel, a call or a reason."""
        return self.names.get(number, "")

    @property
    def end(self) -> int:
        """When it ended, as far as that is known."""
        if self.ended is not None:
            return self.ended.end
        return max([self.started, *(event.end for event in self.events), *(clock.monotonic for clock in self.clocks)])


def read(path: Path, most: int = 1_000_000) -> Profile:
    """A profile, of whose records `most` are kept. Raises SluiceError for a file that is none, OSError."""
    with os.fdopen(_open(path), "rb") as file:
        head = file.read(HEADER_BYTES)
        found = _header(path, head)
        data = file.read(most * BYTES_OF_EVENT)  # a file cannot ask for more
        found.left_out += max(0, os.fstat(file.fileno()).st_size - HEADER_BYTES - len(data)) // RECORD_BYTES
    _fill(found, data, most)
    return found


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SluiceError(f"{path}: not a regular file", remedy="remove it")
    return descriptor


def _header(path: Path, head: bytes) -> Profile:
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise SluiceError(f"{path}: not a profile", remedy="name files that sluice profile has collected")
    fields = HEADER.unpack(head)
    version, header, record = fields[1:4]
    started, time_of_day, pid, number, job, step, rank = fields[5:12]
    if (version, header, record) != (VERSION, HEADER_BYTES, RECORD_BYTES):
        raise SluiceError(f"{path}: version {version} of profiles is not known", remedy="use a newer Sluice")
    host, program, boot = (_text(text.partition(b"\0")[0]) for text in fields[15:])
    return Profile(
        path, host, program, boot, pid, number, job, step, None if rank == UNKNOWN else rank, started, time_of_day
    )


def _text(raw: bytes) -> str:
    return one_line(raw.decode("utf-8", "replace"), limit=MOST_NAME)


def _fill(found: Profile, data: bytes, most: int) -> None:
    least, last = max(1, found.started - _MOST_SPAN_NS), found.started + _MOST_SPAN_NS
    events, kinds = found.events, _EVENTS
    for place, (kind, slots, device, start, end, _, stream, _, name, body) in _records(found, data):
        if kind in kinds:
            if not least <= start <= end <= last:
                found.damaged += 1
            elif len(events) >= most:
                found.left_out += 1
            else:
                size, places = 0, (0, 0)
                if kind in _COPIES:
                    size, places = int.from_bytes(body[:8], "little"), (body[8], body[9])
                elif kind == Kind.MEMORY:
                    size, places = int.from_bytes(body[:8], "little"), (body[16], body[17])
                elif kind == Kind.COLLECTIVE:
                    size = int.from_bytes(body[8:16], "little")
                elif kind == Kind.SAMPLE:
                    stream = int.from_bytes(body[:4], "little")
                events.append(Event(kind, start, end, device, stream, name, size, places))
        elif kind == Kind.NAME:
            _name(found, name, body, slots, data[place + RECORD_BYTES : place + RECORD_BYTES * (slots + 1)])
        elif kind == Kind.DEVICE:
            if len(found.devices) < 256:
                found.devices[device] = (body[:16].hex(), found.names.get(name, ""))
        elif kind == Kind.CLOCK and least <= start <= last:
            if len(found.clocks) < most:
                found.clocks.append(Clock(start, _CLOCK.unpack_from(body)[0]))
        elif kind in (Kind.GAP, Kind.LOST, Kind.END):
            _lose(found, kind, Loss(start, end, *_of_loss(body), name), least, last)


def _records(found: Profile, data: bytes) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Place and fields of each record; texts are skipped."""
    skip = 0
    whole = len(data) // RECORD_BYTES * RECORD_BYTES
    for number, record in enumerate(RECORD.iter_unpack(memoryview(data)[:whole])):
        if skip:
            skip -= 1
            continue
        skip = record[1]
        yield number * RECORD_BYTES, record


def _of_loss(body: bytes) -> tuple[int, int, int]:
    events, reason, _, cost = _LOSS.unpack(body)
    return events, reason, cost


def _lose(found: Profile, kind: int, loss: Loss, least: int, last: int) -> None:
    if kind != Kind.LOST and not least <= loss.start <= loss.end <= last:
        found.damaged += 1
    elif kind == Kind.END:
        found.ended = loss
    elif loss.reason == Reason.RECORDED:
        found.not_timed += loss.events
    elif len(found.losses) < 10_000:
        found.losses.append(loss)


def _name(found: Profile, number: int, body: bytes, slots: int, text: bytes) -> None:
    size = int.from_bytes(body[:8], "little")
    if size > MOST_NAME or slots != -(-size // RECORD_BYTES) or len(text) < size:
        found.damaged += 1
    elif len(found.names) < _MOST_NAMES:
        found.names[number] = _text(bytes(text[:size]))
