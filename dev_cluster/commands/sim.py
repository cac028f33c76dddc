"""`sluice sim`: change and read the simulated GPUs of a cluster on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from sluice.base.errors import UsageError
from sluice.cli.tables import Column, TableOptions, table_options

_dir_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="The cluster's state folder, as of `sluice cluster`.",
)


@click.group(name="sim")
def command() -> None:
    """Change the simulated GPUs of a cluster on this machine, also while jobs run."""


@command.command(name="set")
@_dir_option
@click.argument("nodes")
@click.argument("gpus")
@click.argument("values", nargs=-1, required=True, metavar="FIELD=VALUE...")
def set_command(folder: Path | None, nodes: str, gpus: str, values: tuple[str, ...]) -> None:
    """Change fields of GPUS (numbers, a UUID, or all) on NODES (a hostlist).

    \b
    sluice sim set h100-1 0 ecc_uncorrected=1 xid=48
    sluice sim set mi300x-1 all temperature=95
    sluice sim set mig-1 4 mig_layout=3g.40gb,2g.20gb

    A value that the hardware could not have is refused, and then nothing is changed.
    """
    from gpu_sim.fields import check_values, set_values

    changes: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{text!r}: not a change", remedy="write FIELD=VALUE; see: sluice sim fields")
        if name in changes:
            raise UsageError(f"{name}: given twice", remedy="give each field once")
        changes[name] = value
    chosen = [(node, gpu) for node in _nodes(folder, nodes) for gpu in _gpus(node, gpus)]
    for act in (check_values, set_values):
        for node, gpu in chosen:
            act(node, gpu, changes)


@command.command(name="get")
@_dir_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("nodes")
@click.argument("gpus", default="all")
@click.argument("fields", nargs=-1, metavar="[FIELD]...")
def get_command(folder: Path | None, as_json: bool, nodes: str, gpus: str, fields: tuple[str, ...]) -> None:
    """Print fields of GPUS (default all) on NODES; without FIELD, all that the GPU has."""
    from gpu_sim.fields import get_values

    found: dict[str, dict[str, dict[str, str]]] = {}
    for node in _nodes(folder, nodes):
        for gpu in _gpus(node, gpus):
            values = get_values(node, gpu)
            for name in fields:
                if name not in values:
                    raise UsageError(f"field {name!r}: there is none of that name", remedy="see: sluice sim fields")
            chosen = {name: values[name] for name in fields} or {name: text for name, text in values.items() if text}
            found.setdefault(node.parent.name, {})[str(gpu)] = chosen
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "nodes": found}, indent=2))
        return
    for node_name, by_gpu in found.items():
        for number, chosen in by_gpu.items():
            for name, text in chosen.items():
                click.echo(f"{node_name} {number} {name}={text}")


@dataclass(frozen=True, slots=True)
class _Row:
    """A simulated GPU in a list."""

    node: str
    gpu: int
    values: dict[str, str]
    used_mib: int
    total_mib: int

    @property
    def state(self) -> str:
        """The first thing that is out of the ordinary."""
        if self.values["lost"] == "yes":
            return "lost"
        if self.values["driver_loaded"] == "no" or self.values["driver_hang"] == "yes":
            return "driver"
        return f"mig:{self.values['mig_layout']}" if self.values["mig"] == "yes" else "ok"


@command.command(name="list")
@_dir_option
@click.option("--json", "as_json", is_flag=True, help="As JSON, memory in MiB.")
@table_options
def list_command(folder: Path | None, as_json: bool, table: TableOptions) -> None:
    """Print the simulated GPUs of the cluster, a line each."""
    from gpu_sim.fields import get_values
    from gpu_sim.state import holdings, read_state

    rows = []
    for node in _nodes(folder, None):
        held = holdings(node)
        for index, gpu in enumerate(read_state(node).gpus):
            used = gpu.memory_used_mib + sum(gpu.processes[i].memory_mib for i in range(gpu.process_count))
            used += sum(holding.memory_mib for holding in held if holding.gpu == index)
            rows.append(_Row(node.parent.name, index, get_values(node, index), used, gpu.memory_total_mib))
    if as_json:
        gpus = [
            {
                "node": row.node,
                "gpu": row.gpu,
                "name": row.values["name"],
                "uuid": row.values["uuid"],
                "used_mib": row.used_mib,
                "total_mib": row.total_mib,
                "state": row.state,
            }
            for row in rows
        ]
        click.echo(json.dumps({"schema_version": 1, "gpus": gpus}, indent=2))
        return
    columns: list[Column[_Row]] = [
        Column("node", lambda row: row.node),
        Column("gpu", lambda row: row.gpu, right=True),
        Column("name", lambda row: row.values["name"]),
        Column("uuid", lambda row: row.values["uuid"]),
        Column("used", lambda row: row.used_mib, right=True),
        Column("memory", lambda row: row.total_mib, right=True),
        Column("utilisation", lambda row: row.values["utilisation"], right=True),
        Column("temperature", lambda row: row.values["temperature"], right=True),
        Column("power", lambda row: row.values["power"], right=True),
        Column("state", lambda row: row.state),
    ]
    default = ["node", "gpu", "name", "used", "memory", "utilisation", "temperature", "power", "state"]
    table.print(columns, rows, default=default)


@command.command(name="fields")
def fields_command() -> None:
    """Name the fields that can be set or read."""
    from gpu_sim.fields import FIELDS

    for name, field in FIELDS.items():
        click.echo(f"{name:<24} {field.help}")


def _nodes(folder: Path | None, expression: str | None) -> list[Path]:
    """The gpu_sim folders of the named nodes, or of all that have one."""
    from dev_cluster.handle import default_folder
    from sluice.base.hostlist import expand

    root = (folder or default_folder()) / "nodes"
    known = {path.parent.name: path for path in sorted(root.glob("*/gpu_sim")) if (path / "state").exists()}
    if not known:
        raise UsageError(f"{root.parent}: no simulated GPUs there", remedy="start a cluster: sluice cluster up")
    names = list(known) if expression is None else expand(expression)
    if not names:
        raise UsageError(f"nodes {expression!r}: none named", remedy=f"nodes that have GPUs: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UsageError(f"node {name!r}: no simulated GPUs", remedy=f"nodes that have: {', '.join(known)}")
    return [known[name] for name in names]


def _gpus(node: Path, expression: str) -> list[int]:
    """Indices: all, a UUID, or numbers as in 0,2-3."""
    from gpu_sim.state import read_state

    state = read_state(node)
    if expression == "all":
        return list(range(len(state.gpus)))
    found: list[int] = []
    for word in expression.split(","):
        first, dash, last = word.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < len(state.gpus):
            found += [state.find(number) for number in range(int(first), int(last) + 1)]
        else:
            found.append(state.find(word))
    return found
