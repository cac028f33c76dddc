"""Slurm's reasons, for people."""

from __future__ import annotations

_REASONS = {
    "": "it has not been looked at yet",
    "None": "it has not been looked at yet",
    "Priority": "jobs of higher priority go first",
    "Resources": "not enough is free now",
    "BeginTime": "its begin time has not come",
    "JobHeldUser": "it is held by its user",
    "JobHeldAdmin": "it is held by an operator",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "nodes that it could have are reserved or not available",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs",
    "PartitionTimeLimit": "it asks for more time than the partition gives: lower the service's walltime",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "InvalidAccount": "the tenant's account is not known: sluice apply",
    "InvalidQOS": "the tenant's QOS is not known: sluice apply",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node is as it asks",
    "Licenses": "it waits for a licence",
}
_BEGINS = (
    ("AssocGrpGRES", "the tenant's limit of GPUs is reached"),
    ("AssocGrp", "the tenant's limit is reached"),
    ("AssocMax", "a limit of the account is reached"),
    ("QOSGrp", "the limit of the tenant's QOS is reached"),
    ("QOSMax", "a limit of the QOS for one user is reached"),
    ("MaxJobsPerAccount", "the account has as many jobs as it may have"),
    ("launch", "it could not be launched"),
)
_ENDS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "its job was cancelled",
    "COMPLETED": "its job ended by itself",
    "DEADLINE": "its job's deadline is over",
    "FAILED": "its job failed",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "its job was out of memory",
    "PREEMPTED": "its job was preempted",
    "TIMEOUT": "its job's time was over",
}


def why_it_waits(reason: str) -> str:
    """Of a pending job: the words for Slurm's reason, with the reason itself."""
    word = reason.strip("()").partition(",")[0]
    words = _REASONS.get(word) or next((text for begin, text in _BEGINS if word.startswith(begin)), "")
    if not words:
        return word
    return f"{words} ({word})" if word and word != "None" else words


def why_it_ended(state: str) -> str:
    """Of a job that is over."""
    return _ENDS.get(state, "its job is not in Slurm any more" if not state else f"its job is {state}")
