"""The GPUs that nodes have: which type a job's untyped GPUs and shards were of, and how much there is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from policy.live import gpus_in
from sluice.base.errors import SluiceError, UsageError
from sluice.base.hostlist import expand
from sluice.exchange.pool_costs import PoolCosts
from sluice.slurm.answers import Node


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """What one node has."""

    gpu_type: str  # the most frequent GRES type; empty: untyped or none
    types: Mapping[str, int]
    gpus: int
    shards: int

    @property
    def mib_per_gpu(self) -> float:
        """Memory of a GPU by the shards; 0: not known."""
        return self.shards / self.gpus if self.gpus else 0.0


@dataclass(frozen=True)
class Fleet:
    """All nodes by name, the classes that the policy made of the types, and nodes of pools that were deleted."""

    nodes: Mapping[str, NodeGpus] = field(default_factory=dict)
    classes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # class -> GRES types
    gone: Mapping[str, NodeGpus] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[Node], pools: Mapping[str, PoolCosts]) -> Fleet:
        """From slurmctld's nodes, and what fleetd knows of those that had machines."""
        found = {node.name: _node_gpus(node.gres) for node in nodes}
        had = {node: gres for pool in pools.values() for node, gres in pool.gres.items()}
        gone = {node: _node_gpus(gres) for node, gres in had.items() if node not in found}
        return cls(found, gone=gone)

    def with_classes(self, classes: Mapping[str, Iterable[str]]) -> Fleet:
        """The same with these classes of types."""
        return replace(self, classes={name: frozenset(types) for name, types in classes.items()})

    def of_node(self, name: str) -> NodeGpus | None:
        """The GPUs of a node, also of one that was deleted."""
        return self.nodes.get(name) or self.gone.get(name)

    def of_job(self, nodes: str) -> NodeGpus | None:
        """The GPUs of a job's first node that is known."""
        names = hosts(nodes)
        return next((known[name] for known in (self.nodes, self.gone) for name in names if name in known), None)

    def types(self) -> dict[str, int]:
        """GPUs of the cluster by type."""
        found: dict[str, int] = {}
        for node in self.nodes.values():
            for name, count in node.types.items():
                found[name] = found.get(name, 0) + count
        return found

    def class_of(self, gpu_type: str) -> str:
        """The policy's class of a type; the type itself where the policy has none."""
        return next((name for name, types in self.classes.items() if gpu_type in types), gpu_type)

    def types_of(self, names: Iterable[str]) -> frozenset[str]:
        """The GRES types of classes or types. Raises UsageError for one that nobody knows."""
        found: set[str] = set()
        known = set(self.types()) | {name for one in self.gone.values() for name in one.types}
        for name in names:
            if name in self.classes:
                found |= self.classes[name]
            elif name in known:
                found.add(name)
            else:
                raise UsageError(
                    f"--gpu-class {name!r}: no such class or type",
                    remedy=f"known are {', '.join(sorted(known | set(self.classes))) or 'none'}",
                )
        return frozenset(found)


def _node_gpus(gres: str) -> NodeGpus:
    types, shards = gpus_in(gres)
    most = max(types, key=lambda name: types[name], default="")
    return NodeGpus(most, types, sum(types.values()), shards)


@lru_cache(maxsize=8192)
def hosts(expression: str) -> tuple[str, ...]:
    """The nodes of a hostlist; none of one that cannot be read."""
    try:
        return tuple(expand(expression))
    except SluiceError:
        return ()
