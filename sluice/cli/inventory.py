"""`sluice inventory`: the GPUs of the cluster, as its nodes reported them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import UsageError
from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.cli.probe import COLUMNS as GPU_COLUMNS
from sluice.cli.probe import DROP_FOLDER, devices, tell_problems
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from gres_probe.collect import Collected
    from gres_probe.inventory import Gpu, Inventory

DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"

_folder = click.option(
    "--inventory-dir",
    type=click.Path(path_type=Path),
    default=Path(DROP_FOLDER),
    show_default=True,
    metavar="DIR",
    help="Where inventories are collected.",
)
_owners = click.option(
    "--owner",
    "owners",
    multiple=True,
    metavar="USER",
    help="Accept files of this user too, in addition to root's and your own; may be repeated.",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """A row: some GPUs of one or several nodes, with the nodes."""

    gpus: list[Gpu]
    nodes: list[Inventory]
    problems: int = 0  # what could not be read

    @property
    def memory(self) -> int | None:
        """Memory in MiB over all; None without GPUs."""
        return sum(gpu.memory_total_mib for gpu in self.gpus) if self.gpus else None

    @property
    def used(self) -> int | None:
        """Used memory in MiB over all; None if no driver reports it."""
        known = [gpu.memory_used_mib for gpu in self.gpus if gpu.memory_used_mib is not None]
        return sum(known) if known else None

    @property
    def utilisation(self) -> int | None:
        """Mean utilisation in percent of those whose drivers report it."""
        known = [gpu.utilisation_percent for gpu in self.gpus if gpu.utilisation_percent is not None]
        return round(sum(known) / len(known)) if known else None

    @property
    def health(self) -> str:
        """``ok`` when all are, else how many are what."""
        counts = Counter(str(gpu.health) for gpu in self.gpus)
        counts["unread"] = self.problems
        bad = [f"{count} {word}" for word, count in sorted(counts.items()) if count and word != "ok"]
        return ", ".join(bad) or ("ok" if self.gpus else "")


def _distinct(values: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(value for value in values if value))


def _models(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{count}x {model}" for model, count in Counter(gpu.model for gpu in gpus).items())


def _folded(nodes: Sequence[Inventory]) -> str:
    from sluice.base.hostlist import fold

    return fold(node.node for node in nodes)


_SUMMARY: list[Column[Summary]] = [
    Column("gpus", lambda row: len(row.gpus), right=True),
    Column("instances", lambda row: sum(len(gpu.partitions) for gpu in row.gpus), right=True),
    Column("memory", lambda row: row.memory, format_mib, right=True),
    Column("used", lambda row: row.used, format_mib, right=True),
    Column("util", lambda row: row.utilisation, lambda v: f"{v}%", right=True),
    Column("health", lambda row: row.health),
    Column("driver", lambda row: _distinct([gpu.driver_version for gpu in row.gpus])),
]
BY_NODE: list[Column[Summary]] = [
    Column("node", lambda row: row.nodes[0].node),
    *_SUMMARY,
    Column("models", lambda row: _models(row.gpus)),
    Column("sockets", lambda row: row.nodes[0].sockets, right=True),
    Column("nics", lambda row: len(row.nodes[0].nics), right=True),
    Column("probed", lambda row: row.nodes[0].probed_at),
]
BY_MODEL: list[Column[Summary]] = [
    Column("vendor", lambda row: row.gpus[0].vendor),
    Column("model", lambda row: row.gpus[0].model),
    Column("each", lambda row: row.gpus[0].memory_total_mib, format_mib, right=True),
    Column("capability", lambda row: _distinct([gpu.capability for gpu in row.gpus])),
    *_SUMMARY,
    Column("nodecount", lambda row: len(row.nodes), right=True),
    Column("nodes", lambda row: _folded(row.nodes)),
]
VIEWS: dict[str, tuple[list[Column[Any]], tuple[str, ...]]] = {
    "node": (BY_NODE, ("node", "gpus", "models", "memory", "used", "util", "health", "probed")),
    "model": (BY_MODEL, ("vendor", "model", "each", "gpus", "used", "util", "health", "nodes")),
    "gpu": (GPU_COLUMNS, ("node", "index", "vendor", "model", "memory", "used", "util", "temp", "uuid", "health")),
}


def _by_model(inventories: Sequence[Inventory]) -> list[Summary]:
    """One row for each model and memory size, the most numerous first."""
    gpus: dict[tuple[str, str, int], list[Gpu]] = {}
    nodes: dict[tuple[str, str, int], dict[str, Inventory]] = {}
    for inventory in inventories:
        for gpu in inventory.gpus:
            key = (gpu.vendor, gpu.model, gpu.memory_total_mib)
            gpus.setdefault(key, []).append(gpu)
            nodes.setdefault(key, {})[inventory.node] = inventory
    return [
        Summary(gpus[key], list(nodes[key].values())) for key in sorted(gpus, key=lambda key: (-len(gpus[key]), key))
    ]


@click.group("inventory", invoke_without_command=True)
@click.option("-w", "--nodelist", metavar="NODES", help="Only these nodes, as a hostlist such as node[01-04].")
@click.option("--by", type=click.Choice(list(VIEWS)), default="node", show_default=True, help="What a row is.")
@click.option("--json", "as_json", is_flag=True, help="All inventories as one JSON object.")
@table_options
@_folder
@_owners
@click.pass_context
def command(
    context: click.Context,
    nodelist: str | None,
    by: str,
    as_json: bool,
    table: TableOptions,
    inventory_dir: Path,
    owners: tuple[str, ...],
) -> None:
    """The GPUs of the cluster, as its nodes reported them when probed; exit 1 when a node's cannot be read."""
    if context.invoked_subcommand is not None:
        return
    from gres_probe.collect import load_inventories
    from sluice.base.hostlist import expand

    nodes = None if nodelist is None else expand(nodelist)
    collected = load_inventories(inventory_dir, nodes, owners=_user_numbers(owners))
    inventories = list(collected.inventories.values())
    _mark_withdrawn(inventories)
    if as_json:
        click.echo(json.dumps(_document(collected), indent=2))
    else:
        rows: list[Any]
        if by == "gpu":
            rows = [device for inventory in inventories for device in devices(inventory)]
        elif by == "model":
            rows = _by_model(inventories)
        else:
            rows = [Summary(node.gpus, [node], len(node.problems)) for node in inventories]
        columns, default = VIEWS[by]
        table.print(columns, rows, default=default)
    for failure in collected.failures.values():
        click.echo(f"sluice: {one_line(str(failure), limit=None)}", err=True)
    if tell_problems(inventories) or collected.failures:
        context.exit(1)


def _mark_withdrawn(inventories: Sequence[Inventory]) -> None:
    """Mark the GPUs that are out of service, for root and SlurmUser, who may ask the controllers' daemon.

    If no daemon answers, the inventories are used as they were collected.
    """
    from gres_probe.inventory import Health
    from gres_probe.writer import node_devices
    from sluice.base.errors import SluiceError
    from sluice.cli.health import ask_controllers

    try:
        rows = ask_controllers(list=True)["rows"]
    except (SluiceError, OSError):
        return
    out = {
        (row["node"], int(number)): row["reason"]
        for row in rows
        if row["state"] == "out"
        for number in row["gpu"].split(",")
    }
    for inventory in inventories:
        for number, device in enumerate(node_devices(inventory)):
            reason = out.get((inventory.node, number))
            if reason is not None:
                gpu = inventory.gpus[device.gpu]
                gpu.health = Health.FAILED
                gpu.health_reasons = [*gpu.health_reasons, f"out of service: {reason}"]


def _document(collected: Collected) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "nodes": [asdict(inventory) for inventory in collected.inventories.values()],
        "failures": {node: str(error) for node, error in collected.failures.items()},
    }


def _user_numbers(names: Sequence[str]) -> set[int] | None:
    if not names:
        return None
    import os
    import pwd

    numbers = {0, os.geteuid()}
    for name in names:
        try:
            numbers.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError as error:
            raise UsageError(f"--owner {name!r}: no such user", remedy="give a user's name or number") from error
    return numbers


@command.command("collect")
@click.argument("nodes", required=False)
@click.option(
    "--rsh",
    default=DEFAULT_RSH,
    show_default=True,
    metavar="COMMAND",
    help="Remote shell with its options; gets the node's name and the command as further words.",
)
@click.option("--srun", is_flag=True, help="Start a short job on each node instead; the node must be idle.")
@click.option(
    "--program", default="sluice", show_default=True, metavar="PATH", help="What to run on the nodes; with its options."
)
@click.option("--fanout", type=click.IntRange(1, 1024), default=32, show_default=True, help="Nodes at a time.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Give a node up after this long.",
)
@_folder
@click.pass_context
def collect_command(
    context: click.Context,
    nodes: str | None,
    rsh: str,
    srun: bool,
    program: str,
    fanout: int,
    timeout: float,
    inventory_dir: Path,
) -> None:
    """Probe NODES, a hostlist, from here and keep their inventories; without NODES all that Slurm knows."""
    from gres_probe.collect import collect, remote_shell_command, srun_command, write_inventory
    from gres_probe.inventory import Inventory
    from sluice.base.errors import SluiceError
    from sluice.base.hostlist import expand

    words = _words("--program", program)
    known = _slurm_gpus(nodes) if srun or not nodes else {}
    names = expand(nodes) if nodes else list(known)
    node_command = srun_command(words, known) if srun else remote_shell_command(_words("--rsh", rsh), words)
    failures: dict[str, SluiceError] = {}
    read: list[Inventory] = []
    results = collect(names, node_command, timeout=timeout, fanout=fanout)
    with click.progressbar(
        results, length=len(names), label="probing", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as progress:
        for node, result in progress:
            if isinstance(result, Inventory):
                write_inventory(inventory_dir, result)
                read.append(result)
            else:
                failures[node] = result
    for node in names:
        if node in failures:
            click.echo(f"sluice: {one_line(str(failures[node]), limit=None)}", err=True)
    problems = tell_problems(sorted(read, key=lambda inventory: names.index(inventory.node)))
    click.echo(f"{len(read)} of {len(names)} nodes, {sum(len(inventory.gpus) for inventory in read)} GPUs", err=True)
    if failures or problems:
        context.exit(1)


def _words(option: str, text: str) -> list[str]:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}", remedy="quote it as for a shell") from error
    if not words:
        raise UsageError(f"{option}: empty", remedy="name a program")
    return words


def _slurm_gpus(nodes: str | None) -> dict[str, str]:
    """The nodes that Slurm knows, or those of a hostlist, and the request for all GPUs of each, by type."""
    import re

    from sluice.slurm import connect

    gpus = re.compile(r"(?:^|,)(gpu(?::[^:,()]+)?:\d+)(?=[(,]|$)")
    return {node.name: ",".join(gpus.findall(node.gres)) for node in connect().nodes(nodes)}
