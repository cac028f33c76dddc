"""Usage records: one line for each request that a gateway took, with what it used, and never what it said.

Each host has a file for each UTC day of the requests' ends, ``HOST-2026-11-24.jsonl``. The workers of its gateway
append to it, each record with one write. A record's id is the gateway's own, so that no client can make two requests of
one; readers count an id once. A record without an endpoint is the bill of a worker that was killed: where its client
goes on with the same id, a later record has the whole, and is counted in its place.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from sluice.base.errors import SluiceError

FOLDER = Path("/var/lib/sluice-gateway/requests")
"""Where they are, unless the policy says otherwise (serving.requests)."""
VERSION = 1
BATCHES = "/v1/batches"
"""Endpoint of records of batches' requests, which jobs of their callers have answered."""
Outcome = Literal["ok", "refused-limit", "cancelled", "failed", "expired"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
MOST_LINE = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}-(\d{4}-\d{2}-\d{2})\.jsonl")
_BEGIN = b'{"v":'
_DAY_S = 86_400
_SEEN = 500_000
_MOST_BILLS = 100_000
_PIECE = 1 << 20
_TAIL = 4 << 20
_MOST_TOKENS = 1 << 40
_text_of = json.encoder.encode_basestring


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended. Times are seconds since 1970, or since its begin."""

    id: str
    begun: float
    ended: float
    key: str
    user: str
    tenant: str
    service: str
    job: int  # of the last replica; 0: it had none
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt
    outcome: Outcome
    status: int  # of HTTP
    queue_s: float
    first_token_s: float | None  # None: there was none
    total_s: float
    endpoint: str  # e.g. /v1/chat/completions; empty: the bill of a worker that was killed
    resumed: int = 0  # how often another replica went on


def render(record: RequestRecord) -> bytes:
    """Its line: JSON, written by hand, which takes a third of the time. Times are to the microsecond."""
    first = "null" if record.first_token_s is None else f"{record.first_token_s:.6f}"
    return (
        f'{{"v":{VERSION},"id":{_text_of(record.id)},"begun":{record.begun:.6f},"ended":{record.ended:.6f}'
        f',"key":{_text_of(record.key)},"user":{_text_of(record.user)},"tenant":{_text_of(record.tenant)}'
        f',"service":{_text_of(record.service)},"job":{record.job},"prompt_tokens":{record.prompt_tokens}'
        f',"completion_tokens":{record.completion_tokens},"cached_tokens":{record.cached_tokens}'
        f',"outcome":"{record.outcome}","status":{record.status},"queue_s":{record.queue_s:.6f}'
        f',"first_token_s":{first},"total_s":{record.total_s:.6f},"endpoint":{_text_of(record.endpoint)}'
        f',"resumed":{record.resumed}}}\n'
    ).encode()


def parse(line: bytes) -> RequestRecord | None:
    """The record of a line, or None for a line that is none. Of one that a full disk cut, what was written after it."""
    at = line.rfind(_BEGIN)
    if at < 0 or len(line) - at > MOST_LINE:
        return None
    try:
        found = json.loads(line[at:])
        values = [_TAKE[name](found[name]) for name in _NAMES]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if found["v"] != VERSION or found["outcome"] not in OUTCOMES:
        return None
    return RequestRecord(*values)


# ---- writing ----


class RequestLog:
    """Appends records of one process; the folder must be there."""

    def __init__(self, folder: Path = FOLDER, host: str | None = None) -> None:
        self.folder = folder
        self.host = host or re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).lstrip(".-") or "gateway"
        self._day = -1
        self._descriptor = -1

    def write(self, record: RequestRecord) -> None:
        """Append one, so that it survives this process. Raises OSError, SluiceError."""
        line = render(record)
        if len(line) > MOST_LINE:
            raise SluiceError(f"request {record.id[:64]!r}: a record of {len(line)} bytes", remedy="shorten its names")
        day = int(record.ended // _DAY_S)
        if day != self._day:
            self._open(day)
        if os.write(self._descriptor, line) != len(line):
            raise OSError(28, "No space left on device", str(self.folder))

    def missing(self, records: Iterable[RequestRecord]) -> list[RequestRecord]:
        """Those that are not in this host's files. Raises OSError."""
        left = {render(one): one for one in records}
        for day in {int(one.ended // _DAY_S) for one in left.values()}:
            with suppress(FileNotFoundError), open(self._path(day), "rb", opener=_open_there) as file:
                for line, _ in _lines(file):
                    left.pop(line[max(line.rfind(_BEGIN), 0) :] + b"\n", None)
        return list(left.values())

    def _path(self, day: int) -> Path:
        return self.folder / f"{self.host}-{_date(day * _DAY_S)}.jsonl"

    def _open(self, day: int) -> None:
        self.close()
        path = self._path(day)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor, self._day = os.open(path, flags, 0o640), day

    def close(self) -> None:
        """End; the next record opens a file again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._day = self._descriptor = -1


def prune(folder: Path, now: float, keep_s: float) -> list[Path]:
    """Remove files of days that are older; which ones. Raises OSError."""
    oldest = _date(now - keep_s)
    gone = [path for day, path in files_of(folder) if day < oldest]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


# ---- reading ----


class Seen:
    """Ids that were met lately: of the last half million at least, with bounded memory."""

    def __init__(self, most: int = _SEEN) -> None:
        self._most = most
        self._new: set[int] = set()
        self._old: set[int] = set()

    def again(self, name: str) -> bool:
        """Whether an id was met before; from now on it was."""
        mark = hash(name)
        if mark in self._new or mark in self._old:
            return True
        self._new.add(mark)
        if len(self._new) >= self._most:
            self._old, self._new = self._new, set()
        return False


def days(folder: Path) -> list[date]:
    """The days that have records. Raises OSError."""
    return sorted({day for day, _ in files_of(folder)})


def read_requests(folder: Path, start: float, end: float) -> Iterator[RequestRecord]:
    """Requests that ended at or after `start` and before `end`, each id once, day by day. Raises OSError.

    Bills of workers that were killed come last, as they may still be replaced.
    """
    by_day: dict[date, list[Path]] = {}
    for day, path in files_of(folder):
        if _date(start) <= day <= _date(end):
            by_day.setdefault(day, []).append(path)
    added, bills = Added(), dict[str, RequestRecord]()
    for day in sorted(by_day):
        for record, _ in added.read(by_day[day]):
            bills.pop(record.id, None)
            if start <= record.ended < end:
                if _is_last(record) or len(bills) >= _MOST_BILLS:
                    yield record
                else:
                    bills[record.id] = record
    yield from bills.values()


def recent_requests(folder: Path, start: float, end: float, most: int = _TAIL) -> list[RequestRecord]:
    """The same of the last `most` bytes of each file, for who looks again and again. Raises OSError."""
    found: dict[str, RequestRecord] = {}
    for day, path in files_of(folder):
        if _date(start) <= day <= _date(end):
            with open(path, "rb", opener=_open_there) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
                for line, _ in _lines(file):
                    record = parse(line)
                    known = None if record is None else found.get(record.id)
                    if (
                        record is not None
                        and start <= record.ended < end
                        and (known is None or replaces(record, known))
                    ):
                        found[record.id] = record
    return list(found.values())


def _is_last(record: RequestRecord) -> bool:
    """Whether nothing of its id is billed after it: a whole answer."""
    return bool(record.endpoint) and record.outcome == "ok"


def replaces(record: RequestRecord, before: RequestRecord) -> bool:
    """Whether it is billed instead of one of the same id: a worker's own, or of what was sent again and took more."""
    if not record.endpoint or not before.endpoint:
        return bool(record.endpoint)
    return record.prompt_tokens + record.completion_tokens > before.prompt_tokens + before.completion_tokens


class Added:
    """What is added to files of records, read once, each id once. `before`: records that were counted elsewhere;
    `ends`: places up to which files need not be read."""

    def __init__(self, before: Iterable[RequestRecord] = (), ends: Mapping[Path, int] | None = None) -> None:
        self._places: dict[Path, int] = dict(ends or {})
        self._seen = Seen()
        self._bills: OrderedDict[str, RequestRecord] = OrderedDict()
        for record in before:
            self._take(record)

    def read(self, paths: Iterable[Path]) -> Iterator[tuple[RequestRecord, RequestRecord | None]]:
        """What the files have more than at the last time, in the order of its ends; with each the one that it replaces.

        Raises OSError.
        """
        for record in heapq.merge(*map(self._records, paths), key=lambda one: one.ended):
            bill = self._bills.get(record.id)
            if self._take(record):
                yield record, bill

    def bills(self) -> dict[str, RequestRecord]:
        """What counts now and may be replaced."""
        return {name: record for name, record in self._bills.items() if not _is_last(record)}

    def _take(self, record: RequestRecord) -> bool:
        """Whether it counts."""
        bill = self._bills.get(record.id)
        if bill is not None and replaces(record, bill):
            self._bills[record.id] = record
            return True
        if self._seen.again(record.id):
            return False
        if not _is_last(record):
            self._bills[record.id] = record
            if len(self._bills) > _MOST_BILLS:
                self._bills.popitem(last=False)
        return True

    def _records(self, path: Path) -> Iterator[RequestRecord]:
        with suppress(FileNotFoundError), open(path, "rb", opener=_open_there) as file:
            file.seek(self._places.get(path, 0))
            for line, place in _lines(file):
                self._places[path] = place
                if (record := parse(line)) is not None:
                    yield record


class Spent:
    """The tokens of each tenant since a time, kept up to date by reading only what was added."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._since = 0.0
        self._added = Added()
        self._tokens: dict[str, int] = {}

    def by_tenant(self, since: float) -> dict[str, int]:
        """Tokens of requests that ended at or after `since`, by tenant. Raises OSError."""
        if since != self._since:
            self._since, self._added, self._tokens = since, Added(), {}
        for day, files in groupby(files_of(self.folder), lambda one: one[0]):  # a period may have hundreds of days
            for record, bill in self._added.read([path for _, path in files]) if day >= _date(since) else ():
                for one, sign in ((record, 1), (bill, -1)):
                    if one is not None and one.ended >= since:
                        spent = sign * (one.prompt_tokens + one.completion_tokens)
                        self._tokens[one.tenant] = self._tokens.get(one.tenant, 0) + spent
        return dict(self._tokens)


def period_start(period: str, now: float) -> float:
    """When the usage period began that `now` is in, as Slurm's PriorityUsageResetPeriod counts; "none": 1970."""
    local = time.localtime(now)
    month, day = local.tm_mon, local.tm_mday
    if period == "none":
        return 0.0
    if period == "weekly":
        day -= (local.tm_wday + 1) % 7  # Slurm's weeks begin on Sunday
    elif period != "daily":
        day = 1
        month = 1 if period == "yearly" else month - (month - 1) % 3 if period == "quarterly" else month
    return time.mktime((local.tm_year, month, day, 0, 0, 0, 0, 0, -1))


def _lines(file: Any) -> Iterator[tuple[bytes, int]]:
    """Whole lines, each with the place after it; of one that is too long, its end. A last line without an end is none
    yet."""
    place, rest = file.tell(), b""
    while piece := file.read(_PIECE):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            place += len(line) + 1
            yield line, place
        if len(rest) > 2 * MOST_LINE:
            place += len(rest) - MOST_LINE
            rest = rest[-MOST_LINE:]


def files_of(folder: Path) -> list[tuple[date, Path]]:
    """The files of a folder with their UTC days, in that order. Raises OSError.

    Others read what is the gateway's user's: links, and pipes that would be waited for, are left out.
    """
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for one in entries:
            if (match := _NAME.fullmatch(one.name)) and one.is_file(follow_symlinks=False):
                with suppress(ValueError):
                    found.append((date.fromisoformat(match[1]), Path(one.path)))
    return sorted(found)


def _open_there(path: str, flags: int) -> int:
    """For `open`: also where another thing has taken a file's place since it was listed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _date(seconds: float) -> date:
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(max(0.0, seconds), UTC).date()
    return date.max


# ---- fields ----


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e11:
        raise TypeError
    return float(value)


def _maybe(value: Any) -> float | None:
    return None if value is None else _seconds(value)


_NAMES = tuple(one.name for one in fields(RequestRecord))
_TAKE: dict[str, Any] = {
    **dict.fromkeys(("id", "key", "user", "tenant", "service", "outcome", "endpoint"), _text),
    **dict.fromkeys(
        ("job", "prompt_tokens", "completion_tokens", "cached_tokens", "status", "resumed"), _count
    ),
    **dict.fromkeys(("begun", "ended", "queue_s", "total_s"), _seconds),
    "first_token_s": _maybe,
}  # fmt: skip
