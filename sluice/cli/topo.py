"""`sluice topo`: how the GPUs of a node are joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.text import one_line
from sluice.cli.probe import DROP_FOLDER, probe_here, root_options, tell_problems

if TYPE_CHECKING:
    from gres_probe.inventory import Inventory, Link

LEGEND = (
    ("X", "itself"),
    ("NV#", "a number of NVLinks, directly or over NVSwitch"),
    ("XGMI#", "a number of xGMI links (Infinity Fabric); without number: over other GPUs"),
    ("XE#", "a number of Xe Links"),
    ("PIX", "at most one PCIe switch"),
    ("PXB", "several PCIe switches, not the host bridge"),
    ("PHB", "the PCIe host bridge, i.e. the processor"),
    ("NODE", "the interconnect between host bridges of one NUMA node"),
    ("SYS", "the interconnect between NUMA nodes"),
    ("?", "unknown"),
)


@click.command("topo")
@click.argument("node", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-P", "--parsable2", is_flag=True, help="The matrix with fields separated by '|', without the legend.")
@click.option("-n", "--noheader", is_flag=True, help="No header line and no legend.")
@click.option(
    "--inventory-dir",
    type=click.Path(path_type=Path),
    default=Path(DROP_FOLDER),
    show_default=True,
    metavar="DIR",
    help="Where inventories are collected.",
)
@root_options
@click.pass_context
def command(
    context: click.Context,
    node: str | None,
    as_json: bool,
    parsable2: bool,
    noheader: bool,
    inventory_dir: Path,
    vendors: tuple[str, ...],
    timeout: float,
    sys_root: Path,
    proc_root: Path,
    dev_root: Path | None,
) -> None:
    """How the GPUs of NODE are joined with each other and with its RDMA interfaces; without NODE: of this node."""
    if node is None:
        inventory = probe_here(vendors, timeout, sys_root, proc_root, dev_root, None)
    else:
        from gres_probe.collect import load_inventories

        collected = load_inventories(inventory_dir, [node])
        for failure in collected.failures.values():
            raise failure
        inventory = collected.inventories[node]
    if as_json:
        from gres_probe.topology import topology_document

        click.echo(json.dumps(topology_document(inventory), indent=2))
    elif not inventory.gpus:
        click.echo(f"{inventory.node}: no GPUs", err=True)
    else:
        _print_matrix(inventory, parsable2=parsable2, noheader=noheader)
    if node is None and tell_problems([inventory]):
        context.exit(1)


def _word(link: Link) -> str:
    return f"{link.type}{link.width or ''}"


def _print_matrix(inventory: Inventory, *, parsable2: bool, noheader: bool) -> None:
    from gres_probe.topology import labels_of

    labels = labels_of(inventory)
    names = labels + [f"NIC{number}" for number in range(len(inventory.nics))]
    size = len(labels)
    rows = [["", *names, "CPU Affinity", "NUMA Affinity"]]
    for position, gpu in enumerate(inventory.gpus):
        links = [*inventory.links[position], *(nic.links[position] for nic in inventory.nics)]
        numa = "" if gpu.numa_node is None else str(gpu.numa_node)
        rows.append([labels[position], *map(_word, links), gpu.cores, numa])
    for number, nic in enumerate(inventory.nics):
        numa = "" if nic.numa_node is None else str(nic.numa_node)
        rows.append([names[size + number], *map(_word, nic.links), "", numa])
    if noheader:
        del rows[0]
    if parsable2:
        click.echo("\n".join("|".join(row) for row in rows))
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not noheader:
        _print_legend(inventory, labels, {_word(link).rstrip("0123456789") for row in inventory.links for link in row})


def _print_legend(inventory: Inventory, labels: list[str], used: set[str]) -> None:
    from gres_probe.topology import link_domains

    used |= {str(link.type) for nic in inventory.nics for link in nic.links}
    click.echo("\nBest path:")
    for word, meaning in LEGEND:
        if word.rstrip("#") in used:
            click.echo(f"  {word:<5} = {meaning}")
    click.echo("\nGPUs:")
    for label, gpu in zip(labels, inventory.gpus, strict=True):
        click.echo(f"  {label}: {one_line(gpu.model)}, {gpu.pci_address}")
    if inventory.nics:
        click.echo("\nRDMA interfaces:")
        for number, nic in enumerate(inventory.nics):
            click.echo(f"  NIC{number}: {nic.name}")
    domains = [domain for domain in link_domains(inventory) if len(domain) > 1]
    if domains:
        click.echo("\nJoined by fast links:")
        for domain in domains:
            click.echo(f"  {', '.join(labels[position] for position in domain)}")
