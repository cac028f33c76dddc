"""A provider's own view of its network, through adapters: entry points of ``sluice.fabric_providers``.

An adapter is a function of settings (words from the command line) that returns where each machine is. It raises
SluiceError where the provider refuses or does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise

from sluice.base.errors import UsageError
from sluice.fabric.model import Device, End, Link, Reported

GROUP = "sluice.fabric_providers"


@dataclass(frozen=True, slots=True)
class Located:
    """A machine: the node's name, and the provider's switches above it, the topmost first."""

    node: str
    path: tuple[str, ...]


Provider = Callable[[Mapping[str, str]], Iterable[Located]]


def ask_provider(name: str, settings: Mapping[str, str]) -> Reported:
    """The provider's view as a fabric: providers tell of the way to a machine, not of its cables."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise UsageError(f"provider {name!r}: not known", remedy=f"choose from {', '.join(sorted(known))}")
    read: Provider = known[name].load()
    return located(read(settings))


def located(machines: Iterable[Located]) -> Reported:
    """Paths as switches and links."""
    devices: dict[str, Device] = {}
    links: dict[tuple[str, str], Link] = {}
    for machine in machines:
        path = [*machine.path, f"node {machine.node}"]
        for switch in machine.path:
            devices.setdefault(switch, Device(switch, switch))
        devices.setdefault(path[-1], Device(path[-1], "", machine.node))
        for above, below in pairwise(path):
            links.setdefault((above, below), Link(End(above, below), End(below, "up")))
    return Reported(list(devices.values()), list(links.values()))
