"""Environment variables that describe what is near a task's GPUs."""

from __future__ import annotations

from collections.abc import Collection

from prolog_epilog.devices import NodeDevice
from prolog_epilog.nccl_topology import VARIABLE as TOPOLOGY

OF_LIBRARIES = (
    "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", TOPOLOGY, "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
)  # fmt: skip
"""What libraries read, and users may have set themselves."""
SET = "SLUICE_SET"
"""What of these was set for a task, so that its steps do not take it for their user's own."""
_ORDER = {"nvidia": ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), "intel": ("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1")}


def hints(devices: list[NodeDevice], usable: list[str] | None = None) -> dict[str, str]:
    """Variables for a task: the NUMA nodes, cores and RDMA interfaces near its GPUs, in the libraries' own format.

    `usable` are the interfaces that it can open; None: all of them.
    """
    export: dict[str, str] = {}
    if not devices:
        return export
    nodes = sorted({device.numa_node for device in devices if device.numa_node is not None})
    cores = list(dict.fromkeys(device.cores for device in devices if device.cores))
    near = ([nic for nic in device.nics if usable is None or nic in usable] for device in devices)
    nics = list(dict.fromkeys(found[0] for found in near if found))
    if nodes:
        export["SLUICE_GPU_NUMA"] = ",".join(map(str, nodes))
    if cores:
        export["SLUICE_GPU_CORES"] = ",".join(cores)
    if nics:
        export["SLUICE_GPU_NICS"] = ",".join(nics)
        export["NCCL_IB_HCA"] = "=" + ",".join(nics)  # RCCL reads the same
    # The order in which Slurm counts them.
    return export | dict(_ORDER[device.vendor] for device in devices if device.vendor in _ORDER)


def without_own(export: dict[str, str], own: Collection[str]) -> dict[str, str]:
    """The variables less those that the user has set, and which of them are for libraries."""
    found = {name: value for name, value in export.items() if name not in own}
    words = [f"{name}={value}" for name, value in sorted(found.items()) if name in OF_LIBRARIES]
    return found | {SET: " ".join(words)}
