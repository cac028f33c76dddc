"""What NCCL and RCCL read of the node in NCCL_TOPO_FILE: processors, PCIe switches, and the devices that a task has.

Ranks of one node put their files together: NCCL takes two elements for one if all their attributes, and whether they
have a closing tag, are equal. Hence each switch has all attributes that NCCL would otherwise read below /sys for some
ranks and not for others, all processors are there, and links between GPUs, which it asks the driver for, are not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gres_probe.cores import expand_ranges
from gres_probe.inventory import Inventory, PciDevice, Processors, Vendor
from prolog_epilog.devices import NodeDevice
from prolog_epilog.roles import Layout
from prolog_epilog.state import State
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.exchange.record import JobRecord

VARIABLE = "NCCL_TOPO_FILE"
_READERS = frozenset({Vendor.NVIDIA, Vendor.AMD})  # NCCL's and RCCL's GPUs
_ARCHES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64"}
_MOST_ELEMENTS = 192  # NCCL takes 256, and adds links between GPUs
_MOST_TEXT = 253  # of an attribute: NCCL does not start with a longer one
_MOST_FILES = 64  # of one job
_ADDRESS = len("0000:00:00.0")  # NCCL reads no longer one
_BASE_FAMILY = 15  # of CPUID: the rest of a larger one is in another field
_NO_NODE = -1  # as the kernel says of a device that is near no NUMA node


@dataclass
class _Element:
    name: str
    attributes: dict[str, object]
    inner: list[_Element] = field(default_factory=list)

    def lines(self, indent: str = "") -> Iterator[str]:
        words = "".join(f' {key}="{value}"' for key, value in self.attributes.items())
        if self.name in ("gpu", "net"):
            yield f"{indent}<{self.name}{words}/>\n"
            return
        yield f"{indent}<{self.name}{words}>\n"
        for element in self.inner:
            yield from element.lines(indent + "  ")
        yield f"{indent}</{self.name}>\n"


def topology_xml(inventory: Inventory, devices: Sequence[NodeDevice], nics: Container[str]) -> str | None:
    """The file for a task that has these GPUs, which it numbers in this order, and these interfaces.

    None where it would not be right or not be read: partitions of GPUs, a node whose processors or PCI the probe does
    not know, too many devices or CPUs.
    """
    capability = {gpu.pci_address: gpu.capability for gpu in inventory.gpus}
    ends: dict[str, _Element] = {}
    for number, device in enumerate(devices):
        sm = capability.get(device.pci, "").replace(".", "")
        if device.vendor not in _READERS or not sm:
            return None
        # RCCL numbers all GPUs of the node, whatever a task may open: it does so itself where no number is given.
        ends[device.pci] = _Element("gpu", {"dev": number, "sm": sm} if device.vendor == Vendor.NVIDIA else {})
    for nic in inventory.nics:
        if nic.name in nics and nic.pci_address:
            ends[nic.pci_address] = _Element("nic", {}, [_Element("net", {"name": nic.name})])
    shown = {device.address for device in inventory.pci if len(device.address) == _ADDRESS}
    kind = _kind_of(inventory.processors)
    masks = {numa: _mask(cpus) for numa, cpus in inventory.processors.numa.items()}
    if (
        not devices
        or not ends.keys() <= shown
        or kind is None
        or any(len(mask) > _MOST_TEXT for mask in masks.values())
    ):
        return None
    lines = list(_system(inventory, kind, masks, ends).lines())
    return "".join(lines) if sum("</" not in line for line in lines) <= _MOST_ELEMENTS else None


def _system(
    inventory: Inventory, kind: dict[str, object], masks: dict[int, str], ends: dict[str, _Element]
) -> _Element:
    """All processors, below them the switches on the way to the ends, and these."""
    below: dict[str | int, list[_Element]] = defaultdict(list)  # by the address of a switch, or a NUMA node
    for device in reversed(inventory.pci):  # a switch after what is below it
        end = ends.get(device.address)
        inner = [end] if end is not None else sorted(below[device.address], key=_bus)
        if inner:
            numa = _NO_NODE if device.numa_node is None else device.numa_node
            below[device.above or numa].append(_Element("pci", _attributes(device), inner))
    system = _Element("system", {"version": 1})
    for numa in sorted(masks.keys() | ({_NO_NODE} & below.keys())):
        mask = {"affinity": masks[numa]} if masks.get(numa) else {}
        system.inner.append(_Element("cpu", {"numaid": numa, **mask, **kind}, sorted(below[numa], key=_bus)))
    return system


def _bus(element: _Element) -> str:
    return str(element.attributes["busid"])


def _kind_of(processors: Processors) -> dict[str, object] | None:
    """In NCCL's words; None: one of its words is not known."""
    arch = _ARCHES.get(processors.arch)
    if arch != "x86_64":
        return None if arch is None else {"arch": arch}
    vendor, family, model = processors.vendor, processors.family, processors.model
    if not vendor or family is None or model is None:
        return None
    # As NCCL before 2.28 computes it from CPUID, which later ones take as well: AMD's family 25 is 175.
    extended = max(0, family - _BASE_FAMILY)
    return {"arch": arch, "vendor": vendor, "familyid": family - extended + (extended << 4), "modelid": model}


def _attributes(device: PciDevice) -> dict[str, object]:
    identity = {name: getattr(device, name) for name in ("vendor", "device", "subsystem_vendor", "subsystem_device")}
    return {
        "busid": device.address,
        "class": device.pci_class,
        **{name: value for name, value in identity.items() if value},
        "link_speed": device.link_speed,
        "link_width": device.link_width,
    }


def _mask(cpus: str) -> str:
    """A list of CPUs as the kernel's cpumap has it: words of 32 bits, the highest first."""
    bits = sum(1 << cpu for cpu in expand_ranges(cpus))
    words = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, bits.bit_length(), 32)]
    return ",".join(reversed(words))


def _by_role(record: JobRecord, usable: list[NodeDevice], node: str) -> list[list[NodeDevice]]:
    """The devices of each of the job's roles."""
    layout = Layout.read(record.roles) if record.roles else None
    roles = layout.roles if layout is not None else ()
    return [[one for one in usable if layout and one.index in layout.gpus_of(role, node)] for role in roles]


class Topologies:
    """The files of running jobs, written by root's word alone: the step's helper says what its task can open.

    What a task says of itself only chooses one of them. The caller holds the state's lock, but for `exports`.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._folder = state.settings.run / "topology"

    def prepare(self) -> None:
        """Make the folder, and remove what jobs left that ended without an agent. Raises OSError."""
        self._folder.mkdir(mode=0o755, exist_ok=True)
        for folder in self._folder.iterdir():
            if not folder.name.isdecimal() or int(folder.name) not in self._state.records:
                shutil.rmtree(folder)

    def write(self, record: JobRecord, open: Container[str], nics: Container[str]) -> None:
        """Files for a step that can open these device files and interfaces, and for tasks that get one of its GPUs
        each or a role's: that is narrowed down later. Without one, e.g. on a full disk, NCCL looks for itself."""
        usable, inventory = self._usable(record, open), self._state.inventory
        whole = topology_xml(inventory, usable, nics)
        if whole is not None and self._path(record, whole).exists():
            return  # the last one of a step's: each of its tasks comes here
        parts = [[one] for one in usable] + _by_role(record, usable, self._state.node)
        for text in (*(topology_xml(inventory, part, nics) for part in parts), whole):
            try:
                if text is not None:
                    self._keep(self._path(record, text), text)
            except OSError as error:
                log("problem", job=record.job, what=f"no {VARIABLE}: {error.filename}: {error.strerror}")

    def _keep(self, path: Path, text: str) -> None:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        if not path.exists() and len(os.listdir(path.parent)) < _MOST_FILES:
            write_atomic(path, text)

    def exports(self, record: JobRecord, open: Container[str], nics: Container[str]) -> dict[str, str]:
        """The variable for a task, if there is a file for what it can open."""
        text = topology_xml(self._state.inventory, self._usable(record, open), nics)
        path = None if text is None else self._path(record, text)
        return {VARIABLE: str(path)} if path is not None and path.exists() else {}

    def retire(self, record: JobRecord) -> None:
        """A job has ended."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder / str(record.job))

    def _usable(self, record: JobRecord, open: Container[str]) -> list[NodeDevice]:
        """Of the job's devices those that can be opened, in the order of the vendor's libraries."""
        given = [self._state.devices[grant.index] for grant in record.grants]
        return sorted((device for device in given if device.own_file in open), key=lambda device: device.ordinal)

    def _path(self, record: JobRecord, text: str) -> Path:
        """Named after its content: devices may have other numbers for the next agent."""
        return self._folder / str(record.job) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.xml"
