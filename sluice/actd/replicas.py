"""Replicas of services: jobs that `sluice replicad` asks for by the names of a service and of a launch.

That daemon's user may have been taken over, so it says no more than these names, and whether a replica is over-quota
work. All else of a job comes from the policy that root applied; of a service there are never more living jobs than the
policy's `most` and one successor, nor more outside of over-quota work than are guaranteed and a successor of each; and
only a job is ended that has the name of that launch and the user of that service. The same launch asked twice is one
job.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.names import OVER_QOS
from policy.service_jobs import (
    FILE_NAME,
    ReplicaJob,
    ServicePolicy,
    ServicesFile,
    job_name,
    parse_job_name,
    registries_of,
    replica_job,
)
from sluice.actd.become import Account
from sluice.actd.jobs import Jobs
from sluice.actd.keys import Entry, Keys
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.acts import ActError
from sluice.exchange.courier import controllers
from sluice.exchange.launches import LaunchRequest
from sluice.exchange.serving import REPLICAD_USER, replicad_port
from sluice.slurm.commands import Commands

_SETTLED_S = 12.0  # later than slurmctld can take a message of a program that has ended: its MessageTimeout is 10 s
_OLD_S = 120.0  # so long after it was begun, a launch whose job is not found is over: its job may have been and gone
_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
_MOST_USERS = 10_000


@dataclass(frozen=True, slots=True)
class LivingJob:
    """A job of a service's user whose name is a replica's."""

    id: int
    living: bool
    user: str
    service: str
    launch: str
    lent: bool


class Replicas:
    """Launches and ends. Thread-safe; one launch of a service at a time."""

    def __init__(
        self,
        commands: Commands,
        jobs: Jobs,
        keys: Keys,
        state: Path,
        *,
        account: Callable[[str], Account],
        conf: Callable[[], Path],
        uid: Callable[[], int],
        program: Path,
    ) -> None:
        """`account`: the user of a name, for whom something may be done; `conf`: the folder of slurm.conf; `uid`: of
        replicad; `program`: sluice-replica, where nodes have it."""
        self._commands, self._jobs, self._keys = commands, jobs, keys
        self._account, self._conf, self._uid, self._program = account, conf, uid, program
        self._users_file = state / "actd/service-users.json"
        self._users: dict[str, list[str]] | None = None
        self._services: ServicesFile | None = None
        self._lock = threading.Lock()
        self._one: dict[str, threading.Lock] = {}
        self._uncertain: dict[str, dict[str, float]] = {}  # by service: launches that may still become jobs, until when
        self._before: dict[str, float] = {}  # by their marks: those of this process's predecessor, of any service

    def do(self, request: LaunchRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was done, and what the audit log says of it. Raises ActError, SluiceError, OSError."""
        if request.do == "launch_replica":
            return self._launch(request.service, request.launch, lent=request.lent)
        return self._end(request.service, request.launch)

    # ---- launching ----

    def _launch(self, service: str, launch: str, *, lent: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        policy = self._file().current()
        try:
            job = replica_job(
                policy, service, launch, registry_uid=self._uid(), program=self._program, registries=self._registries(),
                lent=lent,
            )  # fmt: skip
        except SluiceError as error:
            raise ActError(404 if service not in policy.services else 422, error.what, remedy=error.remedy) from error
        who = self._account(job.user)
        self._remember(service, job.user)
        detail = {"user": job.user, "account": policy.services[service].tenant}
        with self._turn(service):
            entry = self._keys.begin(REPLICAD_USER, f"{service}.{launch}", "launch_replica", {"service": service})
            try:
                if entry.answer is not None:
                    return entry.answer, {**detail, "again": True}
                found = self._submit(entry, policy.services[service], launch, job, who, lent=lent)
                self._keys.end(entry, found)
                self._uncertain.get(service, {}).pop(launch, None)
                return found, detail
            finally:
                self._keys.leave(entry)

    def _submit(
        self, entry: Entry, policy: ServicePolicy, launch: str, job: ReplicaJob, who: Account, *, lent: bool
    ) -> dict[str, Any]:
        service, now = policy.name, time.time()
        mine = [one for one in self._living(job.user) if one.service == service]
        for one in mine:
            if one.launch == launch:
                return {"schema_version": 1, "job_id": one.id, "user": job.user}
        if entry.again:
            if now < entry.begun + _SETTLED_S:
                raise ActError(
                    503, f"launch {launch}: it is not known yet whether its job was queued", retry_after=2,
                    remedy="ask again: it is not queued twice",
                )  # fmt: skip
            if now > entry.begun + _OLD_S:
                raise ActError(409, f"launch {launch}: begun long ago, and not there", remedy="choose another launch")
            self._keys.renew(entry)
        known = {launch, entry.mark, *(one.launch for one in mine)}
        living = sum(one.living for one in mine) + self._unsettled(service, known, now)
        if living > policy.most:
            self._keys.undo(entry)
            raise ActError(
                409, f"service {service!r}: {living} jobs live, of at most {policy.most} and one successor",
                remedy=f"end some, or: sluice serve scale {service}",
            )  # fmt: skip
        own = sum(one.living and not one.lent for one in mine)
        if not lent and policy.guaranteed is not None and own >= 2 * policy.guaranteed:
            self._keys.undo(entry)
            raise ActError(
                409, f"service {service!r}: {own} jobs live outside of over-quota work, which has {policy.guaranteed} "
                "and a successor of each", remedy=f"end some, or: sluice serve scale {service}",
            )  # fmt: skip
        try:
            number = self._jobs.queue(who, job.arguments, job.script, entry.lock)
        except ActError as error:
            if error.status == 503:
                self._uncertain.setdefault(service, {})[launch] = time.time() + _SETTLED_S
            else:
                self._keys.undo(entry)
            raise
        return {"schema_version": 1, "job_id": number, "user": job.user}

    def _unsettled(self, service: str, known: set[str], now: float) -> int:
        """Launches whose sbatch had no answer, so that a job may still come; also those of a process before this, which
        other services and `recover` change meanwhile."""
        for mine in (self._uncertain.get(service, {}), self._before):
            for launch in [one for one, until in tuple(mine.items()) if until < now or one in known]:
                mine.pop(launch, None)
        return len(self._uncertain.get(service, ())) + len(self._before)

    def recover(self, entry: Entry) -> None:
        """A launch that was begun when this process's predecessor ended: its job may still come."""
        self._before[entry.mark] = entry.begun + _SETTLED_S

    # ---- ending ----

    def _end(self, service: str, launch: str) -> tuple[dict[str, Any], dict[str, Any]]:
        users = self._users_of(service)
        if not users:
            raise ActError(
                404, f"service {service!r}: never in the policy of this host", remedy="see: sluice serve list"
            )
        name = job_name(service, launch)
        for user in users:
            for one in self._living(user, name):
                if (one.service, one.launch, one.user) != (service, launch, user):
                    continue
                if one.living:
                    self._jobs.cancel(self._account(user), str(one.id))
                return {"schema_version": 1, "job_id": one.id, "living": one.living}, {"user": user, "launch": launch}
        return {"schema_version": 1, "job_id": None, "living": False}, {}

    # ---- what is there ----

    def _living(self, user: str, name: str = "") -> list[LivingJob]:
        """A user's jobs whose names are replicas'. Raises SluiceError."""
        shape = ["--noheader", "--all", "--states=all", f"--user={user}", *([f"--name={name}"] if name else [])]
        found = []
        for line in self._commands.output("squeue", *shape, "--format=%i %T %u %q %j").splitlines():
            number, state, owner, qos, text = [*line.strip().split(" ", 4), *[""] * 4][:5]
            parsed = parse_job_name(text.strip())
            if number.isdecimal() and parsed is not None and owner == user:
                found.append(LivingJob(int(number), state not in _ENDED, owner, *parsed, lent=qos == OVER_QOS))
        return found

    def _file(self) -> ServicesFile:
        with self._lock:
            if self._services is None:
                self._services = ServicesFile(self._conf() / FILE_NAME)
            return self._services

    def _registries(self) -> tuple[str, ...]:
        return registries_of(controllers(self._conf() / "slurm.conf").hosts, replicad_port())

    @contextmanager
    def _turn(self, service: str) -> Iterator[None]:
        with self._lock:
            one = self._one.setdefault(service, threading.Lock())
        with one:
            yield

    # ---- whose services were there: their replicas are ended when they have gone from the policy ----

    def _remember(self, service: str, user: str) -> None:
        with self._lock:
            known = self._known_users()
            if user in known.get(service, ()) or len(known) >= _MOST_USERS:
                return
            known.setdefault(service, []).append(user)
            self._users_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._users_file, json.dumps(known) + "\n", mode=0o600, follow_links=False)

    def _users_of(self, service: str) -> list[str]:
        policy = self._file().current()
        with self._lock:
            before = list(self._known_users().get(service, ()))
        now = [policy.services[service].user] if service in policy.services else []
        return list(dict.fromkeys([*now, *before]))

    def _known_users(self) -> dict[str, list[str]]:
        if self._users is None:
            self._users = {}
            with suppress(FileNotFoundError, ValueError, AttributeError):
                found = json.loads(self._users_file.read_text())
                self._users = {str(name): [str(user) for user in users] for name, users in found.items()}
        return self._users
