"""What the core's placement must answer, written plainly: lists and loops, no index, no bit masks, no order of search.

The rules are those of docs/scheduling.md. Every policy rates each node that fits; the best by (preferences kept,
layout, score, lowest rank) wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from sluice_score import SluiceScore

from sluice.core.cluster import NodeShape, NodeState
from sluice.core.placement import Layout, Part, Placement, Policy, Preference, Reason, Request, RequestFlag, Verdict

Key = tuple[int, int, int, int]

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


@dataclass
class Node:
    """A node and what is held of it."""

    shape: NodeShape
    cpus: int
    memory: int
    path: tuple[int, ...]  # its switches, leaf first; empty: unknown
    rank: int
    state: NodeState = NodeState.UP
    healthy: list[bool] = field(default_factory=list)
    utilisation: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.healthy = self.healthy or [True] * len(self.shape.gpus)
        self.utilisation = self.utilisation or [0] * len(self.shape.gpus)

    def held(self, gpu: int) -> int:
        """MiB of a GPU that are held."""
        total = self.shape.gpus[gpu].memory_mib
        return sum(part.gpu_memory_mib or total for part in self.parts if part.gpus >> gpu & 1)

    def free(self, gpu: int) -> int:
        """MiB of a GPU that are free."""
        return self.shape.gpus[gpu].memory_mib - self.held(gpu)

    def unclaimed(self, gpu: int) -> int:
        """Percent of a GPU's compute that nobody has claimed."""
        return 100 - sum(part.gpu_compute_percent for part in self.parts if part.gpus >> gpu & 1)

    def idle(self, gpu: int) -> bool:
        """Healthy, and nothing of it is held."""
        return self.healthy[gpu] and self.held(gpu) == 0

    @property
    def cpus_free(self) -> int:
        """Thousandths of a CPU."""
        return self.cpus - sum(part.cpus_milli for part in self.parts)

    @property
    def memory_free(self) -> int:
        """MiB of host memory."""
        return self.memory - sum(part.host_memory_mib for part in self.parts)

    @property
    def gpu_memory_free(self) -> int:
        """MiB over healthy GPUs."""
        return sum(self.free(gpu) for gpu in self.gpus if self.healthy[gpu])

    @property
    def gpus(self) -> range:
        """All GPUs."""
        return range(len(self.shape.gpus))

    @property
    def exclusive(self) -> bool:
        """Held by one allocation alone."""
        return any(part.exclusive for part in self.parts)

    def emptied(self) -> Node:
        """As it would be up, healthy and idle."""
        return Node(self.shape, self.cpus, self.memory, self.path, self.rank)


def bits(mask: int) -> list[int]:
    """The set bits of a mask."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x + GOLDEN) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


class Reference:
    """A cluster of plain lists. `models` maps names to ids as the core numbers them."""

    def __init__(self, models: dict[str, int], heights: dict[int, int]) -> None:
        self.nodes: list[Node] = []
        self.models = models
        self.heights = heights  # of switches: leaf 0
        self.last: int | None = None
        self.workload: list[tuple[Request, int]] = []

    # ---- what a node can do ----

    def kind_fits(self, node: Node, gpu: int, request: Request) -> bool:
        """Is the GPU of a kind that the request accepts?"""
        shape = node.shape.gpus[gpu]
        return (
            (not request.models or bool(request.models >> self.models[shape.model] & 1))
            and shape.capability >= request.capability_min
            and shape.memory_mib >= request.gpu_memory_mib_min
        )

    def fitting(self, node: Node, request: Request) -> list[int]:
        """GPUs that can take part."""
        share = per_gpu(request)
        return [
            gpu
            for gpu in node.gpus
            if self.kind_fits(node, gpu, request)
            and node.healthy[gpu]
            and (node.free(gpu) >= share if share else node.idle(gpu))
            and node.unclaimed(gpu) >= request.gpu_compute_percent
        ]

    def group(self, node: Node, request: Request, count: int, fit: list[int]) -> tuple[list[int], int] | None:
        """The GPUs among which `count` may be chosen freely, and how many preferences they keep."""
        preferences = {"link": request.one_link_domain, "numa": request.one_numa_node, "nic": request.near_nic}
        gpus = node.shape.gpus
        names = list(preferences)
        for kept in range(3, -1, -1):
            for chosen in combinations(names, kept):
                if any(preferences[name] == Preference.ANY for name in chosen):
                    continue
                if any(preferences[name] == Preference.REQUIRED and name not in chosen for name in names):
                    continue
                groups: dict[tuple[Any, ...], list[int]] = {}
                for gpu in fit:
                    if "nic" in chosen and not gpus[gpu].near_nic:
                        continue
                    key = (
                        gpus[gpu].link_domain if "link" in chosen else None,
                        gpus[gpu].numa_node if "numa" in chosen else None,
                    )
                    groups.setdefault(key, []).append(gpu)
                enough = [members for members in groups.values() if len(members) >= count]
                if enough:
                    first_link = {d: i for i, d in reversed(list(enumerate(g.link_domain for g in gpus)))}
                    first_numa = {d: i for i, d in reversed(list(enumerate(g.numa_node for g in gpus)))}
                    best = min(
                        enough,
                        key=lambda m: (
                            len(m),
                            first_link[gpus[m[0]].link_domain] if "link" in chosen else 0,
                            first_numa[gpus[m[0]].numa_node] if "numa" in chosen else 0,
                        ),
                    )
                    return best, sum(preferences[name] == Preference.PREFERRED for name in chosen)
        return None

    def fits(self, number: int, node: Node, request: Request, count: int) -> tuple[list[int], int] | None:
        """What `group` says where the node can take `count` GPUs, else None."""
        if request.allowed is not None and number not in request.allowed:
            return None
        if node.state != NodeState.UP or node.exclusive:
            return None
        if RequestFlag.EXCLUSIVE in request.flags and node.parts:
            return None
        if node.cpus_free < request.cpus_milli + count * request.cpus_milli_per_gpu:
            return None
        if node.memory_free < request.host_memory_mib + count * request.host_memory_mib_per_gpu:
            return None
        if count == 0:
            return [], 0
        return self.group(node, request, count, self.fitting(node, request))

    # ---- which GPUs ----

    @staticmethod
    def tightest(node: Node, fit: list[int], count: int) -> list[int]:
        """The least free ones."""
        return sorted(sorted(fit, key=lambda gpu: (node.free(gpu), gpu))[:count])

    def pick(self, node: Node, request: Request, count: int, fit: list[int]) -> list[int]:
        """Tight where shared, well linked where that is preferred, else the first."""
        if len(fit) == count:
            return fit
        if per_gpu(request):
            return self.tightest(node, fit, count)
        links = node.shape.links
        if request.one_link_domain == Preference.ANY or not links:
            return fit[:count]
        best: tuple[int, list[int]] | None = None
        for start in fit:
            chosen, weight = [start], 0
            while len(chosen) < count:
                rest = [gpu for gpu in fit if gpu not in chosen]
                gain, gpu = max((sum(links[c][gpu] for c in chosen), -gpu) for gpu in rest)
                chosen.append(-gpu)
                weight += gain
            if best is None or weight > best[0]:
                best = weight, sorted(chosen)
        assert best is not None
        return best[1]

    # ---- the policies: (score, GPUs) ----

    def score(self, policy: Policy, number: int, request: Request, count: int, fit: list[int]) -> tuple[int, list[int]]:
        """Rate a node."""
        node = self.nodes[number]
        usual = self.pick(node, request, count, fit)
        asked = sum(per_gpu(request) or node.shape.gpus[gpu].memory_mib for gpu in usual)
        cpus = request.cpus_milli + count * request.cpus_milli_per_gpu
        most_cpus = max(1, *(n.cpus for n in self.nodes))
        most_memory = max(1, *(sum(g.memory_mib for g in n.shape.gpus) for n in self.nodes))
        match policy:
            case Policy.FIRST_FIT:
                return 0, fit[:count]
            case Policy.ROUND_ROBIN:
                first = 0 if self.last is None else self.nodes[self.last].rank + 1
                return -((node.rank - first) % len(self.nodes)), fit[:count]
            case Policy.LEAST_LOADED:
                if not count:
                    return -((node.cpus - node.cpus_free) * 1000 // node.cpus if node.cpus else 0), []
                chosen = sorted(sorted(fit, key=lambda gpu: (node.utilisation[gpu], gpu))[:count])
                mean = sum(node.utilisation[gpu] for gpu in chosen) * 100 // count
                return -(mean * 10001 + sum(node.utilisation) * 100 // len(node.gpus)), chosen
            case Policy.BEST_FIT:
                left = Fraction(node.cpus_free - cpus, most_cpus) + Fraction(node.gpu_memory_free - asked, most_memory)
                return math.floor(100 * (1 - left / 2)), usual
            case Policy.DOT_PRODUCT:
                product = Fraction(node.cpus_free * cpus, most_cpus**2)
                product += Fraction(node.gpu_memory_free * asked, most_memory**2)
                return math.floor(100 * (1 - product / 2)), usual
            case Policy.GPU_PACKING:
                return self.gpu_packing(node, count, fit)
            case Policy.GPU_CLUSTERING:
                if not count:
                    return 0, []
                kinds = {kind(part) for part in node.parts if part.gpus}
                use = 25 * (most_memory - node.gpu_memory_free) // most_memory
                mine = 0 if per_gpu(request) else count
                if mine in kinds:
                    return use + (75 if len(kinds) == 1 else 50), usual
                return (use if kinds else use + 25), usual
            case Policy.RANDOM:
                draw, left, chosen = mix((mix(request.seed) + number) & MASK), list(fit), []
                for index in range(count):
                    chosen.append(left.pop(mix((draw + index) & MASK) % len(left)))
                return draw >> 1, sorted(chosen)
            case Policy.FGD:
                return self.fgd(number, request, count, fit)
            case Policy.SLUICE:
                return SluiceScore(self).score(node, cpus, per_gpu(request), count, fit, usual)
        raise NotImplementedError(policy)

    def gpu_packing(self, node: Node, count: int, fit: list[int]) -> tuple[int, list[int]]:
        """GPUs in use before idle ones, nodes in use before idle ones."""
        chosen = self.tightest(node, fit, count)
        idle = sum(node.idle(gpu) for gpu in node.gpus)
        if not count:
            return 0, []
        if idle == len(node.gpus):
            return max(idle, 33 - idle), chosen
        taken = sum(node.idle(gpu) for gpu in chosen)
        if taken:
            return max(50 - taken, 33), chosen
        free = sum(100 * node.free(gpu) // node.shape.gpus[gpu].memory_mib for gpu in chosen)
        return max(100 - free // 10, 50), chosen

    def fragmentation(self, node: Node) -> int:
        """FGD's figure times the sum of weights, in thousandths of a GPU."""
        free = {gpu: node.free(gpu) * 1000 // node.shape.gpus[gpu].memory_mib for gpu in node.gpus if node.healthy[gpu]}
        total = 0
        for usual, weight in self.workload:
            fit = self.fitting(node, replace(usual, gpu_compute_percent=0))
            cpus = usual.cpus_milli + usual.gpus * usual.cpus_milli_per_gpu
            hosts = usual.gpus and node.cpus_free >= cpus and len(fit) >= usual.gpus
            total += weight * sum(amount for gpu, amount in free.items() if not (hosts and gpu in fit))
        return total

    def fgd(self, number: int, request: Request, count: int, fit: list[int]) -> tuple[int, list[int]]:
        """Fragmentation gradient descent, through a sigmoid to whole percents."""
        node, weights = self.nodes[number], sum(weight for _, weight in self.workload)
        if not weights:
            return 0, self.pick(node, request, count, fit)
        share = per_gpu(request)
        options = [[gpu] for gpu in fit] if share and count == 1 else [self.pick(node, request, count, fit)]
        before = self.fragmentation(node)
        best: tuple[int, list[int]] | None = None
        for option in options:
            taken = Part(
                number,
                sum(1 << gpu for gpu in option),
                share,
                request.cpus_milli + count * request.cpus_milli_per_gpu,
            )
            after = self.fragmentation(replace(node, parts=[*node.parts, taken]))
            less = (before - after) / weights
            score = math.floor(100 / (1 + math.exp(-less / 1000)))
            if best is None or score > best[0]:
                best = score, option
        assert best is not None
        return best

    def rate(self, policy: Policy, number: int, request: Request, count: int) -> tuple[Key, list[int]] | None:
        """A key that is larger for the better node, its third item the score; and the GPUs."""
        node = self.nodes[number]
        found = self.fits(number, node, request, count)
        if found is None:
            return None
        fit, preferred = found
        have = sum(g.memory_mib for g in node.shape.gpus) if request.gpus else node.cpus
        free = node.gpu_memory_free if request.gpus else node.cpus_free
        use = (have - free) * 1000 // have if have else 0
        layout = {Layout.POLICY: 0, Layout.PACK: use, Layout.SPREAD: -use}[request.layout]
        score, gpus = self.score(policy, number, request, count, fit)
        return (preferred, layout, score, -node.rank), gpus

    # ---- placing ----

    def place(self, policy: Policy, request: Request) -> tuple[Verdict, Placement | None]:
        """The answer, and the placement where there is one."""
        request = settled(request)
        nodes_min = request.nodes_min or 1
        nodes_max = request.nodes_max or nodes_min
        total = RequestFlag.GPUS_TOTAL in request.flags
        chosen = (self.by_units if total else self.by_share)(policy, request, nodes_min, nodes_max)
        if chosen is not None:
            parts = tuple(self.part(request, number, gpus) for number, (_, gpus) in sorted(chosen.items()))
            score = sum(key[2] for key, _ in chosen.values())
            return Verdict.PLACED, Placement(parts, (score + 2**63) % 2**64 - 2**63)
        idle = Reference(self.models, self.heights)
        idle.nodes = [node.emptied() for node in self.nodes]
        again = (idle.by_units if total else idle.by_share)(Policy.FIRST_FIT, request, nodes_min, nodes_max)
        return (Verdict.NEVER if again is None else Verdict.NO_PLACE), None

    @staticmethod
    def part(request: Request, number: int, gpus: list[int]) -> Part:
        """What the request holds on a node."""
        return Part(
            number,
            sum(1 << gpu for gpu in gpus),
            per_gpu(request),
            request.cpus_milli + len(gpus) * request.cpus_milli_per_gpu,
            request.host_memory_mib + len(gpus) * request.host_memory_mib_per_gpu,
            RequestFlag.EXCLUSIVE in request.flags,
            request.gpu_compute_percent,
        )

    def sites(self, request: Request) -> list[tuple[int, int]]:
        """(height, switch) of all places that a gang may be confined to, 0 for the whole cluster."""
        sites = {(self.heights[switch], switch) for node in self.nodes for switch in node.path} | {(4, 0)}
        if request.one_switch == Preference.REQUIRED:
            sites = {site for site in sites if site[0] <= request.switch_level and site[1]}
        return sorted(sites)

    def below(self, switch: int, numbers: list[int]) -> list[int]:
        """Those of the nodes that hang below a switch."""
        return [number for number in numbers if switch == 0 or switch in self.nodes[number].path]

    def child(self, switch: int, number: int) -> int:
        """The switch just below `switch` on the way to a node; a very large number where it is unknown."""
        path = self.nodes[number].path
        if switch == 0:
            return path[-1] if path else 10**9
        return path[path.index(switch) - 1]

    def is_leaf(self, switch: int) -> bool:
        """Do nodes hang on it?"""
        return switch == 10**9 or (switch != 0 and self.heights[switch] == 0)

    def by_share(self, policy: Policy, request: Request, nodes_min: int, nodes_max: int) -> dict[int, Any] | None:
        """The same share on each node."""
        rated = {n: key for n in range(len(self.nodes)) if (key := self.rate(policy, n, request, request.gpus))}
        if nodes_max == 1:
            best = max(rated, key=lambda n: rated[n][0], default=None)
            return None if best is None else {best: rated[best]}
        segment = max(request.segment, 1)
        sites = {site: self.below(site[1], list(rated)) for site in self.sites(request)}
        sizes = {site: self.in_segments(members, segment) for site, members in sites.items()}
        most = max((min(size, nodes_max - nodes_max % segment) for size in sizes.values()), default=0)
        if most < nodes_min:
            return None
        count = nodes_min if request.layout == Layout.PACK else most
        enough = {site: members for site, members in sites.items() if sizes[site] >= count}
        lowest = min(height for height, _ in enough)

        def children_needed(switch: int, members: list[int]) -> int:
            if self.is_leaf(switch):
                return 0
            below = sorted(self.count_children(switch, members, segment).values(), reverse=True)
            return next(i for i in range(1, len(below) + 1) if sum(below[:i]) >= count)

        _, switch = min(
            (site for site in enough if site[0] == lowest),
            key=lambda site: (children_needed(site[1], enough[site]), len(enough[site]), site[1]),
        )
        return {n: rated[n] for n in self.take(switch, enough[lowest, switch], count, rated, segment)}

    def in_segments(self, members: list[int], segment: int) -> int:
        """How many of the nodes whole segments below one leaf switch can take."""
        leaves: dict[int | None, int] = {}
        for number in members:
            path = self.nodes[number].path
            leaves[path[0] if path else None] = leaves.get(path[0] if path else None, 0) + 1
        return sum(size - size % segment for leaf, size in leaves.items() if leaf is not None or segment == 1)

    def count_children(self, switch: int, members: list[int], segment: int) -> dict[int, int]:
        """Nodes per switch just below, in whole segments."""
        below: dict[int, list[int]] = {}
        for number in members:
            below.setdefault(self.child(switch, number), []).append(number)
        counts = {child: self.in_segments(inside, segment) for child, inside in below.items()}
        return {child: count for child, count in counts.items() if count}

    def take(self, switch: int, members: list[int], count: int, rated: dict[int, Any], segment: int) -> list[int]:
        """`count` of the nodes below a switch: whole switches, fullest first, and of the last one the rest."""
        if self.is_leaf(switch):
            return sorted(members, key=lambda n: rated[n][0], reverse=True)[:count]
        taken: list[int] = []
        left = self.count_children(switch, members, segment)
        while count:
            enough = [child for child in left if left[child] >= count]
            child = min(enough or left, key=lambda c: (left[c] if enough else -left[c], c))
            size = min(count, left.pop(child))
            taken += self.take(child, [n for n in members if self.child(switch, n) == child], size, rated, segment)
            count -= size
        return taken

    def by_units(self, policy: Policy, request: Request, nodes_min: int, nodes_max: int) -> dict[int, Any] | None:
        """GPUs in total."""
        units: dict[int, int] = {}
        for number, node in enumerate(self.nodes):
            for count in range(min(len(node.gpus), request.gpus), 0, -1):
                if self.fits(number, node, request, count):
                    units[number] = count
                    break
        spread = request.layout == Layout.SPREAD

        def node_count(members: list[int]) -> int | None:
            if len(members) < nodes_min:
                return None
            sizes = sorted((units[n] for n in members), reverse=True)
            fewest = next((i for i in range(1, len(sizes) + 1) if sum(sizes[:i]) >= request.gpus), None)
            if fewest is None or fewest > nodes_max:
                return None
            return min(nodes_max, len(members), request.gpus) if spread else max(fewest, nodes_min)

        sites = {site: self.below(site[1], list(units)) for site in self.sites(request)}
        counts = {site: count for site, members in sites.items() if (count := node_count(members)) is not None}
        if not counts:
            return None
        lowest = min(height for height, _ in counts)
        site = min(
            (site for site in counts if site[0] == lowest),
            key=lambda site: (
                -counts[site] if spread else counts[site],
                sum(units[n] for n in sites[site]),
                site[1],
            ),
        )
        keys = {n: self.rate(policy, n, request, units[n]) for n in sites[site]}
        order = sorted(sites[site], key=lambda n: (units[n], keys[n][0] if keys[n] else ()), reverse=True)
        shares = (self.evenly if spread else self.tightly)(order, units, counts[site], request.gpus)
        chosen = {}
        for number, count in shares.items():
            chosen[number] = self.rate(policy, number, request, count)
        return chosen

    @staticmethod
    def evenly(order: list[int], units: dict[int, int], nodes: int, gpus: int) -> dict[int, int]:
        """One GPU at a time to those with the fewest that have more, the first of the order among equals."""
        shares = dict.fromkeys(order[:nodes], 0)
        for _ in range(gpus):
            number = min((n for n in shares if shares[n] < units[n]), key=lambda n: (shares[n], order.index(n)))
            shares[number] += 1
        return shares

    @staticmethod
    def tightly(order: list[int], units: dict[int, int], nodes: int, gpus: int) -> dict[int, int]:
        """All that each has; the last node is the one that has the least more than the rest."""
        shares: dict[int, int] = {}
        for index, number in enumerate(order[: nodes - 1]):
            shares[number] = min(units[number], gpus - (nodes - 1 - index))
            gpus -= shares[number]
        last = min((n for n in order[nodes - 1 :] if units[n] >= gpus), key=lambda n: (units[n], order.index(n)))
        shares[last] = gpus
        return shares

    # ---- explanations ----

    def reason(self, number: int, request: Request) -> Reason:
        """The first thing that keeps one node from its share."""
        node = self.nodes[number]
        request = settled(request)
        total = RequestFlag.GPUS_TOTAL in request.flags
        count, share = 1 if total else request.gpus, per_gpu(request)
        kinds = list(node.gpus)
        if request.allowed is not None and number not in request.allowed:
            return Reason.NOT_ALLOWED
        if node.state != NodeState.UP:
            return Reason.STATE
        if node.exclusive or (RequestFlag.EXCLUSIVE in request.flags and node.parts):
            return Reason.EXCLUSIVE
        shapes = node.shape.gpus
        steps = [
            (Reason.GPU_COUNT, lambda gpu: True),
            (Reason.MODEL, lambda gpu: not request.models or request.models >> self.models[shapes[gpu].model] & 1),
            (Reason.CAPABILITY, lambda gpu: shapes[gpu].capability >= request.capability_min),
            (Reason.GPU_SIZE, lambda gpu: shapes[gpu].memory_mib >= max(request.gpu_memory_mib_min, share)),
            (Reason.NIC, lambda gpu: request.near_nic != Preference.REQUIRED or shapes[gpu].near_nic),
            (Reason.CPUS, None),
            (Reason.HOST_MEMORY, None),
            (Reason.HEALTH, lambda gpu: node.healthy[gpu]),
            (Reason.GPU_BUSY, lambda gpu: node.free(gpu) >= share if share else node.idle(gpu)),
            (Reason.GPU_COMPUTE, lambda gpu: node.unclaimed(gpu) >= request.gpu_compute_percent),
        ]
        for reason, test in steps:
            if reason == Reason.CPUS:
                if node.cpus_free < request.cpus_milli + count * request.cpus_milli_per_gpu:
                    return reason
            elif reason == Reason.HOST_MEMORY:
                if node.memory_free < request.host_memory_mib + count * request.host_memory_mib_per_gpu:
                    return reason
            else:
                assert test is not None
                kinds = [gpu for gpu in kinds if test(gpu)]
                if len(kinds) < count:
                    return reason
        if count:
            links_only = replace(request, one_numa_node=Preference.ANY)
            if request.one_link_domain == Preference.REQUIRED and self.group(node, links_only, count, kinds) is None:
                return Reason.LINK
            if self.group(node, request, count, kinds) is None:
                return Reason.NUMA
        return Reason.FITS

    def explain(self, policy: Policy, request: Request) -> dict[Reason, int]:
        """How many nodes failed on what."""
        verdict, _ = self.place(policy, request)
        counts: dict[Reason, int] = {}
        for number in range(len(self.nodes)):
            reason = self.reason(number, request)
            counts[reason] = counts.get(reason, 0) + 1
        fitting = counts.get(Reason.FITS, 0)
        if fitting and verdict != Verdict.PLACED:
            together = Reason.GANG
            if request.segment > 1 and fitting >= request.nodes_min:
                together = Reason.SEGMENT
            if request.one_switch == Preference.REQUIRED:
                together = Reason.SWITCH
            counts[together] = counts.pop(Reason.FITS)
        return counts


def settled(request: Request) -> Request:
    """GPUs in total as a share per node, where there is only one way to share them."""
    nodes_min = request.nodes_min or 1
    nodes_max = request.nodes_max or nodes_min
    if RequestFlag.GPUS_TOTAL not in request.flags or (nodes_max > 1 and request.gpus > nodes_min):
        return request
    return replace(
        request,
        nodes_max=nodes_min,
        gpus=request.gpus // nodes_min,
        gpu_memory_mib=per_gpu(request),
        flags=request.flags & ~(RequestFlag.GPUS_TOTAL | RequestFlag.GPU_MEMORY_SUM),
    )


def per_gpu(request: Request) -> int:
    """MiB of each GPU; 0 for whole GPUs."""
    if RequestFlag.GPU_MEMORY_SUM in request.flags:
        return request.gpu_memory_mib // request.gpus
    return request.gpu_memory_mib


def kind(part: Part) -> int:
    """Shares, or how many whole GPUs."""
    return 0 if part.gpu_memory_mib else len(bits(part.gpus))
