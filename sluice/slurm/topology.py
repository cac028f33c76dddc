"""topology.conf and topology.yaml: what slurmctld reads of the network, how it is written, and how slurmctld shows it.

The formats are those of topology.conf(5) and topology.yaml(5), which slurmctld 25.05 and later read first. Nothing here
raises for the content of a file: what slurmctld would refuse becomes a `Fault`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.hostlist import hosts
from sluice.slurm.slurm_conf import ConfigFile, Fault, Line, Place, parse_text, slurm_hostlist

YAML_SINCE = (25, 5, 0)
KINDS = ("block", "flat", "ring", "torus3d", "tree")
_MOST_TEXT = 1024
_NOWHERE = Place(Path())
_HEADER = "# Written by `sluice fabric discover`. See sluice-fabric(1).\n"
_KEYS = {
    "switchname": frozenset({"switchname", "nodes", "switches", "linkspeed"}),
    "blockname": frozenset({"blockname", "nodes"}),
    "blocksizes": frozenset({"blocksizes"}),
}


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch, which has either nodes or switches; or a block of nodes, which are joined better than others."""

    name: str
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    place: Place = _NOWHERE


@dataclass(slots=True)
class Topology:
    """One topology; that of topology.conf has no name."""

    kind: str
    name: str = ""
    default: bool = False
    switches: list[Switch] = field(default_factory=list)
    blocks: list[Switch] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)

    def groups(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each leaf switch, or of each block."""
        named = self.blocks if self.kind == "block" else [switch for switch in self.switches if switch.nodes]
        return {one.name: one.nodes for one in named}

    def nodes(self) -> list[str]:
        """All nodes that it names, each once, in its order."""
        return list(dict.fromkeys(node for nodes in self.groups().values() for node in nodes))


@dataclass(slots=True)
class TopologyFile:
    """What a file says; with faults, slurmctld does not start."""

    path: Path
    topologies: list[Topology] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def read_topology_conf(config: ConfigFile) -> TopologyFile:
    """topology.conf, of topology/tree or topology/block."""
    found = TopologyFile(config.path, faults=[fault for fault in config.faults if fault.kind != "repeated"])
    kinds = {line.head.key.lower()[:5] for line in config.lines if line.head.key.lower() in _KEYS}
    topology = Topology("block" if "block" in kinds else "tree")
    for line in config.lines:
        keys = _KEYS.get(line.head.key.lower())
        unknown = [pair for pair in line.pairs if keys is None or pair.key.lower() not in keys]
        if unknown:
            found.faults.append(Fault("syntax", f"{unknown[0].key} is not known in topology.conf", line.place))
        elif kinds == {"switc", "block"} and line.head.key.lower() == "switchname":
            found.faults.append(Fault("syntax", "SwitchName among blocks", line.place))
        else:
            _read_line(line, topology, found.faults)
    found.topologies.append(topology)
    return found


def _read_line(line: Line, topology: Topology, faults: list[Fault]) -> None:
    names: dict[str, tuple[str, ...]] = {}
    for key in ("nodes", "switches"):
        value = line.get(key)
        expanded = slurm_hostlist(value.text) if value else []
        if expanded is None:
            faults.append(Fault("syntax", f"{key} is no hostlist", line.place))
        names[key] = tuple(expanded or ())
    match line.head.key.lower():
        case "switchname":
            topology.switches.append(Switch(line.head.text, names["nodes"], names["switches"], line.place))
        case "blockname":
            topology.blocks.append(Switch(line.head.text, names["nodes"], place=line.place))
        case "blocksizes":
            sizes = line.head.text.split(",")
            if all(size.isascii() and size.isdecimal() and len(size) < 8 for size in sizes):
                topology.block_sizes = [int(size) for size in sizes]
            else:
                faults.append(Fault("syntax", f"BlockSizes={line.head.text} are not numbers", line.place))


def read_topology_yaml(path: Path, text: bytes) -> TopologyFile:
    """topology.yaml: topologies of any kind."""
    import yaml

    found = TopologyFile(path)
    place = Place(path)
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found.faults.append(Fault("syntax", " ".join(str(error).split()), place))
        return found
    if not isinstance(document, list) or not document:
        found.faults.append(Fault("syntax", "not a list of topologies", place))
        return found
    for entry in document:
        wrong = _wrong_in(entry)
        if wrong:
            found.faults.append(Fault("syntax", wrong, place))
            return found
        found.topologies.append(_of_yaml(entry, place))
    return found


def _wrong_in(entry: object) -> str:
    if not isinstance(entry, dict) or not _word(entry.get("topology")):
        return "an entry without topology, its name"
    if sum(kind in entry for kind in KINDS) != 1:
        return f"topology {entry['topology']} has not exactly one of {', '.join(KINDS)}"
    return ""


def _of_yaml(entry: Mapping[str, Any], place: Place) -> Topology:
    kind = next(kind for kind in KINDS if kind in entry)
    body = entry[kind] if isinstance(entry[kind], dict) else {}
    sizes = body.get("block_sizes")
    return Topology(
        kind,
        _word(entry["topology"]),
        entry.get("cluster_default") is True,
        switches=[
            Switch(_word(one.get("switch")), _names(one.get("nodes")), _names(one.get("children")), place)
            for one in _mappings(body.get("switches"))
        ],
        # A ring or torus has blocks of nodes by other names; what is checked of them is the same.
        blocks=[
            Switch(_word(one.get("block") or one.get("ring") or one.get("torus")), nodes, place=place)
            for key in ("blocks", "rings", "toruses")
            for one in _mappings(body.get(key))
            if (nodes := tuple(_all_nodes(one)))
        ],
        block_sizes=[size for size in sizes if isinstance(size, int)] if isinstance(sizes, list) else [],
    )


def _mappings(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _names(value: object) -> tuple[str, ...]:
    return tuple(slurm_hostlist(value) or ()) if isinstance(value, str) else ()


def _word(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _all_nodes(value: object) -> Iterator[str]:
    """The nodes of every key `nodes`, however deep; what YAML's aliases repeat, or put into itself, counts once."""
    seen: set[int] = set()
    waiting = [("", value)]
    while waiting:
        key, inner = waiting.pop()
        if key == "nodes":
            yield from _names(inner)
        elif isinstance(inner, dict | list) and id(inner) not in seen:
            seen.add(id(inner))
            below = list(inner.items()) if isinstance(inner, dict) else [("", one) for one in inner]
            waiting += reversed(below)


def read_topology(path: Path) -> TopologyFile:
    """Either file, by its name. Raises OSError where it cannot be read."""
    data = path.read_bytes()
    if path.suffix == ".yaml":
        return read_topology_yaml(path, data)
    return read_topology_conf(parse_text(data.decode("utf-8", "surrogateescape"), path))


def topology_conf(topology: Topology) -> str:
    """The text of topology.conf."""
    lines = [_HEADER]
    if topology.kind == "block":
        lines += [f"BlockName={block.name} Nodes={hosts(block.nodes)}\n" for block in topology.blocks]
        lines.append(f"BlockSizes={','.join(map(str, topology.block_sizes))}\n")
    else:
        for switch in topology.switches:
            below = f"Nodes={hosts(switch.nodes)}" if switch.nodes else f"Switches={hosts(switch.switches)}"
            lines.append(f"SwitchName={switch.name} {below}\n")
    return "".join(lines)


def topology_yaml(topologies: Sequence[Topology]) -> str:
    """The text of topology.yaml."""
    import yaml

    document = [
        {"topology": one.name, "cluster_default": one.default, one.kind: _body_of(one)}  # the name must be first
        for one in topologies
    ]
    return _HEADER + yaml.safe_dump(document, sort_keys=False, width=160)


def _body_of(topology: Topology) -> dict[str, object]:
    if topology.kind == "block":
        blocks = [{"block": block.name, "nodes": hosts(block.nodes)} for block in topology.blocks]
        return {"block_sizes": topology.block_sizes, "blocks": blocks}
    return {
        "switches": [
            {"switch": switch.name}
            | ({"nodes": hosts(switch.nodes)} if switch.nodes else {"children": hosts(switch.switches)})
            for switch in topology.switches
        ]
    }


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once, each once, in order."""
    seen: set[str] = set()
    return list(dict.fromkeys(name for name in names if name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def not_in_tree(switches: Sequence[Switch]) -> list[Switch]:
    """Switches that are above or below themselves: on a loop."""
    children = {switch.name: switch.switches for switch in switches}
    state: dict[str, bool] = {}  # whether what is below it is known to have no loop
    looped = set()
    for start in children:
        path = [(start, iter(children[start]))] if start not in state else []
        state.setdefault(start, False)
        while path:
            name, rest = path[-1]
            below = next(rest, None)
            if below is None:
                state[name] = True
                path.pop()
            elif below in children and below not in state:
                state[below] = False
                path.append((below, iter(children[below])))
            elif state.get(below) is False:
                looped.add(below)
    return [switch for switch in switches if switch.name in looped]


def roots(switches: Sequence[Switch]) -> list[Switch]:
    """Switches below no other."""
    below = {name for switch in switches for name in switch.switches}
    return [switch for switch in switches if switch.name not in below]


def switch_rows(said: str) -> Iterator[dict[str, Any]]:
    """The switches and blocks in `scontrol show topology`; none where it says that there is no topology."""
    for line in said.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        name = fields.get("SwitchName") or fields.get("BlockName")
        if name:
            level = fields.get("Level", "0")
            yield {
                "name": name[:_MOST_TEXT],
                "kind": "switch" if "SwitchName" in fields else "block",
                "level": int(level) if level.isdecimal() else 0,
                "nodes": fields.get("Nodes", ""),
                "switches": fields.get("Switches", ""),
            }
