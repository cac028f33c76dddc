"""Puts GPUs into classes, by the strategies of the policy file, and names them for ``sbatch --constraint``.

Each strategy gives every GPU one word; a GPU's class is its words joined. Equal GPUs are classified once, so that time
grows with the number of GPUs only by a lookup each.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gres_probe.expressions import Value, compile_condition
from gres_probe.inventory import Inventory
from gres_probe.topology import link_domains
from gres_probe.writer import LINK_WORDS, Device, node_devices
from policy.grouping import (
    ByCompatibility,
    ByExpression,
    ByLinkDomain,
    ByMemory,
    ByModel,
    ByPerformance,
    ByVendor,
    Grouping,
)
from sluice.base.errors import SluiceError
from sluice.base.hostlist import fold

CLASSES_FILE = "classes.sluice.conf"
_HEADER = "# Written by `sluice group`; changes made here are lost. See sluice-group(1).\n"
Fields = Mapping[str, Value]

# The fields of a GPU (or a partition of one) that strategies and expressions can use.
FIELDS = (
    "vendor", "model", "type", "memory_mib", "memory_gib", "usable_mib", "capability", "sm", "driver", "driver_major",
    "link", "link_size", "numa_node", "nics", "partition", "power_limit_w", "health", "performance",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuRef:
    """One GPU or partition: the node, its place in the inventory, its UUID."""

    node: str
    index: int
    uuid: str


@dataclass(slots=True)
class GpuClass:
    """One class: its name, what its members have in common, and its members."""

    name: str
    feature: str
    values: tuple[str, ...]  # the word of each strategy
    gpus: list[GpuRef] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        """The nodes that have one of its GPUs, in order."""
        return list(dict.fromkeys(gpu.node for gpu in self.gpus))


@dataclass(slots=True)
class Classes:
    """All classes by name, in order of name."""

    classes: dict[str, GpuClass]

    def document(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            {
                "name": one.name,
                "feature": one.feature,
                "nodes": one.nodes,
                "gpus": [{"node": gpu.node, "index": gpu.index, "uuid": gpu.uuid} for gpu in one.gpus],
            }
            for one in self.classes.values()
        ]

    def features(self) -> dict[str, tuple[str, ...]]:
        """Each node's features."""
        of_node: dict[str, dict[str, None]] = {}
        for one in self.classes.values():
            for node in one.nodes:
                of_node.setdefault(node, {})[one.feature] = None
        return {node: tuple(features) for node, features in of_node.items()}

    def node_sets(self) -> str:
        """NodeSet lines for slurm.conf: partitions may name the sets instead of nodes."""
        lines = (f"NodeSet={one.feature} Nodes={fold(one.nodes)}\n" for one in self.classes.values() if one.gpus)
        return _HEADER + "".join(lines)


@dataclass(frozen=True, slots=True)
class _Member:
    """A GPU and its fields; equal GPUs share the fields object."""

    ref: GpuRef
    fields: Fields


def group(
    inventories: Iterable[Inventory], grouping: Grouping, *, measured: Mapping[str, float] | None = None
) -> Classes:
    """Classes of all GPUs and partitions of the inventories.

    `measured` is performance by UUID; where it has none, the policy's declaration for the type counts. Raises
    SluiceError for an expression that is not allowed, or an inventory that contradicts itself.
    """
    members = list(_members(inventories, grouping, measured or {}))
    namers = [_namer(strategy, members, place) for place, strategy in enumerate(grouping.strategies)]
    words: dict[int, tuple[str, ...]] = {}  # by identity of the shared fields
    classes: dict[str, GpuClass] = {}
    for member in members:
        key = id(member.fields)
        if key not in words:
            words[key] = tuple(namer(member.fields) for namer in namers)
        name = "-".join(words[key])
        if name not in classes:
            classes[name] = GpuClass(name, grouping.prefix + name, words[key])
        classes[name].gpus.append(member.ref)
    return Classes(dict(sorted(classes.items())))


def _members(inventories: Iterable[Inventory], grouping: Grouping, measured: Mapping[str, float]) -> Iterable[_Member]:
    shared: dict[tuple[Value, ...], Fields] = {}
    for inventory in inventories:
        links = _links(inventory)
        for device in node_devices(inventory):
            gpu = inventory.gpus[device.gpu]
            uuid = gpu.uuid if device.partition is None else _partition_uuid(inventory, device)
            performance = measured.get(uuid, grouping.performance.get(device.type))
            values = _fields(inventory, device, links[device.gpu], performance)
            key = tuple(values.values())
            yield _Member(GpuRef(inventory.node, gpu.index, uuid), shared.setdefault(key, values))


def _partition_uuid(inventory: Inventory, device: Device) -> str:
    return next(p.uuid for p in inventory.gpus[device.gpu].partitions if p.index == device.partition)


def _fields(inventory: Inventory, device: Device, link: tuple[str, int], performance: float | None) -> dict[str, Value]:
    gpu = inventory.gpus[device.gpu]
    whole = device.partition is None
    memory = gpu.memory_total_mib if whole else device.memory_mib
    return {
        "vendor": gpu.vendor,
        "model": gpu.model,
        "type": device.type,
        "memory_mib": memory,
        "memory_gib": -(-memory // 1024),
        "usable_mib": device.memory_mib,
        "capability": gpu.capability,
        "sm": _number(gpu.capability) if gpu.vendor == "nvidia" else None,
        "driver": gpu.driver_version,
        "driver_major": _major(gpu.driver_version),
        "link": link[0] if whole else "",
        "link_size": link[1] if whole else 1,
        "numa_node": gpu.numa_node,
        "nics": len(gpu.nics),
        "partition": not whole,
        "power_limit_w": gpu.power_limit_w,
        "health": str(gpu.health),
        "performance": performance,
    }


@cache
def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,4}\.\d{1,4}", text, re.ASCII) else None


@cache
def _major(version: str) -> int | None:
    match = re.match(r"\d{1,9}", version, re.ASCII)
    return int(match[0]) if match else None


def _links(inventory: Inventory) -> list[tuple[str, int]]:
    """For each GPU the kind of its link domain and its size; ("", 1) for a GPU without links."""
    result = [("", 1)] * len(inventory.gpus)
    for domain in link_domains(inventory):
        whole = [place for place in domain if not inventory.gpus[place].partitioned]  # partitions use no links
        for place in whole if len(whole) > 1 else ():
            row = inventory.links[place]
            kind = next((LINK_WORDS[row[other].type] for other in domain if row[other].type in LINK_WORDS), "link")
            result[place] = (kind, len(whole))
    return result


def _namer(strategy: object, members: Sequence[_Member], place: int) -> Callable[[Fields], str]:
    match strategy:
        case ByModel():
            return lambda values: str(values["type"])
        case ByVendor():
            return lambda values: str(values["vendor"])
        case ByMemory(step_mib=step):
            return lambda values: _memory_word(-(-_integer(values["memory_mib"]) // step) * step)
        case ByCompatibility(driver=driver):
            return lambda values: _compatibility(values, driver)
        case ByLinkDomain():
            return lambda values: f"{values['link']}{values['link_size']}" if values["link"] else "nolink"
        case ByPerformance(threshold=threshold):
            return _performance_namer(threshold, members)
        case ByExpression(classes=classes, otherwise=otherwise):
            source = f"grouping.strategies.{place}.classes"
            rules = [
                (name, compile_condition(text, FIELDS, source=f"{source}.{name}")) for name, text in classes.items()
            ]
            return lambda values: next((name for name, holds in rules if holds(values)), otherwise)
    raise SluiceError(f"grouping.strategies.{place}: {strategy!r} is unknown")


def _performance_namer(threshold: float, members: Sequence[_Member]) -> Callable[[Fields], str]:
    """Classes start at their slowest member; `p0` is the slowest class."""
    seen = {id(member.fields): member.fields["performance"] for member in members}
    figures = sorted({float(value) for value in seen.values() if isinstance(value, int | float)})
    starts: list[float] = []
    for figure in figures:
        if not starts or figure > starts[-1] * (1 + threshold):
            starts.append(figure)

    def name(values: Fields) -> str:
        figure = values["performance"]
        return f"p{bisect_right(starts, figure) - 1}" if isinstance(figure, int | float) else "unrated"

    return name


def _memory_word(mib: int) -> str:
    return f"{mib // 1024}g" if mib % 1024 == 0 else f"{mib}m"


def _compatibility(values: Fields, driver: bool) -> str:
    capability = re.sub(r"[^a-z0-9.]", "", str(values["capability"]).lower()) or "any"
    word = f"{values['vendor']}_{capability}"
    return f"{word}_{values['driver_major'] or 'any'}" if driver else word


def _integer(value: Value) -> int:
    return value if isinstance(value, int) else 0
