"""How many handles and objects of RDMA adapters a job may hold: the kernel's rdma controller of cgroup v2.

An adapter has so many protection domains, queue pairs and memory regions for all of its users; a job that takes them
all keeps others from their interfaces. The bounds are in the job's cgroup, which Slurm makes, and go with it. Slurm
does not pass the controller on to its jobs' cgroups, so that it is switched on here, for the folders above them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from policy.node_limits import NodeLimits
from prolog_epilog.cgroups import ROOT, Place
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.exchange.record import JobRecord

ACTION = "rdma"
"""Of the event in a job's record: the bounds that hold, or why none do."""
_CONTROLLER = "rdma"
_BOUNDS = "rdma.max"


def bounds_of(limits: NodeLimits) -> str:
    """The policy's bounds for each adapter, in the kernel's words; empty: none."""
    named = {"hca_handle": limits.rdma_handles, "hca_object": limits.rdma_objects}
    return " ".join(f"{name}={count}" for name, count in named.items() if count is not None)


class RdmaBounds:
    """The bounds of jobs on this node."""

    def __init__(self, policy: Callable[[], NodeLimits], root: Path = ROOT) -> None:
        self._policy = policy
        self._root = root

    def hold(self, record: JobRecord, place: Place | None, nics: Collection[str]) -> None:
        """Bound the job on the adapters that it can open. Raises nothing: without bounds it runs as on other kernels.

        For the steps that come and for those that run; a job that holds more already keeps what it has.
        """
        bounds = bounds_of(self._policy())
        if not bounds or not nics or place is None:
            return
        try:
            self._set(place, bounds, nics)
        except (OSError, SluiceError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            log("problem", job=record.job, what=f"RDMA handles and objects are not bounded: {what}")
            record.note(ACTION, problem=what)
        else:
            record.note(ACTION, bounds=bounds, nics=sorted(nics))

    def _set(self, place: Place, bounds: str, nics: Collection[str]) -> None:
        job = place.job_folder(self._root) if place.version == 2 else None
        unified = self._root / "unified"  # next to version 1
        top = unified if job is not None and job.is_relative_to(unified) else self._root
        if job is None or _CONTROLLER not in _words(top / "cgroup.controllers"):
            raise SluiceError("this kernel has no rdma controller in cgroup v2")
        for folder in reversed(job.parents):
            if folder.is_relative_to(top) and _CONTROLLER not in _words(folder / "cgroup.subtree_control"):
                _write(folder / "cgroup.subtree_control", f"+{_CONTROLLER}")
        problems = []
        for nic in sorted(nics):  # one that has gone leaves no other one unbounded
            try:
                _write(job / _BOUNDS, f"{nic} {bounds}")
            except OSError as error:
                problems.append(error)
        if problems:
            raise problems[0]


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _write(path: Path, text: str) -> None:
    """In one system call, as the kernel takes one adapter at a time."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
