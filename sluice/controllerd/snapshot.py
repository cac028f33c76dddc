"""Reads the cluster once for all viewers and publishes it on a local socket (`sluice.exchange.snapshot`).

Parts are read with periods of their own by four duties, so that a part that hangs holds up only its like. A part that
cannot be read stays as it was; ``parts`` says since when. Nothing is read while nobody asks. Duties run on each
controller, whether it leads or not: what is not in slurmctld is in StateSaveLocation, which all controllers see.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gres_probe.collect import DEFAULT_DIR, load_inventories
from gres_probe.group import group
from policy.document import DEFAULT_FILE, load
from policy.grouping import Grouping
from policy.live import Cluster, gpus_of
from policy.quota_use import TenantUse, example, quota_rows, read_use
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.service_jobs import ServicesFile, ServicesPolicy, compile_services, parse_job_name
from policy.service_use import service_documents
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.line_server import Kind
from sluice.base.local_server import serve_local
from sluice.base.rates import FewLines, Rate
from sluice.base.text import one_line
from sluice.controllerd.alerts.duty import alerts_folder
from sluice.controllerd.alerts.listing import alerts_document
from sluice.controllerd.daemon import Duty, Site
from sluice.controllerd.health.controller import controller_of
from sluice.controllerd.power.duty import power_of
from sluice.controllerd.published_nodes import NodeRows, nodes_now
from sluice.controllerd.published_reports import BusyError, Reports
from sluice.controllerd.readings import readings_of
from sluice.controllerd.serving import Serving
from sluice.exchange.fleet import STATUS as FLEET_STATUS
from sluice.exchange.fleet import (
    FleetStatus,
    history_document,
    pool_documents,
    read_status,
    why_document,
    words_for_job,
)
from sluice.exchange.live import LIVE_FILE, Live, latest, read_live
from sluice.exchange.pool_costs import read_costs
from sluice.exchange.recent_use import CallerUse, RecentUse, ServiceUse
from sluice.exchange.serve_status import ask_status
from sluice.exchange.serving import GATEWAY_USER, REPLICAD_USER, Callers
from sluice.exchange.serving import SOCKET as REPLICAD_SOCKET
from sluice.exchange.snapshot import MOST_REQUEST, SOCKET, VERSION, Snapshot, encode, render_answer
from sluice.explain.checkpoints import SiteCheckpoints
from sluice.explain.decisions import FOLDER, DecisionError
from sluice.explain.explain_service import is_record_of, private_words
from sluice.explain.explanation import JobName, explain_job, parse_job
from sluice.explain.moves import sentences, site_moves
from sluice.explain.preflights import SitePreflights
from sluice.failover.history import history_rows
from sluice.failover.shared import read_cluster
from sluice.failover.status import look
from sluice.report.collect import known_pools
from sluice.report.fleet import Fleet
from sluice.report.tenants import quota
from sluice.slurm import jwt
from sluice.slurm.accounting import Accounting
from sluice.slurm.answers import Job, Node
from sluice.slurm.control import Control
from sluice.slurm.job_changes import FOLLOWED_S, JobChanges
from sluice.slurm.refused import reason_in
from sluice.slurm.topology import switch_rows
from sluice.slurm.user import slurm_user

WEB_USER = "sluice-web"
WANTED_S = 30.0
"""Nothing is read when the last request is older."""
_MOST_TEXT = 1024
_MOST_EVENTS = 2000
_MOST_HISTORY = 500
_MOST_POLICY = 128 << 10
_MOST_REPLICAS = 1000  # of one service
_REPLICAD_S = 2.0
_RECENT_S = 10.0  # between two looks at the records of requests
_SHARE = 2.0  # a part that takes long is read at most every so many times that
_SHARE_OF_JOBS = 1.25  # of many, most of that time is squeue's, and what changes is what viewers look for
_FOLLOW_S = 0.1  # where slurmctld's side writes which jobs changed
_CHECK_S = 300.0  # and so often all are listed as well
_AGAIN_S = 2.0  # after a failure, which may have been a long time-out
_LATE_S = 4.0  # commands of Slurm try for MessageTimeout and longer before they fail
_LOOK_S = 0.25
_READERS_SHARE = 0.25  # of a processor, for all readers together, after a burst: this process does more than that
_BURST_S = 5.0
_LONGEST_PAUSE_S = 4.0  # a reader waits 10 s for an answer
_ROOM = Kind(
    "snapshot",
    places=64,
    threads=2,
    line=MOST_REQUEST,
    held=4 << 20,
    seconds=10.0,
    rates=(Rate(400, 100), Rate(400, 100)),
)
SERVING = Kind("serving", places=16, threads=2, line=MOST_REQUEST, held=1 << 20, seconds=10.0, rates=(Rate(100, 20),))
TOKENS = Kind("tokens", places=64, threads=1, line=MOST_REQUEST, held=1 << 20, seconds=10.0, rates=(Rate(400, 100),))
_FOLDER_REMEDY = "sluice-controllerd.service makes it (RuntimeDirectory)"

log = logging.getLogger("sluice.snapshot")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the socket is, who may connect besides root, and what is read besides Slurm."""

    socket: Path = SOCKET
    user: str = WEB_USER
    inventory: Path = DEFAULT_DIR
    policy: Path = DEFAULT_FILE
    replicad: Path = REPLICAD_SOCKET
    serve_user: str = REPLICAD_USER
    gateway_user: str = GATEWAY_USER
    fleet: Path = FLEET_STATUS


@dataclass(slots=True)
class _Part:
    name: str
    period_s: float
    read: Callable[[], float | None]
    """When what it read was so, where that is not when the reading began."""
    share: float = _SHARE
    due: float = 0.0
    began: float | None = None  # while it is read
    took: float = 0.0  # the last time that it could be read


class Publisher:
    """What all duties of the snapshot share."""

    def __init__(self, site: Site, settings: Settings = Settings()) -> None:  # noqa: B008 - frozen
        self.site = site
        self.settings = settings
        self.snapshot = Snapshot()
        self.serving = Serving(site)
        self._asked = -WANTED_S
        self._explaining = threading.Lock()
        self._checkpoints: SiteCheckpoints | None = None  # once slurmctld's configuration is known ...
        self._preflights: SitePreflights | None = None  # ... as this
        self._paces = threading.Lock()
        self._paid_until = 0.0
        self._jobs: dict[int, int] = {}  # of each job as it was last published, what differs when anything of it does
        self._replicas: dict[int, Job] = {}  # jobs with names of replicas
        self._services: ServicesFile | None = None
        self._recent: RecentUse | None = None
        self._recent_at = -_RECENT_S
        self._use: dict[str, ServiceUse] | None = None
        self._callers: dict[str, CallerUse] = {}
        self._jobs_lock = threading.Lock()
        self._changes: JobChanges | None = None  # once StateSaveLocation is known
        self._followed_at = 0.0  # what is published is so old, where changes are followed; else 0
        self._since_listing: set[int] | None = None  # what changed since such a listing began
        self._checked = 0.0
        self._grouping = Grouping()
        self._nodes: list[Node] = []
        self._node_rows = NodeRows(self.snapshot)
        self._tenants: dict[str, TenantUse] = {}
        self.reports = Reports(site, self._report_fleet, lambda: self._tenants)
        commands = site.commands
        self._cluster = Cluster(commands, site.client, Accounting(commands), Control(commands))
        self._jobs_part = _Part("jobs", 1.0, self._read_jobs, _SHARE_OF_JOBS)
        self.groups: dict[str, list[_Part]] = {
            "jobs": [self._jobs_part],
            "nodes": [_Part("nodes", 1.0, self._read_nodes)],
            "accounts": [_Part("tenants", 30.0, self._read_tenants), _Part("users", 30.0, self._read_users)],
            "services": [_Part("services", 1.0, self._read_services)],
            "pools": [_Part("pools", 1.0, self._read_pools)],
            "site": [
                _Part("cluster", 10.0, self._read_site),
                _Part("events", 1.0, self._read_events),
                _Part("health", 2.0, self._read_health),
                _Part("alerts", 2.0, self._read_alerts),
                _Part("power", 1.0, self._read_power),
                _Part("policy", 30.0, self._read_policy),
                _Part("inventory", 60.0, self._read_inventory),
                _Part("failover", 30.0, self._read_failover),
                _Part("topology", 300.0, self._read_topology),
            ],
        }
        self._parts: dict[str, dict[str, Any]] = {}
        self._parts_lock = threading.Lock()

    # ---- reading ----

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked recently."""
        return time.monotonic() - self._asked < WANTED_S

    def refresh(self, group: str) -> None:
        """A duty: read the parts of a group that are due."""
        for part in self.groups[group] if self.wanted else ():
            now = time.monotonic()
            if now < part.due:
                continue
            part.began = now
            works = self._read(part)
            took = time.monotonic() - now
            if works and part.period_s > _FOLLOW_S:  # a listing takes longer than to follow, and may come again
                part.took = took
            part.due = now + max(part.period_s, part.share * took if works else took + _AGAIN_S)

    def _read(self, part: _Part) -> bool:
        began = time.time()
        problem = ""
        at = None
        try:
            at = part.read()
        except (SluiceError, OSError, ValueError, KeyError) as error:
            if not isinstance(error, SluiceError | OSError):
                log.exception("%s: unexpected", part.name)
            problem = one_line(str(error), limit=300)
        with self._parts_lock:
            part.began = None
            if problem:
                self._keep(part.name, problem)
            else:
                self._set_part(part.name, {"at": round(at or began, 2), "stale_since": None, "problem": ""})
        return not problem

    def _keep(self, name: str, problem: str) -> None:
        """A part stays as it was."""
        before = self._parts.get(name, {"at": None, "stale_since": None, "problem": ""})
        if not before["problem"]:
            log.warning("%s: stays as it was: %s", name, problem)
        stale = before["stale_since"] or before["at"] or round(time.time(), 2)
        self._set_part(name, {"at": before["at"], "stale_since": stale, "problem": problem})

    def _set_part(self, name: str, state: dict[str, Any]) -> None:
        self._parts[name] = state
        self.snapshot.put_one("parts", name, state)

    def _mark_late(self) -> None:
        """A part that takes much longer than the last time is not as it is now, whatever comes of it."""
        now = time.monotonic()
        with self._parts_lock:
            for part in (part for group in self.groups.values() for part in group if part.began is not None):
                late = part.began is not None and now - part.began > max(_LATE_S, part.period_s, 3 * part.took)
                if late and not self._parts.get(part.name, {}).get("problem"):
                    self._keep(part.name, "no answer yet")

    def _read_jobs(self) -> float | None:
        """Those that changed, where slurmctld's side says which, or all. Of a hundred thousand jobs only those are
        looked at that changed, and only those are kept as objects."""
        changes = self._changes = self._changes or JobChanges(self.site.state_save / FOLDER)
        changes.want()
        if self._followed_at and self._follow(changes):
            late = time.time() - self._followed_at
            if late < _LATE_S:
                return self._followed_at
            if late < FOLLOWED_S:  # a listing would take it longer still
                raise SluiceError("slurmctld does not come to say what changed", remedy="see its load with sdiag")
        self._jobs_part.period_s = 1.0
        begins = changes.begin()
        self._list_jobs(set())
        self._followed_at, self._checked = 0.0, time.monotonic()
        if begins and self._follow(changes):
            self._jobs_part.period_s = _FOLLOW_S
            return self._followed_at
        return None

    def _follow(self, changes: JobChanges) -> bool:
        """Publish what changed; False: all have to be listed."""
        found = changes.read()
        if found is None:
            self._followed_at = 0.0
            return False
        if found.jobs:
            changed = {
                str(number): encode("jobs", str(number), job_row(job))
                for number, job in found.jobs.items()
                if job is not None
            }
            with self._jobs_lock:
                self.snapshot.change("jobs", changed, [str(one) for one, job in found.jobs.items() if job is None])
                for number, job in found.jobs.items():
                    if job is None:
                        self._jobs.pop(number, None)
                    else:
                        self._jobs[number] = 0
                self._keep_replicas(found.jobs)
                if self._since_listing is not None:
                    self._since_listing.update(found.jobs)
        self._followed_at = found.at
        return True

    def _list_jobs(self, changed_since: set[int]) -> None:
        """All of them, but for those that are added to `changed_since` meanwhile."""
        now: dict[int, int] = {}
        changed: dict[str, bytes] = {}
        found: dict[int, Job | None] = {}
        for one in self.site.client.each_job():
            now[one.id] = one.print_
            if self._jobs.get(one.id) != one.print_:
                job = one.job()
                changed[str(one.id)] = encode("jobs", str(one.id), job_row(job))
                if one.id in self._replicas or parse_job_name(job.name) is not None:
                    found[one.id] = job
        with self._jobs_lock:
            for number in changed_since:
                changed.pop(str(number), None)
                found.pop(number, None)
                now.pop(number, None)
                if number in self._jobs:
                    now[number] = self._jobs[number]
            gone = [number for number in self._jobs if number not in now]
            self.snapshot.change("jobs", changed, [str(number) for number in gone])
            self._keep_replicas({**found, **dict.fromkeys(gone)})
            self._jobs = now

    def _keep_replicas(self, changed: Mapping[int, Job | None]) -> None:
        """Those of the jobs whose names are replicas'; None: it is gone."""
        for number, job in changed.items():
            if job is None or parse_job_name(job.name) is None:
                self._replicas.pop(number, None)
            else:
                self._replicas[number] = job

    def check(self) -> None:
        """A duty: while changes are followed, all jobs, seldom, as a proof."""
        if not self.wanted or not self._followed_at or time.monotonic() < self._checked + _CHECK_S:
            return
        self._checked = time.monotonic()
        with self._jobs_lock:
            self._since_listing = set()
        try:
            self._list_jobs(self._since_listing)
        finally:
            self._since_listing = None

    def _read_services(self) -> None:
        """Models as services; what replicad says of them, where it runs, has no secret in it."""
        if self._services is None:
            self._services = ServicesFile(self.site.conf_folder / SERVICES_FILE)
        policy = self._services.current()
        status = None
        if policy.services:
            try:
                status = ask_status(self.settings.replicad, timeout=_REPLICAD_S)
            except SluiceError as error:
                log.info("services: %s", error)
        if policy.services and time.monotonic() > self._recent_at + _RECENT_S:
            self._use, self._recent_at = self._read_use(policy), time.monotonic()
        rows = service_documents(policy, list(self._replicas.values()), status, self._use)
        cut = {row["name"]: {**row, "replicas": row["replicas"][:_MOST_REPLICAS]} for row in rows}
        self.snapshot.put("services", cut)
        self.snapshot.put("serving-use", {name: asdict(one) for name, one in self._callers.items()})
        callers = Callers({}, whole=False) if status is None else status.callers
        self.snapshot.put("serving-open", {name: {"requests": open_} for name, open_ in callers.open.items()})
        serving = {"address": policy.address, "counted": self._use is not None, "open_whole": callers.whole}
        self.snapshot.put_one("serving", "serving", serving)

    def _read_use(self, policy: ServicesPolicy) -> dict[str, ServiceUse] | None:
        """What was used of services lately; None where the records cannot be read, as on a host without gateways."""
        folder = Path(policy.requests)
        if self._recent is None or self._recent.folder != folder:
            self._recent = RecentUse(folder)
        try:
            found = self._recent.look({one.name: one.first_token_s for one in policy.services.values()})
            self._callers = self._recent.callers()
            return found
        except OSError as error:
            log.info("records of requests: %s: %s", error.filename, error.strerror)
            return None

    def _read_pools(self) -> None:
        """What fleetd of this host says; nothing where there are no pools."""
        found = read_status(self.settings.fleet) if self.settings.fleet.exists() else FleetStatus(0.0)
        self.snapshot.put("pools", {row["name"]: row for row in pool_documents(found)})
        self.snapshot.put("pool-nodes", {one.node: why_document(found, one.node) for one in found.nodes})
        self.snapshot.put("pool-events", {name: history_document(found, name) for name in found.pools})

    def _report_fleet(self) -> Fleet:
        return Fleet.of(self._nodes, known_pools(read_costs, log.warning))

    def _read_nodes(self) -> None:
        self._nodes = self.site.client.nodes()
        self._node_rows.publish(nodes_now(self._nodes, self._live(), self._out()))

    def _live(self) -> Live:
        """What nodes reported here, where this controller leads, else what the other one wrote."""
        fresh = readings_of(self.site).fresh()
        return latest(fresh) if fresh else read_live(self.site.state_save / LIVE_FILE, time.time())

    def _out(self) -> dict[tuple[str, int], str]:
        """GPUs that are out of service, and why."""
        found: dict[tuple[str, int], str] = {}
        for row in controller_of(self.site).listing()["rows"]:
            if row["state"] == "out":
                found |= {(row["node"], int(one)): row["reason"] for one in row["gpu"].split(",") if one.isdecimal()}
        return found

    def _has_accounts(self) -> bool:
        return self.site.config().get("AccountingStorageType", "").endswith("slurmdbd")

    def _read_tenants(self) -> None:
        if not self._has_accounts():
            self.snapshot.put("tenants", {})
            return
        rows = {}
        self._tenants = read_use(self._cluster)
        types = sorted({kind for node in self._nodes for kind in gpus_of(node)[0] if kind})
        partition = (self.snapshot.get("cluster", "cluster") or {}).get("default_partition", "")
        config, now = self.site.config(), time.time()
        for name, one in self._tenants.items():
            use = [
                {
                    "user": each.user,
                    "running": each.running,
                    "submitted": each.submitted,
                    "used": {tres: count for tres, count in each.tres.items() if count},
                    "used_minutes": {tres: count for tres, count in each.tres_minutes.items() if count},
                }
                for each in one.member_use.values()
                if each.user in one.members
            ]
            rows[name] = {
                **one.document(),
                "quota": quota_rows(one),
                "budget": quota(one, config, now),
                "example": example(one, types, partition),
                "member_use": use,
            }
        self.snapshot.put("tenants", rows)

    def _read_users(self) -> None:
        """Levels and what each user coordinates; a failure leaves what was known."""
        users: dict[str, dict[str, Any]] = {}

        def of(name: str) -> dict[str, Any]:
            return users.setdefault(name, {"level": 0, "coordinates": [], "accounts": []})

        if self._has_accounts():
            accounting = self._cluster.accounting
            for name, level in accounting.levels().items():
                of(name)["level"] = level
            for account, about in accounting.accounts().items():
                for name in about.coordinators:
                    of(name)["coordinates"].append(account)
            for one in accounting.associations(self.site.config().get("ClusterName", "").lower()):
                if one.user and one.account not in of(one.user)["accounts"]:
                    of(one.user)["accounts"].append(one.account)
        for uid in (0, slurm_user(self.site.config())):
            with suppress(KeyError):
                of(pwd.getpwuid(uid).pw_name)["level"] = 2
        self.snapshot.put("users", users)

    def _read_site(self) -> None:
        client = self.site.client
        config = client.config()
        words = {word.strip() for word in config.get("PrivateData", "").lower().split(",")} - {"", "none", "(null)"}
        if "all" in words:
            words |= {"accounts", "events", "jobs", "nodes", "partitions", "reservations", "usage", "users"}
        self.snapshot.put(
            "cluster",
            {
                "cluster": {
                    "cluster": config.get("ClusterName", ""),
                    "slurm_version": config.get("SLURM_VERSION", ""),
                    "private_data": sorted(words),
                    "gpu_classes": self.reports.classes(),
                    "default_partition": next((one.name for one in client.partitions() if one.default), ""),
                    "days": [str(day) for day in self.reports.history.rolled().days()],
                }
            },
        )

    def _read_events(self) -> None:
        found = events.read(self.site.events)[-_MOST_EVENTS:]
        rows = {}
        for one in found:
            fields = {name: one.fields[name] for name in sorted(one.fields)}
            rows[str(one.seq)] = {"seq": one.seq, "time": one.time, "kind": one.kind, "fields": fields}
        self.snapshot.put("events", rows)

    def _read_health(self) -> None:
        found = controller_of(self.site).listing()
        rows = found.pop("rows")
        self.snapshot.put("health", {f"{row['node']}/{row['gpu']}/{row['state']}/{row['check']}": row for row in rows})
        self.snapshot.put_one("cluster-health", "health", found)

    def _read_power(self) -> None:
        power = power_of(self.site)
        self.snapshot.put_one("power", "power", power.show())
        for what, rows in power.drawn().items():
            self.snapshot.put(f"power-{what}", rows)

    def _read_alerts(self) -> None:
        folder = alerts_folder(self.site.state_save)
        self.snapshot.put_one("alerts", "alerts", alerts_document(folder, time.time(), everything=True))

    def _read_policy(self) -> None:
        found = load(self.settings.policy)
        self._grouping = found.policy.grouping or Grouping()
        shown = found.policy.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)
        self.snapshot.put_one("policy", "policy", shown)
        limits = [one for one in compile_services(found.policy).limits if one.kind in ("key", "user", "tenant")]
        self.snapshot.put("serving-limits", {f"{one.kind}/{one.name}": one.model_dump() for one in limits})
        text = found.text if len(found.text) <= _MOST_POLICY else ""
        self.snapshot.put_one("policy-text", "text", text)

    def _read_inventory(self) -> None:
        collected = load_inventories(self.settings.inventory, owners={0, os.geteuid()})
        rows: dict[str, Any] = {name: {"inventory": asdict(one)} for name, one in collected.inventories.items()}
        rows |= {name: {"failure": str(error)} for name, error in collected.failures.items()}
        self.snapshot.put("inventory", rows)
        classes = group(collected.inventories.values(), self._grouping).document()
        self.snapshot.put("classes", dict(class_rows(classes)))

    def _read_failover(self) -> None:
        cluster = read_cluster(self.site.conf_folder / "slurm.conf")
        self.snapshot.put_one("failover", "failover", look(cluster, self.site.client).document())
        self.snapshot.put("failover-history", dict(enumerate_rows(history_rows(cluster)[-_MOST_HISTORY:])))

    def _read_topology(self) -> None:
        said = self.site.commands.run("scontrol", "show", "topology", check=False).stdout
        self.snapshot.put("topology", {row["name"]: row for row in switch_rows(said)})

    # ---- answering ----

    def answer(self, line: bytes, who: object = None) -> bytes:
        """The answer to a request's line, late where readers took too much of this process's time. `who`: the kind of
        replicad, which may ask for its replicas alone, or of gateways, for Slurm's tokens; else who may have all."""
        if who is SERVING:
            return _answer_only("serving", line, lambda asked: self.serving.answer(asked.get("users")))
        if who is TOKENS:
            return _answer_only("jwt", line, lambda asked: self._verify(str(asked.get("token"))))
        began = time.thread_time()
        found = self._answer(line)
        with self._paces:
            now = time.monotonic()
            spent = (time.thread_time() - began) / _READERS_SHARE
            self._paid_until = max(self._paid_until, now - _BURST_S / _READERS_SHARE) + spent
            pause = min(self._paid_until - now, _LONGEST_PAUSE_S)
        if pause > 0:
            self.site.stopping.wait(pause)
        return found

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("version") != VERSION:
                raise SluiceError(f"not a request of version {VERSION}", remedy="install one version of Sluice")
            self._asked = time.monotonic()
            do = request.get("do")
            if do == "changes":
                self._mark_late()
                last = request.get("last")
                return self.snapshot.after(str(request.get("epoch")), last if type(last) is int else 0)
            if do == "explain":
                return render_answer(self._explain(str(request.get("job"))))
            if do == "jwt":
                return render_answer(self._verify(str(request.get("token"))))
            if do == "report":
                return self.reports.report(request)
            if do == "job-page":
                return self.reports.page(request)
            if do == "shadow":
                return self.reports.shadow(request)
            raise SluiceError("request: not one of changes, explain, jwt, report, job-page, shadow")
        except BusyError as error:
            return render_answer({"busy": error.what})
        except SluiceError as error:
            return render_answer({"error": error.what, "remedy": error.remedy, "usage": error.usage})
        except (OSError, ValueError, RecursionError) as error:
            return render_answer({"error": one_line(str(error)), "remedy": ""})

    def _explain(self, text: str) -> dict[str, Any]:
        """What slurmctld decided for a job; one at a time, so that many cannot take this daemon's time."""
        name = parse_job(text)
        job = self._record_of(name)
        submit, known = (None, None) if job is None else (job["submit_time"], job["id"])
        with self._explaining:
            try:
                found = explain_job(self.site.state_save / FOLDER, name, submit=submit, known_id=known)
            except DecisionError as error:
                log.info("explain %s: %s", name, one_line(str(error)))
                found = None
        if job is not None:
            found = {"schema_version": 1, "job": str(name), **(found or {}), **self._more_of(job)}
        return {"explanation": found}

    def _record_of(self, name: JobName) -> dict[str, Any] | None:
        """What is published of a job; of an array's task its own record, or that of all tasks that wait."""
        if name.task is None:
            found: dict[str, Any] | None = self.snapshot.get("jobs", str(name.id))
            return found
        rows = self.snapshot.rows_with("jobs", "array_id", name.id)
        return next((row for row in rows if is_record_of(name, row["id"], row["array_id"], row["array_tasks"])), None)

    def _more_of(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of a job in addition to slurmctld's decisions."""
        config, number = self.site.config(), job["id"]
        self._checkpoints = self._checkpoints or SiteCheckpoints(config)
        found: dict[str, Any] = {"checkpoint": self._checkpoints.of(number, job["account"], job["comment"])}
        try:
            if moves := sentences(site_moves(config), number, others="jobs" not in private_words(config)):
                found["moves"] = moves
        except (OSError, SluiceError) as error:
            log.info("explain %d: moves: %s", number, one_line(str(error)))
        self._preflights = self._preflights or SitePreflights(config)
        try:
            if preflights := self._preflights.of(number, job["user"]):
                found["preflights"] = preflights
        except SluiceError as error:
            log.info("explain %d: preflights: %s", number, one_line(str(error)))
        if words := words_for_job(number, job["state"], job["nodes"], job["partition"], self.settings.fleet):
            found["pools"] = words
        return found

    def _verify(self, token: str) -> dict[str, Any]:
        """Whose token of Slurm it is: the key stays here, as who has it can be anybody."""
        path = jwt.key_file(self.site.config())
        try:
            key = path.read_bytes()
        except OSError as error:
            log.error("%s: %s", path, error.strerror)
            raise SluiceError("Slurm's key for tokens cannot be read", remedy="see the daemon's log") from error
        claims = jwt.verify(token, key, time.time())
        return {"user": claims.user, "expires": claims.expires}

    # ---- the socket ----

    def serve(self, site: Site) -> None:
        """A duty that lasts: answer root, and the users of the web process, of replicad and of gateways. Raises
        OSError, SluiceError."""
        kinds: dict[int, Kind] = {}
        for user, kind in ((self.settings.gateway_user, TOKENS), (self.settings.serve_user, SERVING)):
            with suppress(KeyError):
                kinds[pwd.getpwnam(user).pw_uid] = kind
        try:
            kinds[pwd.getpwnam(self.settings.user).pw_uid] = _ROOM
        except KeyError:
            log.info("no user %s: only root may have the snapshot", self.settings.user)
        kinds |= {0: _ROOM, os.geteuid(): _ROOM}
        serve_local(
            self.settings.socket,
            lambda line, uid: self.answer(line, kinds.get(uid)),
            (_ROOM, SERVING, TOKENS),
            kinds.get,
            site.stopping,
            remedy=_FOLDER_REMEDY,
        )


# ---- rows ----


def job_row(job: Job) -> dict[str, Any]:
    """A job as viewers get it: bounded, as its user writes some of it."""
    return {
        "id": job.id,
        "array_id": job.array_id,
        "array_tasks": job.array_tasks[:_MOST_TEXT],
        "name": job.name[:_MOST_TEXT],
        "user": job.user,
        "account": job.account,
        "qos": job.qos,
        "partition": job.partition[:_MOST_TEXT],
        "state": job.state,
        "reason": job.reason[:_MOST_TEXT],
        "nodes": job.nodes[: 16 * _MOST_TEXT],
        "node_count": job.node_count,
        "cpus": job.cpus,
        "gpus": job.tres.get("gres/gpu", 0),
        "gpu_mem_mib": job.tres.get("gres/shard", 0),
        "memory_mib": job.tres.get("mem", 0),
        "submit_time": job.submit_time,
        "eligible_time": job.eligible_time,
        "start_time": job.start_time,
        "end_time": job.end_time,
        "time_limit_s": job.time_limit_s,
        "priority": job.priority,
        "features": job.features[:_MOST_TEXT],
        "dependency": job.dependency[:_MOST_TEXT],
        "reservation": job.reservation[:_MOST_TEXT],
        "comment": job.comment[:_MOST_TEXT],
        "work_dir": job.work_dir[:_MOST_TEXT],
        "refused": reason_in(job.admin_comment),
    }


def _answer_only(do: str, line: bytes, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """To who may ask for one thing."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or request.get("version") != VERSION or request.get("do") != do:
            raise SluiceError(f"request: not {do}", remedy="install one version of Sluice")
        return render_answer(answer(request))
    except SluiceError as error:
        return render_answer({"error": error.what, "remedy": error.remedy, "usage": error.usage})
    except (OSError, ValueError, RecursionError) as error:
        return render_answer({"error": one_line(str(error)), "remedy": ""})


def enumerate_rows(rows: Iterable[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Rows of a history with keys by which they sort: their times, and their places among those of one time."""
    seen: Counter[float] = Counter()
    for row in rows:
        seen[row["time"]] += 1
        yield f"{row['time']:020.6f}-{seen[row['time']]:04}", row


def class_rows(classes: Iterable[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The GPUs of a class on a node, as all of a class may be too many for a row."""
    for one in classes:
        of_node: dict[str, list[Any]] = {node: [] for node in one["nodes"]}
        for gpu in one["gpus"]:
            of_node[gpu["node"]].append(gpu)
        for node, gpus in of_node.items():
            yield f"{one['name']}/{node}", {"name": one["name"], "feature": one["feature"], "node": node, "gpus": gpus}


# ---- duties ----

_settings: weakref.WeakKeyDictionary[Site, Settings] = weakref.WeakKeyDictionary()


def configure(site: Site, settings: Settings) -> None:
    """Before `duties`: other settings than the usual ones."""
    _settings[site] = settings


def make_folder(path: Path, user: int) -> None:
    """As root, without systemd: the socket's folder, of the daemon's user; what is there stays as it is."""
    with suppress(FileExistsError):
        path.mkdir()
        path.chmod(0o755)
        os.chown(path, user, -1)


def duties(site: Site) -> list[Duty]:
    """For `sluice.controllerd.daemon`; none where the socket's folder is not there, as with an older service file."""
    settings = _settings.get(site, Settings())
    if not settings.socket.parent.is_dir():
        log.warning("no snapshot for sluice web: %s: not there; %s", settings.socket.parent, _FOLDER_REMEDY)
        return []
    publisher = Publisher(site, settings)

    def refresh(group: str) -> Callable[[Site], None]:
        return lambda _: publisher.refresh(group)

    found = [
        Duty(f"snapshot-{group}", _FOLLOW_S if group == "jobs" else _LOOK_S, refresh(group), everywhere=True)
        for group in publisher.groups
    ]
    check = Duty("snapshot-check", _CHECK_S / 10, lambda _: publisher.check(), everywhere=True)
    return [
        Duty("snapshot", 10.0, publisher.serve, everywhere=True, lasting=True),
        *found,
        check,
        *publisher.reports.duties(),
    ]
