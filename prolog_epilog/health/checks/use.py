"""Who uses the GPU."""

from __future__ import annotations

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Measured, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts

_MIB = 1 << 20


def residual(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Memory of no process, on a GPU that no job has, beyond the least that was seen there so far, in MiB."""
    del node, policy
    if facts.jobs:
        return Status.SKIPPED
    return reported(None if facts.residual_bytes is None else facts.residual_bytes / _MIB)


def strays(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Processes of users that belong to no job."""
    del node, policy
    if facts.strays is None:
        return Status.UNKNOWN
    return Measured(len(facts.strays), ", ".join(map(str, facts.strays[:8])))


def idle(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Utilisation of a GPU that a job has."""
    del node, policy
    if not facts.jobs:
        return Status.SKIPPED
    value = None if facts.reading is None else facts.reading.utilisation_percent
    return reported(value, ", ".join(map(str, facts.jobs[:8])))


CHECKS = {
    "residual_memory": GpuCheck(residual, "{value:.0f} MiB in use by no process for {window}"),
    "stray_process": GpuCheck(strays, "processes of no job: {detail}"),
    "idle_gpu": GpuCheck(idle, "job {detail} has not used it for {window}", below=True, per_detail=True),
}
