"""Which job a profile is of, and the step that collects it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.run import CommandError
from sluice.base.text import one_line
from sluice.profile.collect import ALL, PROGRAM, Collector
from sluice.profile.records import BYTES_OF_EVENT
from sluice.profile.timeline import MOST_EVENTS, Timeline, load
from sluice.slurm.commands import Commands
from sluice.slurm.job import read_job

_NAME = re.compile(r"([0-9]{1,10}(?:_[0-9]{1,10})?)(?:\.([A-Za-z0-9]{1,16}))?\Z")
_USUAL_FOLDER = Path("/usr/libexec/sluice")
_NOT_OURS = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SPANK_", "_SLURM", "SLUICE_")


@dataclass(frozen=True, slots=True)
class ProfiledJob:
    """A job, or one step of it ("" for all)."""

    number: int
    step: str
    uid: int
    nodes: int
    runs: bool
    work_dir: Path

    @property
    def folder(self) -> Path:
        """Where a profile is that was asked for with the job (--gpu-profile)."""
        return self.work_dir / f"sluice-profile-{self.number}"


def find_job(commands: Commands, name: str) -> ProfiledJob:
    """A job by its name: 17, 17_4, 17.0 or 17.batch. Raises SluiceError."""
    match = _NAME.match(name)
    if match is None:
        raise UsageError(f"job {name[:40]!r}: not a job or step", remedy="write it as 17, 17_4, 17.0 or 17.batch")
    try:
        # What a user can write freely comes last, and alone: a folder's name can have any character.
        line = commands.output("squeue", "-h", "-a", "-t", "all", "-j", match[1], "-o", "%A %U %Z").partition("\n")[0]
        number, uid, work_dir = line.split(" ", 2)
        facts = read_job(commands, int(number))
    except (CommandError, ValueError):
        facts = None
    if facts is not None:
        return ProfiledJob(int(number), match[2] or "", int(uid), facts.node_count, facts.runs, Path(work_dir))
    return _ended(commands, match[1], match[2] or "")


def _ended(commands: Commands, name: str, step: str) -> ProfiledJob:
    """One that slurmctld does not know any more. Raises SluiceError."""
    found = commands.output("sacct", "-n", "-X", "-P", "-D", "-j", name, "-o", "JobIDRaw,UID,WorkDir").splitlines()
    try:
        number, uid, work_dir = found[-1].split("|", 2)
        return ProfiledJob(int(number), step, int(uid), 0, False, Path(work_dir))
    except (IndexError, ValueError):
        raise SluiceError(f"job {name}: not known", remedy="see the list of jobs: squeue, sacct") from None


def collector(commands: Commands, job: ProfiledJob, folder: Path, most: int = 0) -> Collector:
    """A step on all nodes of a job that runs; `most`: events that will be read. Raises SluiceError."""
    if not job.runs:
        raise SluiceError(
            f"job {job.number}: does not run", remedy="profile it while it runs, or submit it with --gpu-profile"
        )
    count = str(job.nodes)
    words = [
        commands.program("srun"), f"--jobid={job.number}", "--overlap", f"--nodes={count}", f"--ntasks={count}",
        "--ntasks-per-node=1", "--cpus-per-task=1", "--gres=none", "--mem=0", "--cpu-bind=none", "--mpi=none",
        "--kill-on-bad-exit=0", "--quiet", "--job-name=sluice-profile", "--chdir=/", _program(commands),
    ]  # fmt: skip
    env = {key: value for key, value in commands.environment().items() if not key.startswith(_NOT_OURS)}
    if "SLURM_CONF" in commands.environment():
        env["SLURM_CONF"] = commands.environment()["SLURM_CONF"]
    return Collector(words, job.nodes, folder, env, most * BYTES_OF_EVENT)


def _program(commands: Commands) -> str:
    """On the nodes: next to their task prolog."""
    config = commands.output("scontrol", "show", "config")
    match = re.search(r"^TaskProlog\s*=\s*(/\S*)/sluice-task-prolog\s*$", config, re.MULTILINE)
    return f"{match[1] if match else _USUAL_FOLDER}/{PROGRAM}"


@contextmanager
def timeline(
    commands: Commands, job: ProfiledJob, seconds: int | None = None, most: int = MOST_EVENTS, wanted: int = ALL
) -> Iterator[Timeline]:
    """What was profiled; of a job that runs, what is there now, or with `seconds` what it does from now on.

    `wanted`: what is collected then.

    Raises SluiceError, OSError.
    """
    if not job.runs and seconds is None:
        if not _is_folder_of(job.uid, job.folder):
            raise SluiceError(
                f"job {job.number}: has ended, and {one_line(str(job.folder))} is not there, or not its user's",
                remedy="profile it while it runs, or submit it with --gpu-profile",
            )
        yield load(job.folder, job.step, most)
        return
    place = tempfile.mkdtemp(prefix="sluice-profile-")
    try:
        problems = _collect(commands, job, Path(place), seconds, most, wanted)
        found = load(Path(place), job.step, most)
        found.notes[:0] = problems
        yield found
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _is_folder_of(uid: int, folder: Path) -> bool:
    """A job may have run in a folder in which all users can make others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _collect(
    commands: Commands, job: ProfiledJob, folder: Path, seconds: int | None, most: int, wanted: int
) -> list[str]:
    """Raises SluiceError, OSError."""
    step = job.step or "*"
    with collector(commands, job, folder, most) as nodes:
        if seconds is not None:
            nodes.start(step, seconds, wanted)
            if not nodes.wait(seconds):
                return [*nodes.problems, "the job has ended meanwhile"]
            nodes.stop(step)
        left = nodes.collect(step)
        if left:
            nodes.problems.append(f"{left} bytes of files are more than is collected of a node")
        return nodes.problems


def own_or_raise(job: ProfiledJob) -> None:
    """Raise SluiceError unless the job is this process's user's."""
    if job.uid != os.geteuid():
        raise SluiceError(
            f"job {job.number}: is of user {job.uid}",
            remedy="operators profile others' jobs through sluice web: POST /api/v1/jobs/JOB/profile; root here",
        )
