"""Whether a task's CPUs and memory are on its GPUs' NUMA nodes: read, recorded, and never changed.

The kernel says what a task may use after Slurm has bound it: its affinity within its cpuset, and its cpuset's memory.
Where these are near, no variable and no `numactl` makes them nearer; where they are not, its user or its site asked so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gres_probe.cores import expand_ranges, fold_ranges
from prolog_epilog.cgroups import PROC, read
from prolog_epilog.devices import NodeDevice
from sluice.base.errors import SluiceError

ACTION = "binding"
"""Of the event in a job's record: `Binding`'s fields, and the step."""
_LISTS = re.compile(r"^(Cpus|Mems)_allowed_list:\s*(\S*)$", re.MULTILINE)


@dataclass(frozen=True)
class Binding:
    """What a task may use, and what is near its GPUs. NUMA nodes are lists such as "0-1"."""

    gpu_nodes: str
    cpus: int  # that it may use
    cpus_near: int  # of these, on its GPUs' NUMA nodes
    cpu_nodes: str
    memory_nodes: str
    agrees: bool  # all of its CPUs are near, and so may be its memory

    def detail(self, step: str) -> dict[str, Any]:
        """For the event."""
        return {"step": step, **asdict(self)}


def binding_of(pid: int, devices: Iterable[NodeDevice], numa: Mapping[int, str], proc: Path = PROC) -> Binding | None:
    """A process's binding, seen from its GPUs; `numa`: the CPUs of the node's NUMA nodes.

    None where there is nothing to be near: one NUMA node, GPUs whose place is not known, or a process that has ended.
    """
    near = {device.numa_node for device in devices if device.numa_node is not None}
    if len(numa) < 2 or not near or not near <= numa.keys():
        return None
    try:
        found = dict(_LISTS.findall(read(f"{proc}/{pid}/status")))
        cpus = set(expand_ranges(found["Cpus"]))
        memory = set(expand_ranges(found["Mems"]))
        nodes = {node: set(expand_ranges(text)) for node, text in numa.items()}
    except (KeyError, OSError, SluiceError):
        return None
    cpus_near = cpus & set().union(*(nodes[node] for node in near))
    return Binding(
        gpu_nodes=fold_ranges(near),
        cpus=len(cpus),
        cpus_near=len(cpus_near),
        cpu_nodes=fold_ranges(node for node, of_node in nodes.items() if cpus & of_node),
        memory_nodes=fold_ranges(memory),
        agrees=cpus_near == cpus and bool(memory & near),
    )
