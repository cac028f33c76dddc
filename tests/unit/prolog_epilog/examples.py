"""A GPU and a job's record to begin with."""

from __future__ import annotations

from prolog_epilog.devices import NodeDevice
from sluice.exchange.record import Grant, JobRecord

MIB, GIB = 1 << 20, 1 << 30


def device(index: int = 0, **changes: object) -> NodeDevice:
    """An H100."""
    fields = {
        "index": index,
        "vendor": "nvidia",
        "model": "H100",
        "uuid": f"GPU-{index}",
        "pci": f"0000:0{index}:00.0",
        "files": (f"/dev/nvidia{index}",),
        "own_file": f"/dev/nvidia{index}",
        "memory_mib": 80 * 1024,
        "driver_version": "550",
        "numa_node": index // 4,
        "cores": "0-3",
        "nics": (f"mlx5_{index}",),
    }
    return NodeDevice(**{**fields, **changes})  # type: ignore[arg-type]


def record(job: int = 7, **changes: object) -> JobRecord:
    """Of a job without GPUs."""
    fields = {"uid": 1000, "user": "ann", "account": "physics", "partition": "main", "node": "n1", "started": 1.0}
    return JobRecord(job, **{**fields, **changes})  # type: ignore[arg-type]


def granted(limit: int | None, uuid: str = "GPU-0", job: int = 7, uid: int = 1000) -> JobRecord:
    """Of a job with one GPU."""
    return record(job, uid=uid, grants=[Grant(0, uuid, "nvidia", "H100", 80 * GIB, limit, limit)])
