"""`sluice audit`: who did what, when, by which version of the policy file."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.cli.site_options import ClusterOptions, cluster_options
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from policy.audit import AuditEntry, AuditLog


def _log(state: Path | None) -> AuditLog:
    from policy.audit import AuditLog
    from policy.site import STATE_FOLDER, trusted_folder

    return AuditLog(trusted_folder(state or STATE_FOLDER) / "audit")


_state = click.option(
    "--state-dir",
    "state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where Sluice keeps the audit log; default: /var/lib/sluice.",
)
_filters = (
    click.option("--user", help="Only what this user did."),
    click.option("--action", help="Only this action, e.g. apply, refuse; its first words are enough."),
    click.option("--subject", help="Only this tenant, job or file."),
    click.option("--since", metavar="TIME", help="From then on: 2027-01-31, 2027-01-31T12:00, or e.g. 2d ago as 2d."),
    click.option("--until", metavar="TIME", help="Up to then."),
    click.option("--text", help="Only entries that hold this text."),
)


def _filtered(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_filters):
        command = option(command)
    return command


@click.group("audit", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """The audit log: list, verify, export, append."""
    if context.invoked_subcommand is None:
        context.invoke(list_)


@command.command("list")
@_filtered
@click.option("--last", type=click.IntRange(1), metavar="N", help="The last N entries.")
@table_options
@_state
def list_(
    user: str | None = None,
    action: str | None = None,
    subject: str | None = None,
    since: str | None = None,
    until: str | None = None,
    text: str | None = None,
    last: int | None = None,
    state: Path | None = None,
    *,
    table: TableOptions,
) -> None:
    """Entries as a table."""
    rows = list(_chosen(_log(state), user, action, subject, since, until, text))
    columns: list[Column[AuditEntry]] = [
        Column("seq", lambda one: one.seq, right=True),
        Column("time", lambda one: one.time, shown=_when),
        Column("user", lambda one: one.user),
        Column("action", lambda one: one.action),
        Column("subject", lambda one: one.subject),
        Column("detail", lambda one: "; ".join(f"{key}: {value}" for key, value in one.detail.items())),
        Column("version", lambda one: one.version[:19]),
        Column("host", lambda one: one.host),
    ]
    default = ("seq", "time", "user", "action", "subject", "detail", "version")
    table.print(columns, rows[-last:] if last else rows, default=default)


@command.command()
@_state
def verify(state: Path | None) -> None:
    """Check the chain. Exit 0: unbroken, 1: an entry was changed, left out or cut off."""
    count, problems = _log(state).verify()
    for problem in problems:
        click.echo(problem)
    click.echo(f"{count} entries, {len(problems)} problems", err=True)
    if problems:
        sys.exit(1)


@command.command()
@_filtered
@click.option("--syslog", is_flag=True, help="RFC 5424 messages instead of JSON lines.")
@_state
def export(
    user: str | None,
    action: str | None,
    subject: str | None,
    since: str | None,
    until: str | None,
    text: str | None,
    syslog: bool,
    state: Path | None,
) -> None:
    """Entries as JSON lines, or as syslog messages, e.g. to pipe to `logger --rfc5424` or a collector."""
    from policy.audit import syslog_line

    for entry in _chosen(_log(state), user, action, subject, since, until, text):
        click.echo(syslog_line(entry) if syslog else json.dumps(entry.document()))


@command.command()
@_state
def append(state: Path | None) -> None:
    """Add submissions, refusals, grants and returns from JSON lines on standard input; for collectors."""
    count = _log(state).append_events(sys.stdin)
    click.echo(f"sluice: {count} events", err=True)


@command.command("collect")
@click.option("--delay", default="1m", show_default=True, metavar="TIME", help="Leave younger events to the next time.")
@click.option(
    "--slurmctld-log",
    "logs",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Also refusals, from slurmctld's log; once for each controller's, and a rotated one.",
)
@cluster_options
def collect_(delay: str, logs: tuple[Path, ...], cluster: ClusterOptions) -> None:
    """Add submissions, and GPUs granted and returned, from Slurm's accounting since the last time; for a timer."""
    from policy.access import user_name
    from policy.collect import collect
    from policy.units import parse_seconds
    from sluice.base.errors import UsageError
    from sluice.slurm import connect

    try:
        delay_s = parse_seconds(delay)
    except ValueError as error:
        raise UsageError(f"--delay: {error}") from error
    client = connect(conf=cluster.conf, prefix=cluster.prefix, timeout=600)
    count = collect(_log(cluster.state), client, user=user_name(), delay_s=delay_s, slurmctld_logs=logs)
    click.echo(f"sluice: {count} events", err=True)


def _chosen(
    log: AuditLog,
    user: str | None,
    action: str | None,
    subject: str | None,
    since: str | None,
    until: str | None,
    text: str | None,
) -> Iterator[AuditEntry]:
    begin = 0.0 if since is None else _time(since)
    end = float("inf") if until is None else _time(until)
    for entry in log.entries():
        if user is not None and entry.user != user:
            continue
        if action is not None and not entry.action.startswith(action):
            continue
        if subject is not None and entry.subject != subject:
            continue
        if not begin <= entry.time < end:
            continue
        if text is not None and text not in json.dumps(entry.document()):
            continue
        yield entry


def _time(text: str) -> float:
    from policy.units import parse_seconds
    from sluice.base.errors import UsageError

    try:
        if re.fullmatch(r"(?:\d+[smhdw])+", text):
            return time.time() - parse_seconds(text)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{text!r}: no time", remedy="write 2027-01-31, 2027-01-31T12:00, or 2d") from error


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
