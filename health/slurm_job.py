"""What Slurm says of one job, in the detail that a new start needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sluice_base.run import CommandError
from slurm_client.commands import Commands

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)


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
    excluded: str  # hostlist
    wanted: str  # hostlist of the nodes that it must have
    partition: str
    comment: str

    @property
    def runs(self) -> bool:
        """Or is about to, or just ending."""
        return self.state in ("RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED")


def read_job(commands: Commands, job: int) -> JobFacts | None:
    """A job; None for one that slurmctld does not know any more. Raises SluiceError."""
    try:
        lines = commands.output("scontrol", "show", "job", "-o", str(job)).splitlines()
    except CommandError as error:
        if "Invalid job id" in f"{error} {error.stderr}":
            return None
        raise
    # Of an array's number Slurm shows all its tasks, of which this job is one.
    line = next((line for line in lines if line.startswith(f"JobId={job} ")), None)
    return None if line is None else parse_job(line)


def parse_job(text: str) -> JobFacts:
    """From ``scontrol show job -o``. A value that users write may hold anything: of a repeated key the first counts,
    which Slurm's own keys are; the comment is the last but for what Slurm puts behind it."""
    found: dict[str, str] = {}
    for match in re.finditer(r"(?:^|\s)([A-Z][A-Za-z:/]*)=(\S*)", text):
        found.setdefault(match[1], match[2])

    def number(key: str) -> int:
        digits = re.match(r"\d+", found.get(key, ""))
        return int(digits[0]) if digits else 0

    excluded, wanted = found.get("ExcNodeList", ""), found.get("ReqNodeList", "")
    task = found.get("ArrayTaskId", "")
    return JobFacts(
        name=f"{found['ArrayJobId']}_{task}" if task.isdecimal() else found.get("JobId", ""),
        state=found.get("JobState", ""),
        requeue=found.get("Requeue") == "1",
        batch=found.get("BatchFlag", "0") != "0",
        restarts=number("Restarts"),
        end_time=number("EndTime") or None,
        node_count=max(1, number("NumNodes")),
        excluded="" if excluded == "(null)" else excluded,
        wanted="" if wanted == "(null)" else wanted,
        partition=found.get("Partition", ""),
        comment=found.get("Comment", ""),
    )
