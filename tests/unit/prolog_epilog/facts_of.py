"""Healthy facts to begin with."""

from __future__ import annotations

from typing import Any

from prolog_epilog.health.facts import Gpu, GpuFacts, NodeFacts
from sluice.exchange.readings import Link, Reading

MIB = 1 << 20


def reading(**changes: Any) -> Reading:
    """Of a healthy GPU whose driver reports everything."""
    fields: dict[str, Any] = {
        "uuid": "GPU-0", "utilisation_percent": 0.0, "memory_total_bytes": 80 << 30, "memory_used_bytes": 600 * MIB,
        "power_mw": 80_000, "power_limit_mw": 700_000, "temperature_c": 35.0, "temperature_memory_c": 40.0,
        "clock_graphics_mhz": 345, "clock_graphics_max_mhz": 1980, "throttle": [], "persistence": True,
        "vbios": "96.00", "ecc_enabled": True, "ecc_corrected": 0, "ecc_uncorrected": 0, "ras_uncorrected": 0,
        "rows_pending": False, "rows_failed": False, "pages_retired": 0, "pages_pending": False, "pcie_width": 16,
        "pcie_width_max": 16, "pcie_replays": 0, "links": [Link(0, True, 0, 0, 0), Link(1, True, 0, 0, 0)],
    }  # fmt: skip
    return Reading(**(fields | changes))


def gpu(number: int = 0, vendor: str = "nvidia", **changes: Any) -> GpuFacts:
    """A healthy GPU; `changes` are of its reading, or with an underscore before them of its facts."""
    facts = {name[1:]: value for name, value in changes.items() if name.startswith("_")}
    told = {name: value for name, value in changes.items() if not name.startswith("_")}
    uuid = f"GPU-{number}"
    fields: dict[str, Any] = {
        "gpu": Gpu(uuid, vendor, "Model", (number,), (f"/dev/gpu{number}",), ("mlx5_0",), "570.1"),
        "reading": reading(uuid=uuid, **told),
        "residual_bytes": 500 * MIB,
        "strays": (),
    }
    found = GpuFacts(**(fields | facts))
    if not found.recent_jobs:
        found.recent_jobs = found.jobs
    if not found.recent_users:
        found.recent_users = tuple(job // 10 for job in found.recent_jobs)  # whose numbers differ only in the last one
    return found


def node(now: float, *gpus: GpuFacts, **changes: Any) -> NodeFacts:
    """A healthy node."""
    fields: dict[str, Any] = {
        "problems": {one.gpu.vendor: None for one in gpus},
        "modules": {one.gpu.vendor: "570.1" for one in gpus},
        "nics": {"mlx5_0": "ACTIVE"},
        "lost_nics": [],
        "nic_counts": {"mlx5_0": {"link_downs": 0}},
        "free_percent": {"/tmp": 50.0},
        "skew_s": 0.1,
        "gpus": list(gpus),
    }
    return NodeFacts(now, **(fields | changes))
