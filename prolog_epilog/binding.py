"""Whether a task's CPUs and memory are on its GPUs' NUMA nodes: read, recorded, and never changed.

The kernel says what a task may use after Slurm has bound it: its affinity within its cpuset, and its cpuset's memory.
Where these are near, no variable and no `numactl` makes them nearer; where they are not, its user or its site asked so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
    huge_mib: int | None = None  # reserved as huge pages on its GPUs' NUMA nodes; None: the kernel has none at all
    huge_far_mib: int | None = None  # and on the node's others

    def detail(self, step: str) -> dict[str, Any]:
        """For the event."""
        return {"step": step, **asdict(self)}


def binding_of(
    pid: int, devices: Iterable[NodeDevice], numa: Mapping[int, str], proc: Path = PROC, sys: Path = Path("/sys")
) -> Binding | None:
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
    huge = {node: _huge_mib(sys, node) for node in numa}
    cpus_near = cpus & set().union(*(nodes[node] for node in near))
    return Binding(
        gpu_nodes=fold_ranges(near),
        cpus=len(cpus),
        cpus_near=len(cpus_near),
        cpu_nodes=fold_ranges(node for node, of_node in nodes.items() if cpus & of_node),
        memory_nodes=fold_ranges(memory),
        agrees=cpus_near == cpus and bool(memory & near),
        huge_mib=_sum(huge[node] for node in near),
        huge_far_mib=_sum(huge[node] for node in numa.keys() - near),
    )


def _huge_mib(sys: Path, node: int) -> int | None:
    """What a NUMA node has reserved as huge pages, of all sizes, used or not; None where it has no such thing."""
    found = []
    for folder in (sys / f"devices/system/node/node{node}/hugepages").glob("hugepages-*kB"):
        with suppress(OSError, ValueError):
            kib = int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
            found.append(kib * int((folder / "nr_hugepages").read_text()))
    return sum(found) >> 10 if found else None


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
