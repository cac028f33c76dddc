"""The cluster's metrics, a duty of controllerd: queues, throughput, classes of GPUs, tenants, slurmctld, events."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy.live import Cluster, gpus_of
from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicy, NodePolicyFile
from policy.quota_use import TenantUse, read_use
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Duty, Site
from sluice.controllerd.metrics.decided import Decided
from sluice.controllerd.power.duty import power_of
from sluice.controllerd.preflight import coordinator_of
from sluice.controllerd.readings import readings_of
from sluice.exchange.fleet import MOST_AGE_S, FleetStatus, read_status
from sluice.explain.decisions import FOLDER, DecisionError
from sluice.metrics.influx import set_retention, token_for
from sluice.metrics.output import Output
from sluice.metrics.points import Point, Value
from sluice.plugin.status import Controller, read_controllers
from sluice.slurm.accounting import Accounting
from sluice.slurm.answers import Job, Node, task_count
from sluice.slurm.control import Control

_LOOK_S = 1.0
_LEAST_S = 15.0  # between two queries of Slurm, for any interval
_TENANTS_S = 60.0
_RETENTION_S = 3600.0
_SHARE = 0.05  # the part of the time that the duty may be busy
_FAILED = frozenset({"FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"})
_PENDING, _RUNNING = "PENDING", frozenset({"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "COMPLETING"})

log = logging.getLogger("sluice.controllerd")


# ---- pictures of Slurm, as points; pure ----


def gpus(tres: Mapping[str, int], shards_per_gpu: float) -> float:
    """GPUs in a job's TRES; shares count as parts of a GPU."""
    return tres.get("gres/gpu", 0) + (tres.get("gres/shard", 0) / shards_per_gpu if shards_per_gpu else 0.0)


def queue_points(cluster: str, jobs: Iterable[Job], shards: float, now: float, stamp: int) -> list[Point]:
    """Jobs by partition and account."""
    cells: dict[tuple[str, str], dict[str, float]] = defaultdict(
        lambda: dict.fromkeys(
            ("pending_jobs", "running_jobs", "pending_gpus", "running_gpus", "oldest_wait_seconds"), 0.0
        )
    )
    for job in jobs:
        cell = cells[job.partition.partition(",")[0], job.account]
        tasks = task_count(job.array_tasks) if job.state == _PENDING else 1
        if job.state == _PENDING:
            cell["pending_jobs"] += tasks
            cell["pending_gpus"] += tasks * gpus(job.tres, shards)
            if job.eligible_time is not None and job.eligible_time <= now:
                cell["oldest_wait_seconds"] = max(cell["oldest_wait_seconds"], now - job.eligible_time)
        elif job.state in _RUNNING:
            cell["running_jobs"] += 1
            cell["running_gpus"] += gpus(job.tres, shards)
    return [
        Point(
            "sluice_queue",
            {"cluster": cluster, "partition": partition, "account": account},
            {name: round(value, 3) for name, value in cell.items()},
            stamp,
        )
        for (partition, account), cell in cells.items()
    ]


@dataclass
class _Class:
    gpus: float = 0.0
    available: float = 0.0
    allocated: float = 0.0
    free: list[float] = field(default_factory=list)  # by usable node
    partly: float = 0.0  # free ones on nodes that are partly allocated
    unavailable: int = 0
    percent: list[float] = field(default_factory=list)  # of each GPU whose utilisation is reported


def class_points(
    cluster: str, nodes: Iterable[Node], stamp: int, percents: Mapping[str, Sequence[float]] | None = None
) -> list[Point]:
    """GPUs by type; `percents`: utilisation of the GPUs of nodes that report it, used where a node has one type."""
    classes: dict[str, _Class] = defaultdict(_Class)
    for node in nodes:
        types, shards = gpus_of(node)
        total = sum(types.values())
        for name, count in types.items():
            one = classes[name or "gpu"]
            if percents and len(types) == 1:
                one.percent += percents.get(node.name, ())
            one.gpus += count
            used = float(node.tres_allocated.get(f"gres/gpu:{name}", node.tres_allocated.get("gres/gpu", 0)))
            if shards and total:  # shares, as parts of this type
                used += node.tres_allocated.get("gres/shard", 0) / (shards / total) * count / total
            used = min(float(count), used)
            one.allocated += used
            if not node.available:
                one.unavailable += 1
                continue
            one.available += count
            one.free.append(count - used)
            if used:
                one.partly += count - used
    points = []
    for name, one in classes.items():
        free = sum(one.free)
        fields: dict[str, Value] = {
            "gpus": one.gpus,
            "available_gpus": one.available,
            "allocated_gpus": round(one.allocated, 3),
            "allocation_ratio": round(one.allocated / one.gpus, 6) if one.gpus else 0.0,
            "fragmentation_ratio": round(one.partly / free, 6) if free else 0.0,
            "largest_free_gpus": round(max(one.free, default=0.0), 3),
            "nodes_unavailable": one.unavailable,
        }
        if one.percent:
            fields["utilisation_ratio"] = round(sum(one.percent) / len(one.percent) / 100, 6)
        points.append(Point("sluice_class", {"cluster": cluster, "class": name}, fields, stamp))
    return points


def tenant_points(cluster: str, tenants: Mapping[str, TenantUse], stamp: int) -> list[Point]:
    """Use against limits."""
    points = []
    for name, tenant in tenants.items():
        fields: dict[str, Value] = {
            "gpus": tenant.used.get("gres/gpu", 0),
            "gpu_hours": round(tenant.minutes.get("gres/gpu", 0.0) / 60, 3),
            "jobs": tenant.running,
        }
        if "gres/gpu" in tenant.limit:
            fields["gpus_limit"] = tenant.limit["gres/gpu"]
        if "gres/gpu" in tenant.minute_limit:
            fields["gpu_hours_limit"] = round(tenant.minute_limit["gres/gpu"] / 60, 3)
        points.append(Point("sluice_tenant", {"cluster": cluster, "account": name}, fields, stamp))
    return points


def pool_points(cluster: str, status: FleetStatus, now: float, stamp: int) -> list[Point]:
    """Pools as fleetd says; none of a status that is old: another controller's fleetd works."""
    if now - status.at > MOST_AGE_S:
        return []
    points = []
    for name, pool in status.pools.items():
        fields: dict[str, Value] = {
            "on_nodes": pool.on,
            "launching_nodes": pool.launching,
            "ending_nodes": pool.ending,
            "held_nodes": pool.held,
            "most_nodes": pool.most,
            "cost_hour": pool.cost_hour,
            "launches_total": pool.launches,
        }
        if pool.boot_s is not None:
            fields["boot_seconds"] = pool.boot_s
        for field_name, since in (
            ("oldest_wait_seconds", pool.oldest_wait_since),
            ("without_capacity_seconds", pool.without_capacity_since),
        ):
            fields[field_name] = 0.0 if since is None else round(max(0.0, now - since), 3)
        points.append(Point("sluice_pool", {"cluster": cluster, "pool": name}, fields, stamp))
        points += [
            Point("sluice_poolfailures", {"cluster": cluster, "pool": name, "kind": kind}, {"seen_total": count}, stamp)
            for kind, count in pool.failures.items()
        ]
    return points


def power_points(cluster: str, budgets: Iterable[Mapping[str, Any]], stamp: int) -> list[Point]:
    """Budgets of watts; none that this daemon has not looked at yet."""
    return [
        Point(
            "sluice_power",
            {"cluster": cluster, "budget": one["name"]},
            {
                "budget_watts": one["watts"],
                "measured_watts": one["measured_w"],
                "bound_watts": one["bound_w"],
                "short_watts": one["short_w"],
                "capped_gpus": one["capped_gpus"],
                "silent_gpus": one["silent_gpus"],
                "lowered": int(one["lowered_until"] is not None),
            },
            stamp,
        )
        for one in budgets
        if one["measured_w"] is not None
    ]


# sdiag's words -> field, factor; the first match counts
_SDIAG: tuple[tuple[str, str, float], ...] = (
    (r"^Server thread count:\s+(\d+)", "server_threads", 1),
    (r"^Agent queue size:\s+(\d+)", "agent_queue", 1),
    (r"^DBD Agent queue size:\s+(\d+)", "dbd_queue", 1),
    (r"^Main schedule statistics[\s\S]*?^\s+Mean cycle:\s+(\d+)", "main_cycle_seconds", 1e-6),
    (r"^Backfilling stats[\s\S]*?^\s+Last cycle:\s+(\d+)", "backfill_cycle_seconds", 1e-6),
)
# counters of the plugins' status file -> field, factor
_COUNTERS: tuple[tuple[str, str, float], ...] = (
    ("plan.plan_us_last", "plan_seconds", 1e-6),
    ("plan.jobs", "plan_jobs", 1),
    ("plan.plans", "plans_total", 1),
    ("moves.made", "moves_total", 1),
    ("moves.not_made", "moves_not_made_total", 1),
    ("order.step_us_last", "order_seconds", 1e-6),
    ("decisions.dropped", "decisions_dropped", 1),
    ("decisions.dropped", "records_dropped", 1),  # its name until 0.1.0
    ("select.asked", "hook_calls_total", 1),
    ("submit.submitted", "submissions_total", 1),
)


def scheduler_points(
    cluster: str, sdiag: str, plugins: Controller | None, up: int, stamp: int, decided: Decided | None = None
) -> list[Point]:
    """slurmctld's own figures and those of the plugins in the controller that leads."""
    fields: dict[str, Value] = {"controllers_up": up}
    for name, share in (("decision_wait_median_seconds", 0.5), ("decision_wait_p95_seconds", 0.95)):
        waited = None if decided is None else decided.percentile(share)
        if waited is not None:
            fields[name] = round(waited, 6)
    for pattern, name, factor in _SDIAG:
        match = re.search(pattern, sdiag, re.MULTILINE)
        if match:
            fields[name] = round(int(match[1]) * factor, 9)
    counters: Any = {} if plugins is None else plugins.report.get("counters", {})
    if isinstance(counters, Mapping):
        numbers = {key: value for key, value in counters.items() if type(value) is int}
        for key, name, factor in _COUNTERS:
            if key in numbers:
                fields[name] = round(numbers[key] * factor, 9)
        if numbers.get("submit.submitted") and "submit.total_ns" in numbers:
            fields["submit_seconds"] = numbers["submit.total_ns"] / numbers["submit.submitted"] / 1e9
        fields |= _hook_times(numbers)
    return [Point("sluice_scheduler", {"cluster": cluster}, fields, stamp)]


def _hook_times(counters: Mapping[str, int]) -> dict[str, Value]:
    """Median and 95th percentile of the hook's own time, from its classes, as their upper ends."""
    classes = sorted(
        (int(key.removeprefix("select.hook_us_to_")), count)
        for key, count in counters.items()
        if re.fullmatch(r"select\.hook_us_to_\d{1,7}", key)
    )
    total = sum(count for _, count in classes) + counters.get("select.hook_us_more", 0)
    found: dict[str, Value] = {}
    for name, share in (("hook_median_seconds", 0.5), ("hook_p95_seconds", 0.95)):
        passed = 0
        for most, count in classes:
            passed += count
            if total and passed >= share * total:
                found[name] = most / 1e6
                break
    return found


class Throughput:
    """Jobs that started and ended, counted from one picture to the next; those before the first are not counted."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int | None, str]] | None = None  # job -> start, state
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def look(self, jobs: Iterable[Job]) -> None:
        """A picture of all jobs that slurmctld knows, ended ones included."""
        now = {job.id: job for job in jobs}
        before = self._seen
        self._seen = {number: (_start(job), job.state) for number, job in now.items()}
        if before is None:
            return
        for number, job in now.items():
            start, state = before.get(number, (None, _PENDING))
            counts = self.counts[job.account]
            if _start(job) is not None and _start(job) != start:
                counts["started_total"] += 1
                begun = _start(job) or 0
                counts["wait_seconds_total"] += max(0, begun - (job.eligible_time or begun))
                counts["submit_to_start_seconds_total"] += max(0, begun - (job.submit_time or begun))
            if _ended(job.state) and not (_ended(state) and start == _start(job)):
                counts["ended_total"] += 1
                counts["failed_total"] += job.state in _FAILED

    def points(self, cluster: str, stamp: int, decided: Mapping[str, tuple[int, float]] | None = None) -> list[Point]:
        """The counts by account; `decided`: decided jobs, and the seconds that they waited for it."""
        decided = decided or {}
        names = ("started_total", "ended_total", "failed_total", "wait_seconds_total", "submit_to_start_seconds_total")
        points = []
        for account in self.counts.keys() | decided.keys():
            fields: dict[str, Value] = {name: self.counts[account][name] for name in names}
            if account in decided:
                fields["decided_total"], seconds = decided[account]
                fields["submit_to_decision_seconds_total"] = round(seconds, 6)
            points.append(Point("sluice_jobs", {"cluster": cluster, "account": account}, fields, stamp))
        return points


def preflight_points(cluster: str, counts: Mapping[str, int], stamp: int) -> list[Point]:
    """Preflights by their verdict."""
    return [
        Point("sluice_preflights", {"cluster": cluster, "verdict": verdict}, {"seen_total": count}, stamp)
        for verdict, count in counts.items()
    ]


def _start(job: Job) -> int | None:
    """When it started; of a job that waits, an expected start is none."""
    return None if job.state == _PENDING else job.start_time


def _ended(state: str) -> bool:
    return state != _PENDING and state not in _RUNNING and state != "REQUEUED"


class Events:
    """Events by kind since the daemon began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: int | None = None
        self._counts: Counter[str] = Counter()

    def points(self, cluster: str, stamp: int) -> list[Point]:
        """The counts; what happened before the first call is not counted. Raises OSError."""
        found = events.read(self._path, self._since or 0)
        if self._since is not None:
            self._counts.update(event.kind for event in found)
        self._since = max([event.seq for event in found], default=self._since or 0)
        return [
            Point("sluice_events", {"cluster": cluster, "kind": kind}, {"seen_total": count}, stamp)
            for kind, count in self._counts.items()
        ]


# ---- the duty ----


class ClusterMetrics:
    """Queries Slurm at the policy's interval, but bounded in load."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.output = Output(
            site.state / "metrics", site.host, lambda text: log.error("metrics: %s", text), controller=True
        )
        self.throughput = Throughput()
        self.events = Events(site.events)
        self._decided: Decided | None = None
        self._policy: NodePolicyFile | None = None
        self._due = self._tenants_due = 0.0
        self._tenants: dict[str, TenantUse] = {}

    @property
    def settings(self) -> NodeMetrics:
        """In force now. Raises SluiceError when Slurm never answered."""
        return self._node_policy().metrics

    def _node_policy(self) -> NodePolicy:
        if self._policy is None:
            self._policy = NodePolicyFile(self.site.conf_folder / FILE_NAME)
        return self._policy.current()

    def run(self, site: Site) -> None:
        """The duty. Raises SluiceError, OSError."""
        settings = self.settings
        self.output.configure(settings)
        if not (settings.url or settings.prometheus_controller) or time.monotonic() < self._due:
            return
        began = time.monotonic()
        try:
            self.output.put("cluster", self.points(site))
        finally:
            took = time.monotonic() - began
            self._due = began + max(settings.interval, _LEAST_S, took / _SHARE)

    def points(self, site: Site) -> list[Point]:
        """All of it now."""
        name = site.config().get("ClusterName", "")
        nodes = site.client.nodes()
        jobs = site.client.jobs(states=["all"])
        stamp = self.output.stamp()
        self.throughput.look(jobs)
        decided = self._decided_now(site)
        percents: dict[str, list[float]] = defaultdict(list)
        # Where no rule needs them, only nodes with jobs report: their mean is not that of a class.
        for gpu in readings_of(site).fresh() if self._node_policy().alerts.readings else ():
            if gpu.utilisation_percent is not None:
                percents[gpu.node].append(gpu.utilisation_percent)
        points = [
            *queue_points(name, jobs, shards_per_gpu(nodes), time.time(), stamp),
            *class_points(name, nodes, stamp, percents),
            *self.throughput.points(name, stamp, decided.totals),
            *scheduler_points(
                name,
                site.commands.output("sdiag"),
                self._plugins(),
                sum(one.up for one in site.client.ping()),
                stamp,
                decided,
            ),
            *self._pools(name, stamp),
            *power_points(name, power_of(site).show()["budgets"], stamp),
            *preflight_points(name, coordinator_of(site).counts, stamp),
            *self.output.sender_points(stamp),
        ]
        try:
            points += self.events.points(name, stamp)
        except OSError as error:
            log.info("metrics: events: %s", error)
        return points + tenant_points(name, self._tenants_now(site), stamp)

    def _decided_now(self, site: Site) -> Decided:
        if self._decided is None:
            self._decided = Decided(site.state_save / FOLDER, time.time())
        try:
            self._decided.look()
        except DecisionError as error:
            log.info("metrics: %s", error)
        return self._decided

    @staticmethod
    def _pools(name: str, stamp: int) -> list[Point]:
        try:
            return pool_points(name, read_status(), time.time(), stamp)
        except SluiceError:  # no fleetd here
            return []

    def _plugins(self) -> Controller | None:
        try:
            found = {one.host.partition(".")[0]: one for one in read_controllers(self.site.state_save)}
        except (SluiceError, OSError):
            return None
        return found.get(self.site.host)

    def _tenants_now(self, site: Site) -> dict[str, TenantUse]:
        """Asked for rarely, as slurmdbd answers."""
        if time.monotonic() >= self._tenants_due:
            self._tenants_due = time.monotonic() + _TENANTS_S
            self._tenants = {}
            if site.config().get("AccountingStorageType", "").endswith("slurmdbd"):
                commands = site.commands
                cluster = Cluster(commands, site.client, Accounting(commands), Control(commands))
                try:
                    self._tenants = read_use(cluster)
                except SluiceError as error:
                    log.info("metrics: tenants: %s", error)
        return self._tenants


def shards_per_gpu(nodes: Iterable[Node]) -> float:
    """Shards (MiB) that count as one GPU, on average over the cluster."""
    counted = [gpus_of(node) for node in nodes]
    total = sum(sum(types.values()) for types, shards in counted if shards)
    return sum(shards for _, shards in counted) / total if total else 0.0


class Retention:
    """Sets the database's retention to the policy's, where the database has such a setting."""

    def __init__(self, metrics: ClusterMetrics) -> None:
        self._metrics = metrics
        self._done: str = ""

    def run(self, site: Site) -> None:
        """The duty. Raises SluiceError."""
        settings = self._metrics.settings
        if not settings.url:
            return
        wanted = json.dumps([settings.url, settings.organization, settings.bucket, settings.retention_days])
        if wanted == self._done:
            return
        token = token_for(settings.url, Path(settings.token_file), without_tls=settings.token_without_tls)
        said = set_retention(
            settings.url, settings.organization, settings.bucket, token, settings.retention_days, settings.ca_file
        )
        log.warning("metrics: %s, bucket %s: %s", settings.url, settings.bucket, said)
        self._done = wanted


def duties(site: Site) -> list[Duty]:
    """For controllerd."""
    metrics = ClusterMetrics(site)
    return [
        Duty("metrics", _LOOK_S, metrics.run),
        Duty("metrics-retention", _RETENTION_S, Retention(metrics).run),
    ]
