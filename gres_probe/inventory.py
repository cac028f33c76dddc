"""The one model of a node's GPUs, which vendors fill in and all other code reads.

Plain dataclasses, so that `sluice probe` starts fast; JSON that comes from outside is validated by pydantic and by
`Inventory.check`. None means "unknown": the driver does not report it. Memory is in MiB, power in W, temperature in
degrees Celsius.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from gres_probe.vendor_names import vendor_names
from sluice.base.errors import SluiceError
from sluice.base.text import UNPRINTABLE

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 1


class Vendor(StrEnum):
    """The vendors that Sluice ships; a vendor's name is that of its module in `gres_probe.vendors`."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"


class LinkType(StrEnum):
    """The best path between two devices, best first; the words of ``nvidia-smi topo -m`` where it has one."""

    SELF = "X"
    NVLINK = "NV"  # with a width: the number of links
    XGMI = "XGMI"
    XELINK = "XE"
    PCI_SWITCH = "PIX"  # at most one PCIe switch
    PCI_BRIDGES = "PXB"  # several PCIe switches, no host bridge
    HOST_BRIDGE = "PHB"
    NUMA_NODE = "NODE"
    SYSTEM = "SYS"  # across NUMA nodes
    UNKNOWN = "?"


class Health(StrEnum):
    """Whether the GPU can be given to jobs; `Gpu.health_reasons` says why not."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Ecc:
    """Error correction: mode and lifetime counts; None where the driver does not report them."""

    enabled: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None


@dataclass(slots=True)
class Partition:
    """A MIG instance or AMD partition: a device of its own for Slurm."""

    index: int
    uuid: str
    profile: str  # e.g. "1g.10gb"
    memory_mib: int
    device_files: list[str]  # every file that a job needs, e.g. the capability files of a MIG instance


@dataclass(slots=True)
class Link:
    """How one device reaches another; `width` is the number of parallel links, 0 where that has no meaning."""

    type: LinkType
    width: int = 0


@dataclass(slots=True)
class GpuFabric:
    """The domain of links between nodes that a GPU has joined: GPUs with equal values reach each other over them."""

    cluster_uuid: str
    clique: int


@dataclass(slots=True)
class Gpu:
    """One physical GPU as its vendor's library reports it."""

    vendor: str  # a name of gres_probe.vendors, e.g. Vendor.NVIDIA
    index: int  # the vendor library's ordinal on this node
    uuid: str
    model: str  # the vendor's own name: free text, not safe for a configuration file or a terminal as it is
    device_file: str  # what Slurm's File= names, e.g. /dev/nvidia0
    minor: int | None  # minor number of the device file; may differ from the ordinal
    pci_address: str  # domain:bus:device.function in lower case
    memory_total_mib: int
    memory_usable_mib: int  # total less what driver and firmware reserve
    extra_device_files: list[str] = field(default_factory=list)  # e.g. the card node next to a render node
    memory_used_mib: int | None = None
    utilisation_percent: int | None = None
    numa_node: int | None = None
    cores: str = ""  # Linux CPU numbers near the GPU, e.g. "0-31,64-95"; empty: unknown or all
    capability: str = ""  # compute capability "9.0", gfx target "gfx942", or Intel IP version
    driver_version: str = ""
    firmware_version: str = ""
    ecc: Ecc = field(default_factory=Ecc)
    health: Health = Health.UNKNOWN
    health_reasons: list[str] = field(default_factory=list)
    partitioned: bool = False  # MIG mode on, or AMD partitions: `partitions` are the devices, not this GPU
    partitions: list[Partition] = field(default_factory=list)
    power_limit_w: int | None = None
    power_limit_max_w: int | None = None
    power_limit_min_w: int | None = None
    power_limit_default_w: int | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_shutdown_c: int | None = None
    nics: list[str] = field(default_factory=list)  # RDMA NICs on its NUMA node or nearer, nearest first: ["mlx5_0"]
    fabric: GpuFabric | None = None  # None: its links end in this node, or its driver does not say


@dataclass(slots=True)
class NicPort:
    """One port of an RDMA interface, in the kernel's words where it has a word; GUIDs as 16 hexadecimal digits."""

    number: int
    state: str = ""  # ACTIVE, DOWN, INIT, ARMED
    physical_state: str = ""  # LinkUp, Disabled, Polling, ...
    link_layer: str = ""  # InfiniBand or Ethernet (RoCE)
    rate_gbps: float | None = None
    lid: int | None = None  # None: no subnet manager has given it one, or it is Ethernet
    guid: str = ""
    network: str = ""  # the network interface of RoCE, e.g. "eth0"


@dataclass(slots=True)
class Nic:
    """A network interface with RDMA; `links` joins it with every GPU, then with every NIC of the node, in order."""

    name: str  # e.g. "mlx5_0"
    pci_address: str  # empty: a virtual one, such as soft RoCE
    numa_node: int | None = None
    links: list[Link] = field(default_factory=list)
    cores: str = ""  # as Gpu.cores
    guid: str = ""  # of the node, in InfiniBand's sense: of this adapter
    firmware: str = ""
    board: str = ""
    device_file: str = ""  # e.g. /dev/infiniband/uverbs0; empty: no program can open it
    parent: str = ""  # of a virtual function of SR-IOV: PCI address of its physical one
    virtual_functions: int = 0  # that are switched on below this physical one
    ports: list[NicPort] = field(default_factory=list)


@dataclass(slots=True)
class PciDevice:
    """A GPU, an RDMA interface, or the upstream port of a PCIe switch above them, in the kernel's words."""

    address: str
    above: str  # the next switch on the way to the processor, which is earlier in the list; empty: there is none
    numa_node: int | None = None
    pci_class: str = ""  # e.g. "0x060400"
    vendor: str = ""  # e.g. "0x10de", as the next three
    device: str = ""
    subsystem_vendor: str = ""
    subsystem_device: str = ""
    link_speed: str = ""  # of device and slot the slower one, e.g. "32.0 GT/s PCIe"
    link_width: int = 0  # lanes; 0: unknown


@dataclass(slots=True)
class Processors:
    """The processors of a node: their kind, and the CPUs of each NUMA node, e.g. "0-55,112-167"."""

    arch: str = ""  # as uname says
    vendor: str = ""  # e.g. "GenuineIntel"; empty: unknown, or not of x86
    family: int | None = None
    model: int | None = None
    numa: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class OpenClDevice:
    """A GPU as OpenCL describes it, where no vendor's library does: it can be known, but not be given to jobs."""

    name: str
    vendor: str
    platform: str
    driver_version: str = ""
    memory_mib: int | None = None
    compute_units: int | None = None
    pci_address: str = ""  # empty: the platform does not say


@dataclass(slots=True)
class Problem:
    """A GPU or vendor library that could not be read: it is reported and left out, never guessed."""

    vendor: str
    what: str
    remedy: str = ""
    index: int | None = None


@dataclass(slots=True)
class Inventory:
    """All GPUs of one node, ordered by vendor and index; `links[i][j]` joins `gpus[i]` and `gpus[j]`."""

    node: str
    gpus: list[Gpu] = field(default_factory=list)
    links: list[list[Link]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    opencl: list[OpenClDevice] = field(default_factory=list)
    pci: list[PciDevice] = field(default_factory=list)
    processors: Processors = field(default_factory=Processors)
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    cpu_cores: list[int] = field(default_factory=list)  # Slurm's core number of each CPU id, -1: absent; see cores.py
    memory_mib: int | None = None
    probed_at: str = ""  # ISO 8601, UTC
    schema_version: int = SCHEMA_VERSION

    def to_json(self, *, indent: int | None = 2) -> str:
        """The inventory as JSON with its schema version."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> Inventory:
        """Validate and load untrusted text; `source` names its origin in errors. Raises SluiceError.

        The result has passed `check`, so that names, paths and addresses are safe to write to configuration
        files. Fields that this version does not know are ignored.
        """
        from pydantic import ValidationError

        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(source, f"not JSON ({error})") from error
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise SluiceError(
                f"{source}: inventory schema {_shown(version)}, this Sluice reads {SCHEMA_VERSION}",
                remedy="probe the node again with this version of Sluice",
            )
        try:
            inventory = _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise _invalid(source, f"{place}: {first['msg']}") from error
        inventory.check(source)
        return inventory

    def check(self, source: str) -> None:
        """Refuse what no node can have, or what must not get into a configuration file.

        `source` names the origin in errors. Raises SluiceError with the offending value and its place.
        """
        checker = _Checker(source)
        checker.word("node", self.node, NODE_NAME)
        checker.word("probed_at", self.probed_at, _TIME, empty=True)
        for name in ("sockets", "cores_per_socket", "threads_per_core"):
            checker.number(name, getattr(self, name), 1, 1 << 16)
        checker.number("memory_mib", self.memory_mib, 1, _MAX_MIB)
        if len(self.cpu_cores) > 1 << 16 or any(not -1 <= core < 1 << 16 for core in self.cpu_cores):
            raise checker.invalid("cpu_cores: not core numbers")
        for position, gpu in enumerate(self.gpus):
            checker.gpu(f"gpus.{position}", gpu)
        for position, problem in enumerate(self.problems):
            checker.vendor(f"problems.{position}.vendor", problem.vendor)
        size = len(self.gpus)
        if len(self.links) != size or any(len(row) != size for row in self.links):
            raise checker.invalid(f"links: not a {size} x {size} matrix")
        for position, nic in enumerate(self.nics):
            checker.nic(f"nics.{position}", nic)
            if len(nic.links) != size + len(self.nics):
                raise checker.invalid(f"nics.{position}.links: not one link for each GPU and NIC")
        for position, device in enumerate(self.opencl):
            checker.opencl(f"opencl.{position}", device)
        for position, one in enumerate(self.pci):
            checker.pci(f"pci.{position}", one, {other.address for other in self.pci[:position]})
        checker.processors("processors", self.processors)
        for row in (*self.links, *(nic.links for nic in self.nics)):
            if any(not 0 <= link.width <= _MAX_WIDTH for link in row):
                raise checker.invalid(f"links: a width that is not between 0 and {_MAX_WIDTH}")


def check_gpu(gpu: Gpu, source: str) -> None:
    """Refuse a GPU that `Inventory.check` would refuse. Raises SluiceError that begins with `source`."""
    _Checker(source).gpu(f"GPU {gpu.index}", gpu)


class _Checker:
    """Checks the values of one inventory; all raise SluiceError with the origin, the place and the value."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._vendors = vendor_names()
        self._seen: set[str] = set()  # what must not occur twice

    def invalid(self, what: str) -> SluiceError:
        return _invalid(self._source, what)

    def word(self, place: str, value: str, pattern: re.Pattern[str], *, empty: bool = False) -> None:
        if not (empty and not value) and not pattern.fullmatch(value):
            raise self.invalid(f"{place}: {_shown(value)} is not as a probe writes it")

    def number(self, place: str, value: int | None, low: int, high: int) -> None:
        if value is not None and not low <= value <= high:
            raise self.invalid(f"{place}: {_shown(value)} is not between {low} and {high}")

    def vendor(self, place: str, value: str) -> None:
        if value not in self._vendors:
            raise self.invalid(f"{place}: {_shown(value)} is not one of {', '.join(self._vendors)}")

    def nic(self, place: str, nic: Nic) -> None:
        self.word(f"{place}.name", nic.name, _NIC_NAME)
        for name in ("pci_address", "parent"):
            self.word(f"{place}.{name}", getattr(nic, name), PCI_ADDRESS, empty=True)
        self.word(f"{place}.cores", nic.cores, _CPU_LIST, empty=True)
        self.word(f"{place}.guid", nic.guid, GUID, empty=True)
        self.word(f"{place}.device_file", nic.device_file, DEVICE_FILE, empty=True)
        for name in ("firmware", "board"):
            self.word(f"{place}.{name}", getattr(nic, name), _TEXT, empty=True)
        self.number(f"{place}.numa_node", nic.numa_node, 0, 1 << 16)
        self.number(f"{place}.virtual_functions", nic.virtual_functions, 0, 1 << 16)
        for port in nic.ports:
            inside = f"{place}.ports.{port.number}"
            self.number(f"{inside}.number", port.number, 0, 255)
            self.number(f"{inside}.lid", port.lid, 1, 0xFFFF)
            self.word(f"{inside}.guid", port.guid, GUID, empty=True)
            for name in ("state", "physical_state", "link_layer", "network"):
                self.word(f"{inside}.{name}", getattr(port, name), _NIC_NAME, empty=True)
            if port.rate_gbps is not None and not 0 <= port.rate_gbps <= _MOST_GBPS:
                raise self.invalid(f"{inside}.rate_gbps: {_shown(port.rate_gbps)} is no rate")

    def pci(self, place: str, device: PciDevice, before: set[str]) -> None:
        self.word(f"{place}.address", device.address, PCI_ADDRESS)
        if device.address in before or device.above not in {"", *before}:
            raise self.invalid(f"{place}: {device.address} below {_shown(device.above)}: twice, or before its switch")
        self.word(f"{place}.pci_class", device.pci_class, PCI_CLASS, empty=True)
        for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
            self.word(f"{place}.{name}", getattr(device, name), PCI_ID, empty=True)
        self.word(f"{place}.link_speed", device.link_speed, PCI_SPEED, empty=True)
        self.number(f"{place}.link_width", device.link_width, 0, MOST_LANES)
        self.number(f"{place}.numa_node", device.numa_node, 0, 1 << 16)

    def processors(self, place: str, processors: Processors) -> None:
        self.word(f"{place}.arch", processors.arch, _NIC_NAME, empty=True)
        self.word(f"{place}.vendor", processors.vendor, _NIC_NAME, empty=True)
        self.number(f"{place}.family", processors.family, 0, 1 << 16)
        self.number(f"{place}.model", processors.model, 0, 1 << 16)
        for number, cpus in processors.numa.items():
            self.number(f"{place}.numa", number, 0, 1 << 16)
            self.word(f"{place}.numa.{number}", cpus, _CPU_LIST, empty=True)

    def opencl(self, place: str, device: OpenClDevice) -> None:
        for name in ("name", "vendor", "platform", "driver_version"):
            self.word(f"{place}.{name}", getattr(device, name), _TEXT, empty=name == "driver_version")
        self.word(f"{place}.pci_address", device.pci_address, PCI_ADDRESS, empty=True)
        self.number(f"{place}.memory_mib", device.memory_mib, 0, _MAX_MIB)
        self.number(f"{place}.compute_units", device.compute_units, 0, 1 << 20)

    def gpu(self, place: str, gpu: Gpu) -> None:
        self.vendor(f"{place}.vendor", gpu.vendor)
        self.word(f"{place}.uuid", gpu.uuid, _IDENTITY)
        self.word(f"{place}.pci_address", gpu.pci_address, PCI_ADDRESS)
        self.word(f"{place}.model", gpu.model, _TEXT)
        self.word(f"{place}.cores", gpu.cores, _CPU_LIST, empty=True)
        for name in ("capability", "driver_version", "firmware_version"):
            self.word(f"{place}.{name}", getattr(gpu, name), _TEXT, empty=True)
        for reason in gpu.health_reasons:
            self.word(f"{place}.health_reasons", reason, _TEXT)
        for nic in gpu.nics:
            self.word(f"{place}.nics", nic, _NIC_NAME)
        if gpu.fabric is not None:
            self.word(f"{place}.fabric.cluster_uuid", gpu.fabric.cluster_uuid, _IDENTITY)
            self.number(f"{place}.fabric.clique", gpu.fabric.clique, 0, (1 << 32) - 1)
        for file in (gpu.device_file, *gpu.extra_device_files):
            self.word(f"{place}.device_file", file, DEVICE_FILE)
        self.number(f"{place}.index", gpu.index, 0, _MAX_INDEX)
        self.number(f"{place}.minor", gpu.minor, 0, (1 << 20) - 1)
        self.number(f"{place}.numa_node", gpu.numa_node, 0, 1 << 16)
        self.number(f"{place}.memory_total_mib", gpu.memory_total_mib, 1, _MAX_MIB)
        self.number(f"{place}.memory_usable_mib", gpu.memory_usable_mib, 0, gpu.memory_total_mib)
        self.number(f"{place}.memory_used_mib", gpu.memory_used_mib, 0, gpu.memory_total_mib)
        self.number(f"{place}.utilisation_percent", gpu.utilisation_percent, 0, 100)
        for partition in gpu.partitions:
            inside = f"{place}.partitions.{partition.index}"
            self.word(f"{inside}.uuid", partition.uuid, _IDENTITY)
            self.word(f"{inside}.profile", partition.profile, _TEXT)
            self.number(f"{inside}.index", partition.index, 0, _MAX_INDEX)
            self.number(f"{inside}.memory_mib", partition.memory_mib, 1, gpu.memory_total_mib)
            for file in partition.device_files:
                self.word(f"{inside}.device_files", file, DEVICE_FILE)
        for identity in (gpu.device_file, gpu.pci_address, f"{gpu.vendor} {gpu.index}"):
            if identity in self._seen:
                raise self.invalid(f"{place}: {_shown(identity)} occurs twice")
            self._seen.add(identity)


NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
DEVICE_FILE = re.compile(r"/dev(/[A-Za-z0-9_-][A-Za-z0-9._:-]{0,63}){1,4}")
GUID = re.compile(r"[0-9a-f]{16}")
PCI_CLASS = re.compile(r"0x[0-9a-f]{6}")
PCI_ID = re.compile(r"0x[0-9a-f]{4}")
MOST_LANES = 64
PCI_SPEED = re.compile(r"\d{1,3}(\.\d)? GT/s( PCIe)?")
_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_NIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CPU_LIST = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?){0,1023}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)")
_TEXT = re.compile(rf"[^{UNPRINTABLE}]{{1,256}}")  # one line
_MAX_MIB = 1 << 40
_MAX_INDEX = 4095
_MAX_WIDTH = 1024
_MOST_GBPS = 1_000_000.0


@cache
def _adapter() -> TypeAdapter[Inventory]:
    from pydantic import TypeAdapter

    return TypeAdapter(Inventory)


def _shown(value: object) -> str:
    """A value of unknown origin for an error message: on one line, escaped and short."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _invalid(source: str, what: str) -> SluiceError:
    return SluiceError(f"{source}: {what}", remedy="probe the node again with: sluice probe --json")
