"""The one model of a fabric, which each source fills in, and what follows from it.

Devices are switches and the adapters of nodes; a link joins two ports. Nothing is guessed: what sources contradict
themselves in is a `FabricProblem`, and the device or link in question stays as it was reported first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gres_probe.machine import natural
from sluice.base.hostlist import fold


@dataclass(frozen=True, slots=True)
class Device:
    """A switch, or (with `node`) an adapter of a node; `id` is its GUID, chassis ID or the provider's name."""

    id: str
    name: str
    node: str = ""


@dataclass(frozen=True, slots=True, order=True)
class End:
    """A port of a device."""

    device: str
    port: str

    def __str__(self) -> str:
        return f"{self.device}[{self.port}]"


@dataclass(frozen=True, slots=True)
class Link:
    """A cable; `speed` is the source's own word, e.g. 4xNDR."""

    one: End
    other: End
    speed: str = ""


@dataclass(frozen=True, slots=True)
class FabricProblem:
    """What is wrong with the fabric itself; `kind` is one word for scripts."""

    kind: str
    what: str
    remedy: str


@dataclass(slots=True)
class Reported:
    """What a source reported, each link once or from both of its ends."""

    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    both_ends: bool = False  # whether the source reports each link from both of its ends


class Fabric:
    """A fabric and the problems found while its parts were put together."""

    def __init__(self, reported: Iterable[Reported]) -> None:
        self.devices: dict[str, Device] = {}
        self.links: list[Link] = []
        self._problems: dict[FabricProblem, None] = {}  # each once, in order
        self._ports: dict[End, Link] = {}
        for report in reported:
            self._add_devices(report.devices)
            self._add_links(report)

    def _add_devices(self, devices: Iterable[Device]) -> None:
        for device in devices:
            known = self.devices.setdefault(device.id, device)
            if known != device:
                self._problem(
                    "duplicate-guid",
                    f"{device.id} is both {_shown(known)} and {_shown(device)}",
                    "one of the two is a copy: give it its own GUID (its maker's flash tool), and discover again",
                )

    def _add_links(self, report: Reported) -> None:
        said = Counter(frozenset((link.one, link.other)) for link in report.links)
        for link in report.links:
            ends = frozenset((link.one, link.other))
            if link.one.device == link.other.device:
                near, far = sorted((link.one, link.other))
                self._problem("loop", f"{self.at(near)} leads to {self.at(far)}", "remove the cable")
                continue
            taken = [self._ports[end] for end in (link.one, link.other) if end in self._ports]
            if any(frozenset((old.one, old.other)) != ends for old in taken):
                old = next(old for old in taken if frozenset((old.one, old.other)) != ends)
                shared = next(end for end in (link.one, link.other) if end in (old.one, old.other))
                others = [self.at(_far(old, shared)), self.at(_far(link, shared))]
                self._problem(
                    "double-cable",
                    f"{self.at(shared)} leads to both {others[0]} and {others[1]}",
                    "see which cable is in the port, and discover again: it was moved, or a GUID is used twice",
                )
            elif not taken:
                self._ports[link.one] = self._ports[link.other] = link
                self.links.append(link)
                if report.both_ends and said[ends] < 2:
                    self._problem(
                        "one-sided",
                        f"{self.at(link.one)} leads to {self.at(link.other)}, which does not say so",
                        "discover again; where it stays, reseat the cable",
                    )

    def _problem(self, kind: str, what: str, remedy: str) -> None:
        self._problems[FabricProblem(kind, what, remedy)] = None

    @property
    def problems(self) -> list[FabricProblem]:
        """What the sources contradict themselves in."""
        return list(self._problems)

    def at(self, end: End) -> str:
        """A port as people know it: the device's name and the port."""
        device = self.devices.get(end.device)
        return f"{_shown(device) if device else end.device}[{end.port}]"

    @cached_property
    def neighbours(self) -> dict[str, list[str]]:
        """Devices next to each device, each once, in order of the links."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for link in self.links:
            found[link.one.device][link.other.device] = None
            found[link.other.device][link.one.device] = None
        return {device: list(others) for device, others in found.items()}

    @cached_property
    def adapters(self) -> dict[str, list[Device]]:
        """The adapters of each node, in natural order."""
        found: dict[str, list[Device]] = defaultdict(list)
        for device in self.devices.values():
            if device.node:
                found[device.node].append(device)
        return {node: sorted(found[node], key=lambda one: natural(one.name)) for node in sorted(found, key=natural)}

    def is_switch(self, device: str) -> bool:
        """Whether it is a switch; False for one that no source describes."""
        return device in self.devices and not self.devices[device].node

    def leaves_of(self, adapter: str) -> list[str]:
        """The switches that an adapter is plugged into."""
        return [device for device in self.neighbours.get(adapter, ()) if self.is_switch(device)]

    def planes(self) -> list[list[str]]:
        """Switches that reach each other without passing a node: one list a plane, in order of names."""
        rest = [device.id for device in self.devices.values() if not device.node]
        found, placed = [], set()
        for start in sorted(rest, key=self._by_name):
            if start in placed:
                continue
            group, edge = {start}, [start]
            while edge:
                reached = {one for one in self.neighbours.get(edge.pop(), ()) if self.is_switch(one)} - group
                group |= reached
                edge += reached
            placed |= group
            found.append(sorted(group, key=self._by_name))
        return found

    def rails(self, nodes: Collection[str] | None = None) -> list[list[str]]:
        """The leaf switches of each rail: of the first adapter of all nodes, of the second, ...

        Empty where adapters of different places share a leaf switch, so that there are no rails.
        """
        by_place: dict[int, dict[str, None]] = defaultdict(dict)
        for node, adapters in self.adapters.items():
            if nodes is None or node in nodes:
                for place, adapter in enumerate(one for one in adapters if self.leaves_of(one.id)):
                    by_place[place].update(dict.fromkeys(self.leaves_of(adapter.id)))
        leaves = [leaf for rail in by_place.values() for leaf in rail]
        if len(by_place) < 2 or len(leaves) != len(set(leaves)):
            return []
        return [sorted(by_place[place], key=self._by_name) for place in sorted(by_place)]

    def _by_name(self, device: str) -> list[tuple[int, str]]:
        return natural(self.devices[device].name)

    def judge(self, nodes: Collection[str]) -> list[FabricProblem]:
        """All problems, with nodes of `nodes` that are not there or are cut off, names used twice, and slow links."""
        return [*self.problems, *self._cut_off(nodes), *self._same_names(nodes), *self._slow_links()]

    def _cut_off(self, nodes: Collection[str]) -> Iterator[FabricProblem]:
        plugged = {
            node: {leaf for adapter in adapters for leaf in self.leaves_of(adapter.id)}
            for node, adapters in self.adapters.items()
            if node in nodes
        }
        absent = sorted((node for node in nodes if not plugged.get(node)), key=natural)
        if absent:
            what = f"{fold(absent)}: no port of theirs leads to a switch"
            yield FabricProblem(
                "unreachable", what, "check power, cable and port; or what the adapter calls its node (node_desc)"
            )
        planes = [set(plane) for plane in self.planes()]
        groups: dict[frozenset[int], list[str]] = defaultdict(list)
        for node, leaves in plugged.items():
            if leaves:
                groups[frozenset(place for place, plane in enumerate(planes) if plane & leaves)].append(node)
        largest = max(groups, key=lambda key: len(groups[key]), default=frozenset())
        for reached, cut in groups.items():
            if not reached & largest:
                what = f"{fold(cut)}: no path to the {len(groups[largest])} other nodes"
                yield FabricProblem("unreachable", what, "check the links between their switches and the others")

    def _same_names(self, nodes: Collection[str]) -> Iterator[FabricProblem]:
        named: dict[str, list[Device]] = defaultdict(list)
        for device in self.devices.values():
            named[_shown(device)].append(device)
        for name, devices in named.items():
            if len(devices) > 1:
                what = f"{name} is the name of {', '.join(sorted(device.id for device in devices))}"
                if devices[0].name and devices[0].node in nodes:
                    remedy = "two hosts of one name? give --inventory-dir, or correct the description (node_desc)"
                    yield FabricProblem("duplicate-adapter", what, remedy)
                else:
                    yield FabricProblem("duplicate-name", what, "give each a name of its own")

    def _slow_links(self) -> Iterator[FabricProblem]:
        """Links that came up slower than most others of their kind: between switches, or to nodes."""
        kinds: dict[bool, list[Link]] = defaultdict(list)
        for link in self.links:
            if link.speed:
                kinds[self.is_switch(link.one.device) and self.is_switch(link.other.device)].append(link)
        for links in kinds.values():
            usual, count = Counter(link.speed for link in links).most_common(1)[0]
            for link in links:
                if link.speed != usual and 2 * count > len(links):
                    what = f"{self.at(link.one)} to {self.at(link.other)} runs at {link.speed}, others at {usual}"
                    yield FabricProblem("other-speed", what, "reseat or replace the cable if it should be the same")


def _far(link: Link, near: End) -> End:
    return link.other if link.one == near else link.one


def _shown(device: Device) -> str:
    return f"{device.node} {device.name}".strip() if device.node else device.name


def renamed(reported: Reported, names: Mapping[str, tuple[str, str]], aliases: Mapping[str, str]) -> Reported:
    """Adapters by what nodes say: `names` has node and adapter by GUID, `aliases` nodes of Slurm by host name."""

    def of_slurm(device: Device) -> Device:
        if not device.node:
            return device
        node, name = names.get(device.id, (aliases.get(device.node, device.node), device.name))
        return Device(device.id, name, node)

    return Reported([of_slurm(device) for device in reported.devices], reported.links, reported.both_ends)
