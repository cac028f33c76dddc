"""`sluice pool`: nodes that come and go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.text import one_line
from sluice.cli.slurm_options import where_options
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from sluice.exchange.fleet import FleetStatus

_status_option = click.option(
    "--status",
    "path",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/sluice/fleet/status.json"),
    show_default=True,
    metavar="FILE",
    help="What fleetd of this host says.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("pool")
def command() -> None:
    """Nodes that come and go: what pools have, what they wait for, and why.

    Run it on a controller. Pools are in the policy file (docs/elastic.md).
    """


def _read(path: Path) -> FleetStatus:
    """What fleetd says; a warning where it is old. Raises SluiceError."""
    from sluice.exchange.fleet import read_status

    status = read_status(path)
    if (age := time.time() - status.at) > 60:
        click.echo(f"warning: fleetd said this {age:.0f} s ago; does it run, and does this controller lead?", err=True)
    return status


def _moment(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}s"


@command.command("list")
@_status_option
@_json_option
@table_options
def list_pools(path: Path, as_json: bool, table: TableOptions) -> None:
    """All pools: how many nodes are there, what they cost, and what keeps them from having more."""
    from sluice.exchange.fleet import pool_documents

    rows = pool_documents(_read(path))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "pools": rows}, indent=2))
        return
    names = ("name", "driver", "partition", "nodes", "least", "most", "on", "launching", "ending", "held", "cost_hour",
             "boot_s", "closed_for", "closed_until", "problem")  # fmt: skip
    shown: dict[str, Callable[[Any], str]] = {"boot_s": _seconds, "closed_until": _moment}
    columns = [Column(name, _value(name), shown.get(name, str)) for name in names]
    default = ("name", "driver", "partition", "least", "most", "on", "launching", "ending", "held", "cost_hour",
               "closed_for", "problem")  # fmt: skip
    table.print(columns, rows, default=default)


def _value(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: None if row[name] == "none" else row[name]


@command.command("show")
@click.argument("pool")
@_status_option
@_json_option
@table_options
def show(pool: str, path: Path, as_json: bool, table: TableOptions) -> None:
    """The nodes of POOL: what Slurm, the journal and the provider say of each; and what the provider has none of."""
    from sluice.exchange.fleet import pool_document

    status = _read(path)
    document = pool_document(status, pool)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **document}, indent=2))
        return
    names = ("node", "slurm", "stage", "machine", "shape", "zone", "since", "difference", "text", "again", "jobs")
    shown: dict[str, Callable[[Any], str]] = {
        "since": _moment, "again": _moment, "jobs": lambda jobs: ",".join(map(str, jobs)),
    }  # fmt: skip
    columns = [Column(name, _value(name), shown.get(name, str)) for name in names]
    default = ("node", "slurm", "stage", "shape", "zone", "difference", "text")
    rows = document["node_list"]
    table.print(columns, rows, default=default)
    if not table.asked:
        for one in status.pools[pool].shortages:
            click.echo(one_line(f"{one.words(status.at)}{f' ({one.text})' if one.text else ''}", limit=None))


@command.command("history")
@click.argument("pool")
@click.option("--node", metavar="NODE", help="Of this node only.")
@_status_option
@_json_option
@table_options
def history(pool: str, node: str | None, path: Path, as_json: bool, table: TableOptions) -> None:
    """What happened in POOL, the oldest first: each launch and each step of it."""
    from sluice.exchange.fleet import history_document

    document = history_document(_read(path), pool, node)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **document}, indent=2))
        return
    names = ("at", "node", "what", "shape", "zone", "machine", "text")
    columns = [Column(name, _value(name), _moment if name == "at" else str) for name in names]
    table.print(columns, document["events"], default=names)


@command.command("why")
@click.argument("node")
@_status_option
@_json_option
def why(node: str, path: Path, as_json: bool) -> None:
    """Why NODE is as it is: the three views, how they differ, and what is done about it."""
    from sluice.exchange.fleet import why_document

    document = why_document(_read(path), node)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **document}, indent=2))
        return
    launch = f"{document['stage']} since {_moment(document['since'])}" if document["stage"] else "no launch"
    place = "".join(f", {document[key]}" for key in ("shape", "zone") if document[key])
    lines = {
        "": f"{document['node']} of pool {document['pool']}: {document['sentence']}",
        "  Slurm     ": f"{document['slurm']}{_jobs(document['jobs'])}",
        "  journal   ": launch,
        "  provider  ": f"{document['machine'] or 'no machine known'}{place}",
        "  remedy    ": document["remedy"],
    }
    for title, words in lines.items():  # some words are the provider's
        click.echo(f"{title}{one_line(words, limit=None)}")
    if document["again"] is not None:
        click.echo(f"  again     {_moment(document['again'])}")


def _jobs(jobs: list[int]) -> str:
    return f", jobs {', '.join(map(str, jobs))}" if jobs else ""


@command.command("drain")
@click.argument("names", nargs=-1, required=True, metavar="POOL|NODES...")
@click.option("--reason", required=True, metavar="TEXT", help="Why; Slurm shows it.")
@_status_option
@where_options
def drain(names: tuple[str, ...], reason: str, path: Path, conf: Path | None, prefix: Path | None) -> None:
    """Let POOL, or NODES of one, take no more jobs; running jobs stay, and idle machines are ended as always."""
    _update(names, path, conf, prefix, "State=DRAIN", f"Reason={one_line(reason)}")


@command.command("return")
@click.argument("names", nargs=-1, required=True, metavar="POOL|NODES...")
@_status_option
@where_options
def return_(names: tuple[str, ...], path: Path, conf: Path | None, prefix: Path | None) -> None:
    """Let POOL, or NODES of one, take jobs again: after a drain, or when other GPUs than promised are mended."""
    _update(names, path, conf, prefix, "State=UNDRAIN")


def _update(names: tuple[str, ...], path: Path, conf: Path | None, prefix: Path | None, *changes: str) -> None:
    from sluice.base.hostlist import hosts
    from sluice.exchange.fleet import nodes_named
    from sluice.slurm import Commands

    nodes = hosts(nodes_named(_read(path), names))
    Commands(prefix=prefix, conf=conf, timeout=60).output("scontrol", "update", f"NodeName={nodes}", *changes)
    click.echo(nodes)
