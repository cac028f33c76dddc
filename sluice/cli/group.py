"""`sluice group`: put GPUs into classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.text import one_line
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from gres_probe.group import GpuClass

DEFAULT_COLUMNS = ("class", "gpus", "nodes", "nodelist")


@click.command("group")
@click.option("--policy", type=click.Path(path_type=Path), metavar="FILE", help="sluice.yaml; default: by model.")
@click.option("--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Drop folder of the inventories.")
@click.option(
    "--measured", type=click.Path(path_type=Path), metavar="FILE", help='Measured performance: JSON, {"UUID": figure}.'
)
@click.option("--node-sets", is_flag=True, help="Print NodeSet lines for slurm.conf.")
@click.option("--output-dir", type=click.Path(path_type=Path), metavar="DIR", help="Write classes.sluice.conf there.")
@click.option("--json", "as_json", is_flag=True, help="Classes with their GPUs as JSON.")
@table_options
def command(
    policy: Path | None,
    inventory_dir: Path | None,
    measured: Path | None,
    node_sets: bool,
    output_dir: Path | None,
    as_json: bool,
    table: TableOptions,
) -> None:
    """Group GPUs into classes, as the section `grouping` of the policy file says.

    `sluice gres write --policy FILE` makes the classes features of the nodes, for sbatch --constraint.
    """
    from gres_probe.collect import DEFAULT_DIR, load_inventories
    from gres_probe.group import CLASSES_FILE, group
    from policy.grouping import Grouping, load_grouping
    from sluice.base.errors import SluiceError, UsageError
    from sluice.base.files import write_if_changed
    from sluice.base.hostlist import fold

    grouping = load_grouping(policy) if policy is not None else Grouping()
    figures = _read_measured(measured) if measured is not None else {}
    collected = load_inventories(inventory_dir or DEFAULT_DIR)
    for failure in collected.failures.values():
        click.echo(f"sluice: {one_line(str(failure), limit=None)}", err=True)
    result = group(collected.inventories.values(), grouping, measured=figures)
    if output_dir is not None:
        if collected.failures:
            raise SluiceError("nothing written: an inventory cannot be read", remedy="mend it, or remove it")
        if not output_dir.is_dir():
            raise UsageError(f"--output-dir {output_dir}: no such folder", remedy="make it first")
        path = output_dir / CLASSES_FILE
        try:
            changed = write_if_changed(path, result.node_sets())
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="name a folder you may write") from error
        click.echo(f"wrote {path}" if changed else "nothing to change", err=not changed)
    elif node_sets:
        click.echo(result.node_sets(), nl=False)
    elif as_json:
        click.echo(json.dumps({"schema_version": 1, "classes": result.document()}, indent=2))
    else:
        columns: list[Column[GpuClass]] = [
            Column("class", lambda one: one.name),
            Column("feature", lambda one: one.feature),
            Column("gpus", lambda one: len(one.gpus), right=True),
            Column("nodes", lambda one: len(one.nodes), right=True),
            Column("nodelist", lambda one: fold(one.nodes)),
        ]
        rows = list(result.classes.values())
        table.print(columns, rows, default=DEFAULT_COLUMNS)
    if collected.failures:
        raise click.exceptions.Exit(1)  # what could be read was shown; who scripts this has to know that it is not all


def _read_measured(path: Path) -> dict[str, float]:
    from sluice.base.errors import SluiceError, UsageError

    try:
        figures = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="name a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise SluiceError(f"{path}: not JSON ({error})", remedy='write it as {"GPU-...": 989.4}') from error
    if not isinstance(figures, dict):
        raise SluiceError(f"{path}: not an object", remedy='write it as {"GPU-...": 989.4}')
    for uuid, figure in figures.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float) or not 0 < figure < 1e15:
            shown = one_line(f"{uuid}: {figure!r}")
            raise SluiceError(f"{path}: {shown} is no performance", remedy="write a number above 0")
    return {uuid: float(figure) for uuid, figure in figures.items()}
