"""Adds up how every job on the node uses its GPUs; the sums go into the job's record when it ends.

Fed by each sample of each vendor. Sums are kept in a file a job, on disk, so that they outlive the agent and, with the
record of the earlier boot, even the node: what a job did before a reboot becomes a record when the agent starts again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prolog_epilog import cgroups
from prolog_epilog.state import State
from prolog_epilog.summary import GpuUse, Interval, grown_errors, split_energy
from prolog_epilog.watching import Watch
from sluice.base.clock import boot_id, uptime
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.exchange.readings import THROTTLING, Reading, readings_of
from sluice.exchange.record import Grant, JobRecord

SAVE_SECONDS = 15.0
_LATE_SECONDS = 3.0  # a job that is first seen later ran before: the agent that saw it left nothing
_LONGEST_JOB = 10 * 366 * 86400.0  # beyond it the clock was wrong
_GAP_SECONDS = 20.0  # with longer gaps between two samples of a job the time in between is not measured


@dataclass
class _Last:
    """The last sample of a device that has jobs."""

    at: float  # monotonic
    busy_ns: int | None
    energy_mj: int | None
    processes: dict[int, int] | None


@dataclass(frozen=True)
class _Processes:
    """Busy time by process, where the driver reports it, and where the processes belong."""

    busy: dict[int, int] | None
    owners: dict[int, cgroups.Place | None]


@dataclass
class Tick:
    """The result of one sample on one device, by job."""

    uuid: str
    intervals: dict[int, Interval] = field(default_factory=dict)


class Accounting:
    """Sums by job and device. Thread-safe."""

    def __init__(self, state: State, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: dict[tuple[int, float], dict[str, GpuUse]] = {}  # (job, started) -> device -> sums
        self._last: dict[str, _Last] = {}
        self._owners: dict[str, dict[int, cgroups.Place | None]] = {}  # by vendor
        self._kept: dict[tuple[int, float], JobRecord | None] = {}  # what an earlier boot left; None: this one
        self._errors: dict[str, dict[str, int | None]] = {}
        self._xids: dict[str, set[tuple[float, int]]] = {}  # events that were counted and may be reported again
        self.on_tick: list[Callable[[Tick], None]] = []

    # ---- samples ----

    def sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """A reader of samples (`Watcher.on_sample`)."""
        vendor = watch.worker.vendor
        try:
            self._sample(watch, answer, self._clock())
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # an answer that is not what it should be
            log("problem", vendor=vendor, what=f"a sample that cannot be read: {error!r}")

    def _sample(self, watch: Watch, answer: dict[str, Any], now: float) -> None:
        vendor = watch.worker.vendor
        owners = self._owners.setdefault(vendor, {})
        owners |= {pid: owner.place for pid, owner in watch.owners.items()}
        held: dict[tuple[int, str], int] = {}
        for uuid, pid, size in answer["usage"]:
            place = _owner(owners, int(pid))
            if place is not None:
                held[place.job, uuid] = held.get((place.job, uuid), 0) + int(size)
        with self._state.lock:
            records = [one for one in self._state.records.values() if any(g.vendor == vendor for g in one.grants)]
            grants = [(one, grant.uuid, share_of(grant)) for one in records for grant in one.grants]
        ticks = []
        with self._lock:
            for uuid, sample in answer.get("devices", {}).items():
                busy = answer.get("busy", {}).get(uuid)
                processes = None if busy is None else {int(pid): int(ns) for pid, ns in busy.items()}
                here = [(record, share) for record, one, share in grants if one == uuid]
                tick = self._device(uuid, sample, _Processes(processes, owners), here, held, now)
                if tick is not None:
                    ticks.append(tick)
            self._forget({uuid for _, uuid, _ in grants})
            for key in ("some", "full"):
                if key in answer:
                    self._count_errors(readings_of(answer, key), grants, last=key == "full")
        alive = {int(pid) for _, pid, _ in answer["usage"]}
        for pid in [pid for pid in owners if pid not in alive]:
            del owners[pid]  # its number may become another's
        for tick in ticks:
            for reader in self.on_tick:
                reader(tick)

    def _device(
        self,
        uuid: str,
        sample: Mapping[str, Any],
        processes: _Processes,
        here: list[tuple[JobRecord, float]],
        held: Mapping[tuple[int, str], int],
        now: float,
    ) -> Tick | None:
        now = sample.get("at_s", now)  # the sampling process knows best
        last = self._last.get(uuid)
        self._last[uuid] = _Last(now, sample["busy_ns"], sample["energy_mj"], processes.busy)
        new = {record.job for record, _ in here if uuid not in self._of(record)}
        for record, share in here:
            use = self._of(record).setdefault(uuid, GpuUse())
            use.share, use.estimated = share, sample.get("share", 1.0) < 1.0
            use.back()
            if record.job in new:
                use.last_memory = held.get((record.job, uuid), 0)
                before = record.age()
                use.unmeasured = before if _LATE_SECONDS < before < _LONGEST_JOB else 0.0
        here = [(record, share) for record, share in here if record.job not in new]
        if last is None or not here:
            return None
        seconds = now - last.at
        restarted = sample["busy_ns"] is not None and last.busy_ns is not None and sample["busy_ns"] < last.busy_ns
        if seconds <= 0 or seconds > _GAP_SECONDS or restarted:
            for record, _ in here:
                self._of(record)[uuid].unmeasured += max(0.0, seconds)
            return None
        work = [self._work(record.job, last, sample["busy_ns"], processes, len(here), seconds) for record, _ in here]
        energy = None
        if sample["energy_mj"] is not None and last.energy_mj is not None and sample["energy_mj"] >= last.energy_mj:
            energy = (sample["energy_mj"] - last.energy_mj) * sample.get("share", 1.0)
        parts = [] if energy is None else split_energy(energy, work, [share for _, share in here])
        throttled = bool(THROTTLING & set(sample.get("throttle") or ()))
        tick = Tick(uuid)
        for number, (record, _) in enumerate(here):
            interval = Interval(
                seconds, work[number], held.get((record.job, uuid), 0), parts[number] if parts else None, throttled
            )
            self._of(record)[uuid].add(interval)
            tick.intervals[record.job] = interval
        return tick

    def _work(
        self, job: int, last: _Last, busy: int | None, processes: _Processes, jobs: int, seconds: float
    ) -> float | None:
        """The share of the GPU's time that was a job's; None where it is not reported and other jobs are there."""
        if processes.busy is not None and last.processes is not None:
            grown = 0
            for pid, ns in processes.busy.items():
                more = ns - last.processes.get(pid, 0)
                place = _owner(processes.owners, pid) if more > 0 else None
                grown += more if place is not None and place.job == job else 0
            return min(1.0, grown / 1e9 / seconds)
        if jobs == 1 and busy is not None and last.busy_ns is not None:
            return min(1.0, (busy - last.busy_ns) / 1e9 / seconds)
        return None

    def _of(self, record: JobRecord) -> dict[str, GpuUse]:
        return self._uses.setdefault((record.job, record.started), {})

    def _forget(self, granted: set[str]) -> None:
        """Devices that no job has any more: their next sample is a first one."""
        for uuid in [uuid for uuid in self._last if uuid not in granted and not self._granted(uuid)]:
            del self._last[uuid]

    def _granted(self, uuid: str) -> bool:
        return any(uuid in uses for uses in self._uses.values())

    def _count_errors(
        self, readings: Mapping[str, Reading], grants: list[tuple[JobRecord, str, float]], *, last: bool
    ) -> None:
        """Errors since the reading before. `last`: the events in these readings are not reported again."""
        for uuid, reading in readings.items():
            after = error_counters(reading)
            before = self._errors.get(uuid)
            self._errors[uuid] = after
            xids = [one for one in reading.xids if one not in self._xids.get(uuid, ())]
            self._xids[uuid] = set() if last else set(reading.xids)
            for record, one, _ in grants:
                if one in (uuid, *reading.parts) and one in self._of(record):
                    use = self._of(record)[one]
                    if before is not None:
                        use.errors += grown_errors(before, after)
                    use.xids.update(xid for _, xid in xids)

    # ---- the end of a job ----

    def finish(self, record: JobRecord) -> None:
        """Put the sums into the record of a job that ends."""
        with self._lock:
            uses = self._uses.pop((record.job, record.started), None)
        if uses is not None:
            for use in uses.values():
                use.back()
            record.usage = self._usage(record, uses)
        self._path(record.job).unlink(missing_ok=True)

    @classmethod
    def _usage(cls, record: JobRecord, uses: Mapping[str, GpuUse]) -> dict[str, Any]:
        """The record's `usage`: by GPU, and summed up in short words for AdminComment, as far as they are known."""
        usage: dict[str, Any] = {"gpus": {uuid: cls._report(record, uuid, use) for uuid, use in uses.items()}}
        measured = [use for use in uses.values() if use.known_s]
        usage["gs"] = round(sum(use.seconds for use in uses.values()), 3)
        usage["ts"] = round(sum(use.throttled for use in uses.values()), 3)
        if measured:
            usage["us"] = round(sum(use.busy for use in measured), 3)
            usage["is"] = round(sum(use.idle for use in measured), 3)
        energies = [use.energy_mj for use in uses.values() if use.energy_mj is not None]
        if energies:
            usage["ej"] = round(sum(energies) / 1000, 1)
        return usage

    @staticmethod
    def _report(record: JobRecord, uuid: str, use: GpuUse) -> dict[str, Any]:
        found = use.report()
        grant = record.grant_of(uuid)
        if grant is not None:
            found["rung"] = grant.rung
            if "memory" in found:  # the limiter counts between samples
                found["memory"]["peak"] = max(found["memory"]["peak"], grant.peak)
        return found

    def of_job(self, record: JobRecord) -> dict[str, Any]:
        """The sums of a running job until now, as they would be in its record."""
        with self._lock:
            uses = self._uses.get((record.job, record.started), {})
            return self._usage(record, uses)

    def totals(self) -> dict[tuple[int, float], dict[str, GpuUse]]:
        """The sums of all running jobs, by job and start; to be read only."""
        with self._lock:
            return {key: dict(uses) for key, uses in self._uses.items()}

    def place(self, vendor: str, pid: int) -> cgroups.Place | None:
        """Where a process of the last sample belongs."""
        return self._owners.get(vendor, {}).get(pid)

    # ---- what outlives the agent ----

    def _path(self, job: int) -> Path:
        return self._folder / f"{job}.json"

    def save(self) -> None:
        """A duty: save the sums of all running jobs. Raises OSError."""
        boot = boot_id()
        with self._state.lock, self._lock:
            running = {(record.job, record.started): record for record in self._state.records.values()}
            self._uses = {key: uses for key, uses in self._uses.items() if key in running}
            texts = {
                key: json.dumps(
                    {
                        "boot": boot,
                        "saved": time.time(),
                        "uptime": uptime(),
                        "record": asdict(running[key]),
                        "gpus": {uuid: use.to_dict() for uuid, use in uses.items()},
                    }
                )
                for key, uses in self._uses.items()
            }
        for key, text in texts.items():
            write_atomic(self._path(key[0]), text, mode=0o600, follow_links=False)
            with self._state.lock:
                if self._state.records.get(key[0]) is not running[key]:  # it has ended in the meantime
                    self._path(key[0]).unlink(missing_ok=True)

    def load(self) -> None:
        """What an earlier agent kept; before the agent takes over its jobs. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        boot = boot_id()
        for path in sorted(self._folder.glob("*.json")):
            try:
                kept = json.loads(path.read_text())
                record = JobRecord.from_json(json.dumps(kept["record"]), str(path))
                uses = {str(uuid): GpuUse.from_dict(fields) for uuid, fields in kept["gpus"].items()}
                saved, same_boot = float(kept["saved"]), kept["boot"] == boot
                seen = float(kept.get("uptime", uptime()))
            except (KeyError, TypeError, ValueError, AttributeError, SluiceError) as error:
                log("problem", what=f"{path}: not the sums of a job: {error}", remedy="it is removed")
                path.unlink(missing_ok=True)
                continue
            record.end(saved, seen)
            for use in uses.values():
                use.away_since = seen if same_boot else 0.0
            self._uses[record.job, record.started] = uses
            self._kept[record.job, record.started] = None if same_boot else record

    def cut_off(self) -> list[JobRecord]:
        """Records, with their sums, of jobs that a reboot ended; after the agent has taken over what still runs."""
        found = []
        with self._state.lock, self._lock:
            running = {(record.job, record.started) for record in self._state.records.values()}
            for key, record in self._kept.items():
                uses = None if key in running else self._uses.pop(key, None)
                if uses is None:
                    continue  # it runs, or its record has been written with its sums
                if record is not None:
                    record.usage = self._usage(record, uses)
                    record.note("reboot")
                    found.append(record)
                else:
                    self._path(key[0]).unlink(missing_ok=True)
            self._kept = {}
        return found

    def drop(self, records: Iterable[JobRecord]) -> None:
        """Forget what was kept of jobs that `cut_off` gave, once their records are stored."""
        for record in records:
            self._path(record.job).unlink(missing_ok=True)


def _owner(owners: dict[int, cgroups.Place | None], pid: int) -> cgroups.Place | None:
    """Where a process belongs; looked up once, as it cannot leave, and kept for one sample after it has ended."""
    if pid not in owners:
        owners[pid] = cgroups.place_of(pid)
    return owners[pid]


def error_counters(reading: Reading) -> dict[str, int | None]:
    """The counters of errors in a reading; those of its links together."""
    links = [
        count for link in reading.links for count in (link.replays, link.recoveries, link.crc) if count is not None
    ]
    return {
        "ecc_corrected": reading.ecc_corrected,
        "ecc_uncorrected": reading.ecc_uncorrected,
        "ras_uncorrected": reading.ras_uncorrected,
        "pcie_replays": reading.pcie_replays,
        "link_errors": sum(links) if links else None,
    }


def share_of(grant: Grant) -> float:
    """The part of a GPU, by memory, that a job was given."""
    return 1.0 if grant.limit is None or not grant.total else min(1.0, grant.limit / grant.total)
