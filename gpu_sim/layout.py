"""The binary layout of a node's state and process files: the one definition, for Python and (generated) for C.

Run as a program with standard input closed, it prints the C header: ``python layout.py > layout.h``. Standard library
only, because the build runs it before anything of the project is installed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_uint8, c_uint16, c_uint32, c_uint64
from enum import IntEnum
from typing import Any

MAGIC = b"SLUICSIM"
VERSION = 4
MAX_GPUS = 16
MAX_LINKS = 18
MAX_INSTANCES = 8
MAX_PROFILES = 12
MAX_PROCESSES = 16
MAX_EVENTS = 8
MAX_NUMA = 8
CPU_WORDS = 16  # 1,024 CPUs
PROCESS_SLOTS = 4096
NO_INSTANCE = 0xFF
SPEED_CURVE = ((0, 0), (400, 761), (600, 936), (1000, 1000))
"""Speed under a power limit by the limit's share of what the GPU would draw, both in thousandths; linear in between.

Measured means of training language models on V100s at 100, 150 and 250 of 250 W (31.4 and 6.8 % longer): J. McDonald et
al., "Great Power, Great Responsibility", Findings of NAACL 2022, arXiv:2205.09646. What is below is assumed.
"""


class Vendor(IntEnum):
    """Whose GPU it is; also the index into `State.drivers`."""

    NVIDIA = 0
    AMD = 1
    INTEL = 2


class PowerLimits(IntEnum):
    """What a driver does about the limits of its GPUs' power."""

    ALLOWED = 0
    REFUSED = 1  # setters fail
    UNSUPPORTED = 2


class LinkPeer(IntEnum):
    """What a link leads to."""

    NONE = 0
    GPU = 1
    SWITCH = 2


class ComputeMode(IntEnum):
    """Who may open a GPU: CUDA's CU_COMPUTEMODE_*."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class CopyKind(IntEnum):
    """Between which memories a copy is: the index into `Gpu.copy_mbps`, and the bit in `Gpu.copy_wrong`."""

    HOST = 0
    LOCAL = 1  # within one GPU
    PEER = 2


class Compute(IntEnum):
    """How an AMD GPU's dies are grouped into devices; the numbers are AMD SMI's."""

    SPX = 1
    DPX = 2
    TPX = 3
    QPX = 4
    CPX = 5


class Hop(IntEnum):
    """The nearest common ancestor of two devices on PCIe; the numbers are NVML's topology levels."""

    INTERNAL = 0
    SINGLE = 10
    MULTIPLE = 20
    HOSTBRIDGE = 30
    NODE = 40
    SYSTEM = 50


class Pci(ctypes.Structure):
    """Where a device sits, and what it says it is."""

    _fields_ = (
        ("domain", c_uint32),
        ("bus", c_uint8),
        ("device", c_uint8),
        ("function", c_uint8),
        ("revision", c_uint8),
        ("vendor_id", c_uint16),
        ("device_id", c_uint16),
        ("sub_vendor_id", c_uint16),
        ("sub_device_id", c_uint16),
    )


class Driver(ctypes.Structure):
    """One vendor's driver on the node, and how it misbehaves."""

    _fields_ = (
        ("version", c_char * 32),
        ("library", c_char * 32),  # version of the management library
        ("loaded", c_uint32),
        ("generation", c_uint32),  # major branch, e.g. 550; decides which functions an old driver lacks
        ("runtime", c_uint32),  # CUDA 12040, HIP 60342131
        ("delay_ms", c_uint32),  # added to every call
        ("hang", c_uint32),  # calls do not return while set
        ("power_limits", c_uint32),  # PowerLimits
    )


class Link(ctypes.Structure):
    """One NVLink, xGMI or Xe Link of a GPU."""

    _fields_ = (
        ("peer", c_uint8),  # LinkPeer
        ("peer_gpu", c_uint8),  # index into State's GPUs
        ("up", c_uint8),
        ("version", c_uint8),
        ("width", c_uint16),  # lanes
        ("remote_link", c_uint16),
        ("speed_mbit", c_uint32),  # per direction
        ("replay_errors", c_uint32),
        ("recovery_errors", c_uint32),
        ("crc_errors", c_uint32),
        ("tx_kib", c_uint64),  # since boot
        ("rx_kib", c_uint64),
        ("peer_pci", Pci),
    )


class Profile(ctypes.Structure):
    """A MIG profile that the GPU offers; of an AMD GPU in partitions, what each of them is."""

    _fields_ = (
        ("name", c_char * 20),
        ("id", c_uint32),  # the driver's profile ID, as in `nvidia-smi mig -lgip`
        ("kind", c_uint32),  # NVML_GPU_INSTANCE_PROFILE_*
        ("slices", c_uint16),  # of compute
        ("size", c_uint16),  # of memory, in eighths
        ("starts", c_uint32),  # bit mask of the eighths where it may begin
        ("memory_mib", c_uint32),
        ("multiprocessors", c_uint32),
        ("instances", c_uint32),
    )


class Instance(ctypes.Structure):
    """A MIG instance: one GPU instance with one compute instance. Or an AMD partition."""

    _fields_ = (
        ("uuid", c_char * 48),
        ("used", c_uint8),
        ("profile", c_uint8),  # index into Gpu.profiles
        ("gpu_instance", c_uint8),
        ("compute_instance", c_uint8),
        ("start", c_uint8),
        ("size", c_uint8),  # memory slices
        ("bare", c_uint16),  # 1: the GPU instance has no compute instance yet
        ("memory_used_mib", c_uint32),
        ("access_minor", c_uint32),  # of the GPU instance's capability file; AMD: of the partition's render node
        ("compute_minor", c_uint32),  # AMD: of its card
        ("reserved", c_uint32),
    )


class Process(ctypes.Structure):
    """A made-up process on a GPU."""

    _fields_ = (
        ("pid", c_uint32),
        ("graphics", c_uint8),
        ("instance", c_uint8),  # NO_INSTANCE: the whole GPU
        ("pad", c_uint16),
        ("memory_mib", c_uint32),
        ("reserved", c_uint32),
        ("name", c_char * 32),
    )


class Event(ctypes.Structure):
    """An XID as in the kernel log; `sequence` counts from 1 within the GPU."""

    _fields_ = (("sequence", c_uint64), ("xid", c_uint64))


class Gpu(ctypes.Structure):
    """One physical GPU: what it is, and how it is now. Memory in MiB, power in mW, clocks in MHz, temperature in C."""

    _fields_ = (
        ("name", c_char * 96),
        ("model", c_char * 40),  # key in models.yaml
        ("uuid", c_char * 48),
        ("serial", c_char * 24),
        ("part_number", c_char * 32),
        ("vbios", c_char * 32),
        ("architecture_name", c_char * 24),  # gfx942, Ponte Vecchio, Hopper
        ("vendor", c_uint32),
        ("minor", c_uint32),  # of /dev/nvidiaN; AMD and Intel: of /dev/dri/renderD
        ("card", c_uint32),  # minor of /dev/dri/card
        ("architecture", c_uint32),  # NVML_DEVICE_ARCH_*
        ("capability_major", c_uint32),
        ("capability_minor", c_uint32),
        ("cores", c_uint32),  # CUDA cores, stream processors, vector engines
        ("multiprocessors", c_uint32),
        ("tiles", c_uint32),  # Intel subdevices
        ("bus_width", c_uint32),
        ("numa_node", c_int32),
        ("pci", Pci),
        ("cpus", c_uint64 * CPU_WORDS),
        ("hops", c_uint8 * MAX_GPUS),  # Hop to each GPU of the node
        ("p2p", c_uint8 * MAX_GPUS),  # 1: PCIe peer access possible
        # memory
        ("memory_total_mib", c_uint32),
        ("memory_reserved_mib", c_uint32),
        ("memory_used_mib", c_uint32),  # in addition to what processes hold
        ("bar1_mib", c_uint32),
        ("context_mib", c_uint32),  # what the driver takes for a process's first context
        ("memory_kind", c_uint32),  # zes_mem_type_t
        # temperature
        ("temperature", c_int32),
        ("temperature_memory", c_int32),
        ("temperature_slowdown", c_int32),
        ("temperature_shutdown", c_int32),
        ("temperature_max_operating", c_int32),
        ("temperature_max_memory", c_int32),
        # power
        ("power_mw", c_uint32),  # that it would draw without a limit
        ("power_limit_mw", c_uint32),
        ("power_limit_default_mw", c_uint32),
        ("power_limit_min_mw", c_uint32),
        ("power_limit_max_mw", c_uint32),
        ("fan_percent", c_uint32),
        ("energy_mj", c_uint64),  # up to energy_since_ns; after it, power goes on
        ("energy_since_ns", c_uint64),  # CLOCK_REALTIME
        # activity
        ("utilisation", c_uint32),
        ("utilisation_memory", c_uint32),
        ("utilisation_encoder", c_uint32),
        ("utilisation_decoder", c_uint32),
        ("active_us", c_uint64),  # time at work up to active_since_ns; after it, utilisation goes on
        ("active_memory_us", c_uint64),  # the same of the memory's bandwidth
        ("active_since_ns", c_uint64),  # CLOCK_REALTIME
        ("clock_graphics", c_uint32),
        ("clock_memory", c_uint32),
        ("clock_video", c_uint32),
        ("clock_graphics_max", c_uint32),
        ("clock_memory_max", c_uint32),
        ("clock_video_max", c_uint32),
        ("throttle_reasons", c_uint64),  # NVML's bits
        ("performance_state", c_uint32),
        # health
        ("ecc_supported", c_uint32),
        ("ecc_enabled", c_uint32),
        ("ecc_pending", c_uint32),
        ("lost", c_uint32),
        ("clock_locked", c_uint32),  # MHz; 0: clocks are not locked
        ("ecc_corrected", c_uint64),  # since boot
        ("ecc_uncorrected", c_uint64),
        ("ecc_corrected_total", c_uint64),  # over the GPU's life
        ("ecc_uncorrected_total", c_uint64),
        ("remapped_correctable", c_uint32),
        ("remapped_uncorrectable", c_uint32),
        ("remap_pending", c_uint32),
        ("remap_failed", c_uint32),
        ("retired_single", c_uint32),
        ("retired_double", c_uint32),
        ("retired_pending", c_uint32),
        ("remap_supported", c_uint32),
        # PCIe
        ("pcie_generation", c_uint32),
        ("pcie_generation_max", c_uint32),
        ("pcie_width", c_uint32),
        ("pcie_width_max", c_uint32),
        ("pcie_replays", c_uint32),
        ("pcie_tx_kb", c_uint32),
        ("pcie_rx_kb", c_uint32),
        # copies by programs
        ("copy_mbps", c_uint32 * len(CopyKind)),  # MB/s; 0: as fast as this machine copies
        ("copy_wrong", c_uint32),  # kinds that spoil a bit of what is copied
        # modes
        ("compute_mode", c_uint32),
        ("persistence", c_uint32),
        ("mig_supported", c_uint32),
        ("mig_enabled", c_uint32),
        ("mig_pending", c_uint32),
        # AMD partitions: equal ones of whole dies (XCD), which share the parts of the memory (NPS) evenly
        ("dies", c_uint32),  # 0: it cannot be partitioned
        ("compute_partition", c_uint32),  # Compute
        ("memory_partition", c_uint32),  # parts of the memory: 1, 2 or 4
        ("memory_requested", c_uint32),  # with the driver's next start; 0: as it is
        ("memory_modes", c_uint32),  # parts that it can have, as a sum
        ("first_render", c_uint32),  # minor of the second partition's render node; the others follow
        ("first_card", c_uint32),
        ("fabric_cluster", c_uint8 * 16),  # UUID of the domain of links between nodes; zeros: they end in the node
        ("fabric_clique", c_uint32),
        ("link_kind", c_uint32),  # 0 none, 1 NVLink, 2 xGMI, 3 Xe Link
        ("link_count", c_uint32),
        ("process_count", c_uint32),
        ("profile_count", c_uint32),
        ("links", Link * MAX_LINKS),
        ("profiles", Profile * MAX_PROFILES),
        ("instances", Instance * MAX_INSTANCES),
        ("processes", Process * MAX_PROCESSES),
        ("events", Event * MAX_EVENTS),
    )


class State(ctypes.Structure):
    """The head of a state file; `gpu_count` Gpu records follow it. The checksum covers all after it (CRC-32)."""

    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),  # of the whole file
        ("checksum", c_uint32),
        ("gpu_count", c_uint32),
        ("generation", c_uint64),  # grows with every change
        ("node", c_char * 64),
        ("major_uvm", c_uint32),
        ("major_caps", c_uint32),
        ("major_kfd", c_uint32),
        ("cpu_count", c_uint32),
        ("numa_count", c_uint32),
        ("reserved", c_uint32),
        ("drivers", Driver * len(Vendor)),
        ("numa_cpus", (c_uint64 * CPU_WORDS) * MAX_NUMA),
        ("numa_distance", (c_uint8 * MAX_NUMA) * MAX_NUMA),
    )


class Slot(ctypes.Structure):
    """What one process holds on one GPU or MIG instance; a free slot has pid 0.

    It counts while an open file description holds a lock on its first byte, which the kernel drops with the process.
    """

    _fields_ = (
        ("pid", c_uint32),  # in its own PID namespace
        ("gpu", c_uint16),
        ("instance", c_uint16),
        ("start", c_uint64),  # field 22 of /proc/PID/stat: distinguishes a process from a later one of the same number
        ("bytes", c_uint64),
        ("space", c_uint64),  # inode of its PID namespace
        ("load", c_uint32),  # share of the GPU's time that it takes now, in thousandths
        ("load_before", c_uint32),
        ("load_since_ns", c_uint64),  # CLOCK_REALTIME
        ("before_since_ns", c_uint64),
        ("busy_ns", c_uint64),  # GPU time taken up to load_since_ns
        ("server", c_uint32),  # the MPS daemon whose client the process is; 0: none
        ("reserved", c_uint32),
    )


CHECKED_FROM = State.gpu_count.offset  # what the checksum covers begins here

_STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    Pci,
    Driver,
    Link,
    Profile,
    Instance,
    Process,
    Event,
    Gpu,
    State,
    Slot,
)
_C_NAMES: dict[Any, str] = {
    c_char: "char",
    c_uint8: "uint8_t",
    c_uint16: "uint16_t",
    c_uint32: "uint32_t",
    c_uint64: "uint64_t",
    c_int32: "int32_t",
    **{structure: f"struct sim_{structure.__name__.lower()}" for structure in _STRUCTURES},
}
_CONSTANTS = (
    "VERSION",
    "MAX_GPUS",
    "MAX_LINKS",
    "MAX_INSTANCES",
    "MAX_PROFILES",
    "MAX_PROCESSES",
    "MAX_EVENTS",
    "MAX_NUMA",
    "CPU_WORDS",
    "PROCESS_SLOTS",
    "NO_INSTANCE",
    "CHECKED_FROM",
)


def _declare(name: str, kind: Any) -> str:
    dimensions = ""
    while hasattr(kind, "_length_"):
        dimensions += f"[{kind._length_}]"
        kind = kind._type_
    return f"    {_C_NAMES[kind]} {name}{dimensions};"


def c_header() -> str:
    """The layout as a C header."""
    lines = ["/* Generated by layout.py: change that file. */", "#ifndef SIM_LAYOUT_H", "#define SIM_LAYOUT_H"]
    lines += ["#include <stddef.h>", "#include <stdint.h>", "", f'#define SIM_MAGIC "{MAGIC.decode()}"']
    lines += [f"#define SIM_{name} {globals()[name]}" for name in _CONSTANTS]
    for enum in (Vendor, PowerLimits, LinkPeer, ComputeMode, CopyKind, Compute, Hop):
        words = ", ".join(f"SIM_{enum.__name__.upper()}_{member.name} = {member.value}" for member in enum)
        lines.append(f"enum sim_{enum.__name__.lower()} {{ {words} }};")
    lines.append(f"#define SIM_VENDORS {len(Vendor)}")
    points = ", ".join(f"{{{share}, {speed}}}" for share, speed in SPEED_CURVE)
    lines += ["struct sim_curve { uint32_t share, speed; };", f"#define SIM_SPEED_CURVE {{ {points} }}"]
    for structure in _STRUCTURES:
        name = _C_NAMES[structure]
        lines += ["", f"{name} {{", *(_declare(str(field[0]), field[1]) for field in structure._fields_), "};"]
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "layout of {name}");')
        last = str(structure._fields_[-1][0])
        lines.append(
            f'_Static_assert(offsetof({name}, {last}) == {getattr(structure, last).offset}, "layout of {name}");'
        )
    lines += ["", "#endif", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(c_header(), end="")
