"""What Slurm says of one job, in the detail that a new start needs.

Root and SlurmUser act on it. `scontrol show job` has users' words between Slurm's own, a job's name before most of them
(``JobName=x ArrayJobId=33``): so nothing is asked for together with what a user may write freely.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_base.run import CommandError
from slurm_client.commands import Commands

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
_WIDTHS = {
    "JobID": 12, "ArrayJobID": 12, "ArrayTaskID": 24, "State": 24, "Requeue": 4, "BatchFlag": 4, "RestartCnt": 12,
    "EndTime": 24, "NumNodes": 12, "Partition": 200,
}  # fmt: skip
_OF_ONE = ("-h", "-a", "-t", "all", "-j")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job; times in seconds since 1970. `name`: by which commands mean it alone, not its whole array."""

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
class JobWishes:
    """What its user asks; the nodes are hostlists that Slurm has checked."""

    excluded: str
    wanted: str  # the nodes that it must have
    comment: str


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


def read_wishes(commands: Commands, facts: JobFacts) -> JobWishes:
    """Raises SluiceError."""
    said = commands.output("squeue", *_OF_ONE, facts.name, "-o", "%n|%x|%k").removesuffix("\n")
    wanted, excluded, comment = (*said.split("|", 2), "", "")[:3]
    return JobWishes(*("" if text == "(null)" else text for text in (excluded, wanted, comment)))


def _parse(line: str) -> JobFacts:
    found, at = {}, 0
    for name, width in _WIDTHS.items():
        found[name], at = line[at : at + width].strip(), at + width

    def number(name: str) -> int:
        return int(found[name]) if found[name].isdecimal() else 0

    task = found["ArrayTaskID"]
    return JobFacts(
        name=f"{found['ArrayJobID']}_{task}" if task.isdecimal() else found["JobID"],
        state=found["State"],
        requeue=number("Requeue") == 1,
        batch=number("BatchFlag") != 0,
        restarts=number("RestartCnt"),
        end_time=number("EndTime") or None,
        node_count=max(1, number("NumNodes")),
        partition=found["Partition"],
    )
