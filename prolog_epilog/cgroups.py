"""Which job a process belongs to, and which processes a step has: from the cgroups that Slurm made.

A cgroup's path holds ``job_12/step_0`` under proctrack/cgroup, in version 1 (``/slurm_NODE/uid_1000/job_12/step_0``)
and in version 2 (``/system.slice/NODE_slurmstepd.scope/job_12/step_0/user/task_0``). Users cannot write there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_JOB = re.compile(r"/job_(\d{1,10})(?:/step_([a-z0-9]{1,12}))?(?:/|$)")
_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpuacct", "")  # proctrack's own first; "": version 2


@dataclass(frozen=True, slots=True)
class Place:
    """The job, and the step's name ("0", "batch", "extern"), or empty for none."""

    job: int
    step: str


def place_of(pid: int, proc: Path = Path("/proc")) -> Place | None:
    """Where a process belongs; None for one of no job, or one that has ended."""
    try:
        return parse_place((proc / str(pid) / "cgroup").read_text())
    except (OSError, UnicodeDecodeError):
        return None


def uid_of(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The real user of a process, whatever setuid program it runs; None for one that has ended."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", (proc / str(pid) / "status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def parse_place(text: str) -> Place | None:
    """The same of the text of ``/proc/PID/cgroup``: the first hierarchy of `_HIERARCHIES` that names a job."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    for controller in _HIERARCHIES:
        match = _JOB.search(paths.get(controller, ""))
        if match:
            return Place(int(match[1]), match[2] or "")
    return None


def jobs_here(proc: Path = Path("/proc")) -> set[int]:
    """The jobs that have a process on this node."""
    places = (place_of(int(entry.name), proc) for entry in proc.iterdir() if entry.name.isdecimal())
    return {place.job for place in places if place is not None}


def processes_of(job: int, step: str | None = None, proc: Path = Path("/proc")) -> Iterator[int]:
    """The processes of a job, or of one step of it."""
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            place = place_of(int(entry.name), proc)
            if place is not None and place.job == job and step in (None, place.step):
                yield int(entry.name)
