"""What a job was given, had and lost on one node: kept while it runs, and as its record afterwards.

The record is JSON, `SCHEMA_VERSION` 1, one file a job and node. Memory is in bytes, times in seconds since 1970. Fields
may be added within a version; a reader ignores those that it does not know.

What a job's user can cause, and their texts, are bounded here: a record with 64 GPUs is at most `MOST_RECORD` long,
and the event that a step was ended always has room.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.text import one_line

SCHEMA_VERSION = 1
MOST_RECORD = 256 << 10
"""Characters of a record's JSON."""
MOST_EVENTS = 200
"""Of one job; later ones are counted in `JobRecord.events_left_out`."""
_MOST_OF_EVENTS = 128 << 10  # characters of them all
_MOST_OF_DETAIL = 4 << 10
_ROOM = {"return": 1.0, "end": 0.95, "warn": 0.8}  # the part of both bounds that an event may fill
_ROOM_OF_OTHERS = 0.6
_AT_WILL = {
    **dict.fromkeys(("refuse", "stray", "problem", "rung", "share", "own", "binding", "rdma", "role"), 16),
    "limit": 72,
}
"""What a job's user can cause repeatedly, and how many are kept; equal ones are counted in one."""
_FITS = ((64, 200), (16, 200), (4, 100), (1, 20))  # items of a list, characters of a text: the first that fits
_MOST_NUMBER = 1 << 63


@dataclass
class Grant:
    """One device that the job was given."""

    index: int  # in gres.conf
    uuid: str
    vendor: str
    model: str
    total: int
    asked: int | None = None  # None: the whole device
    limit: int | None = None  # in force; None: none
    rung: str = "none"  # what holds it to the limit, in addition to the watchdog: "limiter", "watchdog", "none"
    passed_over: dict[str, str] = field(default_factory=dict)  # stronger rungs, and why they could not hold it
    peak: int = 0
    refused: int = 0  # allocations that the limiter refused
    foreign: int | None = None  # bytes in use by no process when the job came; None: not known
    warned: bool = False
    clean: bool | None = None  # None: not yet taken back
    power_mw: int | None = None  # the job's power cap of the whole GPU; None: none of its own
    planned_mw: int | None = None  # it started with, to fit into a budget, and has until controllers order another


@dataclass
class Event:
    """Something that was done to the job."""

    time: float
    action: str  # "grant", "limit", "refuse", "warn", "end", "stray", "return"
    detail: dict[str, Any] = field(default_factory=dict)
    times: int = 1  # how often it was the same

    @property
    def size(self) -> int:
        """Characters of its JSON."""
        return len(json.dumps(asdict(self)))


@dataclass
class Stage:
    """A part of the job's prolog, tasks' start or epilog here, by the node's monotonic clock."""

    name: str  # one of STAGES
    after_s: float  # from the record's `started`; negative: before
    took_s: float


STAGES = (
    "prolog.drivers",  # the GPUs' drivers answer
    "prolog.health",  # the checks that may refuse the job its GPUs
    "prolog.grant",  # registered with its GPUs, their part of compute time
    "prolog.power",  # power caps in force
    "prolog.preflight",  # tests of the job's nodes
    "limits",  # of the first task
    "restore",  # of the state that an earlier run has saved
    "epilog.reclaim",  # what it left has ended, its memory is free
    "epilog.reset",  # modes and clocks reset, memory cleared
    "epilog.return",  # limits removed, until the record's end
)
"""In their order; of each the first is kept."""


@dataclass
class JobRecord:
    """A job on this node."""

    job: int
    uid: int
    user: str
    account: str
    partition: str
    node: str
    started: float
    ended: float | None = None
    share_percent: int | None = None
    share_by: str = ""  # what gives the share: "mig", "mps", "cu-mask"
    sluid: str = ""  # Slurm's other ID of the job, the name of its cgroup from 26.05 on
    suspect: bool = False  # agents died while they read its data
    cgroup: str = ""  # the folder by which all its tasks can be frozen; empty: not known before the first task
    share_from: int = 0  # percent of the compute units at which a mask begins
    grants: list[Grant] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    events_left_out: int = 0
    split: bool = False  # slurmd passed how many shards the job has of each GPU
    usage: dict[str, Any] | None = None  # what was measured while it ran (sluice/metrics)
    restarts: int | None = None  # how often Slurm had started the job before this run; None: not known
    begun: int | None = None  # when Slurm started this run, by the controller's clock; None: not known (before 23.02)
    started_uptime: float | None = None  # `started` by the node's monotonic clock
    ran_s: float | None = None  # how long it ran by that clock; of a running job, until the report
    saved: float | None = None  # when the job last said that it has saved its state; None: not in this run
    roles: str = ""  # the layout of its roles (prolog_epilog/roles.py); empty: it has none
    unsaved: str | None = None  # why its node cannot save it as it runs; "": it can; None: it is not to
    stages: list[Stage] = field(default_factory=list)
    refused: str = ""  # why the job was refused here for what its user asked; such a job has no grants
    nics: list[str] | None = None  # RDMA interfaces that its steps can open; None: it has had none
    schema_version: int = SCHEMA_VERSION

    def ran(self, up: float) -> float | None:
        """How long it had run at `up` (`uptime`), even if the clock was set in between; None: not of one boot."""
        return up - self.started_uptime if self.started_uptime is not None and up >= self.started_uptime else None

    def age(self) -> float:
        """Seconds since it started here."""
        ran = self.ran(uptime())
        return time.time() - self.started if ran is None else ran

    def end(self, ended: float, up: float) -> None:
        """Set its end: a time since 1970, and `up` since the boot."""
        self.ended, self.ran_s = ended, self.ran(up)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Keep how long what is done within it took, also where it fails."""
        began = uptime()
        try:
            yield
        finally:
            self.keep_stage(name, began, uptime())

    def keep_stage(self, name: str, began: float, ended: float) -> None:
        """Keep a stage, unless there is one of that name; times as of `uptime`."""
        if self.started_uptime is not None and all(one.name != name for one in self.stages):
            self.stages.append(Stage(name, round(began - self.started_uptime, 6), round(ended - began, 6)))

    def note(self, action: str, **detail: Any) -> None:
        """Add an event, its texts printable and of bounded length; where it has no room it is counted."""
        self._add(Event(time.time(), action, _fitting(detail)))

    def _add(self, event: Event) -> None:
        alike = [one for one in self.events if one.action == event.action] if event.action in _AT_WILL else []
        for one in alike:
            if one.detail == event.detail:
                one.times += event.times
                return
        room = _ROOM.get(event.action, _ROOM_OF_OTHERS)
        if (
            len(alike) < _AT_WILL.get(event.action, MOST_EVENTS)
            and len(self.events) < room * MOST_EVENTS
            and self._size() + event.size < room * _MOST_OF_EVENTS
        ):
            self.events.append(event)
        else:
            self.events_left_out += event.times

    _counted = 0, 0  # events, and their size

    def _size(self) -> int:
        count, size = self._counted
        if count > len(self.events):
            count, size = 0, 0
        size += sum(event.size for event in self.events[count:])
        self._counted = len(self.events), size
        return size

    def latest(self, actions: Collection[str] = (), most: int = 10, size: int = 4 << 10) -> list[Event]:
        """The latest events, bounded in number and characters; `actions`: only of these."""
        found: list[Event] = []
        for event in reversed(self.events):
            if not actions or event.action in actions:
                size -= event.size
                if len(found) == most or size < 0:
                    break
                found.append(event)
        return found[::-1]

    def in_short(self) -> dict[str, Any]:
        """Its fields, with the latest events only."""
        return {**asdict(self), "events": [asdict(event) for event in self.latest()]}

    def note_once(self, action: str, **detail: Any) -> None:
        """Add an event unless the last one is the same."""
        if not self.events or (self.events[-1].action, self.events[-1].detail) != (action, _fitting(detail)):
            self.note(action, **detail)

    def grant_of(self, uuid: str) -> Grant | None:
        """What the job has of a device."""
        return next((grant for grant in self.grants if grant.uuid == uuid), None)

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> JobRecord:
        """Read back what `to_json` wrote; `source` names it in errors. Raises SluiceError."""
        try:
            fields = json.loads(text)
            if fields["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema {fields['schema_version']!r}, this Sluice reads {SCHEMA_VERSION}")
            known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
            if not isinstance(known.get("usage"), dict | None):
                raise TypeError(f"usage {known['usage']!r:.100} is no object")
            known["grants"] = [_read(Grant, grant) for grant in fields["grants"]]
            known["stages"] = [_read(Stage, stage) for stage in fields.get("stages", ())][: len(STAGES)]
            events = [_read(Event, event) for event in fields["events"]]
            if len(text) <= MOST_RECORD:
                return cls(**{**known, "events": events})
            record = cls(**{**known, "events": []})
            for event in events:  # of an earlier version, which had no bounds
                record._add(replace(event, detail=_fitting(event.detail)))
            return record
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise SluiceError(
                f"{source}: not a job's record: {error}", remedy="remove it, or read it by hand"
            ) from error


def _read(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__dataclass_fields__})


def _fitting(detail: dict[str, Any]) -> dict[str, Any]:
    """The detail of an event in at most `_MOST_OF_DETAIL` characters of JSON, for any input."""
    for items, characters in _FITS:
        found = {name: _bounded(value, items, characters) for name, value in islice(detail.items(), 16)}
        if len(json.dumps(found)) <= _MOST_OF_DETAIL:
            return found
    return {}


def _bounded(value: Any, items: int, characters: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if abs(value) < _MOST_NUMBER else None  # and not what JSON does not have
    if isinstance(value, list | tuple):
        return [_bounded(one, 0, characters) for one in value[:items]]
    return one_line(str(value), limit=characters)


class Store:
    """Records in a folder that root alone writes: one file a job."""

    def __init__(self, folder: Path, mode: int = 0o700) -> None:
        self.folder = folder
        self.mode = mode

    def prepare(self) -> None:
        """Make the folder. Raises OSError."""
        self.folder.mkdir(mode=self.mode, parents=True, exist_ok=True)

    def save(self, record: JobRecord) -> None:
        """Write or replace. Raises OSError, e.g. when the file system is full; the old file then stays."""
        write_atomic(self.folder / f"{record.job}.json", record.to_json(), mode=0o600, follow_links=False)

    def remove(self, job: int) -> None:
        """Remove a record; a missing one is not an error."""
        with suppress(FileNotFoundError):
            (self.folder / f"{job}.json").unlink()

    def load(self, job: int) -> JobRecord:
        """One record. Raises SluiceError where there is none."""
        path = self.folder / f"{job}.json"
        try:
            return JobRecord.from_json(path.read_text(), str(path))
        except FileNotFoundError:
            raise SluiceError(f"job {job}: no record of it on this node", remedy=f"see {self.folder}") from None

    def load_all(self) -> tuple[list[JobRecord], list[SluiceError]]:
        """All records by job, and what could not be read."""
        found, bad = [], []
        for path in self.folder.glob("*.json"):
            try:
                found.append(JobRecord.from_json(path.read_text(), str(path)))
            except SluiceError as error:
                bad.append(error)
        return sorted(found, key=lambda record: record.job), bad

    def prune(self, before: float) -> None:
        """Remove what was written before a time."""
        for path in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()
