"""All checks, by the names of `policy.health.CHECKS`; a module a family."""

from __future__ import annotations

from prolog_epilog.health.check import GpuCheck, NodeCheck
from prolog_epilog.health.checks import device, events, heat, links, memory, node, use

GPU_CHECKS: dict[str, GpuCheck] = {
    **device.CHECKS,
    **events.CHECKS,
    **memory.CHECKS,
    **heat.CHECKS,
    **links.CHECKS,
    **use.CHECKS,
}
NODE_CHECKS: dict[str, NodeCheck] = {**node.CHECKS}

__all__ = ["GPU_CHECKS", "NODE_CHECKS"]
