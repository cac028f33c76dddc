"""The cluster model of the core (``sluice/core.h``, section cluster model)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sluice.core._core import ffi, lib
from sluice.core.errors import check, new_error_text


class NodeState(IntEnum):
    """Whether new parts may go to a node (``enum sluice_node_state``)."""

    UP = lib.SLUICE_NODE_UP
    DRAINED = lib.SLUICE_NODE_DRAINED
    DOWN = lib.SLUICE_NODE_DOWN


@dataclass(frozen=True)
class GpuShape:
    """One GPU of a kind of node (``struct sluice_gpu_shape``)."""

    model: str
    memory_mib: int
    capability: int = 0  # 0: unknown
    link_domain: int = 0
    numa_node: int = 0
    near_nic: bool = False


@dataclass(frozen=True)
class NicGroups:
    """The group of each GPU and each NIC of a node, each NIC's kind and plane (``struct sluice_nic_groups``)."""

    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    kinds: tuple[int, ...] = ()  # empty: all are of kind 0
    planes: tuple[int, ...] = ()  # from 1; 0, and empty: not known


@dataclass(frozen=True)
class NodeShape:
    """The GPUs of a kind of node; `links` is their symmetric matrix of weights, empty where unknown."""

    gpus: tuple[GpuShape, ...] = ()
    links: tuple[tuple[int, ...], ...] = ()
    nics: NicGroups | None = None  # those that requests count


@dataclass(frozen=True)
class NodeView:
    """The present state of a node (``struct sluice_node_view``); sets of GPUs as bit masks."""

    shape: int
    switch: int
    state: NodeState
    exclusive: bool
    parts: int
    cpus_milli: int
    cpus_milli_free: int
    host_memory_mib: int
    host_memory_mib_free: int
    gpus_healthy: int
    gpus_idle: int
    gpu_memory_mib: tuple[int, ...]
    gpu_memory_mib_free: tuple[int, ...]
    gpu_compute_free: tuple[int, ...]
    gpu_utilisation: tuple[int, ...]
    nic_count: int
    nics_free: int


@dataclass(frozen=True)
class Totals:
    """Sums over all nodes (``struct sluice_cluster_totals``)."""

    nodes: int
    nodes_up: int
    gpus: int
    allocations: int
    cpus_milli: int
    cpus_milli_free: int
    host_memory_mib: int
    host_memory_mib_free: int
    gpu_memory_mib: int
    gpu_memory_mib_free: int


def fill_shape(shape: NodeShape, models: Sequence[int]) -> Any:
    """As ``struct sluice_node_shape *``; `models` are the ids of the GPUs' models."""
    c_shape, most = ffi.new("struct sluice_node_shape *"), int(lib.SLUICE_MAX_GPUS)
    c_shape.gpu_count = len(shape.gpus)  # the core refuses more than it can take
    for index, (gpu, model) in enumerate(zip(shape.gpus[:most], models, strict=False)):
        c_gpu = c_shape.gpus[index]
        c_gpu.model = model
        c_gpu.capability = gpu.capability
        c_gpu.memory_mib = gpu.memory_mib
        c_gpu.link_domain = gpu.link_domain
        c_gpu.numa_node = gpu.numa_node
        c_gpu.near_nic = gpu.near_nic
    for i, row in enumerate(shape.links[:most]):
        for j, weight in enumerate(row[:most]):
            c_shape.links[i][j] = weight
    if shape.nics is not None:
        fill_nics(c_shape.nics, shape.nics)
    return c_shape


def fill_nics(c_nics: Any, nics: NicGroups) -> None:
    """Write into a ``struct sluice_nic_groups``."""
    c_nics.gpu_count, c_nics.nic_count = len(nics.gpus), len(nics.nics)
    c_nics.gpu_group = list(nics.gpus[: lib.SLUICE_MAX_GPUS])
    c_nics.nic_group = list(nics.nics[: lib.SLUICE_MAX_NICS])
    c_nics.nic_kind = list(nics.kinds[: lib.SLUICE_MAX_NICS])
    c_nics.nic_plane = list(nics.planes[: lib.SLUICE_MAX_NICS])


class Cluster:
    """Nodes, their GPUs, and who holds them. All ids are small integers that count from 0, of switches from 1."""

    def __init__(self, max_nodes: int, *, max_switches: int = 0, max_allocations: int = 0, max_parts: int = 0) -> None:
        config = ffi.new("struct sluice_cluster_config *")
        config.max_nodes = max_nodes
        config.max_switches = max_switches
        config.max_allocations = max_allocations
        config.max_parts = max_parts
        handle, text = ffi.new("struct sluice_cluster **"), new_error_text()
        check(lib.sluice_cluster_new(config, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_cluster_free)
        self.placement = ffi.new("struct sluice_placement *")  # room for placing, grown as needed
        self._parts: Any = None

    def room_for(self, parts: int) -> Any:
        """The cluster's ``struct sluice_placement *``, with room for so many parts; one use at a time."""
        if self._parts is None or len(self._parts) < parts:
            self._parts = ffi.new("struct sluice_part[]", max(parts, 16))
            self.placement.parts = self._parts
            self.placement.part_capacity = len(self._parts)
        return self.placement

    def add_model(self, name: str) -> int:
        """Intern a GPU model name; its id."""
        model, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_cluster_add_model(self.handle, name.encode(), model, text), text)
        return int(model[0])

    def models(self, names: Iterable[str]) -> int:
        """A set of models, as `Request.models` wants it."""
        mask = 0
        for name in names:
            mask |= 1 << self.add_model(name)
        return mask

    def model_name(self, model: int) -> str:
        """The name of a model id."""
        name = lib.sluice_cluster_model_name(self.handle, model)
        if not name:
            raise IndexError(model)
        text: bytes = ffi.string(name)
        return text.decode()

    def add_shape(self, shape: NodeShape) -> int:
        """Add a kind of node; its id."""
        c_shape = fill_shape(shape, [self.add_model(gpu.model) for gpu in shape.gpus])
        result, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_cluster_add_shape(self.handle, c_shape, result, text), text)
        return int(result[0])

    def add_switch(self, parent: int = 0) -> int:
        """Add a switch below `parent`, 0 for the top; its id."""
        result, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_cluster_add_switch(self.handle, parent, result, text), text)
        return int(result[0])

    def add_node(self, shape: int, cpus_milli: int, host_memory_mib: int, switch: int = 0) -> int:
        """Add an idle node; its number. Switch 0: its place in the network is unknown."""
        result, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_cluster_add_node(self.handle, shape, cpus_milli, host_memory_mib, switch, result, text), text)
        return int(result[0])

    def set_state(self, node: int, state: NodeState) -> None:
        """Take a node out of use, or back into it."""
        text = new_error_text()
        check(lib.sluice_node_set_state(self.handle, node, state, text), text)

    def resize_node(self, node: int, cpus_milli: int, host_memory_mib: int) -> None:
        """Change what a node has."""
        text = new_error_text()
        check(lib.sluice_node_resize(self.handle, node, cpus_milli, host_memory_mib, text), text)

    def set_health(self, node: int, gpu: int, healthy: bool) -> None:
        """Whether the GPU may be given out."""
        text = new_error_text()
        check(lib.sluice_gpu_set_health(self.handle, node, gpu, healthy, text), text)

    def set_utilisation(self, node: int, gpu: int, percent: int) -> None:
        """The GPU's current utilisation."""
        text = new_error_text()
        check(lib.sluice_gpu_set_utilisation(self.handle, node, gpu, percent, text), text)

    def set_order(self, rank: Sequence[int] | None) -> None:
        """Among equally good nodes the one of lowest rank wins; None: of lowest number."""
        text = new_error_text()
        ranks = ffi.NULL if rank is None else ffi.new("uint32_t[]", list(rank))
        check(lib.sluice_cluster_set_order(self.handle, ranks, 0 if rank is None else len(rank), text), text)

    def node(self, node: int) -> NodeView:
        """The node's present state."""
        view, text = ffi.new("struct sluice_node_view *"), new_error_text()
        check(lib.sluice_node_read(self.handle, node, view, text), text)
        count = view.gpu_count
        return NodeView(
            shape=view.shape,
            switch=view.switch_id,
            state=NodeState(view.state),
            exclusive=view.exclusive,
            parts=view.parts,
            cpus_milli=view.cpus_milli,
            cpus_milli_free=view.cpus_milli_free,
            host_memory_mib=view.host_memory_mib,
            host_memory_mib_free=view.host_memory_mib_free,
            gpus_healthy=view.gpus_healthy,
            gpus_idle=view.gpus_idle,
            gpu_memory_mib=tuple(view.gpu_memory_mib[0:count]),
            gpu_memory_mib_free=tuple(view.gpu_memory_mib_free[0:count]),
            gpu_compute_free=tuple(view.gpu_compute_free[0:count]),
            gpu_utilisation=tuple(view.gpu_utilisation[0:count]),
            nic_count=view.nic_count,
            nics_free=view.nics_free,
        )

    def totals(self) -> Totals:
        """Sums over all nodes."""
        totals = ffi.new("struct sluice_cluster_totals *")
        lib.sluice_cluster_read_totals(self.handle, totals)
        return Totals(
            nodes=totals.nodes,
            nodes_up=totals.nodes_up,
            gpus=totals.gpus,
            allocations=totals.allocations,
            cpus_milli=totals.cpus_milli,
            cpus_milli_free=totals.cpus_milli_free,
            host_memory_mib=totals.host_memory_mib,
            host_memory_mib_free=totals.host_memory_mib_free,
            gpu_memory_mib=totals.gpu_memory_mib,
            gpu_memory_mib_free=totals.gpu_memory_mib_free,
        )

    def check(self) -> None:
        """Raise CoreError if the model contradicts itself."""
        text = new_error_text()
        check(lib.sluice_cluster_check(self.handle, text), text)
