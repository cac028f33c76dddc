"""The configuration against the inventories: what is configured and missing, or present and not configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gres_probe.cores import fold_ranges, slurm_cores, usual_numbering
from gres_probe.inventory import Inventory
from gres_probe.lint.gres_lines import NodeGres
from gres_probe.lint.rules import RULES, Finding, Site
from gres_probe.writer import Device, nic_counts, node_devices, node_nics
from sluice.base.errors import SluiceError


def check(site: Site, nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """Every node that has an inventory."""
    overridden = "config_overrides" in site.slurm.option("SlurmdParameters").lower()
    for node in nodes:
        inventory = site.inventories.get(node.definition.name)
        if inventory is not None:
            yield from _check_node(node, inventory, overridden)


def _check_node(node: NodeGres, inventory: Inventory, overridden: bool) -> Iterator[Finding]:
    name, place = (node.definition.name,), node.gres_place
    for problem in inventory.problems:
        which = "" if problem.index is None else f" {problem.index}"
        yield Finding(RULES["SL065"], f"{problem.vendor} GPU{which}: {problem.what}", place, name)
    try:
        devices = node_devices(inventory)
    except SluiceError as error:
        yield Finding(RULES["SL065"], error.what, place, name)
        return
    if node.autodetect in ("", "off"):
        yield from _check_devices(node, devices, inventory)
    wanted = node.configured["gpu"].count if "gpu" in node.configured else 0
    if wanted != len(devices):
        yield Finding(RULES["SL060"], f"Gres has {wanted} gpu, the inventory {len(devices)}", place, name)
    if "nic" in node.configured:
        yield from _check_nics(node, inventory)
    if overridden:
        return  # the site tells Slurm to trust slurm.conf
    sockets, cores, threads = node.definition.core_counts()
    have = (inventory.sockets or 0) * (inventory.cores_per_socket or 0) * (inventory.threads_per_core or 1)
    if have and sockets * cores * threads > have:
        what = f"{sockets * cores * threads} CPUs configured, {have} there"
        yield Finding(RULES["SL062"], what, node.definition.place, name)
    memory = node.definition.number("realmemory")
    if inventory.memory_mib and memory > inventory.memory_mib:
        what = f"RealMemory={memory}, {inventory.memory_mib} MiB there"
        yield Finding(RULES["SL063"], what, node.definition.place, name)


def _check_nics(node: NodeGres, inventory: Inventory) -> Iterator[Finding]:
    """Their number, and that of each type where they have types of the inventory's."""
    name, place, nics = (node.definition.name,), node.gres_place, node_nics(inventory)
    configured, there = node.configured["nic"], nic_counts(nics)
    if configured.count != len(nics):
        what = f"Gres has {configured.count} nic, the inventory {len(nics)}"
        yield Finding(RULES["SL068"], what, place, name)
    elif configured.types.keys() & there.keys() and configured.types != there:
        have, want = (", ".join(f"{kind}:{count}" for kind, count in one.items()) for one in (configured.types, there))
        yield Finding(RULES["SL068"], f"Gres has nic {have}, the inventory {want}", place, name)


def _check_devices(node: NodeGres, devices: Sequence[Device], inventory: Inventory) -> Iterator[Finding]:
    name = (node.definition.name,)
    by_file = {file: device for device in devices for file in device.files}
    shared = Counter(file for device in devices for file in device.files)
    numbering = inventory.cpu_cores or usual_numbering(
        (inventory.sockets or 0) * (inventory.cores_per_socket or 0), inventory.threads_per_core or 1
    )
    for gres in node.written:
        if gres.line is None or gres.name not in ("gpu", "shard"):
            continue
        unknown = [file for file in gres.files if file not in by_file]
        if unknown:
            yield Finding(RULES["SL061"], unknown[0], gres.line.place, name)
        unshared = [by_file[file] for file in gres.files if file in by_file and shared[file] == 1]
        if gres.name == "shard" and unshared and len(unshared) == len(gres.files):
            memory = sum(device.memory_mib for device in unshared)
            if gres.count > memory:
                what = f"Count={gres.count}, usable memory {memory} MiB"
                yield Finding(RULES["SL066"], what, gres.line.place, name)
        if gres.name != "gpu":
            continue
        for device in unshared:
            if gres.type and gres.type.lower() != device.type:
                yield Finding(RULES["SL067"], f"Type={gres.type}, the GPU is {device.type}", gres.line.place, name)
            near = fold_ranges(slurm_cores(device.cpus, numbering)) if numbering else ""
            if gres.cores and near and gres.cores != near:
                what = f"Cores={gres.cores}, near the GPU are {near}"
                yield Finding(RULES["SL064"], what, gres.line.place, name)
