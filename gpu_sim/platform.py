"""What a machine is made of: platforms and GPU models, read from YAML and checked."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, model_validator

from gpu_sim import layout
from sluice.base.documents import load_document
from sluice.base.errors import UsageError

_FOLDER = Path(__file__).parent
_PLATFORMS = _FOLDER / "platforms"
_MODELS = _FOLDER / "models.yaml"
_REMEDY = "see docs/gpu-sim.md"

PciAddress = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]$")]
PciPath = Annotated[
    str, StringConstraints(pattern=r"^pci[0-9a-f]{4}:[0-9a-f]{2}(/[0-9a-f]{4}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7])*$")
]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Identifier = Annotated[int, Field(ge=0, lt=2**16)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Memory(_Strict):
    """Device memory in MiB, as the vendor's own tool prints it."""

    total_mib: Positive
    reserved_mib: Count  # kept by driver and firmware: usable is less by this
    bar1_mib: Count = 256
    bus_width: Positive
    kind: Literal["hbm", "gddr"]
    context_mib: Count  # what a process's first context takes

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.reserved_mib + self.context_mib >= self.total_mib:
            raise ValueError("reserved_mib and context_mib leave no usable memory")
        return self


class Temperature(_Strict):
    """Degrees Celsius; 0 where the vendor reports none."""

    idle: Count
    max_operating: Count = 0
    slowdown: Count
    shutdown: Count
    max_memory: Count = 0


class Power(_Strict):
    """Watts."""

    idle_w: Positive
    default_w: Positive
    min_w: Positive
    max_w: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_w <= self.default_w <= self.max_w or self.idle_w > self.max_w:
            raise ValueError("power: want min_w <= default_w <= max_w and idle_w <= max_w")
        return self


class Clocks(_Strict):
    """MHz."""

    idle: Count
    graphics_max: Positive
    memory_max: Positive
    video_max: Count = 0


class Pcie(_Strict):
    """The GPU's own PCI Express port."""

    generation: Annotated[int, Field(ge=1, le=7)]
    width: Literal[1, 2, 4, 8, 16, 32]


class MigProfile(_Strict):
    """One line of `nvidia-smi mig -lgip`."""

    name: Annotated[str, StringConstraints(max_length=19)]
    id: Count
    kind: Count  # NVML_GPU_INSTANCE_PROFILE_*
    slices: Annotated[int, Field(ge=1, le=8)]  # of compute
    size: Annotated[int, Field(ge=1, le=8)]  # of memory
    memory_mib: Positive
    multiprocessors: Positive
    instances: Annotated[int, Field(ge=1, le=layout.MAX_INSTANCES)]
    starts: list[Count]  # where it may be placed


class Dies(_Strict):
    """What an AMD GPU's partitions are made of."""

    count: Annotated[int, Field(ge=1, le=layout.MAX_INSTANCES)]  # XCDs
    memory_modes: list[Literal[1, 2, 4]]  # NPS: into how many parts the memory can be split


class Model(_Strict):
    """One GPU product."""

    vendor: Literal["nvidia", "amd", "intel"]
    name: Annotated[str, StringConstraints(max_length=95)]
    architecture: str
    architecture_number: Count = 0  # NVML_DEVICE_ARCH_*
    capability: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")] = "0.0"  # AMD: from the gfx target
    device_id: Identifier
    sub_vendor_id: Identifier
    sub_device_id: Identifier
    revision: Annotated[int, Field(ge=0, le=255)] = 0
    pci_class: Annotated[int, Field(ge=0, lt=2**24)]
    part_number: str = ""
    vbios: str
    cores: Positive
    multiprocessors: Positive
    tiles: Annotated[int, Field(ge=1, le=2)] = 1
    memory: Memory
    ecc: bool  # supported
    ecc_enabled: bool = True  # out of the box
    row_remapping: bool = False
    temperature: Temperature
    power: Power
    fan_percent: Annotated[int, Field(ge=0, le=100)] = 0  # idle; 0: passive, without a fan
    clocks: Clocks
    pcie: Pcie
    mig_profiles: Annotated[list[MigProfile], Field(max_length=layout.MAX_PROFILES)] = []
    dies: Dies | None = None  # AMD's that can be partitioned


class Cpu(_Strict):
    """The host: NUMA nodes are equal shares of the cores; threads are numbered as Linux does on x86."""

    sockets: Positive
    cores_per_socket: Positive
    threads_per_core: Annotated[int, Field(ge=1, le=8)]
    numa_nodes: Annotated[int, Field(ge=1, le=layout.MAX_NUMA)]
    memory_mib: Positive

    @property
    def count(self) -> int:
        """Logical CPUs."""
        return self.sockets * self.cores_per_socket * self.threads_per_core

    def numa_cpus(self, node: int) -> list[int]:
        """The logical CPUs of a NUMA node, in order."""
        cores = self.sockets * self.cores_per_socket
        share = cores // self.numa_nodes
        return [t * cores + c for t in range(self.threads_per_core) for c in range(node * share, (node + 1) * share)]

    def numa_distance(self, one: int, other: int) -> int:
        """As /sys/devices/system/node/nodeN/distance of two-socket machines: 10 own, 12 own socket, 32 (AMD) other."""
        if one == other:
            return 10
        per_socket = max(1, self.numa_nodes // self.sockets)
        return 12 if one // per_socket == other // per_socket else 21

    @model_validator(mode="after")
    def _even(self) -> Self:
        if (self.sockets * self.cores_per_socket) % self.numa_nodes:
            raise ValueError("numa_nodes must divide the cores")
        if self.count > layout.CPU_WORDS * 64:
            raise ValueError(f"at most {layout.CPU_WORDS * 64} logical CPUs")
        return self


class DriverVersion(_Strict):
    """One vendor's driver."""

    version: Annotated[str, StringConstraints(max_length=31)]
    library: Annotated[str, StringConstraints(max_length=31)] = ""
    runtime: Count = 0  # CUDA 12040 for 12.4; HIP 60342131
    generation: Count | None = None  # the branch, where functions are missing as in an older one

    @property
    def branch(self) -> int:
        """`generation`, or the number before the version's first dot."""
        if self.generation is not None:
            return self.generation
        head = self.version.split(".")[0]
        return int(head) if head.isdigit() else 0


class MigLayout(_Strict):
    """Instances of one GPU by profile name, e.g. ``[3g.40gb, 2g.20gb]``; an empty list is MIG mode on without any."""

    instances: Annotated[list[str], Field(max_length=layout.MAX_INSTANCES)]


class GpuPlace(_Strict):
    """One GPU of the machine, in the order in which its vendor's library numbers them."""

    model: str
    pci: PciAddress
    under: PciPath  # host bridge and bridges above it, as in /sys/devices
    numa: Count
    minor: Count | None = None  # NVIDIA: /dev/nvidiaN; else render node; default: in order
    card: Count | None = None
    mig: MigLayout | None = None


class Switch(_Strict):
    """An NVSwitch and how many links of each GPU end there."""

    pci: PciAddress
    links: Positive


class Links(_Strict):
    """Links between GPUs: through switches, between all (mesh), or between given pairs."""

    kind: Literal["nvlink", "xgmi", "xelink"]
    version: Count
    speed_mbit: Positive  # one link, one direction
    width: Positive = 1  # lanes
    gpus: list[Count] | None = None  # indices into `gpus`; default all of the kind's vendor
    switches: list[Switch] = []
    mesh: Annotated[int, Field(ge=0, le=layout.MAX_LINKS)] = 0  # links between each pair
    pairs: list[tuple[int, int, int]] = []  # (gpu, gpu, links)

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if sum((bool(self.switches), bool(self.mesh), bool(self.pairs))) != 1:
            raise ValueError("links: give exactly one of switches, mesh, pairs")
        return self


class Fabric(_Strict):
    """The domain that the NVSwitches of several nodes make of their GPUs."""

    cluster: UUID
    clique: Count = 0


class Nic(_Strict):
    """An RDMA adapter."""

    name: Name
    pci: PciAddress
    under: PciPath
    numa: Count
    device_id: Identifier
    vendor_id: Identifier = 0x15B3
    rate: str = "400 Gb/sec (4X NDR)"
    link_layer: Literal["InfiniBand", "Ethernet"] = "InfiniBand"
    pcie: Pcie = Pcie(generation=5, width=16)
    firmware: str = "28.39.1002"
    state: Literal["ACTIVE", "DOWN", "INIT", "ARMED"] = "ACTIVE"
    virtual_functions: Annotated[int, Field(ge=0, le=7)] = 0  # functions 1 to 7 of its slot


class Platform(_Strict):
    """One machine."""

    name: Name
    description: str
    cpu: Cpu
    drivers: dict[Literal["nvidia", "amd", "intel"], DriverVersion]
    gpus: Annotated[list[GpuPlace], Field(min_length=1, max_length=layout.MAX_GPUS)]
    links: list[Links] = []
    fabric: Fabric | None = None
    nics: list[Nic] = []
    p2p: bool = True  # peer access over PCIe
    models: dict[str, Model] = {}

    def model_of(self, gpu: int) -> Model:
        """The product of one GPU of this machine."""
        return self.models[self.gpus[gpu].model]

    def link_members(self, links: Links) -> list[int]:
        """The GPUs that a set of links joins."""
        vendor = {"nvlink": "nvidia", "xgmi": "amd", "xelink": "intel"}[links.kind]
        if links.gpus is not None:
            return links.gpus
        return [i for i in range(len(self.gpus)) if self.model_of(i).vendor == vendor]

    @model_validator(mode="before")
    @classmethod
    def _with_shipped_models(cls, data: Any) -> Any:
        models = data.get("models", {}) if isinstance(data, dict) else None
        if not isinstance(models, dict):
            return data
        places = data.get("gpus")
        used = (
            {place.get("model") for place in places if isinstance(place, dict)} if isinstance(places, list) else set()
        )
        shipped = {key: model for key, model in _shipped_models().items() if key in used}
        return {**data, "models": {**shipped, **models}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        addresses = [place.pci for place in self.gpus] + [nic.pci for nic in self.nics]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"PCI address {address} is used twice")
        for index, place in enumerate(self.gpus):
            if place.model not in self.models:
                raise ValueError(f"gpus[{index}]: model {place.model!r} is not in models.yaml nor in `models` here")
            model = self.models[place.model]
            if place.numa >= self.cpu.numa_nodes:
                raise ValueError(f"gpus[{index}]: NUMA node {place.numa} of {self.cpu.numa_nodes}")
            if model.vendor not in self.drivers:
                raise ValueError(f"gpus[{index}]: no driver of {model.vendor} under `drivers`")
            if place.mig is not None and not model.mig_profiles:
                raise ValueError(f"gpus[{index}]: {model.name} has no MIG")
        per_gpu = [0] * len(self.gpus)
        for links in self.links:
            members = self.link_members(links)
            named = {*members, *(gpu for one, other, _ in links.pairs for gpu in (one, other))}
            if any(not 0 <= gpu < len(self.gpus) for gpu in named):
                raise ValueError("links: a GPU that is not there")
            for member in members:
                per_gpu[member] += sum(s.links for s in links.switches) + links.mesh * (len(members) - 1)
            for one, other, count in links.pairs:
                if one == other or count < 1:
                    raise ValueError("links: a pair is two GPUs and how many links join them")
                per_gpu[one] += count
                per_gpu[other] += count
        if max(per_gpu) > layout.MAX_LINKS:
            raise ValueError(f"links: {max(per_gpu)} links of one GPU, at most {layout.MAX_LINKS}")
        return self


def platform_names() -> list[str]:
    """The shipped platforms, sorted."""
    return sorted(path.stem for path in _PLATFORMS.glob("*.yaml"))


def load_platform(name: str | Path) -> Platform:
    """A shipped platform by name, or a file of one's own by path (with a slash or ending in .yaml).

    Raises UsageError when there is none of that name or when it is not well-formed.
    """
    text = str(name)
    path = Path(text) if "/" in text or text.endswith(".yaml") else _PLATFORMS / f"{text}.yaml"
    if path.parent == _PLATFORMS and not path.exists():
        raise UsageError(
            f"platform {text!r}: there is none of that name", remedy=f"known: {', '.join(platform_names())}"
        )
    return load_document(path, Platform, remedy=_REMEDY)


class _Catalogue(RootModel[dict[str, Model]]):
    """models.yaml."""


@cache
def _shipped_models() -> dict[str, Model]:
    return load_document(_MODELS, _Catalogue, remedy=_REMEDY).root
