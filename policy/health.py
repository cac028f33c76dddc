"""The policy's health section: which checks run on a node, with which thresholds, and which actions.

`CHECKS` is the one list of all checks with their defaults; `prolog_epilog.health.checks` has a function for each of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policy.units import Count, Percent, Seconds

Severity = Literal["info", "warning", "critical", "fatal"]
Action = Literal["log", "warn", "drain-gpu", "drain-node", "requeue"]
Mode = Literal["off", "shadow", "enforce"]

XID_BLAME_THE_JOB = (13, 31, 43, 45, 63, 68, 92, 109)
"""Events that a program causes, or that the driver corrected: not critical by themselves."""
XID_FATAL = (
    46, 48, 54, 56, 57, 58, 62, 64, 65, 69, 73, 74, 79, 80, 81, 94, 95, 110, 119, 120, 121, 136, 140, 142, 143, 144,
    145, 146, 147, 148, 149, 150, 151, 155, 156, 158,
)  # fmt: skip
"""Events of the device, its memory, links or firmware (NVIDIA's XID catalogue)."""


@dataclass(frozen=True, slots=True)
class Default:
    """A check as it runs where the policy does not mention it."""

    title: str
    severity: Severity
    action: Action
    threshold: float = 1
    unit: str = ""  # of the threshold; empty: the check has none
    window: int = 0  # seconds
    quick: bool = False  # also in prolog and epilog
    enabled: bool = True
    node: bool = False  # of the node, not of one GPU


CHECKS: dict[str, Default] = {
    # the device
    "driver": Default("the vendor's driver answers", "fatal", "drain-node", window=30, quick=True, node=True),
    "gpu_lost": Default("the driver still finds the GPU", "fatal", "requeue", quick=True),
    "device_file": Default("the GPU's device files are there", "fatal", "drain-gpu", quick=True),
    "driver_version": Default("driver and library are of one version, and of that in `expect`", "critical",
                              "drain-node", node=True),
    "firmware": Default("GPUs of one model have one firmware (VBIOS)", "warning", "warn"),
    "persistence": Default("the driver stays loaded between jobs (NVIDIA)", "warning", "warn"),
    # what the driver reports as an event
    "xid": Default("XID events of NVIDIA's driver", "fatal", "requeue", unit="events", window=600, quick=True),
    "ras": Default("uncorrected errors of other parts than memory (AMD, Intel)", "fatal", "requeue", unit="errors",
                   window=600, quick=True),
    # memory
    "ecc_uncorrected": Default("uncorrected memory errors", "fatal", "requeue", unit="errors", window=600,
                               quick=True),
    "ecc_corrected": Default("corrected memory errors", "warning", "warn", 1000, "errors", 3600),
    "row_remap_failed": Default("a memory row could not be replaced", "fatal", "drain-gpu", quick=True),
    "row_remap_pending": Default("a replaced memory row or page waits for a reset", "critical", "drain-gpu"),
    "retired_pages": Default("retired memory pages", "critical", "drain-gpu", 60, "pages"),
    # heat and power
    "temperature": Default("temperature of the GPU", "critical", "drain-gpu", 95, "degrees Celsius", 60),
    "temperature_memory": Default("temperature of the GPU's memory", "critical", "drain-gpu", 105,
                                  "degrees Celsius", 60),
    "throttle_thermal": Default("slowed down by heat", "warning", "warn", 50, "percent of the time", 300),
    "throttle_power": Default("slowed down by the power supply", "warning", "warn", 50, "percent of the time", 300),
    "power": Default("power above the limit", "warning", "warn", 110, "percent of the limit", 60),
    "clocks": Default("clock of a busy GPU that nothing slows down", "warning", "warn", 50, "percent of the maximum",
                      300),
    # links
    "link_down": Default("links between GPUs are up", "critical", "drain-gpu"),
    "link_errors": Default("errors of links between GPUs", "warning", "warn", 100, "errors", 3600),
    "pcie_width": Default("width of the PCIe link", "critical", "warn", 100, "percent of the maximum", 60),
    "pcie_replays": Default("replays of the PCIe link", "warning", "warn", 1000, "replays", 3600),
    # who uses it
    "residual_memory": Default("memory in use by no process", "critical", "drain-gpu", 1024, "MiB", 120),
    "stray_process": Default("processes of no job", "warning", "warn", 1, "processes", 120),
    "idle_gpu": Default("a job's GPU that is idle", "info", "log", 1, "percent of utilisation", 3600),
    # the node
    "nic_link": Default("links of the network adapters near the GPUs", "critical", "warn", node=True),
    "fabric_nic": Default("bandwidth of the node's interfaces, in preflights of jobs", "critical", "drain-node",
                          node=True),
    "fabric_link": Default("bandwidth of the links from the node to its switches, in preflights of jobs", "critical",
                           "drain-node", node=True),
    "fabric_gpu": Default("GPUs and their links, in preflights of jobs", "critical", "drain-node", node=True),
    "fabric_lost": Default("network adapters of the inventory are there", "critical", "warn", window=30, node=True),
    "fabric_flaps": Default("links of RDMA interfaces that fail and come back", "warning", "warn", 3, "failures", 3600,
                            node=True),
    "fabric_errors": Default("errors on the links of RDMA interfaces: of symbols, and of what was received", "warning",
                             "warn", 100, "errors", 3600, node=True),
    "fabric_retransmissions": Default("packets that RDMA interfaces sent again", "warning", "warn", 10000,
                                      "retransmissions", 3600, node=True),
    "free_space": Default("free space of the file systems in `paths`", "critical", "warn", 5, "percent", node=True),
    "spool": Default("room for what jobs need on the node: the agent's folders and slurmd's spool", "critical",
                     "drain-node", 16, "MiB", quick=True, node=True),
    "clock_skew": Default("difference to the controller's clock", "critical", "warn", 30, "seconds", node=True),
    "agent_lost": Default("jobs were unwatched: the node agent died, or gave no samples", "warning", "warn",
                          unit="times", window=60, node=True),
}  # fmt: skip


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class HealthCheck(_Section):
    """Settings of one check."""

    enabled: bool | None = None
    """`false`: it does not run. Example: `false`."""
    threshold: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """The threshold, in the check's unit; for `clocks`, `pcie_width`, `free_space` and `spool` a lower bound.
    Example: `90`."""
    window: Seconds | None = None
    """Errors are counted over this time, and conditions must last for it. Example: `10m`."""
    severity: Severity | None = None
    """Severity. Example: `critical`."""
    action: Action | None = None
    """What is done: `log`, `warn` (and an event), `drain-gpu` (no new jobs on this GPU; those that run go on),
    `drain-node`, or `requeue` (take the GPU, or for checks of the node the node, out of service, and requeue the jobs
    that it hit). Example: `drain-gpu`."""
    shadow: bool | None = None
    """Only record what would have been done. Example: `true`."""


class Breaker(_Section):
    """The most that is taken out of service: many faults at once are more likely one fault of the checks, or of the
    server room."""

    share: Percent = 10
    """Most nodes that Sluice has drained, or with a GPU out of service, at once, in percent of the cluster.
    Example: `10`."""
    least: Count = 1
    """This many nodes are always allowed, in any small cluster. Example: `2`."""


class RepeatRules(_Section):
    """What many events together mean."""

    fatal_events: Annotated[int, Field(ge=1, le=1000)] = 5
    """After this many fatal events within `fatal_window` a GPU stays out of service until a person returns it with
    `sluice health return`. Example: `5`."""
    fatal_window: Seconds = 86400
    """The time over which `fatal_events` are counted. Example: `24h`."""
    same_xid: Annotated[int, Field(ge=2, le=1000)] = 2
    """A program's XID (13, 31) this often on one GPU, with different users, within `fatal_window` is the GPU's fault.
    Example: `2`."""
    job_gpus: Annotated[int, Field(ge=2, le=1000)] = 2
    """One program's XID on this many GPUs of one job is the job's fault. Example: `2`."""


class Health(_Section):
    """When a GPU or a node is taken out of service, and when it returns. Without this section all checks run, and what
    they would do is only recorded (as with `mode: shadow`)."""

    mode: Mode = "enforce"
    """`off`: no checks. `shadow`: only record what would have been done. `enforce`: do it."""
    checks: dict[str, HealthCheck] = {}
    """Settings of single checks, by name; docs/health.md lists them. Example:
    `{temperature: {threshold: 90, action: warn}}`."""
    interval: Annotated[Seconds, Field(ge=1, le=3600)] = 30
    """Time between two rounds of checks on a node. Example: `30s`."""
    passes: Annotated[int, Field(ge=1, le=1000)] = 3
    """Rounds in a row without a finding after which what Sluice took out of service returns. Example: `3`."""
    breaker: Breaker = Breaker()
    """How much may be out of service."""
    repeats: RepeatRules = RepeatRules()
    """What many events together mean."""
    expect: dict[Literal["nvidia", "amd", "intel"], str] = {}
    """Driver version that every node should have, by vendor. Example: `{nvidia: "570.86.15"}`."""
    paths: list[str] = ["/tmp", "/var"]  # noqa: S108 - names of file systems
    """File systems whose free space is checked. Example: `[/tmp, /var, /local]`."""
    xid: list[Annotated[int, Field(ge=1, le=1000)]] = list(XID_FATAL)
    """XID events that are the GPU's fault. Those in 13, 31, 43, 45, 63, 68, 92, 109 are the program's unless they
    repeat; any others are warnings."""
    temperature: Annotated[float, Field(ge=0, le=150)] | None = None
    """Short for `checks: {temperature: {threshold: ...}}`. Example: `90`."""
    ecc_errors: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Short for the threshold of `ecc_uncorrected`. Example: `1`."""
    retired_pages: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Short for the threshold of `retired_pages`. Example: `60`."""

    @property
    def short(self) -> dict[str, float]:
        """Thresholds that are given in their short form, by check."""
        given = {
            "temperature": self.temperature,
            "ecc_uncorrected": self.ecc_errors,
            "retired_pages": self.retired_pages,
        }
        return {name: float(value) for name, value in given.items() if value is not None}

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a plain off as false

    @field_validator("checks")
    @classmethod
    def _known(cls, value: dict[str, HealthCheck]) -> dict[str, HealthCheck]:
        for name in value:
            if name not in CHECKS:
                raise ValueError(f"no check {name!r}; known are {', '.join(CHECKS)}")
        return value

    @field_validator("paths")
    @classmethod
    def _absolute(cls, value: list[str]) -> list[str]:
        for path in value:
            if not path.startswith("/") or "\0" in path:
                raise ValueError(f"{path!r} is not an absolute path")
        return value

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        for name in self.short:
            given = self.checks.get(name)
            if given is not None and given.threshold is not None:
                raise ValueError(f"checks.{name}.threshold is given twice; leave the short form out")
        return self


# ---- as a node reads it ----


class Rule(BaseModel):
    """One check, with all its settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float
    window_s: Annotated[int, Field(ge=0)]
    severity: Severity
    action: Action
    quick: bool
    shadow: bool = False


class NodeHealth(BaseModel):
    """The health section of `sluice.node.json`: only checks that run, each with all its settings; times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = "shadow"
    interval_s: Annotated[int, Field(ge=1)] = 30
    passes: Annotated[int, Field(ge=1)] = 3
    checks: dict[str, Rule] = Field(default_factory=lambda: resolve({}))
    xid_fatal: list[int] = list(XID_FATAL)
    fatal_events: int = 5
    fatal_window_s: int = 86400
    same_xid: int = 2
    job_gpus: int = 2
    expect: dict[str, str] = {}
    paths: list[str] = ["/tmp", "/var"]  # noqa: S108 - names of file systems
    breaker_percent: float = 10
    breaker_least: int = 1


def resolve(given: Mapping[str, HealthCheck]) -> dict[str, Rule]:
    """Every check that runs, with the policy's settings over its defaults."""
    found = {}
    for name, default in CHECKS.items():
        said = given.get(name, HealthCheck())
        if not (default.enabled if said.enabled is None else said.enabled):
            continue
        found[name] = Rule(
            threshold=default.threshold if said.threshold is None else said.threshold,
            window_s=default.window if said.window is None else said.window,
            severity=said.severity or default.severity,
            action=said.action or default.action,
            quick=default.quick,
            shadow=bool(said.shadow),
        )
    return found


def compile_health(policy: Health | None) -> NodeHealth:
    """What nodes read of the policy's section."""
    if policy is None:
        return NodeHealth()
    checks = dict(policy.checks)
    for name, threshold in policy.short.items():
        checks[name] = checks.get(name, HealthCheck()).model_copy(update={"threshold": threshold})
    return NodeHealth(
        mode=policy.mode,
        interval_s=policy.interval,
        passes=policy.passes,
        checks=resolve(checks),
        xid_fatal=sorted(set(policy.xid)),
        fatal_events=policy.repeats.fatal_events,
        fatal_window_s=policy.repeats.fatal_window,
        same_xid=policy.repeats.same_xid,
        job_gpus=policy.repeats.job_gpus,
        expect={str(vendor): version for vendor, version in policy.expect.items()},
        paths=policy.paths,
        breaker_percent=policy.breaker.share,
        breaker_least=policy.breaker.least,
    )
