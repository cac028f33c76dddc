"""What the core's backfill must plan, written plainly from the rules in ``sluice/core.h``: no index, no cache.

Everything that holds something is one entry with its times; whether a request fits is computed again for every
candidate start: each second at which an entry begins or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from sluice.core.backfill import HORIZON_S, PendingJob, Start
from sluice.core.cluster import Cluster, NodeShape, NodeState
from sluice.core.placement import Layout, NicChoice, Part, Preference, Request, RequestFlag, choose_nics

FOREVER = HORIZON_S + 1


@dataclass
class Node:
    """A node; `path` are its switches as (id, level), leaf first, empty where its place is unknown."""

    shape: NodeShape
    cpus: int
    memory: int
    rank: int
    path: tuple[tuple[int, int], ...] = ()
    state: NodeState = NodeState.UP
    healthy: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Hold:
    """Something held from `begin` to before `end`, in seconds from now."""

    part: Part
    begin: int
    end: int


@dataclass
class Offer:
    """What a node has free throughout a window."""

    cpus: int
    memory: int
    gpus: list[int]  # healthy, of an accepted kind, with room for the request
    free: list[int]  # MiB of each GPU
    nics: list[int]  # of an accepted kind, and in the plane


class Reference:
    """A cluster over time."""

    def __init__(
        self,
        nodes: Sequence[Node],
        running: Sequence[tuple[Part, int]],
        leaves: dict[int, set[int]] | None = None,
    ) -> None:
        """`running`: what is held now and until when, in seconds from now; FOREVER for what has no end. `leaves`: the
        leaf switches below each switch, also those without nodes."""
        self.leaves = leaves or {}
        self.idle: dict[NodeShape, Cluster] = {}  # a node of each shape
        self.nodes = list(nodes)
        self.by_rank = sorted(range(len(nodes)), key=lambda node: nodes[node].rank)
        self.plane = 0  # NICs of this one alone; 0: of any
        self.holds = [Hold(part, 0, min(max(end, 1), FOREVER)) for part, end in running]

    def offer(self, node: int, request: Request, begin: int, end: int) -> Offer | None:
        """What the node has for the request's kind throughout; None where it may not be used."""
        row = self.nodes[node]
        if row.state != NodeState.UP or (request.allowed is not None and node not in request.allowed):
            return None
        here = [hold for hold in self.holds if hold.part.node == node and hold.begin < end and hold.end > begin]
        if any(hold.part.exclusive for hold in here) or (here and RequestFlag.EXCLUSIVE in request.flags):
            return None
        share = self.share(request)
        sizes = [gpu.memory_mib for gpu in row.shape.gpus]
        moments = {begin, *(hold.begin for hold in here if hold.begin > begin)}  # what is free shrinks only there
        cpus, memory, free, compute = row.cpus, row.memory, list(sizes), [100] * len(sizes)
        for moment in moments:
            held = [hold.part for hold in here if hold.begin <= moment < hold.end]
            cpus = min(cpus, row.cpus - sum(part.cpus_milli for part in held))
            memory = min(memory, row.memory - sum(part.host_memory_mib for part in held))
            for gpu, size in enumerate(sizes):
                holders = [part for part in held if part.gpus >> gpu & 1]
                free[gpu] = min(free[gpu], size - sum(part.gpu_memory_mib or size for part in holders))
                compute[gpu] = min(compute[gpu], 100 - sum(part.gpu_compute_percent for part in holders))
        fitting = [
            gpu
            for gpu, kind in enumerate(row.shape.gpus)
            if row.healthy[gpu]
            and (not request.models or request.models >> MODEL_IDS[kind.model] & 1)
            and kind.capability >= request.capability_min
            and kind.memory_mib >= request.gpu_memory_mib_min
            and (free[gpu] >= share if share else free[gpu] == sizes[gpu])
            and compute[gpu] >= request.gpu_compute_percent
        ]
        there = row.shape.nics
        nics = [
            nic
            for nic in range(len(there.nics) if there else 0)
            if not any(hold.part.nics >> nic & 1 for hold in here)
            and (not request.nic_kinds or request.nic_kinds >> (there.kinds[nic] if there and there.kinds else 0) & 1)
            and (not self.plane or (there and there.planes and there.planes[nic] == self.plane))
        ]
        return Offer(cpus, memory, fitting, free, nics)

    @staticmethod
    def share(request: Request) -> int:
        """MiB of each GPU; 0: whole GPUs."""
        if RequestFlag.GPU_MEMORY_SUM in request.flags:
            return request.gpu_memory_mib // request.gpus
        return request.gpu_memory_mib

    def group(self, node: int, request: Request, gpus: list[int], count: int) -> list[int] | None:
        """The smallest group with enough of the GPUs under what is required, the first of these."""
        shape = self.nodes[node].shape
        groups: dict[tuple[int, int], list[int]] = {}
        links = sorted({gpu.link_domain for gpu in shape.gpus}, key=[gpu.link_domain for gpu in shape.gpus].index)
        numas = sorted({gpu.numa_node for gpu in shape.gpus}, key=[gpu.numa_node for gpu in shape.gpus].index)
        for link in links if request.one_link_domain == Preference.REQUIRED else [-1]:
            for numa in numas if request.one_numa_node == Preference.REQUIRED else [-1]:
                groups[link, numa] = [
                    gpu
                    for gpu in gpus
                    if link in (-1, shape.gpus[gpu].link_domain)
                    and numa in (-1, shape.gpus[gpu].numa_node)
                    and (request.near_nic != Preference.REQUIRED or shape.gpus[gpu].near_nic)
                ]
        enough = [members for members in groups.values() if len(members) >= count]
        return min(enough, key=len) if enough else None

    def most_gpus(self, node: int, request: Request, begin: int, end: int) -> int:
        """The most GPUs that the node can give to a request for GPUs in total."""
        offer = self.offer(node, request, begin, end)
        if offer is None or offer.cpus < request.cpus_milli or offer.memory < request.host_memory_mib:
            return 0
        return max(
            (
                count
                for count in range(1, len(offer.gpus) + 1)
                if self.group(node, request, offer.gpus, count) is not None
                and offer.cpus >= request.cpus_milli + count * request.cpus_milli_per_gpu
                and offer.memory >= request.host_memory_mib + count * request.host_memory_mib_per_gpu
                and len(offer.nics) >= request.nics + count * request.nics_per_gpu
            ),
            default=0,
        )

    def part(self, node: int, request: Request, count: int, begin: int, end: int) -> Part | None:
        """What the request takes on the node with `count` GPUs; None where it does not fit."""
        cpus = request.cpus_milli + count * request.cpus_milli_per_gpu
        memory = request.host_memory_mib + count * request.host_memory_mib_per_gpu
        offer = self.offer(node, request, begin, end)
        nics = request.nics + count * request.nics_per_gpu
        if offer is None or offer.cpus < cpus or offer.memory < memory or len(offer.nics) < nics:
            return None
        members = self.group(node, request, offer.gpus, count) if count else []
        if members is None:
            return None
        if self.share(request):
            members = sorted(members, key=lambda gpu: (offer.free[gpu], gpu))
        mask = sum(1 << gpu for gpu in members[:count])
        exclusive = RequestFlag.EXCLUSIVE in request.flags
        free = self.evenly(node, mask, offer.nics, nics) if request.nic_planes == Layout.SPREAD else offer.nics
        chosen = self.nics(node, mask, free, nics)
        return Part(node, mask, self.share(request), cpus, memory, exclusive, request.gpu_compute_percent, chosen)

    def nics(self, node: int, gpus: int, free: list[int], count: int) -> int:
        """Those with the most pairs with just these GPUs; without GPUs ones that are near none."""
        shape = self.nodes[node].shape
        if not count:
            return 0
        assert shape.nics is not None
        if gpus:
            return self.pair(node, gpus, free, count).nics
        near, groups = set(shape.nics.gpus), shape.nics.nics
        return sum(1 << nic for nic in sorted(free, key=lambda nic: (groups[nic] in near, nic))[:count])

    def evenly(self, node: int, gpus: int, free: list[int], count: int) -> list[int]:
        """As many, over planes as evenly as can be without a loss of pairs; then those in pairs, else near no GPU."""
        groups = self.nodes[node].shape.nics
        planes = groups.planes if groups else ()
        if groups is None or len(set(planes)) < 2 or not count:
            return free
        near = {nic for nic in free if groups.nics[nic] in groups.gpus}

        def pairs(some: Sequence[int]) -> int:
            return self.pair(node, gpus, some, count).pairs if gpus else 0

        def cost(some: tuple[int, ...]) -> tuple[int, int, int, int]:
            known = [planes[nic] for nic in some if planes[nic]]
            squares = sum(known.count(plane) ** 2 for plane in set(known))
            unwanted = sum((nic in near) != (most > 0) for nic in some)
            return count - len(known), squares, unwanted, sum(1 << nic for nic in some)

        most = pairs(free)
        return [*min([some for some in combinations(free, count) if pairs(some) == most], key=cost)]

    def pair(self, node: int, gpus: int, free: Sequence[int], count: int) -> NicChoice:
        """So many of these with the most pairs with just these GPUs."""
        shape = self.nodes[node].shape
        assert shape.nics is not None
        if shape not in self.idle:
            self.idle[shape] = Cluster(1)
            self.idle[shape].add_node(self.idle[shape].add_shape(shape), 1, 0)
        mask = sum(1 << nic for nic in free)
        return choose_nics(self.idle[shape], shape.nics, Part(0, gpus), mask, count, keep_gpus=True)

    def sites(self, request: Request, nodes_max: int) -> list[list[int]]:
        """Sets of nodes, by rank, of which the request must take one set's."""
        if request.one_switch != Preference.REQUIRED or nodes_max == 1:
            return [self.by_rank]
        below: dict[int, list[int]] = {}
        for node in self.by_rank:
            allowed = [switch for switch, level in self.nodes[node].path if level <= request.switch_level]
            if allowed:
                below.setdefault(allowed[-1], []).append(node)
        return [below[site] for site in sorted(below)]

    def place(self, request: Request, begin: int, limit: int, planes: bool = True) -> tuple[Part, ...] | None:
        """With all NICs in the first plane that has room then, where that is asked and one has; else in any."""
        known = {plane for node in self.nodes if node.shape.nics for plane in node.shape.nics.planes if plane}
        asks = planes and request.nic_planes == Layout.PACK and (request.nics or request.nics_per_gpu)
        for self.plane in [*sorted(known if asks else ()), 0]:
            parts = self.place_in_plane(request, begin, limit)
            if parts:
                break
        self.plane = 0
        return parts

    def place_in_plane(self, request: Request, begin: int, limit: int) -> tuple[Part, ...] | None:
        """The request's parts from `begin` on; None where it does not fit then."""
        end = min(begin + limit, FOREVER)
        nodes_min = max(request.nodes_min, 1)
        nodes_max = request.nodes_max or nodes_min
        total, gpus = RequestFlag.GPUS_TOTAL in request.flags, request.gpus
        if total and (nodes_max == 1 or gpus == nodes_min):
            total, gpus, nodes_max = False, gpus // nodes_min, nodes_min
        for site in self.sites(request, nodes_max):
            if total:
                dealt = self.deal(site, request, nodes_min, nodes_max, begin, end)
                parts = [self.part(node, request, count, begin, end) for node, count in dealt]
            else:
                ready = [part for node in site if (part := self.part(node, request, gpus, begin, end))]
                ready = self.filled(ready, request, nodes_min)
                ready = self.in_segments(ready, request.segment)[:nodes_min]
                parts = [*ready] if len(ready) == nodes_min else []
            if parts:
                return tuple(sorted((part for part in parts if part), key=lambda part: part.node))
        return None

    def filled(self, parts: list[Part], request: Request, wanted: int) -> list[Part]:
        """Those of the switches one level lower that a limited number of them is filled in; none where they are not."""
        if not request.lower_switches or not parts or wanted == 1:
            return parts
        level = request.switch_level - 1
        members: dict[int, list[Part]] = {}
        for part in sorted(parts, key=lambda part: (self.nodes[part.node].path[0][0], self.nodes[part.node].rank)):
            path = self.nodes[part.node].path
            members.setdefault([switch for switch, height in path if height <= level][-1], []).append(part)
        whole = {
            switch: {self.nodes[part.node].path[0][0] for part in inside} == self.leaves[switch]
            for switch, inside in members.items()
        }
        full: list[int] = []
        for _ in range(request.lower_switches):
            rest = wanted - sum(len(members[switch]) for switch in full)
            last = [
                switch
                for switch, inside in members.items()
                if switch not in full
                and len(inside) >= rest
                and (whole[switch] or not full or rest < min(len(members[other]) for other in full))
            ]
            if last:
                chosen = min(last, key=lambda switch: (len(members[switch]), switch))
                taken = {switch: len(members[switch]) for switch in full} | {chosen: rest}
                return [part for switch in sorted(taken) for part in members[switch][: taken[switch]]]
            more = [switch for switch in members if switch not in full and whole[switch]]
            if not more:
                return []
            full.append(min(more, key=lambda switch: (-len(members[switch]), switch)))
        return []

    def in_segments(self, parts: list[Part], segment: int) -> list[Part]:
        """Those of whole segments, leaf switch by leaf switch."""
        if segment < 2:
            return parts
        below: dict[int, list[Part]] = {}
        for part in parts:
            if self.nodes[part.node].path:
                below.setdefault(self.nodes[part.node].path[0][0], []).append(part)
        return [part for leaf in sorted(below) for part in below[leaf][: len(below[leaf]) // segment * segment]]

    def deal(
        self, site: list[int], request: Request, nodes_min: int, nodes_max: int, begin: int, end: int
    ) -> list[tuple[int, int]]:
        """Nodes and how many GPUs each gives of a total; empty where there are not enough."""
        most = {node: self.most_gpus(node, request, begin, end) for node in site}
        able = sorted((node for node in site if most[node]), key=lambda node: -most[node])  # stable: by rank
        dealt: list[tuple[int, int]] = []
        missing = request.gpus
        for node in able[:nodes_max]:
            if missing:
                others = max(nodes_min - len(dealt) - 1, 0)
                dealt.append((node, min(most[node], missing - others)))
                missing -= dealt[-1][1]
        return dealt if missing == 0 and len(dealt) >= nodes_min else []

    def together(self, jobs: Sequence[PendingJob], begin: int) -> list[Start] | None:
        """Hold all jobs from `begin` on, or none of them; in one plane each, where that leaves room for all."""
        return self.in_turn(jobs, begin, True) or (self.in_turn(jobs, begin, False) if len(jobs) > 1 else None)

    def in_turn(self, jobs: Sequence[PendingJob], begin: int, planes: bool) -> list[Start] | None:
        """Hold all jobs from `begin` on, one after the other, or none of them."""
        before, starts = list(self.holds), []
        for job in jobs:
            parts = self.place(job.request, begin, job.limit_s, planes)
            if parts is None:
                self.holds = before
                return None
            starts.append(Start(begin, parts))
            self.hold(starts[-1], job.limit_s)
        return starts

    def hold(self, start: Start, limit: int) -> None:
        """Book a planned start."""
        end = min(start.start_s + limit, FOREVER)
        self.holds += [Hold(part, start.start_s, end) for part in start.parts]

    def release(self, start: Start, limit: int) -> None:
        """Release a planned start."""
        end = min(start.start_s + limit, FOREVER)
        for part in start.parts:
            self.holds.remove(Hold(part, start.start_s, end))

    def plan(self, jobs: Sequence[PendingJob], reservations: int) -> list[Start | None]:
        """Each job's start, seconds from now."""
        found: list[Start | None] = []
        for job in jobs:
            if job.held:
                self.hold(job.held, job.limit_s)
        first = 0
        while first < len(jobs):
            last = first + 1
            while jobs[first].group and last < len(jobs) and jobs[last].group == jobs[first].group:
                last += 1
            members = jobs[first:last]
            held = [job.held for job in members if job.held]
            for job in members:
                if job.held:
                    self.release(job.held, job.limit_s)
            candidates = sorted({0, *(hold.begin for hold in self.holds), *(hold.end for hold in self.holds)})
            latest = held[0].start_s if held else HORIZON_S if reservations else 0
            starts: list[Start] | None = None
            for begin in candidates:
                if begin <= latest and starts is None:
                    starts = self.together(members, begin)
            if starts is None and held:
                starts = held
                for start, job in zip(held, members, strict=True):
                    self.hold(start, job.limit_s)
            if starts and starts[0].start_s and reservations:
                reservations -= 1
            nowhere: list[Start | None] = [None] * len(members)
            found += starts or nowhere
            first = last
        return found


MODEL_IDS: dict[str, int] = {}
"""The cluster's numbers of GPU models by name."""
