"""The policy's checkpoint section: signals for jobs that save their state, and restarts of jobs that faults ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from policy.units import Mib, Seconds, parse_seconds

_ASK = re.compile(r"(?:^|(?<=[\s,;]))sluice:checkpoint(?:=(\w{1,20}))?(?=$|[\s,;])")
_LEAST_S = 60
_MTBF_S = 150 * 86400
Signal = Literal["USR1", "USR2", "TERM", "HUP"]
Mode = Annotated[
    Literal["app", "no"], BeforeValidator(lambda value: "no" if value is False else value)
]  # YAML reads a plain no as false


class System(BaseModel):
    """Jobs that are saved as they run, by CRIU on their node (`--checkpoint=system`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    criu: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]{1,255}$")] = "/usr/sbin/criu"
    """CRIU on the nodes, 4.2 or later. Example: `/usr/sbin/criu`."""
    limit: Mib = 64 << 10
    """The largest memory of a job that is saved. Example: `64G`."""
    quota: Mib = 256 << 10
    """The most that is kept on a node for one user. Example: `256G`."""
    time: Annotated[Seconds, Field(ge=1)] = 300
    """The longest that a job is stopped until its state is on disk; else it is not saved, and goes on, or begins again
    from its start where CRIU hangs. Example: `5m`."""
    keep: Annotated[Seconds, Field(ge=60)] = 7 * 86400
    """How long the state of a job that does not start again is kept. Example: `7d`."""
    shared: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]{1,255}$")] | None = None
    """A folder of root's alone on storage that all nodes mount there, to which nodes move what they have saved, so that
    jobs go on on other nodes. Default: they go on on their node alone. Example: `/home/.sluice-states`."""
    rate: Annotated[Mib, Field(ge=1)] = 200
    """The most that a node writes there in a second, and reads back. Example: `1G`."""
    shared_quota: Mib = 1 << 20
    """The most that is kept there for one user. Example: `1T`."""


class NodeSystem(BaseModel):
    """The same in `sluice.node.json`; nodes read it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    criu: str = "/usr/sbin/criu"
    most_bytes: int = 64 << 30
    quota_bytes: int = 256 << 30
    time_s: int = 300
    keep_s: int = 7 * 86400
    shared: str | None = None
    rate_bytes: int = 200 << 20
    shared_quota_bytes: int = 1 << 40


class Checkpoint(BaseModel):
    """Signals for jobs that save their state (`--checkpoint=app`), and restarts of jobs that a fault of the machine has
    hit. Jobs that fail by themselves are never started again."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    default: Mode = "no"
    """Jobs that do not say (`--checkpoint=auto`): `app`, they save their state when they are signalled; a program that
    does not catch the signal is ended by it."""
    system: System | None = None
    """Jobs with `--checkpoint=system` are saved as they run; without it they are refused. CRIU is root's and works with
    what a tenant can change meanwhile: docs/security.md says what is held and what is not. Example: `{}`."""
    tenants: dict[str, Mode] = {}
    """The same for a tenant and those below it. Example: `{physics: app}`."""
    interval: Annotated[Seconds, Field(ge=60)] | Literal["daly"] | None = None
    """Time between two signals; `daly`: for each job what loses least, by the measured time of its saves and
    failures of its nodes. Default: no periodic ones, unless a job asks with `--checkpoint-interval`. Example: `10m`."""
    node_mtbf: Annotated[Seconds, Field(ge=86400)] = _MTBF_S
    """For `daly`: mean time between failures of a node before any was measured; counts as one failure in that time.
    Example: `150d`."""
    signal: Signal = "USR1"
    """The signal, to the batch script and all steps."""
    before_preemption: Seconds | None = None
    """Time of over-quota jobs between the signal and their end; at least `scheduling.preemption.grace`. The signal
    is `signal` for jobs with `--checkpoint=app`, unless they named one with `--signal`. Example: `60s`."""
    before_requeue: Seconds = 30
    """Time from the signal until a job is taken off a faulty GPU, or gives way to a lowered power budget (then `60s` at
    most, and no longer than until it has saved). Example: `30s`."""
    before_time_limit: Seconds | None = None
    """Time from the signal to the time limit; not in a job's first minute. Example: `5m`."""
    requeue: bool = True
    """Jobs that a fault has hit start again."""
    max_retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Most restarts of one job because of faults. Example: `3`."""
    backoff: Seconds = 60
    """Wait before the first restart; doubles with each. Example: `60s`."""
    silent_wait: Seconds | None = None
    """A node that stopped responding may only be cut off, and its jobs still run: the least wait before they restart.
    Default: `backoff`. Example: `30m`."""

    @property
    def signal_number(self) -> int:
        """What the system calls it."""
        return Signals[f"SIG{self.signal}"]


class NodeCheckpoint(BaseModel):
    """The same in `sluice.node.json`, times in seconds; the controllers' daemon reads it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    modes: dict[str, Mode] = {}
    """Of accounts; the others have `default`."""
    default: Mode = "no"
    interval_s: int | Literal["daly"] | None = None
    node_mtbf_s: int = _MTBF_S
    signal: Signal = "USR1"
    before_requeue_s: int = 30
    before_time_limit_s: int | None = None
    requeue: bool = True
    max_retries: int = 3
    backoff_s: int = 60
    silent_wait_s: int = 0
    system: NodeSystem | None = None

    def is_system(self, comment: str) -> bool:
        """Whether a job is saved by its node (--checkpoint=system): the last words on it are kept in its comment."""
        asked: list[str] = _ASK.findall(comment)
        return self.system is not None and bool(asked) and asked[-1] == "system"

    def rhythm(self, account: str, comment: str) -> Rhythm | None:
        """How a job is signalled, by its last words on it, else by its account; None: not at all."""
        asked: list[str] = _ASK.findall(comment)
        word = asked[-1] if asked else self.modes.get(account, self.default)
        if word in ("no", "system"):
            return None
        if word == "daly":
            return Rhythm("daly")
        try:
            return Rhythm(max(_LEAST_S, parse_seconds(word)))
        except ValueError:
            return Rhythm(self.interval_s)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often a job is signalled. None: only before it is to end."""

    interval_s: int | Literal["daly"] | None


def compile_checkpoint(section: Checkpoint | None, subtree: Callable[[str], list[str]]) -> NodeCheckpoint:
    """What the controllers' daemon reads of the policy's section. `subtree`: a tenant and all below it."""
    if section is None:
        return NodeCheckpoint()
    modes: dict[str, Mode] = {}
    families = [(subtree(tenant), mode) for tenant, mode in section.tenants.items()]
    for accounts, mode in sorted(families, key=lambda one: -len(one[0])):  # the nearest tenant's counts
        modes |= dict.fromkeys(accounts, mode)
    return NodeCheckpoint(
        modes=modes,
        default=section.default,
        interval_s=section.interval,
        node_mtbf_s=section.node_mtbf,
        signal=section.signal,
        before_requeue_s=section.before_requeue,
        before_time_limit_s=section.before_time_limit,
        requeue=section.requeue,
        max_retries=section.max_retries,
        backoff_s=section.backoff,
        silent_wait_s=section.silent_wait or 0,
        system=_compile_system(section.system) if section.system is not None else None,
    )


def _compile_system(section: System) -> NodeSystem:
    return NodeSystem(
        criu=section.criu,
        most_bytes=section.limit << 20,
        quota_bytes=section.quota << 20,
        time_s=section.time,
        keep_s=section.keep,
        shared=section.shared,
        rate_bytes=section.rate << 20,
        shared_quota_bytes=section.shared_quota << 20,
    )
