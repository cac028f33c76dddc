"""Health on the controllers: accepts nodes' reports, and carries out the keeper's decisions. Duties of controllerd.

Its state is StateSaveLocation/sluice.health.json, where the backup controller's daemon finds it, too; what is
out of service is in sluice.withdrawn next to it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from policy.checkpoint import NodeCheckpoint
from policy.node import FILE_NAME, NodePolicy, NodePolicyFile
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.files import stamp_of, write_atomic
from sluice.base.hostlist import expand, fold
from sluice.base.text import one_line
from sluice.controllerd.daemon import Duty, Site, of_site
from sluice.controllerd.health import withdrawn
from sluice.controllerd.health.checkpoints import Checkpoints
from sluice.controllerd.health.keeper import Act, Keeper, State, from_document, to_document
from sluice.controllerd.health.listing import explain, rows_of
from sluice.controllerd.health.requeue import Requeue, Requeues
from sluice.controllerd.health.running import Running
from sluice.controllerd.readings import running_of
from sluice.exchange.health_report import parse_report
from sluice.exchange.saves import PLUGINS_FILE, SAVES_FILE, Saves, read_saves, write_for_plugins
from sluice.slurm.answers import Job, Node
from sluice.slurm.control import Control

STATE_FILE = "sluice.health.json"
PERIOD_S = 5.0
_SOON_S = 1.5
_CHECKPOINT_S = 5.0
_SAVES_S = 60.0  # between two writings of saves when nothing but time has passed
_MAX_BYTES = 64 << 20
_MOST_HISTORY = 120  # an answer of the inbox holds 64 KiB
_MOST_ROWS = 120
_MOST_PUBLISHED = 20_000

log = logging.getLogger("sluice.health")


class Controller:
    """The keeper with Slurm's commands, files and events."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keeper = Keeper()
        self.lock = threading.RLock()
        self._policy: NodePolicyFile | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._requeues = Requeues(site.commands, self._job_event)
        self._checkpoints = Checkpoints()
        self._saves_stamp: tuple[int, int, int] | None = None
        self._saves_written = -_SAVES_S
        self._listed = Running(site.client)
        self._running: dict[str, dict[int, float]] = {}  # node -> its jobs, when they were last looked at
        self._silent: set[str] = set()  # nodes that did not respond when jobs were last looked at
        self._down: set[str] = set()
        self._saved = ""
        self._stepped = -PERIOD_S
        self._woken = False

    # ---- requests ----

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """``health`` of the inbox: a node's report, what is known (``list``), or a GPU's return by hand."""
        with self.lock:
            self._load()
            if "report" in request:
                report = parse_report(request["report"])
                self._woken |= self.keeper.is_news(report)
                return self.keeper.take(report, time.time())
            if "return" in request:
                return self._return(request["return"])
            if "history" in request:
                return {"events": self._history(request["history"])}
            if "list" in request:
                return self._list()
            if "why" in request:
                return {"lines": explain(self.keeper.state, str(request["why"]), time.time())}
        raise SluiceError("health request: not one of report, list, why, history, return")

    def listing(self) -> dict[str, Any]:
        """What is known, for viewers; also where this controller does not lead."""
        with self.lock:
            self._load()
            return self._list(_MOST_PUBLISHED)

    def _list(self, most: int = _MOST_ROWS) -> dict[str, Any]:
        """All faults and what is out of service."""
        rows, healthy = rows_of(self.keeper.state, time.time())
        return {
            "mode": self._policy_of().health.mode,
            "breaker_since": self.keeper.state.breaker_since,
            "rows": [asdict(row) for row in rows[:most]],
            "left_out": max(0, len(rows) - most),
            "healthy": fold(healthy),
        }

    def _history(self, node: Any) -> list[dict[str, Any]]:
        """The last events of health, or of one node."""
        found = [
            {"time": one.time, "kind": one.kind, **one.fields}
            for one in events.read(self.site.events)
            if one.kind.startswith("health.") and (not node or one.fields.get("node") == node)
        ]
        return found[-_MOST_HISTORY:]

    def _return(self, asked: Any) -> dict[str, Any]:
        if not isinstance(asked, dict) or not isinstance(asked.get("node"), str):
            raise SluiceError("return: names no node")
        number = asked.get("gpu")
        if number is not None and not isinstance(number, int):
            raise SluiceError(f"return: GPU {number!r} is not a number")
        known = {*self.keeper.state.nodes, *self.keeper.state.reports}
        if asked["node"] not in known:
            raise SluiceError(
                f"node {asked['node']}: has not sent a report",
                remedy="check that its agent runs; see: sluice health list",
            )
        acts = self.keeper.return_by_hand(asked["node"], number)
        self._carry_out(acts, by="hand")
        self._save()
        return {"done": [act.kind for act in acts]}

    # ---- the duty ----

    def run(self, site: Site) -> None:
        """The duty: a step every `PERIOD_S`, and soon after a report that brings news."""
        passed = time.monotonic() - self._stepped
        if passed >= PERIOD_S or (self._woken and passed >= _SOON_S):
            self._stepped, self._woken = time.monotonic(), False
            self.step(site)

    def step(self, site: Site) -> None:
        """Check everything once, and do what is due."""
        nodes = site.client.nodes()
        with self.lock:
            self._load()
            self._load_saves()
            policy = self._policy_of()
            now = time.time()
            if policy.health.mode != "off":
                acts = self.keeper.decide(nodes, policy.health, now, by_gpu=self._by_gpu())
                # Before jobs are taken off a GPU and anything is reported: no other may start there.
                withdrawn.write(site.state_save / withdrawn.FILE_NAME, self.keeper.state.withdrawn())
                self._carry_out(acts)
            else:
                self._carry_out(self._give_all_back())
            withdrawn.write(site.state_save / withdrawn.FILE_NAME, self.keeper.state.withdrawn())
            self._save()
        silent = {node.name for node in nodes if "not_responding" in node.flags}
        # A node that stops to respond gets no more jobs, and keeps those that it has until Slurm takes it for down:
        # this is the moment to see which it has. It may take seconds, in which requests are answered.
        running = self._listed.jobs(fresh=not silent <= self._silent)
        self._silent = silent
        with self.lock:
            self._load()
            self._watch_nodes(nodes, running, policy, now)
            if self.keeper.state.jobs:
                sizes = {one.name: one.node_count for one in site.client.partitions()}
                self._requeues.advance(
                    self.keeper.state.jobs, self.keeper.state.tries, policy.checkpoint, now, sizes, self._down
                )
            self._save()

    def signal(self, site: Site) -> None:
        """Signal running jobs that save their state, and keep what they answer."""
        jobs = self._listed.jobs()
        with self.lock:
            self._load_saves()
            policy = self._policy_of().checkpoint
            now = time.time()
            heard = self._checkpoints.hear(jobs, running_of(site).saved(), now)
            heard |= self._checkpoints.know(running_of(site).unsaved())
            due = self._checkpoints.due(jobs, policy, now)
        try:  # first, so that a daemon that is killed in between does not send them again
            if heard or due or time.monotonic() - self._saves_written >= _SAVES_S:
                self._save_saves()
        finally:  # a full disk keeps no signal back
            self._ask_jobs(due, policy)
        for job in due:
            log.info("job %d: signalled to save its state", job.id)

    def ask_to_save(self, jobs: Iterable[Job]) -> set[int]:
        """Signal those that save their state, as others will end them; which these are."""
        with self.lock:
            policy = self._policy_of().checkpoint
            asked = [job for job in jobs if self._checkpoints.ask(job, policy, time.time())]
        self._ask_jobs(asked, policy)
        return {job.id for job in asked}

    def _ask_jobs(self, jobs: list[Job], policy: NodeCheckpoint) -> None:
        control, by_system = Control(self.site.commands), [job for job in jobs if policy.is_system(job.comment)]
        control.signal([job for job in jobs if job not in by_system], policy.signal)
        control.save(by_system)

    def saved(self, job: int) -> float | None:
        """When a job last saved its state; asks for no lock, as budgets do not wait for Slurm's commands."""
        one = self._checkpoints.saves.jobs.get(job)
        return one.saved if one else None

    def _policy_of(self) -> NodePolicy:
        if self._policy is None:
            self._policy = NodePolicyFile(self.site.conf_folder / FILE_NAME)
        policy = self._policy.current()
        if self._policy.problem is not None:
            log.warning("%s", one_line(str(self._policy.problem)))
        return policy

    def _by_gpu(self) -> bool:
        """Whether the placement hook is in slurmctld and on: else a GPU cannot be taken out, only its node."""
        try:
            report = json.loads((self.site.state_save / f"sluice.status.{self.site.host}").read_text())
            return "select" in report["plugins"] and report["level"] != "off"
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _give_all_back(self) -> list[Act]:
        """Undo what is in force, as the policy has switched health off."""
        return [act for name in list(self.keeper.state.nodes) for act in self.keeper.return_by_hand(name, None)]

    def _carry_out(self, acts: Iterable[Act], by: str = "health") -> None:
        """Do it; what Slurm refuses is tried again with the next step."""
        for act in acts:
            try:
                if act.kind == "drain":
                    self._scontrol(act.node, "state=drain", f"reason={act.reason}")
                elif act.kind == "undrain":
                    self._scontrol(act.node, "state=undrain")
                elif act.kind == "requeue":
                    if all(one.key != act.key for one in self.keeper.state.jobs.values()):
                        self._checkpoints.failed(act.node)  # once, however many jobs it hit
                    self.keeper.state.jobs.setdefault(act.job, Requeue(act.node, act.reason, act.key, act.began))
            except SluiceError as error:
                log.error("%s %s: %s", act.kind, act.node, one_line(str(error)))
                continue
            now = time.time()
            self.keeper.done(act, now)
            if act.kind != "requeue":
                self._event(act, by)

    def _scontrol(self, node: str, *changes: str) -> None:
        self.site.commands.output("scontrol", "update", f"nodename={node}", *changes)

    def _watch_nodes(self, nodes: list[Node], running: list[Job], policy: NodePolicy, now: float) -> None:
        """Nodes that went down: Slurm requeues their jobs itself; here they get wait, hint and budget."""
        down = {node.name for node in nodes if node.state == "down" and "not_responding" in node.flags}
        for name in sorted(down - self._down):
            jobs = self._running.get(name, {})
            if jobs:
                self._checkpoints.failed(name)
            self._event(
                Act("event", name, f"not responding; jobs {','.join(map(str, jobs)) or 'none'}", event="health.down")
            )
            for job in jobs if policy.checkpoint.requeue else ():
                requeue = Requeue(name, f"{name} went down", f"{name}/down/{now:.0f}", now, silent=True)
                self.keeper.state.jobs.setdefault(job, requeue)
        self._down = down
        self._running = {name: self._running.get(name, {}) for name in down}
        for one in running:
            for name in expand(one.nodes) if one.nodes else ():
                if name not in down:
                    self._running.setdefault(name, {})[one.id] = now
        self._checkpoints.watch(nodes, self._running.keys() - down, now)

    # ---- events and state ----

    def _event(self, act: Act, by: str = "health") -> None:
        kind = act.event or f"health.{act.kind}"
        log.warning("%s %s %s", kind, act.node, act.reason)
        fields: dict[str, Any] = {"node": act.node, "reason": act.reason, "by": by}
        if act.numbers:
            fields |= {"gpus": list(act.numbers), "uuid": act.uuid}
        self._append(kind, fields)

    def _job_event(self, kind: str, node: str, job: int, words: str) -> None:
        log.warning("%s %s job %d: %s", kind, node, job, words)
        self._append(kind, {"node": node, "job": job, "reason": words})

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        try:
            events.append(self.site.events, kind, **fields)
        except (OSError, SluiceError) as error:
            log.error("event %s: %s", kind, one_line(str(error)))

    def _load_saves(self) -> None:
        """As `_load`."""
        path = self.site.state_save / SAVES_FILE
        stamp = stamp_of(path)
        if stamp == self._saves_stamp:
            return
        self._saves_stamp = stamp
        try:
            self._checkpoints.saves = read_saves(path)
        except SluiceError as error:
            log.error("%s", one_line(str(error)))
            self._checkpoints.saves = Saves()

    def _save_saves(self) -> None:
        path = self.site.state_save / SAVES_FILE
        with self.lock:
            if self._checkpoints.saves == Saves():
                return
            self._checkpoints.saves.write(path)
            write_for_plugins(path.with_name(PLUGINS_FILE), self._checkpoints.saves)
            self._saves_written = time.monotonic()
            self._saves_stamp = stamp_of(path)

    def _path(self) -> Path:
        return self.site.state_save / STATE_FILE

    def _load(self) -> None:
        """Read the state, where another daemon has written it since: at the start, and after a takeover and back."""
        stamp = stamp_of(self._path())
        if stamp is None:
            if self._stamp is None:
                self._adopt()
                self._stamp = (0, 0, 0)
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._saved = ""
        try:
            with self._path().open("rb") as file:
                self.keeper.state = from_document(json.loads(file.read(_MAX_BYTES)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SluiceError) as error:
            log.error("%s: damaged, starting with an empty state: %s", self._path(), one_line(str(error)))
            self.keeper.state = State()
            self._adopt()

    def _adopt(self) -> None:
        """Without a state: what is out of service stays so until its node reports."""
        try:
            gpus = withdrawn.read(self.site.state_save / withdrawn.FILE_NAME)
        except SluiceError as error:
            log.error("%s", one_line(str(error)))
            return
        self.keeper.adopt(gpus, time.time())

    def _save(self) -> None:
        text = json.dumps(to_document(self.keeper.state), separators=(",", ":"))
        if text == self._saved:
            return
        write_atomic(self._path(), text + "\n", mode=0o600)
        self._saved = text
        self._stamp = stamp_of(self._path())


controller_of = of_site(Controller)
"""The one of this daemon."""


def duties(site: Site) -> list[Duty]:
    """For `sluice.controllerd.daemon`."""
    controller = controller_of(site)
    return [Duty("health", 1.0, controller.run), Duty("checkpoints", _CHECKPOINT_S, controller.signal)]
