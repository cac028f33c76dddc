"""What was discovered against what is configured, and against what nodes report of themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping

from gres_probe.inventory import Inventory, Nic
from gres_probe.machine import natural
from sluice.base.hostlist import fold
from sluice.fabric.model import Fabric, FabricProblem
from sluice.slurm.topology import Topology, repeated

_REWRITE = "write it again with: sluice fabric discover --write"


def compare(configured: Topology, discovered: Topology) -> Iterator[FabricProblem]:
    """Nodes that are together in one and apart in the other; names of switches and blocks do not matter."""
    mine, found = _group_of(configured), _group_of(discovered)
    word, several = ("block", "blocks") if configured.kind == "block" else ("leaf switch", "leaf switches")
    if absent := mine.keys() - found.keys():
        what = f"{_nodes(absent)}: configured, not discovered"
        yield FabricProblem("not-discovered", what, "check their links, or remove them from the topology")
    if unknown := found.keys() - mine.keys():
        yield FabricProblem("not-configured", f"{_nodes(unknown)}: discovered, not configured", _REWRITE)
    belongs: dict[str, str] = {}  # configured group -> the discovered one of most of its nodes
    for group, nodes in configured.groups().items():
        places = Counter(found[node] for node in nodes if node in found)
        if not places:
            continue
        belongs[group] = places.most_common(1)[0][0]
        for place in sorted(places.keys() - {belongs[group]}, key=natural):
            moved = [node for node in nodes if found.get(node) == place]
            what = (
                f"{_nodes(moved)}: configured in {word} {group}, whose other nodes are on {belongs[group]}; on {place}"
            )
            yield FabricProblem("other-place", what, _REWRITE)
    for place in repeated(belongs.values()):
        groups = [group for group, other in belongs.items() if other == place]
        what = f"{several} {', '.join(groups)} are one: {place}"
        yield FabricProblem("split", what, _REWRITE)


def _group_of(topology: Topology) -> dict[str, str]:
    return {node: group for group, nodes in topology.groups().items() for node in nodes}


def _nodes(names: Collection[str]) -> str:
    return fold(sorted(names, key=natural))


def adapters_by_guid(inventories: Mapping[str, Inventory]) -> dict[str, tuple[str, str]]:
    """Node and name of each adapter by its GUID, without GUIDs that several adapters claim."""
    claims = [(nic.guid, node, nic.name) for node, one in inventories.items() for nic in one.nics if nic.guid]
    shared = set(repeated(guid for guid, _, _ in claims))
    return {guid: (node, name) for guid, node, name in claims if guid not in shared}


def measured(
    fabric: Fabric, inventories: Mapping[str, Inventory], configured: Topology | None
) -> Iterator[FabricProblem]:
    """What nodes report of their own adapters and links, where it contradicts the fabric or the configuration."""
    yield from _ports(inventories)
    yield from _unseen(fabric, inventories)
    yield from _shared_guids(inventories)
    if configured is not None and configured.kind == "block":
        yield from _domains(inventories, configured)


def _ports(inventories: Mapping[str, Inventory]) -> Iterator[FabricProblem]:
    rates: dict[str, Counter[float]] = defaultdict(Counter)
    ports = [
        (node, nic, port)
        for node, inventory in inventories.items()
        for nic in inventory.nics
        if not nic.parent  # a virtual function's state is its physical one's
        for port in nic.ports
    ]
    for _, nic, port in ports:
        if port.state == "ACTIVE" and port.rate_gbps:
            rates[nic.name][port.rate_gbps] += 1
    for node, nic, port in ports:
        place = f"{node} {nic.name} port {port.number}"
        if port.state and port.state != "ACTIVE":
            what = f"{place}: {port.state}{f' ({port.physical_state})' if port.physical_state else ''}"
            yield FabricProblem("port-down", what, "check the cable and the switch's port; see the kernel's log")
        elif port.rate_gbps and rates[nic.name][port.rate_gbps] * 2 < rates[nic.name].total():
            usual = rates[nic.name].most_common(1)[0][0]
            what = f"{place}: {port.rate_gbps:g} Gb/s, {nic.name} of most nodes {usual:g}"
            yield FabricProblem("other-rate", what, "reseat or replace the cable")


def _unseen(fabric: Fabric, inventories: Mapping[str, Inventory]) -> Iterator[FabricProblem]:
    """Adapters of InfiniBand with a port that is up, which the fabric does not have."""
    if not any(device.node and len(device.id) == 16 for device in fabric.devices.values()):
        return  # no source with GUIDs
    for node, inventory in inventories.items():
        for nic in inventory.nics:
            if nic.guid and _is_up(nic) and nic.guid not in fabric.devices:
                what = f"{node} {nic.name}: its GUID {nic.guid} is not in the fabric, and its port is active"
                yield FabricProblem("not-in-fabric", what, "is it plugged into another fabric? discover that, too")


def _is_up(nic: Nic) -> bool:
    return any(port.state == "ACTIVE" and port.link_layer == "InfiniBand" for port in nic.ports)


def _shared_guids(inventories: Mapping[str, Inventory]) -> Iterator[FabricProblem]:
    owners: dict[str, list[str]] = defaultdict(list)
    for node, inventory in inventories.items():
        for nic in inventory.nics:
            if nic.guid:
                owners[nic.guid].append(f"{node} {nic.name}")
    for guid, adapters in owners.items():
        if len(adapters) > 1:
            what = f"{guid} is the GUID of {', '.join(adapters[:8])}"
            yield FabricProblem("duplicate-guid", what, "give each adapter its own GUID (its maker's flash tool)")


def _domains(inventories: Mapping[str, Inventory], configured: Topology) -> Iterator[FabricProblem]:
    """Blocks whose nodes are in different domains of links."""
    for block in configured.blocks:
        domains: dict[str, list[str]] = defaultdict(list)
        for node in block.nodes:
            for gpu in inventories[node].gpus if node in inventories else ():
                if gpu.fabric is not None:
                    domains[f"{gpu.fabric.cluster_uuid} clique {gpu.fabric.clique}"].append(node)
        if len(domains) > 1:
            parts = "; ".join(f"{_nodes(set(nodes))} in {domain}" for domain, nodes in domains.items())
            yield FabricProblem("split-domain", f"block {block.name}: {parts}", _REWRITE)
