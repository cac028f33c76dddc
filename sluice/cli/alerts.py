"""`sluice alerts`: what fires, whether the sinks work, and silence for a while. For administrators, on a controller."""

from __future__ import annotations

import fnmatch
import getpass
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.slurm_options import where_options
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from policy.alerts import NodeAlerts


@click.group("alerts")
def command() -> None:
    """What fires now, whether the sinks work, and silence. For root and SlurmUser, on a controller."""


def _folder(conf: Path | None, prefix: Path | None) -> tuple[Path, dict[str, str]]:
    """The folder of alerts and slurmctld's configuration. Raises SluiceError where this user may not read it."""
    from sluice.base.errors import SluiceError
    from sluice.controllerd.alerts.duty import alerts_folder
    from sluice.slurm import connect

    config = dict(connect(conf=conf, prefix=prefix, timeout=15).config())
    folder = alerts_folder(Path(config.get("StateSaveLocation", "")))
    readable = os.access(folder.parent, os.R_OK | os.X_OK)
    if not readable or (folder.exists() and not os.access(folder, os.R_OK | os.X_OK)):
        raise SluiceError(f"{folder}: not this user's to read", remedy="run it as root or SlurmUser on a controller")
    return folder, config


def _alerts(config: dict[str, str]) -> NodeAlerts:
    """The alerts of the policy in force. Raises SluiceError where it cannot be read."""
    from policy.node import FILE_NAME, NodePolicyFile

    file = NodePolicyFile(Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent / FILE_NAME)
    found = file.current().alerts
    if file.problem is not None:
        raise file.problem
    return found


@command.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also what has not held long enough, and silences.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@table_options
@where_options
def list_(
    everything: bool,
    as_json: bool,
    table: TableOptions,
    conf: Path | None,
    prefix: Path | None,
) -> None:
    """What fires now; exit status 0, also when nothing does."""
    from sluice.controllerd.alerts.listing import alerts_document
    from sluice.exchange.silences import read_silences

    folder, config = _folder(conf, prefix)
    now = time.time()
    found = alerts_document(folder, now, everything=everything)
    rows, waiting = found["alerts"], found["undelivered"]
    silences = read_silences(folder, now)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("rule", lambda row: row["rule"]),
        Column("state", lambda row: row["state"]),
        Column("since", lambda row: row["since"], _moment),
        Column("subject", lambda row: row["subject"]),
        Column("what", lambda row: row["text"]),
        Column("value", lambda row: row["value"], lambda value: f"{value:g}", right=True),
    ]
    default = ("rule", "state", "since", "subject", "what")
    table.print(columns, rows, default=default)
    for silence in silences if everything and not table.parsable2 else ():
        click.echo(
            f"silence {silence.id}: {silence.rule} {silence.subject} until {_moment(silence.until)} "
            f"by {silence.by} {silence.comment}".rstrip(),
            err=True,
        )
    if waiting:
        click.echo(f"sluice: {waiting} messages wait for their sinks", err=True)
    if not rows and not table.asked and not _alerts(config).rules:
        click.echo("sluice: the policy has no rules for alerts", err=True)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


@command.command()
@click.argument("sinks", nargs=-1, metavar="[SINK]...")
@where_options
def test(sinks: tuple[str, ...], conf: Path | None, prefix: Path | None) -> None:
    """Send a test message to the SINKs, or to all; exit status 1 if one did not accept it.

    Secrets are read as the user who runs it: run it as SlurmUser to try what the daemon can.
    """
    from sluice.base.errors import SluiceError, UsageError
    from sluice.controllerd.alerts.engine import trial
    from sluice.controllerd.alerts.sinks import make_sinks

    _, config = _folder(conf, prefix)
    settings = _alerts(config).sinks
    if not settings:
        raise UsageError("the policy has no alerts", remedy="add a section `alerts` to sluice.yaml, then sluice apply")
    for name in sinks:
        if name not in settings:
            raise UsageError(f"sink {name!r}: not in the policy", remedy=f"its sinks are {', '.join(settings)}")
    made = make_sinks(settings)
    failed = False
    for name in sinks or tuple(settings):
        try:
            made[name](trial(config.get("ClusterName", "")))
        except (SluiceError, OSError, ValueError) as error:
            failed = True
            click.echo(f"{name}: {error}", err=True)
        else:
            click.echo(f"{name}: taken")
    if failed:
        raise SluiceError(
            "a sink did not take the message", remedy="correct the sinks above in sluice.yaml, then: sluice apply"
        )


@command.command()
@click.argument("rule")
@click.option("--subject", default="*", metavar="PATTERN", help="Only subjects like this, e.g. 'gpu-1 *'.")
@click.option("--for", "duration", metavar="TIME", default="4h", show_default=True, help="How long.")
@click.option("--comment", default="", metavar="TEXT", help="Why.")
@click.option("--remove", is_flag=True, help="RULE is the number of a silence, which ends now.")
@where_options
def silence(
    rule: str, subject: str, duration: str, comment: str, remove: bool, conf: Path | None, prefix: Path | None
) -> None:
    """Send no notices of RULE (a rule's name, or a pattern such as '*') for a while."""
    import secrets

    from policy.units import parse_seconds
    from sluice.base.errors import SluiceError, UsageError
    from sluice.base.text import one_line
    from sluice.exchange.silences import Silence, add_silence, end_silence

    folder, config = _folder(conf, prefix)
    now = time.time()
    if remove:
        end_silence(folder, rule, now)
        return
    try:
        seconds = parse_seconds(duration)
    except ValueError as error:
        raise UsageError(f"--for: {error}") from error
    one = Silence(
        secrets.token_hex(4), one_line(rule), one_line(subject), now + seconds, getpass.getuser(), one_line(comment)
    )
    add_silence(folder, one, now)
    click.echo(f"{one.id}: until {_moment(one.until)}")
    with suppress(SluiceError):  # a policy that cannot be read does not prevent a silence
        rules = [each.name for each in _alerts(config).rules]
        if not any(fnmatch.fnmatchcase(name, one.rule) for name in rules):
            known = ", ".join(rules) or "none"
            click.echo(f"sluice: no rule of the policy is called {one.rule!r} now; its rules: {known}", err=True)
