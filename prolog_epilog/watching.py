"""The watchdog's threads: one for each vendor, which samples its processes and acts on the samples."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prolog_epilog import job_output
from prolog_epilog.owners import Owner, Owners
from prolog_epilog.state import MIB, State
from prolog_epilog.step_kill import end_step
from prolog_epilog.strangers import Strangers
from prolog_epilog.watchdog import Act, Judgement, judge
from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.sizes import format_mib
from sluice.exchange.record import JobRecord

if TYPE_CHECKING:
    from policy.node_limits import NodeStrangers

_WRITE_S = 0.4  # until the lines are written, at most: then their processes are ended all the same
_MOST_CHECKED = 256  # processes of a step that are looked at again before it is ended
_MANY_S = 60.0  # between two log lines about too many processes
_GOING_S = 5.0  # within which what is left of an ended step is ended without another message


@dataclass
class Watch:
    """What is known of one vendor's processes; the state's `sampled` is notified with every sample."""

    worker: Worker
    samples: int = 0
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)  # bytes in use by no process, by device
    problem: SluiceError | None = None
    since: float = 0.0
    wanted: threading.Event = field(default_factory=threading.Event)  # sample now
    used: bool = False  # the next sample has what is in use on each device by all processes: with `wanted`
    full: bool = False  # the next sample has all that the library reports; set it together with `wanted`
    some: set[str] = field(default_factory=set)  # the same of these devices only
    asking: bool = False  # a sample is being taken, or passed to the readers
    many_logged: float = -math.inf  # when too many processes were last logged
    delivered: int = 0  # samples that all readers have got
    finder: Owners = field(default_factory=Owners)  # for the watching thread alone
    owners: dict[int, Owner] = field(default_factory=dict)  # of the processes of the last sample

    def look(self) -> None:
        """Sample now, with what is in use on each device. The caller holds the state's lock."""
        self.used = True
        self.wanted.set()


Reader = Callable[[Watch, dict[str, Any]], None]


class Watcher:
    """Watches the vendors that the node has. `on_sample`: called after each sample with the vendor's whole answer.

    They are called in the vendor's thread, without the lock; what they raise ends the watch, so they raise nothing.
    """

    def __init__(self, state: State, policy: Callable[[], NodeStrangers]) -> None:
        self._state = state
        self.strangers = Strangers(state, policy)
        self.watches: dict[str, Watch] = {}
        self.on_sample: list[Reader] = []
        self.notifying = threading.Event()  # the readers get samples
        self.notifying.set()
        self._paused_until = 0.0
        self._ended: dict[
            tuple[int, str, str], float
        ] = {}  # when a step was last ended; its processes take a moment to go

    def find(self) -> None:
        """A worker for each vendor of the node's devices."""
        for name in sorted({device.vendor for device in self._state.devices}):
            self.watches[name] = Watch(Worker(name))

    def start(self) -> None:
        """Watch until the agent stops."""
        for watch in self.watches.values():
            threading.Thread(target=self._watch, args=(watch,), daemon=True).start()

    def pause(self, seconds: float) -> None:
        """Close the drivers for this time: nobody may have a GPU open whose mode is changed."""
        self._paused_until = time.monotonic() + seconds
        self.close()

    def close(self) -> None:
        """End the vendors' processes."""
        for watch in self.watches.values():
            watch.worker.close()

    def await_sample(self, watch: Watch, deadline: float) -> None:
        """Wait for a sample that starts after now, and until its readers have processed it."""
        with self._state.sampled:
            wanted = watch.delivered + 1 + watch.asking  # that one began before
            watch.look()
            while watch.delivered < wanted and time.monotonic() < deadline and watch.problem is None:
                if not self._state.sampled.wait(0.1):
                    watch.look()

    def await_answer(self, watch: Watch, deadline: float) -> SluiceError | None:
        """Wait while the driver does not answer; why it does not, if that is still so at the deadline."""
        with self._state.sampled:
            while watch.problem is not None and time.monotonic() < deadline:
                self._state.sampled.wait(0.1)
            return watch.problem

    def _watch(self, watch: Watch) -> None:
        """Sample one vendor until the agent ends."""
        busy, guard, vendor = False, self._state.guard, watch.worker.vendor
        while not self._state.stopping.is_set():
            guard.beat(vendor)
            if time.monotonic() < self._paused_until:
                self._state.stopping.wait(0.2)
                continue
            with self._state.lock:
                watch.asking = True
                used = watch.used or not busy  # a prolog or epilog asks for it, or nobody waits
                watch.used = False
                watch.wanted.clear()
            try:
                answer = watch.worker.ask(do="sample", used=used, **self._also(watch))
            except SluiceError as error:
                guard.beat(vendor)  # twice a round: a driver that hangs is not a stalled agent
                self._failed(watch, error)
            else:
                self._sample(watch, answer["usage"], answer.get("used"), self._rest(watch, answer))
                for reader in self.on_sample if self.notifying.is_set() else ():
                    reader(watch, answer)
                with self._state.sampled:
                    watch.delivered += 1
                    watch.asking = False
                    self._state.sampled.notify_all()
                guard.sampled(vendor)
            busy = any(grant.vendor == vendor for one in list(self._state.records.values()) for grant in one.grants)
            settings = self._state.settings
            watch.wanted.wait(settings.period if busy else settings.idle_period)

    def _also(self, watch: Watch) -> dict[str, Any]:
        """What is measured besides memory: the activity of devices that jobs have, all else when it was asked for."""
        full, watch.full = watch.full, False
        some, watch.some = watch.some, set()
        vendor = watch.worker.vendor
        records = list(self._state.records.values())
        held = {grant.uuid for one in records for grant in one.grants if grant.vendor == vendor}
        return {"full": full, "some": sorted(some), "devices": sorted(held)}

    def _failed(self, watch: Watch, error: SluiceError) -> None:
        with self._state.sampled:
            if watch.problem is None:
                watch.since = time.time()
                log("problem", vendor=watch.worker.vendor, what=error.what, remedy=error.remedy)
            watch.problem = error
            watch.asking = False
            self._state.sampled.notify_all()
        self._state.stopping.wait(1.0)

    def _sample(
        self,
        watch: Watch,
        usage: Iterable[tuple[str, int, int]],
        used: dict[str, int] | None,
        rest: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """`rest`: device, user and bytes of processes that were too many to be listed."""
        listed = sorted(((str(uuid), int(pid), int(size)) for uuid, pid, size in usage), key=lambda one: -one[2])
        owners = watch.finder.look(pid for _, pid, _ in listed)
        for number, (uuid, uid, size) in enumerate(rest, 1):
            listed.append((str(uuid), -number, int(size)))
            owners[-number] = watch.finder.of_user(int(uid))
        records = self._state.records
        with self._state.sampled:
            if watch.problem is not None:
                log("recovered", vendor=watch.worker.vendor, seconds=round(time.time() - watch.since))
                watch.problem = None
            watch.held = {(uuid, pid): size for uuid, pid, size in listed}
            watch.owners = owners
            if used is not None:
                self.note_foreign(watch, used)
            watch.samples += 1
            peaks = {job: [grant.peak for grant in record.grants] for job, record in records.items()}
            found = judge(listed, records, owners.get) if listed else Judgement()
            risen = [record for job, record in records.items() if [grant.peak for grant in record.grants] != peaks[job]]
            self._state.sampled.notify_all()
        acts = found.acts + (self.strangers.acts(found.strangers) if found.strangers else [])
        if acts:
            self._do(watch, acts)
        with self._state.lock:
            for record in risen:
                if records.get(record.job) is record:
                    self._save(record)

    def _rest(self, watch: Watch, answer: dict[str, Any]) -> list[tuple[str, int, int]]:
        """Logs what processes have, by user, that the worker does not list as there are too many."""
        rest = [(str(uuid), int(uid), int(size)) for uuid, uid, size in answer.get("rest", ())]
        if rest and time.monotonic() >= watch.many_logged + _MANY_S:
            watch.many_logged = time.monotonic()
            users = ",".join(sorted({str(uid) for _, uid, _ in rest})[:16])
            log("problem", vendor=watch.worker.vendor, what="more processes on a GPU than are listed", users=users)
        return rest

    def note_foreign(self, watch: Watch, used: dict[str, int]) -> None:
        """Remember what is in use by no process; for a job that is new here, as what it found."""
        for uuid, size in used.items():
            watch.foreign[uuid] = max(0, size - sum(held for (of, _), held in watch.held.items() if of == uuid))
        for record in self._state.records.values():
            for grant in record.grants:
                if grant.foreign is None:
                    grant.foreign = watch.foreign.get(grant.uuid)

    def _do(self, watch: Watch, acts: Sequence[Act]) -> None:
        """Warn and end all at the same time, so that many over their limits do not keep each other alive for longer.

        The lines are written first, as the processes' output goes with them. No reader of a line is waited for, and
        steps that were ended a moment ago and have not gone yet come last.
        """
        again = [act for act in acts if act.action == "end" and self._ends_again(act)]
        by_job: dict[int, list[Act]] = {}
        for act in acts:
            if act not in again:
                by_job.setdefault(act.job, []).append(act)
        writers = job_output.begin([[(act.pids, self._line(act)) for act in of] for of in by_job.values()])
        jobs = dict(zip(writers, by_job.values(), strict=True))
        killed = {act: self._end(watch, act) for writer in job_output.done(writers, _WRITE_S) for act in jobs[writer]}
        for act in again:
            self._end(watch, act)
        job_output.finish(writers)
        for writer, of in jobs.items():
            for act, notified in zip(of, writer.written, strict=True):
                self.note(act, notified=notified)
                about = {"job": act.job, "step": act.step, "gpu": act.uuid, "charged": act.charged, "limit": act.limit}
                log(act.action, **about, **({"user": act.user} if act.user else {}), killed=killed[act])

    def _end(self, watch: Watch, act: Act) -> int:
        """How many processes were ended: those of the act that are still the same, and their step.

        Between the driver's list and now one may have ended, and another may have its number.
        """
        if act.action != "end":
            return 0
        listed = [pid for pid in act.pids[:_MOST_CHECKED] if pid in watch.owners]

        def is_still(pid: int) -> bool:
            return watch.finder.is_still(pid, watch.owners[pid])

        still = list(filter(is_still, listed))
        places = [place for pid in still if (place := watch.owners[pid].place) is not None and not place.stepd]
        of_step = [place for place in places if (place.job, place.step) == (act.job, act.step)]
        return end_step(of_step[0].step_folder() if of_step else None, still, is_still)

    def _line(self, act: Act) -> str:
        device = next((one for one in self._state.devices if one.uuid == act.uuid), None)
        name = act.uuid if device is None else f"{device.own_file} ({device.model})"
        charged, most = format_mib(-(-act.charged // MIB)), format_mib(act.limit // MIB)
        bound = f"limit {most}" if act.limit else "which it was not given"
        ended = f"; step {act.step} is ended" if act.action == "end" else ""
        return f"job {act.job}: {charged} of GPU memory on {name}, {bound}{ended}"

    def note(self, act: Act, *, notified: bool) -> None:
        """Note in the job's record what was done to it."""
        with self._state.lock:
            record = self._state.records.get(act.job)
            if record is None:
                if act.job:
                    self.strangers.note(act, notified=notified)
                return
            grant = record.grant_of(act.uuid)
            if grant is not None:
                grant.warned = True
            detail = {"step": act.step, "uuid": act.uuid, "charged": act.charged, "limit": act.limit}
            record.note(act.action, **detail, notified=notified)
            self._save(record)

    def _save(self, record: JobRecord) -> None:
        with suppress(OSError):  # a full /run must not stop the watchdog
            self._state.jobs.save(record)

    def _ends_again(self, act: Act) -> bool:
        """Whether the step was ended a moment ago; remembers that it is ended now."""
        now = time.monotonic()
        self._ended = {key: when for key, when in self._ended.items() if now - when < _GOING_S}
        key = act.job, act.step, act.user
        again = key in self._ended
        self._ended.setdefault(key, now)
        return again
