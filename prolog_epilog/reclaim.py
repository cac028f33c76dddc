"""Taking GPUs back from a job that ended: its processes killed, its memory free, or why it is not."""

from __future__ import annotations

import time
from contextlib import suppress

from prolog_epilog import cgroups
from prolog_epilog.cgroups import Place
from prolog_epilog.ending import end_step
from prolog_epilog.record import JobRecord
from prolog_epilog.state import MIB, State
from prolog_epilog.watching import Watch, Watcher
from sluice_base.sizes import format_mib

_MOST_NOTED = 16  # strays in a job's record
_RESIDUE = 64 * MIB  # what a driver may keep for itself, more or less


class Reclaim:
    """Finds out what of a job is left on its GPUs, and ends it."""

    def __init__(self, state: State, watcher: Watcher) -> None:
        self._state = state
        self._watcher = watcher

    def free(self, record: JobRecord) -> dict[str, str]:
        """Kill the job's GPU processes until none is left; by device, why it is not clean."""
        deadline = time.monotonic() + self._state.settings.memory_wait
        vendors = {grant.vendor for grant in record.grants}
        watches = [watch for name, watch in self._watcher.watches.items() if name in vendors]
        for watch in watches:
            watch.some |= {grant.uuid for grant in record.grants if grant.vendor == watch.worker.vendor}
        strays: set[int] = set()
        while True:
            for watch in watches:
                self._watcher.await_sample(watch, deadline)
            with self._state.lock:
                holders = {
                    (uuid, pid): place
                    for watch in watches
                    for uuid, pid in watch.held
                    if (place := _place(watch, pid)) is not None and place.job == record.job
                }
                residue = self.residue(record)
                new = {pid for _, pid in holders} - strays
                for pid in sorted(new)[: _MOST_NOTED - len(strays)]:
                    record.note("stray", pid=pid)
                strays |= new
            _end(holders)
            if not (holders or residue) or time.monotonic() >= deadline:
                break
        unclean = residue | {
            uuid: f"GPU {uuid}: process {pid} of job {record.job} cannot be ended; see dmesg" for uuid, pid in holders
        }
        for watch in watches:
            if watch.problem is not None:
                for grant in record.grants:
                    if self._watcher.watches.get(grant.vendor) is watch:
                        unclean.setdefault(grant.uuid, f"GPU {grant.uuid}: {watch.problem}")
        return unclean

    def residue(self, record: JobRecord) -> dict[str, str]:
        """The job's GPUs that no other job has and that have more in use by no process than when it came."""
        found = {}
        records = self._state.records.values()
        shared = {grant.uuid for one in records if one.job != record.job for grant in one.grants}
        for grant in record.grants:
            watch = self._watcher.watches.get(grant.vendor)
            if watch is None or grant.foreign is None or grant.uuid in shared or grant.uuid not in watch.foreign:
                continue
            left = watch.foreign[grant.uuid] - grant.foreign
            if left > _RESIDUE:
                size = format_mib(left // MIB)
                found[grant.uuid] = f"GPU {grant.uuid}: {size} in use by no process since job {record.job}; reset it"
        return found


def _place(watch: Watch, pid: int) -> Place | None:
    """Where a process of the last sample belongs; None for slurmstepd."""
    owner = watch.owners.get(pid)
    place = None if owner is None else owner.place
    return None if place is None or (place.stepd and owner is not None and owner.uid == 0) else place


def _end(holders: dict[tuple[str, int], Place]) -> None:
    """End processes of a job, and all others of their steps."""
    steps: dict[Place, list[int]] = {}
    for (_, pid), place in holders.items():
        if _is_still(pid, place):
            steps.setdefault(place, []).append(pid)
    for place, pids in steps.items():
        end_step(place.step_folder(), pids)


def _is_still(pid: int, place: Place) -> bool:
    """Whether a process has not ended, and its number become another's."""
    found = cgroups.place_of(pid)
    with suppress(OSError):
        return found == place or (found is None and cgroups.has_exited(pid))
    return False
