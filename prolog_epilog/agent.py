"""The node agent: one root daemon a node that sets limits, watches memory and keeps each job's record.

Everything that a running job depends on lies in files below /run/sluice that root alone writes, so that the agent can
be killed and started again at any moment. A thread a connection answers requests, a thread a vendor watches; `_lock`
guards the records. docs/node-agent.md tells the whole.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gres_probe.probe import probe_node
from prolog_epilog import cgroups, notice
from prolog_epilog.caps import Caps
from prolog_epilog.devices import NodeDevice, devices_of, select
from prolog_epilog.record import Grant, JobRecord, Store
from prolog_epilog.watchdog import Act, judge
from prolog_epilog.worker import Worker
from sluice_base.errors import SluiceError
from sluice_base.files import write_atomic, write_if_changed
from sluice_base.sizes import format_mib
from sluice_base.text import one_line
from sluice_core import limit
from sluice_core.errors import CoreError

RUN = Path("/run/sluice")
RECORDS = Path("/var/lib/sluice/records")
_MIB = 1 << 20
_LIMITED_VENDORS = ("nvidia", "amd")
_MOST_REQUEST = 64 << 10
_MOST_CONNECTIONS = 128
_IDLE_SECONDS = 30.0  # a connection that says nothing is closed
_RETENTION_SECONDS = 30 * 86400
_RESIDUE = 64 * _MIB  # what a driver may keep for itself, more or less
_SETTLED_SECONDS = 30.0  # after its prolog a job has a process, that of its extern step


class RefusalError(SluiceError):
    """A request that is not granted."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks, as the kernel says."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are, and how often the watchdog looks (seconds)."""

    run: Path = RUN
    library: Path = field(default_factory=limit.library_path)
    records: Path = RECORDS
    policy: Path = Path("/etc/slurm/sluice.policy")
    period: float = 0.5
    idle_period: float = 5.0
    memory_wait: float = 10.0


@dataclass
class Watch:
    """What is known of one vendor's processes; `changed` is notified with every sample."""

    worker: Worker
    samples: int = 0
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)  # bytes in use by no process, by device
    problem: SluiceError | None = None
    since: float = 0.0
    wanted: threading.Event = field(default_factory=threading.Event)


def log(action: str, **detail: Any) -> None:
    """One line, KEY=VALUE, on standard error."""
    words = [f"action={action}"]
    for key, value in detail.items():
        text = one_line(str(value))
        words.append(f"{key}={json.dumps(text) if ' ' in text or '=' in text or not text else text}")
    print(" ".join(words), file=sys.stderr, flush=True)


def _check_readable(library: Path) -> None:
    """The loader goes on without a library that the job's user cannot open: then no job may start at all."""
    for path in (library, *library.resolve().parents):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise SluiceError(f"limiter {library}: {error.strerror}", remedy="install Sluice anew") from error
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            raise SluiceError(
                f"limiter {library}: users cannot open it, as {path} has mode {stat.S_IMODE(mode):o}",
                remedy="install Sluice where every user may read, e.g. below /opt, or name a copy with --library",
            )


class Agent:
    """The daemon."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.jobs = Store(settings.run / "agent/jobs")
        self.store = Store(settings.records, mode=0o755)
        self.limits = settings.run / "limit"
        self.caps = Caps(settings.policy)
        self.records: dict[int, JobRecord] = {}
        self.regions: dict[int, limit.Region] = {}
        self.devices: list[NodeDevice] = []
        self.watches: dict[str, Watch] = {}
        self.contexts: dict[str, dict[str, int]] = {}
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self._lock = threading.RLock()
        self._sampled = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._requests: dict[str, tuple[bool, Callable[..., dict[str, Any]]]] = {
            "prolog": (True, self.prolog),
            "limit": (True, self.limit),
            "epilog": (True, self.epilog),
            "status": (True, self.status),
            "devices": (False, self.device_files),
            "task": (False, self.task),
        }

    # ---- start and end ----

    def start(self) -> None:
        """Find the GPUs, take over what an earlier agent left, measure driver contexts. Raises SluiceError, OSError."""
        if os.geteuid() != 0:
            raise SluiceError("sluice agent: not root", remedy="start it by systemd, or with sudo")
        self._prepare()
        inventory = probe_node(node=self.node)  # forks: before there are threads
        self.node = inventory.node
        for problem in inventory.problems:
            log("problem", vendor=problem.vendor, what=problem.what, remedy=problem.remedy)
        self.devices = devices_of(inventory)
        for name in sorted({device.vendor for device in self.devices}):
            self.watches[name] = Watch(Worker(name))
        self._take_over()
        self._measure_contexts()
        for watch in self.watches.values():
            threading.Thread(target=self._watch, args=(watch,), daemon=True).start()

    def _prepare(self) -> None:
        """Folders and files that others find here, and the mount points that must be there to be mounted over."""
        self.settings.run.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self.settings.run / "agent").mkdir(mode=0o700, exist_ok=True)
        self.jobs.prepare()
        self.store.prepare()
        for folder in (self.limits, self.limits / "job"):
            folder.mkdir(mode=0o755, exist_ok=True)
        _check_readable(self.settings.library)
        system = Path("/etc/ld.so.preload")
        if not system.exists():
            write_atomic(system, "")
        others = [line for line in system.read_text().splitlines() if line and line != str(self.settings.library)]
        # A job's namespace has this very file mounted, and one that is replaced cannot be mounted over in there.
        write_if_changed(self.settings.run / "preload", "\n".join([str(self.settings.library), *others]) + "\n")
        self.store.prune(time.time() - _RETENTION_SECONDS)

    def _take_over(self) -> None:
        records, bad = self.jobs.load_all()
        for error in bad:
            log("problem", what=error.what, remedy=error.remedy)
        for record in records:
            self.records[record.job] = record
            if (self._region_folder(record.job) / "limits").exists():
                try:
                    self.regions[record.job] = limit.Region(self._region_folder(record.job))
                except CoreError as error:
                    log("problem", job=record.job, what=error)
        running = cgroups.jobs_here() if records else set()
        for record in records:
            if record.job not in running and record.started < time.time() - _SETTLED_SECONDS:
                self._take_back(record, {})  # it ended while there was no agent
        if records:
            log("take-over", jobs=",".join(str(record.job) for record in records))

    def _measure_contexts(self) -> None:
        """One driver context's size for each kind of device, unless an earlier agent measured it since the boot."""
        path = self.settings.run / "agent/contexts.json"
        with suppress(OSError, ValueError):
            self.contexts = json.loads(path.read_text())
        for device in self.devices:
            if device.vendor not in _LIMITED_VENDORS or device.kind in self.contexts:
                continue
            place = device.uuid
            if device.vendor == "amd":
                place = str([one.uuid for one in self._of_vendor("amd")].index(device.uuid))
            try:
                found = self.watches[device.vendor].worker.ask(
                    do="context", uuid=device.uuid, place=place, timeout=30.0
                )
            except SluiceError as error:
                log("problem", device=device.uuid, what=f"no driver context measured: {error}")
                continue
            if 0 < found["context"] < found["total"]:
                self.contexts[device.kind] = found
                log("context", model=device.model, bytes=found["context"], total=found["total"])
            else:
                log("problem", device=device.uuid, what="the driver tells no size of a driver context")
        write_atomic(path, json.dumps(self.contexts), mode=0o600)

    def _of_vendor(self, name: str) -> list[NodeDevice]:
        order = sorted((device for device in self.devices if device.vendor == name), key=lambda device: device.pci)
        return [device for device in order if device.pci]

    def serve(self) -> None:
        """Answer until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        path = self.settings.run / "agent.sock"
        with suppress(FileNotFoundError):
            path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            path.chmod(0o666)  # who asks is told by the kernel, request by request
            listener.listen(256)
            listener.settimeout(0.5)
            log("ready", node=self.node, devices=len(self.devices), jobs=len(self.records))
            while not self._stopping.is_set():
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    if self._connections.acquire(blocking=False):
                        threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()
                    else:
                        connection.close()
        for watch in self.watches.values():
            watch.worker.close()
        log("stop")

    # ---- requests ----

    def _answer_all(self, connection: socket.socket) -> None:
        """One connection's requests, one JSON object a line, each answered by one."""
        try:
            connection.settimeout(_IDLE_SECONDS)
            size = struct.calcsize("3i")
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(_MOST_REQUEST):
                    answer = self.answer(line, Peer(pid, uid))
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass  # the asker has gone, or says nothing
        finally:
            self._connections.release()

    def answer(self, line: bytes, peer: Peer) -> dict[str, Any]:
        """Do one request; its fields are the keyword arguments of the method that ``do`` names."""
        began = time.monotonic()
        request: dict[str, Any] = {}
        try:
            request = json.loads(line)
            name = request.pop("do")
            root_only, method = self._requests[name]
        except (AttributeError, KeyError, TypeError, ValueError):
            return {"error": "not a request that this agent knows; are agent and programs of one version?"}
        if root_only and peer.uid != 0:
            log("refused", request=name, uid=peer.uid, pid=peer.pid, why="not root")
            return {"error": f"{name}: for root only"}
        try:
            done = method(peer=peer, **request)
        except SluiceError as error:
            why: str = str(error)
        except CoreError as error:
            why = f"the job's region of limits: {error}"
        except OSError as error:
            why = f"{error.filename or 'the node agent'}: {error.strerror}"
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            why = f"{name}: a request that makes no sense: {one_line(repr(error))}"
        else:
            if name != "devices":
                log(name, **_logged(request), ms=round(1000 * (time.monotonic() - began), 1))
            return {"ok": done}
        log("refused", request=name, **_logged(request), why=why)
        return {"error": why}

    def prolog(
        self, *, peer: Peer, job: int, uid: int, user: str, account: str, partition: str, gpus: list[int]
    ) -> dict[str, Any]:
        """Register a job with its GPUs; the same job again, e.g. requeued, begins anew unless it runs already."""
        del peer
        chosen = select(self.devices, gpus)
        for device in chosen:
            watch = self.watches[device.vendor]
            if watch.problem is not None:
                raise RefusalError(watch.problem.what, remedy=watch.problem.remedy)
        with self._lock:
            known = self.records.get(job)
            if known is not None and known.uid == uid and job in cgroups.jobs_here():
                return {}
            self._remove_region(job)
            record = JobRecord(job, uid, user, account, partition, self.node, time.time())
            for device in chosen:
                cap = self.caps.of(account)
                record.grants.append(
                    Grant(device.index, device.uuid, device.vendor, device.model, device.memory_mib * _MIB)
                )
                if cap is not None:
                    record.note("cap", uuid=device.uuid, bytes=cap)
            record.note("grant", uuids=[device.uuid for device in chosen])
            self.jobs.save(record)
            self.records[job] = record
        for name in {device.vendor for device in chosen}:
            self.watches[name].wanted.set()
        return {}

    def limit(self, *, peer: Peer, job: int, uid: int, whole: bool, gpus: list[int], shards: int) -> dict[str, Any]:
        """Set what the job may hold, as its step says; `region` is where the preloaded library finds it, or None.

        `whole`: the step has all that the job was given. Steps that srun starts each tell their own part of it; the
        largest one is the job's limit, until a whole one tells.
        """
        del peer
        with self._lock:
            record = self.records.get(job)
            if record is None:
                raise RefusalError(
                    f"job {job}: its prolog did not run on this node",
                    remedy="is Prolog=.../sluice-prolog in slurm.conf, and PrologFlags=Alloc?",
                )
            if record.uid != uid:
                raise RefusalError(f"job {job}: of user {record.uid}, not {uid}")
            chosen = select(self.devices, gpus)
            for device in chosen:
                if record.grant_of(device.uuid) is None:
                    raise RefusalError(f"GPU {device.index} is not among those that job {job} was given")
            if shards and len(chosen) != 1:
                raise RefusalError(
                    f"{shards} shards on {len(chosen)} GPUs: Slurm does not tell how many on each",
                    remedy="ask for the memory of one GPU on each node",
                )
            for device in chosen:
                self._limit_device(record, device, shards * _MIB if shards else None, whole)
            self._make_region(record)
            self.jobs.save(record)
            region = self._region_folder(job)
            return {"region": str(region) if job in self.regions else None}

    def _limit_device(self, record: JobRecord, device: NodeDevice, asked: int | None, whole: bool) -> None:
        """Find the limit in force: what was asked, and what the tenant may still have of the device."""
        grant = record.grant_of(device.uuid)
        assert grant is not None  # noqa: S101 - the caller has looked
        measured = self.contexts.get(device.kind)
        if measured is not None:
            grant.total = measured["total"]
        if asked is not None:
            if asked > grant.total:
                raise RefusalError(f"{format_mib(asked // _MIB)} asked of a GPU with {format_mib(grant.total // _MIB)}")
            grant.asked = asked if whole or grant.asked is None else max(asked, grant.asked)
        bound = grant.asked
        cap = self.caps.of(record.account)
        if cap is not None:
            others = sum(
                other.limit or 0
                for one in self.records.values()
                if one.account == record.account and one.job != record.job
                for other in one.grants
                if other.uuid == device.uuid
            )
            bound = min(bound if bound is not None else grant.total, max(0, cap - others))
            if bound <= (measured["context"] if measured else 0):
                raise RefusalError(
                    f"account {record.account} may have {format_mib(cap // _MIB)} of a GPU, and its jobs here have "
                    f"{format_mib(others // _MIB)} of it",
                    remedy="wait until one of them ends, or ask your administrator",
                )
        if bound != grant.limit:
            record.note("limit", uuid=device.uuid, asked=grant.asked, bytes=bound)
        grant.limit = bound

    def _make_region(self, record: JobRecord) -> None:
        """The strongest rung that the node has: the preloaded limiter where the vendor has one, else the watchdog."""
        limited: list[limit.Device] = []
        for grant in record.grants:
            if grant.limit is None:
                continue
            grant.rung = "watchdog"
        if not any(grant.limit is not None and grant.vendor in _LIMITED_VENDORS for grant in record.grants):
            return
        for grant in record.grants:  # a GPU that is not in the region would get nothing
            if grant.vendor not in _LIMITED_VENDORS:
                continue
            device = self.devices[grant.index]
            measured = self.contexts.get(device.kind)
            if measured is None:
                raise RefusalError(
                    f"{device.model}: the size of a driver context is not known, so that no limit can be set",
                    remedy="see the agent's log; restart sluice-agent when the driver works",
                )
            limited.append(
                limit.Device(
                    total=measured["total"],
                    limit=grant.limit if grant.limit is not None else measured["total"],
                    context=measured["context"],
                    uuid=device.uuid if grant.vendor == "nvidia" else "",
                    pci=device.pci,
                )
            )
            if grant.limit is not None:
                grant.rung = "limiter"
        folder = self._region_folder(record.job)
        region = self.regions.get(record.job)
        if region is None:
            self._remove_region(record.job)  # of an agent that was killed before it wrote down that it made it
            limit.create(folder, limited, record.uid)
            self.regions[record.job] = limit.Region(folder)
            return
        for index, (old, new) in enumerate(zip(region.devices, limited, strict=True)):
            if old.limit != new.limit:
                region.set_limit(index, new.limit)

    def device_files(self, *, peer: Peer) -> dict[str, Any]:
        """The files that tell which devices a process may open."""
        del peer
        return {"files": [device.own_file for device in self.devices]}

    def task(self, *, peer: Peer, open: list[str]) -> dict[str, Any]:
        """Check what a task can open against what its job was given; what its environment should have beside."""
        place = cgroups.place_of(peer.pid)
        record = None if place is None else self.records.get(place.job)
        if place is None or record is None:
            raise RefusalError("this is no task of a job with GPUs on this node")
        if peer.uid not in (0, record.uid):
            raise RefusalError(f"job {record.job}: not yours")
        granted = {self.devices[grant.index].own_file for grant in record.grants}
        strange = sorted(set(open) - granted)
        if strange:
            with self._lock:
                record.note("refuse", step=place.step, open=strange[:16])
                self.jobs.save(record)
            raise RefusalError(
                f"job {record.job} can open {', '.join(strange[:4])}, which it was not given",
                remedy="set ConstrainDevices=yes in cgroup.conf, and see: sluice doctor",
            )
        near = [self.devices[grant.index] for grant in record.grants if self.devices[grant.index].own_file in open]
        return {"export": hints(near)}

    def epilog(self, *, peer: Peer, job: int) -> dict[str, Any]:
        """End what is left of a job, wait until its memory is free, remove its limits, write its record."""
        del peer
        with self._lock:
            record = self.records.get(job)
        if record is None:  # taken back already, or its prolog never ran
            return {"unclean": []}
        unclean = self._free(record)
        self._take_back(record, unclean)
        return {"unclean": list(unclean.values())}

    def _take_back(self, record: JobRecord, unclean: dict[str, str]) -> None:
        """Write a job's record and remove its limits; killed half-way, it is all done again."""
        with self._lock:
            self._collect(record)
            record.ended = time.time()
            for grant in record.grants:
                grant.clean = grant.uuid not in unclean
            record.note("return", uuids=[grant.uuid for grant in record.grants if grant.clean])
            self.store.save(record)
            self._remove_region(record.job)
            self.jobs.remove(record.job)
            self.records.pop(record.job, None)

    def _free(self, record: JobRecord) -> dict[str, str]:
        """Kill the job's GPU processes until none is left; by device, why it is not clean."""
        deadline = time.monotonic() + self.settings.memory_wait
        watches = [self.watches[name] for name in {grant.vendor for grant in record.grants} if name in self.watches]
        strays: set[int] = set()
        while True:
            for watch in watches:
                self._await_sample(watch, deadline)
            with self._lock:
                holders = {
                    (uuid, pid)
                    for watch in watches
                    for uuid, pid in watch.held
                    if (place := cgroups.place_of(pid)) is not None and place.job == record.job
                }
                residue = self._residue(record)
            for _, pid in holders:
                if pid not in strays:
                    strays.add(pid)
                    record.note("stray", pid=pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not (holders or residue) or time.monotonic() >= deadline:
                break
        unclean = residue | {
            uuid: f"GPU {uuid}: process {pid} of job {record.job} cannot be ended; see dmesg" for uuid, pid in holders
        }
        for watch in watches:
            if watch.problem is not None:
                for grant in record.grants:
                    if self.watches.get(grant.vendor) is watch:
                        unclean.setdefault(grant.uuid, f"GPU {grant.uuid}: {watch.problem}")
        return unclean

    def _residue(self, record: JobRecord) -> dict[str, str]:
        """The job's GPUs that no other job has and that have more in use by no process than when it came."""
        found = {}
        shared = {grant.uuid for one in self.records.values() if one.job != record.job for grant in one.grants}
        for grant in record.grants:
            watch = self.watches.get(grant.vendor)
            if watch is None or grant.foreign is None or grant.uuid in shared or grant.uuid not in watch.foreign:
                continue
            left = watch.foreign[grant.uuid] - grant.foreign
            if left > _RESIDUE:
                size = format_mib(left // _MIB)
                found[grant.uuid] = f"GPU {grant.uuid}: {size} in use by no process since job {record.job}; reset it"
        return found

    def _await_sample(self, watch: Watch, deadline: float) -> None:
        """Wait for a sample that began after now."""
        with self._sampled:
            wanted = watch.samples + 2  # the next one may have begun already
            watch.wanted.set()
            while watch.samples < wanted and time.monotonic() < deadline and watch.problem is None:
                watch.wanted.set()
                self._sampled.wait(0.1)

    def status(self, *, peer: Peer) -> dict[str, Any]:
        """What the agent knows, for `sluice agent status`."""
        del peer
        with self._lock:
            return {
                "node": self.node,
                "devices": [
                    {"index": device.index, "uuid": device.uuid, "model": device.model, "file": device.own_file}
                    for device in self.devices
                ],
                "vendors": {name: str(watch.problem or "ok") for name, watch in self.watches.items()},
                "policy": str(self.caps.problem or "ok"),
                "jobs": [json.loads(record.to_json()) for record in self.records.values()],
            }

    # ---- regions ----

    def _region_folder(self, job: int) -> Path:
        return self.limits / f"job_{job}"

    def _remove_region(self, job: int) -> None:
        region = self.regions.pop(job, None)
        if region is not None:
            region.close()
        limit.remove(self._region_folder(job))

    def _collect(self, record: JobRecord) -> None:
        """Take the limiter's figures into the record; damaged ones are left out, as the tenant can damage them."""
        region = self.regions.get(record.job)
        if region is None:
            return
        limited = [grant for grant in record.grants if grant.vendor in _LIMITED_VENDORS]
        for index, grant in enumerate(limited):
            try:
                usage = region.usage(index)
            except CoreError as error:
                record.note("refuse", why=one_line(str(error)))
                return
            grant.peak = max(grant.peak, min(usage.peak, grant.total))
            grant.refused = usage.refused

    # ---- the watchdog ----

    def _watch(self, watch: Watch) -> None:
        """Sample one vendor for ever."""
        used = True  # a prolog or epilog wants to know, or nobody is kept waiting
        while not self._stopping.is_set():
            try:
                answer = watch.worker.ask(do="sample", used=used)
            except SluiceError as error:
                self._failed(watch, error)
            else:
                self._sample(watch, answer["usage"], answer.get("used"))
            busy = any(
                grant.vendor == watch.worker.vendor for one in list(self.records.values()) for grant in one.grants
            )
            asked = watch.wanted.wait(self.settings.period if busy else self.settings.idle_period)
            if asked:
                watch.wanted.clear()
            used = asked or not busy

    def _failed(self, watch: Watch, error: SluiceError) -> None:
        with self._sampled:
            if watch.problem is None:
                watch.since = time.time()
                log("problem", vendor=watch.worker.vendor, what=error.what, remedy=error.remedy)
            watch.problem = error
            self._sampled.notify_all()
        self._stopping.wait(1.0)

    def _sample(self, watch: Watch, usage: Iterable[tuple[str, int, int]], used: dict[str, int] | None) -> None:
        listed = [(str(uuid), int(pid), int(size)) for uuid, pid, size in usage]
        with self._sampled:
            if watch.problem is not None:
                log("recovered", vendor=watch.worker.vendor, seconds=round(time.time() - watch.since))
                watch.problem = None
            watch.held = {(uuid, pid): size for uuid, pid, size in listed}
            if used is not None:
                self._note_foreign(watch, used)
            watch.samples += 1
            peaks = {job: [grant.peak for grant in record.grants] for job, record in self.records.items()}
            acts = list(judge(listed, self.records, cgroups.place_of)) if listed and self.records else []
            for job, record in self.records.items():
                if [grant.peak for grant in record.grants] != peaks[job]:
                    with suppress(OSError):  # a full /run must not stop the watchdog
                        self.jobs.save(record)
            for region in self.regions.values():
                with suppress(CoreError):
                    region.reap()
            self._sampled.notify_all()
        for act in acts:
            self._do(act)

    def _note_foreign(self, watch: Watch, used: dict[str, int]) -> None:
        """Remember what is in use by no process; of a job that is new here, as what it found."""
        for uuid, size in used.items():
            watch.foreign[uuid] = max(0, size - sum(held for (of, _), held in watch.held.items() if of == uuid))
        for record in self.records.values():
            for grant in record.grants:
                if grant.foreign is None:
                    grant.foreign = watch.foreign.get(grant.uuid)

    def _do(self, act: Act) -> None:
        """Warn, or end: the line first, as the processes' output goes with them."""
        device = next((one for one in self.devices if one.uuid == act.uuid), None)
        name = act.uuid if device is None else f"{device.own_file} ({device.model})"
        charged, most = format_mib(-(-act.charged // _MIB)), format_mib(act.limit // _MIB)
        text = f"job {act.job}: {charged} of GPU memory on {name}, limit {most}"
        ending = act.action == "end"
        told = notice.tell(act.pids, text + (f"; step {act.step} is ended" if ending else ""))
        killed = 0
        if ending:
            for pid in cgroups.processes_of(act.job, act.step):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        with self._lock:
            record = self.records.get(act.job)
            if record is None:
                return
            grant = record.grant_of(act.uuid)
            if grant is not None:
                grant.warned = True
            record.note(act.action, step=act.step, uuid=act.uuid, charged=act.charged, limit=act.limit, told=told)
            with suppress(OSError):  # a full /run must not stop the watchdog
                self.jobs.save(record)
        log(act.action, job=act.job, step=act.step, gpu=act.uuid, charged=act.charged, limit=act.limit, killed=killed)


def hints(devices: list[NodeDevice]) -> dict[str, str]:
    """Variables for a task: the NUMA nodes, cores and RDMA interfaces near its GPUs, in the libraries' own words."""
    export: dict[str, str] = {}
    if not devices:
        return export
    nodes = sorted({device.numa_node for device in devices if device.numa_node is not None})
    cores = list(dict.fromkeys(device.cores for device in devices if device.cores))
    nics = list(dict.fromkeys(nic for device in devices for nic in device.nics[:1]))
    if nodes:
        export["SLUICE_GPU_NUMA"] = ",".join(map(str, nodes))
    if cores:
        export["SLUICE_GPU_CORES"] = ",".join(cores)
    if nics:
        export["SLUICE_GPU_NICS"] = ",".join(nics)
        export["NCCL_IB_HCA"] = "=" + ",".join(nics)  # RCCL reads the same
    if any(device.vendor == "nvidia" for device in devices):
        export["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which Slurm counts them
    return export


def _logged(request: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request.items() if key in ("job", "uid", "gpus", "shards", "whole", "open")}


__all__ = ["Agent", "Peer", "RefusalError", "Settings", "hints"]
