"""Requests, placement, gangs and explanations of the core (``sluice/core.h``, section requests)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cached_property
from typing import Any

from sluice.core._core import ffi, lib
from sluice.core.cluster import Cluster, NicGroups, fill_nics
from sluice.core.errors import check, new_error_text


class Policy(IntEnum):
    """How nodes are ranked (``enum sluice_policy``)."""

    FIRST_FIT = lib.SLUICE_POLICY_FIRST_FIT
    ROUND_ROBIN = lib.SLUICE_POLICY_ROUND_ROBIN
    LEAST_LOADED = lib.SLUICE_POLICY_LEAST_LOADED
    BEST_FIT = lib.SLUICE_POLICY_BEST_FIT
    DOT_PRODUCT = lib.SLUICE_POLICY_DOT_PRODUCT
    GPU_PACKING = lib.SLUICE_POLICY_GPU_PACKING
    GPU_CLUSTERING = lib.SLUICE_POLICY_GPU_CLUSTERING
    RANDOM = lib.SLUICE_POLICY_RANDOM
    FGD = lib.SLUICE_POLICY_FGD
    SLUICE = lib.SLUICE_POLICY_SLUICE

    @classmethod
    def from_name(cls, name: str) -> Policy:
        """The policy of a name such as ``best-fit``; CoreError names them all."""
        policy, text = ffi.new("enum sluice_policy *"), new_error_text()
        check(lib.sluice_policy_by_name(name.encode(), policy, text), text)
        return cls(policy[0])

    @property
    def label(self) -> str:
        """The name, e.g. ``best-fit``."""
        text: bytes = ffi.string(lib.sluice_policy_name(self))
        return text.decode()


class Preference(IntEnum):
    """Whether a property of the placement is indifferent, preferred or required (``enum sluice_wish``)."""

    ANY = lib.SLUICE_ANY
    PREFERRED = lib.SLUICE_PREFERRED
    REQUIRED = lib.SLUICE_REQUIRED


class Layout(IntEnum):
    """Few nodes or many (``enum sluice_layout``)."""

    POLICY = lib.SLUICE_LAYOUT_POLICY
    PACK = lib.SLUICE_PACK
    SPREAD = lib.SLUICE_SPREAD


class RequestFlag(IntFlag):
    """Bits of `Request.flags`."""

    NONE = 0
    GPUS_TOTAL = lib.SLUICE_GPUS_TOTAL
    GPU_MEMORY_SUM = lib.SLUICE_GPU_MEMORY_SUM
    EXCLUSIVE = lib.SLUICE_EXCLUSIVE


class Reason(IntEnum):
    """Why a node cannot take its share (``enum sluice_reason``)."""

    FITS = lib.SLUICE_REASON_FITS
    NOT_ALLOWED = lib.SLUICE_REASON_NOT_ALLOWED
    STATE = lib.SLUICE_REASON_STATE
    EXCLUSIVE = lib.SLUICE_REASON_EXCLUSIVE
    GPU_COUNT = lib.SLUICE_REASON_GPU_COUNT
    MODEL = lib.SLUICE_REASON_MODEL
    CAPABILITY = lib.SLUICE_REASON_CAPABILITY
    GPU_SIZE = lib.SLUICE_REASON_GPU_SIZE
    NIC = lib.SLUICE_REASON_NIC
    CPUS = lib.SLUICE_REASON_CPUS
    HOST_MEMORY = lib.SLUICE_REASON_HOST_MEMORY
    HEALTH = lib.SLUICE_REASON_HEALTH
    GPU_BUSY = lib.SLUICE_REASON_GPU_BUSY
    GPU_COMPUTE = lib.SLUICE_REASON_GPU_COMPUTE
    LINK = lib.SLUICE_REASON_LINK
    NUMA = lib.SLUICE_REASON_NUMA
    SWITCH = lib.SLUICE_REASON_SWITCH
    GANG = lib.SLUICE_REASON_GANG
    NICS = lib.SLUICE_REASON_NICS
    NICS_BUSY = lib.SLUICE_REASON_NICS_BUSY
    SEGMENT = lib.SLUICE_REASON_SEGMENT

    @property
    def text(self) -> str:
        """In words."""
        text: bytes = ffi.string(lib.sluice_reason_text(self))
        return text.decode()


class Verdict(IntEnum):
    """The result of placing."""

    PLACED = lib.SLUICE_OK
    NO_PLACE = lib.SLUICE_ERROR_NO_PLACE  # not now
    NEVER = lib.SLUICE_ERROR_NEVER  # not even were every allowed node up, healthy and idle


@dataclass(frozen=True)
class Request:
    """A job's request (``struct sluice_request``): fields, units and defaults as there."""

    gpus: int = 0
    gpu_memory_mib: int = 0
    cpus_milli: int = 0
    host_memory_mib: int = 0
    nodes_min: int = 0
    nodes_max: int = 0
    cpus_milli_per_gpu: int = 0
    host_memory_mib_per_gpu: int = 0
    models: int = 0
    capability_min: int = 0
    gpu_memory_mib_min: int = 0
    one_link_domain: Preference = Preference.ANY
    one_numa_node: Preference = Preference.ANY
    near_nic: Preference = Preference.ANY
    one_switch: Preference = Preference.ANY
    switch_level: int = 0
    segment: int = 0
    layout: Layout = Layout.POLICY
    flags: RequestFlag = RequestFlag.NONE
    allowed: frozenset[int] | None = None  # None: every node
    seed: int = 0
    gpu_compute_percent: int = 0
    nics: int = 0
    nics_per_gpu: int = 0
    nic_kinds: int = 0
    lower_switches: int = 0
    switch_layout: Layout = Layout.POLICY
    nic_planes: Layout = Layout.POLICY

    def fill(self, request: Any) -> Any:
        """Write into a ``struct sluice_request``; what this returns must live as long as the struct."""
        for name in _PLAIN_FIELDS:
            setattr(request, name, getattr(self, name))
        if self.allowed is None:
            return None
        words = [0] * (max(self.allowed, default=0) // 64 + 1)
        for node in self.allowed:
            words[node // 64] |= 1 << (node % 64)
        request.allowed = bitmap = ffi.new("uint64_t[]", words)
        request.allowed_words = len(words)
        return bitmap

    @property
    def c(self) -> Any:
        """As ``struct sluice_request *``, made once; lives as long as this object."""
        return self._c_and_bitmap[0]

    @cached_property
    def _c_and_bitmap(self) -> tuple[Any, Any]:
        request = ffi.new("struct sluice_request *")
        return request, self.fill(request)


_PLAIN_FIELDS = [name for name in Request.__dataclass_fields__ if name != "allowed"]


@dataclass(frozen=True)
class Part:
    """What an allocation holds on one node (``struct sluice_part``); `gpus` and `nics` are bit masks."""

    node: int
    gpus: int = 0
    gpu_memory_mib: int = 0
    cpus_milli: int = 0
    host_memory_mib: int = 0
    exclusive: bool = False
    gpu_compute_percent: int = 0
    nics: int = 0


@dataclass(frozen=True)
class Placement:
    """Which nodes and GPUs, in ascending order of nodes, and the policy's score."""

    parts: tuple[Part, ...]
    score: int = 0
    nic_pairs: int = 0


@dataclass(frozen=True)
class Allocation:
    """A placement that is held."""

    id: int
    placement: Placement


@dataclass(frozen=True)
class Explanation:
    """Why a decision is what it is (``struct sluice_explanation``)."""

    verdict: Verdict
    nodes: int
    by_reason: dict[Reason, int]  # reasons that some node has; each node is counted once
    terms: dict[str, int]  # of the first node's score
    placement: Placement | None


def to_part(part: Any) -> Part:
    """A ``struct sluice_part`` that the core has filled."""
    return Part(
        part.node,
        part.gpus,
        part.gpu_memory_mib,
        part.cpus_milli,
        part.host_memory_mib,
        part.exclusive,
        part.gpu_compute_percent,
        part.nics,
    )


def to_placement(placement: Any) -> Placement:
    """A ``struct sluice_placement`` that the core has filled."""
    parts = tuple(to_part(placement.parts[i]) for i in range(placement.part_count))
    return Placement(parts, placement.score, placement.nic_pairs)


def room_for_request(cluster: Cluster, request: Request) -> Any:
    """A ``struct sluice_placement *`` with room for what the request may get; valid until the next call."""
    return cluster.room_for(min(max(request.nodes_min, request.nodes_max, 1), lib.SLUICE_MAX_NODES))


def check_request(cluster: Cluster, request: Request) -> None:
    """Raise CoreError unless the request is well-formed."""
    text = new_error_text()
    check(lib.sluice_request_check(cluster.handle, request.c, text), text)


def set_workload(cluster: Cluster, workload: Sequence[tuple[Request, int]]) -> None:
    """Set the usual requests and their weights for the fragmentation-aware policies."""
    requests, text = ffi.new("struct sluice_request[]", max(len(workload), 1)), new_error_text()
    keep = [request.fill(requests[index]) for index, (request, _) in enumerate(workload)]
    weights = ffi.new("uint32_t[]", [weight for _, weight in workload] or [0])
    check(lib.sluice_cluster_set_workload(cluster.handle, requests, weights, len(workload), text), text)
    del keep


def place(cluster: Cluster, policy: Policy, request: Request) -> Placement | None:
    """Choose nodes and GPUs, changing nothing; None when there is no place now. CoreError else, also for NEVER."""
    text, placement = new_error_text(), room_for_request(cluster, request)
    code = lib.sluice_place(cluster.handle, policy, request.c, placement, text)
    if code == lib.SLUICE_ERROR_NO_PLACE:
        return None
    check(code, text)
    return to_placement(placement)


@dataclass(frozen=True)
class NicChoice:
    """A part with NICs: `part` has the GPUs, `nics` is a bit mask."""

    part: Part
    nics: int
    pairs: int


def choose_nics(
    cluster: Cluster, groups: NicGroups, part: Part, nics_free: int, nic_count: int, *, keep_gpus: bool = False
) -> NicChoice:
    """NICs for the part, and GPUs near them (``sluice_choose_nics``)."""
    c_groups, c_part = ffi.new("struct sluice_nic_groups *"), ffi.new("struct sluice_part *")
    fill_nics(c_groups[0], groups)
    fill_part(c_part, part)
    choice, text = ffi.new("struct sluice_nic_choice *"), new_error_text()
    code = lib.sluice_choose_nics(cluster.handle, c_groups, nics_free, nic_count, keep_gpus, c_part, choice, text)
    check(code, text)
    return NicChoice(to_part(c_part), choice.nics, choice.pairs)


def lay_out_roles(cluster: Cluster, parts: Sequence[Part], wanted: Sequence[int]) -> list[tuple[int, ...]]:
    """For each part, the bit masks of the GPUs that each role has of it (``sluice_lay_out_roles``)."""
    c_parts, text = ffi.new("struct sluice_part[]", max(len(parts), 1)), new_error_text()
    for c_part, part in zip(c_parts, parts, strict=False):
        fill_part(c_part, part)
    gpus = ffi.new("uint32_t[]", max(len(parts) * len(wanted), 1))
    check(lib.sluice_lay_out_roles(cluster.handle, c_parts, len(parts), list(wanted), len(wanted), gpus, text), text)
    rows = range(0, len(parts) * len(wanted), max(len(wanted), 1))
    return [tuple(gpus[begin : begin + len(wanted)]) for begin in rows]


def commit(cluster: Cluster, parts: Iterable[Part]) -> int:
    """Hold what the parts say; the allocation's id."""
    listed, text, allocation = list(parts), new_error_text(), ffi.new("uint64_t *")
    c_parts = ffi.new("struct sluice_part[]", max(len(listed), 1))
    for c_part, part in zip(c_parts, listed, strict=False):
        fill_part(c_part, part)
    placement = ffi.new("struct sluice_placement *")
    placement.parts = c_parts
    placement.part_count = placement.part_capacity = len(listed)
    check(lib.sluice_commit(cluster.handle, placement, allocation, text), text)
    return int(allocation[0])


def fill_part(c_part: Any, part: Part) -> None:
    """Write into a ``struct sluice_part``."""
    c_part.node = part.node
    c_part.gpus = part.gpus
    c_part.gpu_memory_mib = part.gpu_memory_mib
    c_part.cpus_milli = part.cpus_milli
    c_part.host_memory_mib = part.host_memory_mib
    c_part.exclusive = part.exclusive
    c_part.gpu_compute_percent = part.gpu_compute_percent
    c_part.nics = part.nics


def start(cluster: Cluster, policy: Policy, request: Request) -> Allocation | None:
    """Place and commit; None when there is no place now."""
    text, placement, allocation = new_error_text(), room_for_request(cluster, request), ffi.new("uint64_t *")
    code = lib.sluice_start(cluster.handle, policy, request.c, placement, allocation, text)
    if code == lib.SLUICE_ERROR_NO_PLACE:
        return None
    check(code, text)
    return Allocation(int(allocation[0]), to_placement(placement))


def start_group(cluster: Cluster, policy: Policy, requests: Sequence[Request]) -> list[Allocation] | None:
    """Start all or none; None when there is no place for them together now."""
    count, text = len(requests), new_error_text()
    c_requests = ffi.new("struct sluice_request[]", max(count, 1))
    placements = ffi.new("struct sluice_placement[]", max(count, 1))
    allocations = ffi.new("uint64_t[]", max(count, 1))
    keep = []
    for index, request in enumerate(requests):
        room = min(max(request.nodes_min, request.nodes_max, 1), lib.SLUICE_MAX_NODES)
        parts = ffi.new("struct sluice_part[]", room)
        keep += [request.fill(c_requests[index]), parts]
        placements[index].parts = parts
        placements[index].part_capacity = room
    code = lib.sluice_start_group(cluster.handle, policy, c_requests, placements, allocations, count, text)
    if code == lib.SLUICE_ERROR_NO_PLACE:
        return None
    check(code, text)
    return [Allocation(int(allocations[i]), to_placement(placements[i])) for i in range(count)]


def release(cluster: Cluster, allocation: int) -> None:
    """Release all that an allocation holds."""
    text = new_error_text()
    check(lib.sluice_release(cluster.handle, allocation, text), text)


def resize(cluster: Cluster, allocation: int, part: Part) -> None:
    """Change what an allocation holds on `part.node`."""
    text, c_part = new_error_text(), ffi.new("struct sluice_part *")
    fill_part(c_part, part)
    check(lib.sluice_resize(cluster.handle, allocation, c_part, text), text)


def read_allocation(cluster: Cluster, allocation: int) -> tuple[Part, ...]:
    """What an allocation holds."""
    room, count = cluster.room_for(cluster.totals().nodes), ffi.new("uint32_t *")
    text = new_error_text()
    check(lib.sluice_allocation_read(cluster.handle, allocation, room.parts, room.part_capacity, count, text), text)
    return tuple(to_part(room.parts[i]) for i in range(count[0]))


def explain(cluster: Cluster, policy: Policy, request: Request) -> Explanation:
    """Why placing has its result."""
    text, placement = new_error_text(), room_for_request(cluster, request)
    explanation = ffi.new("struct sluice_explanation *")
    check(lib.sluice_explain(cluster.handle, policy, request.c, placement, explanation, text), text)
    verdict = Verdict(explanation.verdict)
    return Explanation(
        verdict=verdict,
        nodes=explanation.nodes,
        by_reason={reason: explanation.by_reason[reason] for reason in Reason if explanation.by_reason[reason]},
        terms={
            ffi.string(explanation.terms[i].name).decode(): explanation.terms[i].value
            for i in range(explanation.term_count)
        },
        placement=to_placement(placement) if verdict == Verdict.PLACED else None,
    )
