"""`sluice health`: faults of GPUs and nodes, what is out of service and why, and the way back."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.cli.tables import Column, TableOptions, table_options
from sluice.controllerd.health.listing import Row, when

SOCKET = "/run/sluice/agent.sock"
ROOTS = "/run/sluice/ask/0"  # where root does not wait for others
_SECONDS = 10.0


@click.group("health")
def command() -> None:
    """Faults of GPUs and nodes: what is found, what is out of service, and why."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="The node's whole report.")
@click.option("--last", is_flag=True, help="What the last round found, without a new one.")
def check(as_json: bool, last: bool) -> None:
    """Check this node now (root). Exit 0 ok, 1 warning, 2 critical, 3 unknown, as in Nagios."""
    from sluice.controllerd.health.listing import does
    from sluice.exchange.health_report import parse_report

    try:
        document = _ask_agent(fresh=not last)["report"]
        report = None if document is None else parse_report(document)
    except (SluiceError, KeyError) as error:
        click.echo(f"UNKNOWN: {error}")
        sys.exit(3)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    elif report is None:
        click.echo("OK: health checks are switched off (health.mode: off)")
    else:
        for fault in report.faults:
            where = f" GPU {','.join(map(str, fault.numbers))}" if fault.numbers else ""
            click.echo(f"{fault.severity.upper()}: {fault.check}{where}: {fault.text}{does(fault)}")
        for gpu in report.gpus:
            if gpu.unknown:
                number = ",".join(map(str, gpu.numbers)) or gpu.uuid
                click.echo(f"unknown of GPU {number}: {', '.join(gpu.unknown)}")
        if report.unknown:
            click.echo(f"unknown of the node: {', '.join(report.unknown)}")
        if report.undelivered_since is not None:
            click.echo(
                f"no controller has taken a report since {when(report.undelivered_since)}: nothing is acted upon"
            )
        words = {0: "OK", 1: "WARNING", 2: "CRITICAL", 3: "UNKNOWN"}[report.nagios]
        click.echo(f"{words}: {len(report.gpus)} GPUs, {len(report.faults)} findings, mode {report.mode}")
    sys.exit(0 if report is None else report.nagios)


# ---- the cluster ----


COLUMNS: list[Column[Row]] = [
    Column("node", lambda row: row.node),
    Column("gpu", lambda row: row.gpu),
    Column("state", lambda row: row.state),
    Column("severity", lambda row: row.severity),
    Column("check", lambda row: row.check),
    Column("since", lambda row: row.since, when),
    Column("uuid", lambda row: row.uuid),
    Column("reason", lambda row: row.reason),
]
_DEFAULT = ("node", "gpu", "state", "severity", "check", "since", "reason")


@command.command("list")
@click.argument("nodes", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@table_options
def list_(nodes: tuple[str, ...], as_json: bool, table: TableOptions) -> None:
    """What is out of service or faulty in the cluster, or of NODES (hostlists). For root and SlurmUser."""
    answer = ask_controllers(list=True)
    chosen = _expand(nodes)
    rows = [row for row in (Row(**one) for one in answer["rows"]) if not chosen or row.node in chosen]
    if as_json:
        listed = [asdict(row) for row in rows]
        click.echo(json.dumps({"schema_version": 1, **answer, "rows": listed}, indent=2))
        return
    table.print(COLUMNS, rows, default=_DEFAULT)
    if table.asked:
        return
    click.echo(f"healthy: {answer['healthy'] or 'none'}; mode {answer['mode']}", err=True)
    if answer["left_out"]:
        click.echo(f"{answer['left_out']} more are left out", err=True)
    if answer["breaker_since"]:
        since = when(answer["breaker_since"])
        click.echo(f"the breaker is open since {since}: nothing more is taken out of service", err=True)


@command.command()
@click.argument("node", required=False)
@click.option("--json", "as_json", is_flag=True, help="The events as JSON.")
def history(node: str | None, as_json: bool) -> None:
    """What was taken out, returned, requeued and warned of, in the whole cluster or at NODE; the last 200 events."""
    found = ask_controllers(history=node or "")["events"]
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "events": found}, indent=2))
        return
    for event in found:
        place = " ".join(
            [event.get("node", ""), *(f"GPU {','.join(map(str, event['gpus']))}" for _ in [0] if event.get("gpus"))]
        )
        job = f" job {event['job']}" if event.get("job") else ""
        kind = event["kind"].removeprefix("health.")
        click.echo(f"{when(event['time'])}  {kind:<12}  {place}{job}: {one_line(str(event.get('reason', '')))}")


@command.command()
@click.argument("node")
def why(node: str) -> None:
    """Why NODE or its GPUs are out of service, and what has to happen before they return."""
    for line in ask_controllers(why=node)["lines"]:
        click.echo(line)


@command.command("return")
@click.argument("node")
@click.argument("gpu", type=click.IntRange(0, 255), required=False)
def return_(node: str, gpu: int | None) -> None:
    """Return NODE's GPU (or all that Sluice took out of NODE) to service now, and forget its repeated faults.

    A fault that still lasts takes it out again.
    """
    ask: dict[str, Any] = {"node": node} if gpu is None else {"node": node, "gpu": gpu}
    done = ask_controllers(**{"return": ask})["done"]
    click.echo(f"{node}: {', '.join(done) if done else 'nothing was out of service'}")


# ---- who is asked ----


def ask_controllers(**request: Any) -> dict[str, Any]:
    """The answer of the controllers' daemon that leads. Raises SluiceError."""
    from sluice.exchange.courier import VERSION, ask, controllers, port

    try:
        return ask(controllers(), port(), json.dumps({"version": VERSION, "do": "health", **request}).encode())
    except SluiceError as error:
        raise SluiceError(
            f"no controller answers: {error.what}", remedy="as root or SlurmUser; is sluice-controllerd running?"
        ) from error


def _ask_agent(*, fresh: bool) -> dict[str, Any]:
    import socket

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(ROOTS if os.access(ROOTS, os.W_OK) else SOCKET)
            connection.sendall(json.dumps({"do": "health", "fresh": fresh}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b'{"error": "no answer"}')
    except (OSError, ValueError) as error:
        raise SluiceError(
            f"the node agent at {SOCKET}: {getattr(error, 'strerror', None) or error}",
            remedy="start it: systemctl start sluice-agent",
        ) from error
    if "error" in answer:
        raise SluiceError(f"the node agent: {answer['error']}")
    return dict(answer["ok"])


def _expand(nodes: tuple[str, ...]) -> set[str]:
    from sluice.base.hostlist import expand

    return {name for expression in nodes for name in expand(expression)}
