"""Slurm's answers, typed. Times are seconds since 1970 (UTC), durations seconds, memory MiB; None: unknown or unset."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice.base.errors import SluiceError
from sluice.base.sizes import parse_mib

UNLIMITED = -1  # no time limit
_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


@dataclass(frozen=True, slots=True)
class Controller:
    """One slurmctld as `scontrol ping` sees it."""

    host: str
    role: str  # "primary", "backup", "backup2", ...
    up: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One compute node."""

    name: str
    address: str
    hostname: str
    state: str  # base state in lower case: "idle", "mixed", "allocated", "down", ...
    flags: frozenset[str]  # "drain", "not_responding", "maintenance", ... in lower case
    reason: str
    cpus: int
    cpus_allocated: int
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    memory_mib: int
    memory_allocated_mib: int
    memory_free_mib: int | None
    gres: str  # as configured and checked, e.g. "gpu:h100:8(S:0-1),shard:h100:648296(S:0-1)"
    gres_used: str  # with indexes, e.g. "gpu:h100:2(IDX:0-1)"
    features: tuple[str, ...]
    active_features: tuple[str, ...]
    partitions: tuple[str, ...]
    weight: int
    version: str  # slurmd's; empty while it has not registered
    tres: Mapping[str, int] = field(default_factory=dict)
    tres_allocated: Mapping[str, int] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether new jobs can start here."""
        return self.state in ("idle", "mixed", "allocated") and not self.flags & {"drain", "not_responding", "fail"}


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition."""

    name: str
    state: str  # "up", "down", "drain", "inactive"
    default: bool
    nodes: str  # hostlist
    node_count: int
    cpus: int
    max_time_s: int | None  # UNLIMITED where there is no limit
    default_time_s: int | None
    priority_tier: int
    qos: str
    tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """One job that slurmctld knows: pending, running or just ended. An array's waiting tasks are one record."""

    id: int
    array_id: int | None  # None: not part of an array
    array_tasks: str  # "7", or "3-9%2" while waiting; empty when not part of an array
    name: str
    user: str
    uid: int
    account: str
    qos: str
    partition: str
    state: str  # upper case, e.g. "PENDING"
    reason: str
    nodes: str  # hostlist; empty while pending
    node_count: int
    cpus: int
    submit_time: int | None
    eligible_time: int | None
    start_time: int | None
    end_time: int | None
    time_limit_s: int | None
    priority: int
    tres: Mapping[str, int]  # allocated (AllocTRES); while pending: requested
    tres_per_node: str  # as asked for, e.g. "gres:shard:10240"
    tres_per_job: str
    tres_per_task: str
    features: str
    dependency: str
    reservation: str
    comment: str
    work_dir: str
    admin_comment: str = ""

    @property
    def own_name(self) -> str:
        """As `own_name` says; a record of an array's waiting tasks has their array's."""
        return own_name(self.id, self.array_id, self.array_tasks)


@dataclass(frozen=True, slots=True)
class SeenJob:
    """One job of many that are read again and again. `print_`: what differs when anything of it does."""

    id: int
    print_: int
    job: Callable[[], Job]
    """All of it, which costs more than to see that nothing changed."""


@dataclass(frozen=True, slots=True)
class AccountingJob:
    """One job of the accounting database. Without its name: what Sluice acts on is read apart from users' texts."""

    id: int
    label: str  # as users write it: "17", "17_3", "17+1"
    user: str
    account: str
    qos: str
    partition: str
    state: str  # upper case, first word
    exit_code: int
    exit_signal: int
    nodes: str
    node_count: int
    cpus: int
    submit_time: int | None
    eligible_time: int | None
    start_time: int | None
    end_time: int | None
    elapsed_s: int
    time_limit_s: int | None
    tres_requested: Mapping[str, int]
    tres_allocated: Mapping[str, int]
    reservation: str


@dataclass(frozen=True, slots=True)
class Reservation:
    """One reservation."""

    name: str
    state: str
    start_time: int | None
    end_time: int | None
    nodes: str
    node_count: int
    features: str
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    flags: frozenset[str]
    tres: Mapping[str, int]


def own_name(job: int, array: int | None, task: str) -> str:
    """By which Slurm's commands mean this job alone: of an array one task has the array's number, which means all."""
    return f"{array}_{task}" if array is not None and task.isdecimal() else str(job)


def task_count(text: str) -> int:
    """How many tasks of an array a line of squeue represents: ``3-9:2,12%4``; 1 for a job that is none."""
    total = 0
    for piece in text.split("%")[0].split(","):
        match = _TASKS.fullmatch(piece.strip("[] "))
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), max(1, int(match[3] or 1))
            total += max(0, (last - first) // step + 1)
    return max(1, total)


def parse_tres(text: str) -> dict[str, int]:
    """``"cpu=2,mem=1000M,gres/gpu:h100=2"`` as a dictionary; memory in MiB. Raises SluiceError when malformed."""
    values: dict[str, int] = {}
    for part in text.split(",") if text else []:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise SluiceError(f"TRES {text!r}: {part!r} is not name=value")
        if name != "mem" and value.isascii() and value.isdigit():
            values[name] = int(value)  # faster, and nearly always so
            continue
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", value)
        if match is None:
            raise SluiceError(f"TRES {text!r}: {value!r} is not a count")
        if name == "mem":
            values[name] = parse_mib(value.replace("P", "T")) * (1024 if match[2] == "P" else 1)
        else:
            factor = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}[match[2]]
            values[name] = int(float(match[1]) * factor) if match[2] else int(float(match[1]))
    return values
