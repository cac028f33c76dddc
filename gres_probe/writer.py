"""From inventories to gres.conf and node lines: the only place that writes GRES.

The result depends only on the inventories and the options, and equal nodes share lines, so that it can be compared,
reviewed and kept under version control. A whole GPU is one device; a GPU that is partitioned gives one device per
partition. A GPU that could not be read is in the inventory's `problems`: it becomes a note and is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from gres_probe.cores import fold_ranges, slurm_cores, usual_numbering
from gres_probe.inventory import Gpu, Inventory, LinkType, Nic, Partition, Vendor
from gres_probe.machine import natural
from gres_probe.nic_groups import SWITCHED, nic_groups, render
from gres_probe.topology import link_domains
from gres_probe.vendors import vendor
from sluice.base.errors import SluiceError
from sluice.base.hostlist import fold
from sluice.base.slurm_version import OLDEST, SlurmVersion, format_slurm_version

GRES_FILE = "gres.sluice.conf"
NODES_FILE = "nodes.sluice.conf"
HEADER = "# Written by `sluice gres write`; changes made here are lost. See sluice-gres(1).\n"

# Slurm before this splits a MultipleFiles device into one per file as soon as GresTypes names shard, and so gives
# out wrong devices (gres_c_s.c, _build_sharing_list).
_MULTIPLE_FILES_BESIDE_SHARDS: SlurmVersion = (23, 2, 7)

# Since this a controller that takes over drains nodes whose shards have no type: it reads a node's Gres as saved, with
# the types that slurmd reports, then as in slurm.conf, and refuses types that have no count there (gres.c,
# _valid_gres_type).
TYPED_SHARDS: SlurmVersion = (23, 11, 0)

_CAPABILITY_PREFIXES: dict[str, str] = {Vendor.NVIDIA: "sm", Vendor.INTEL: "ip"}
LINK_WORDS = {LinkType.NVLINK: "nvlink", LinkType.XGMI: "xgmi", LinkType.XELINK: "xelink"}

# Words of a vendor's model name that do not distinguish two models of GPU for a user: makers and series, form factor,
# memory technology, and the memory size, which is a feature of its own.
_NOISE = re.compile(
    r"nvidia|amd|intel|corporation|tesla|geforce|quadro|radeon|instinct|data|center|gpu|graphics|series|generation|"
    r"sxm\d*|pcie?|oam|hbm\d*e?|gddr\d*x?|\d+[gt]i?b"
)
_PATH = re.compile(r"/[A-Za-z0-9/._:+@-]+")  # what gres.conf holds without quotes, brackets or commas


@dataclass(frozen=True, slots=True)
class Device:
    """What one line of gres.conf may name: a whole GPU or a partition of one."""

    vendor: str
    type: str
    files: tuple[str, ...]
    own_file: str  # a file that no other device of the node has: holds the device alone
    memory_mib: int
    cpus: str
    gpu: int  # index in Inventory.gpus
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class NodeAttributes:
    """Parameters of a node in slurm.conf that follow from the hardware; None where the inventory does not have them."""

    name: str
    gres: str
    features: tuple[str, ...]
    weight: int
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    real_memory_mib: int | None = None

    def parameters(self) -> dict[str, str]:
        """slurm.conf parameters in the order in which they are written, without NodeName."""
        values = {
            "Sockets": self.sockets,
            "CoresPerSocket": self.cores_per_socket,
            "ThreadsPerCore": self.threads_per_core,
            "RealMemory": self.real_memory_mib,
            "Gres": self.gres,
            "Feature": ",".join(self.features),
            "Weight": self.weight,
        }
        return {key: str(value) for key, value in values.items() if value not in (None, "")}


@dataclass(slots=True)
class GresConfiguration:
    """What `generate` made: the text of gres.conf, each node's attributes by name, and notes for people."""

    gres_conf: str
    nodes: dict[str, NodeAttributes]
    gres_lines: dict[str, list[str]]  # of each node, without NodeName=
    notes: list[str] = field(default_factory=list)
    nic_groups: list[str] = field(default_factory=list)

    def nics_conf(self) -> str:
        """Which GPUs and interfaces of each node are near each other."""
        return render(self.nic_groups)

    def nodes_conf(self, extra: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """The NodeName lines of slurm.conf; `extra` adds, replaces or (empty) drops parameters, e.g. Port."""
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, attributes in self.nodes.items():
            merged = attributes.parameters() | dict((extra or {}).get(name, {}))
            merged = {key: value for key, value in merged.items() if value}
            groups.setdefault(tuple(merged.items()), []).append(name)
        lines = (
            " ".join([f"NodeName={fold(names)}", *(f"{key}={_quoted(value)}" for key, value in parameters)])
            for parameters, names in groups.items()
        )
        return HEADER + "".join(f"{line}\n" for line in lines)

    def node_gres_conf(self, name: str) -> str:
        """gres.conf of one node alone, for sites where every node has its own file."""
        return HEADER + "".join(f"NodeName={name} {line}\n" for line in self.gres_lines[name])


def generate(
    inventories: Iterable[Inventory],
    *,
    slurm_version: SlurmVersion = OLDEST,
    shards: bool = True,
    nics: bool = False,
    nic_types: bool = False,
    features: Mapping[str, Sequence[str]] | None = None,
) -> GresConfiguration:
    """gres.conf and the node lines for the nodes of the inventories.

    `slurm_version` is the oldest version that reads the files; `shards` offers each device's usable memory as
    gres/shard, one shard for each MiB; `nics` offers RDMA interfaces as gres/nic, `nic_types` by their link layer;
    `features` are further features of each node, e.g. its classes. Raises SluiceError where an inventory contradicts
    itself or repeats a node.
    """
    if slurm_version < OLDEST:
        raise SluiceError(
            f"Slurm {format_slurm_version(slurm_version)}: too old",
            remedy=f"upgrade to {format_slurm_version(OLDEST)} or later",
        )
    ordered = sorted(inventories, key=lambda inventory: natural(inventory.node))
    for name, count in Counter(inventory.node for inventory in ordered).items():
        if count > 1:
            raise SluiceError(f"node {name!r}: {count} inventories", remedy="keep only the newest one")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", name):
            raise SluiceError(
                f"node {name!r}: not a host name", remedy="probe the node again with: sluice probe --json"
            )

    nodes: dict[str, NodeAttributes] = {}
    gres_lines: dict[str, list[str]] = {}
    notes: list[str] = []
    groups: list[str] = []
    found = {inventory.node: node_devices(inventory) for inventory in ordered}
    typed = slurm_version >= TYPED_SHARDS and all(len(_types(devices)) < 2 for devices in found.values())
    for inventory in ordered:
        devices = found[inventory.node]
        kind = _shard_type(devices) if typed else ""
        for problem in inventory.problems:
            which = "" if problem.index is None else f" {problem.index}"
            notes.append(f"{inventory.node}: {problem.vendor} GPU{which} left out: {problem.what}")
        for gpu in inventory.gpus:
            if gpu.partitioned and not gpu.partitions:
                notes.append(
                    f"{inventory.node}: {gpu.vendor} GPU {gpu.index} left out: partitioned, without an instance"
                )
        interfaces = node_nics(inventory, typed=nic_types) if nics else []
        lines = _gres_lines(inventory, devices, slurm_version, shards, kind, notes)
        lines += _nic_lines(inventory, interfaces, typed=nic_types)
        gres_lines[inventory.node] = lines
        if line := nic_groups(inventory, [device.gpu for device in devices], interfaces):
            groups.append(line)
        more = (features or {}).get(inventory.node, ())
        gres = [*_device_gres(devices, shards, kind), *_nic_gres(interfaces, typed=nic_types)]
        nodes[inventory.node] = _attributes(inventory, devices, gres, more)
    return GresConfiguration(_gres_conf(gres_lines), nodes, gres_lines, notes, groups)


@cache
def type_name(model: str) -> str:
    """A vendor's model name as GRES type: ``NVIDIA H100 80GB HBM3`` is ``h100``, ``AMD Instinct MI300X`` ``mi300x``.

    Lower case letters and digits; makers, series, form factors and memory sizes are dropped, so that users type what
    people call the GPU.
    """
    text = re.sub(r"\((?:r|tm|c)\)", " ", model.lower()).split(" / ")[0]
    words = [word for word in re.split(r"[^a-z0-9]+", text) if word and not _NOISE.fullmatch(word)]
    return "".join(words) or "gpu"


def node_devices(inventory: Inventory) -> list[Device]:
    """The node's devices in the order in which slurmd counts them: equal types together, then the vendor's order."""
    found: list[tuple[Gpu, int, Partition | None, tuple[str, ...]]] = []
    for position, gpu in enumerate(inventory.gpus):
        if gpu.partitioned:
            found += [(gpu, position, part, tuple(part.device_files)) for part in gpu.partitions]
        else:
            found.append((gpu, position, None, (gpu.device_file, *gpu.extra_device_files)))
    users = Counter(file for _, _, _, files in found for file in set(files))
    devices = []
    for gpu, position, partition, files in found:
        unshared = [file for file in files if users[file] == 1]
        if not unshared:
            what = f"GPU {gpu.index}" + (f" partition {partition.index}" if partition else "")
            raise SluiceError(
                f"node {inventory.node!r}: {what}: no device file of its own ({', '.join(files) or 'none'})",
                remedy="probe the node again with: sluice probe --json",
            )
        for file in files:
            if not _PATH.fullmatch(file):
                raise SluiceError(
                    f"node {inventory.node!r}: device file {file!r}: not a path that gres.conf can hold",
                    remedy="probe the node again with: sluice probe --json",
                )
        devices.append(
            Device(
                vendor=gpu.vendor,
                type=_partition_type(gpu, partition) if partition else type_name(gpu.model),
                files=files,
                own_file=unshared[0],
                memory_mib=partition.memory_mib if partition else gpu.memory_usable_mib,
                cpus=gpu.cores,
                gpu=position,
                partition=partition.index if partition else None,
            )
        )
    rank = {name: position for position, name in enumerate(dict.fromkeys(device.type for device in devices))}
    return sorted(devices, key=lambda device: rank[device.type])  # slurmd reads Gres= type by type; the sort is stable


def node_nics(inventory: Inventory, *, typed: bool = False) -> list[Nic]:
    """The RDMA interfaces that jobs can be given, in the order in which slurmd counts them.

    They have a file of their own, and are not the parents of others; with types, equal types are together.
    """
    parents = {nic.parent for nic in inventory.nics if nic.parent}
    found = [nic for nic in inventory.nics if nic.device_file and nic.pci_address not in parents]
    rank = {name: position for position, name in enumerate(dict.fromkeys(map(nic_type, found)))}
    return sorted(found, key=lambda nic: rank[nic_type(nic)]) if typed else found


def nic_type(nic: Nic) -> str:
    """An interface's GRES type, by the link layer of its ports: ``ib``, ``roce``, or ``rdma`` where it is not known."""
    layers = {port.link_layer for port in nic.ports if port.link_layer}
    return {"InfiniBand": "ib", "Ethernet": "roce"}.get(layers.pop(), "rdma") if len(layers) == 1 else "rdma"


def nic_counts(nics: Iterable[Nic]) -> dict[str, int]:
    """How many there are of each type, in order."""
    return dict(Counter(map(nic_type, nics)))


def _nic_gres(nics: Sequence[Nic], *, typed: bool) -> list[str]:
    if typed:
        return [f"nic:{name}:{count}" for name, count in nic_counts(nics).items()]
    return [f"nic:{len(nics)}"] if nics else []


def _nic_lines(inventory: Inventory, nics: Sequence[Nic], *, typed: bool) -> list[str]:
    """Links are 1 between interfaces of common PCIe switches, which share a way to the same GPUs."""
    cores = _cores_of(inventory, [nic.cores for nic in nics])
    first = len(inventory.gpus)
    places = [first + inventory.nics.index(nic) for nic in nics]
    matrix = [
        [
            -1 if nic is other else int(nic.links[place].type in SWITCHED)
            for other, place in zip(nics, places, strict=True)
        ]
        for nic in nics
    ]
    near = any(value > 0 for row in matrix for value in row)
    described = []
    for nic, core_list, row in zip(nics, cores, matrix, strict=True):
        rest = f" Cores={core_list}" if core_list else ""
        rest += f" Links={','.join(map(str, row))}" if near else ""
        described.append((f"Name=nic Type={nic_type(nic)}" if typed else "Name=nic", (nic.device_file,), rest))
    return [f"{head} File={names}{rest}" for head, names, rest, _ in _folded(described)]


def _partition_type(gpu: Gpu, partition: Partition) -> str:
    """``h100_1g.10gb``, as Slurm's own detection names MIG instances."""
    profile = re.sub(r"[^a-z0-9.]+", ".", partition.profile.lower()).strip(".")
    return f"{type_name(gpu.model)}_{profile}" if profile else type_name(gpu.model)


def _gres_lines(
    inventory: Inventory,
    devices: Sequence[Device],
    version: SlurmVersion,
    shards: bool,
    shard_type: str,
    notes: list[str],
) -> list[str]:
    if not devices:
        return []
    several = any(len(device.files) > 1 for device in devices)
    equal = len({device.memory_mib for device in devices}) == 1
    # Slurm finds the shards of a MultipleFiles device only through a line without File, which it divides evenly.
    multiple = several and (not shards or (version >= _MULTIPLE_FILES_BESIDE_SHARDS and equal))
    if several and not multiple:
        open_files = sorted({f for d in devices if d.partition is None for f in d.files if f != d.own_file})
        if open_files:
            notes.append(
                f"{inventory.node}: Slurm does not protect {', '.join(open_files)}: "
                "a device with shards can have only one File here"
            )

    flags = ",".join(dict.fromkeys(vendor(device.vendor).gres_flag for device in devices))
    cores = _cores_of(inventory, [device.cpus for device in devices])
    links = _device_links(inventory, devices)
    described = []
    for device, core_list, link_list in zip(devices, cores, links, strict=True):
        rest = f" Cores={core_list}" if core_list else ""
        rest += f" Links={link_list}" if link_list else ""
        files = device.files if multiple else (device.own_file,)
        described.append((f"Name=gpu Type={device.type}", files, f"{rest} Flags={flags}"))

    lines = ["AutoDetect=off"]  # else a site-wide AutoDetect would check these lines against fewer facts than they hold
    for head, names, rest, _ in _folded(described):
        lines.append(f"{head} {'MultipleFiles' if ',' in names else 'File'}={names}{rest}")
    shard = f"Name=shard Type={shard_type}" if shard_type else "Name=shard"
    if shards and multiple:
        lines.append(f"{shard} Count={sum(device.memory_mib for device in devices)}")
    elif shards:
        memories = [(str(device.memory_mib), (device.own_file,), "") for device in devices]
        for memory, names, _, count in _folded(memories):  # slurmd divides Count by the files
            lines.append(f"{shard} Count={int(memory) * count} File={names}")
    return lines


def _device_gres(devices: Sequence[Device], shards: bool, shard_type: str) -> list[str]:
    """The devices in a node's Gres: those of each type, then their shards."""
    gres = [f"gpu:{name}:{count}" for name, count in Counter(device.type for device in devices).items()]
    if shards and devices:
        memory = sum(device.memory_mib for device in devices)
        gres.append(f"shard:{shard_type}:{memory}" if shard_type else f"shard:{memory}")
    return gres


def _types(devices: Sequence[Device]) -> set[str]:
    return {device.type for device in devices}


def _shard_type(devices: Sequence[Device]) -> str:
    """The type that shards of a node of one type have in slurm.conf and in gres.conf; empty for none.

    All nodes have one, or none has: of a job on nodes with and without, Slurm counts what it has on the latter alone
    (gres_stepmgr.c, _set_type_tres_cnt). And shards of several types of a node have none: 24.11 would give a job with
    parts of several of them other GPUs in its prolog than in its cgroup.
    """
    has_shards = any(device.memory_mib for device in devices)  # a type without any is not a type for slurmctld
    return _types(devices).pop() if has_shards else ""


def _folded(described: Sequence[tuple[str, tuple[str, ...], str]]) -> list[tuple[str, str, str, int]]:
    """Neighbours that differ in their only file's last number alone share a line: ``/dev/nvidia[0-3]``.

    Returns (head, files as written, rest, number of devices).
    """
    lines: list[tuple[str, str, str, int]] = []
    stem, low, high = "", 0, -1  # the numbered files of the last line
    for head, files, rest in described:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*)", files[0]) if len(files) == 1 else None
        number = int(match[2]) if match else -1
        if match and lines and (lines[-1][0], lines[-1][2], stem, high + 1) == (head, rest, match[1], number):
            high = number
            lines[-1] = (head, f"{stem}[{low}-{high}]", rest, high - low + 1)
        else:
            stem, low, high = (match[1], number, number) if match else ("", 0, -1)
            lines.append((head, ",".join(files), rest, 1))
    return lines


def _cores_of(inventory: Inventory, cpus: Sequence[str]) -> list[str]:
    """Cores= of each device by the CPUs near it; empty for all where nothing is known or all are near every core."""
    total = (inventory.sockets or 0) * (inventory.cores_per_socket or 0)
    if not total:
        return [""] * len(cpus)
    numbering = inventory.cpu_cores or usual_numbering(total, inventory.threads_per_core or 1)
    everywhere = list(range(total))
    near = [[c for c in slurm_cores(one, numbering) if c < total] or everywhere for one in cpus]
    if all(cores == everywhere for cores in near):
        return [""] * len(cpus)
    return [fold_ranges(cores) for cores in near]  # slurmctld wants Cores on all lines or on none


def _device_links(inventory: Inventory, devices: Sequence[Device]) -> list[str]:
    """Links= of each device: number of links to every other one, -1 for itself; empty for all where there are none."""

    def width(one: Device, other: Device) -> int:
        if one is other:
            return -1
        if one.partition is not None or other.partition is not None:
            return 0  # a partition reaches no other device
        link = inventory.links[one.gpu][other.gpu]
        return max(link.width, 1) if link.type in LINK_WORDS else 0

    matrix = [[width(one, other) for other in devices] for one in devices]
    if not any(value > 0 for row in matrix for value in row):
        return [""] * len(devices)
    return [",".join(map(str, row)) for row in matrix]


def _attributes(
    inventory: Inventory, devices: Sequence[Device], gres: Sequence[str], features: Sequence[str]
) -> NodeAttributes:
    memory = inventory.memory_mib
    if memory is not None and memory >= 65536:
        memory -= memory % 1024  # a new kernel that keeps some MiB more must not drain the node
    return NodeAttributes(
        name=inventory.node,
        gres=",".join(gres),
        features=tuple(dict.fromkeys([*_features(inventory, devices), *features])),
        weight=1 + sum(device.memory_mib for device in devices) // 1024,
        sockets=inventory.sockets,
        cores_per_socket=inventory.cores_per_socket,
        threads_per_core=inventory.threads_per_core,
        real_memory_mib=memory,
    )


def _features(inventory: Inventory, devices: Sequence[Device]) -> tuple[str, ...]:
    """Words for ``--constraint``: vendor, type, memory, capability and link domain of the node's devices."""
    words: dict[str, None] = {}  # ordered set
    for device in devices:
        gpu = inventory.gpus[device.gpu]
        total = device.memory_mib if device.partition is not None else gpu.memory_total_mib
        words[device.vendor] = None
        words[device.type] = None
        words[f"gpumem{-(-total // 1024)}g"] = None
        capability = re.sub(r"[^a-z0-9.]", "", gpu.capability.lower())
        if capability:
            words[_CAPABILITY_PREFIXES.get(device.vendor, "") + capability.replace(".", "")] = None
    whole = {device.gpu for device in devices if device.partition is None}
    for domain in link_domains(inventory):
        members = [position for position in domain if position in whole]
        if len(members) > 1:
            row = inventory.links[members[0]]
            kind = next((LINK_WORDS[row[other].type] for other in domain if row[other].type in LINK_WORDS), "link")
            words[f"{kind}{len(members)}"] = None
    return tuple(words)


def _gres_conf(gres_lines: Mapping[str, Sequence[str]]) -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, lines in gres_lines.items():
        if lines:
            groups.setdefault(tuple(lines), []).append(name)
    text = HEADER
    for group, names in groups.items():
        hosts = fold(names)
        text += "\n" + "".join(f"NodeName={hosts} {line}\n" for line in group)
    return text


def _quoted(value: str) -> str:
    if '"' in value or "\n" in value:
        raise SluiceError(f"parameter value {value!r}: slurm.conf cannot hold it")
    return f'"{value}"' if re.search(r"[\s#]", value) else value
