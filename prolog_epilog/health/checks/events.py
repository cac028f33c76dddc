"""Events that the driver reports. Those of NVIDIA (XID) have rules of their own in `prolog_epilog.health.xid`."""

from __future__ import annotations

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts


def xid(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Judged by `prolog_epilog.health.xid`, as what counts depends on other GPUs and on earlier events."""
    del node, policy
    return Status.UNKNOWN if facts.reading is None else Status.SKIPPED


def ras(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Uncorrected errors outside of memory: engines, caches, firmware, interconnect."""
    del node, policy
    return reported(None if facts.reading is None else facts.reading.ras_uncorrected)


CHECKS = {
    "xid": GpuCheck(xid, "{detail}", vendors=("nvidia",)),
    "ras": GpuCheck(ras, "{value:g} uncorrected errors (RAS) in {window}", kind="growth", vendors=("amd", "intel")),
}
