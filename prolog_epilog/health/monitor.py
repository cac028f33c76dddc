"""The node's side of health: gathers and judges facts, remembers, refuses jobs on faulty GPUs, and reports.

Part of the node agent. A driver that hangs blocks nothing: its answer is waited for some seconds, and then its values
are unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gres_probe.inventory import Inventory
from gres_probe.writer import node_devices
from policy.health import NodeHealth
from policy.node import NodePolicyFile
from prolog_epilog.devices import NodeDevice
from prolog_epilog.health import memory as memories
from prolog_epilog.health.facts import Gpu, GpuFacts, NodeFacts
from prolog_epilog.health.judge import NODE, Finding, Round, judge
from prolog_epilog.nics import Nics
from prolog_epilog.refusals import Refusal
from prolog_epilog.server import Peer
from prolog_epilog.state import MIB, RefusalError, State
from prolog_epilog.watching import Watch, Watcher
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.exchange.health_report import Fault, GpuState, Report
from sluice.exchange.readings import Reading, readings_of
from sluice.exchange.record import JobRecord

ANSWER_S = 5.0
"""How long a round waits for drivers. The whole round is well below the 10 s that HealthCheckProgram may take."""
_RECENT_S = 60.0  # a job that ended this shortly before a fault may have died of it
_SKEW_KEPT_S = 900.0
_LOOK_S = 1.0

Send = Callable[[dict[str, Any]], dict[str, Any]]
"""Gives a report to the controllers' daemon and returns its answer. Raises SluiceError, OSError."""


Held = tuple[str, int, int]
"""A GPU, a job that has it, and whose job that is."""


@dataclass
class _Seen:
    """What one vendor's driver reported last."""

    at: float = 0.0
    readings: dict[str, Reading] = field(default_factory=dict)
    xids: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # not judged yet


class Monitor:
    """Checks this node's health."""

    def __init__(
        self,
        state: State,
        watcher: Watcher,
        *,
        policy: Path,
        memory: Path,
        send: Send | None = None,
        spools: Iterable[str] = (),
        outages: Callable[[], tuple[int, str]] = lambda: (0, ""),
        fabric: Callable[[], dict[str, list[str]] | None] = lambda: None,
        nics: Nics | None = None,
    ) -> None:
        """`spools`: folders without room in which no job can start, as slurm.conf names them (%n, %h: the node).

        `outages`: how often jobs were unwatched, and the last time as text. `fabric`: what the last preflight found.
        `nics`: what network interfaces count; None: nobody reads it.
        """
        self._spools = list(spools)
        self._outages = outages
        self._fabric = fabric
        self._nics = nics
        self._state = state
        self._watcher = watcher
        self._policy = NodePolicyFile(policy)
        self._path = memory
        self._send = send
        self._memory = memories.Memory()
        self._gpus: list[Gpu] = []
        self._uuids: dict[str, str] = {}  # of a GPU and its partitions -> of the GPU
        self._seen: dict[str, _Seen] = {}
        self._jobs_seen: dict[Held, float] = {}  # when it had it last
        self._lock = threading.Lock()  # guards all below and above
        self._round_lock = threading.Lock()  # one round at a time
        self._due = 0.0
        self._in_force: NodeHealth | None = None
        self._report: Report | None = None
        self._unsent = threading.Event()
        self._undelivered: float | None = None
        self._logged_undelivered = False
        self._problem = ""
        self._refused_at = 0.0
        self._unclean: tuple[str, ...] = ()  # GPUs, of the job that ended then
        self._held_back = False  # the breaker is open: nothing is done about what is found here
        self.on_due: Callable[[], None] = lambda: None  # called when a round has become due
        self.on_report: Callable[[], None] = lambda: None  # called when there is one to deliver

    # ---- start ----

    def start(self, inventory: Inventory) -> None:
        """Know the node's GPUs, and what an earlier agent remembered. Before threads are started."""
        numbers: dict[int, list[int]] = {}
        files: dict[int, list[str]] = {}
        for number, device in enumerate(node_devices(inventory)):
            numbers.setdefault(device.gpu, []).append(number)
            files.setdefault(device.gpu, []).extend(device.files)
        for index, gpu in enumerate(inventory.gpus):
            self._gpus.append(
                Gpu(
                    gpu.uuid,
                    gpu.vendor,
                    gpu.model,
                    tuple(numbers.get(index, ())),
                    tuple(dict.fromkeys(files.get(index, ()))),
                    tuple(gpu.nics),
                    gpu.driver_version,
                )
            )
            for uuid in (gpu.uuid, *(part.uuid for part in gpu.partitions)):
                self._uuids[uuid] = gpu.uuid
        try:
            self._memory = memories.load(self._path)
        except SluiceError as error:
            log("problem", what=error.what, remedy=error.remedy)

    # ---- called by the watchdog's threads ----

    def on_sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """After each sample of a vendor. Raises nothing."""
        now = time.time()
        granted = self._granted()
        with self._lock:
            self._jobs_seen |= dict.fromkeys(granted, now)
            if "full" not in answer:
                return
            seen = self._seen.setdefault(watch.worker.vendor, _Seen())
            try:
                seen.readings = readings_of(answer)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                log("problem", vendor=watch.worker.vendor, what=f"a reading that cannot be read: {error!r}")
                return
            seen.at = time.monotonic()
            for uuid, reading in seen.readings.items():
                seen.xids.setdefault(uuid, []).extend(reading.xids)

    def _granted(self) -> list[Held]:
        with self._state.lock:
            return [
                (self._uuids.get(grant.uuid, grant.uuid), record.job, record.uid)
                for record in self._state.records.values()
                for grant in record.grants
            ]

    # ---- rounds ----

    def run(self) -> float:
        """A duty: a round when one is due. Seconds until it, or until the next check for a changed policy."""
        if time.monotonic() >= self._due or self._policy.current().health is not self._in_force:
            self.round()
        return min(max(0.0, self._due - time.monotonic()), _LOOK_S)

    def round(self) -> Report | None:
        """Check everything now; None in mode off. Takes little more than `ANSWER_S`."""
        with self._round_lock:
            policy = self._in_force = self._policy.current().health
            self._note_policy()
            self._due = time.monotonic() + policy.interval_s
            if policy.mode == "off":
                self._report = None
                return None
            began = time.monotonic()
            self._ask_drivers(began)
            facts = self._facts(began)
            with self._lock:
                result = judge(facts, self._memory, policy)
                report = self._make_report(facts, result)
                self._report = report
                copy = memories.copy_of(self._memory)
            with suppress(OSError):  # a full disk must not end the checks
                memories.save(self._path, copy)
            for finding in result.findings:
                if finding.new:
                    self._say(finding)
            self._unsent.set()
            self.on_report()
            return report

    def _note_policy(self) -> None:
        problem = str(self._policy.problem or "")
        if problem != self._problem and problem:
            log("problem", what=problem)
        self._problem = problem

    def _say(self, finding: Finding) -> None:
        done = finding.action if finding.acts else "none"
        numbers = [] if finding.gpu is None else list(finding.gpu.gpu.numbers)
        log("finding", check=finding.check, severity=finding.severity, gpus=numbers, does=done, what=finding.text)

    def _ask_drivers(self, began: float) -> None:
        """Let all vendors read everything, at the same time, and wait for those that answer."""
        watches = self._watcher.watches
        for watch in watches.values():
            watch.full = True
            watch.wanted.set()
        deadline = began + ANSWER_S
        while time.monotonic() < deadline and not self._state.stopping.is_set():
            with self._lock:
                missing = [
                    name
                    for name, watch in watches.items()
                    if self._seen.get(name, _Seen()).at < began and watch.problem is None
                ]
            if not missing:
                return
            with self._state.sampled:
                notified = self._state.sampled.wait(0.1)
            for name in missing if not notified else ():
                watches[name].wanted.set()

    def _facts(self, began: float) -> NodeFacts:
        now = time.time()
        policy = self._policy.current().health
        facts = NodeFacts(now)
        for name, watch in self._watcher.watches.items():
            with self._lock:
                fresh = self._seen.get(name, _Seen()).at >= began
            silent = f"the {name} driver gives no answer"
            facts.problems[name] = None if fresh else (silent if watch.problem is None else watch.problem.what)
            facts.modules[name] = _read(Path(f"/sys/module/{_MODULES[name]}/version")) if name in _MODULES else None
        for nic in sorted({nic for gpu in self._gpus for nic in gpu.nics}):
            facts.nics[nic] = _link_state(nic)
        facts.free_percent = {path: _free_percent(path) for path in policy.paths}
        facts.room_mib = self._room()
        facts.outages = self._outages()
        facts.fabric = self._fabric()
        if self._nics is not None:
            facts.lost_nics, facts.nic_counts = self._nics.gone(), self._nics.rdma_counts()
        with self._lock:
            if now - self._memory.skew_at < _SKEW_KEPT_S:
                facts.skew_s = self._memory.skew_s
        granted = self._granted()
        for gpu in self._gpus:
            facts.gpus.append(self._gpu_facts(gpu, facts, granted))
        facts.jobs = tuple(sorted({job for _, job, _ in granted}))
        return facts

    def _room(self) -> dict[str, float | None]:
        names = (path.replace("%n", self._state.node).replace("%h", self._state.node) for path in self._spools)
        return {name: _room_mib(name) for name in names}

    def _gpu_facts(self, gpu: Gpu, facts: NodeFacts, granted: list[Held]) -> GpuFacts:
        found = GpuFacts(gpu, answered=facts.problems.get(gpu.vendor) is None)
        found.missing_files = tuple(path for path in gpu.files if not Path(path).exists())
        found.jobs = tuple(sorted({job for uuid, job, _ in granted if uuid == gpu.uuid}))
        with self._lock:
            self._jobs_seen = {key: when for key, when in self._jobs_seen.items() if facts.now - when <= _RECENT_S}
            recent = [held for held in {*self._jobs_seen, *granted} if held[0] == gpu.uuid]
            found.recent_jobs = tuple(sorted({job for _, job, _ in recent}))
            found.recent_users = tuple(sorted({uid for _, _, uid in recent}))
            if not found.answered:
                return found
            seen = self._seen[gpu.vendor]
            found.reading = seen.readings.get(gpu.uuid)
            found.xids = seen.xids.pop(gpu.uuid, [])
        watch = self._watcher.watches[gpu.vendor]
        with self._state.lock:
            held = [(pid, size) for (uuid, pid), size in watch.held.items() if self._uuids.get(uuid) == gpu.uuid]
            owners = watch.owners
        found.strays = tuple(sorted(pid for pid, _ in held if pid in owners and owners[pid].is_stray()))
        if found.reading is not None and found.reading.memory_used_bytes is not None:
            found.residual_bytes = max(0, found.reading.memory_used_bytes - sum(size for _, size in held))
        return found

    def _make_report(self, facts: NodeFacts, result: Round) -> Report:
        policy = self._policy.current().health
        gpus = []
        for one in facts.gpus:
            subject = self._memory.of(one.gpu.uuid)
            unknown = tuple(result.unknown.get(one.gpu.uuid, ()))
            gpus.append(
                GpuState(
                    one.gpu.uuid,
                    one.gpu.vendor,
                    one.gpu.model,
                    one.gpu.numbers,
                    subject.passes,
                    subject.kept,
                    unknown,
                    one.jobs,
                )
            )
        return Report(
            node=self._state.node,
            time=facts.now,
            mode=policy.mode,
            wanted_passes=policy.passes,
            gpus=tuple(gpus),
            faults=tuple(_fault(finding) for finding in result.findings),
            passes=self._memory.of(NODE).passes,
            unknown=tuple(result.unknown.get(NODE, ())),
            undelivered_since=self._undelivered,
            blames=tuple(self._blames(facts)),
            refused_at=self._refused_at,
            unclean=self._unclean,
            room="spool" in result.passed.get(NODE, ()),
        )

    def _blames(self, facts: NodeFacts) -> Iterable[str]:
        """Jobs that had an event of their own making within the last hour."""
        for one in facts.gpus:
            for event in self._memory.of(one.gpu.uuid).xids:
                if event.blamed == "job" and facts.now - event.at < 3600:
                    jobs = ",".join(map(str, event.jobs)) or "unknown"
                    numbers = ",".join(map(str, one.gpu.numbers))
                    yield f"job {jobs}: XID {event.xid} on GPU {numbers}" + (" and others" if event.many else "")

    # ---- who asks ----

    def check(self, *, peer: Peer, fresh: bool = True) -> dict[str, Any]:
        """The request ``health``: a round now, or the last one's report; ``{"report": null}`` in mode off."""
        del peer
        report = self.round() if fresh or self._report is None else self._report
        return {"report": None if report is None else report.to_dict()}

    def refuse_sick(self, chosen: Iterable[NodeDevice]) -> None:
        """For the prolog: by what the last round found, device files and room now. Raises RefusalError."""
        try:
            self._refuse_sick(chosen)
        except RefusalError:
            self._refused_at, self._unclean = time.time(), ()
            self.wake()  # so that the controllers know why the node is drained
            raise

    def _refuse_sick(self, chosen: Iterable[NodeDevice]) -> None:
        policy = self._policy.current().health
        uuids = {self._uuids.get(device.uuid, device.uuid) for device in chosen}
        with self._lock:
            report = self._report
        if report is None or policy.mode != "enforce":
            return
        for fault in report.faults if not self._held_back else ():
            if fault.acts and (not fault.uuid or fault.uuid in uuids) and _is_quick(fault.check, policy.checks):
                raise RefusalError(
                    f"GPU {','.join(map(str, fault.numbers))}: {fault.check}: {fault.text}"
                    if fault.numbers
                    else f"{fault.check}: {fault.text}",
                    Refusal.GPU_SICK,
                    remedy="see: sluice health check",
                )
        rule = policy.checks.get("spool")
        if rule is not None and not rule.shadow and rule.action in ("drain-node", "requeue") and not self._held_back:
            full = [path for path, room in self._room().items() if room is not None and room < rule.threshold]
            if full:
                raise RefusalError(f"no room in {', '.join(full)}", Refusal.NO_ROOM, remedy="see: sluice health check")
        rule = policy.checks.get("device_file")
        for gpu in self._gpus if rule is not None and not rule.shadow else ():
            missing = [path for path in gpu.files if gpu.uuid in uuids and not Path(path).exists()]
            if missing:
                raise RefusalError(
                    f"no device file {', '.join(missing)}", Refusal.NO_DEVICE_FILE, remedy="see: sluice health check"
                )

    def ended(self, record: JobRecord) -> None:
        """A job has ended; where its GPUs were not clean, Slurm drains the node."""
        unclean = {self._uuids.get(grant.uuid, grant.uuid) for grant in record.grants if grant.clean is False}
        if unclean:
            self._refused_at, self._unclean = time.time(), tuple(sorted(unclean))
        self.wake()

    def wake(self) -> None:
        """A job has ended, or an event came: the next round is due now."""
        self._due = 0.0
        self.on_due()

    def found_again(self, checks: Iterable[str]) -> None:
        """A preflight has found these of the node: another finding than the last one's, which a person may have
        overruled by resuming the node. The next round is due now."""
        with self._lock:
            for check in checks:
                self._memory.of(NODE).found.pop(check, None)
        self.wake()

    # ---- reports to the controllers ----

    def deliver(self) -> None:
        """A duty: give the last report to the controllers' daemon when there is a new one. Raises nothing."""
        if self._send is None or not self._unsent.is_set():
            return
        with self._lock:
            report = self._report
        self._unsent.clear()
        if report is None:
            return
        began = time.time()
        try:
            answer = self._send(report.to_dict())
            self._take_answer(answer, began, time.time())
        except (SluiceError, OSError, ValueError, TypeError, KeyError) as error:
            if self._undelivered is None:
                self._undelivered = began
            if not self._logged_undelivered and not (isinstance(error, SluiceError) and error.logged):
                self._logged_undelivered = True
                log("problem", what=f"no health report was accepted: {error}")
            return
        if self._undelivered is not None and self._logged_undelivered:
            log("recovered", what="health reports are accepted again", seconds=round(began - self._undelivered))
        self._undelivered, self._logged_undelivered = None, False

    def _take_answer(self, answer: Mapping[str, Any], sent: float, received: float) -> None:
        """The controller's time, and GPUs that a person has returned to service."""
        theirs = float(answer["time"])
        with self._lock:
            self._memory.skew_s = (sent + received) / 2 - theirs
            self._memory.skew_at = received
            self._held_back = bool(answer.get("held_back"))
            for uuid in answer.get("returned", ()):
                subject = self._memory.subjects.get(str(uuid))
                if subject is not None and (subject.kept or subject.fatal):
                    subject.kept, subject.fatal = "", []
                    log("returned", uuid=uuid)
        if answer.get("returned"):
            self.wake()


_MODULES = {"nvidia": "nvidia", "amd": "amdgpu"}


def _fault(finding: Finding) -> Fault:
    gpu = finding.gpu
    return Fault(
        check=finding.check,
        uuid="" if gpu is None else gpu.gpu.uuid,
        numbers=() if gpu is None else gpu.gpu.numbers,
        severity=finding.severity,
        action=finding.action,
        acts=finding.acts,
        began=finding.began,
        text=finding.text,
        jobs=finding.jobs,
    )


def _is_quick(check: str, rules: Mapping[str, Any]) -> bool:
    return check == "repeated" or (check in rules and rules[check].quick)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()[:100].strip() or None
    except OSError:
        return None


def _link_state(nic: str, root: Path = Path("/sys/class/infiniband")) -> str | None:
    """State of an RDMA adapter: the worst of its ports; None where it is not known."""
    states = []
    for port in sorted((root / nic / "ports").glob("*/state")):
        text = _read(port)  # "4: ACTIVE"
        if text:
            states.append(text.rpartition(" ")[2])
    return next((state for state in states if state != "ACTIVE"), states[0] if states else None)


def _room_mib(path: str) -> float | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize / MIB


def _free_percent(path: str) -> float | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return 100.0 * facts.f_bavail / facts.f_blocks if facts.f_blocks else None
