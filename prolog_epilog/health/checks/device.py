"""Is the GPU there, and is it set up as it should be?"""

from __future__ import annotations

from collections import Counter

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Measured, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts


def lost(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """A GPU that its driver no longer lists, or says is lost. A driver that is silent says nothing of it."""
    del node, policy
    if not facts.answered:
        return Status.UNKNOWN
    if facts.reading is None:
        return Measured(1, "the driver does not list it any more")
    if facts.reading.lost or facts.reading.problem:
        return Measured(1, facts.reading.problem or "the driver says that it is lost")
    return Measured(0)


def device_file(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Files below /dev that the GPU had when the agent started."""
    del node, policy
    return Measured(len(facts.missing_files), ", ".join(facts.missing_files))


def firmware(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """A VBIOS that most GPUs of the model on this node do not have."""
    del policy
    if facts.reading is None or not facts.reading.vbios:
        return Status.UNKNOWN
    versions = Counter(
        one.reading.vbios
        for one in node.gpus
        if one.gpu.model == facts.gpu.model and one.reading is not None and one.reading.vbios
    )
    usual, count = versions.most_common(1)[0]
    odd = facts.reading.vbios != usual and count > versions[facts.reading.vbios]
    return Measured(int(odd), f"{facts.reading.vbios}, others have {usual}" if odd else "")


def persistence(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Persistence mode off: each first process waits for the driver, and counters start again at 0."""
    del node, policy
    on = None if facts.reading is None else facts.reading.persistence
    return reported(None if on is None else not on)


CHECKS = {
    "gpu_lost": GpuCheck(lost, "lost: {detail}"),
    "device_file": GpuCheck(device_file, "no device file {detail}"),
    "firmware": GpuCheck(firmware, "firmware {detail}"),
    "persistence": GpuCheck(persistence, "persistence mode is off", vendors=("nvidia",)),
}
