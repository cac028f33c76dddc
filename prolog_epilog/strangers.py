"""Processes that hold GPU memory and belong to no registered job: applies the policy to each, and keeps records.

A job without GPUs has no record; one that held GPU memory gets one, with no grants, for the controllers. Which jobs ran
before the agent knew of any is remembered for as long as the node is up: they may well have been given their GPUs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prolog_epilog import cgroups
from prolog_epilog.state import State
from prolog_epilog.watchdog import OUTSIDE, Act, Stranger
from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.exchange.record import JobRecord

if TYPE_CHECKING:
    from policy.node_limits import NodeStrangers
    from prolog_epilog.server import Peer

_UNKNOWN_S = 5.0  # a process that ended may be listed for a moment longer
_FORGOTTEN_S = 60.0  # after which a stranger that comes again is reported again
_MOST = 1024  # strangers, and records, that are remembered


class Earlier:
    """The jobs that ran when the first prolog of any job came to the agent; while none has come, all jobs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: set[int] | None = None

    def load(self, *, attached: bool) -> None:
        """Continue with what an earlier agent found on this boot. `attached`: prologs came before. Raises OSError."""
        try:
            self._jobs = {int(job) for job in json.loads(self._path.read_text())}
        except FileNotFoundError:
            if attached:
                self.begin()
        except (TypeError, ValueError) as error:
            raise SluiceError(f"{self._path}: not a list of jobs", remedy="remove it") from error

    def begin(self) -> None:
        """From now on every job is known. Raises OSError."""
        if self._jobs is None:
            jobs = cgroups.jobs_here()
            write_atomic(self._path, json.dumps(sorted(jobs)), mode=0o600, follow_links=False)
            self._jobs = jobs

    def begun(self) -> bool:
        """Whether prologs run."""
        return self._jobs is not None

    def __contains__(self, job: int) -> bool:
        return self._jobs is None or job in self._jobs


@dataclass
class _Seen:
    first: float
    last: float
    said: bool = False


class Strangers:
    """Decides about strangers, and keeps the records of those that are jobs. Thread-safe."""

    def __init__(
        self, state: State, policy: Callable[[], NodeStrangers], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.earlier = Earlier(state.settings.run / "agent/earlier.json")
        self.on_note: Callable[[], None] = lambda: None  # called when there is a record to write
        self._state = state
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._records: dict[int, JobRecord] = {}
        self._unwritten: dict[int, JobRecord] = {}

    def load(self) -> None:
        """After the agent has taken over its jobs. Raises OSError, SluiceError."""
        attached = bool(self._state.records) or any(self._state.store.folder.glob("*.json"))
        self.earlier.load(attached=attached)

    def announce(self, *, peer: Peer) -> dict[str, Any]:
        """The prolog of a job without GPUs: those of jobs with GPUs will come, too."""
        del peer
        self.earlier.begin()
        return {}

    def acts(self, found: Sequence[Stranger]) -> list[Act]:
        """What is to be ended. What is to be reported is logged here, once."""
        now = self._clock()
        with self._lock:
            self._seen = {key: seen for key, seen in self._seen.items() if now - seen.last < _FORGOTTEN_S}
            return [act for one in found[:_MOST] if (act := self._act(one, now)) is not None]

    def _act(self, one: Stranger, now: float) -> Act | None:
        rule, why = self._rule(one)
        if rule == "ignore":
            return None
        who = one.pids if one.kind == "unknown" else (one.job, one.step, one.user)
        seen = self._seen.setdefault((one.kind, one.uuid, who), _Seen(now, now))
        seen.last = now
        if one.kind == "unknown" and now - seen.first < _UNKNOWN_S:
            return None
        if rule == "end":
            return Act("end", one.job, one.step or OUTSIDE, one.uuid, one.charged, 0, one.pids, one.user)
        if not seen.said and len(self._seen) <= _MOST:
            seen.said = True
            about = {"job": one.job or "none", "user": one.user or "unknown", "gpu": one.uuid, "charged": one.charged}
            log("stranger", **about, pids=",".join(map(str, one.pids[:8])), what=why)
            if one.job:
                self._note(one.job, one.user, "report", step=one.step, uuid=one.uuid, charged=one.charged)
        return None

    def ends_suspects(self) -> bool:
        """Whether processes are ended that may hold what a job left."""
        return self._policy().unknown == "end"

    def _rule(self, one: Stranger) -> tuple[str, str]:
        """The policy's rule, and the kind of process."""
        policy = self._policy()
        if one.kind == "user":
            return policy.users, "a user's processes outside of jobs"
        if one.kind == "unknown":
            return ("ignore" if policy.unknown == "ignore" else "report"), "nothing is known of these processes"
        if one.job in self.earlier:
            return policy.earlier_jobs, "a job from before prologs registered jobs with the agent"
        if self._has_ended(one.job):
            return "end", "left of a job that has ended"
        return policy.jobs_without_gpus, "a job that was given no GPU"

    def _has_ended(self, job: int) -> bool:
        """Whether the agent knew the job: its record is written before it is forgotten."""
        return (self._state.store.folder / f"{job}.json").exists()

    def note(self, act: Act, *, notified: bool) -> None:
        """A job's step was ended for what it had without a grant."""
        with self._lock:
            if not self._has_ended(act.job):
                detail = {"step": act.step, "uuid": act.uuid, "charged": act.charged, "limit": act.limit}
                self._note(act.job, act.user, "end", **detail, notified=notified)

    def _note(self, job: int, user: str, action: str, **detail: object) -> None:
        record = self._records.pop(job, None)
        if record is None:
            uid = int(user) if user.isdecimal() else -1
            record = JobRecord(job, uid, user, "", "", self._state.node, time.time(), started_uptime=uptime())
        self._records[job] = self._unwritten[job] = record
        for old in list(self._records)[:-_MOST]:
            del self._records[old]
        record.note(action, **detail)
        self.on_note()

    def write(self) -> None:
        """A duty: give the records to the outbox. Raises OSError."""
        with self._lock:
            unwritten = list(self._unwritten.values())
        for record in unwritten:
            with self._lock:
                record.end(time.time(), uptime())
                self._unwritten.pop(record.job, None)
            try:
                self._state.outbox.put(record)
            except OSError:
                with self._lock, suppress(KeyError):
                    self._unwritten[record.job] = record
                raise
