"""Power as duties of the controllers' daemon: one decides each second, one stops jobs that give way.

Orders reach nodes with the answers to their reports, so a controller that does not lead orders nothing: nodes do not
ask it. Without a daemon, caps stay as they are and planned starts count as they were last published; a new leader
looks for `LOOK_S` before it decides anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from policy.control_power import ControlBudget, ControlGpu, ControlPower
from policy.live import gpus_of
from policy.node import FILE_NAME, NodePolicyFile
from policy.power import moment, show_watts
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.controllerd.daemon import Duty, Site, of_site
from sluice.controllerd.health.controller import controller_of
from sluice.controllerd.power import lowered, met
from sluice.controllerd.power.caps import HELD
from sluice.controllerd.power.estimates import ANYBODY, Estimates, booked
from sluice.controllerd.power.estimates import FILE_NAME as ESTIMATES
from sluice.controllerd.power.keeper import GUARANTEED, BudgetUse, Decision, Gpu, Keeper, Limit, PowerJob
from sluice.exchange import power_plan
from sluice.exchange.power import FRESH_S, GpuPower, Latest, NodePowers
from sluice.exchange.power_plan import LoweredBudget
from sluice.slurm.answers import Job, Node

PERIOD_S = 1.0
LOOK_S = FRESH_S + 1.0
_GAP_S = 10.0  # without a step
_NODES_S = 30.0
_SAVE_S = 60.0
_STOP_S = 0.5
_COMMAND_S = 20.0
_MOST_ASKED = 500
_MOST_SAVING_S = 60.0  # less than the keeper's STOPPING_S

log = logging.getLogger("sluice.power")


@dataclass(frozen=True, slots=True)
class _Saving:
    """A job that was asked to save before it gives way."""

    asked: float  # Unix time
    until: float  # monotonic
    why: str


class PowerControl:
    """What the duties and the requests share."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.powers = NodePowers()
        self._lock = threading.RLock()
        self._keeper: Keeper | None = None  # None: it looks
        self._estimates: Estimates | None = None
        self._saved = 0.0
        self._jobs: dict[int, Job] = {}
        self._nodes: tuple[float, dict[str, tuple[Node, dict[str, int]]]] = (-_NODES_S, {})  # with GPUs by type
        self._stepped = -_GAP_S
        self._began = 0.0
        self._uses: tuple[BudgetUse, ...] = ()
        self._gpus: list[Gpu] = []
        self._reported: dict[str, GpuPower] = {}
        self._to_stop: deque[tuple[int, str]] = deque()
        self._saving: dict[int, _Saving] = {}
        self._stopped_total = 0

    @cached_property
    def policy_file(self) -> NodePolicyFile:
        """Raises SluiceError where its folder is not known yet."""
        return NodePolicyFile(self.site.conf_folder / FILE_NAME)

    @property
    def policy(self) -> ControlPower:
        """In force."""
        return self.policy_file.current().power_control

    # ---- each second ----

    def step(self, site: Site) -> None:
        """Decide, and let nodes and the planner know."""
        policy = self.policy
        plan = site.state_save / power_plan.FILE_NAME
        if not policy.budgets:
            if plan.exists():
                power_plan.write(plan, power_plan.render((), {}, {}))
            (site.state_save / met.FILE_NAME).unlink(missing_ok=True)  # one that is added later is not lowered
            self._forget_orders()
            with self._lock:
                self._gpus = []
                self._keeper = None
            return
        with self._lock:
            now = time.monotonic()
            self._look_at_nodes(now)
            latest = self.powers.latest()
            self._look(latest)
            if self._ceased(now):
                self._begin(now)
            elapsed, self._stepped = now - self._stepped, now
            self._gpus = self._read(policy, latest)
            self._learn(policy, min(elapsed, 2 * PERIOD_S))
            if now - self._began < LOOK_S:
                return
            jobs = {number: self._power_job(policy, job) for number, job in self._jobs.items()}
            limits = self._limits(policy, latest)
            keeper = self._taking_over(latest)
            decision = keeper.step(now, self._gpus, jobs, limits)
            if not site.leads():
                return
            self._uses = decision.uses
            for node in latest:
                self.powers.order(node, decision.caps.get(node, {}), decision.lifted.get(node, ()))
            self._to_stop.extend((job, self._words(decision.uses)) for job in decision.stop)
            met.write(site.state_save / met.FILE_NAME, keeper.met)  # and the plan: budgets are kept on a full disk, too
            power_plan.write(plan, self._plan(policy, decision))
            if now - self._saved >= _SAVE_S:
                self._saved = now
                self._known_estimates().save(site.state_save / ESTIMATES)

    def _ceased(self, now: float) -> bool:
        """Whether this daemon does not lead, or did not meanwhile: what it knows is of then."""
        return now - self._stepped > _GAP_S

    def _begin(self, now: float) -> None:
        """This daemon begins to lead."""
        self._began = now
        self._stepped = now
        self._keeper = None
        self._estimates = None

    def _taking_over(self, latest: Mapping[str, Latest]) -> Keeper:
        """What nodes have by orders, when it has looked long enough, stays until something else is decided."""
        if self._keeper is None:
            self._keeper = Keeper()
            orders = {
                f"{node}/{gpu.uuid}": gpu.cap_w
                for node, one in latest.items()
                for gpu in one.report.gpus
                if gpu.why == "order" and gpu.cap_w is not None
            }
            self._keeper.adopt(orders, met.read(self.site.state_save / met.FILE_NAME))
        return self._keeper

    def _known_estimates(self) -> Estimates:
        if self._estimates is None:
            path = self.site.state_save / ESTIMATES
            try:
                self._estimates = Estimates.load(path)
            except SluiceError as error:
                log.error("%s", one_line(str(error)))
                self._estimates = Estimates()
        return self._estimates

    def _forget_orders(self) -> None:
        for node in self.powers.latest():
            self.powers.order(node, {})

    def _look_at_nodes(self, now: float) -> None:
        """Now and then; of a node that is gone or switched off no report counts any more."""
        if now - self._nodes[0] < _NODES_S:
            return
        nodes = {one.name: (one, gpus_of(one)[0]) for one in self.site.client.nodes()}
        self._nodes = now, nodes
        for name, one in self.powers.latest().items():
            if not one.fresh and (name not in nodes or "powered_down" in nodes[name][0].flags):
                self.powers.forget(name)

    def _look(self, latest: Mapping[str, Latest]) -> None:
        """Jobs that nodes report and are not known yet; those that are on no GPU any more are forgotten."""
        here = {job for one in latest.values() for gpu in one.report.gpus for job in gpu.jobs}
        self._jobs = {number: job for number, job in self._jobs.items() if number in here}
        new = sorted(here - self._jobs.keys())[:_MOST_ASKED]
        if new:
            self._jobs |= {job.id: job for job in self.site.client.jobs(ids=new, states=["all"])}

    def _read(self, policy: ControlPower, latest: Mapping[str, Latest]) -> list[Gpu]:
        """All GPUs that nodes have reported, with the watts of their class."""
        found: list[Gpu] = []
        self._reported = {}
        for node, one in latest.items():
            for gpu in one.report.gpus:
                kind = self._class_of(policy, node, gpu)
                default = gpu.default_w or (kind.default if kind else 0)
                if not default or gpu.cap_w is None:
                    continue  # its driver has no power limits
                least = gpu.least_w or (kind.least if kind else default)
                key = f"{node}/{gpu.uuid}"
                self._reported[key] = gpu
                want = gpu.jobs_w or gpu.before_w or (None if gpu.why else gpu.cap_w) or default
                lowest = min(want, max(least, default * policy.lowest_percent / 100))
                found.append(
                    Gpu(
                        node=node,
                        uuid=gpu.uuid,
                        cap_w=gpu.cap_w,
                        least_w=least,
                        lowest_w=lowest,
                        want_w=want,
                        idle_w=max(kind.idle if kind else 0, gpu.power_w or 0 if not gpu.jobs else 0),
                        power_w=gpu.power_w or 0.0,
                        booked_w=self._booked(kind, gpu, lowest),
                        jobs=gpu.jobs,
                        silent=not one.fresh,
                        planned_w=gpu.planned_w,
                    )
                )
        return found

    def _class_of(self, policy: ControlPower, node: str, gpu: GpuPower) -> ControlGpu | None:
        """Of a node with several types, the one with the GPU's default limit."""
        known = self._nodes[1].get(node)
        kinds = [policy.classes[kind] for kind in (known[1] if known else ()) if kind in policy.classes]
        return next((kind for kind in kinds if kind.default == gpu.default_w), kinds[0] if kinds else None)

    def _booked(self, kind: ControlGpu | None, gpu: GpuPower, lowest: float) -> float:
        """What the planner counted the jobs of a GPU with at least, when they started."""
        users = {self._jobs[job].uid for job in gpu.jobs if job in self._jobs}
        known = [self._known_estimates().watts(user, kind.name) for user in users] if kind else []
        return min((booked(watts, lowest, lowest, binding=True) for watts in known), default=lowest)

    def _learn(self, policy: ControlPower, seconds: float) -> None:
        """From GPUs with jobs of one user, where no cap held them back."""
        for gpu in self._gpus:
            users = {self._jobs[job].uid for job in gpu.jobs if job in self._jobs}
            default = self._reported[gpu.key].default_w or gpu.want_w
            held = gpu.cap_w < default and gpu.power_w >= HELD * gpu.cap_w
            kind = self._class_of(policy, gpu.node, self._reported[gpu.key])
            if len(users) == 1 and kind is not None and not held and not gpu.silent:
                self._known_estimates().learn(users.pop(), kind.name, gpu.power_w, seconds, time.time())

    def _power_job(self, policy: ControlPower, job: Job) -> PowerJob:
        order = {name: rank for rank, name in enumerate(policy.lower_first)}
        rank = GUARANTEED if job.qos in policy.guaranteed else order.get(job.qos, len(order))
        saved = controller_of(self.site).saved(job.id) or 0.0
        return PowerJob(job.id, rank, max(float(job.start_time or 0), saved))

    def _limits(self, policy: ControlPower, latest: Mapping[str, Latest]) -> list[Limit]:
        now = time.time()
        low = self._lowered(now)
        found = []
        for budget in policy.budgets:
            parts = {gpu.key: part for gpu in self._gpus if (part := self._part(budget, gpu)) > 0}
            planned, _ = budget.watts_at(now)
            watts = min(planned, low[budget.name].watts) if budget.name in low else planned
            found.append(Limit(budget.name, watts, parts, self._unknown_w(policy, budget, latest)))
        return found

    def _part(self, budget: ControlBudget, gpu: Gpu) -> float:
        if budget.nodes:
            return 1.0 if budget.has_node(gpu.node) else 0.0
        accounts = [self._jobs[job].account for job in gpu.jobs if job in self._jobs]
        return sum(account in budget.accounts for account in accounts) / len(gpu.jobs) if gpu.jobs else 0.0

    def _unknown_w(self, policy: ControlPower, budget: ControlBudget, latest: Mapping[str, Latest]) -> float:
        """What nodes may draw that have reported nothing yet: allocated GPUs their default, others what they idle."""
        total = 0.0
        for name, (node, kinds) in self._nodes[1].items() if budget.nodes else ():
            if name in latest or not budget.has_node(name) or node.flags & {"powered_down", "not_responding"}:
                continue
            for kind, count in kinds.items():
                if one := policy.classes.get(kind):
                    used = min(
                        count, node.tres_allocated.get(f"gres/gpu:{kind}", node.tres_allocated.get("gres/gpu", 0))
                    )
                    total += used * one.default + (count - used) * one.idle
        return total

    def _plan(self, policy: ControlPower, decision: Decision) -> str:
        """Where not all can have what they want, jobs start with the policy's lowest cap at most: more of them run."""
        bound = {
            kind.name
            for gpu in self._gpus
            if gpu.key in decision.binding and (kind := self._class_of(policy, gpu.node, self._reported[gpu.key]))
        }
        classes = {kind.name: kind for kind in policy.classes.values()}
        lowest = {name: max(one.least, one.default * policy.lowest_percent / 100) for name, one in classes.items()}
        rows: dict[tuple[int | None, str], float] = {(None, name): lowest[name] for name in bound & classes.keys()}
        for user, name, watts in self._known_estimates().known():
            if name in classes:
                row = None if user == ANYBODY else user, name
                rows[row] = booked(watts, lowest[name], classes[name].default, binding=name in bound)
        return power_plan.render(
            ((user, name, watts) for (user, name), watts in rows.items()),
            decision.published,
            self._lowered(time.time()),
        )

    def _words(self, uses: Iterable[BudgetUse]) -> str:
        return ", ".join(f"budget {one.name}: {show_watts(one.watts)}" for one in uses)

    # ---- jobs that give way ----

    def stop(self, site: Site) -> None:
        """Those that save their state are asked to, and have until then or for a bounded time, while caps keep the
        budget."""
        policy = self.policy_file.current().checkpoint
        now, clock = time.time(), time.monotonic()
        with self._lock:
            new = self._news(site, clock)
            wait = self._keeper is not None and not self._keeper.exceeded
        seconds = min(policy.before_requeue_s, _MOST_SAVING_S) if wait else 0.0
        savers = {job.id: job for job, _ in new if seconds and policy.rhythm(job.account, job.comment) is not None}
        self._saving |= {job.id: _Saving(now, clock + (job.id in savers) * seconds, why) for job, why in new}
        for number, one in list(self._saving.items()):
            saved = controller_of(site).saved(number) or 0.0
            if saved >= one.asked or clock >= one.until or not wait:
                del self._saving[number]
                self._end(site, number, one.why, saved)
        if savers:  # after all others, as it can take long
            for number in savers.keys() - controller_of(site).ask_to_save(savers.values()):
                self._saving[number] = replace(self._saving[number], until=clock)

    def _news(self, site: Site, clock: float) -> list[tuple[Job, str]]:
        """Jobs that are to be stopped since the last look; where none is to be any more all are forgotten, or whoever
        leads decides again."""
        new = {number: why for number, why in self._to_stop if number not in self._saving}
        self._to_stop.clear()
        if self._keeper is None or self._keeper.kept or self._ceased(clock) or not site.leads():
            self._spare(new)
            self._spare(self._saving)
            return []
        return [(self._jobs[number], why) for number, why in new.items() if number in self._jobs]

    def _spare(self, jobs: dict[int, Any]) -> None:
        if self._keeper is not None:
            self._keeper.spare(jobs)
        jobs.clear()

    def _end(self, site: Site, number: int, why: str, saved: float) -> None:
        """Through Slurm, as it preempts: requeued where that can be, else cancelled."""
        job = self._jobs.get(number)
        if job is None or not site.leads():
            return
        log.warning("job %d of %s gives way: %s", number, job.user, why)
        fields: dict[str, Any] = {"job": number, "account": job.account, "reason": why, "saved": saved or None}
        try:
            events.append(site.events, "power.stopped", **fields)
        except (OSError, SluiceError) as error:  # a full disk keeps no budget from being met
            log.error("event power.stopped: %s", one_line(str(error)))
        self._stopped_total += 1
        commands = site.commands
        if not self.policy.cancel:
            done = commands.run("scontrol", "requeue", job.own_name, check=False, timeout=_COMMAND_S)
            if done.returncode == 0:
                return
        # Not one that waits already, e.g. as it was requeued and its node is slow to end it.
        commands.run("scancel", "--state=RUNNING", job.own_name, check=False, timeout=_COMMAND_S)

    # ---- requests ----

    def _lowered(self, now: float) -> dict[str, LoweredBudget]:
        return lowered.read(self.site.state_save / lowered.FILE_NAME, now)

    def lower(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """``power-budget`` of the inbox: lower a budget for a while, or end that. Raises SluiceError."""
        with self._lock:
            now = time.time()
            policy = self.policy
            path = self.site.state_save / lowered.FILE_NAME
            low = self._lowered(now)
            if request.get("end"):
                name = str(request.get("name"))
                if low.pop(name, None) is None:
                    raise SluiceError(f"budget {name[:64]!r}: is not lowered", remedy="see: sluice power show")
                until = now
            else:
                name, watts, seconds = lowered.check(
                    policy, request.get("name"), request.get("watts"), request.get("seconds"), self._idle_w(request)
                )
                until = now + seconds
                low[name] = LoweredBudget(watts, until, str(request.get("by", ""))[:64], now)
            lowered.write(path, low)
            events.append(
                self.site.events, "power.budget", budget=name, watts=low[name].watts if name in low else None,
                until=until, by=str(request.get("by", ""))[:64],
            )  # fmt: skip
        self.step(self.site)
        return {"budget": name, "until": until}

    def _idle_w(self, request: Mapping[str, Any]) -> float:
        budget = next((one for one in self.policy.budgets if one.name == request.get("name")), None)
        if budget is None or not budget.nodes:
            return 0.0
        reported = {gpu.node for gpu in self._gpus}
        silent = (
            self.policy.classes[kind].idle * count
            for name, (node, kinds) in self._nodes[1].items()
            if name not in reported and budget.has_node(name) and "powered_down" not in node.flags
            for kind, count in kinds.items()
            if kind in self.policy.classes
        )
        return sum(gpu.idle_w for gpu in self._gpus if budget.has_node(gpu.node)) + sum(silent)

    def show(self) -> dict[str, Any]:
        """The budgets, for viewers; nothing of single jobs."""
        with self._lock:
            now = time.time()
            uses = {} if self._ceased(time.monotonic()) else {one.name: one for one in self._uses}
            try:
                low = self._lowered(now)
            except SluiceError as error:
                log.error("%s", one_line(str(error)))
                low = {}
            return {
                "budgets": [
                    self._budget(one, uses.get(one.name), low.get(one.name), now) for one in self.policy.budgets
                ],
                "stopped": self._stopped_total,
            }

    @staticmethod
    def _budget(budget: ControlBudget, use: BudgetUse | None, low: LoweredBudget | None, now: float) -> dict[str, Any]:
        planned, change = budget.watts_at(now)
        return {
            "name": budget.name,
            "nodes": budget.nodes,
            "accounts": list(budget.accounts),
            "policy_w": planned,
            "changes": None if change is None else moment(change),
            "lowered_w": low.watts if low else None,
            "lowered_until": low.until if low else None,
            "lowered_by": low.by if low else "",
            "watts": min(planned, low.watts) if low else planned,
            "measured_w": None if use is None else round(use.measured_w, 1),
            "bound_w": None if use is None else round(use.bound_w, 1),
            "capped_gpus": None if use is None else use.capped,
            "silent_gpus": None if use is None else use.silent,
            "short_w": None if use is None else round(use.short_w, 1),
            "below_w": None if use is None else round(use.below_w, 1),
            "guaranteed_w": None if use is None else round(use.guaranteed_w, 1),
        }

    def drawn(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What `nodes` and `tenants` draw, by name; of a shared GPU each job's tenant has an equal part. Nothing where
        this daemon does not lead."""
        nodes: dict[str, dict[str, Any]] = {}
        tenants: dict[str, dict[str, Any]] = {}
        with self._lock:
            for gpu in () if self._ceased(time.monotonic()) else self._gpus:
                _add(nodes, gpu.node, gpu, 1.0)
                for number in gpu.jobs:
                    if number in self._jobs:
                        _add(tenants, self._jobs[number].account, gpu, 1 / len(gpu.jobs))
        return {"nodes": nodes, "tenants": tenants}

    def gpus(self) -> dict[str, Any]:
        """All GPUs, for administrators."""
        with self._lock:
            return {
                "gpus": [{"node": key.partition("/")[0], **asdict(gpu)} for key, gpu in sorted(self._reported.items())]
            }

    def why(self, request: Mapping[str, Any], uid: int | None) -> dict[str, Any]:
        """What a running job draws and may draw; `uid`: whose jobs alone may be asked for. Raises SluiceError."""
        number = request.get("job")
        with self._lock:
            job = self._jobs.get(number) if isinstance(number, int) else None
            if job is None or uid not in (None, job.uid):
                raise SluiceError(
                    f"job {str(number)[:20]}: no running job of yours with GPUs whose power is known",
                    remedy="why a job waits says: sluice explain JOB",
                )
            policy = self.policy
            own = self._power_job(policy, job)
            mine = [gpu for gpu in self._gpus if job.id in gpu.jobs]
            inside = {one.name for one in policy.budgets for gpu in mine if self._part(one, gpu) > 0}
            kinds = {kind.name for gpu in mine if (kind := self._class_of(policy, gpu.node, self._reported[gpu.key]))}
            return {
                "job": job.id,
                "user": job.user,
                "account": job.account,
                "qos": job.qos,
                "gives_way": "never stopped" if own.rank == GUARANTEED else own.rank + 1,
                "would_lose_s": round(max(0.0, time.time() - own.kept)),
                "budgets": [one for one in self.show()["budgets"] if one["name"] in inside],
                "estimates": {kind: self._known_estimates().watts(job.uid, kind) for kind in sorted(kinds)},
                "gpus": [
                    {"node": gpu.node, "uuid": gpu.uuid, "cap_w": gpu.cap_w, "power_w": gpu.power_w,
                     "default_w": self._reported[gpu.key].default_w, "why": self._reported[gpu.key].why,
                     "jobs": len(gpu.jobs)}
                    for gpu in mine
                ],
            }  # fmt: skip


def _add(rows: dict[str, dict[str, Any]], name: str, gpu: Gpu, part: float) -> None:
    capped = bool(gpu.jobs) and gpu.cap_w < gpu.want_w
    row = rows.setdefault(name, {"name": name})
    for key, value in (
        ("gpus", part),
        ("power_w", part * gpu.power_w),
        ("bound_w", part * (gpu.cap_w if gpu.jobs else gpu.idle_w)),
        ("capped_gpus", part * capped),
        ("silent_gpus", part * gpu.silent),
    ):
        row[key] = row.get(key, 0.0) + value


power_of = of_site(PowerControl)
"""That of this daemon."""


def duties(site: Site) -> list[Duty]:
    """For `sluice.controllerd.daemon`."""
    control = power_of(site)
    return [Duty("power", PERIOD_S, control.step), Duty("power-stop", _STOP_S, control.stop)]
