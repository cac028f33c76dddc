"""Why the node agent refuses a request, and whose fault each reason is: decided in this one place.

What a user requested or did fails the job, which is requeued and held. What the machine does fails the prolog or
epilog, and Slurm drains the node. Any other error (a SluiceError, an OSError) is the node's: no user can cause one.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Blame(StrEnum):
    """Whose fault it is."""

    JOB = "job"
    NODE = "node"


class Refusal(Enum):
    """Each reason there is: its blame, and what it means."""

    # of prologs
    DRIVER_SILENT = Blame.NODE, "the vendor's driver does not answer"
    GPU_SICK = Blame.NODE, "the last round of health checks found a fault"
    NO_ROOM = Blame.NODE, "a file system that the node needs is full"
    NO_DEVICE_FILE = Blame.NODE, "a GPU's device file is missing"
    SHARE_UNREADABLE = Blame.JOB, "--gpu-share came to the node as job_submit/sluice would not have sent it"
    SHARE_IMPOSSIBLE = Blame.JOB, "nothing can hold the job to its share on this GPU"
    SHARE_OF_UNLIKE_GPUS = Blame.JOB, "its GPUs would be held to the share by different means"
    SHARE_TAKEN = Blame.JOB, "other jobs have the part of the GPU's compute time that it asks for"
    POWER_UNREADABLE = Blame.JOB, "--gpu-power came to the node as job_submit/sluice would not have sent it"
    POWER_OVER_POLICY = Blame.JOB, "--gpu-power asks for more than the policy lets the job have"
    POWER_OUT_OF_RANGE = Blame.JOB, "the GPU cannot be set to what --gpu-power asks for"
    POWER_UNSUPPORTED = Blame.JOB, "the power of the GPU cannot be limited"
    POWER_NOT_TAKEN = Blame.JOB, "the driver does not set what --gpu-power asks for"
    POWER_NOT_SET = Blame.NODE, "the driver does not set the power cap of the policy"
    # of tasks
    JOB_REFUSED = Blame.JOB, "the job's prolog was refused"
    SUSPECT = Blame.JOB, "agents died while they read the job's data"
    JOB_UNKNOWN = Blame.NODE, "the job's prolog did not run, and no other job's has"
    PROLOG_SKIPPED = Blame.JOB, "slurmd ran no prolog for this run of the job, which is requeued"
    WRONG_USER = Blame.JOB, "the job is another user's"
    NO_TASK = Blame.JOB, "the caller is in no job with GPUs"
    GPU_NOT_GIVEN = Blame.JOB, "the step names a GPU that the job was not given"
    GPU_OPEN = Blame.NODE, "the task can open a GPU that the job was not given"
    ROLE_UNKNOWN = Blame.JOB, "the step names a role that the job does not have"
    ROLE_NOT_HERE = Blame.JOB, "the step has no GPU of the role that it names"
    SHARDS_NOT_SPLIT = Blame.JOB, "how many shards the step has of each GPU is not known"
    MORE_THAN_THE_GPU = Blame.JOB, "the GPU has less memory than was requested"
    OVER_CAP = Blame.JOB, "the account's jobs have all that it may have of the GPU"
    LESS_THAN_A_CONTEXT = Blame.JOB, "the limit leaves no room for the driver's own memory"
    CONTEXT_UNKNOWN = Blame.NODE, "the size of a driver context was not measured"
    NO_RUNG = Blame.NODE, "no rung that the policy allows can hold the limit"
    NOT_IN_FORCE = Blame.NODE, "what was set does not hold"
    NO_CGROUP = Blame.NODE, "the job's cgroup is gone"
    # of those who change the node
    BUSY = Blame.NODE, "jobs have GPUs here"

    def __init__(self, blame: Blame, meaning: str) -> None:
        self.blame = blame
        self.meaning = meaning


PROGRAMS: dict[str, Blame] = {
    "ask": Blame.NODE,  # no answer, no answer in time
    "granted": Blame.NODE,  # an answer that makes no sense
    "preflight": Blame.NODE,  # it was drained for what its job's preflight has found
    "number": Blame.NODE,  # slurmd's own variables: those of users have the prefix SPANK_
    "numbers": Blame.NODE,
    "pairs": Blame.NODE,
    "epilog": Blame.NODE,  # a GPU that is not clean
}
"""What programs/node_program.py refuses by itself, by function; what the agent refuses comes with its own blame."""
