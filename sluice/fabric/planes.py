"""In which plane of the fabric each RDMA interface of a node is, for the placement: nics.sluice.conf."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gres_probe.inventory import Inventory, Nic
from gres_probe.lint.slurm import parse_node_gres
from gres_probe.nic_groups import with_planes
from gres_probe.writer import node_nics
from sluice.fabric.model import Fabric, FabricProblem
from sluice.slurm.slurm_conf import SlurmConf

MOST_PLANES = 32
"""That the core takes."""


def planes_of(fabric: Fabric, nodes: Collection[str]) -> dict[str, dict[str, int]]:
    """The plane of each adapter of the nodes by its name, from 1, where nodes are plugged into several.

    Else the rail, where the adapters of nodes are on rails; else nothing. Adapters with ports in several, or in none,
    are left out.
    """
    for groups in (fabric.planes(), fabric.rails(nodes)):
        number = {switch: place for place, group in enumerate(groups, start=1) for switch in group}
        found = {
            node: {
                adapter.name: number[leaves[0]]
                for adapter in adapters
                if (leaves := [leaf for leaf in fabric.leaves_of(adapter.id) if leaf in number])
                and len({number[leaf] for leaf in leaves}) == 1
            }
            for node, adapters in fabric.adapters.items()
            if node in nodes
        }
        used = sorted({plane for planes in found.values() for plane in planes.values()})
        if any(len(set(planes.values())) > 1 for planes in found.values()) and len(used) <= MOST_PLANES:
            closer = {plane: place for place, plane in enumerate(used, start=1)}
            return {node: {name: closer[plane] for name, plane in planes.items()} for node, planes in found.items()}
    return {}


def lines_with_planes(
    lines: Mapping[str, str],
    planes: Mapping[str, Mapping[str, int]],
    inventories: Mapping[str, Inventory],
    slurm: SlurmConf,
) -> dict[str, str]:
    """The lines of nics.sluice.conf with these planes; as they are where the inventory has not as many interfaces."""
    return {node: _line(line, planes.get(node, {}), inventories.get(node), slurm) for node, line in lines.items()}


def _line(line: str, planes: Mapping[str, int], inventory: Inventory | None, slurm: SlurmConf) -> str:
    definition = slurm.nodes.get(line.partition(" ")[0])
    if inventory is None or definition is None:
        return line
    gres, _ = parse_node_gres(definition.text("gres"), "nic")
    nics = node_nics(inventory, typed=bool(gres.types))
    if len(nics) != line.rpartition(" ")[2].count(",") + 1:
        return line
    return with_planes(line, [_plane(nic, planes) for nic in nics])


def _plane(nic: Nic, planes: Mapping[str, int]) -> int:
    """By its own name, or by that of its only network interface, which LLDP knows."""
    names = [nic.name, *(port.network for port in nic.ports if len(nic.ports) == 1)]
    return next((planes[name] for name in names if name in planes), 0)


def compare_planes(written: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[FabricProblem]:
    """Nodes whose interfaces are in other planes than nics.sluice.conf says."""
    others: dict[tuple[str, str], list[str]] = {}
    for node, line in written.items():
        if wanted[node] != line:
            others.setdefault((_nics(line), _nics(wanted[node])), []).append(node)
    for (mine, found), nodes in others.items():
        what = f"{', '.join(nodes[:8])}: groups and planes of interfaces are {mine}, discovered {found}"
        yield FabricProblem("other-plane", what, "write them again with: sluice fabric discover --write")


def _nics(line: str) -> str:
    return line.rpartition(" ")[2]
