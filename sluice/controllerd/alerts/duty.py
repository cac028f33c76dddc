"""Alerts as duties of the controllers' daemon: one evaluates, one delivers, so slow sinks delay no evaluation."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from policy.alerts import NodeRule
from policy.node import FILE_NAME, NodePolicyFile
from sluice.base.errors import SluiceError
from sluice.base.events import Event, read
from sluice.base.files import write_atomic
from sluice.base.text import one_line
from sluice.controllerd.alerts.engine import STATE_FILE, Engine, OvertakenError
from sluice.controllerd.alerts.observe import Observation
from sluice.controllerd.alerts.outbox import Outbox
from sluice.controllerd.alerts.sinks import Email, make_sinks
from sluice.controllerd.daemon import Duty, Site, of_site
from sluice.controllerd.readings import readings_of
from sluice.exchange.live import LIVE_FILE, live
from sluice.exchange.silences import FOLDER
from sluice.slurm.answers import Job

"""Below StateSaveLocation, which both controllers see."""
_TICK_S = 5.0
_DELIVER_S = 2.0
_SHOW_S = 10.0
_COMMAND_S = 20.0

log = logging.getLogger("sluice.alerts")


def alerts_folder(state_save: Path) -> Path:
    """Where alerts, silences and the outbox are."""
    return state_save / FOLDER


class Alerting:
    """What both duties share."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._stamp: tuple[int, int] | None = None
        self._next = 0.0
        self._led = 0.0
        self._shown = False

    @cached_property
    def policy(self) -> NodePolicyFile:
        """The policy in force. Raises SluiceError where its folder is not known yet."""
        return NodePolicyFile(self.site.conf_folder / FILE_NAME)

    def look(self, site: Site) -> None:
        """A duty. Raises SluiceError, OSError."""
        settings = self.policy.current().alerts
        now = time.monotonic()
        if not settings.rules:
            self._forget()
            return
        if now < self._next:
            return
        away = now - self._led > 4 * max(_TICK_S, settings.interval)
        self._next, self._led = now + settings.interval, now
        if self._engine is None or away:  # another controller may have led in between
            self._engine = self._load()
        seen = Observation(site)
        try:
            self._engine.happened(settings, self._events(), seen.gpus)
            self._engine.step(settings, seen.look, self._act)
        except OvertakenError:
            self._engine = None
            raise
        except BaseException:
            self._stamp = None  # they are still to be reported
            raise

    def _forget(self) -> None:
        """The policy has no rules any more: alerts that fired are dropped."""
        if self.policy.loaded and self.policy.problem is None:
            self._engine = None
            (alerts_folder(self.site.state_save) / STATE_FILE).unlink(missing_ok=True)

    def _load(self) -> Engine:
        folder = alerts_folder(self.site.state_save)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._stamp = None
        return Engine(folder, self.site.config().get("ClusterName", ""), Outbox(folder / "outbox"), self.site.host)

    def _events(self) -> list[Event]:
        """This controller's events, where there are new ones."""
        try:
            facts = self.site.events.stat()
            stamp = facts.st_ino, facts.st_size
            if stamp == self._stamp:
                return []
            found = read(self.site.events)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.info("%s: %s", self.site.events, error)
            return []
        self._stamp = stamp
        return found

    def show(self, site: Site) -> None:
        """A duty: the latest readings, where `sluice top` of root and SlurmUser finds them. Raises OSError."""
        fresh = readings_of(site).fresh()
        path = site.state_save / LIVE_FILE
        if fresh:
            write_atomic(path, json.dumps(live(fresh, time.time())), mode=0o600, follow_links=False)
        elif self._shown:
            path.unlink(missing_ok=True)
        self._shown = bool(fresh)

    def deliver(self, site: Site) -> None:
        """A duty. Messages wait where no policy was read that could name their sinks. Raises SluiceError, OSError."""
        folder = alerts_folder(site.state_save) / "outbox"
        if folder.is_dir():
            if self._outbox is None or self._outbox.folder != folder:
                self._outbox = Outbox(folder)
            policy = self.policy
            sinks = policy.current().alerts.sinks
            if policy.loaded:
                self._outbox.deliver(make_sinks(sinks))

    # ---- actions ----

    def _act(self, rule: NodeRule, what: str, number: int) -> None:
        """Raises SluiceError; nothing is done to a job by a controller that does not lead any more."""
        if not self.site.leads():
            raise SluiceError("another controller leads now")
        job = next((job for job in self.site.client.jobs(ids=[number]) if job.id == number), None)
        if job is None:
            return
        if what == "notify":
            self._notify(rule, job)
        elif what == "signal":
            self._slurm("scancel", f"--signal={rule.signal}", "--batch", job.own_name)
            self._slurm("scancel", f"--signal={rule.signal}", job.own_name)
        else:
            self._slurm("scancel", job.own_name)
        log.warning("rule %s: job %d: %s", rule.name, number, what)

    def _notify(self, rule: NodeRule, job: Job) -> None:
        text = f"Sluice: a GPU of job {job.own_name} has been idle for {rule.duration // 60} minutes."
        if rule.action == "cancel":
            text += f" The job is cancelled in {rule.warning // 60} minutes unless it uses its GPU."
        try:
            self._slurm("scontrol", "notify", job.own_name, text)
        except SluiceError as error:  # the user of a job without a step to write to gets only mail
            log.info("job %d: %s", job.id, one_line(str(error)))
        for sink in self.policy.current().alerts.sinks.values():
            if sink.get("kind") == "email" and sink.get("users"):
                try:
                    address = f"{job.user}@{sink['users']}"
                    Email(sink).send(
                        [address], f"job {job.own_name}: idle GPU", text + "\n", f"job-{job.id}-{int(time.time())}"
                    )
                except (OSError, SluiceError) as error:
                    log.error("mail to the user of job %d: %s", job.id, one_line(str(error)))

    def _slurm(self, command: str, *words: str) -> None:
        self.site.commands.run(command, *words, timeout=_COMMAND_S)


_alerting_of = of_site(Alerting)


def duties(site: Site) -> Iterable[Duty]:
    """For `sluice.controllerd.daemon`."""
    alerting = _alerting_of(site)
    return [
        Duty("alerts", _TICK_S, alerting.look),
        Duty("alerts-deliver", _DELIVER_S, alerting.deliver),
        Duty("readings", _SHOW_S, alerting.show),
    ]
