"""The sluice policy's score, written plainly after docs/scheduling.md: every price is computed again for each node."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING

from sluice.core.placement import Request

if TYPE_CHECKING:
    from placement import Node, Reference

LEVELS = 100
ONE = 1 << 20  # value of a level to a workload that can use all of it
STEP = 64 * ONE // 10
CPU_ONE = 1 << 12  # further binary places of the price of a thousandth of a CPU


def share_of(request: Request) -> int:
    """MiB of each GPU of a usual request; 0 for whole GPUs."""
    return request.gpu_memory_mib


def cpus_of(request: Request) -> int:
    """Thousandths of a CPU on the node, for its GPUs as well."""
    return request.cpus_milli + request.gpus * request.cpus_milli_per_gpu


def alike(node: Node) -> bool:
    """Are all GPUs of one kind?"""
    return len({(gpu.model, gpu.capability, gpu.memory_mib) for gpu in node.shape.gpus}) <= 1


def kappa(node: Node) -> int | None:
    """Free CPUs per open GPU, in half octaves from one CPU on; None without open GPUs."""
    is_open = [node.healthy[g] and 4 * node.free(g) >= node.shape.gpus[g].memory_mib for g in node.gpus]
    if not any(is_open):
        return None
    ratio = node.cpus_free // sum(is_open)
    return sum(ratio * ratio >= 1000**2 << i for i in range(22))


def lower_bound(kappa: int) -> int:
    """Least thousandths of a CPU per open GPU in the class."""
    return isqrt((1000**2 << (kappa - 1)) - 1) + 1 if kappa else 0


class SluiceScore:
    """The policy, for a reference cluster and its workload."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.nodes = [node for node in reference.nodes if alike(node)]
        self.usual = [(request, weight) for request, weight in reference.workload if request.gpus and weight]
        if not self.usual:
            gpus = sum(len(node.gpus) for node in self.nodes)
            cpus = sum(node.cpus for node in self.nodes if node.gpus)
            self.usual = [(Request(gpus=1, cpus_milli=cpus // gpus if gpus else 0), 1)]

    def could_take(self, node: Node, request: Request) -> bool:
        """Is the node, idle, of a kind that can host the usual request?"""
        if len(node.gpus) < request.gpus or not self.reference.kind_fits(node, 0, request):
            return False
        if node.shape.gpus[0].memory_mib < share_of(request):
            return False
        return request.gpus == 1 or node.cpus >= cpus_of(request)

    def weight(self, request: Request, count: int) -> int:
        """Of a usual request, wherever it could go; the dearer the fewer GPUs are in reach."""
        gpus = sum(len(node.gpus) for node in self.nodes)
        within_reach = sum(len(node.gpus) for node in self.nodes if self.could_take(node, request))
        scarcity = min(gpus * 1024 // within_reach, 1024 * 1024)
        return count * ONE // sum(count for _, count in self.usual) * scarcity // 1024

    def prices(self, node: Node) -> tuple[list[int], list[int], int]:
        """Worth of a GPU by level, worth of k idle GPUs together, price of a thousandth of a CPU."""
        if not alike(node):
            return [level * ONE for level in range(LEVELS + 1)], [0] * 17, 0
        weights, block, cpu, at = [0] * (LEVELS + 1), [0] * 17, 0, kappa(node)
        for request, count in self.usual:
            if not self.could_take(node, request):
                continue
            w = self.weight(request, count)
            levels = needed(share_of(request), node.shape.gpus[0].memory_mib) if share_of(request) else LEVELS
            if request.gpus > 1:
                once = w * levels * request.gpus // 10
                block = [worth + once * (k // request.gpus) for k, worth in enumerate(block)]
                continue
            # May ask 1.6 times as many CPUs as there are.
            if at is not None and 10 * cpus_of(request) * LEVELS > 16 * levels * lower_bound(at):
                cpu = min(cpu + 2 * w * levels * CPU_ONE // cpus_of(request), 1 << 32)
            else:
                weights = [weight + (w if level >= levels else 0) for level, weight in enumerate(weights)]
        return [level * weight for level, weight in enumerate(weights)], block, cpu

    def score(
        self, node: Node, cpus: int, share: int, count: int, fit: Sequence[int], whole: list[int]
    ) -> tuple[int, list[int]]:
        """The score, and the GPUs: `whole` where whole ones are asked, else those of `fit` that lose least."""
        worth, block, cpu = self.prices(node)
        idle = sum(node.idle(gpu) for gpu in node.gpus)
        loss, chosen, taken = cpus * cpu // CPU_ONE, list(whole), count
        if share and count:
            chosen, taken = [], 0
            for _ in range(count):
                options = []
                for gpu in fit:
                    if gpu in chosen:
                        continue
                    memory = node.shape.gpus[gpu].memory_mib
                    level = node.free(gpu) * LEVELS // memory
                    single = worth[level] - worth[max(0, level - needed(share, memory))]
                    extra = block[idle - taken] - block[idle - taken - 1] if node.idle(gpu) else 0
                    options.append((single + extra, gpu, single))
                _, gpu, single = min(options)
                chosen.append(gpu)
                taken += node.idle(gpu)
                loss += single
        else:
            loss += count * worth[LEVELS]
        loss += block[idle] - block[idle - taken]
        return -(loss // STEP), sorted(chosen)


def needed(share: int, memory: int) -> int:
    """Levels that a share takes, rounded up."""
    return -(-share * LEVELS // memory)
