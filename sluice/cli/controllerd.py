"""`sluice controllerd`: recurring work on the controllers."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import verbose_option

STATE = Path("/var/lib/sluice/controllerd")
_LATER = ("yaml", "ClusterShell.NodeSet", "influxdb_client._sync.rest", "sluice.slurm.text")
"""What duties import when they first need it: imported while root."""
SNAPSHOT = Path("/run/sluice-snapshot/socket")
EVENTS = Path("/var/lib/sluice/controllerd/events.jsonl")


@click.group("controllerd", invoke_without_command=True)
@click.option(
    "--state",
    default=STATE,
    show_default=True,
    type=click.Path(path_type=Path, readable=False),
    metavar="DIR",
    help="Where duties keep what they know; SlurmUser's.",
)
@click.option(
    "--events",
    default=EVENTS,
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What happened on this controller; read by alerts.",
)
@click.option(
    "--snapshot",
    "snapshot_socket",
    default=SNAPSHOT,
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="SOCKET",
    help="Where the web process gets the cluster from.",
)
@click.option(
    "--web-user",
    default="sluice-web",
    show_default=True,
    metavar="USER",
    help="Who may have it besides root and SlurmUser.",
)
@click.option(
    "--serve-user",
    default="sluice-serve",
    show_default=True,
    metavar="USER",
    help="Who may have the jobs of services' replicas.",
)
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed.")
@verbose_option
@click.pass_context
def command(
    context: click.Context,
    state: Path,
    events: Path,
    snapshot_socket: Path,
    web_user: str,
    serve_user: str,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    verbose: bool,
) -> None:
    """Run the controller-side daemon until SIGTERM: metrics of the cluster, health, alerts.

    One on each controller, as SlurmUser (root is dropped); it acts where that controller leads.
    """
    context.obj = state
    if context.invoked_subcommand is not None:
        return
    import importlib
    import os
    import signal
    from contextlib import suppress

    from sluice.base.log import start_logging
    from sluice.controllerd import snapshot
    from sluice.controllerd.daemon import Controllerd, Site
    from sluice.controllerd.duties import duties  # while root: SlurmUser may not be able to read a development checkout
    from sluice.slurm import Commands, connect
    from sluice.slurm.leader import wait_for_config
    from sluice.slurm.munge import MungeError, prepare
    from sluice.slurm.user import drop_privileges, slurm_user

    start_logging(verbose=verbose)
    site = Site(
        connect(conf=slurm_conf, prefix=slurm_prefix, timeout=30),
        Commands(prefix=slurm_prefix, conf=slurm_conf, timeout=30),
        state,
        events=events,
    )
    snapshot.configure(site, snapshot.Settings(snapshot_socket, web_user, serve_user=serve_user))
    for name in _LATER:
        importlib.import_module(name)
    with suppress(MungeError):  # reported when a duty needs it
        prepare()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: site.stopping.set())
    config = wait_for_config(site.config, site.stopping)
    if config is None:
        return
    user = slurm_user(config)
    if os.geteuid() == 0:  # without systemd, it does not exist yet
        state.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.chown(state, user, -1)
        try:
            snapshot.make_folder(snapshot_socket.parent, user)
        except OSError as error:  # its duties say that they are left out
            snapshot.log.error("%s: %s", snapshot_socket.parent, error.strerror)
    drop_privileges(user)
    Controllerd(site, duties(site)).serve()


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole report.")
@click.pass_obj
def status(state: Path, as_json: bool) -> None:
    """What the duties of this controller's daemon did last (root and SlurmUser)."""
    import json
    import time

    from sluice.base.errors import SluiceError

    path = state / "status.json"
    try:
        report = json.loads(path.read_text())
    except PermissionError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="run it as root or SlurmUser") from error
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="is sluice-controllerd running on this host?") from error
    if as_json:
        click.echo(json.dumps(report))
        return
    age = time.time() - report["written"]
    click.echo(f"{report['host']}: {'leads' if report['leads'] else 'does not lead'}, as of {age:.0f} s ago")
    for duty in report["duties"]:
        last = "never" if duty["last"] is None else f"{time.time() - duty['last']:.0f} s ago, {duty['took_s']:.2f} s"
        when = "runs" if duty.get("serves") else f"every {duty['period_s']:g} s; last {last}"
        click.echo(f"{duty['name']}: {when}; {duty['problem'] or 'ok'}")
