"""Holds GPUs to their power caps, and gives them back the limits that they had before.

The caps follow from the jobs' records, the controllers' order and heat, and the limits from before from the journal: an
agent that is killed at any moment leaves all that the next one needs. Drivers are asked in their own processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policy.node_power import NodePower
from prolog_epilog.devices import NodeDevice
from prolog_epilog.power.heat import Heats
from prolog_epilog.power.journal import Journal
from prolog_epilog.power.rules import JobCap, Wanted, cap_for, job_cap, read_watts, wanted, within
from prolog_epilog.power_limits import PowerLimit
from prolog_epilog.refusals import Refusal
from prolog_epilog.state import RefusalError, State
from prolog_epilog.watching import Watch, Watcher
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.exchange.power import PowerOrder
from sluice.exchange.record import Grant, JobRecord

CHECK_S = 5.0
_ASK_S = 8.0
_UNSURE_S = 15.0  # a call of an agent that was killed may still be on its way in the driver: longer than `_ASK_S`
_HOT = frozenset({"thermal", "hardware"})


@dataclass(frozen=True, slots=True)
class InForce:
    """A GPU now. `limit` None: it has none, or does not answer; `before_mw` None: nothing of ours is in force;
    `jobs_mw`, `planned_mw`: what its jobs may have by their own caps, and what they are held to by those that were
    planned for their start; None: there are none."""

    limit: PowerLimit | None
    energy_mj: int | None
    before_mw: int | None
    why: str
    problem: str
    jobs_mw: int | None
    planned_mw: int | None


@dataclass
class Plan:
    """The caps of a job that is about to start, by device; or why it cannot have them."""

    caps: dict[str, JobCap] = field(default_factory=dict)
    refusal: RefusalError | None = None


class PowerKeeper:
    """The caps of this node's GPUs. Thread-safe."""

    def __init__(
        self,
        state: State,
        watcher: Watcher,
        policy: Callable[[], NodePower],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._watcher = watcher
        self._policy = policy
        self._clock = clock
        self._heats = Heats()
        self._lock = threading.Lock()  # one change at a time; guards all below
        self._journal = Journal(state.settings.run / "agent/power.json")
        self._applied: dict[str, Wanted] = {}
        self._problems: dict[str, str] = {}
        self._logged: dict[str, str] = {}  # for the duty alone
        self._unsure_until = 0.0
        self.on_due: Callable[[], None] = lambda: None  # called when a cap is to change

    def load(self) -> None:
        """What an earlier agent left, its jobs being known. Raises OSError."""
        try:
            self._journal.load()
        except SluiceError as error:
            log("problem", what=error.what, remedy=error.remedy)
        self._heats.load(self._journal.steps)
        try:
            self._keep_lifted(self._journal.order, self._lift(self._journal.order))
        except OSError as error:  # a full /run: the next agent lifts it again
            log("problem", what=f"what an order has lifted is not kept: {error.strerror}")
        if self._journal.before:
            self._unsure_until = self._clock() + _UNSURE_S

    # ---- a job ----

    def plan(self, account: str, chosen: Iterable[NodeDevice], asked: str | None, planned: str | None) -> Plan:
        """What a job is to have, before it is registered; asks drivers only where a cap is possible."""
        plan, policy = Plan(), self._policy()
        try:
            watts = None if asked is None else read_watts(asked)
            budget = None if planned is None else read_watts(planned, "the budget's cap")
            capped = [one for one in chosen if watts or budget or cap_for(policy, one.type, account)]
            with self._lock:
                before = dict(self._journal.before)
            limits = self._read({one.gpu_uuid for one in capped}) if capped else _Read()
            with self._lock:
                before = self._journal.before | before  # what is changed meanwhile is in one of them
            for device in capped:
                limit = limits.of(device.gpu_uuid, asked=watts is not None)
                if limit is not None:
                    site = before.get(device.gpu_uuid, limit.cap_mw)
                    own = job_cap(cap_for(policy, device.type, account), watts, limit, site)
                    plan.caps[device.uuid] = JobCap(own, None if budget is None else within(budget, limit))
        except RefusalError as error:
            plan.refusal = error
        return plan

    def give(self, record: JobRecord, plan: Plan) -> None:
        """Put the caps into the record of a job that starts. Raises its RefusalError."""
        if plan.refusal is not None:
            raise plan.refusal
        for grant in record.grants:
            cap = plan.caps.get(grant.uuid, JobCap())
            grant.power_mw, grant.planned_mw = cap.own, cap.planned
            if cap.own is not None:
                record.note("power", uuid=grant.uuid, watts=cap.own / 1000)
            if cap.planned is not None:
                record.note("power", uuid=grant.uuid, watts=cap.planned / 1000, planned=True)

    def began(self, record: JobRecord) -> None:
        """Before a registered job's tasks start. Raises RefusalError where its caps are not in force."""
        problems = self.settle(self._gpus(record))
        if problems and any(_cap_of(grant) != JobCap() for grant in record.grants):
            said = "; ".join(f"GPU {uuid}: {why}" for uuid, why in problems.items())
            if self._policy_caps(record):
                raise RefusalError(said, Refusal.POWER_NOT_SET)
            raise RefusalError(said, Refusal.POWER_NOT_TAKEN)  # one user's wish takes no node from the others

    def _policy_caps(self, record: JobRecord) -> bool:
        """Whether a cap or a budget of the policy may be what a job's GPUs are capped for."""
        policy = self._policy()
        types = {self._state.devices[grant.index].type for grant in record.grants}
        return policy.report or any(cap_for(policy, one, record.account) for one in types)

    def ended(self, record: JobRecord) -> None:
        """After a job's GPUs were taken back; what cannot be restored now is restored by the duty."""
        self.settle(self._gpus(record))

    def _gpus(self, record: JobRecord) -> set[str]:
        return {self._state.devices[grant.index].gpu_uuid for grant in record.grants}

    # ---- controllers, heat ----

    def obey(self, order: PowerOrder) -> None:
        """Follow an order of the controllers instead of the one before. Raises OSError where it cannot be kept."""
        with self._lock:
            before, self._journal.order = self._journal.order, order
            try:
                self._journal.save()
            except OSError:
                self._journal.order = before
                raise
        log("power-order", number=order.number, gpus=len(order.caps))
        lifted = self._lift(order)
        self.settle({*before.caps, *order.caps})
        self._keep_lifted(order, lifted)

    def _lift(self, order: PowerOrder) -> list[JobRecord]:
        """What was planned for the start of jobs is replaced by the order, on GPUs that have a cap by it; the records
        that this changes."""
        found: list[JobRecord] = []
        with self._state.lock:
            for record in filter(None, map(self._state.records.get, order.lifted)):
                grants = [
                    grant
                    for grant in record.grants
                    if grant.planned_mw is not None and self._state.devices[grant.index].gpu_uuid in order.caps
                ]
                for grant in grants:
                    grant.planned_mw = None
                found += [record] if grants else []
        return found

    def _keep_lifted(self, order: PowerOrder, lifted: Iterable[JobRecord]) -> None:
        """Into the records; the journal then lifts nothing for a later agent, as numbers may be of a later run by then.
        Raises OSError."""
        with self._state.lock:
            for record in lifted:
                if self._state.records.get(record.job) is record:  # not of a later run
                    self._state.jobs.save(record)
        with self._lock:
            if order.lifted:
                self._journal.order = replace(order, lifted=())
                self._journal.save()

    @property
    def order(self) -> PowerOrder:
        """In force."""
        return self._journal.order

    def on_sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """A reader of samples (`Watcher.on_sample`): GPUs with jobs that slow down by heat."""
        del watch
        thermal = self._policy().thermal
        if thermal is None:
            return
        parents = {device.uuid: device.gpu_uuid for device in self._state.devices}
        hot: dict[str, bool] = {}
        try:
            for uuid, sample in answer.get("devices", {}).items():
                gpu = parents.get(uuid)
                if gpu is not None:
                    hot[gpu] = hot.get(gpu, False) or bool(_HOT & set(sample.get("throttle") or ()))
        except (AttributeError, TypeError) as error:  # it runs in the watchdog's thread
            log("problem", what=f"a sample that cannot be read: {error!r}")
        changed = self._heats.look(hot, self._clock(), thermal)
        for gpu, percent in changed.items():
            log("power-heat", gpu=gpu, percent=percent)
        if changed:
            self.on_due()

    # ---- what is in force ----

    def run(self) -> float:
        """A duty: check all that may have a cap, as drivers and people change limits, too. Seconds until the next."""
        busy = self._jobs_of()
        self._heats.keep(busy)
        with self._lock:
            concerned = {*self._journal.before, *self._journal.order.caps, *self._heats.steps()}
        concerned |= {uuid for uuid, caps in busy.items() if any(cap != JobCap() for cap in caps)}
        problems = self.settle(concerned)
        for uuid, why in problems.items():
            if self._logged.get(uuid) != why:
                log("problem", gpu=uuid, what=f"power cap: {why}")
        self._logged = problems
        return 1.0 if problems or self._clock() < self._unsure_until else CHECK_S

    def _jobs_of(self) -> dict[str, list[JobCap]]:
        """The caps of the jobs on each GPU."""
        found: dict[str, list[JobCap]] = {}
        with self._state.lock:
            for record in self._state.records.values():
                for grant in record.grants:
                    found.setdefault(self._state.devices[grant.index].gpu_uuid, []).append(_cap_of(grant))
        return found

    def settle(self, uuids: Iterable[str]) -> dict[str, str]:
        """Bring GPUs to the caps that they are to have; by GPU, why that failed."""
        known = {device.gpu_uuid: device.vendor for device in self._state.devices}
        thermal = self._policy().thermal
        with self._lock:
            busy, steps = self._jobs_of(), self._heats.steps()
            percents = {} if thermal is None else self._heats.percent(thermal)
            mine = {uuid for uuid in uuids if uuid in known and self._is_ours(uuid, busy, steps)}
            read = self._read(mine)
            problems = dict(read.failed)
            for uuid, limit in read.limits.items():
                try:
                    self._journal.keep_steps(steps)
                    site = self._journal.before.get(uuid, limit.cap_mw)
                    order = self._journal.order.caps.get(uuid)
                    order_mw = None if order is None else int(order) * 1000
                    goal = wanted(limit, site, busy.get(uuid, ()), order_mw, percents.get(uuid))
                    self._bring(known[uuid], uuid, limit, goal, site)
                    self._applied[uuid] = goal
                except (SluiceError, OSError) as error:
                    problems[uuid] = str(error)
            for uuid in mine:
                self._problems.pop(uuid, None)
            self._problems |= problems
        return problems

    def _is_ours(self, uuid: str, busy: Mapping[str, list[JobCap]], steps: Mapping[str, int]) -> bool:
        """Whether a GPU may have a cap now, or has one to be restored: others are not asked for."""
        return (
            uuid in self._journal.before
            or uuid in self._journal.order.caps
            or uuid in steps
            or any(cap != JobCap() for cap in busy.get(uuid, ()))
        )

    def _bring(self, vendor: str, uuid: str, limit: PowerLimit, goal: Wanted, site: int) -> None:
        if goal.mw != site:
            self._journal.keep(uuid, site)
        if limit.cap_mw != goal.mw:
            answer = self._ask(vendor, do="set_power_limit", uuid=uuid, mw=goal.mw)
            if "failed" in answer:
                raise SluiceError(f"the {vendor} driver sets no power limit: {answer['failed']}", remedy="see dmesg")
            if abs(answer["cap_mw"] - goal.mw) >= 1000:  # drivers round to what their hardware has
                raise SluiceError(
                    f"{goal.mw / 1000:g} W were set, and {answer['cap_mw'] / 1000:g} W are in force", remedy="see dmesg"
                )
            log("power-cap", gpu=uuid, watts=goal.mw / 1000, why=goal.why or "restored")
        if goal.mw == site and self._clock() >= self._unsure_until:
            self._journal.forget(uuid)

    # ---- drivers ----

    def _ask(self, vendor: str, **request: Any) -> dict[str, Any]:
        return self._watcher.watches[vendor].worker.ask(timeout=_ASK_S, **request)

    def _read(self, uuids: Iterable[str]) -> _Read:
        found = _Read()
        by_vendor: dict[str, list[str]] = {}
        vendors = {device.gpu_uuid: device.vendor for device in self._state.devices}
        for uuid in sorted(uuids):
            by_vendor.setdefault(vendors[uuid], []).append(uuid)
        for vendor, some in by_vendor.items():
            try:
                found.add(self._ask(vendor, do="power_limits", uuids=some))
            except SluiceError as error:
                found.failed |= dict.fromkeys(some, str(error))
        return found

    def look(self) -> dict[str, InForce]:
        """Every GPU now."""
        vendors: dict[str, list[str]] = {}
        for device in self._state.devices:
            vendors.setdefault(device.vendor, []).append(device.gpu_uuid)
        found: dict[str, InForce] = {}
        for vendor, listed in vendors.items():
            uuids, read, energy = list(dict.fromkeys(listed)), _Read(), {}
            try:
                answer = self._ask(vendor, do="power", uuids=uuids)
            except SluiceError as error:
                read.failed = dict.fromkeys(uuids, str(error))
            else:
                read.add(answer)
                energy = answer["energy"]
            busy = self._jobs_of()
            with self._lock:
                for uuid in uuids:
                    limit, before = read.limits.get(uuid), self._journal.before.get(uuid)
                    jobs_mw, planned_mw = _held_to(busy.get(uuid, ()), limit, before)
                    found[uuid] = InForce(
                        limit,
                        energy.get(uuid),
                        before,
                        self._applied.get(uuid, Wanted(0)).why,
                        self._problems.get(uuid, "") or read.failed.get(uuid, ""),
                        jobs_mw,
                        planned_mw,
                    )
        return found


def _cap_of(grant: Grant) -> JobCap:
    return JobCap(grant.power_mw, grant.planned_mw)


def _held_to(caps: Sequence[JobCap], limit: PowerLimit | None, before: int | None) -> tuple[int | None, int | None]:
    """`InForce.jobs_mw` and `planned_mw` of a GPU with jobs of such caps."""
    if limit is None or not any(cap != JobCap() for cap in caps):
        return None, None
    site = limit.cap_mw if before is None else before
    own, now = max(JobCap(cap.own).of(site) for cap in caps), max(cap.of(site) for cap in caps)
    return own if any(cap.own is not None for cap in caps) else None, now if now < own else None


@dataclass
class _Read:
    """What drivers answered, by GPU."""

    limits: dict[str, PowerLimit] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, answer: Mapping[str, Any]) -> None:
        self.limits |= {uuid: PowerLimit(**fields) for uuid, fields in answer["limits"].items()}
        self.unsupported |= answer["unsupported"]
        self.failed |= answer["failed"]

    def of(self, uuid: str, *, asked: bool) -> PowerLimit | None:
        """Its limit; None where it has none and nobody asked for a cap. Raises RefusalError."""
        if uuid in self.unsupported and asked:
            raise RefusalError(
                f"--gpu-power: the power of GPU {uuid} cannot be limited: {self.unsupported[uuid]}",
                Refusal.POWER_UNSUPPORTED,
                remedy="leave the option out, or name another type of GPU",
            )
        if uuid in self.failed:
            raise RefusalError(f"GPU {uuid}: {self.failed[uuid]}", Refusal.POWER_NOT_SET)
        return self.limits.get(uuid)
