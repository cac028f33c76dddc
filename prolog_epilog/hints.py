"""Environment variables that describe what is near a task's GPUs."""

from __future__ import annotations

from prolog_epilog.devices import NodeDevice


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
    if any(device.vendor == "nvidia" for device in devices):
        export["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which Slurm counts them
    return export
