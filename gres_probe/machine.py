"""What the kernel reports of a node: PCI functions, NUMA nodes, processors, RDMA interfaces, device files.

Everything is read below a root for /sys, /proc and /dev, so that a container's view or a test's tree works the same. A
file that is missing or unreadable is "unknown", never an error: kernels and virtual machines differ in what they show.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gres_probe.cores import expand_ranges, number_cores
from gres_probe.inventory import MOST_LANES, PCI_CLASS, PCI_ID, PCI_SPEED, PciDevice, Processors
from sluice.base.errors import SluiceError

# PCI base and sub-class of what can be a GPU: VGA, 3D and other display controllers, and processing accelerators.
_GPU_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function; `path` leads from its host bridge over the bridges to itself."""

    address: str
    vendor: int
    device: int
    driver: str  # the kernel driver bound to it; empty: none
    virtual: bool  # a virtual function of SR-IOV
    path: tuple[str, ...]
    numa_node: int | None
    cores: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA interface, as `gres_probe.inventory.NicPort`, of which every value is valid."""

    number: int
    state: str
    physical_state: str
    link_layer: str
    rate_gbps: float | None
    lid: int | None
    guid: str
    network: str


@dataclass(frozen=True, slots=True)
class RdmaInterface:
    """An interface with RDMA; `function` None: no PCI function is below it."""

    name: str
    function: PciFunction | None
    guid: str = ""
    firmware: str = ""
    board: str = ""
    device_file: str = ""
    parent: str = ""
    virtual_functions: int = 0


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """Processors as Slurm counts them; None: unknown."""

    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    cpu_cores: list[int] = field(default_factory=list)  # as Inventory.cpu_cores


class Machine:
    """A node as its kernel shows it; `dev_root` None means that device files are not checked."""

    def __init__(
        self, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc"), dev_root: Path | None = Path("/dev")
    ) -> None:
        self.sys_root = sys_root
        self.proc_root = proc_root
        self.dev_root = dev_root
        self._functions: dict[str, PciFunction | None] = {}

    def pci_function(self, address: str) -> PciFunction | None:
        """One PCI function by its address in lower case; None where the kernel knows none."""
        if address not in self._functions:
            self._functions[address] = self._read_function(address)
        return self._functions[address]

    @property
    def sees_pci(self) -> bool:
        """Whether the kernel shows any PCI function; in some containers and virtual machines it does not."""
        return next(iter(_entries(self.sys_root / "bus/pci/devices")), None) is not None

    @cached_property
    def gpu_functions(self) -> list[PciFunction]:
        """Every physical function of a GPU's class, of any vendor, in order of address."""
        found = []
        for entry in _entries(self.sys_root / "bus/pci/devices"):
            number = _number(entry / "class")
            if number is not None and number >> 8 in _GPU_CLASSES:
                function = self.pci_function(entry.name)
                if function is not None and not function.virtual:
                    found.append(function)
        return found

    def drm_files(self, address: str) -> tuple[str, str]:
        """The render node and the card node of a GPU, e.g. /dev/dri/renderD128 and /dev/dri/card0; empty: none."""
        names = [entry.name for entry in _entries(self.sys_root / "bus/pci/devices" / address / "drm")]
        render = next((name for name in names if re.fullmatch(r"renderD\d+", name)), "")
        card = next((name for name in names if re.fullmatch(r"card\d+", name)), "")
        return (f"/dev/dri/{render}" if render else "", f"/dev/dri/{card}" if card else "")

    def rdma_interfaces(self) -> list[RdmaInterface]:
        """Each interface with RDMA, in natural order of their names. Reads only what the kernel itself knows."""
        files = {
            _text(entry / "ibdev"): f"/dev/infiniband/{entry.name}"
            for entry in _entries(self.sys_root / "class/infiniband_verbs")
        }
        return [
            self._rdma_interface(entry, files.get(entry.name, ""))
            for entry in _entries(self.sys_root / "class/infiniband")
        ]

    def has_rdma(self) -> bool:
        """Whether there is an interface with RDMA."""
        return bool(_entries(self.sys_root / "class/infiniband"))

    def rdma_ports(self) -> dict[str, list[RdmaPort]]:
        """The ports of each interface with RDMA by its name. Reading them asks the adapters, and may hang."""
        return {
            entry.name: [_rdma_port(port) for port in _entries(entry / "ports") if _is_port(port.name)]
            for entry in _entries(self.sys_root / "class/infiniband")
        }

    def _rdma_interface(self, entry: Path, file: str) -> RdmaInterface:
        device = entry / "device"
        try:
            function = self.pci_function(device.resolve(strict=True).name)
        except OSError:  # no hardware below it: soft RoCE
            function = None
        try:
            parent = (device / "physfn").resolve(strict=True).name
        except OSError:
            parent = ""
        return RdmaInterface(
            name=entry.name,
            function=function,
            guid=_guid(_text(entry / "node_guid")),
            firmware=_text(entry / "fw_ver"),
            board=_text(entry / "board_id"),
            device_file=file if file and self.has_device_file(file) else "",
            parent=parent,
            virtual_functions=_number(device / "sriov_numvfs") or 0,
        )

    def cpu_layout(self) -> CpuLayout:
        """Sockets, cores and threads of the processors that are online, and Slurm's number of each one's core."""
        root = self.sys_root / "devices/system/cpu"
        rest = set(_cpu_list(_text(root / "online")))
        cpus: dict[int, tuple[str, str]] = {}
        while rest:
            topology = root / f"cpu{min(rest)}" / "topology"
            package = _text(topology / "package_cpus_list") or _text(topology / "core_siblings_list")
            members = rest.intersection(_cpu_list(package))
            if min(rest) not in members:
                return CpuLayout()
            rest -= members
            while members:
                siblings = _text(root / f"cpu{min(members)}" / "topology" / "thread_siblings_list")
                threads = members.intersection(_cpu_list(siblings))
                if min(members) not in threads:
                    return CpuLayout()
                members -= threads
                cpus.update(dict.fromkeys(threads, (package, siblings)))
        if not cpus:
            return CpuLayout()
        sockets = len({package for package, _ in cpus.values()})
        cores = Counter(package for package, _ in set(cpus.values()))
        threads_per_core = max(Counter(cpus.values()).values())
        return CpuLayout(sockets, max(cores.values()), threads_per_core, number_cores(cpus))

    def processors(self) -> Processors:
        """The kind of the first processor, and the CPUs of each NUMA node."""
        lines = (line.partition(":") for line in _text(self.proc_root / "cpuinfo").partition("\n\n")[0].splitlines())
        first = {key.strip(): value.strip() for key, _, value in lines}
        family, model = (first.get(key, "") for key in ("cpu family", "model"))
        return Processors(
            arch=os.uname().machine,
            vendor=_word(first.get("vendor_id", "")),
            family=int(family) if _is_number(family) else None,
            model=int(model) if _is_number(model) else None,
            numa={
                int(entry.name.removeprefix("node")): _text(entry / "cpulist")
                for entry in _entries(self.sys_root / "devices/system/node")
                if _is_number(entry.name.removeprefix("node"))
            },
        )

    def pci_device(self, address: str, above: str) -> PciDevice:
        """A PCI function below a switch, as it was built: the links of functions at rest are slower."""
        folder = (self.sys_root / "bus/pci/devices" / address).resolve()
        numa_node = _number(folder / "numa_node")
        speeds = [speed for end in (folder, folder.parent) if (speed := _known(PCI_SPEED, end / "max_link_speed"))]
        widths = [_number(end / "max_link_width") or 0 for end in (folder, folder.parent)]
        identity = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        return PciDevice(
            address,
            above,
            numa_node=None if numa_node is None or numa_node < 0 else numa_node,
            pci_class=_known(PCI_CLASS, folder / "class"),
            link_speed=min(speeds, key=lambda speed: float(speed.split()[0]), default=""),
            link_width=min((width for width in widths if 0 < width <= MOST_LANES), default=0),
            **{name: _known(PCI_ID, folder / name) for name in identity},
        )

    def memory_mib(self) -> int | None:
        """Memory of the node as slurmd registers it; the sum over its NUMA nodes where /proc does not say.

        More than slurmd registers would drain the node.
        """
        whole = _memory_kib(self.proc_root / "meminfo")
        nodes = sum(_memory_kib(entry / "meminfo") for entry in _entries(self.sys_root / "devices/system/node"))
        return (whole or nodes) // 1024 or None

    def has_device_file(self, file: str) -> bool:
        """Whether a file of /dev is there; True where device files are not checked."""
        return self.dev_root is None or (self.dev_root / file.removeprefix("/dev/")).exists()

    def matching_device_files(self, pattern: str) -> list[str]:
        """Files of /dev whose name matches a glob pattern; none where device files are not checked."""
        if self.dev_root is None or not pattern:
            return []
        return sorted(f"/dev/{path.relative_to(self.dev_root)}" for path in self.dev_root.glob(pattern))

    def _read_function(self, address: str) -> PciFunction | None:
        folder = self.sys_root / "bus/pci/devices" / address
        try:
            parts = folder.resolve(strict=True).parts
        except OSError:
            return None
        start = next((index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), len(parts) - 1)
        numa_node = _number(folder / "numa_node")
        try:
            driver = (folder / "driver").readlink().name
        except OSError:
            driver = ""
        return PciFunction(
            address=address,
            vendor=_number(folder / "vendor") or 0,
            device=_number(folder / "device") or 0,
            driver=driver,
            virtual=(folder / "physfn").exists(),
            path=parts[start:],
            numa_node=None if numa_node is None or numa_node < 0 else numa_node,
            cores=_text(folder / "local_cpulist"),
        )


def pci_address(domain: int, bus: int, device: int, function: int) -> str:
    """The kernel's spelling of a PCI address, e.g. ``0000:17:00.0``."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key by which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: natural(entry.name))
    except OSError:
        return []


_MOST_PORT = 255
_MOST_LID = 0xFFFF  # of InfiniBand; Omni-Path has larger ones, which are unknown here


def _rdma_port(folder: Path) -> RdmaPort:
    """The files of a port: numbers have their word behind them, as in ``4: ACTIVE`` and ``400 Gb/sec (4X NDR)``."""
    layer = _word(_text(folder / "link_layer"))
    lid = (_number(folder / "lid") or 0) if layer == "InfiniBand" else 0
    rate = re.match(r"\d{1,6}(\.\d{1,3})?", _text(folder / "rate"))
    return RdmaPort(
        number=int(folder.name),
        state=_word(_text(folder / "state").partition(":")[2]),
        physical_state=_word(_text(folder / "phys_state").partition(":")[2]),
        link_layer=layer,
        rate_gbps=float(rate.group()) if rate else None,
        lid=lid if 0 < lid <= _MOST_LID else None,
        guid=_guid(_text(folder / "gids/0")[-19:]),
        network=_word(_text(folder / "gid_attrs/ndevs/0")),
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4


def _is_port(name: str) -> bool:
    """Whether it is a port of InfiniBand's numbers: an adapter in switchdev mode has one for each function, too."""
    return _is_number(name) and int(name) <= _MOST_PORT


def _word(text: str) -> str:
    """``Phy Test`` as one word; empty: none, or ``<unknown>``."""
    word = "".join(text.split())
    return word if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", word) else ""


def _guid(text: str) -> str:
    """``b8ce:f603:00aa:bbcc`` as 16 digits; empty: none, or not given yet."""
    digits = text.replace(":", "").lower()
    return digits if re.fullmatch(r"[0-9a-f]{16}", digits) and int(digits, 16) else ""


def _memory_kib(path: Path) -> int:
    match = re.search(r"MemTotal:\s*(\d+) kB", _text(path))
    return int(match.group(1)) if match else 0


def _cpu_list(text: str) -> list[int]:
    with suppress(SluiceError):
        return expand_ranges(text)
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _known(pattern: re.Pattern[str], path: Path) -> str:
    text = _text(path)
    return text if pattern.fullmatch(text) else ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path), 0)
    except ValueError:
        return None
