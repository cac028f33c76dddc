"""The snapshot in the web process: rows by section, and jobs with indexes: a page costs the same at any size."""

from __future__ import annotations

import base64
import binascii
import gc
import json
import sys
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from sluice.base.errors import UsageError
from sluice.report.fleet import hosts
from sluice.web.series import Series, ServiceSeries

SORTS = ("id", "submit_time", "start_time", "end_time", "priority", "gpus")
_INDEXED = ("user", "account", "partition", "state", "qos", "nodes")
FIELDS = (
    "id", "array_id", "array_tasks", "name", "user", "account", "qos", "partition", "state", "reason", "nodes",
    "node_count", "cpus", "gpus", "gpu_mem_mib", "memory_mib", "submit_time", "eligible_time", "start_time", "end_time",
    "time_limit_s", "priority", "features", "dependency", "reservation", "comment", "work_dir", "refused",
)  # fmt: skip
_CURSOR_VERSION = 1
_SMALL = 4000  # of so many jobs names are looked at, and not kept
_STEPS = 4  # places of the order of all jobs that are looked at in less time than one job is sorted in
_SEARCHES = 16  # parts of names whose jobs are kept
_MOST_TEXTS = 8 << 20  # bytes of jobs' texts that are kept: more than 10,000 usual ones
_PIECE = 50  # rows that are taken before others are served
_RENEWED = 50_000  # jobs that are replaced before what stays is frozen again
MOST_CURSOR = 512

Made = TypeVar("Made")


class Job:
    """One job; texts that many share are kept once."""

    __slots__ = FIELDS
    id: int
    array_id: int | None
    name: str
    user: str
    account: str
    state: str
    reason: str
    gpus: int
    partition: str
    nodes: str
    start_time: int | None

    def __init__(self, row: Mapping[str, Any]) -> None:
        for name in FIELDS:
            value = row[name]
            setattr(self, name, sys.intern(value) if isinstance(value, str) else value)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in FIELDS}


class Texts:
    """Jobs as they are now in JSON, which is the same for all who see them: made once for all answers and streams. Kept
    are those that were asked for last.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0  # bytes, as JSON is ASCII
        self._of: OrderedDict[Job, str] = OrderedDict()

    def of(self, job: Job) -> str:
        """The text of one."""
        if (text := self._of.get(job)) is not None:
            self._of.move_to_end(job)
            return text
        text = self._of[job] = json.dumps(job.document(), separators=(",", ":"))
        self._size += len(text)
        while self._size > self._most:
            self._size -= len(self._of.popitem(last=False)[1])
        return text


text_of = Texts(_MOST_TEXTS).of


@dataclass(frozen=True, slots=True)
class Query:
    """Which jobs, in which order; an empty field does not select."""

    users: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    qos: frozenset[str] = frozenset()
    name: str = ""  # part of it
    node: str = ""
    sort: str = "id"
    descending: bool = True
    limit: int = 100
    cursor: str = ""


@dataclass(slots=True)
class Page:
    """Jobs in their order."""

    jobs: list[Job]
    total: int
    next: str | None


Waits = dict[str, tuple[int, int]]
"""Jobs that wait, and the GPUs that they ask for, by Slurm's reason."""
Mark = tuple[int, int]
"""A job's place in an order: the value that it is sorted by (-1: not known), and its number."""


class Jobs:
    """All jobs, with a set of numbers for each value of a field that is often asked for, and an order for each sort."""

    def __init__(self) -> None:
        self.by_id: dict[int, Job] = {}
        self._sets: dict[str, dict[str, set[int]]] = {name: {} for name in _INDEXED}
        self._lists: dict[str, set[str]] = {}  # by node: the hostlists of jobs that have it, which many jobs share
        self._orders: dict[str, list[Mark]] = {}
        self._waits: Waits = {}
        self._named: dict[str, set[int]] = {}  # by part of a name that was asked for, the last ones

    def put(self, row: Mapping[str, Any]) -> Job:
        """Add or replace a job."""
        job = Job(row)
        before = self.by_id.get(job.id)
        self.by_id[job.id] = job
        _count(self._waits, job, 1)
        if before is not None:
            _count(self._waits, before, -1)
        for name in _INDEXED:
            was, now = (() if before is None else _words(before, name)), _words(job, name)
            if was == now:
                continue
            for word in was:
                self._leave(name, word, job.id)
            for word in now:
                self._enter(name, word, job.id)
        if before is None or before.name != job.name:
            for part, mine in self._named.items():
                if part in job.name:
                    mine.add(job.id)
                else:
                    mine.discard(job.id)
        for name, order in self._orders.items():
            if before is not None and _mark(before, name) == _mark(job, name):
                continue
            if before is not None:
                del order[bisect_left(order, _mark(before, name))]
            insort(order, _mark(job, name))
        return job

    def remove(self, number: int) -> Job | None:
        """Remove a job; it, or None where it was not there."""
        job = self.by_id.pop(number, None)
        if job is not None:
            _count(self._waits, job, -1)
            for mine in self._named.values():
                mine.discard(number)
            for name in _INDEXED:
                for word in _words(job, name):
                    self._leave(name, word, number)
            for name, order in self._orders.items():
                del order[bisect_left(order, _mark(job, name))]
        return job

    def _enter(self, name: str, word: str, number: int) -> None:
        sets = self._sets[name]
        if word not in sets:
            sets[word] = set()
            for node in hosts(word) if name == "nodes" else ():
                self._lists.setdefault(node, set()).add(word)
        sets[word].add(number)

    def _leave(self, name: str, word: str, number: int) -> None:
        sets = self._sets[name]
        sets[word].discard(number)
        if sets[word]:
            return
        del sets[word]
        for node in hosts(word) if name == "nodes" else ():
            self._lists[node].discard(word)
            if not self._lists[node]:
                del self._lists[node]

    def index(self) -> None:
        """Make the orders, once all jobs are there: faster than one by one."""
        self._orders = {name: self._sorted(self.by_id, name) for name in SORTS}

    def of(self, field_name: str, words: Iterable[str]) -> set[int]:
        """The numbers of the jobs with one of these values."""
        sets = [self._sets[field_name][word] for word in words if word in self._sets[field_name]]
        return sets[0] if len(sets) == 1 else set().union(*sets)

    def words(self, field_name: str, seen: set[int] | None) -> list[str]:
        """The values of an indexed field; of `seen` alone, if it is given."""
        found = self._sets[field_name].items()
        return [word for word, mine in found if seen is None or not seen.isdisjoint(mine)]

    def counts(self, seen: set[int] | None) -> dict[str, int]:
        """Jobs by state; of `seen` alone, if it is given."""
        states = self._sets["state"].items()
        counted = {state: len(mine) if seen is None else len(mine & seen) for state, mine in states}
        return {state: count for state, count in sorted(counted.items()) if count}

    def waiting(self, seen: set[int] | None) -> Waits:
        """Jobs that wait; of `seen` alone, if it is given."""
        if seen is None:
            return self._waits
        found: Waits = {}
        for number in seen & self.of("state", ["PENDING"]):
            _count(found, self.by_id[number], 1)
        return found

    def page(self, query: Query, seen: set[int] | None) -> Page:
        """A page of the jobs that match; of `seen` alone, if it is given. Raises UsageError for a bad cursor."""
        after = _parse_cursor(query.cursor, query) if query.cursor else None
        found = seen
        for name, words in (
            ("user", query.users), ("account", query.accounts), ("partition", query.partitions),
            ("state", query.states), ("qos", query.qos),
        ):  # fmt: skip
            if words:
                mine = self.of(name, words)
                found = mine if found is None else found & mine
        if query.node:
            mine = self.of("nodes", self._lists.get(query.node, ()))
            found = mine if found is None else found & mine
        if query.name:
            found = self._search(query.name, found)
        total = len(self.by_id) if found is None else len(found)
        marks = self._first(query, found, after, query.limit + 1)
        more = len(marks) > query.limit
        marks = marks[: query.limit]
        return Page(
            [self.by_id[number] for _, number in marks],
            total,
            _render_cursor(query, marks[-1]) if more else None,
        )

    def _search(self, part: str, among: set[int] | None) -> set[int]:
        """The jobs with this part in their name: of many they are kept, as the next page is of the same ones."""
        if among is not None and len(among) <= _SMALL and part not in self._named:
            return {number for number in among if part in self.by_id[number].name}
        mine = self._named.pop(part, None)
        if mine is None:
            mine = {number for number, job in self.by_id.items() if part in job.name}
        self._named[part] = mine
        if len(self._named) > _SEARCHES:
            del self._named[next(iter(self._named))]
        return mine if among is None else among & mine

    def _first(self, query: Query, found: set[int] | None, after: Mark | None, most: int) -> list[Mark]:
        """The first marks after one; from the order of all jobs where so many are soon met in it, or sorted."""
        order = self._orders[query.sort]
        places = _places(query, order, after)
        if found is None:
            return [order[place] for place in places[:most]]
        steps = _STEPS * len(found)
        if most * len(order) <= steps * len(found):  # they are met by then, if they are spread evenly
            walked = map(order.__getitem__, places[:steps])
            marks = list(islice((mark for mark in walked if mark[1] in found), most))
            if len(marks) == most or len(places) <= steps:
                return marks
        order = self._sorted(found, query.sort)
        return [order[place] for place in _places(query, order, after)[:most]]

    def _sorted(self, numbers: Iterable[int], name: str) -> list[Mark]:
        """The marks of these jobs in their order; what the most requests take."""
        if name == "id":
            return [(number, number) for number in sorted(numbers)]
        by_id, value_of = self.by_id, attrgetter(name)
        return sorted((-1 if (value := value_of(by_id[one])) is None else value, one) for one in numbers)


def _places(query: Query, order: list[Mark], after: Mark | None) -> range:
    """Where in an ascending order the marks are that come after one, in the order of the query."""
    if query.descending:
        return range((len(order) if after is None else bisect_left(order, after)) - 1, -1, -1)
    return range(0 if after is None else bisect_right(order, after), len(order))


def _words(job: Job, name: str) -> tuple[str, ...]:
    """The values by which a job is found: one that waits may have several partitions."""
    value = getattr(job, name)
    if name == "partition":
        return tuple(dict.fromkeys(value.split(",")))
    return (value,) if value or name != "nodes" else ()


def _count(waits: Waits, job: Job, by: int) -> None:
    """Add a job that waits, or take it away."""
    if job.state != "PENDING":
        return
    jobs, gpus = waits.get(job.reason, (0, 0))
    if jobs + by:
        waits[job.reason] = jobs + by, gpus + by * job.gpus
    else:
        del waits[job.reason]


def _mark(job: Job, name: str) -> Mark:
    value = getattr(job, name)
    return (-1 if value is None else value), job.id


def _render_cursor(query: Query, mark: Mark) -> str:
    words = [_CURSOR_VERSION, query.sort, int(query.descending), *mark]
    return base64.urlsafe_b64encode(json.dumps(words, separators=(",", ":")).encode()).rstrip(b"=").decode()


def _parse_cursor(text: str, query: Query) -> Mark:
    remedy = "begin again without a cursor"
    try:
        if len(text) > MOST_CURSOR:
            raise ValueError
        words = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        version, sort, descending, value, number = words
        if any(type(one) is not int for one in (version, descending, value, number)):
            raise ValueError
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise UsageError(f"cursor {text[:40]!r}: not one of this server's", remedy=remedy) from error
    if version != _CURSOR_VERSION or (sort, descending) != (query.sort, int(query.descending)):
        raise UsageError(f"cursor {text[:40]!r}: of another version or order", remedy=remedy)
    return value, number


# ---- all of it ----


def keep_out_of_collections() -> None:
    """What is there now is not looked at by later collections: a look at a hundred thousand jobs keeps all requests
    waiting for some hundred milliseconds. Their memory is free as ever once nobody refers to them."""
    gc.collect()
    gc.freeze()


Change = tuple[str, str, Any, Any]
"""Section, key, the row before and after; None: not there."""


@dataclass
class Store:
    """The snapshot as it was last received."""

    epoch: str = ""
    last: int = 0
    complete: bool = False
    connected: bool = False
    problem: str = ""
    answered: float = 0.0
    """When the daemon last answered."""
    jobs: Jobs = field(default_factory=Jobs)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    service_series: ServiceSeries = field(default_factory=ServiceSeries)
    _renewed: int = 0
    _changed: Counter[str] = field(default_factory=Counter)  # rows by section
    _made: dict[str, tuple[list[int], Any]] = field(default_factory=dict)

    def apply(self, answer: Mapping[str, Any]) -> list[Change]:
        """Take the rows of an answer; what changed. Raises KeyError, TypeError, ValueError for what is not one."""
        changes: list[Change] = []
        for _ in self.applying(answer, changes):
            pass
        return changes

    def applying(self, answer: Mapping[str, Any], changes: list[Change]) -> Iterator[None]:
        """The same in pieces of a few milliseconds, between which requests may be served."""
        if answer["reset"]:
            self.jobs, self.sections, self.complete = Jobs(), {}, False
            self._made.clear()
            changes.append(("", "", None, None))
        for place, (section, key, value) in enumerate(answer["rows"]):
            if place % _PIECE == _PIECE - 1:
                yield
            if section == "jobs":
                number = int(key)
                before = self.jobs.by_id.get(number)
                now = self.jobs.remove(number) and None if value is None else self.jobs.put(value)
                changes.append((section, key, before, now))
                continue
            rows = self.sections.setdefault(section, {})
            self._changed[section] += 1
            changes.append((section, key, rows.get(key), value))
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        self.epoch, self.last = str(answer["epoch"]), int(answer["last"])
        if not answer["more"] and not self.complete:
            self.jobs.index()
            self.complete = True
            self._renewed = _RENEWED
        self.connected, self.problem, self.answered = True, "", time.time()
        if self.complete:
            self.series.note(self.answered, self.rows("gpus"))
            self.service_series.note(self.answered, self.rows("services"))
        self._renewed += len(answer["rows"])
        if self.complete and self._renewed >= _RENEWED:
            self._renewed = 0
            keep_out_of_collections()

    def lost(self, problem: str) -> None:
        """The daemon does not answer: all stays as it was."""
        self.connected, self.problem = False, problem

    def rows(self, section: str) -> dict[str, Any]:
        """The rows of a section."""
        return self.sections.get(section, {})

    def one(self, section: str) -> Any:
        """The row of a section that has one, or None."""
        return next(iter(self.rows(section).values()), None)

    def once(self, name: str, sections: Iterable[str], make: Callable[[], Made]) -> Made:
        """What `make` makes of these sections, for all who ask, until one of them changes."""
        changed = [self._changed[section] for section in sections]
        kept = self._made.get(name)
        if kept is None or kept[0] != changed:
            kept = self._made[name] = changed, make()
        made: Made = kept[1]
        return made

    def part(self, name: str) -> dict[str, Any]:
        """How old a part is: that of the daemon, or since the daemon does not answer."""
        part = self.rows("parts").get(name, {"at": None, "stale_since": None, "problem": "not read yet"})
        if self.connected or part["stale_since"] is not None:
            return dict(part)
        return {"at": part["at"], "stale_since": self.answered or None, "problem": self.problem}
