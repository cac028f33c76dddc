"""Taking GPUs back from a job that ended: its processes killed, its memory free, or why it is not.

Memory may stay in use though no living process has it: a descriptor of the device that the job passed on keeps it. Then
what the job's user runs elsewhere is ended, too, first what has the device's file open. Only what stays after that is
the machine's fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from prolog_epilog import cgroups
from prolog_epilog.cgroups import Place
from prolog_epilog.owners import Owner
from prolog_epilog.state import MIB, State
from prolog_epilog.step_kill import end_step
from prolog_epilog.suspects import Suspects
from prolog_epilog.watchdog import FIRST_USER, OUTSIDE, Act
from prolog_epilog.watching import Watch, Watcher
from sluice.base.log import log
from sluice.base.sizes import format_mib
from sluice.exchange.record import Grant, JobRecord

_MOST_NOTED = 16  # strays in a job's record
_RESIDUE = 64 * MIB  # what a driver may keep for itself, more or less
_HOLDERS_AFTER, _ALL_AFTER = 0.2, 0.5  # of the time in which memory is to be free


class Reclaim:
    """Finds what a job left on its GPUs, and ends it."""

    def __init__(self, state: State, watcher: Watcher) -> None:
        self._state = state
        self._watcher = watcher
        self._left: dict[str, dict[int, str]] = {}  # users whose jobs left a GPU while others had it

    def free(self, record: JobRecord) -> dict[str, str]:
        """Kill the job's GPU processes until none is left; by device, why it is not clean."""
        begun, wait = time.monotonic(), self._state.settings.memory_wait
        deadline = begun + wait
        vendors = {grant.vendor for grant in record.grants}
        watches = [watch for name, watch in self._watcher.watches.items() if name in vendors]
        for watch in watches:
            watch.some |= {grant.uuid for grant in record.grants if grant.vendor == watch.worker.vendor}
        suspects = Suspects(self._users(record))
        strays: set[int] = set()
        while True:
            for watch in watches:
                self._watcher.await_sample(watch, deadline)
            with self._state.lock:
                holders = {
                    (uuid, pid): owner
                    for watch in watches
                    for uuid, pid in watch.held
                    if (owner := self._of_job(record, watch, uuid, pid)) is not None
                }
                residue = self.residue(record)
                new = {pid for _, pid in holders} - strays
                for pid in sorted(new)[: _MOST_NOTED - len(strays)]:
                    record.note("stray", pid=pid)
                strays |= new
            _end({pid: owner for (_, pid), owner in holders.items()})
            waited = time.monotonic() - begun
            if residue and waited >= _HOLDERS_AFTER * wait and self._watcher.strangers.ends_suspects():
                self._end_suspects(record, residue, suspects, all_of_them=waited >= _ALL_AFTER * wait)
            silent = any(watch.problem is not None for watch in watches)
            if not (holders or residue or silent) or time.monotonic() >= deadline:
                break
            if silent:  # a driver that is slow once is no reason to drain the node
                self._state.stopping.wait(0.1)
        self._forget(record)
        unclean = residue | {
            uuid: f"GPU {uuid}: process {pid} of job {record.job} cannot be ended; see dmesg" for uuid, pid in holders
        }
        for watch in watches:
            if watch.problem is not None:
                for grant in record.grants:
                    if self._watcher.watches.get(grant.vendor) is watch:
                        unclean.setdefault(grant.uuid, f"GPU {grant.uuid}: {watch.problem}")
        return unclean

    def _of_job(self, record: JobRecord, watch: Watch, uuid: str, pid: int) -> Owner | None:
        """The owner of a living process of the last sample that counts to the job; None for all others."""
        owner = watch.owners.get(pid)
        if owner is None:
            return None
        if owner.place is None:
            counts = self._is_last(record, uuid) and owner.is_stray() and owner.is_user(record.uid, record.user)
        else:
            counts = owner.place.job == record.job and not (owner.place.stepd and owner.uid == 0)
        return owner if counts and _lives(pid) else None

    def _is_last(self, record: JobRecord, uuid: str) -> bool:
        """Whether it is its user's last job on a GPU: what the user runs outside of jobs there counts to it."""
        return [one.job for one in self._sharing(uuid) if one.uid == record.uid] == [record.job]

    def _sharing(self, uuid: str) -> list[JobRecord]:
        return [one for one in self._state.records.values() if one.grant_of(uuid) is not None]

    def residue(self, record: JobRecord) -> dict[str, str]:
        """The job's GPUs that no other job has and that have more in use by no process than when it came."""
        found = {}
        for grant in record.grants:
            if any(one.job != record.job for one in self._sharing(grant.uuid)):
                continue
            left = self._left_on(record, grant)
            if left > _RESIDUE:
                size = format_mib(left // MIB)
                found[grant.uuid] = f"GPU {grant.uuid}: {size} in use by no process since job {record.job}; reset it"
        return found

    def _left_on(self, record: JobRecord, grant: Grant) -> int:
        """Bytes of a GPU that are in use by no process, more than when the job came."""
        watch = self._watcher.watches.get(grant.vendor)
        if watch is None:
            return 0
        left = 0
        if grant.foreign is not None and grant.uuid in watch.foreign:
            left = watch.foreign[grant.uuid] - grant.foreign
        return left + sum(
            size
            for (uuid, pid), size in watch.held.items()
            if uuid == grant.uuid and _may_have_ended(watch.owners.get(pid), record) and not _lives(pid)
        )

    # ---- memory that no living process has ----

    def _users(self, record: JobRecord) -> dict[int, str]:
        """Users who may hold memory of the job's GPUs: its own, and those whose jobs left some while it had them."""
        users = {record.uid: record.user}
        with self._state.lock:
            for grant in record.grants:
                users |= self._left.get(grant.uuid, {})
        return {uid: name for uid, name in users.items() if uid >= FIRST_USER}

    def _forget(self, record: JobRecord) -> None:
        """The job has left its GPUs: for GPUs that others have, remember whose memory may be left."""
        with self._state.lock:
            for grant in record.grants:
                if len(self._sharing(grant.uuid)) == 1:
                    self._left.pop(grant.uuid, None)
                elif self._left_on(record, grant) > _RESIDUE:
                    self._left.setdefault(grant.uuid, {})[record.uid] = record.user

    def _end_suspects(
        self, record: JobRecord, residue: Iterable[str], suspects: Suspects, *, all_of_them: bool
    ) -> None:
        devices = [self._state.devices[grant.index] for grant in record.grants if grant.uuid in residue]
        found = dict(suspects.look(None if all_of_them else {file for one in devices for file in one.files}))
        new = {pid: owner for pid, owner in found.items() if pid not in suspects.recorded}
        if new:
            gpus, pids = ",".join(one.uuid for one in devices), ",".join(map(str, list(new)[:8]))
            log("suspects", job=record.job, gpus=gpus, processes=len(new), pids=pids)
            self._note(record, new, devices[0].uuid)
            suspects.recorded.update(new)
        _end(found)

    def _note(self, record: JobRecord, found: dict[int, Owner], uuid: str) -> None:
        """In the job's record, and in those of other jobs whose steps are ended."""
        with self._state.lock:
            for pid in list(found)[:_MOST_NOTED]:
                record.note("stray", pid=pid)
        others = {(one.place.job, one.place.step): one for one in found.values() if one.place is not None}
        for (job, step), owner in others.items():
            if job != record.job:
                user = owner.name or str(owner.uid)
                self._watcher.note(Act("end", job, step or OUTSIDE, uuid, 0, 0, (), user), notified=False)


def _may_have_ended(owner: Owner | None, record: JobRecord) -> bool:
    """Whether what the driver lists may be left over: nothing is known of it, or it is no other job's."""
    return owner is not None and (owner.place is None or owner.place.job == record.job)


def _lives(pid: int) -> bool:
    """Whether a process has a living thread; a dead one holds nothing itself."""
    with suppress(OSError):
        return not (cgroups.has_exited(pid) and cgroups.threads_of(pid).ending)
    return False


def _end(found: dict[int, Owner]) -> None:
    """End processes, and all others of their steps."""
    steps: dict[Place | None, list[int]] = {}
    for pid, owner in found.items():
        steps.setdefault(owner.place, []).append(pid)

    def is_still(pid: int) -> bool:
        return _is_still(pid, found[pid])

    for place, pids in steps.items():
        if any(map(is_still, pids)):
            end_step(None if place is None else place.step_folder(), pids, is_still)


def _is_still(pid: int, owner: Owner) -> bool:
    """Whether a process has not ended, and its number become another's."""
    found = cgroups.place_of(pid)
    if owner.place is None:
        return found is None and cgroups.uid_of(pid) == owner.uid
    with suppress(OSError):
        return found == owner.place or (found is None and cgroups.has_exited(pid))
    return False
