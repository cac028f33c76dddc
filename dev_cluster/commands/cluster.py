"""`sluice cluster`: a whole Slurm cluster on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import SluiceError

if TYPE_CHECKING:
    from dev_cluster.description import ClusterDescription

_folder = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="State folder; default: $SLUICE_CLUSTER_DIR, else /run/sluice-cluster.",
)


@click.group("cluster")
def command() -> None:
    """A whole Slurm cluster on this machine, for tests and demonstrations. Needs root."""


@command.command()
@_folder
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Another Slurm's prefix.")
@click.option("--root", type=click.Path(path_type=Path), metavar="DIR", help="Take all programs from this system tree.")
@click.option("--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds.")
@click.option("--list", "list_names", is_flag=True, help="Name the clusters that come with Sluice.")
@click.argument("description", default="demo", metavar="[CLUSTER]")
def up(
    folder: Path | None,
    slurm_prefix: Path | None,
    root: Path | None,
    timeout: float,
    list_names: bool,
    description: str,
) -> None:
    """Bring up CLUSTER, one that comes with Sluice or a file, and wait until its nodes are idle. Default: demo.

    The whole of Sluice runs there, except for what the file sets itself; `sluice: false` is stock Slurm.
    """
    from dev_cluster.cluster import DevCluster
    from dev_cluster.description import load_description, shipped_names
    from dev_cluster.whole import with_sluice
    from sluice.plugin.sources import SourcesUnavailableError

    if list_names:
        click.echo("\n".join(shipped_names()))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as after Ctrl-C: everything down again
        signal.signal(number, _interrupt)
    cluster = DevCluster(folder)
    progress = _Progress()
    asked = load_description(description)

    def bring_up(wanted: ClusterDescription) -> None:
        cluster.up(wanted, slurm_prefix=slurm_prefix, root=root, timeout=timeout, progress=progress.say)

    try:
        bring_up(with_sluice(asked))
    except SourcesUnavailableError as error:
        if asked.sluice is not None:
            raise
        progress.say(f"stock Slurm, because Sluice's plugins cannot be built: {error}")
        bring_up(asked)
    progress.say(f"up; next: sluice cluster exec{f' --dir {folder}' if folder else ''} -- sinfo")


@command.command()
@_folder
def down(folder: Path | None) -> None:
    """Remove every process, mount, namespace and file of the cluster, whatever state it is in."""
    from dev_cluster.cluster import DevCluster

    cluster = DevCluster(folder)
    if not cluster.down():
        click.echo(f"{cluster.folder}: no cluster here; nothing to do", err=True)


@command.command()
@_folder
@click.option("-P", "--parsable2", is_flag=True, help="Fields separated by '|'.")
@click.option("-n", "--noheader", is_flag=True, help="No header lines.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(folder: Path | None, parsable2: bool, noheader: bool, as_json: bool) -> None:
    """Daemons and nodes; exit 0 when all daemons run and all nodes are up."""
    from dev_cluster.cluster import DevCluster

    cluster = DevCluster(folder)
    facts = cluster.facts
    daemons = cluster.daemons()
    nodes = cluster.node_states()
    if as_json:
        import json
        from dataclasses import asdict

        document: dict[str, Any] = {
            "schema_version": 1,
            "folder": str(cluster.folder),
            "state": facts["state"],
            "ports": facts["ports"],
            "daemons": [asdict(daemon) for daemon in daemons],
            "nodes": [asdict(node) for node in nodes],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        rows = [
            ("DAEMON", "HOST", "STATE"),
            *((d.name, d.host, "running" if d.status is None else f"ended ({d.status})") for d in daemons),
        ]
        _table(rows, parsable2, noheader)
        if not parsable2:
            click.echo()
        _table([("NODE", "STATE", "GRES"), *((n.name, n.state, n.gres) for n in nodes)], parsable2, noheader)
    good = facts["state"] == "up" and all(daemon.status is None for daemon in daemons)
    if not good or any(node.state.startswith(("down", "drain", "fail", "inval")) for node in nodes):
        raise click.exceptions.Exit(1)


@command.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_folder
@click.option("-w", "--node", default="login", show_default=True, help="Host: login, a controller, or a node.")
@click.option("-u", "--user", default="root", show_default=True, help="One of the cluster's users.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]...")
def exec_(folder: Path | None, node: str, user: str, words: tuple[str, ...]) -> None:
    """Run COMMAND inside the cluster, or a shell; exits as it does."""
    from dev_cluster.cluster import DevCluster

    line = DevCluster(folder).command(words or ("/bin/bash",), node=node, user=user)
    sys.stdout.flush()
    os.execvp(line[0], line)  # noqa: S606 - no shell is wanted


@command.command()
@_folder
@click.option("-n", "--lines", type=click.IntRange(0), default=20, show_default=True, help="Last lines shown.")
@click.option("-f", "--follow", is_flag=True, help="Follow the log.")
@click.argument("daemon", required=False)
def logs(folder: Path | None, lines: int, follow: bool, daemon: str | None) -> None:
    """Print what DAEMON has logged; without one, the names of all logs."""
    from dev_cluster.cluster import DevCluster

    cluster = DevCluster(folder)
    names = sorted(path.stem for path in cluster.layout.logs.glob("*.log"))
    if daemon is None:
        cluster.facts  # noqa: B018 - complains when there is no cluster
        click.echo("\n".join(names))
        return
    if daemon not in names:
        raise SluiceError(f"daemon {daemon!r}: has no log", remedy=f"those that have are {', '.join(names[:12])}")
    if lines:
        click.echo(cluster.log_tail(daemon, lines))
    if follow:
        with cluster.log(daemon).open(errors="replace") as file:
            file.seek(0, os.SEEK_END)
            while cluster.is_up:
                click.echo(file.read(), nl=False)
                time.sleep(0.2)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Progress:
    """Lines on stderr with the seconds since the start; a count is updated in its line on a terminal."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.counting = False

    def say(self, text: str) -> None:
        """One step."""
        counts = self.terminal and text.startswith("nodes idle")
        if self.counting and not counts:
            click.echo(err=True)
        rewind, end = ("\r", False) if counts else ("", True)
        click.echo(f"{rewind}{time.monotonic() - self.start:6.1f} s  {text}", err=True, nl=end)
        self.counting = counts


def _table(rows: Sequence[tuple[str, ...]], parsable: bool, noheader: bool) -> None:
    shown = rows[1:] if noheader else rows
    if parsable:
        click.echo("\n".join("|".join(row) for row in shown))
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in shown:
        click.echo(" ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
