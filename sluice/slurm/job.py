"""What Slurm reports of one job, in the detail that a requeue needs.

Root and SlurmUser act on it. `scontrol show job` has users' words between Slurm's own, a job's name before most of them
(``JobName=x ArrayJobId=33``): so nothing is asked for together with what a user can write freely.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.base.run import CommandError
from sluice.slurm.answers import own_name
from sluice.slurm.commands import Commands

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
_WIDTHS = {
    "JobID": 12,
    "ArrayJobID": 12,
    "ArrayTaskID": 24,
    "State": 24,
    "Requeue": 4,
    "BatchFlag": 4,
    "RestartCnt": 12,
    "EndTime": 24,
    "NumNodes": 12,
    "Partition": 200,
}
_OF_ONE = ("-h", "-a", "-t", "all", "-j")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job; times in seconds since 1970. `name`: by which commands mean only this job, not its whole array."""

    name: str
    state: str
    requeue: bool
    batch: bool
    restarts: int
    end_time: int | None
    node_count: int
    partition: str

    @property
    def runs(self) -> bool:
        """Or is about to, or just ending."""
        return self.state in ("RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of its user; the nodes are hostlists that Slurm has checked."""

    excluded: str
    wanted: str  # the nodes that it must have
    comment: str
    account: str


def read_job(commands: Commands, job: int) -> JobFacts | None:
    """A job; None for one that slurmctld does not know any more. Raises SluiceError."""
    shown = ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
    try:
        lines = commands.output("squeue", *_OF_ONE, str(job), "-O", shown).splitlines()
    except CommandError as error:
        if "Invalid job id" in f"{error} {error.stderr}":
            return None
        raise
    # Of an array's number Slurm shows all its tasks, of which this job is one.
    line = next((line for line in lines if line[: _WIDTHS["JobID"]].strip() == str(job)), None)
    return None if line is None else _parse(line)


def read_job_options(commands: Commands, facts: JobFacts) -> JobOptions:
    """Raises SluiceError."""
    said = commands.output("squeue", *_OF_ONE, facts.name, "-o", "%n|%x|%a|%k").removesuffix("\n")
    wanted, excluded, account, comment = (*said.split("|", 3), "", "", "")[:4]
    return JobOptions(*("" if text == "(null)" else text for text in (excluded, wanted, comment, account)))


def _parse(line: str) -> JobFacts:
    found, at = {}, 0
    for name, width in _WIDTHS.items():
        found[name], at = line[at : at + width].strip(), at + width

    def number(name: str) -> int:
        return int(found[name]) if found[name].isdecimal() else 0

    return JobFacts(
        name=own_name(number("JobID"), number("ArrayJobID"), found["ArrayTaskID"]),
        state=found["State"],
        requeue=number("Requeue") == 1,
        batch=number("BatchFlag") != 0,
        restarts=number("RestartCnt"),
        end_time=number("EndTime") or None,
        node_count=max(1, number("NumNodes")),
        partition=found["Partition"],
    )
