"""`nics.sluice.conf` next to slurm.conf: which GPUs and RDMA interfaces of each node the placement pairs, and in which
plane of the network each interface is."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

from gres_probe.inventory import Inventory, LinkType, Nic
from sluice.base.errors import SluiceError

NICS_FILE = "nics.sluice.conf"
SWITCHED = frozenset({LinkType.PCI_SWITCH, LinkType.PCI_BRIDGES})
_HEAD = "sluice-nics 1\n"
_MOST_NODES, _MOST_GPUS, _MOST_NICS, _MOST_NAME = 65_536, 16, 32, 63  # that the plugin takes


def nic_groups(inventory: Inventory, gpus: Sequence[int], nics: Sequence[Nic]) -> str | None:
    """The node's line: a group for each of its devices, which are of these GPUs, and for each interface; those of one
    group reach each other through PCIe switches alone. None where the placement cannot pair them."""
    if not gpus or not nics or len(gpus) > _MOST_GPUS or len(nics) > _MOST_NICS or len(inventory.node) > _MOST_NAME:
        return None
    places = {id(nic): len(inventory.gpus) + place for place, nic in enumerate(inventory.nics)}
    groups: list[set[int]] = []
    for nic in nics:
        near = {place for place, link in enumerate(nic.links) if link.type in SWITCHED} | {places[id(nic)]}
        joined = [group for group in groups if group & near]
        groups = [group for group in groups if not group & near] + [near.union(*joined)]
    numbers: dict[int, int] = {}  # a device in no group is alone in its own

    def number(place: int) -> int:
        whole = next((group for group in groups if place in group), {place})
        return numbers.setdefault(min(whole), len(numbers))

    of_gpus = ",".join(str(number(gpu)) for gpu in gpus)
    return f"{inventory.node} {of_gpus} {','.join(str(number(places[id(nic)])) for nic in nics)}"


def with_planes(line: str, planes: Sequence[int]) -> str:
    """A node's line with the plane of each interface, from 1; 0: not known. Instead of those that it has."""
    node, of_gpus, of_nics = without_planes(line).split(" ")
    groups = of_nics.split(",")
    return f"{node} {of_gpus} " + ",".join(
        f"{group}/{plane}" if plane else group for group, plane in zip(groups, planes, strict=True)
    )


def without_planes(line: str) -> str:
    """A node's line as `nic_groups` makes it."""
    return re.sub(r"/\d+", "", line)


def keep_planes(lines: Iterable[str], old: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The lines with the planes of `old` (the line of each node), and the nodes that lose them, as their interfaces are
    others."""
    kept, lost = [], []
    for line in lines:
        before = old.get(line.partition(" ")[0], line)
        same = without_planes(before) == line
        kept.append(before if same else line)
        lost += [line.partition(" ")[0]] if not same and "/" in before else []
    return kept, lost


def read(text: str) -> dict[str, str]:
    """The line of each node. Raises SluiceError for a file that `render` has not written."""
    body, _, _ = text.rpartition("checksum = ")
    lines = body.removeprefix(_HEAD).splitlines()
    if text != render(lines):
        raise SluiceError("not as it was written: head, number of nodes, or checksum", remedy="write it again")
    return {line.partition(" ")[0]: line for line in lines}


def render(lines: Iterable[str]) -> str:
    """The file's text; nodes that are too many are left out, and get the policy's GPUs."""
    body = _HEAD + "".join(f"{line}\n" for line in list(lines)[:_MOST_NODES])
    return f"{body}checksum = crc32:{zlib.crc32(body.encode()):08x}\n"
