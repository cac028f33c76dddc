"""Which job a process belongs to, and which processes a step has: from the cgroups that Slurm made.

A cgroup's path holds ``job_12/step_0`` under proctrack/cgroup, in version 1 (``/slurm_NODE/uid_1000/job_12/step_0``)
and in version 2 (``/system.slice/NODE_slurmstepd.scope/job_12/step_0/user/task_0``). From Slurm 26.05 on version 2 has
the bare SLUID in place of ``job_12`` unless cgroup.conf says CgroupJobIdPaths=yes; version 1 keeps the number
(26.05.3: cgroup_p_step_create in src/plugins/cgroup/v2/cgroup_v2.c, src/plugins/cgroup/v1/xcgroup.c). The prolog is
told it as SLURM_JOB_SLUID (src/plugins/prep/script/prep_script_slurmd.c). Users cannot write there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sluice_base.errors import SluiceError

_SLUID = r"s[0-9A-F][0-9A-HJKMNP-TV-Z]{12}"  # 64 bits in Crockford's base 32: Slurm's src/common/sluid.c
_JOB = re.compile(rf"/(?:job_(\d{{1,10}})|({_SLUID}))(?:/step_([a-z0-9]{{1,12}}))?(?=/|$)")
_sluids: dict[str, int] = {}  # of the jobs that prologs told; a cgroup does not tell the number
_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpuacct", "")  # proctrack's own first; "": version 2
_MOST_TEXT = 1 << 14
_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h


@dataclass(frozen=True, slots=True)
class Place:
    """The job, and the step's name ("0", "batch", "extern"), or empty for none."""

    job: int
    step: str


def place_of(pid: int, proc: Path = Path("/proc")) -> Place | None:
    """Where a process belongs; None for one of no job, or one that has ended."""
    try:
        return parse_place(_read(f"{proc}/{pid}/cgroup"))
    except (OSError, UnicodeDecodeError):
        return None


class Places:
    """`place_of` for one thread that asks again and again: the files are kept open.

    That of a process that has ended cannot be read any more, so that another one with its number is not taken for it.
    """

    def __init__(self, proc: Path = Path("/proc"), most: int = 256) -> None:
        self._proc = proc
        self._most = most  # of the files that an agent may have open
        self._files: dict[int, int] = {}

    def of(self, pid: int) -> Place | None:
        """See `place_of`."""
        file = self._files.get(pid)
        if file is None and len(self._files) >= self._most:
            return place_of(pid, self._proc)
        try:
            if file is None:
                file = self._files[pid] = os.open(f"{self._proc}/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(file, _MOST_TEXT, 0)
            if len(text) < _MOST_TEXT:
                return parse_place(text.decode())
        except (OSError, UnicodeDecodeError):
            self._close(pid)
        return place_of(pid, self._proc)

    def keep(self, pids: Collection[int]) -> None:
        """Forget all others."""
        for pid in self._files.keys() - pids:
            self._close(pid)

    def _close(self, pid: int) -> None:
        file = self._files.pop(pid, None)
        if file is not None:
            os.close(file)


def _read(path: str) -> str:
    """A file of /proc, by as few calls as can be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(descriptor, 1 << 14):
            text += part
        return text.decode()
    finally:
        os.close(descriptor)


def uid_of(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The real user of a process, whatever setuid program it runs; None for one that has ended or is ending.

    One that is ending has left its cgroups already, and may hold memory for a moment longer.
    """
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
        flags = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return None
    match = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
    return None if match is None or flags & _EXITING else int(match[1])


def parse_place(text: str) -> Place | None:
    """The same of the text of ``/proc/PID/cgroup``: the first hierarchy of `_HIERARCHIES` that names a job."""
    number, sluid, step = _words_of(text)
    job = int(number) if number else _sluids.get(sluid)
    return None if job is None else Place(job, step)


@lru_cache(maxsize=1024)  # watched processes are looked up twice a second
def _words_of(text: str) -> tuple[str, str, str]:
    """A job's number, or its SLUID, and the step; empty where there is none."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    for controller in _HIERARCHIES:
        match = _JOB.search(paths.get(controller, ""))
        if match:
            return match[1] or "", match[2] or "", match[3] or ""
    return "", "", ""


def name_job(sluid: str, job: int) -> None:
    """From now on cgroups that bear the SLUID are the job's. Raises SluiceError for what is none."""
    if not re.fullmatch(_SLUID, sluid):
        raise SluiceError(f"SLURM_JOB_SLUID={sluid!r}: not a SLUID")
    _sluids[sluid] = job


def forget_job(job: int) -> None:
    """The job has ended."""
    for sluid in [sluid for sluid, of in _sluids.items() if of == job]:
        del _sluids[sluid]


def folder_of(job: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The folder of a job's cgroup in version 2, all of its steps within; None where there is none."""
    for pid in processes_of(job, None, proc):
        try:
            lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            match = _JOB.search(line[3:]) if line.startswith("0::/") else None
            if match and parse_place(line) == Place(job, match[3] or ""):
                end = match.end(1) if match[1] else match.end(2)
                folder = root / line[4 : 3 + end]
                if (folder / "cgroup.procs").exists():
                    return folder
    return None


def jobs_here(proc: Path = Path("/proc")) -> set[int]:
    """The jobs that have a process on this node."""
    places = (place_of(int(entry.name), proc) for entry in proc.iterdir() if entry.name.isdecimal())
    return {place.job for place in places if place is not None}


def processes_by_place(wanted: Collection[Place], proc: Path = Path("/proc")) -> dict[Place, list[int]]:
    """The processes of each of these steps, by one look at all that there are."""
    found: dict[Place, list[int]] = {place: [] for place in wanted}
    for entry in proc.iterdir() if wanted else ():
        if entry.name.isdecimal():
            place = place_of(int(entry.name), proc)
            if place is not None and place in found:
                found[place].append(int(entry.name))
    return found


def processes_of(job: int, step: str | None = None, proc: Path = Path("/proc")) -> Iterator[int]:
    """The processes of a job, or of one step of it."""
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            place = place_of(int(entry.name), proc)
            if place is not None and place.job == job and step in (None, place.step):
                yield int(entry.name)
