# ruff: noqa: E501
"""Inventories of machines for tests that need no driver."""

from __future__ import annotations

from collections.abc import Callable

from gres_probe.inventory import Gpu, Inventory, Link, LinkType, Nic, NicPort, Partition

H100 = "NVIDIA H100 80GB HBM3"


def gpu(index: int, model: str = H100, **changes: object) -> Gpu:
    """A GPU; NVIDIA's unless `vendor` says otherwise."""
    values: dict[str, object] = {
        "vendor": "nvidia",
        "index": index,
        "uuid": f"GPU-{index}-{model.split()[-1]}",
        "model": model,
        "device_file": f"/dev/nvidia{index}",
        "minor": index,
        "pci_address": f"0000:{index:02x}:00.0",
        "memory_total_mib": 81559,
        "memory_usable_mib": 81037,
        "capability": "9.0",
        "driver_version": "550.54.15",
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


def matrix(size: int, kind: LinkType = LinkType.SYSTEM, width: int = 0) -> list[list[Link]]:
    """Every GPU joined with every other one in the same way."""
    return [[Link(LinkType.SELF) if i == j else Link(kind, width) for j in range(size)] for i in range(size)]


def dgx(node: str = "dgx1") -> Inventory:
    """Eight GPUs on NVLink, two sockets of 56 cores with two threads."""
    gpus = [gpu(i, cores="0-55,112-167" if i < 4 else "56-111,168-223") for i in range(8)]
    links = matrix(8, LinkType.NVLINK, 18)
    return Inventory(node, gpus, links, sockets=2, cores_per_socket=56, threads_per_core=2, memory_mib=2064000)


def nics(*layers: str, near: Callable[[int, int], LinkType], among: LinkType = LinkType.SYSTEM) -> list[Nic]:
    """RDMA interfaces of `dgx`, by their link layers. `near`: how a GPU and an interface are joined; `among`: two interfaces."""
    return [
        Nic(
            f"mlx5_{number}",
            f"0000:18:00.{number}",
            links=[
                *(Link(near(gpu, number)) for gpu in range(8)),
                *(Link(LinkType.SELF if other == number else among) for other in range(len(layers))),
            ],
            device_file=f"/dev/infiniband/uverbs{number}",
            ports=[NicPort(1, link_layer=layer)],
        )
        for number, layer in enumerate(layers)
    ]


def l40s(node: str = "l40s1") -> Inventory:
    """Four GPUs without links."""
    gpus = [gpu(i, "NVIDIA L40S", memory_total_mib=46068, memory_usable_mib=45546, capability="8.9") for i in range(4)]
    return Inventory(node, gpus, matrix(4), sockets=1, cores_per_socket=8, threads_per_core=1, memory_mib=32000)


def mixed(node: str = "mixed1") -> Inventory:
    """An AMD GPU with a card node and a render node, and an NVIDIA one."""
    mi300x = gpu(
        0,
        "AMD Instinct MI300X",
        vendor="amd",
        device_file="/dev/dri/renderD128",
        extra_device_files=["/dev/dri/card0"],
        pci_address="0000:c0:00.0",
        memory_total_mib=196592,
        memory_usable_mib=196288,
        capability="gfx942",
    )
    return Inventory(node, [mi300x, gpu(0)], matrix(2))


def mig(node: str = "mig1", memories: tuple[int, int] = (9984, 9984)) -> Inventory:
    """A GPU with two instances, and a whole one."""
    parts = [
        Partition(
            i,
            f"MIG-{i}",
            f"1g.{memory // 1000 + 1}gb",
            memory,
            ["/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{cap}", f"/dev/nvidia-caps/nvidia-cap{cap + 1}"],
        )
        for i, (memory, cap) in enumerate(zip(memories, (66, 75), strict=True))
    ]
    return Inventory(node, [gpu(0, partitioned=True, partitions=parts), gpu(1)], matrix(2, LinkType.NVLINK, 4))


def instances(node: str = "mig2") -> Inventory:
    """A GPU with two instances of one profile, and no other."""
    inventory = mig(node)
    inventory.gpus.pop()
    inventory.links = matrix(1)
    return inventory
