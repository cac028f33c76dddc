"""Taking a job off its node so that it does not come back by itself."""

from __future__ import annotations

from health.slurm_job import read_job
from sluice_base.errors import SluiceError
from sluice_base.text import one_line
from slurm_client.commands import Commands

_MOST_REASON = 200


def requeue_held(job: int, reason: str, commands: Commands) -> str:
    """Requeue a running job and hold it; cancel one that cannot be requeued. What was done; "" where it does not run.

    Of an array only this task. The reason becomes its comment where it has none of its own. Raises SluiceError when no
    controller does it.
    """
    facts = read_job(commands, job)
    if facts is None or not facts.runs:
        return ""
    done = commands.run("scontrol", "requeuehold", facts.name, check=False)
    if done.returncode == 0:
        if not facts.comment:
            comment = one_line(f"sluice: {reason}")[:_MOST_REASON]
            commands.run("scontrol", "update", f"JobId={facts.name}", f"Comment={comment}", check=False)
        return "requeued and held"
    said = one_line(f"{done.stdout} {done.stderr}".strip())
    if commands.run("scancel", "--full", facts.name, check=False).returncode == 0:
        return "cancelled"
    raise SluiceError(f"job {job}: cannot be requeued nor cancelled: {said}", remedy="tried again")
