"""What each kind of rule sees: the subjects for which its threshold is reached now."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from policy.alerts import NodeRule
from policy.live import Cluster
from policy.power import show_watts
from policy.quota_use import TenantUse, read_use
from policy.service_jobs import FILE_NAME, ServicePolicy, ServicesFile, ServicesPolicy
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.controllerd.daemon import Site
from sluice.controllerd.power.duty import power_of
from sluice.controllerd.readings import readings_of
from sluice.exchange.fleet import MOST_AGE_S, FleetStatus, read_status
from sluice.exchange.live import GpuReading
from sluice.exchange.requests import RequestRecord, recent_requests
from sluice.exchange.serve_status import ServiceStatus, Status, ask_status
from sluice.fleet.views import POOL_REASON
from sluice.report.fleet import hosts
from sluice.slurm.accounting import Accounting
from sluice.slurm.answers import Job, Node
from sluice.slurm.control import Control

_PING_S = 10.0
_REPLICAD_S = 5.0
_RECENT_S = 300.0
_LEAST_REQUESTS = 20
_COUNTED = frozenset({"ok", "failed", "expired"})
_OUT = {"drain": "drained", "not_responding": "not responding", "fail": "failing"}
_NOT_WAITING = ("Dependency", "JobHeld", "BeginTime", "DependencyNeverSatisfied", "JobArrayTaskLimit", "Gang")


@dataclass(frozen=True, slots=True)
class Seen:
    """A subject whose threshold is reached."""

    value: float
    text: str
    jobs: tuple[int, ...] = ()  # jobs that an action is for


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule sees. `known`: whether a subject that is not among `seen` is known to be fine."""

    seen: dict[str, Seen]
    known: Callable[[str], bool] = lambda _: True


DATABASE_KINDS = frozenset({"quota", "budget", "database-down"})
"""Rules of these kinds wait for slurmdbd."""


class UnknownError(SluiceError):
    """What a rule evaluates is not known now: it does not fire and is not resolved."""


@dataclass
class Observation:
    """One evaluation. What rules need is asked for once, and only where a rule needs it."""

    site: Site
    now: float = field(default_factory=time.time)

    @cached_property
    def gpus(self) -> list[GpuReading]:
        """What nodes reported recently."""
        return readings_of(self.site).fresh()

    @cached_property
    def nodes(self) -> list[Node]:
        """Slurm's nodes."""
        return self.site.client.nodes()

    @cached_property
    def jobs(self) -> dict[int, Job]:
        """Pending and running jobs."""
        return {job.id: job for job in self.site.client.jobs()}

    @cached_property
    def database_down(self) -> Seen | None:
        """Why slurmdbd does not answer, with the seconds waited. One that hangs is asked only once."""
        began = time.monotonic()
        words = ("--noheader", "--readonly", "show", "cluster", "format=cluster")
        try:
            self.site.commands.run("sacctmgr", *words, timeout=_PING_S)
        except SluiceError as error:
            return Seen(time.monotonic() - began, f"does not answer: {error}")
        return None

    @cached_property
    def tenants(self) -> dict[str, TenantUse]:
        """Accounts with limits and use. Raises UnknownError where slurmdbd does not answer."""
        if self.database_down is not None:
            raise UnknownError(f"slurmdbd {self.database_down.text}")
        commands = self.site.commands
        return read_use(Cluster(commands, self.site.client, Accounting(commands), Control(commands)))

    @cached_property
    def services(self) -> ServicesPolicy:
        """The services that were applied."""
        return ServicesFile(self.site.conf_folder / FILE_NAME).current()

    @cached_property
    def serving(self) -> Status:
        """What replicad says of them. Raises UnknownError where it does not answer."""
        try:
            return ask_status(timeout=_REPLICAD_S)
        except SluiceError as error:
            raise UnknownError(str(error)) from error

    @cached_property
    def fleet(self) -> FleetStatus:
        """What fleetd of this host says. Raises UnknownError where it says nothing, or said it long ago."""
        try:
            status = read_status()
        except SluiceError as error:
            raise UnknownError(str(error)) from error
        if self.now - status.at > MOST_AGE_S:
            raise UnknownError(f"fleetd said what it knows {self.now - status.at:.0f} s ago")
        return status

    @cached_property
    def budgets(self) -> list[dict[str, Any]]:
        """Budgets of watts, as this daemon keeps them."""
        return list(power_of(self.site).show()["budgets"])

    @cached_property
    def plugins(self) -> dict[str, Any]:
        """What the plugins in this controller's slurmctld say of themselves. Raises UnknownError."""
        path = self.site.state_save / f"sluice.status.{self.site.host}"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise UnknownError(f"{path}: not there") from error
        except (OSError, ValueError, TypeError) as error:
            raise UnknownError(f"{path}: {error}") from error

    @cached_property
    def requests(self) -> list[RequestRecord]:
        """Requests that ended lately, as far as they are at the ends of their files. Raises UnknownError."""
        try:
            return recent_requests(Path(self.services.requests), self.now - _RECENT_S, self.now + 1)
        except OSError as error:
            raise UnknownError(f"{error.filename}: {error.strerror}") from error

    def look(self, rule: NodeRule) -> Found:
        """The subjects of a rule. Raises UnknownError, or SluiceError where Slurm does not answer."""
        return _KINDS[rule.kind](self, rule)


def _node_filter(rule: NodeRule) -> Callable[[str], bool]:
    wanted = frozenset(expand(rule.nodes)) if rule.nodes else frozenset()
    return lambda name: not wanted or name in wanted


def _gpu(field_name: str, unit: str) -> Callable[[Observation, NodeRule], Found]:
    def look(seen: Observation, rule: NodeRule) -> Found:
        wanted = _node_filter(rule)
        found: dict[str, Seen] = {}
        known: set[str] = set()
        for gpu in seen.gpus:
            value = getattr(gpu, field_name)
            if value is None:
                continue
            known.add(gpu.name)
            if value >= rule.threshold and wanted(gpu.node):
                found[gpu.name] = Seen(value, f"{value:.0f}{unit}")
        return Found(found, known.__contains__)

    return look


def _idle(seen: Observation, rule: NodeRule) -> Found:
    """Running jobs with a GPU that they use little; a job that is not measured is not one.

    An action is for jobs with such use of every GPU: a job that works on some of its GPUs is only reported.
    """
    wanted = _node_filter(rule)
    used: dict[int, dict[str, float]] = {}  # job -> GPU -> percent
    for gpu in seen.gpus:
        for number, percent in gpu.jobs.items():
            job = seen.jobs.get(number)
            if percent is None or job is None or job.state != "RUNNING" or gpu.node not in hosts(job.nodes):
                continue
            if wanted(gpu.node) and _in_scope(job, rule):
                used.setdefault(number, {})[gpu.name] = percent
    found: dict[str, Seen] = {}
    for number, percents in used.items():
        idle = [name for name, percent in percents.items() if percent <= rule.threshold]
        if idle:
            job = seen.jobs[number]
            count = max(len(percents), job.tres.get("gres/gpu", 0))
            shown = ", ".join(idle[:8]) + (" and more" if len(idle) > 8 else "")
            text = f"uses at most {rule.threshold:g}% of {len(idle)} of its {count} GPUs: {shown}"
            value = min(percents.values())
            found[_idle_name(job)] = Seen(value, text, (number,) if len(idle) == count else ())
    running = {_idle_name(job) for job in seen.jobs.values() if job.state == "RUNNING"}
    known = {_idle_name(seen.jobs[number]) for number in used}
    return Found(found, lambda name: name in known or name not in running)


def _idle_name(job: Job) -> str:
    return f"job {job.id} of {job.user} ({job.account})"


def _in_scope(job: Job, rule: NodeRule) -> bool:
    return (not rule.tenants or job.account in rule.tenants) and (
        not rule.partitions or bool(set(job.partition.split(",")) & set(rule.partitions))
    )


def _drained(seen: Observation, rule: NodeRule) -> Found:
    wanted = _node_filter(rule)
    found: dict[str, Seen] = {}
    for node in seen.nodes:
        words = [word for flag, word in _OUT.items() if flag in node.flags]
        if node.state in ("down", "error", "unknown"):
            words.append(node.state)
        returns = node.reason.startswith(POOL_REASON) and "powered_down" in node.flags  # by itself
        if words and wanted(node.name) and not returns:
            found[f"node {node.name}"] = Seen(1, f"{', '.join(words)}: {node.reason or 'no reason given'}")
    return Found(found)


def _queue_wait(seen: Observation, rule: NodeRule) -> Found:
    """The longest wait of each tenant."""
    longest: dict[str, tuple[float, Job]] = {}
    for job in seen.jobs.values():
        if job.state != "PENDING" or job.eligible_time is None or job.reason.startswith(_NOT_WAITING):
            continue
        wait = seen.now - job.eligible_time
        if wait >= rule.threshold and _in_scope(job, rule) and wait > longest.get(job.account, (0.0, job))[0]:
            longest[job.account] = wait, job
    return Found(
        {
            f"tenant {account}": Seen(wait, f"job {job.id} of {job.user} has waited {wait / 3600:.1f} h ({job.reason})")
            for account, (wait, job) in longest.items()
        }
    )


def _quota(seen: Observation, rule: NodeRule) -> Found:
    found: dict[str, Seen] = {}
    for name, tenant in seen.tenants.items():
        most = tenant.limit.get("gres/gpu")
        used = tenant.used.get("gres/gpu", 0)
        if most and 100 * used / most >= rule.threshold and (not rule.tenants or name in rule.tenants):
            found[f"tenant {name}"] = Seen(100 * used / most, f"has {used} of its {most} GPUs")
    return Found(found)


def _budget(seen: Observation, rule: NodeRule) -> Found:
    found: dict[str, Seen] = {}
    for name, tenant in seen.tenants.items():
        for tres, unit, factor in (("gres/gpu", "GPU-hours", 60.0), ("gres/shard", "GiB-hours", 60.0 * 1024)):
            most, used = tenant.minute_limit.get(tres), tenant.minutes.get(tres, 0.0)
            if most and 100 * used / most >= rule.threshold and (not rule.tenants or name in rule.tenants):
                words = f"has used {used / factor:.1f} of {most / factor:.1f} {unit} ({100 * used / most:.0f}%)"
                found[f"tenant {name} {unit}"] = Seen(100 * used / most, words)
    return Found(found)


def _journal_lag(seen: Observation, rule: NodeRule) -> Found:
    counters = _counters(seen.plugins)
    lag_s = counters.get("journal.lag_ms", 0) / 1000
    if counters.get("journal.error"):
        return Found({"failover journal": Seen(lag_s, f"cannot be written (errno {counters['journal.error']:.0f})")})
    if lag_s >= rule.threshold and counters.get("journal.open"):
        return Found({"failover journal": Seen(lag_s, f"{lag_s:.1f} s behind the disk")})
    return Found({})


def _counters(document: object) -> Mapping[str, float]:
    """All numbers of a status file whose name begins with ``journal.``, at any depth."""
    found: dict[str, float] = {}
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, dict):
                found.update(_counters(value))
            elif str(name).startswith("journal.") and isinstance(value, int | float):
                found[str(name)] = float(value)
    return found


def _database(seen: Observation, rule: NodeRule) -> Found:
    del rule
    if not seen.site.config().get("AccountingStorageType", "").endswith("slurmdbd"):
        return Found({})
    return Found({"slurmdbd": seen.database_down} if seen.database_down else {})


def _service_wait(seen: Observation, rule: NodeRule) -> Found:
    """Services without a replica for those who ask, or with too few."""
    found: dict[str, Seen] = {}
    for name, one in _services_of(seen, rule).items():
        now = seen.serving.services.get(name, ServiceStatus())
        if now.waiting and now.oldest_s >= rule.threshold:
            why = f" ({now.why})" if now.why else ""
            text = f"{now.waiting} requests wait, the oldest for {now.oldest_s:.0f} s{why}"
            found[f"service {name}"] = Seen(now.oldest_s, f"{text}; {one.least} to {one.most} replicas")
    return Found(found)


def _service_errors(seen: Observation, rule: NodeRule) -> Found:
    """Of few requests there is no share: such a service is not known to be fine."""
    found: dict[str, Seen] = {}
    known: set[str] = set()
    for name in _services_of(seen, rule):
        outcomes = [one.outcome for one in seen.requests if one.service == name and one.outcome in _COUNTED]
        if len(outcomes) < _LEAST_REQUESTS:
            continue
        known.add(f"service {name}")
        wrong = len(outcomes) - outcomes.count("ok")
        percent = 100 * wrong / len(outcomes)
        if percent >= rule.threshold:
            text = f"{wrong} of {len(outcomes)} requests failed in {_RECENT_S / 60:.0f} minutes ({percent:.0f}%)"
            found[f"service {name}"] = Seen(percent, text)
    return Found(found, known.__contains__)


def _services_of(seen: Observation, rule: NodeRule) -> dict[str, ServicePolicy]:
    services = seen.services.services
    return {name: one for name, one in services.items() if not rule.tenants or one.tenant in rule.tenants}


def _pool_capacity(seen: Observation, rule: NodeRule) -> Found:
    found: dict[str, Seen] = {}
    for name, pool in seen.fleet.pools.items():
        since = pool.without_capacity_since
        if since is not None and seen.now - since >= rule.threshold:
            lasts = seen.now - since
            text = f"no capacity for {lasts / 60:.0f} minutes: {pool.held} nodes cannot be had"
            found[f"pool {name}"] = Seen(lasts, text)
    return Found(found)


def _power_budget(seen: Observation, rule: NodeRule) -> Found:
    """Where jobs can be stopped that is done; what lasts is what guaranteed jobs draw by their lowest caps."""
    found: dict[str, Seen] = {}
    known: set[str] = set()
    for one in seen.budgets:
        if one["measured_w"] is None:
            continue
        known.add(f"budget {one['name']}")
        percent = 100 * one["measured_w"] / max(1, one["watts"])
        if percent > rule.threshold or one["short_w"] or one["below_w"]:
            text = f"draws {show_watts(one['measured_w'])} of {show_watts(one['watts'])}"
            if one["short_w"]:
                text += f"; the lowest caps of its running jobs are {show_watts(one['short_w'])} too much"
            elif one["below_w"]:
                text += f"; caps are {show_watts(one['below_w'])} below lowest_cap, only guaranteed jobs start there"
            if one["guaranteed_w"]:
                text += f"; guaranteed jobs need {show_watts(one['guaranteed_w'])} at lowest_cap"
            found[f"budget {one['name']}"] = Seen(percent, text)
    return Found(found, known.__contains__)


def _power_plan(seen: Observation, rule: NodeRule) -> Found:
    """Without a plan jobs that need watts do not start; below level place there is none for anybody."""
    if not seen.budgets or seen.plugins.get("level") != "place":
        return Found({})
    counters = seen.plugins.get("counters", {})
    lasts = seen.now - max(counters.get("plan.last_s", 0), seen.plugins.get("started", 0))
    if lasts < rule.threshold:
        return Found({})
    text = f"no plan for {lasts:.0f} s, {counters.get('plan.failures', 0)} failed: jobs that need watts do not start"
    return Found({"planner": Seen(lasts, f"{text}; slurmctld's log says why")})


def _pool_cost(seen: Observation, rule: NodeRule) -> Found:
    return Found({
        f"pool {name}": Seen(pool.cost_hour, f"{pool.on + pool.launching} machines cost {pool.cost_hour:g} an hour")
        for name, pool in seen.fleet.pools.items()
        if pool.cost_hour >= rule.threshold
    })  # fmt: skip


_KINDS: dict[str, Callable[[Observation, NodeRule], Found]] = {
    "temperature": _gpu("temperature_c", " degrees Celsius"),
    "memory": _gpu("memory_percent", "% of its memory in use"),
    "utilisation-high": _gpu("utilisation_percent", "% utilisation"),
    "utilisation-low": _idle,
    "gpu-idle": _idle,
    "quota": _quota,
    "budget": _budget,
    "queue-wait": _queue_wait,
    "node-drained": _drained,
    "journal-lag": _journal_lag,
    "database-down": _database,
    "service-wait": _service_wait,
    "service-errors": _service_errors,
    "pool-capacity": _pool_capacity,
    "pool-cost": _pool_cost,
    "power-budget": _power_budget,
    "power-plan": _power_plan,
}
"""Kinds that last for a time; `takeover`, `agent-lost` and `errors` are events, which the engine handles."""
