"""What the fleet sees of Slurm and of providers, and what it asks of them: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sluice.fleet.ahead import PlannedStart
from sluice.fleet.driver import Failure, Machine, Order

Want = Literal["off", "due", "up", "on", "down", "invalid", "unknown"]
"""Of a node: Slurm does not want it; will power it up; waits for it; has it; set it DOWN; has refused what it has
registered with."""
POOL_REASON = "sluice pool: "
"""Begin of the reason with which the fleet drains nodes that it gives free again itself."""
HELD_REASON = "sluice pool, until returned: "
"""Begin of the reason of those that an operator returns."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node in Slurm."""

    want: Want
    drained: bool = False
    reason: str = ""
    by_slurm: bool = True  # Slurm itself set it DOWN
    address: str = ""
    room: float = 0.0  # the part of it that no job has
    reserved: bool = False  # by a reservation that has begun
    made: str = ""  # of one that the fleet has created in slurmctld: the feature that says with which parameters
    pool: str = ""  # ... and for which pool


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that has nodes, or waits again."""

    id: int
    waits: bool  # for its nodes to boot
    nodes: frozenset[str]
    pending_until: bool = False  # it is pending with a begin time
    name: str = ""  # by which commands mean only this job
    saves: bool = False  # it asks for signals, to save its state
    ends: float = math.inf  # at the latest, by its limit


@dataclass(frozen=True, slots=True)
class SlurmView:
    """Slurm at a time: when reading began."""

    at: float
    nodes: Mapping[str, SlurmNode]
    jobs: Mapping[int, SlurmJob] = field(default_factory=dict)
    starts: tuple[PlannedStart, ...] = ()


# ---- what is asked for ----


@dataclass(frozen=True, slots=True)
class LaunchAct:
    """Ask a provider for a machine."""

    pool: str
    order: Order


@dataclass(frozen=True, slots=True)
class TerminateAct:
    """End a machine."""

    pool: str
    machine: str
    token: str


@dataclass(frozen=True, slots=True)
class ListAct:
    """List a pool's machines."""

    pool: str


Change = Literal[
    "power_up", "power_down", "power_down_force", "drain", "undrain", "address", "create", "delete", "make_again"
]
"""`make_again`: delete and create at once, so that jobs and those who submit some miss the nodes for no longer."""


@dataclass(frozen=True, slots=True)
class NodeAct:
    """Change nodes in Slurm. `text`: the reason; of `address`: where the node is; of `create` and
    `make_again`: its parameters.
    """

    nodes: tuple[str, ...]
    change: Change
    text: str = ""


@dataclass(frozen=True, slots=True)
class JobAct:
    """Requeue a job, let one that was requeued start at once, or send it the signal `text`."""

    job: int
    change: Literal["requeue", "release", "signal"]
    name: str = ""
    text: str = ""


Act = LaunchAct | TerminateAct | ListAct | NodeAct | JobAct


# ---- what came of it ----


@dataclass(frozen=True, slots=True)
class Launched:
    """Of a launch: the machine, or why not."""

    token: str
    machine: Machine | None = None
    failure: Failure | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Terminated:
    """Of the end of a machine."""

    pool: str
    machine: str
    failure: Failure | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """Of a list, whose reading began at `began`; None: it failed."""

    pool: str
    began: float
    machines: tuple[Machine, ...] | None
    failure: Failure | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """Of a change in Slurm."""

    act: NodeAct | JobAct
    text: str = ""  # why not


@dataclass(frozen=True, slots=True)
class Unsent:
    """An act that waited for too long, so that it was not sent."""

    act: LaunchAct | TerminateAct | ListAct


Result = Launched | Terminated | Listed | Changed | Unsent
