"""Slurm as the controllers' daemon of this host shows it: the jobs of replicas, their nodes, and who leads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from policy.service_jobs import parse_job_name
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.exchange.snapshot import ask

ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
"""States of jobs that are over."""


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """A replica's job."""

    id: int
    service: str
    launch: str
    user: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    submitted: float | None
    started: float | None
    ends: float | None
    lent: bool = False  # it is over-quota work

    @property
    def over(self) -> bool:
        """Whether it has ended, or ends."""
        return self.state in ENDED or self.state == "COMPLETING"


@dataclass(frozen=True, slots=True)
class View:
    """All of it. `at`: when reading began."""

    at: float
    host: str
    leads: bool
    jobs: Mapping[str, ReplicaJob]  # by launch
    leave: Mapping[str, str] = field(default_factory=dict)  # nodes that are to be left, and why
    maintenance: Mapping[str, float] = field(default_factory=dict)  # nodes, and when it begins


@dataclass(frozen=True, slots=True)
class _Row:
    id: int
    name: str
    user: str
    state: str
    reason: str
    nodes: str
    submitted: float | None
    started: float | None
    ends: float | None
    lent: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    host: str
    leads: bool
    jobs: list[_Row]
    leave: dict[str, str]
    maintenance: dict[str, float]


_ADAPTER: TypeAdapter[_Answer] = TypeAdapter(_Answer)


def read_view(socket: Path, users: Iterable[str], *, timeout: float = 30.0) -> View:
    """Ask the controllers' daemon. Raises SluiceError."""
    return parse_view(ask(socket, "serving", users=sorted(set(users)), timeout=timeout))


def parse_view(answer: Mapping[str, Any]) -> View:
    """Its answer. Raises SluiceError."""
    try:
        found = _ADAPTER.validate_python({name: one for name, one in answer.items() if name != "version"})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SluiceError(
            f"the controllers' daemon: {place}: {first['msg']}", remedy="install one version of Sluice, restart both"
        ) from error
    jobs: dict[str, ReplicaJob] = {}
    for row in found.jobs:
        name = parse_job_name(row.name)
        if name is None:
            continue
        job = ReplicaJob(
            row.id, *name, row.user, row.state, row.reason, tuple(expand(row.nodes)), row.submitted, row.started,
            row.ends, row.lent,
        )  # fmt: skip
        before = jobs.get(job.launch)
        if before is None or (before.over and not job.over) or (before.over == job.over and before.id < job.id):
            jobs[job.launch] = job
    return View(found.at, found.host, found.leads, jobs, found.leave, found.maintenance)
