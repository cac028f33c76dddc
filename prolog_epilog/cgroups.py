"""Which job a process belongs to, and where Slurm keeps a step's processes: from the cgroups that Slurm made.

A cgroup's path holds ``job_12/step_0`` under proctrack/cgroup, in version 1 (``/slurm_NODE/uid_1000/job_12/step_0``)
and in version 2 (``/system.slice/NODE_slurmstepd.scope/job_12/step_0/user/task_0``). From Slurm 26.05 on version 2 has
the bare SLUID in place of ``job_12`` unless cgroup.conf says CgroupJobIdPaths=yes; version 1 keeps the number
(26.05.3: cgroup_p_step_create in src/plugins/cgroup/v2/cgroup_v2.c, src/plugins/cgroup/v1/xcgroup.c). The prolog
gets it as SLURM_JOB_SLUID (src/plugins/prep/script/prep_script_slurmd.c).

Only paths that begin with Slurm's own folders count: users cannot write there, and a cgroup that was delegated to one
of them may have any name. slurmstepd itself is in version 2's leaf ``step_0/slurm`` and, in version 1, in the step's
cgroups of all hierarchies but the freezer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from sluice.base.errors import SluiceError

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")
_SLUID = r"s[0-9A-F][0-9A-HJKMNP-TV-Z]{12}"  # 64 bits in Crockford's base 32: Slurm's src/common/sluid.c
_NUMBER = r"\d{1,10}"
_STEP = r"(?:/step_(?P<step>[a-z0-9]{1,12}))?"
_VERSION_1 = re.compile(rf"(?P<job_path>/slurm(?:_[^/]+)?/uid_(?P<uid>{_NUMBER})/job_(?P<job>{_NUMBER})){_STEP}(?=/|$)")
_VERSION_2 = re.compile(
    r"(?P<job_path>/system\.slice/(?:[^/]+_)?slurmstepd\.scope/"
    rf"(?:job_(?P<job>{_NUMBER})|(?P<sluid>{_SLUID}))){_STEP}(?P<own>/slurm)?(?=/|$)"
)
_sluids: dict[str, int] = {}  # of the jobs that prologs registered; such a cgroup does not have the number
_TRACKING = "freezer"  # proctrack's hierarchy in version 1
_HIERARCHIES = (_TRACKING, "devices", "memory", "cpuset", "cpuacct", "")  # "": version 2
_MOST_KEPT = 1 << 11  # characters: in version 1 a user makes paths of 4096 in each hierarchy
_MOST_THREADS = 32  # that are read: a process may have thousands that have ended, held by a tracer
_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h
_GONE = " (deleted)"
_NO_LIMIT = 1 << 62
_USERS = {1: "step_*", 2: "step_*/user/task_*"}
_FREEZE = {1: "freezer.state", 2: "cgroup.freeze"}


@dataclass(frozen=True, slots=True)
class Place:
    """The job, and the step's name ("0", "batch", "extern"), or empty for none."""

    job: int
    step: str
    uid: int | None = field(default=None, compare=False)  # the job's user; version 2 does not have it
    job_path: str = field(default="", compare=False)  # of the job's cgroup below the hierarchy's root
    version: int = field(default=0, compare=False)  # 0: not in the hierarchy by which Slurm follows processes
    stepd: bool = field(default=False, compare=False)  # where only slurmstepd itself is, or its helper

    def job_folder(self, root: Path = ROOT) -> Path | None:
        """The folder of the whole job's cgroup; None where Slurm does not follow the process by it."""
        bases = {1: [root / _TRACKING], 2: [root, root / "unified"]}.get(self.version, [])
        folders = (base / self.job_path.lstrip("/") for base in bases)
        return next((folder for folder in folders if (folder / "cgroup.procs").exists()), None)

    def step_folder(self, root: Path = ROOT) -> Path | None:
        """The folder of all processes of the step, without slurmstepd; None where it is not known."""
        job = self.job_folder(root)
        if job is None or not self.step:
            return None
        folder = job / f"step_{self.step}"
        folder = folder / "user" if self.version == 2 else folder
        return folder if folder.exists() else None


def place_of(pid: int, proc: Path = PROC) -> Place | None:
    """Where a process belongs; None for one of no job, or one that has ended."""
    try:
        place = parse_place(read(f"{proc}/{pid}/cgroup"))
        return threads_of(pid, proc).place if place is None and has_exited(pid, proc) else place
    except OSError:
        return None


def freezable(pid: int, proc: Path = PROC, root: Path = ROOT) -> Path | None:
    """The folder of the whole job's cgroup of a process, which has ``cgroup.freeze`` (version 2) or ``freezer.state``.

    None for a process of no job. A task is still in slurmstepd's cgroup while it is prepared (version 2).
    """
    place = place_of(pid, proc)
    if place is None:
        return None
    folder = place.job_folder(root)
    return folder if folder is not None and (folder / _FREEZE[place.version]).exists() else None


@dataclass(frozen=True, slots=True)
class Threads:
    """What the threads of a process show whose leader has exited: version 1 then shows nothing for the leader.

    `ending`: all of them have exited, and the kernel is removing the process.
    """

    place: Place | None = None
    ending: bool = False


def has_exited(pid: int, proc: Path = PROC) -> bool:
    """Whether the leader of a process has exited. Raises OSError when nothing is left of it."""
    return _is_exiting(f"{proc}/{pid}")


def threads_of(pid: int, proc: Path = PROC) -> Threads:
    """The threads of a process whose leader has exited. Raises OSError when nothing is left of it."""
    with os.scandir(f"{proc}/{pid}/task") as threads:
        looked = 0
        for looked, thread in enumerate(islice(threads, _MOST_THREADS), 1):  # noqa: B007 - used after the loop
            try:
                if not _is_exiting(thread.path):
                    return Threads(parse_place(read(f"{thread.path}/cgroup")))
            except OSError:
                continue
    return Threads(ending=looked < _MOST_THREADS)


def _is_exiting(folder: str) -> bool:
    """Whether a process's leader, or a thread, has exited or is about to. Raises OSError when it has gone."""
    try:
        return bool(int(read(f"{folder}/stat").rpartition(")")[2].split()[6]) & _EXITING)
    except (ValueError, IndexError, FileNotFoundError):
        return False


def read(path: str) -> str:
    """A file of /proc, with as few system calls as possible. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(descriptor, 1 << 14):
            text += part
        return text.decode(errors="replace")
    finally:
        os.close(descriptor)


def uid_of(pid: int, proc: Path = PROC) -> int | None:
    """The real user of a process, whatever setuid program it runs; None for one that has ended."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", read(f"{proc}/{pid}/status"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def memory_room(pid: int, proc: Path = PROC, root: Path = ROOT) -> int:
    """Bytes that a process's cgroup, or one above it, still lets it have; very many where none is limited.

    What the kernel keeps of files there gives way.
    """
    found = _NO_LIMIT
    try:
        lines = read(f"{proc}/{pid}/cgroup").splitlines()
    except OSError:
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases, names = [root, root / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            bases, names = [root / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for base in bases:
            folder = base / path.removesuffix(_GONE).lstrip("/")
            for one in (folder, *(parent for parent in folder.parents if parent.is_relative_to(base))):
                with suppress(OSError, ValueError):  # "max", or the hierarchy's root
                    limit, used = (int((one / name).read_text()) for name in names)
                    found = min(found, max(0, limit - used + _of_files(one)))
    return found


def _of_files(folder: Path) -> int:
    """Bytes of the page cache, without shared memory; 0: not said. In version 1 "total_" is with all below."""
    with suppress(OSError, ValueError, KeyError):
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        prefix = "total_" if "total_inactive_file" in facts else ""
        return int(facts[f"{prefix}inactive_file"]) + int(facts[f"{prefix}active_file"])
    return 0


def take_steps(place: Place, root: Path = ROOT) -> None:
    """Give root the folders of a job that Slurm gives to the user; what ends in the meantime is skipped.

    In version 1 those of steps: users could make their own cgroups in them, freeze what is there, and so keep it from
    being ended; and move processes from one of their jobs to another. In version 2 those of tasks, with Slurm 22.05
    (24.11 keeps them root's): what users made there would stay when the job has ended.
    """
    folder = place.job_folder(root)
    with suppress(FileNotFoundError):
        for one in folder.glob(_USERS[place.version]) if folder is not None else ():
            with suppress(FileNotFoundError):
                os.chown(one, 0, 0)


def parse_place(text: str) -> Place | None:
    """The same from the text of ``/proc/PID/cgroup``: the first hierarchy of `_HIERARCHIES` that names a job."""
    found = _parse(text) if len(text) < _MOST_KEPT else _parse.__wrapped__(text)
    if found is None:
        return None
    words, version = found
    sluid = words.get("sluid")
    job = _sluids.get(sluid) if sluid else int(words["job"])
    if job is None:
        return None
    uid = int(words["uid"]) if "uid" in words else None
    stepd = bool(words.get("own")) or version == 0
    return Place(job, words["step"], uid, words["job_path"], version, stepd)


@lru_cache(maxsize=1024)  # watched processes are looked up twice a second
def _parse(text: str) -> tuple[dict[str, str], int] | None:
    """The words of a job's cgroup, and `Place.version`."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path.removesuffix(_GONE)
    for controller in _HIERARCHIES:
        match = (_VERSION_1 if controller else _VERSION_2).match(paths.get(controller, ""))
        if match:
            version = {_TRACKING: 1, "": 2}.get(controller, 0)
            return {name: word or "" for name, word in match.groupdict().items()}, version
    return None


def name_job(sluid: str, job: int) -> None:
    """From now on cgroups with this SLUID are the job's. Raises SluiceError for what is not a SLUID."""
    if not re.fullmatch(_SLUID, sluid):
        raise SluiceError(f"SLURM_JOB_SLUID={sluid!r}: not a SLUID")
    _sluids[sluid] = job


def forget_job(job: int) -> None:
    """The job has ended."""
    for sluid in [sluid for sluid, of in _sluids.items() if of == job]:
        del _sluids[sluid]


def folder_of(job: int, root: Path = ROOT) -> Path | None:
    """The folder of a job's cgroup in version 2, all of its steps within; None where there is none."""
    names = [f"job_{job}", *(sluid for sluid, of in _sluids.items() if of == job)]
    folders = (scope / name for scope in _scopes_2(root) for name in names)
    return next((folder for folder in folders if (folder / "cgroup.procs").exists()), None)


def jobs_here(root: Path = ROOT) -> set[int]:
    """The jobs that have a process on this node, from Slurm's own folders: independent of the number of processes."""
    jobs = ((_job_of(folder.name), folder) for folder, _ in _job_folders(root))
    return {job for job, folder in jobs if job is not None and _is_populated(folder)}


def task_folders(root: Path = ROOT) -> Iterator[Path]:
    """The folders in which all steps on this node have their processes: of the step in version 1, of each task in 2."""
    for job, version in _job_folders(root):
        with suppress(OSError):  # it ends just now
            yield from job.glob(_USERS[version])


def _job_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of jobs, with their version of cgroups."""
    yield from ((folder, 1) for folder in (root / _TRACKING).glob("slurm*/uid_*/job_*"))
    yield from ((folder, 2) for scope in _scopes_2(root) for folder in scope.iterdir() if folder.is_dir())


def _scopes_2(root: Path) -> list[Path]:
    return [scope for base in (root, root / "unified") for scope in base.glob("system.slice/*slurmstepd.scope")]


def _job_of(name: str) -> int | None:
    number = name.removeprefix("job_")
    return int(number) if number != name and number.isdecimal() else _sluids.get(name)


def _is_populated(folder: Path) -> bool:
    """Whether there is a process in a job's cgroup, or in those of its steps."""
    with suppress(OSError):
        return "populated 1" in (folder / "cgroup.events").read_text()
    for path in (folder / "cgroup.procs", *folder.glob("step_*/cgroup.procs")):
        with suppress(OSError), path.open("rb") as file:
            if file.read(1):
                return True
    return False
