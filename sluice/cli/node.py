"""`sluice node`: nodes that an administrator empties."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import SluiceError, UsageError
from sluice.base.hostlist import expand, fold, hosts
from sluice.base.text import one_line
from sluice.cli.slurm_options import where_options
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from sluice.exchange.emptying import Emptying
    from sluice.slurm import Commands
    from sluice.slurm.answers import Job, Node

_MOST_REASON = 200

_names = click.argument("names", nargs=-1, metavar="[NODES]...")
_switches = click.option(
    "--switch", "switches", multiple=True, metavar="NAME", help="All nodes of a leaf switch or block."
)


@click.group("node")
def command() -> None:
    """Empty nodes for repair, without killing what can go on elsewhere.

    NODES are hostlists, as n[1-4,7].
    """


@command.command("empty")
@_names
@_switches
@click.option("--reason", default="", metavar="TEXT", help="Why; Slurm shows it.")
@click.option(
    "--deadline", metavar="TIME", help="When the nodes are to be empty, as now+2hours: jobs that end by then stay."
)
@click.option("--dry-run", is_flag=True, help="Say what would become of the jobs, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@table_options
@where_options
def empty(
    names: tuple[str, ...],
    switches: tuple[str, ...],
    reason: str,
    deadline: str | None,
    dry_run: bool,
    as_json: bool,
    table: TableOptions,
    conf: Path | None,
    prefix: Path | None,
) -> None:
    """Drain NODES, and move the jobs there that have saved to other nodes; say of each job what becomes of it.

    Run it on a controller, as root or SlurmUser.
    """
    from sluice.exchange.emptying import ask, order
    from sluice.slurm import Commands, connect

    until = _deadline(deadline)
    client, commands = connect(conf=conf, prefix=prefix), Commands(conf=conf, prefix=prefix)
    config = client.config()
    _check_caller(config)
    chosen = _resolve(commands, names, switches, {node.name for node in client.nodes()})
    said = ask(Path(config["StateSaveLocation"]), chosen, until)
    jobs = {job.id: job for job in client.jobs()} if said.jobs else {}
    rows = _rows(said, chosen, jobs)
    if not dry_run:
        text = one_line(reason, limit=_MOST_REASON) or "by an administrator"
        for before, group in _by_reason(client.nodes(), chosen).items():  # somebody may have drained one meanwhile
            _update(commands, group, "State=DRAIN", f"Reason={order(text, until, before)}")
    if as_json:
        document = {"schema_version": 1, "nodes": chosen, "deadline": until or None, "dry_run": dry_run, "jobs": rows}
        click.echo(json.dumps(document, indent=2))
        return
    table.print(COLUMNS, rows, default=_DEFAULT)
    if not table.asked:
        what = "would drain" if dry_run else "drains; back: sluice node resume"
        click.echo(f"{fold(chosen)}: {what}{'' if dry_run else f' {fold(chosen)}'}", err=True)


@command.command("resume")
@_names
@_switches
@where_options
def resume(names: tuple[str, ...], switches: tuple[str, ...], conf: Path | None, prefix: Path | None) -> None:
    """Let NODES that are emptied take jobs again. Jobs that have not left stay there.

    A node that was drained before it was emptied is drained again, for the reason of then.
    """
    from sluice.exchange.emptying import is_order
    from sluice.slurm import Commands, connect

    commands = Commands(conf=conf, prefix=prefix)
    nodes = {node.name: node for node in connect(conf=conf, prefix=prefix).nodes()}
    chosen = _resolve(commands, names, switches, nodes.keys())
    for name in chosen:
        node = nodes[name]
        if "drain" in node.flags and is_order(node.reason):
            continue
        why = f"it is drained for: {one_line(node.reason, limit=200)}" if "drain" in node.flags else "it does not drain"
        raise SluiceError(
            f"node {name}: is not being emptied: {why}",
            remedy=f"leave it out, or: scontrol update NodeName={name} State=RESUME",
        )
    for before, group in _by_reason(nodes.values(), chosen).items():
        _update(commands, group, *(("State=DRAIN", f"Reason={before}") if before else ("State=UNDRAIN",)))
        click.echo(f"{fold(group)}: drained again for: {one_line(before, limit=200)}" if before else fold(group))


def _by_reason(nodes: Iterable[Node], chosen: list[str]) -> dict[str, list[str]]:
    """Those chosen by the reason for which they are drained, but for an order to empty them; the empty one: none."""
    from sluice.exchange.emptying import is_order, reason_before

    found: dict[str, list[str]] = {}
    wanted = frozenset(chosen)
    for node in nodes:
        if node.name not in wanted:
            continue
        before = reason_before(node.reason) if is_order(node.reason) else node.reason
        found.setdefault(before if "drain" in node.flags else "", []).append(node.name)
    return found


def _update(commands: Commands, nodes: list[str], *changes: str) -> None:
    commands.output("scontrol", "update", f"NodeName={hosts(nodes)}", *changes)


def _moment(at: int | None) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%dT%H:%M:%S") if at else "none"


COLUMNS: list[Column[dict[str, Any]]] = [
    Column("job", lambda row: row["job"]),
    Column("user", lambda row: row["user"]),
    Column("account", lambda row: row["account"]),
    Column("node", lambda row: row["node"]),
    Column("decision", lambda row: row["decision"]),
    Column("to", lambda row: row["to"]),
    Column("end", lambda row: row["end"] or 0, _moment),
    Column("why", lambda row: row["why"]),
    Column("reason", lambda row: row["reason"]),
]
_DEFAULT = ("job", "user", "node", "decision", "end", "reason")


def _rows(said: Emptying, nodes: list[str], jobs: dict[int, Job]) -> list[dict[str, Any]]:
    """Of the jobs on the nodes; those that the administrator has to look after come last."""
    places = {"moves": 0, "later": 1, "ends": 2, "stays": 3}
    wanted = frozenset(nodes)
    found = sorted((one for one in said.jobs if one.node in wanted), key=lambda one: (places[one.decision], one.job))
    rows = []
    for one in found:
        job = jobs.get(one.job)
        rows.append(
            {
                "job": one.job,
                "user": job.user if job else None,
                "account": job.account if job else None,
                "node": one.node,
                "decision": one.decision,
                "to": one.to or None,
                "end": one.end or None,
                "why": one.why,
                "reason": one.reason,
            }
        )
    return rows


def _deadline(text: str | None) -> int:
    """0: none. Raises UsageError."""
    from sluice.slurm.time_words import parse_time

    if text is None:
        return 0
    now = time.time()
    if (at := parse_time(text, now)) <= now:
        raise UsageError(f"--deadline {text[:60]!r}: is over ({_moment(at)})", remedy="name a time to come")
    return at


def _check_caller(config: dict[str, str]) -> None:
    from sluice.slurm.user import slurm_user

    user = slurm_user(config)
    if os.geteuid() not in (0, user):
        raise SluiceError(
            f"uid {os.geteuid()}: not root or SlurmUser ({user})",
            remedy="run it as one of them on a controller; operators of Slurm give the same order with `scontrol "
            "update NodeName=NODES State=DRAIN Reason='sluice empty: TEXT'`",
        )


def _resolve(commands: Commands, names: tuple[str, ...], switches: tuple[str, ...], known: Any) -> list[str]:
    """The nodes, each once, in the order of their names. Raises UsageError for one that Slurm does not know."""
    from sluice.exchange.emptying import MOST_NODES
    from sluice.slurm.topology import switch_rows

    found = {name for expression in names for name in expand(expression)}
    if switches:
        said = commands.run("scontrol", "show", "topology", check=False).stdout
        leaves = {row["name"]: row["nodes"] for row in switch_rows(said) if not row["switches"]}
        for switch in switches:
            if switch not in leaves:
                there = one_line(", ".join(sorted(leaves)), limit=300) or "none: there is no topology"
                raise UsageError(
                    f"--switch {switch[:80]!r}: no leaf switch or block of this name",
                    remedy=f"choose from {there}",
                )
            found.update(expand(leaves[switch]))
    if not found:
        raise UsageError("no node is named", remedy="name NODES, or a leaf switch with --switch")
    if strange := sorted(found - set(known)):
        raise UsageError(f"node {strange[0][:80]!r}: Slurm has none of this name", remedy="sinfo -N lists all nodes")
    if len(found) > MOST_NODES:
        raise UsageError(f"{len(found)} nodes: too many at once", remedy=f"name {MOST_NODES} at most")
    return expand(fold(found))
