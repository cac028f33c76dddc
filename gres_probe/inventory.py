"""The one model of a node's GPUs: what vendors report into, and what all else reads.

Plain dataclasses, so that `sluice probe` starts fast; JSON that comes from outside is validated by pydantic. None means
"unknown": the driver at hand does not tell. Memory is in MiB, power in W, temperature in degrees Celsius.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sluice_base.errors import SluiceError

SCHEMA_VERSION = 1


class Vendor(StrEnum):
    """Who makes the GPU."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"


class LinkType(StrEnum):
    """The best path between two GPUs, best first; the words of ``nvidia-smi topo -m`` where it has one."""

    SELF = "X"
    NVLINK = "NV"  # with a width: the number of links
    XGMI = "XGMI"
    XELINK = "XE"
    PCI_SWITCH = "PIX"  # at most one PCIe bridge
    PCI_BRIDGES = "PXB"  # several PCIe bridges, no host bridge
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
    """Error correction: mode and lifetime counts; None where the driver does not tell."""

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
    """How one GPU reaches another; `width` is the number of parallel links, 0 where that has no meaning."""

    type: LinkType
    width: int = 0


@dataclass(slots=True)
class Gpu:
    """One physical GPU as its vendor's library reports it."""

    vendor: Vendor
    index: int  # the vendor library's ordinal on this node
    uuid: str
    model: str  # the vendor's own name
    device_file: str  # what Slurm's File= names, e.g. /dev/nvidia0
    minor: int | None  # minor number of the device file; may differ from the ordinal
    pci_address: str  # domain:bus:device.function in lower case
    memory_total_mib: int
    memory_usable_mib: int  # total less what driver and firmware reserve
    extra_device_files: list[str] = field(default_factory=list)  # e.g. the card node beside a render node
    memory_used_mib: int | None = None
    utilisation_percent: int | None = None
    numa_node: int | None = None
    cores: str = ""  # CPU list near the GPU, e.g. "0-31,64-95"; empty: unknown or all
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
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_shutdown_c: int | None = None
    nics: list[str] = field(default_factory=list)  # RDMA NICs near it, nearest first, e.g. ["mlx5_0"]


@dataclass(slots=True)
class Problem:
    """A GPU or vendor library that could not be read: reported and left out, never guessed."""

    vendor: Vendor
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
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    memory_mib: int | None = None
    probed_at: str = ""  # ISO 8601, UTC
    schema_version: int = SCHEMA_VERSION

    def to_json(self, *, indent: int | None = 2) -> str:
        """The inventory as JSON with its schema version."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> Inventory:
        """Validate and load; `source` names the origin in errors. Raises SluiceError."""
        from pydantic import TypeAdapter, ValidationError

        try:
            document: Any = json.loads(text)
        except ValueError as error:
            raise SluiceError(
                f"{source}: not JSON ({error})", remedy="write it again with: sluice probe --json"
            ) from error
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise SluiceError(
                f"{source}: inventory schema {version!r}, this Sluice reads {SCHEMA_VERSION}",
                remedy="probe the node again with this version of Sluice",
            )
        try:
            inventory: Inventory = TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise SluiceError(
                f"{source}: {place}: {first['msg']}", remedy="probe the node again with: sluice probe --json"
            ) from error
        size = len(inventory.gpus)
        if len(inventory.links) != size or any(len(row) != size for row in inventory.links):
            raise SluiceError(
                f"{source}: links: not a {size} x {size} matrix",
                remedy="probe the node again with: sluice probe --json",
            )
        return inventory
