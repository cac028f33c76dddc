"""How the devices of a node are connected: links of the vendors, paths over PCI, and the groups that result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

from gres_probe.inventory import Gpu, Inventory, Link, LinkType, Nic, NicPort, PciDevice
from gres_probe.machine import Machine, PciFunction, RdmaInterface, RdmaPort, natural
from sluice.base.text import one_line

FAST_LINKS = frozenset({LinkType.NVLINK, LinkType.XGMI, LinkType.XELINK})
_NEARNESS = {kind: position for position, kind in enumerate(LinkType)}


def pci_path(first: PciFunction | None, second: PciFunction | None) -> LinkType:
    """The kind of path between two PCI functions, in the words of ``nvidia-smi topo -m``.

    Below a common root port, a PCIe switch shows as an upstream bridge with one downstream bridge for each slot: two
    functions whose paths part below one upstream bridge share one switch.
    """
    if first is None or second is None:
        return LinkType.UNKNOWN
    if first.address == second.address:
        return LinkType.SELF
    common = 0
    for one, other in zip(first.path, second.path, strict=False):
        if one != other:
            break
        common += 1
    if common == 0:
        if first.numa_node == second.numa_node:
            return LinkType.NUMA_NODE
        return LinkType.UNKNOWN if None in (first.numa_node, second.numa_node) else LinkType.SYSTEM
    if common == 1:
        return LinkType.HOST_BRIDGE
    bridges = max(len(first.path), len(second.path)) - common - 1
    return LinkType.PCI_SWITCH if bridges <= 1 else LinkType.PCI_BRIDGES


def link_matrix(
    gpus: Sequence[Gpu], fast: Mapping[str, Mapping[tuple[int, int], Link]], machine: Machine
) -> list[list[Link]]:
    """The best path between any two GPUs, of any vendors.

    `fast` holds each vendor's own links by pairs of the vendor's ordinals, smaller first; all else goes over PCI.
    """
    functions = [machine.pci_function(gpu.pci_address) for gpu in gpus]

    def link(row: int, column: int) -> Link:
        if row == column:
            return Link(LinkType.SELF)
        first, second = gpus[row], gpus[column]
        if first.vendor == second.vendor:
            pair = (min(first.index, second.index), max(first.index, second.index))
            direct = fast.get(first.vendor, {}).get(pair)
            if direct is not None:
                return direct
        return Link(pci_path(functions[row], functions[column]))

    return [[link(row, column) for column in range(len(gpus))] for row in range(len(gpus))]


def rdma_nics(gpus: Sequence[Gpu], machine: Machine, ports: Mapping[str, Sequence[RdmaPort]]) -> list[Nic]:
    """The node's RDMA interfaces with their paths; also names the near ones in each GPU's `nics`, nearest first.

    `ports` are those of each interface, as far as they are known.
    """
    interfaces = machine.rdma_interfaces()
    ends = [machine.pci_function(gpu.pci_address) for gpu in gpus] + [one.function for one in interfaces]
    nics = [_nic(interface, ends, ports.get(interface.name, ())) for interface in interfaces]
    for position, gpu in enumerate(gpus):
        near = [nic for nic in nics if _NEARNESS[nic.links[position].type] <= _NEARNESS[LinkType.NUMA_NODE]]
        near.sort(key=lambda nic: (_NEARNESS[nic.links[position].type], natural(nic.name)))
        gpu.nics = [nic.name for nic in near]
    return nics


def _nic(interface: RdmaInterface, ends: Sequence[PciFunction | None], ports: Sequence[RdmaPort]) -> Nic:
    function = interface.function
    return Nic(
        name=interface.name,
        pci_address=function.address if function else "",
        numa_node=function.numa_node if function else None,
        links=[Link(pci_path(function, end)) for end in ends],
        cores=function.cores if function else "",
        guid=interface.guid,
        firmware=one_line(interface.firmware),
        board=one_line(interface.board),
        device_file=interface.device_file,
        parent=interface.parent,
        virtual_functions=interface.virtual_functions,
        ports=[NicPort(**asdict(port)) for port in ports],
    )


def pci_devices(gpus: Sequence[Gpu], nics: Sequence[Nic], machine: Machine) -> list[PciDevice]:
    """GPUs and interfaces with the PCIe switches above them, a switch before what is below it."""
    found: dict[str, PciDevice] = {}
    for address in (*(gpu.pci_address for gpu in gpus), *(nic.pci_address for nic in nics)):
        function = machine.pci_function(address) if address else None
        # Below a host bridge and a root port, two bridges are a switch: its upstream port, and that of a slot.
        path = function.path if function is not None else ()
        for above, end in pairwise(("", *path[2:-1:2], *path[-1:])):
            found.setdefault(end, machine.pci_device(end, above))
    return list(found.values())


def link_domains(inventory: Inventory) -> list[list[int]]:
    """Groups of positions in `inventory.gpus` that fast links join, directly or over others.

    Each group is sorted, the groups are ordered by their first member, and a GPU without such links is a group of one.
    """
    domains: list[list[int]] = []
    placed: set[int] = set()
    for start in range(len(inventory.gpus)):
        if start in placed:
            continue
        group, edge = {start}, [start]
        while edge:
            row = inventory.links[edge.pop()]
            reached = {column for column, link in enumerate(row) if link.type in FAST_LINKS} - group
            group |= reached
            edge.extend(reached)
        placed |= group
        domains.append(sorted(group))
    return domains


def labels_of(inventory: Inventory) -> list[str]:
    """``GPU0`` as people know it; on a node of several vendors ``nvidia0``, ``amd0``."""
    several = len({gpu.vendor for gpu in inventory.gpus}) > 1
    return [f"{gpu.vendor if several else 'GPU'}{gpu.index}" for gpu in inventory.gpus]


def topology_document(inventory: Inventory) -> dict[str, object]:
    """How the GPUs of a node are joined, for JSON."""
    return {
        "schema_version": 1,
        "node": inventory.node,
        "gpus": [
            {
                "label": label,
                "vendor": gpu.vendor,
                "index": gpu.index,
                "uuid": gpu.uuid,
                "model": gpu.model,
                "pci_address": gpu.pci_address,
                "numa_node": gpu.numa_node,
                "cores": gpu.cores,
                "nics": gpu.nics,
            }
            for label, gpu in zip(labels_of(inventory), inventory.gpus, strict=True)
        ],
        "links": [[asdict(link) for link in row] for row in inventory.links],
        "nics": [asdict(nic) for nic in inventory.nics],
        "link_domains": link_domains(inventory),
    }
