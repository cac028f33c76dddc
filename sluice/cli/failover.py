"""`sluice failover`: the controllers: who leads, is the other one ready, drills, what happened."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.slurm_options import find_slurm_conf
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from sluice.failover.drill import Report
    from sluice.failover.status import Status

_PATH = click.Path(path_type=Path)
_MARKS = {"ok": "ok", "remark": "note", "problem": "PROBLEM"}
_conf = click.option("--slurm-conf", type=_PATH, metavar="PATH", help="Default: SLURM_CONF, else /etc/slurm.")
_prefix = click.option("--slurm-prefix", type=_PATH, metavar="DIR", help="Where Slurm is installed; default: found.")


@click.group("failover")
def command() -> None:
    """The controllers: who leads, is the other one ready, drills, what happened."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_prefix
@_conf
def status(as_json: bool, slurm_prefix: Path | None, slurm_conf: Path | None) -> None:
    """Look at everything that a takeover needs, without changing anything. Exit 0: ready, 1: there is a problem.

    To be run on a controller, as root or SlurmUser.
    """
    from sluice.failover.shared import read_cluster
    from sluice.failover.status import look
    from sluice.slurm import connect

    path = find_slurm_conf(slurm_conf)
    assert path is not None  # noqa: S101 - it is required
    found = look(read_cluster(path), connect(prefix=slurm_prefix, conf=slurm_conf, timeout=20))
    if as_json:
        click.echo(json.dumps(found.document(), indent=2))
    else:
        _print_status(found)
    if found.problems:
        raise click.exceptions.Exit(1)


def _print_status(found: Status) -> None:
    lease = f", epoch {found.lease.epoch}" if found.lease else ""
    click.echo(f"leader: {found.leader or 'nobody'}{lease}")
    for finding in found.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        click.echo(f"  {_MARKS[finding.kind]:<8}{finding.what}{remedy}")


@command.command()
@click.option("--force", is_flag=True, help="Even where `status` has found problems.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--limit", default=120.0, show_default=True, type=click.FloatRange(5, 3600), help="Seconds for each half."
)
@click.option(
    "--start-command",
    default="systemctl start slurmctld",
    show_default=True,
    metavar="COMMAND",
    help="Starts slurmctld on the primary, from this host; empty: somebody else does.",
)
@click.option("--reports", type=_PATH, metavar="DIR", help="Default: /var/lib/sluice/drills.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@_prefix
@_conf
def drill(
    force: bool,
    yes: bool,
    limit: float,
    start_command: str,
    reports: Path | None,
    as_json: bool,
    slurm_prefix: Path | None,
    slurm_conf: Path | None,
) -> None:
    """The backup takes over as planned, then the primary comes back; every job is counted before and after.

    Jobs keep running. Commands wait for some seconds at each half. It may be interrupted at any point: the cluster
    works. Exit 0: all as it must be, 1: not.
    """
    from sluice.failover.drill import REPORTS, Drill, keep
    from sluice.failover.shared import read_cluster
    from sluice.slurm import connect
    from sluice.slurm.commands import Commands

    path = find_slurm_conf(slurm_conf)
    assert path is not None  # noqa: S101 - it is required
    client = connect(prefix=slurm_prefix, conf=slurm_conf, timeout=30)
    commands = Commands(prefix=slurm_prefix, conf=slurm_conf, timeout=60)
    one = Drill(
        read_cluster(path), client, commands, shlex.split(start_command), lambda text: click.echo(text, err=True)
    )
    one.check(force)
    if not yes:
        click.confirm(
            f"{one.cluster.hosts[1]} takes over now, and {one.cluster.hosts[0]} comes back?", abort=True, err=True
        )
    report = one.run(limit)
    place = keep(report, reports or REPORTS)
    if as_json:
        click.echo(json.dumps(report.document(), indent=2))
    else:
        _print_report(report)
        click.echo(f"report: {place}")
    if not report.good:
        raise click.exceptions.Exit(1)


def _print_report(report: Report) -> None:
    for leg in report.legs:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in sorted(leg.after.items())) or "none"
        click.echo(f"{leg.to}: led after {leg.took_s:.1f} s; jobs: {counts}")
        for name, jobs in (("missing", leg.missing), ("started again", leg.restarted)):
            if jobs:
                click.echo(f"  {name}: {', '.join(jobs[:20])}{' ...' if len(jobs) > 20 else ''}")
    if report.aborted:
        click.echo(f"not finished: {report.aborted}")
    elif report.good:
        click.echo("good: every job that waited or ran before did so after, and none was started again")


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--reports", type=_PATH, metavar="DIR", help="Of drills; default: /var/lib/sluice/drills.")
@table_options
@_conf
def history(
    as_json: bool,
    reports: Path | None,
    slurm_conf: Path | None,
    table: TableOptions,
) -> None:
    """Who led when, who died or was killed and why, and drills; oldest first."""
    from sluice.failover.drill import REPORTS
    from sluice.failover.history import history_rows
    from sluice.failover.shared import read_cluster

    path = find_slurm_conf(slurm_conf)
    assert path is not None  # noqa: S101 - it is required
    rows = history_rows(read_cluster(path), reports or REPORTS)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("time", lambda row: row["time"], _local, right=False),
        Column("host", lambda row: row.get("host")),
        Column("what", lambda row: row["what"]),
        Column("epoch", lambda row: row.get("epoch"), right=True),
        Column("detail", _detail),
    ]
    table.print(columns, rows, default=("time", "host", "what", "epoch", "detail"))


def _local(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _detail(row: dict[str, Any]) -> str:
    if row["what"] == "lease.taken":
        if not row.get("from"):
            return "the first"
        how = "which gave it back" if row.get("given_back") else "which had gone silent"
        return f"from {row['from']}, {how}; waited {row.get('waited_ms', 0)} ms"
    shown = {key: row[key] for key in ("why", "signal", "status", "leader", "good", "detail") if key in row}
    return "; ".join(str(value) if key in ("why", "detail") else f"{key} {value}" for key, value in shown.items())
