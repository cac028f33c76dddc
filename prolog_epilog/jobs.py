"""A job's life on the node, driven by its prolog, tasks and epilog: registered, limited, checked, taken back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from policy.node_limits import NodeLimits
from prolog_epilog import binding, cgroups
from prolog_epilog.checkpoint.gpus import Gpu
from prolog_epilog.contexts import Contexts
from prolog_epilog.devices import NodeDevice, select
from prolog_epilog.gpu_reset import GpuReset
from prolog_epilog.hints import OF_LIBRARIES, hints, without_own
from prolog_epilog.nccl_topology import Topologies
from prolog_epilog.power.keeper import Plan, PowerKeeper
from prolog_epilog.profiles import Profiles
from prolog_epilog.rdma import RdmaBounds
from prolog_epilog.reclaim import Reclaim
from prolog_epilog.refusals import Blame, Refusal
from prolog_epilog.regions import Regions
from prolog_epilog.roles import Given, Layout, Step, narrowed
from prolog_epilog.rungs.ladder import Ladder
from prolog_epilog.server import Peer, Server
from prolog_epilog.state import MIB, RefusalError, State
from prolog_epilog.watching import Watcher
from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.core.errors import CoreError
from sluice.exchange.record import Grant, JobRecord

_DRIVER_SECONDS = 8.0  # a driver that is slow once is asked again, rather than the node drained
_SETTLED_SECONDS = 30.0  # after its prolog a job has a process, that of its extern step
_PERCENT = re.compile(r"100|[1-9][0-9]?")  # as job_submit/sluice writes it (slurm_plugin/rules/options.c)
_LEFTOVERS = (SluiceError, CoreError, OSError, RecursionError, ValueError)


def read_share(text: str) -> int:
    """Percent of `--gpu-share`, as job_submit/sluice writes it. Raises RefusalError for what it would never write.

    Where that plugin is not loaded the text is the user's own.
    """
    if not _PERCENT.fullmatch(text):
        raise RefusalError(
            f"--gpu-share={text[:32]!r} is not a number from 1 to 100",
            Refusal.SHARE_UNREADABLE,
            remedy="use a whole number of percent, e.g. --gpu-share=50",
        )
    return int(text)


def _to_gpus(devices: Iterable[NodeDevice]) -> list[Gpu]:
    return [Gpu(d.uuid, d.vendor, d.model, d.memory_mib, d.driver_version, d.partition) for d in devices]


def _refuse_again(record: JobRecord) -> None:
    """Raise RefusalError for a job that was refused: nothing of it starts."""
    if record.refused:
        raise RefusalError(f"job {record.job} is refused: {record.refused}", Refusal.JOB_REFUSED)


def _why_unsaved(record: JobRecord, region: Path | None) -> str:
    """Why a job that is held so cannot be saved as it runs; empty: it can."""
    if region is not None:
        return "it has a part of a GPU, whose state cannot be saved"
    if record.share_by == "mps" or any(grant.rung == "mps" for grant in record.grants):
        return "its GPU is shared by MPS, with which its state cannot be saved"
    return ""


class Jobs:
    """The jobs with GPUs on this node."""

    def __init__(
        self,
        state: State,
        watcher: Watcher,
        contexts: Contexts,
        regions: Regions,
        ladder: Ladder,
        gpu_reset: GpuReset,
        power: PowerKeeper,
        profiles: Profiles,
        topologies: Topologies,
    ) -> None:
        self._state = state
        self._watcher = watcher
        self._contexts = contexts
        self._regions = regions
        self._ladder = ladder
        self._gpu_reset = gpu_reset
        self._power = power
        self._profiles = profiles
        self._topologies = topologies
        self._reclaim = Reclaim(state, watcher)
        self.rdma = RdmaBounds(NodeLimits)  # none, until the agent says which
        self.on_opened: Callable[[JobRecord, Sequence[str]], None] = lambda record, nics: None  # of a step, by RDMA
        self.on_prolog: list[Callable[[list[NodeDevice]], None]] = []  # each may refuse a job these devices
        self.preflight_s: Callable[[], int] = lambda: 0  # of a job's preflight at most; 0: there is none
        self.preflight_alone: Callable[[JobRecord], bool] = lambda _: False  # also where the job has this node alone
        self.interface: Callable[[], str] = lambda: ""  # by which other nodes reach this one; empty: not known
        self.on_end: list[Callable[[JobRecord], None]] = []  # gets a job's record before it is written, locked
        self.on_unwritten: Callable[[], None] = lambda: None  # called when a record has to be written later
        self.on_refused: Callable[[JobRecord, str], None] = lambda *_: None  # is to requeue it held; raises OSError
        self.on_skipped: Callable[[int], None] = lambda _: None  # is to requeue it; raises OSError
        self.unsaved: Callable[[int], str] = lambda _: ""  # why a job cannot be saved as it runs; empty: it can
        self.on_unsaved: Callable[[int, str], None] = lambda *_: None
        self.prologs_come: Callable[[], bool] = lambda: False  # whether slurmd is set up to run them
        self._unwritten: list[JobRecord] = []  # of jobs that ended
        self._inherited: set[int] = set()  # of an earlier agent, without a request since

    def answer_to(self, server: Server) -> None:
        """Register the requests of the programs in `prolog_epilog/programs`, and of `sluice agent status`."""
        server.add("prolog", self.prolog)
        server.add("limit", self.limit)
        server.add("epilog", self.epilog)
        server.add("status", self.status)
        server.add("devices", self.device_files, root_only=False, quiet=True)
        server.add("task", self.task, root_only=False)

    def take_over(self) -> None:
        """Continue with the jobs of an earlier agent; write the records of those that ended while there was none."""
        self._unwritten = self._state.ended
        records = list(self._state.records.values())
        for record in records:
            if record.suspect or record.job in self._state.suspects:
                self._note_suspect(record)
            else:
                self._regions.take_over(record.job)
            self._state.guard.watch(record)
        self._inherited = {record.job for record in records}
        self.settle_inherited()
        if records:
            log("take-over", jobs=",".join(str(record.job) for record in records))

    def settle_inherited(self) -> None:
        """A duty: take back jobs that ended while there was no agent, also shortly after their prologs.

        Their epilogs may have given up, and do not run a second time.
        """
        with self._state.lock:
            settled = [
                record
                for job in self._inherited
                if (record := self._state.records.get(job)) is not None and record.age() > _SETTLED_SECONDS
            ]
            running = cgroups.jobs_here() if settled else set()
            for record in settled:
                self._inherited.discard(record.job)
                if record.job not in running:
                    self._take_back(record, {})

    def _note_suspect(self, record: JobRecord) -> None:
        """Attach now, and for later agents."""
        self._state.suspects.add(record.job)
        if not record.suspect:
            record.suspect = True
            self._state.jobs.save(record)

    def prolog(
        self,
        *,
        peer: Peer,
        job: int,
        uid: int,
        user: str,
        account: str,
        partition: str,
        gpus: list[int],
        split: Sequence[Sequence[int]] = (),
        share: str | None = None,
        power: str | None = None,
        planned_power: str | None = None,
        sluid: str = "",
        restarts: int | None = None,
        begun: int | None = None,
        roles: str = "",
    ) -> dict[str, Any]:
        """Register a job with its GPUs; the same job again, e.g. requeued, starts again unless it runs already.

        A job that cannot run because of its user's request is remembered as refused, so that none of its tasks starts.

        `split`: GPUs and how many shards the job has of each, where slurmd passes it. `share`: percent of its GPUs'
        compute time, as the option came to the node; `power` likewise, and `planned_power` as slurmctld set it: watts
        that each of its GPUs may draw. `sluid`: the name of its cgroup, from Slurm 26.05 on. `restarts`,
        `begun`: which run of the job this is, where slurmd passes it. `roles`: the layout of its roles, as slurmctld
        set it. The answer's `preflight`, if there is one: so many seconds at most the job waits for its preflight,
        which is to be asked for; where it has one node only if there is `alone`, too.
        """
        del peer
        if sluid:
            cgroups.name_job(sluid, job)
        chosen = select(self._state.devices, gpus)
        marks = [uptime()]  # between the stages
        deadline = time.monotonic() + _DRIVER_SECONDS
        for vendor in {device.vendor for device in chosen}:
            if (problem := self._watcher.await_answer(self._watcher.watches[vendor], deadline)) is not None:
                raise RefusalError(problem.what, Refusal.DRIVER_SILENT, remedy=problem.remedy)
        marks.append(uptime())
        for function in self.on_prolog:
            function(chosen)
        marks.append(uptime())
        plan = self._power.plan(account, chosen, power, planned_power)
        with self._state.lock:
            known = self._state.records.get(job)
            if known is not None and known.uid == uid and job in cgroups.jobs_here():
                _refuse_again(known)
                return {}
            user, account, partition = one_line(user), one_line(account), one_line(partition)
            record = JobRecord(job, uid, user, account, partition, self._state.node, time.time(), sluid=sluid)
            record.restarts, record.begun, record.started_uptime = restarts, begun, uptime()
            for name, began, ended in zip(("prolog.drivers", "prolog.health"), marks, marks[1:], strict=False):
                record.keep_stage(name, began, ended)
            self._note_roles(record, roles)
            self._begin(record, chosen, split, share, plan, marks[-1])
        try:
            with record.stage("prolog.power"):
                self._power.began(record)
        except RefusalError as error:
            if error.blame is Blame.JOB:
                with self._state.lock:
                    self._turn_away(record, error)
            raise
        seconds = self.preflight_s()
        return {"preflight": seconds, "alone": self.preflight_alone(record)} if seconds else {}

    def _begin(
        self,
        record: JobRecord,
        chosen: list[NodeDevice],
        split: Sequence[Sequence[int]],
        share: str | None,
        plan: Plan,
        checked: float,
    ) -> None:
        """Under the lock: from here on the job is known, and its GPUs are watched for it. Raises RefusalError.

        `checked`: since when, as of `uptime`, it is to be granted.
        """
        self._ladder.remove(record)
        try:
            self._grant(record, chosen, split, share, plan)
        except RefusalError as error:
            if error.blame is Blame.JOB:
                self._turn_away(record, error)
            raise
        self._profiles.make(record)
        record.keep_stage("prolog.grant", checked, uptime())
        self._state.jobs.save(record)
        self._state.records[record.job] = record
        self._inherited.discard(record.job)
        for device in chosen:
            self._watcher.watches[device.vendor].some |= {device.uuid}  # errors from here on are the job's
        for name in {device.vendor for device in chosen}:
            self._watcher.watches[name].look()

    def _grant(
        self,
        record: JobRecord,
        chosen: list[NodeDevice],
        split: Sequence[Sequence[int]],
        share: str | None,
        plan: Plan,
    ) -> None:
        """Give a job its devices, its part of their compute time, and the caps of their power."""
        for device in chosen:
            cap = self._state.caps.of(record.account)
            record.grants.append(Grant(device.index, device.uuid, device.vendor, device.model, device.memory_mib * MIB))
            if cap is not None:
                record.note("cap", uuid=device.uuid, bytes=cap)
        self._grant_split(record, chosen, split)
        if share is not None:
            record.share_percent = read_share(share)
            self._ladder.choose_share(record)
        self._power.give(record, plan)
        record.note("grant", uuids=[device.uuid for device in chosen])

    def _note_roles(self, record: JobRecord, roles: str) -> None:
        """Keep the layout of a job's roles; one that cannot be read is none."""
        if not roles:
            return
        try:
            Layout.read(roles)
        except ValueError as error:
            record.note("problem", what=f"the layout of its roles: {error}")
            return
        record.roles = roles

    def _turn_away(self, record: JobRecord, error: RefusalError) -> None:
        """Remember a job as refused: it has nothing here, and is to wait for its user. Raises OSError."""
        record.grants, record.split, record.share_percent = [], False, None
        record.refused = one_line(str(error), limit=512)
        record.note("refuse", why=record.refused)
        self.on_refused(record, record.refused)
        self._state.jobs.save(record)
        self._state.records[record.job] = record

    def _grant_split(self, record: JobRecord, chosen: list[NodeDevice], split: Sequence[Sequence[int]]) -> None:
        """Remember how much the job has of each GPU, so that the watchdog holds it before any step sets limits."""
        known = {int(index): int(shards) for index, shards in split}
        record.split = bool(known) and set(known) == {device.index for device in chosen}
        for device in chosen if record.split else []:
            with suppress(RefusalError):  # over its tenant's cap: its tasks are refused, with the reason
                self.limit_device(record, device, known[device.index] * MIB, True)

    def limit(
        self,
        *,
        peer: Peer,
        job: int,
        uid: int,
        whole: bool,
        gpus: list[int],
        shards: int,
        open: list[str],
        nics: Sequence[str] | None = None,
        saved: bool = False,
    ) -> dict[str, Any]:
        """Set what the job may hold, as its step requests; `region` is where the preloaded library finds it, or None.

        `whole`: the step has all that the job was given. Steps that srun starts each name their own part of it; the
        largest one is the job's limit, until a whole one comes. `open` and `nics`: what root can open in the task's
        cgroup; None: a program of an earlier version does not say. `saved`: the job is to be saved as it runs
        (`--checkpoint=system`); `saves` says whether it can be.
        """
        began = uptime()
        why = self.unsaved(job) if saved else ""  # the driver may take its time
        with self._state.lock:
            record = self._state.records.get(job)
            if record is None:
                raise self._no_prolog(job)
            if record.uid != uid:
                raise RefusalError(f"job {job}: of user {record.uid}, not {uid}", Refusal.WRONG_USER)
            if record.refused:  # a controller that forgot the start starts it again, and slurmd runs no second prolog
                self.on_refused(record, record.refused)
            _refuse_again(record)
            if job in self._state.suspects:
                raise RefusalError(f"job {job}: the node agent died while it read this job's data", Refusal.SUSPECT)
            place = cgroups.place_of(peer.pid)
            if place is not None:
                cgroups.take_steps(place)
            self._refuse_strange(record, place, open)
            chosen = select(self._state.devices, gpus)
            for device in chosen:
                if record.grant_of(device.uuid) is None:
                    raise RefusalError(f"GPU {device.index} was not given to job {job}", Refusal.GPU_NOT_GIVEN)
            if shards and len(chosen) != 1 and not record.split:
                raise RefusalError(
                    f"{shards} shards on {len(chosen)} GPUs: Slurm does not report how many on each",
                    Refusal.SHARDS_NOT_SPLIT,
                    remedy="ask for the memory of one GPU on each node, or see docs/node-agent.md: Setting it up",
                )
            for device in chosen:
                self.limit_device(record, device, shards * MIB if shards and not record.split else None, whole)
            self._ladder.hold(record)
            self._topologies.write(record, open, nics or ())
            self.rdma.hold(record, place, nics or ())
            if nics is not None:
                self.on_opened(record, nics)
            self._watch_over(record, peer)
            region = self._regions.of(job)
            if saved:
                record.unsaved = _why_unsaved(record, region) or why
            record.keep_stage("limits", began, uptime())
            self._state.jobs.save(record)
        if saved and record.unsaved:
            self.on_unsaved(job, f"cannot be saved as it runs: {record.unsaved}")
        return {"region": None if region is None else str(region), "saves": record.unsaved == ""}

    def gpus_of(self, job: int) -> list[Gpu]:
        """The devices that a job has, for those who save it; no lock: a record's grants are complete before it is
        found."""
        record = self._state.records.get(job)
        return _to_gpus(self._state.devices[grant.index] for grant in record.grants) if record is not None else []

    def gpus_here(self) -> list[Gpu]:
        """All of this node's, for the same."""
        return _to_gpus(self._state.devices)

    def note_unsaved(self, job: int, why: str) -> None:
        """Its state cannot be saved after all."""
        with self._state.lock:
            record = self._state.records.get(job)
            if record is not None:
                record.unsaved = why
                self._state.jobs.save(record)

    def keep_stage(self, job: int, name: str, began: float) -> None:
        """A part of the job's start has ended, which began at that time as of `uptime`.

        On a full /run it is written with the record's next change: the job does not depend on it.
        """
        with self._state.lock:
            record = self._state.records.get(job)
            if record is not None:
                record.keep_stage(name, began, uptime())
                with suppress(OSError):
                    self._state.jobs.save(record)

    def held_by(self, job: int) -> int:
        """The most that a job was seen to hold on its GPUs, in bytes."""
        record = self._state.records.get(job)
        return sum(grant.peak for grant in record.grants) if record is not None else 0

    def _no_prolog(self, job: int) -> RefusalError:
        """A step cannot replace a prolog: a job that slurmd started without one is to start again."""
        if not self.prologs_come():
            return RefusalError(
                f"job {job}: its prolog did not run on this node",
                Refusal.JOB_UNKNOWN,
                remedy="set Prolog=.../sluice-prolog and PrologFlags=Alloc in slurm.conf",
            )
        self.on_skipped(job)
        return RefusalError(f"job {job}: slurmd ran no prolog for it; it is requeued", Refusal.PROLOG_SKIPPED)

    def _watch_over(self, record: JobRecord, peer: Peer) -> None:
        """From now on the guard freezes the job when it is unwatched."""
        folder = cgroups.freezable(peer.pid)
        if folder is not None:
            record.cgroup = str(folder)
        self._state.guard.watch(record)

    def limit_device(self, record: JobRecord, device: NodeDevice, asked: int | None, whole: bool) -> None:
        """Find the limit in force: the smaller of the request and what the tenant may still have of the device."""
        grant = record.grant_of(device.uuid)
        assert grant is not None  # noqa: S101 - the caller has looked
        measured = self._contexts.of(device)
        if measured is not None:
            grant.total = measured["total"]
        if asked is not None:
            if asked > grant.total:
                raise RefusalError(
                    f"{format_mib(asked // MIB)} requested of a GPU with {format_mib(grant.total // MIB)}",
                    Refusal.MORE_THAN_THE_GPU,
                )
            grant.asked = asked if whole or grant.asked is None else max(asked, grant.asked)
        bound = grant.asked
        cap = self._state.caps.of(record.account)
        if cap is not None:
            others = self._held_by_others(record, device)
            bound = min(bound if bound is not None else grant.total, max(0, cap - others))
            if bound <= (measured["context"] if measured else 0):
                raise RefusalError(
                    f"account {record.account} may have {format_mib(cap // MIB)} of a GPU, and its jobs here have "
                    f"{format_mib(others // MIB)} of it",
                    Refusal.OVER_CAP,
                    remedy="wait until one of them ends, or ask your administrator",
                )
        if bound != grant.limit:
            record.note("limit", uuid=device.uuid, asked=grant.asked, bytes=bound)
        grant.limit = bound

    def _held_by_others(self, record: JobRecord, device: NodeDevice) -> int:
        """What the other jobs of the record's account may have of a device, in bytes."""
        return sum(
            grant.limit or 0
            for one in self._state.records.values()
            if one.account == record.account and one.job != record.job
            for grant in one.grants
            if grant.uuid == device.uuid
        )

    def device_files(self, *, peer: Peer) -> dict[str, Any]:
        """The files that show which devices a process may open."""
        del peer
        return {
            "files": [device.own_file for device in self._state.devices],
            "nics": self._state.nics,
            "variables": OF_LIBRARIES,
            "roles": any(record.roles for record in list(self._state.records.values())),
        }

    def task(
        self,
        *,
        peer: Peer,
        open: list[str],
        nics: list[str] | None = None,
        profile: bool = False,
        own: Sequence[str] = (),
        step: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Check what a task can open against what its job was given; the additions to its environment.

        `nics` are the RDMA interfaces that it can open, which are only described to it; None: a program of an earlier
        version does not say. `profile`: its user asks for a profile of it. `own`: variables that its user has set.
        `step`: what the task knows of its step, for its role; the answer's `visible` then are the lists of visible
        devices that it is to have.
        """
        place = cgroups.place_of(peer.pid)
        with self._state.lock:  # a job that ends meanwhile is written for the last time
            record = None if place is None else self._state.records.get(place.job)
            if place is None or record is None:
                raise RefusalError("this is not a task of a job with GPUs on this node", Refusal.NO_TASK)
            if peer.uid not in (0, record.uid):
                raise RefusalError(f"job {record.job}: belongs to another user", Refusal.WRONG_USER)
            _refuse_again(record)
            cgroups.take_steps(place)  # Slurm 22.05 makes a task's folder while the step sets its limit, or after that
            self._refuse_strange(record, place, open)
            self._note_own(record, own)
            role = self._role_of(record, place, Step.of(step or {}), open)
            visible = self._narrow(record, role, open, step or {})
            self._note_binding(record, place, peer.pid, open)
        given = [self._state.devices[grant.index] for grant in record.grants]
        near = hints([device for device in given if device.own_file in open], nics)
        if interface := self.interface():
            near["GLOO_SOCKET_IFNAME"] = interface
        near = without_own(near | self._topologies.exports(record, open, nics or ()), own)
        near |= Layout.read(record.roles).exports(role) if record.roles else {}
        export = near | self._ladder.exports(record) | self._profiles.exports(record, place, profile)
        return {"export": export, "visible": visible}

    def _role_of(self, record: JobRecord, place: cgroups.Place, step: Step, open: list[str]) -> Given | None:
        """The task's role, which the record gets. Raises RefusalError where its step names one that it cannot have."""
        if not record.roles:
            if step.role:
                raise RefusalError(
                    f"--gpu-role={step.role[:16]}: job {record.job} has no roles here",
                    Refusal.ROLE_UNKNOWN,
                    remedy="submit it with --gpu-role=NAME:COUNT,...",
                )
            return None
        own = [grant.index for grant in record.grants if self._state.devices[grant.index].own_file in open]
        role = Layout.read(record.roles).given_to(step, self._state.node, own) if own else None
        if role is not None:
            before = len(record.events)
            record.note("role", step=place.step, role=role.role, gpus=list(role.gpus))
            if len(record.events) != before:  # equal ones, as of a step's other tasks, are counted
                self._state.jobs.save(record)
        return role

    def _narrow(self, record: JobRecord, role: Given | None, open: list[str], step: dict[str, Any]) -> dict[str, str]:
        """Leave of `open` only the role's GPUs; the task's lists of visible devices without the others."""
        visible = step.get("visible")
        if role is None or not isinstance(visible, dict):
            return {}
        own = [grant.index for grant in record.grants if self._state.devices[grant.index].own_file in open]
        open[:] = [self._state.devices[index].own_file for index in role.gpus]
        return narrowed(visible, sorted(own), role.gpus, record.grants[0].vendor)

    def _note_binding(self, record: JobRecord, place: cgroups.Place, pid: int, open: list[str]) -> None:
        """What the task was bound to, next to what is near its GPUs."""
        devices = [self._state.devices[grant.index] for grant in record.grants]
        devices = [device for device in devices if device.own_file in open]
        found = binding.binding_of(pid, devices, self._state.inventory.processors.numa)
        before = len(record.events)
        if found is not None:
            record.note(binding.ACTION, **found.detail(place.step))
        if len(record.events) != before:  # equal ones, as of a step's other tasks, are counted
            self._state.jobs.save(record)

    def _note_own(self, record: JobRecord, own: Sequence[str]) -> None:
        """A user's own settings hold, and may be why a job is slow."""
        names = sorted(set(own) & set(OF_LIBRARIES))
        before = len(record.events)
        if names:
            record.note("own", set=names)
        if len(record.events) != before:
            self._state.jobs.save(record)

    def _refuse_strange(self, record: JobRecord, place: cgroups.Place | None, open: list[str]) -> None:
        """Refuse a task that can open a GPU which its job was not given."""
        given = {self._state.devices[grant.index].own_file for grant in record.grants}
        strange = sorted(set(open) - given)
        if not strange:
            return
        known = {device.own_file for device in self._state.devices}
        before = len(record.events)
        record.note("refuse", step="" if place is None else place.step, open=[one for one in strange if one in known])
        if len(record.events) != before:  # one that was only counted is written with the next
            self._state.jobs.save(record)
        raise RefusalError(
            f"job {record.job} can open {', '.join(strange[:4])}, which it was not given",
            Refusal.GPU_OPEN,
            remedy="set ConstrainDevices=yes in cgroup.conf, and see: sluice doctor",
        )

    def epilog(self, *, peer: Peer, job: int) -> dict[str, Any]:
        """End what is left of a job, wait until its memory is free, remove its limits, write its record."""
        del peer
        with self._state.lock:
            record = self._state.records.get(job)
            self._inherited.discard(job)
        if record is None:  # taken back already, or its prolog never ran
            return {"unclean": []}
        if record.refused:  # it had nothing
            self._take_back(record, {})
            return {"unclean": []}
        with record.stage("epilog.reclaim"):
            self._ladder.stop(record)
            unclean = self._reclaim.free(record)
        with record.stage("epilog.reset"):
            unclean |= self._gpu_reset.reset(record, unclean)
        self._take_back(record, unclean)
        self._power.ended(record)
        return {"unclean": list(unclean.values())}

    def _take_back(self, record: JobRecord, unclean: dict[str, str]) -> None:
        """Write a job's record and remove its limits; killed half-way, it is all done again."""
        began = uptime()
        with self._state.lock:
            with suppress(*_LEFTOVERS):  # the tenant's claims, which say nothing of the GPUs
                self._regions.collect(record)
            record.saved = self._profiles.saved(record)
            self._profiles.retire(record)
            with suppress(*_LEFTOVERS):  # in /run: gone with the next boot at the latest
                self._topologies.retire(record)
            record.end(time.time(), uptime())
            for grant in record.grants:
                grant.clean = grant.uuid not in unclean
            record.note("return", uuids=[grant.uuid for grant in record.grants if grant.clean])
            for function in self.on_end:
                function(record)
            record.keep_stage("epilog.return", began, uptime())
            try:
                self._state.jobs.save(record)  # that it ended
            except OSError as error:  # a full /run: an agent that starts now finds it as running, and ends it again
                log("problem", job=record.job, what=f"{error.filename}: {error.strerror}")
            try:
                self._ladder.remove(record)
            except _LEFTOVERS as error:  # what a tenant left in its job's files is no reason to keep the node
                log("problem", job=record.job, what=f"not removed: {one_line(str(error))}")
            cgroups.forget_job(record.job)
            self._state.guard.forget(record.job)
            self._state.suspects.discard(record.job)
            self._state.records.pop(record.job, None)
            self._unwritten.append(record)
            try:
                self.write_records()
            except OSError as error:
                log("problem", job=record.job, what=f"{error.filename}: {error.strerror}; written when there is room")
                self.on_unwritten()

    def check_limits(self) -> None:
        """A duty: set again what has ended by itself, e.g. a daemon."""
        with self._state.lock:
            records = list(self._state.records.values())
        for record in records:
            faults = self._ladder.look(record)
            with self._state.lock:
                if self._state.records.get(record.job) is not record:
                    continue  # it has ended in the meantime
                before = len(record.events)
                self._ladder.mend(record, faults)
                if len(record.events) != before:
                    self._state.jobs.save(record)

    def write_also(self, records: Iterable[JobRecord]) -> None:
        """Write records of jobs that ended without an epilog, e.g. by a reboot. Raises OSError."""
        with self._state.lock:
            self._unwritten.extend(records)
            self.write_records()

    def write_records(self) -> None:
        """A duty: what could not be written when its job ended, e.g. on a full file system. Raises OSError."""
        with self._state.lock:
            for record in list(self._unwritten):
                self._state.store.save(record)
                self._state.outbox.put(record)
                if record.job not in self._state.records:  # else it was requeued, and runs here again
                    self._state.jobs.remove(record.job)
                self._unwritten.remove(record)

    def status(self, *, peer: Peer) -> dict[str, Any]:
        """What the agent knows, for `sluice agent status`."""
        del peer
        with self._state.lock:
            return {
                "node": self._state.node,
                "devices": [
                    {"index": device.index, "uuid": device.uuid, "model": device.model, "file": device.own_file}
                    for device in self._state.devices
                ],
                "vendors": {name: str(watch.problem or "ok") for name, watch in self._watcher.watches.items()},
                "policy": str(self._state.caps.problem or "ok"),
                "rungs": self._ladder.describe(),
                "jobs": [record.in_short() for record in self._state.records.values()],
            }
