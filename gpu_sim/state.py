"""A node's state: made from a platform, replaced as a whole at every change, read back.

The file is replaced by rename, so that a driver reads either the old or the new state and never half of one; its
modification time always grows, so that a driver notices.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from gpu_sim import layout
from gpu_sim.partitions import number_partitions
from gpu_sim.platform import Model, Platform
from gpu_sim.sysfs import hop, write_tree
from sluice.base.errors import SluiceError, UsageError

MIB = 1024 * 1024
_VENDORS = {"nvidia": layout.Vendor.NVIDIA, "amd": layout.Vendor.AMD, "intel": layout.Vendor.INTEL}
_VENDOR_IDS = {"nvidia": 0x10DE, "amd": 0x1002, "intel": 0x8086}
_LINK_KINDS = {"nvlink": 1, "xgmi": 2, "xelink": 3}
_FIRST_RENDER_NODE = 128


@dataclass(slots=True)
class NodeState:
    """One state file in memory."""

    head: layout.State
    gpus: list[layout.Gpu]

    def find(self, gpu: int | str) -> int:
        """The index of a GPU given by index or UUID. Raises UsageError."""
        for index, record in enumerate(self.gpus):
            if str(gpu) in (str(index), record.uuid.decode()):
                return index
        raise UsageError(
            f"GPU {str(gpu)!r}: node {self.head.node.decode()} has none of that number or UUID",
            remedy=f"give 0 to {len(self.gpus) - 1}, or a UUID",
        )

    def driver(self, gpu: layout.Gpu) -> layout.Driver:
        """The driver that serves a GPU."""
        found: layout.Driver = self.head.drivers[gpu.vendor]
        return found

    def to_bytes(self) -> bytes:
        """The file, with a new checksum."""
        self.head.magic = layout.MAGIC
        self.head.version = layout.VERSION
        self.head.gpu_count = len(self.gpus)
        body = b"".join(bytes(gpu) for gpu in self.gpus)
        self.head.size = ctypes.sizeof(self.head) + len(body)
        self.head.checksum = zlib.crc32((bytes(self.head) + body)[layout.CHECKED_FROM :])
        return bytes(self.head) + body

    @classmethod
    def from_bytes(cls, data: bytes, *, source: Path) -> NodeState:
        """Check and load; raises SluiceError on anything but a whole state of this version."""
        remedy = "write it again: restart the cluster"
        size = ctypes.sizeof(layout.State)
        if len(data) < size or not data.startswith(layout.MAGIC):
            raise SluiceError(f"{source}: not a simulated node's state", remedy=remedy)
        head = layout.State.from_buffer_copy(data)
        if head.version != layout.VERSION:
            raise SluiceError(f"{source}: version {head.version}, this Sluice reads {layout.VERSION}", remedy=remedy)
        each = ctypes.sizeof(layout.Gpu)
        if head.size != len(data) or len(data) != size + head.gpu_count * each or head.gpu_count > layout.MAX_GPUS:
            raise SluiceError(f"{source}: {len(data)} bytes, its head says {head.size}", remedy=remedy)
        if head.checksum != zlib.crc32(data[layout.CHECKED_FROM :]):
            raise SluiceError(f"{source}: checksum does not match", remedy=remedy)
        return cls(head, [layout.Gpu.from_buffer_copy(data, size + i * each) for i in range(head.gpu_count)])


@dataclass(frozen=True, slots=True)
class Holding:
    """What one live process holds on one GPU or MIG instance."""

    pid: int
    gpu: int
    instance: int | None
    memory_mib: int


def write_node_state(folder: Path, platform: Platform, node: str, *, shared: Path | None = None) -> None:
    """Lay out a node's simulated hardware: ``state``, ``processes``, ``sys`` and ``proc`` under `folder`.

    UUIDs, serial numbers and all else follow from platform and node name alone. The trees ``sys`` and ``proc`` are
    the same for every node of a platform: with `shared` they are written once below it and linked to, which makes
    hundreds of nodes cheap. Raises UsageError on a node name that is too long, OSError when it cannot write.
    """
    if len(node.encode()) > 63:
        raise UsageError(f"node {node!r}: name too long", remedy="use at most 63 characters")
    folder.mkdir(parents=True, exist_ok=True)
    if shared is None:
        write_tree(folder, platform)
    else:
        common = shared / platform.name
        write_tree(common, platform)
        for name in ("sys", "proc"):
            with suppress(FileExistsError):
                (folder / name).symlink_to(os.path.relpath(common / name, folder))
    with (folder / "processes").open("wb") as file:  # empty: the drivers' slots make it grow
        os.fchmod(file.fileno(), 0o666)
    (folder / "lock").touch()
    _replace(folder / "state", build_state(platform, node))


def read_state(folder: Path) -> NodeState:
    """The state of a node. Raises SluiceError when there is none or when it is damaged."""
    path = folder / "state"
    try:
        return NodeState.from_bytes(path.read_bytes(), source=path)
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="is the cluster up?") from error


@contextmanager
def changing(folder: Path) -> Iterator[NodeState]:
    """The state for a change: written back as a whole at the end unless an exception leaves the block."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SluiceError(f"{folder}/lock: {error.strerror}", remedy="is the cluster up?") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(folder)
        yield state
        state.head.generation += 1
        _replace(folder / "state", state)
    finally:
        os.close(lock)


def holdings(folder: Path) -> list[Holding]:
    """What live processes hold through the simulated CUDA and HIP; process numbers are those of their own namespace.

    Raises SluiceError when the node has no registry.
    """
    path = folder / "processes"
    size = ctypes.sizeof(layout.Slot)

    def locked(place: int) -> bool:
        """Whether the slot's owner lives: the kernel drops its lock with it."""
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place * size, 1, 0)
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)

    try:
        with path.open("rb") as file:
            data = file.read(layout.PROCESS_SLOTS * size)
            count = len(data) // size
            slots = [layout.Slot.from_buffer_copy(data, place * size) for place in range(count)]
            alive = [bool(slot.pid and slot.bytes) and locked(place) for place, slot in enumerate(slots)]
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="is the cluster up?") from error
    return [
        Holding(slot.pid, slot.gpu, None if slot.instance == layout.NO_INSTANCE else slot.instance, slot.bytes // MIB)
        for slot, lives in zip(slots, alive, strict=True)
        if lives
    ]


def build_state(platform: Platform, node: str) -> NodeState:
    """A node of the platform as it is after a boot, idle."""
    state = NodeState(layout.State(), [])
    head = state.head
    head.node = node.encode()
    head.generation = 1
    head.cpu_count = platform.cpu.count
    head.numa_count = platform.cpu.numa_nodes
    head.major_uvm, head.major_caps, head.major_kfd = free_majors(3)
    for one in range(platform.cpu.numa_nodes):
        _set_cpus(head.numa_cpus[one], platform.cpu.numa_cpus(one))
        for other in range(platform.cpu.numa_nodes):
            head.numa_distance[one][other] = platform.cpu.numa_distance(one, other)
    for vendor, version in platform.drivers.items():
        head.drivers[_VENDORS[vendor]] = layout.Driver(
            version=version.version.encode(),
            library=(version.library or version.version).encode(),
            loaded=1,
            generation=version.branch,
            runtime=version.runtime,
        )
    now = time.time_ns()
    ordinals = {"nvidia": 0, "drm": 0}
    for index, place in enumerate(platform.gpus):
        model = platform.model_of(index)
        gpu = _build_gpu(model, node, place.pci, place.model)
        gpu.numa_node = place.numa
        if platform.fabric is not None and model.vendor == "nvidia":
            gpu.fabric_cluster[:] = list(platform.fabric.cluster.bytes)
            gpu.fabric_clique = platform.fabric.clique
        gpu.energy_since_ns = gpu.active_since_ns = now
        _set_cpus(gpu.cpus, platform.cpu.numa_cpus(place.numa))
        kind = "nvidia" if model.vendor == "nvidia" else "drm"
        first = 0 if kind == "nvidia" else _FIRST_RENDER_NODE
        gpu.minor = first + ordinals[kind] if place.minor is None else place.minor
        gpu.card = ordinals[kind] if place.card is None else place.card
        ordinals[kind] += 1
        for other, peer in enumerate(platform.gpus):
            gpu.hops[other] = hop(place, peer)
            gpu.p2p[other] = platform.p2p and peer.model == place.model and other != index
        state.gpus.append(gpu)
    _build_links(state, platform)
    for index, place in enumerate(platform.gpus):
        if place.mig is not None:
            set_mig_layout(state, index, place.mig.instances)
    number_partitions(state.gpus)
    return state


def set_mig_layout(state: NodeState, index: int, names: list[str]) -> None:
    """Put a GPU into MIG mode with these instances, placed in this order as the driver would.

    Raises UsageError when the GPU has no such profile or no room for all.
    """
    gpu = state.gpus[index]
    profiles = {gpu.profiles[i].name.decode(): i for i in range(gpu.profile_count)}
    if not gpu.mig_supported:
        raise UsageError(f"GPU {index}: {gpu.name.decode()} has no MIG", remedy="name a GPU with MIG")
    if len(names) > layout.MAX_INSTANCES:
        raise UsageError(f"GPU {index}: {len(names)} MIG instances", remedy=f"at most {layout.MAX_INSTANCES}")
    taken: set[int] = set()
    slices = 0
    built = []
    for name in names:
        if name not in profiles:
            raise UsageError(f"GPU {index}: no MIG profile {name!r}", remedy=f"known: {', '.join(profiles)}")
        profile = gpu.profiles[profiles[name]]
        slices += profile.slices
        start = next((s for s in _starts(profile) if not taken & set(range(s, s + profile.size))), None)
        if start is None or slices > 7 or names.count(name) > profile.instances:
            raise UsageError(
                f"GPU {index}: no room for MIG instance {name} in layout {','.join(names)}",
                remedy="ask for fewer or smaller instances",
            )
        taken |= set(range(start, start + profile.size))
        # The driver numbers GPU instances as a tree of halves: 0 the whole, 1-2 halves, 3-6 quarters, 7-14 eighths.
        gpu_instance = 8 // profile.size - 1 + start // profile.size
        # nvidia-caps minors: 1 config, 2 monitor, then for each GPU 15 GPU instances of 1 + 8 files.
        minor = 3 + gpu.minor * 135 + gpu_instance * 9
        seed = _seed(state.head.node.decode(), gpu.uuid.decode(), str(gpu_instance))
        built.append(
            layout.Instance(
                uuid=f"MIG-{UUID(bytes=seed[:16], version=5)}".encode(),
                used=1,
                profile=profiles[name],
                gpu_instance=gpu_instance,
                start=start,
                size=profile.size,
                access_minor=minor,
                compute_minor=minor + 1,
            )
        )
    gpu.mig_enabled = gpu.mig_pending = 1
    for place in range(layout.MAX_INSTANCES):
        gpu.instances[place] = built[place] if place < len(built) else layout.Instance()


def clear_mig(gpu: layout.Gpu) -> None:
    """Leave MIG mode."""
    gpu.mig_enabled = gpu.mig_pending = 0
    for place in range(layout.MAX_INSTANCES):
        gpu.instances[place] = layout.Instance()


def free_majors(count: int) -> list[int]:
    """Character-device majors that no driver of this kernel uses, from the dynamic range downwards."""
    taken = set()
    with suppress(OSError):
        for line in Path("/proc/devices").read_text().split("Block")[0].splitlines():
            word = line.split()[0] if line.split() else ""
            if word.isdigit():
                taken.add(int(word))
    return [major for major in range(511, 383, -1) if major not in taken][:count]


def _starts(profile: layout.Profile) -> list[int]:
    return [bit for bit in range(8) if profile.starts >> bit & 1]


def _build_gpu(model: Model, node: str, pci: str, key: str) -> layout.Gpu:
    seed = _seed(node, pci)
    domain, bus, rest = pci.split(":")
    device, function = rest.split(".")
    major, minor = model.capability.split(".")
    vendor_id = _VENDOR_IDS[model.vendor]
    gpu = layout.Gpu(
        name=model.name.encode(),
        model=key.encode(),
        uuid=_uuid(model, seed, pci).encode(),
        serial=str(1_650_000_000_000 + int.from_bytes(seed[16:20], "big") % 10**9).encode(),
        part_number=model.part_number.encode(),
        vbios=model.vbios.encode(),
        architecture_name=model.architecture.encode(),
        vendor=_VENDORS[model.vendor],
        architecture=model.architecture_number,
        capability_major=int(major),
        capability_minor=int(minor),
        cores=model.cores,
        multiprocessors=model.multiprocessors,
        tiles=model.tiles,
        bus_width=model.memory.bus_width,
        pci=layout.Pci(
            domain=int(domain, 16),
            bus=int(bus, 16),
            device=int(device, 16),
            function=int(function, 16),
            revision=model.revision,
            vendor_id=vendor_id,
            device_id=model.device_id,
            sub_vendor_id=model.sub_vendor_id,
            sub_device_id=model.sub_device_id,
        ),
        memory_total_mib=model.memory.total_mib,
        memory_reserved_mib=model.memory.reserved_mib,
        bar1_mib=model.memory.bar1_mib,
        context_mib=model.memory.context_mib,
        memory_kind=1 if model.memory.kind == "gddr" else 0,
        temperature=model.temperature.idle,
        temperature_memory=model.temperature.idle + 8 if model.temperature.max_memory else 0,
        temperature_slowdown=model.temperature.slowdown,
        temperature_shutdown=model.temperature.shutdown,
        temperature_max_operating=model.temperature.max_operating,
        temperature_max_memory=model.temperature.max_memory,
        power_mw=model.power.idle_w * 1000,
        power_limit_mw=model.power.default_w * 1000,
        power_limit_default_mw=model.power.default_w * 1000,
        power_limit_min_mw=model.power.min_w * 1000,
        power_limit_max_mw=model.power.max_w * 1000,
        fan_percent=model.fan_percent,
        clock_graphics=model.clocks.idle,
        clock_memory=model.clocks.memory_max,
        clock_video=model.clocks.video_max and model.clocks.idle,
        clock_graphics_max=model.clocks.graphics_max,
        clock_memory_max=model.clocks.memory_max,
        clock_video_max=model.clocks.video_max,
        throttle_reasons=1 if model.vendor == "nvidia" else 0,  # idle
        ecc_supported=model.ecc,
        ecc_enabled=model.ecc and model.ecc_enabled,
        ecc_pending=model.ecc and model.ecc_enabled,
        remap_supported=model.row_remapping,
        pcie_generation=model.pcie.generation,
        pcie_generation_max=model.pcie.generation,
        pcie_width=model.pcie.width,
        pcie_width_max=model.pcie.width,
        persistence=model.vendor == "nvidia",
        mig_supported=bool(model.mig_profiles),
        profile_count=len(model.mig_profiles),
    )
    if model.dies is not None:
        gpu.dies, gpu.memory_modes = model.dies.count, sum(model.dies.memory_modes)
        gpu.compute_partition, gpu.memory_partition = layout.Compute.SPX, 1
    for index, profile in enumerate(model.mig_profiles):
        gpu.profiles[index] = layout.Profile(
            name=profile.name.encode(),
            id=profile.id,
            kind=profile.kind,
            slices=profile.slices,
            size=profile.size,
            memory_mib=profile.memory_mib,
            multiprocessors=profile.multiprocessors,
            instances=profile.instances,
            starts=sum(1 << start for start in profile.starts),
        )
    return gpu


def _build_links(state: NodeState, platform: Platform) -> None:
    for links in platform.links:
        members = platform.link_members(links)
        kind = _LINK_KINDS[links.kind]
        settings = {"up": 1, "version": links.version, "width": links.width, "speed_mbit": links.speed_mbit}
        for member in members:
            for switch in links.switches:
                for _ in range(switch.links):
                    pci = layout.Pci(*_pci_numbers(switch.pci), vendor_id=0x10DE)
                    _add_link(state, member, kind, layout.LinkPeer.SWITCH, 0, pci, settings)
        pairs = links.pairs or [(a, b, links.mesh) for i, a in enumerate(members) for b in members[i + 1 :]]
        for one, other, count in pairs if not links.switches else ():
            for _ in range(count):
                places = [state.gpus[gpu].link_count for gpu in (one, other)]
                for place, (gpu, peer) in enumerate(((one, other), (other, one))):
                    _add_link(state, gpu, kind, layout.LinkPeer.GPU, peer, state.gpus[peer].pci, settings)
                    link = state.gpus[gpu].links[state.gpus[gpu].link_count - 1]
                    link.remote_link = places[1 - place]


def _add_link(
    state: NodeState, gpu: int, kind: int, peer: int, peer_gpu: int, pci: layout.Pci, settings: dict[str, int]
) -> None:
    record = state.gpus[gpu]
    record.link_kind = kind
    record.links[record.link_count] = layout.Link(peer=peer, peer_gpu=peer_gpu, peer_pci=pci, **settings)
    record.link_count += 1


def _pci_numbers(address: str) -> tuple[int, int, int, int]:
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function, 16)


def _uuid(model: Model, seed: bytes, pci: str) -> str:
    """In the form of the vendor's own library."""
    text = seed.hex()
    if model.vendor == "nvidia":
        return f"GPU-{UUID(bytes=seed[:16], version=5)}"
    if model.vendor == "amd":  # amd-smi: two bytes of the serial number, device ID, then the rest of the serial
        return f"{text[:2]}ff{model.device_id:04x}-0000-1000-80{text[2:4]}-{text[4:16]}"
    # xpu-smi prints Level Zero's identifier from its last byte to its first: vendor, device, revision, PCI address.
    low = struct.pack("<HHHHBBB", 0x8086, model.device_id, model.revision, *_pci_numbers(pci))
    return str(UUID(bytes=(low + seed[:5])[::-1]))


def _seed(*words: str) -> bytes:
    return hashlib.sha256("/".join(words).encode()).digest()


def _set_cpus(words: ctypes.Array[ctypes.c_uint64], cpus: list[int]) -> None:
    for cpu in cpus:
        words[cpu // 64] |= 1 << (cpu % 64)


def _replace(path: Path, state: NodeState) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".state.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(state.to_bytes())
            file.flush()
            newest = time.time_ns()
            with suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime_ns + 1)
            os.utime(file.fileno(), ns=(newest, newest))
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
