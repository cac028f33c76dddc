"""The policy's alerts section: when alerts are sent, and how. Read by the controllers' daemon and by the nodes."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policy.names import Name
from policy.units import Date, Percent, Seconds, parse_seconds

Kind = Literal[
    "temperature", "memory", "utilisation-high", "utilisation-low", "gpu-idle", "errors", "quota", "budget",
    "queue-wait", "node-drained", "agent-lost", "takeover", "journal-lag", "database-down",
    "service-wait", "service-errors", "pool-capacity", "pool-cost", "power-budget", "power-plan",
]  # fmt: skip
Severity = Literal["info", "warning", "critical"]

DEFAULTS: dict[str, tuple[float, int, str]] = {
    "temperature": (90, 60, "degrees Celsius of a GPU, or more"),
    "memory": (95, 300, "percent of a GPU's memory in use, or more"),
    "utilisation-high": (99, 3600, "percent utilisation of a GPU, or more"),
    "utilisation-low": (10, 7200, "percent utilisation of a GPU by a running job, or less"),
    "gpu-idle": (1, 1800, "percent utilisation of a GPU by a running job, or less"),
    "errors": (1, 0, "new uncorrected errors and XID events of a GPU between two readings, or more"),
    "quota": (100, 300, "percent of a tenant's GPUs that it has now, or more"),
    "budget": (80, 0, "percent of a tenant's GPU-hours that are used, or more"),
    "queue-wait": (86_400, 0, "time that a job has waited since it could start, or more"),
    "node-drained": (1, 60, "a node that takes no jobs: drained, down, failed or not responding"),
    "agent-lost": (1, 0, "jobs of a node were unwatched: its agent died, or gave no samples"),
    "takeover": (1, 0, "another controller leads"),
    "journal-lag": (5, 30, "age of what the failover journal has not on disk yet, or more"),
    "database-down": (1, 60, "slurmdbd does not answer"),
    "service-wait": (300, 0, "time that a request has waited for a replica of its service, or more"),
    "service-errors": (5, 60, "percent of a service's requests in the last five minutes that failed, or more"),
    "pool-capacity": (900, 0, "time for which a pool has had no capacity for what Slurm wants, or more"),
    "pool-cost": (100, 300, "price of an hour of a pool's machines, or more"),
    "power-budget": (100, 5, "percent of a budget of watts that are drawn, or more"),
    "power-plan": (60, 10, "time for which budgets of watts had no plan in slurmctld, or more"),
}
"""By kind: the default threshold, the default duration in seconds, and what the threshold means."""
DURATIONS = ("queue-wait", "journal-lag", "service-wait", "pool-capacity", "power-plan")
"""Kinds whose threshold is a time."""
JOB_KINDS = ("gpu-idle", "utilisation-low")

_ADDRESS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}")
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_URL = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?(?:/[!-~]{0,500})?")
_PATH = re.compile(r"/[A-Za-z0-9._/+-]{1,250}")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _check_paths(section: _Section, *names: str) -> None:
    """Fields that may be empty, else hold an absolute path. Raises ValueError."""
    for name in names:
        if (path := getattr(section, name)) and not _PATH.fullmatch(path):
            raise ValueError(f"{name} {path!r}: want an absolute path")


class AlertScope(_Section):
    """What a rule applies to; an empty field does not narrow it."""

    tenants: list[Name] = []
    """Accounts of jobs, of budgets and quotas. Example: `[physics]`."""
    partitions: list[Name] = []
    """Partitions of jobs. Example: `[gpu]`."""
    nodes: str = ""
    """Nodes of GPUs, and nodes that are drained: a hostlist. Example: `gpu-[1-8]`."""


class IdleAction(_Section):
    """What is done to a job whose GPU is idle, in addition to the alert."""

    do: Literal["notify", "signal", "cancel"]
    """`notify`: notify the user (`scontrol notify`, and e-mail where a sink has `users`); `signal`: also send the
    signal; `cancel`: notify the user, and cancel the job when its GPU is still idle after `warning`."""
    signal: Literal["USR1", "USR2", "TERM", "HUP", "INT"] = "USR1"
    """The signal. Example: `USR2`."""
    warning: Annotated[Seconds, Field(ge=60)] = 900
    """From the warning to the end of the job. Example: `30m`."""


class AlertRule(_Section):
    """One rule."""

    kind: Kind
    """What is watched."""
    threshold: float | str | None = None
    """The alert fires at this value; a time (`4h`) for `queue-wait`, `journal-lag`, `service-wait`,
    `pool-capacity` and `power-plan`. Default: the kind's, see docs/alerts.md. Example: `85`."""
    duration: Seconds | None = None
    """How long the condition must last. Default: the kind's. Example: `10m`."""
    severity: Severity = "warning"
    """Shown in the message."""
    repeat: Seconds = 14_400
    """The alert is repeated at this interval while the condition lasts; `0s`: never. Example: `1h`."""
    scope: AlertScope = AlertScope()
    """What the rule applies to."""
    sinks: list[Name] = []
    """Where the alert is sent; empty: to all sinks. Example: `[mail]`."""
    silence: Date | None = None
    """No alert is sent before this day. Example: `2027-01-07`."""
    action: IdleAction | None = None
    """For the kinds `gpu-idle` and `utilisation-low` only."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.action is not None and self.kind not in JOB_KINDS:
            raise ValueError(f"action: only rules of the kinds {' and '.join(JOB_KINDS)} have one")
        value = self.limit
        if not 0 <= value <= 1e9:
            raise ValueError(f"threshold {self.threshold!r} is out of range")
        return self

    @property
    def limit(self) -> float:
        """The threshold as a number; times in seconds. Raises ValueError."""
        if self.threshold is None:
            return DEFAULTS[self.kind][0]
        if self.kind in DURATIONS:
            if not isinstance(self.threshold, str):
                raise ValueError(f"threshold {self.threshold!r} has no unit: write e.g. {self.threshold}s")
            return float(parse_seconds(self.threshold))
        if isinstance(self.threshold, str):
            raise ValueError(f"threshold {self.threshold!r} is not a number")
        return self.threshold


class LogSink(_Section):
    """The daemon's log."""

    kind: Literal["log"]
    """The daemon's log."""


class EmailSink(_Section):
    """E-mail, by SMTP."""

    kind: Literal["email"]
    """E-mail, by SMTP."""
    to: Annotated[list[str], Field(min_length=1, max_length=50)]
    """Recipients. Example: `[gpu-admins@site.org]`."""
    sender: str = "sluice@localhost"
    """The sender. Example: `sluice@site.org`."""
    server: str = "localhost:25"
    """The mail server. Example: `mail.site.org:587`."""
    tls: Literal["none", "starttls", "tls"] | None = None
    """How the connection is encrypted; by default `starttls`, and `none` to a server on this host."""
    ca_file: str = ""
    """Certificates by which the server is known; empty: those of the system. Example: `/etc/ssl/site.pem`."""
    user: str = ""
    """Its user, where the server wants one. Example: `sluice`."""
    password_file: str = ""
    """The file that holds the password; SlurmUser's or root's, nobody else's to read. Example:
    `/etc/sluice/smtp.password`."""
    users: str = ""
    """Domain of the users' mail, for notes to the user of an idle GPU; empty: none are sent. Example: `site.org`."""

    @field_validator("to", "sender")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        for one in [value] if isinstance(value, str) else value:
            if not _ADDRESS.fullmatch(one):
                raise ValueError(f"{one!r} is no mail address")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not _SERVER.fullmatch(self.server):
            raise ValueError(f"server {self.server!r}: want HOST or HOST:PORT")
        if self.users and not re.fullmatch(r"[A-Za-z0-9.-]{1,255}", self.users):
            raise ValueError(f"users {self.users!r}: want a domain, e.g. site.org")
        if bool(self.user) != bool(self.password_file):
            raise ValueError("user and password_file go together")
        if self.password_file and self.tls in (None, "none"):
            raise ValueError("a password is sent over an encrypted connection only: set tls to starttls or tls")
        _check_paths(self, "password_file", "ca_file")
        if not re.fullmatch(r"[!-~]{0,100}", self.user):
            raise ValueError("user: want printable characters without spaces")
        return self


class WebhookSink(_Section):
    """A JSON document by HTTP POST."""

    kind: Literal["webhook"]
    """A JSON document by HTTP POST."""
    url: str
    """Where to. Example: `https://chat.site.org/hooks/gpu`."""
    without_tls: bool = False
    """Let the address be `http://`, where anybody on the way can read message and address. Example: `true`."""
    secret_file: str = ""
    """The file that holds the secret of the signature (HMAC-SHA256); SlurmUser's or root's, nobody else's to read.
    Example: `/etc/sluice/webhook.secret`."""
    ca_file: str = ""
    """Certificates by which the server is known; empty: those of the system. Example: `/etc/ssl/site.pem`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not _URL.fullmatch(self.url):
            raise ValueError(f"url {self.url[:80]!r}: want https://HOST/..., without a user")
        if not self.url.startswith("https://") and not self.without_tls:
            raise ValueError(f"url {self.url[:80]!r}: not encrypted; want https://HOST/..., or set without_tls")
        _check_paths(self, "secret_file", "ca_file")
        return self


class ExecSink(_Section):
    """A program of the site, started without a shell; it gets the message as JSON on its standard input."""

    kind: Literal["exec"]
    """A program of the site, without a shell; it gets the message as JSON on its standard input."""
    program: str
    """Its path; nobody but root and SlurmUser may write it. Example: `/usr/local/sbin/gpu-alert`."""
    timeout: Annotated[Seconds, Field(ge=1, le=300)] = 30
    """The program is killed after this time. Example: `10s`."""

    @field_validator("program")
    @classmethod
    def _path(cls, value: str) -> str:
        if not _PATH.fullmatch(value) or "/../" in value:
            raise ValueError(f"{value!r}: want an absolute path, without arguments")
        return value


Sink = Annotated[LogSink | EmailSink | WebhookSink | ExecSink, Field(discriminator="kind")]


class Alerts(_Section):
    """When alerts are sent, and how."""

    temperature: Annotated[float, Field(ge=0, le=150)] | None = None
    """Short for a rule `temperature` with this threshold in degrees Celsius. Example: `85`."""
    utilisation: Percent | None = None
    """Short for a rule `utilisation-high` with this threshold in percent. Example: `95`."""
    memory: Percent | None = None
    """Short for a rule `memory` with this threshold in percent of a GPU's memory. Example: `90`."""
    interval: Annotated[Seconds, Field(ge=5, le=3600)] = 15
    """Time between two evaluations. Example: `30s`."""
    readings: bool = False
    """Nodes report the use of their GPUs also where no rule needs it, for `sluice top`. Example: `true`."""
    rules: Annotated[dict[Name, AlertRule], Field(max_length=200)] = {}
    """The rules by name."""
    sinks: Annotated[dict[Name, Sink], Field(max_length=20)] = {}
    """Where alerts are sent, by name; none: to the daemon's log."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, rule in self.rules.items():
            for sink in rule.sinks:
                if sink not in self.sinks:
                    raise ValueError(f"rules.{name}.sinks: there is no sink {sink!r}")
        for name, value in (
            ("temperature", self.temperature),
            ("memory", self.memory),
            ("utilisation-high", self.utilisation),
        ):
            if value is not None and name in self.rules:
                raise ValueError(f"rules.{name}: its short form is also given; remove one of them")
        return self


# ---- what is read on controllers and nodes ----


class NodeRule(BaseModel):
    """A rule with plain values: seconds and numbers."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    kind: str
    threshold: float
    duration: int
    severity: str = "warning"
    repeat: int = 0
    tenants: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    nodes: str = ""
    sinks: tuple[str, ...] = ()
    silence: datetime.date | None = None
    action: str = ""
    signal: str = "USR1"
    warning: int = 900


class NodeAlerts(BaseModel):
    """The section `alerts` of sluice.node.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    interval: int = 15
    readings: bool = False
    """Whether nodes send readings of their GPUs to the controllers."""
    rules: tuple[NodeRule, ...] = ()
    sinks: dict[str, dict[str, Any]] = {}
    """Sinks as the policy has them, durations in seconds."""


_NEED_READINGS = frozenset({"temperature", "memory", "utilisation-high", "utilisation-low", "gpu-idle", "errors"})


def compile_alerts(alerts: Alerts | None) -> NodeAlerts:
    """What controllers and nodes read of the section."""
    if alerts is None:
        return NodeAlerts()
    rules = [_compile(name, rule) for name, rule in alerts.rules.items()]
    for name, value in (
        ("temperature", alerts.temperature),
        ("memory", alerts.memory),
        ("utilisation-high", alerts.utilisation),
    ):
        if value is not None:
            rules.append(_compile(name, AlertRule.model_validate({"kind": name, "threshold": value})))
    sinks = {name: sink.model_dump() for name, sink in alerts.sinks.items()} or {"log": {"kind": "log"}}
    return NodeAlerts(
        interval=alerts.interval,
        readings=alerts.readings or any(rule.kind in _NEED_READINGS for rule in rules),
        rules=tuple(rules),
        sinks=sinks,
    )


def _compile(name: str, rule: AlertRule) -> NodeRule:
    action = rule.action
    return NodeRule(
        name=name,
        kind=rule.kind,
        threshold=rule.limit,
        duration=DEFAULTS[rule.kind][1] if rule.duration is None else rule.duration,
        severity=rule.severity,
        repeat=rule.repeat,
        tenants=tuple(rule.scope.tenants),
        partitions=tuple(rule.scope.partitions),
        nodes=rule.scope.nodes,
        sinks=tuple(rule.sinks),
        silence=rule.silence,
        action="" if action is None else action.do,
        signal="USR1" if action is None else action.signal,
        warning=900 if action is None else action.warning,
    )
