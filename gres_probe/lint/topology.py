"""topology.conf and topology.yaml, which slurmctld 25.05 and later read instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gres_probe.lint.rules import RULES, Finding, Site
from sluice.slurm.slurm_conf import Place
from sluice.slurm.topology import (
    YAML_SINCE,
    Topology,
    not_in_tree,
    read_topology_conf,
    read_topology_yaml,
    repeated,
    roots,
)

_READING_CONF = ("topology/tree", "topology/block")


def check(site: Site) -> Iterator[Finding]:
    """Whether slurmctld can read it, and whether its nodes and the topologies of partitions exist."""
    if site.topology is not None and site.version >= YAML_SINCE:
        yield from _check_yaml(site)
    elif site.topology_conf is not None and site.slurm.option("TopologyPlugin").lower() in _READING_CONF:
        read = read_topology_conf(site.topology_conf)
        for fault in read.faults:
            yield Finding(RULES["SL070"], fault.what, fault.place)
        if not read.faults:
            yield from _check_topology(read.topologies[0], site.slurm.nodes, read.path.name, Place(read.path))


def _check_yaml(site: Site) -> Iterator[Finding]:
    assert site.topology is not None  # noqa: S101 - the caller has looked
    place = Place(site.topology)
    if site.topology.with_suffix(".conf").exists():
        yield Finding(RULES["SL008"], "topology.conf", place)
    try:
        read = read_topology_yaml(site.topology, site.topology.read_bytes())
    except OSError as error:
        yield Finding(RULES["SL005"], str(error.strerror), place)
        return
    if read.faults:
        yield Finding(RULES["SL005"], read.faults[0].what, place)
        return
    for topology in read.topologies:
        yield from _check_topology(topology, site.slurm.nodes, f"topology {topology.name}", place)
    known = {topology.name for topology in read.topologies}
    for name, line in site.slurm.partitions.items():
        value = line.get("topology")
        if value is not None and value.text not in known:
            yield Finding(RULES["SL007"], f"Topology={value.text} of partition {name}", value.place)


def _check_topology(topology: Topology, known: Collection[str], title: str, place: Place) -> Iterator[Finding]:
    """One topology of either file; `title` names it."""
    for one in (*topology.switches, *topology.blocks):
        lacking = [name for name in one.nodes if name not in known]
        if lacking:
            yield Finding(RULES["SL006"], f"{lacking[0]} in {title}", one.place)
    twice = repeated(one.name for one in (*topology.switches, *topology.blocks))
    for name in twice:
        yield Finding(RULES["SL071"], f"{name} in {title}", place)
    if twice:
        return  # what follows is by name
    groups = list(topology.groups().values())
    for node in repeated(node for nodes in groups for node in dict.fromkeys(nodes))[:1]:
        yield Finding(RULES["SL075"], f"{node} in {title}", place)
    if topology.kind == "tree":
        yield from _check_tree(topology, known, title, place)
    elif topology.kind == "block":
        for block in topology.blocks:
            if topology.block_sizes and len(block.nodes) < topology.block_sizes[0]:
                what = f"{block.name} of {title} has {len(block.nodes)} of {topology.block_sizes[0]}"
                yield Finding(RULES["SL078"], what, block.place)


def _check_tree(topology: Topology, known: Collection[str], title: str, place: Place) -> Iterator[Finding]:
    names = {switch.name for switch in topology.switches}
    sound = True
    for switch in topology.switches:
        if bool(switch.nodes) == bool(switch.switches):
            sound = False
            yield Finding(RULES["SL072"], f"{switch.name} of {title}", switch.place)
        for child in switch.switches:
            if child not in names:
                sound = False
                yield Finding(RULES["SL073"], f"{child} below {switch.name} of {title}", switch.place)
    for switch in not_in_tree(topology.switches):
        sound = False
        yield Finding(RULES["SL074"], f"{switch.name} of {title}", switch.place)
    if not sound:
        return
    placed = set(topology.nodes())
    lacking = [name for name in known if name not in placed]
    if lacking:
        yield Finding(RULES["SL076"], f"{lacking[0]}, not in {title}", place)
    tops = roots(topology.switches)
    if len(tops) > 1:
        yield Finding(RULES["SL077"], f"{tops[0].name} and {tops[1].name} of {title}", place)
