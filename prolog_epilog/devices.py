"""The devices that jobs are given on this node: GPUs and partitions, numbered as Slurm numbers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gres_probe.inventory import Inventory
from gres_probe.writer import LINK_WORDS, node_devices
from sluice.base.errors import SluiceError


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """A GPU or a partition of one. `index` is its place in gres.conf, as in SLURM_JOB_GPUS; memory in MiB."""

    index: int
    vendor: str
    model: str
    uuid: str
    pci: str  # empty for a partition, which shares it with others
    files: tuple[str, ...]
    own_file: str  # opens where this very device was granted, and nowhere else
    memory_mib: int
    driver_version: str
    numa_node: int | None
    cores: str
    nics: tuple[str, ...]
    partition: str = ""  # its profile, e.g. "1g.10gb" or "cpx-nps4"; empty: a whole GPU
    ordinal: int = 0  # among the vendor's devices, in the order of their PCI addresses: that of its libraries
    siblings: int = 1  # how many devices its GPU is divided into, itself among them
    type: str = ""  # GRES type
    parent: str = ""  # UUID of the GPU that a partition is of; empty: it is the GPU
    linked: tuple[str, ...] = ()  # UUIDs of the GPUs that it reaches by as many NVLinks, xGMI or Xe Links as any

    @property
    def gpu_uuid(self) -> str:
        """UUID of the physical GPU."""
        return self.parent or self.uuid

    @property
    def kind(self) -> str:
        """Devices of one kind have driver contexts of one size."""
        return f"{self.vendor}|{self.model}|{self.driver_version}|{'part' if not self.pci else 'whole'}"


def devices_of(inventory: Inventory) -> list[NodeDevice]:
    """A node's devices in the order of the gres.conf that `sluice gres write` makes of it."""
    found = []
    devices = node_devices(inventory)
    order = sorted(devices, key=lambda one: (inventory.gpus[one.gpu].pci_address, one.partition or 0))
    ordinals = {
        (one.gpu, one.partition): [other for other in order if other.vendor == one.vendor].index(one) for one in order
    }
    for index, device in enumerate(devices):
        gpu = inventory.gpus[device.gpu]
        uuid, pci, profile = gpu.uuid, gpu.pci_address, ""
        if device.partition is not None:
            part = next(part for part in gpu.partitions if part.index == device.partition)
            uuid, pci, profile = part.uuid, "", part.profile
        found.append(
            NodeDevice(
                index,
                gpu.vendor,
                gpu.model,
                uuid,
                pci,
                device.files,
                device.own_file,
                device.memory_mib,
                gpu.driver_version,
                gpu.numa_node,
                gpu.cores,
                tuple(gpu.nics),
                profile,
                ordinals[device.gpu, device.partition],
                max(1, len(gpu.partitions)),
                device.type,
                gpu.uuid if profile else "",
                linked_with(inventory, device.gpu),
            )
        )
    return found


def linked_with(inventory: Inventory, gpu: int) -> tuple[str, ...]:
    """UUIDs of the GPUs that one has links to, by its place in the inventory; those with fewer links are slower."""
    row = inventory.links[gpu] if inventory.links else []
    widths = {other: link.width for other, link in enumerate(row) if link.type in LINK_WORDS}
    return tuple(inventory.gpus[other].uuid for other, width in widths.items() if width == max(widths.values()))


def select(devices: list[NodeDevice], indices: Iterable[int]) -> list[NodeDevice]:
    """Devices by their numbers. Raises SluiceError for one that the node does not have."""
    chosen = []
    for index in indices:
        if not 0 <= index < len(devices):
            raise SluiceError(
                f"GPU {index} of gres.conf: this node's drivers show {len(devices)} devices",
                remedy="write gres.conf with: sluice gres write; then restart slurmd and sluice-agent",
            )
        chosen.append(devices[index])
    return chosen
