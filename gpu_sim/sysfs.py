"""The parts of /sys and /proc that describe a platform's devices; path depth is the PCI hierarchy."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpu_sim.layout import Hop
from gpu_sim.platform import GpuPlace, Nic, Pcie, Platform

_SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0", 7: "128.0"}  # GT/s
_VENDOR_IDS = {"nvidia": 0x10DE, "amd": 0x1002, "intel": 0x8086}
_KERNEL_DRIVERS = {"nvidia": "nvidia", "amd": "amdgpu", "intel": "i915"}


def hop(one: GpuPlace | Nic, other: GpuPlace | Nic) -> Hop:
    """The nearest common ancestor of two devices, by the rule behind `nvidia-smi topo -m`."""
    if one.pci == other.pci:
        return Hop.INTERNAL
    mine, its = one.under.split("/"), other.under.split("/")
    common = len(os.path.commonprefix([mine, its]))
    if common == 0:
        return Hop.NODE if one.numa == other.numa else Hop.SYSTEM
    if common == 1:
        return Hop.HOSTBRIDGE
    # One switch is a bridge upstream and one downstream port for each device; more bridges are several switches.
    return Hop.SINGLE if max(len(mine), len(its)) - common <= 1 else Hop.MULTIPLE


def write_tree(folder: Path, platform: Platform) -> None:
    """Write ``sys`` and ``proc`` below `folder`; nothing is done where they are."""
    if (folder / "sys").exists():
        return
    building = folder / f".sys.{os.getpid()}"
    _write_sys(building, platform)
    (folder / "proc/driver/nvidia-caps").mkdir(parents=True, exist_ok=True)
    if any(platform.model_of(i).mig_profiles for i in range(len(platform.gpus))):
        (folder / "proc/driver/nvidia-caps/mig-minors").write_text(_mig_minors())
    memory = platform.cpu.memory_mib * 1024
    lines = (f"Mem{part}: {memory} kB\n" for part in ("Total", "Free", "Available"))
    (folder / "proc/meminfo").write_text("".join(lines))
    building.rename(folder / "sys")


def cpu_list(cpus: list[int]) -> str:
    """Sorted CPU numbers in the kernel's list form, e.g. ``0-55,112-167``."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in parts)


def _write_sys(root: Path, platform: Platform) -> None:
    for name in ("bus/pci/devices", "class/drm", "class/infiniband", "class/infiniband_verbs", "devices/system/node"):
        (root / name).mkdir(parents=True, exist_ok=True)
    memory = platform.cpu.memory_mib // platform.cpu.numa_nodes * 1024
    for node in range(platform.cpu.numa_nodes):
        distances = (platform.cpu.numa_distance(node, other) for other in range(platform.cpu.numa_nodes))
        _files(
            root / f"devices/system/node/node{node}",
            {
                "cpulist": cpu_list(platform.cpu.numa_cpus(node)),
                "distance": " ".join(str(distance) for distance in distances),
                # libnuma, in slurmd, wants both lines
                "meminfo": f"Node {node} MemTotal: {memory} kB\nNode {node} MemFree: {memory} kB",
            },
        )
    _write_cpus(root / "devices/system/cpu", platform)
    drm = 0
    for index, place in enumerate(platform.gpus):
        model = platform.model_of(index)
        device = _pci_device(
            root,
            platform,
            place,
            {
                "vendor": f"0x{_VENDOR_IDS[model.vendor]:04x}",
                "device": f"0x{model.device_id:04x}",
                "subsystem_vendor": f"0x{model.sub_vendor_id:04x}",
                "subsystem_device": f"0x{model.sub_device_id:04x}",
                "class": f"0x{model.pci_class:06x}",
                "revision": f"0x{model.revision:02x}",
            },
            model.pcie,
            driver=_KERNEL_DRIVERS[model.vendor],
        )
        if model.vendor == "nvidia":
            continue
        card = drm if place.card is None else place.card
        render = 128 + drm if place.minor is None else place.minor
        drm += 1
        for name, minor in ((f"card{card}", card), (f"renderD{render}", render)):
            entry = device / "drm" / name
            _files(entry, {"dev": f"226:{minor}", "uevent": f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}"})
            _link(entry / "device", device)
            _link(root / "class/drm" / name, entry)
    for nic in platform.nics:
        _write_nic(root, platform, nic)


_DATA_COUNTERS = ("port_xmit_data", "port_rcv_data")
_COUNTERS = (
    *_DATA_COUNTERS, "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "port_xmit_wait",
)  # fmt: skip
_HARDWARE_COUNTERS = (  # of mlx5
    "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rnr_nak_retry_err", "out_of_sequence",
    "np_ecn_marked_roce_packets", "rp_cnp_handled",
)  # fmt: skip
_PORT_STATES = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}


def _write_nic(root: Path, platform: Platform, nic: Nic) -> None:
    """An adapter and its virtual functions, as /sys/class/infiniband and infiniband_verbs show them."""
    ethernet = nic.link_layer == "Ethernet"
    identity = {
        "vendor": f"0x{nic.vendor_id:04x}",
        "device": f"0x{nic.device_id:04x}",
        "class": "0x020000" if ethernet else "0x020700",
    }
    physical: Path | None = None
    for function in range(nic.virtual_functions + 1):
        place = nic.model_copy(update={"pci": f"{nic.pci[:-1]}{function}"})
        name = nic.name if function == 0 else f"{nic.name}v{function - 1}"
        device = _pci_device(root, platform, place, identity, nic.pcie, driver="mlx5_core")
        if physical is None:
            physical = device
            _files(device, {"sriov_numvfs": str(nic.virtual_functions)})
        else:
            _link(device / "physfn", physical)
        _write_interface(root, device, name, nic)


def _write_interface(root: Path, device: Path, name: str, nic: Nic) -> None:
    ethernet = nic.link_layer == "Ethernet"
    entry = device / "infiniband" / name
    number = int(re.sub(r"[:.]", "", device.name), 16)
    guid = ":".join(re.findall("....", f"b8cef6{number & 0xFFFFFFFFFF:010x}"))
    up = nic.state == "ACTIVE"
    port = {
        "rate": nic.rate,
        "state": f"{_PORT_STATES[nic.state]}: {nic.state}",
        "phys_state": "5: LinkUp" if up else "3: Disabled",
        "link_layer": nic.link_layer,
        "lid": "0x0" if ethernet or not up else f"0x{number % 0xBFFF + 1:x}",
    }
    identity = {"node_guid": guid, "fw_ver": nic.firmware, "board_id": "MT_0000000838"}
    _files(entry, identity)
    _files(entry / "ports/1", port)
    _files(entry / "ports/1/counters", dict.fromkeys(_COUNTERS if not ethernet else _DATA_COUNTERS, "0"))
    _files(entry / "ports/1/hw_counters", dict.fromkeys(_HARDWARE_COUNTERS, "0"))
    _files(entry / "ports/1/gids", {"0": f"fe80:0000:0000:0000:{guid}"})
    _files(entry / "ports/1/gid_attrs/ndevs", {"0": f"net_{name}"} if ethernet else {})
    _link(entry / "device", device)
    _link(root / "class/infiniband" / name, entry)
    verbs = device / "infiniband_verbs" / f"uverbs{len(list((root / 'class/infiniband_verbs').iterdir()))}"
    _files(verbs, {"ibdev": name})
    _link(root / "class/infiniband_verbs" / verbs.name, verbs)


def _write_cpus(root: Path, platform: Platform) -> None:
    cpu = platform.cpu
    cores = cpu.sockets * cpu.cores_per_socket
    _files(root, {name: f"0-{cpu.count - 1}" for name in ("online", "possible", "present")})
    threads = range(cpu.threads_per_core)
    for number in range(cpu.count):
        core = number % cores
        first = core // cpu.cores_per_socket * cpu.cores_per_socket
        package_cpus = [t * cores + c for t in threads for c in range(first, first + cpu.cores_per_socket)]
        _files(
            root / f"cpu{number}/topology",
            {
                "physical_package_id": str(core // cpu.cores_per_socket),
                "core_id": str(core - first),
                "package_cpus_list": cpu_list(package_cpus),
                "thread_siblings_list": cpu_list([core + t * cores for t in threads]),
            },
        )


def _pci_device(
    root: Path, platform: Platform, place: GpuPlace | Nic, identity: dict[str, str], pcie: Pcie, *, driver: str
) -> Path:
    local = {"numa_node": str(place.numa), "local_cpulist": cpu_list(platform.cpu.numa_cpus(place.numa))}
    speed, width = f"{_SPEEDS[pcie.generation]} GT/s PCIe", str(pcie.width)
    port = {
        "current_link_speed": speed,
        "max_link_speed": speed,
        "current_link_width": width,
        "max_link_width": width,
    }
    path = root / "devices" / place.under.split("/")[0]
    for bridge in place.under.split("/")[1:]:
        path = path / bridge
        if not path.exists():
            _files(path, {"class": "0x060400", **local, **port})
            _link(root / "bus/pci/devices" / bridge, path)
    device = path / place.pci
    _files(device, {**identity, **local, **port})
    _link(root / "bus/pci/devices" / place.pci, device)
    _link(device / "driver", root / "bus/pci/drivers" / driver)
    (root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    return device


def _mig_minors() -> str:
    """/proc/driver/nvidia-caps/mig-minors as the driver prints it: the same on every machine."""
    lines = ["config 1", "monitor 2"]
    minor = 3
    for gpu in range(32):
        for instance in range(15):
            lines.append(f"gpu{gpu}/gi{instance}/access {minor}")
            lines += [f"gpu{gpu}/gi{instance}/ci{compute}/access {minor + 1 + compute}" for compute in range(8)]
            minor += 9
    return "\n".join(lines) + "\n"


def _files(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text + "\n")


def _link(path: Path, target: Path) -> None:
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))
