"""What running jobs use, as their nodes last reported it: kept in memory by the controllers' daemon.

Nodes report every `monitoring.running` (`prolog_epilog.live_reports`). Nothing is written: after a restart or takeover
nodes have reported again within that time. Users may ask for their own jobs, root and SlurmUser for all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.exchange.courier import MAX_REQUEST, VERSION, Controllers, ask, controllers, port
from sluice.exchange.job_records import check_record
from sluice.exchange.live import JobNow, Live
from sluice.exchange.record import JobRecord

_LEAST_FRESH_S = 90.0
_PERIODS = 2.5  # a node without a report for this time does not know its jobs any more, or is down
_MOST_NODES = 20_000
_MOST_JOBS = 1024  # of a node
_MOST_BYTES = 256 << 20
_MOST_IDS = 10_000
_PAGE = MAX_REQUEST // 2
_MOST_PAGES = 2 * _MOST_BYTES // _PAGE


@dataclass(frozen=True, slots=True)
class _Job:
    uid: int
    text: str  # the record's
    saved: float | None
    unsaved: str | None


@dataclass
class _Node:
    at: float  # monotonic
    fresh_s: float
    jobs: dict[int, _Job]

    @property
    def size(self) -> int:
        return sum(len(job.text) for job in self.jobs.values())


class Running:
    """The latest of each node. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._size = 0

    def take(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The handler of a node's ``running``: all its jobs, in several requests where they are many (`more`).

        Raises SluiceError for what is not a node's report, and where no room is left.
        """
        name, given, period = request.get("node"), request.get("records"), request.get("period")
        if not isinstance(name, str) or not 0 < len(name) <= 64 or not isinstance(given, list):
            raise SluiceError("running: not a node's")
        if isinstance(period, bool) or not isinstance(period, int | float) or not 0 <= period <= 86_400:
            raise SluiceError("running: without a period")
        jobs = {}
        for one in given[:_MOST_JOBS]:
            record = JobRecord.from_json(json.dumps(one), "record")
            check_record(record, running=True)
            jobs[record.job] = _Job(record.uid, record.to_json(), record.saved, record.unsaved)
        now = self._clock()
        with self._lock:
            self._forget(now)
            before = self._nodes.get(name) if request.get("more") is True else None
            if before is not None:
                jobs = {**before.jobs, **jobs}
            node = _Node(now, max(_LEAST_FRESH_S, _PERIODS * period), jobs)
            old = self._nodes.get(name)
            size = self._size - (old.size if old else 0) + node.size
            if (old is None and len(self._nodes) >= _MOST_NODES) or size > _MOST_BYTES or len(jobs) > _MOST_JOBS:
                raise SluiceError("running: more jobs than are kept")
            self._nodes[name], self._size = node, size
        return {}

    def _forget(self, now: float) -> None:
        for name in [name for name, node in self._nodes.items() if now - node.at > node.fresh_s]:
            self._size -= self._nodes.pop(name).size

    def answer(self, request: Mapping[str, Any], uid: int | None) -> dict[str, Any]:
        """A page of what ``ask-running`` asks for. `uid`: only this user's jobs; None: all.

        ``jobs``: only these; ``after``: the ``next`` of the page before. Raises SluiceError for what is not a request.
        """
        wanted, after = request.get("jobs"), request.get("after", [0, ""])
        if wanted is not None and not (isinstance(wanted, list) and len(wanted) <= _MOST_IDS):
            raise SluiceError("ask-running: jobs is not a list, or too long")
        try:
            ids = None if wanted is None else {_job_number(one) for one in wanted}
            since = int(after[0]), str(after[1])
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise SluiceError("ask-running: not a job's number") from error
        found: list[Any] = []
        size, last = 0, None
        for job, node, text in self._of(uid, ids):
            if (job, node) <= since:
                continue
            size += len(text)
            if found and size > _PAGE:
                return {"records": found, "next": last}
            found.append(json.loads(text))
            last = [job, node]
        return {"records": found, "next": None}

    def records(self, jobs: Iterable[int] | None = None) -> list[JobRecord]:
        """Of all users; `jobs`: only of these."""
        wanted = None if jobs is None else set(jobs)
        return [JobRecord.from_json(text, "running job") for _, _, text in self._of(None, wanted)]

    def saved(self) -> dict[int, list[float | None]]:
        """When each job has saved its state, as each of its nodes last reported; None: not in this run."""
        found: dict[int, list[float | None]] = {}
        with self._lock:
            for number, _, job in self._fresh():
                found.setdefault(number, []).append(job.saved)
        return found

    def unsaved(self) -> dict[int, str]:
        """Jobs that asked to be saved as they run, and why their nodes cannot; empty: they can."""
        with self._lock:
            return {number: job.unsaved for number, _, job in self._fresh() if job.unsaved is not None}

    def _of(self, uid: int | None, ids: set[int] | None) -> list[tuple[int, str, str]]:
        with self._lock:
            return sorted(
                (number, node, job.text)
                for number, node, job in self._fresh()
                if (uid is None or job.uid == uid) and (ids is None or number in ids)
            )

    def _fresh(self) -> Iterator[tuple[int, str, _Job]]:
        """Of all nodes that reported lately. The caller holds the lock."""
        now = self._clock()
        for name, node in self._nodes.items():
            if now - node.at <= node.fresh_s:
                for number, job in node.jobs.items():
                    yield number, name, job


def _job_number(asked: Any) -> int:
    """Not greater than Slurm's: greater numbers can be chosen to collide in a set. Raises ValueError."""
    number = int(asked)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{number}: not a job's number")
    return number


def ask_running(
    jobs: Iterable[int] | None = None, *, conf: Path | None = None, to: Controllers | None = None
) -> list[JobRecord]:
    """The records until now of running jobs, one for each node: the caller's own, for root and SlurmUser all.

    Raises SluiceError where no controller answers.
    """
    asked = to or controllers(conf)
    request: dict[str, Any] = {"version": VERSION, "do": "ask-running"}
    if jobs is not None:
        request["jobs"] = sorted(set(jobs))
    found: list[JobRecord] = []
    for _ in range(_MOST_PAGES):
        page = ask(asked, port(), json.dumps(request).encode())
        records = page.get("records")
        if not isinstance(records, list):
            raise SluiceError("the answer has no records")
        for one in records:
            record = JobRecord.from_json(json.dumps(one), "running job")
            check_record(record, running=True)
            found.append(record)
        if not records or page.get("next") is None:
            break
        request["after"] = page["next"]
    return found


def live_of(records: Iterable[JobRecord]) -> Live:
    """What running jobs do now, from the result of `ask_running`."""
    found = Live()
    for record in records:
        measured = (record.usage or {}).get("gpus")
        for grant in record.grants:
            use = measured.get(grant.uuid) if isinstance(measured, dict) else None
            percent, used = now_of(use if isinstance(use, dict) else {})
            found.jobs.setdefault(record.job, []).append(JobNow(record.node, grant.index, percent, used))
    return found


def now_of(use: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Percent and MiB of a running job on a GPU, of the GPU's part of its record's usage."""
    now = use.get("now")
    shown = now if isinstance(now, dict) else {}
    percent, size = shown.get("utilisation"), shown.get("memory")
    return (
        float(percent) if isinstance(percent, int | float) and 0 <= percent < 1e6 else None,
        int(size) >> 20 if isinstance(size, int | float) and 0 <= size < 1e18 else None,
    )
