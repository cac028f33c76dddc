"""From a fabric to what Slurm can know of it: a tree of switches, and blocks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from gres_probe.inventory import Inventory
from gres_probe.machine import natural
from sluice.fabric.model import Fabric, FabricProblem
from sluice.slurm.topology import Switch, Topology

_TOP = "fabric"


class _Sets:
    """Disjoint sets of words, which are joined."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, word: str) -> str:
        while (parent := self._parent.setdefault(word, word)) != word:
            self._parent[word] = self._parent.get(parent, parent)
            word = parent
        return word

    def join(self, words: Iterable[str]) -> None:
        first = None
        for word in words:
            first = self.find(word) if first is None else first
            self._parent[self.find(word)] = first

    def sets(self) -> list[list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for word in self._parent:
            found[self.find(word)].append(word)
        return list(found.values())


def tree_of(fabric: Fabric, nodes: Collection[str]) -> tuple[Topology, list[FabricProblem]]:
    """topology/tree for the given nodes, and what of the fabric it cannot express.

    Switches that share nodes (the rails of a unit, a pair that nodes are plugged into twice) are one switch for Slurm;
    so are switches of a level that are above the same ones. The first leaf switches in natural order come first.
    """
    plugged = {
        node: {leaf for adapter in fabric.adapters.get(node, ()) for leaf in fabric.leaves_of(adapter.id)}
        for node in sorted(nodes, key=natural)
    }
    level = _Sets()
    for leaves in plugged.values():
        level.join(sorted(leaves))
    members: dict[str, list[str]] = defaultdict(list)
    for node, leaves in plugged.items():
        if leaves:
            members[level.find(min(leaves))].append(node)
    names = _Names(fabric)
    topology = Topology("tree", "tree", default=True)
    open_units: dict[str, list[str]] = {}  # name of a unit without one above it -> its switches
    for switches in sorted(level.sets(), key=lambda one: natural(names.of(one))):
        name = names.give(switches)
        topology.switches.append(Switch(name, nodes=tuple(members[level.find(switches[0])])))
        open_units[name] = switches
    roots: dict[str, list[str]] = {}
    used = {switch for switches in open_units.values() for switch in switches}
    while len(open_units) > 1:
        open_units, finished = _next_level(fabric, open_units, used, topology, names)
        roots |= finished
    return topology, _join_roots(fabric, topology, roots | open_units, names)


def _next_level(
    fabric: Fabric, units: Mapping[str, Sequence[str]], used: set[str], topology: Topology, names: _Names
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The units above the given ones, and those of the given ones that have none above them."""
    above = {
        name: {
            other
            for switch in switches
            for other in fabric.neighbours.get(switch, ())
            if fabric.is_switch(other) and other not in used
        }
        for name, switches in units.items()
    }
    level = _Sets()
    for parents in above.values():
        level.join(sorted(parents))
    found: dict[str, list[str]] = {}
    for switches in sorted(level.sets(), key=lambda one: natural(names.of(one))):
        name = names.give(switches)
        topology.switches.append(
            Switch(name, switches=tuple(one for one, parents in above.items() if parents & set(switches)))
        )
        found[name] = switches
        used.update(switches)
    return found, {name: list(units[name]) for name, parents in above.items() if not parents}


def _join_roots(
    fabric: Fabric, topology: Topology, roots: Mapping[str, Sequence[str]], names: _Names
) -> list[FabricProblem]:
    """A switch above roots that reach each other although none is above both: rings, dragonflies, meshes."""
    problems = []
    reached = _Sets()
    for plane in map(set, fabric.planes()):
        reached.join(name for name, switches in roots.items() if plane.intersection(switches))
    for inside in reached.sets():
        if len(inside) > 1:
            name = names.once(_TOP)
            topology.switches.append(Switch(name, switches=tuple(inside)))
            what = f"{', '.join(inside[:8])} reach each other, but no switch is above them all"
            problems.append(
                FabricProblem("no-tree", what, f"a tree does not say how far they are: they are written below {name!r}")
            )
    return problems


class _Names:
    """Names of units, each given once: that of the first switch, after ``group-`` where there are several."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._given: set[str] = set()

    def of(self, switches: Sequence[str]) -> str:
        first = min((self._fabric.devices[one].name for one in switches), key=natural)
        word = re.sub(r"[^A-Za-z0-9_.-]+", "-", first).strip("-.") or "switch"
        return word if len(switches) == 1 else f"group-{word}"

    def give(self, switches: Sequence[str]) -> str:
        return self.once(self.of(switches))

    def once(self, wanted: str) -> str:
        """The name, with a number behind it where it is given already."""
        name = wanted
        number = 1
        while name in self._given:
            number += 1
            name = f"{wanted}-{number}"
        self._given.add(name)
        return name


def blocks_of(tree: Topology, inventories: Mapping[str, Inventory]) -> Topology:
    """topology/block: nodes whose GPUs share a domain of links, and without any such node the tree's leaf switches."""
    domains: dict[tuple[str, int], list[str]] = defaultdict(list)
    known = set(tree.nodes())
    for node in sorted(inventories, key=natural):
        if node in known:
            fabrics = {(gpu.fabric.cluster_uuid, gpu.fabric.clique) for gpu in inventories[node].gpus if gpu.fabric}
            if len(fabrics) == 1:
                domains[fabrics.pop()].append(node)
    if domains:
        blocks = [Switch(f"link{place}", tuple(nodes)) for place, nodes in enumerate(domains.values(), start=1)]
    else:
        blocks = [Switch(name, nodes) for name, nodes in tree.groups().items()]
    sizes = [min(len(block.nodes) for block in blocks)] if blocks else []
    return Topology("block", "block", blocks=blocks, block_sizes=sizes)
