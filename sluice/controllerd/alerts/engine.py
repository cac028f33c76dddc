"""Which alerts there are: a condition that lasts fires once, is repeated, and is resolved; an event is reported once.

The state is a file next to slurmctld's own, so that the next controller continues where this one ended. A message is on
disk before the state says that it was sent: after a crash in between it is made again, with the same ID.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

from policy.alerts import NodeAlerts, NodeRule
from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.events import Event
from sluice.base.files import stamp_of, write_atomic
from sluice.base.hostlist import expand
from sluice.base.text import one_line
from sluice.controllerd.alerts.message import Message, Subject, make
from sluice.controllerd.alerts.observe import DATABASE_KINDS, Found, Seen
from sluice.controllerd.alerts.outbox import Outbox, read_json
from sluice.exchange.live import GpuReading
from sluice.exchange.silences import Silence, read_silences

STATE_FILE = "state.json"
_MOST_ALERTS = 20_000
_FORGET_S = 3600.0
_LATE_S = 600.0  # a takeover is reported by the controller that took over, which may lead for the first time
_HAPPENED_KINDS = ("takeover", "agent-lost", "errors")
_AGENT_LOST = "sluice: agent_lost: "  # how the finding of that check begins (sluice.exchange.health_report)
_JUMP_S = 5.0  # between two looks, and the clock was set

log = logging.getLogger("sluice.alerts")


@dataclass
class Alert:
    """One subject of one rule, from the moment at which its threshold was reached."""

    since: float
    value: float = 0.0
    text: str = ""
    fired: float | None = None  # when it was first sent
    sent: float | None = None  # when it was last sent
    silenced: bool = False
    unknown: float | None = None  # since when it is not reported, e.g. its node is gone
    warned: float | None = None  # the action's warning
    acted: float | None = None
    jobs: list[int] = field(default_factory=list)

    def move(self, seconds: float) -> None:
        """The clock was set: keep durations as they were."""
        self.since += seconds
        for name in ("fired", "sent", "unknown", "warned", "acted"):
            at = getattr(self, name)
            if at is not None:
                setattr(self, name, at + seconds)


def clocks() -> tuple[float, float]:
    """The time, and monotonic seconds since the boot."""
    return time.time(), uptime()


Look = Callable[[NodeRule], Found]
Act = Callable[[NodeRule, str, int], None]
"""Carries out ``notify``, ``signal`` or ``cancel`` on a job. Raises SluiceError."""


class OvertakenError(SluiceError):
    """Another controller wrote the state after this one read it."""


class Engine:
    """The alerts of one cluster in a folder."""

    def __init__(
        self,
        folder: Path,
        cluster: str,
        outbox: Outbox,
        host: str = "",
        clocks: Callable[[], tuple[float, float]] = clocks,
    ) -> None:
        self._clocks = clocks
        self._last: tuple[float, float] | None = None
        self.folder = folder
        self.cluster = cluster
        self.outbox = outbox
        self.host = host
        self.alerts: dict[str, dict[str, Alert]] = {}  # rule -> subject -> alert
        self.seqs: dict[str, int] = {}  # controller -> the last event of its file that was looked at
        self.counters: dict[str, int] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._load()

    # ---- one look ----

    def step(self, settings: NodeAlerts, look: Look, act: Act, now: float | None = None) -> None:
        """Evaluate all rules, send messages, act, and save the state. Raises OSError, OvertakenError."""
        self._check()
        now = self._now() if now is None else now
        silences = read_silences(self.folder, now)
        sinks = tuple(settings.sinks)
        lasting = [rule for rule in settings.rules if rule.kind not in _HAPPENED_KINDS]
        for rule in sorted(
            lasting, key=lambda rule: rule.kind in DATABASE_KINDS
        ):  # one that hangs delays no other rule
            try:
                found = look(rule)
            except (SluiceError, OSError) as error:
                log.info("rule %s: %s", rule.name, one_line(str(error)))
                continue  # not known now: what fires continues to fire
            self._rule(rule, found, silences, sinks, now)
            self._act(rule, act, now)
        for gone in [name for name in self.alerts if name not in {rule.name for rule in settings.rules}]:
            del self.alerts[gone]  # the rule was removed
        self.save()

    def _now(self) -> float:
        """The time; where it was set since the last evaluation, alerts are shifted, so their ages stay."""
        now, steady = self._clocks()
        if self._last is not None:
            jump = now - self._last[0] - (steady - self._last[1])
            if abs(jump) > _JUMP_S:
                log.warning("the clock was set by %+.0f s", jump)
                for alert in (one for mine in self.alerts.values() for one in mine.values()):
                    alert.move(jump)
        self._last = now, steady
        return now

    def _rule(self, rule: NodeRule, found: Found, silences: list[Silence], sinks: tuple[str, ...], now: float) -> None:
        mine = self.alerts.setdefault(rule.name, {})
        fire: list[Subject] = []
        repeat: list[Subject] = []
        for name, seen in found.seen.items():
            alert = mine.get(name)
            if alert is None:
                if len(mine) >= _MOST_ALERTS:
                    continue
                alert = mine[name] = Alert(now)
            alert.value, alert.text, alert.jobs = seen.value, one_line(seen.text), list(seen.jobs)
            alert.unknown = None
            alert.silenced = _silent(rule, name, silences, now)
            if alert.silenced or now - alert.since < rule.duration:
                continue
            if alert.fired is None:
                alert.fired = alert.sent = now
                fire.append(Subject(name, alert.value, alert.text, alert.since))
            elif rule.repeat and now - (alert.sent or 0) >= rule.repeat:
                alert.sent = now
                repeat.append(Subject(name, alert.value, alert.text, alert.since))
        over: list[Subject] = []
        for name in [name for name in mine if name not in found.seen]:
            if not found.known(name) and not self._unknown_too_long(mine[name], now):
                continue
            alert = mine.pop(name)
            if alert.fired is not None and not _silent(rule, name, silences, now):
                over.append(Subject(name, alert.value, alert.text, alert.since))
        self._send(rule, "firing", fire, sinks, now, key="fire")
        self._send(rule, "firing", repeat, sinks, now, key=f"repeat {int(now)}")
        self._send(rule, "resolved", over, sinks, now, key="over")

    @staticmethod
    def _unknown_too_long(alert: Alert, now: float) -> bool:
        if alert.unknown is None:
            alert.unknown = now
        return now - alert.unknown > _FORGET_S

    def _send(
        self, rule: NodeRule, state: str, subjects: list[Subject], sinks: tuple[str, ...], now: float, *, key: str
    ) -> None:
        if not subjects:
            return
        said = f"{self.cluster}\n{rule.name}\n{key}\n" + "\n".join(f"{one.name}\n{one.since}" for one in subjects)
        number = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        message = make(
            id=number,
            at=now,
            cluster=self.cluster,
            state=state,
            subjects=subjects,
            rule={"name": rule.name, "kind": rule.kind, "severity": rule.severity},
        )
        self.outbox.put(message, rule.sinks or sinks)

    def _act(self, rule: NodeRule, act: Act, now: float) -> None:
        """What is done to jobs of alerts that fire: once each; the end of a job only after its warning."""
        if not rule.action:
            return
        for name, alert in self.alerts.get(rule.name, {}).items():
            if alert.fired is None or alert.silenced:
                continue
            for job in alert.jobs:
                try:
                    if alert.warned is None:
                        act(rule, "notify", job)
                        if rule.action == "signal":
                            act(rule, "signal", job)
                        alert.warned = now
                    elif rule.action == "cancel" and alert.acted is None and now - alert.warned >= rule.warning:
                        act(rule, "cancel", job)
                        alert.acted = now
                except SluiceError as error:
                    log.error("rule %s, %s: %s", rule.name, one_line(name), one_line(str(error)))

    # ---- what happens ----

    def happened(
        self, settings: NodeAlerts, events: Iterable[Event], gpus: Iterable[GpuReading], now: float | None = None
    ) -> None:
        """Report events of the controllers, and new errors of GPUs. Raises OSError, OvertakenError."""
        self._check()
        now = time.time() if now is None else now
        silences = read_silences(self.folder, now)
        events = self._new(events, now)
        grown = self._grown(gpus)
        for rule in settings.rules:
            if rule.kind == "takeover":
                for event in events:
                    if event.kind == "takeover":
                        self._once(
                            rule,
                            f"controller {event.fields.get('leader', '')}",
                            _event(event),
                            event.time,
                            f"event {self.host} {event.seq} {event.time}",
                            silences,
                            settings,
                            now,
                        )
            elif rule.kind == "agent-lost":
                for event in filter(_is_agent_lost, events):
                    node = str(event.fields.get("node", ""))
                    if not rule.nodes or node in expand(rule.nodes):
                        self._once(
                            rule,
                            f"node {node}",
                            _event(event),
                            event.time,
                            f"event {self.host} {event.seq} {event.time}",
                            silences,
                            settings,
                            now,
                        )
            elif rule.kind == "errors":
                for name, count in grown.items():
                    if count >= rule.threshold:
                        self._once(
                            rule,
                            name,
                            Seen(count, f"{count} new uncorrected errors or XID events"),
                            now,
                            f"errors {self.counters.get(name)}",
                            silences,
                            settings,
                            now,
                        )
        self.seqs[self.host] = max([self.seqs.get(self.host, 0), *(event.seq for event in events)])
        self.save()

    def _new(self, events: Iterable[Event], now: float) -> list[Event]:
        """New events. Each controller has its own file; of one that never led, the latest."""
        seen = self.seqs.get(self.host)
        if seen is None:
            return [event for event in events if event.time > now - _LATE_S]
        return [event for event in events if event.seq > seen]

    def _once(
        self,
        rule: NodeRule,
        name: str,
        seen: Seen,
        since: float,
        key: str,
        silences: list[Silence],
        settings: NodeAlerts,
        now: float,
    ) -> None:
        if not _silent(rule, name, silences, now):
            subject = Subject(name, seen.value, one_line(seen.text), since)
            self._send(rule, "happened", [subject], tuple(settings.sinks), now, key=key)

    def _grown(self, gpus: Iterable[GpuReading]) -> dict[str, int]:
        """GPUs whose count of errors grew; one that was reset (a driver that was loaded again) counts from there."""
        found = {}
        for gpu in gpus:
            if gpu.errors is None:
                continue
            name = gpu.name
            before = self.counters.get(name)
            if before is not None and gpu.errors > before:
                found[name] = gpu.errors - before
            self.counters[name] = gpu.errors
        return found

    # ---- the state ----

    def save(self) -> None:
        """Raises OSError, and OvertakenError instead of undoing what another controller wrote."""
        self._check()
        path = self.folder / STATE_FILE
        document = {
            "schema_version": 1,
            "seqs": self.seqs,
            "counters": self.counters,
            "alerts": {
                rule: {name: asdict(alert) for name, alert in mine.items()} for rule, mine in self.alerts.items()
            },
        }
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(document) + "\n", mode=0o600, follow_links=False)
        self._stamp = stamp_of(path)

    def _check(self) -> None:
        path = self.folder / STATE_FILE
        if stamp_of(path) != self._stamp:
            raise OvertakenError(
                f"{path}: another controller has written it", remedy="none is needed: it is read again"
            )

    def _load(self) -> None:
        self._stamp = stamp_of(self.folder / STATE_FILE)
        document: dict[str, Any] = dict(read_json(self.folder / STATE_FILE))
        try:
            self.seqs = {str(host): int(seq) for host, seq in document.get("seqs", {}).items()}
            self.counters = {str(name): int(count) for name, count in document.get("counters", {}).items()}
            self.alerts = {
                rule: {name: _alert(one) for name, one in mine.items()}
                for rule, mine in document.get("alerts", {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            log.error("%s: %s; starting empty", self.folder / STATE_FILE, one_line(str(error)))
            self.alerts, self.counters, self.seqs = {}, {}, {}


def _alert(fields: dict[str, Any]) -> Alert:
    return Alert(**{"sent" if name == "told" else name: value for name, value in fields.items()})  # told until 0.1.0


def _silent(rule: NodeRule, subject: str, silences: Iterable[Silence], now: float) -> bool:
    if rule.silence is not None and _day(now) < rule.silence:
        return True
    return any(one.matches(rule.name, subject) for one in silences)


def _day(now: float) -> date:
    return datetime.fromtimestamp(now).date()


def _is_agent_lost(event: Event) -> bool:
    return event.kind == "health.warn" and str(event.fields.get("reason", "")).startswith(_AGENT_LOST)


def _event(event: Event) -> Seen:
    words = " ".join(f"{name}={value}" for name, value in event.fields.items())
    return Seen(1, one_line(f"{event.kind} {words}"))


def trial(cluster: str, now: float | None = None) -> Message:
    """For ``sluice alerts test``."""
    now = time.time() if now is None else now
    subject = Subject("nothing", 0, "a test: the sink works", now)
    return make(
        id=f"test-{int(now)}",
        at=now,
        cluster=cluster,
        state="test",
        subjects=[subject],
        rule={"name": "test", "kind": "test", "severity": "info"},
    )
