"""Events that the driver tells. Those of NVIDIA (XID) have rules of their own in `health.xid`."""

from __future__ import annotations

from health.check import Answer, GpuCheck, Status, told
from health.facts import GpuFacts, NodeFacts
from policy.health import NodeHealth


def xid(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Judged by `health.xid`, as what counts depends on other GPUs and on earlier events."""
    del node, policy
    return Status.UNKNOWN if facts.reading is None else Status.SKIPPED


def ras(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Uncorrected errors outside of memory: engines, caches, firmware, interconnect."""
    del node, policy
    return told(None if facts.reading is None else facts.reading.ras_uncorrected)


CHECKS = {
    "xid": GpuCheck(xid, "{detail}", vendors=("nvidia",)),
    "ras": GpuCheck(ras, "{value:g} uncorrected errors (RAS) in {window}", kind="growth", vendors=("amd", "intel")),
}
