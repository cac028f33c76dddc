"""nics.sluice.conf, by which the placement pairs GPUs with RDMA interfaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_probe.lint.gres_lines import NodeGres
from gres_probe.lint.rules import RULES, Finding, Site
from gres_probe.nic_groups import nic_groups, read, without_planes
from gres_probe.writer import node_devices, node_nics
from sluice.base.errors import SluiceError
from sluice.slurm.slurm_conf import Place


def check(site: Site, nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """Whether slurmctld takes it, and whether it has the nodes that offer interfaces as their inventories do."""
    offering = [node for node in nodes if "nic" in node.configured]
    if site.nics is None or not offering:
        return
    place = Place(site.nics)
    try:
        lines = read(site.nics.read_text(errors="replace"))
    except OSError as error:
        yield Finding(RULES["SL080"], str(error.strerror), place)
        return
    except SluiceError as error:
        yield Finding(RULES["SL080"], error.what, place)
        return
    for node in offering:
        name = node.definition.name
        inventory = site.inventories.get(name)
        if inventory is None:
            continue
        try:
            gpus = [device.gpu for device in node_devices(inventory)]
        except SluiceError:  # the GPUs' own rules name it
            continue
        nics = node_nics(inventory, typed=bool(node.configured["nic"].types))
        wanted, found = nic_groups(inventory, gpus, nics), lines.get(name)
        found = found and without_planes(found)
        if wanted != found:
            what = f"it has {_groups(found)}, the inventory {_groups(wanted)}"
            yield Finding(RULES["SL081"], what, place, (name,))


def _groups(line: str | None) -> str:
    """A node's groups without its name, so that equal nodes are one finding."""
    return "no line" if line is None else line.partition(" ")[2]
