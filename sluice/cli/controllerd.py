"""`sluice controllerd`: what Sluice does again and again on the controllers."""

from __future__ import annotations

from pathlib import Path

import click

STATE = Path("/var/lib/sluice/controllerd")
_LATER = ("yaml", "ClusterShell.NodeSet", "influxdb_client._sync.rest", "slurm_client.text", "slurm_client.json_client")
"""What duties import when they first need it."""
EVENTS = Path("/var/lib/sluice/controllerd/events.jsonl")
# Each module has a function `duties(site)`; see usage/controllerd.py.
DUTIES: tuple[str, ...] = (
    "failover.duty",
    "health.controller",
    "usage.alerts.duty",
    "usage.inbox",
    "usage.metrics.cluster",
    "usage.report.duty",
)


@click.group("controllerd", invoke_without_command=True)
@click.option(
    "--state", default=STATE, show_default=True, type=click.Path(path_type=Path, readable=False), metavar="DIR",
    help="Where duties keep what they know; SlurmUser's.",
)  # fmt: skip
@click.option(
    "--events", default=EVENTS, show_default=True, type=click.Path(path_type=Path), metavar="FILE",
    help="What happened on this controller; read by alerts.",
)  # fmt: skip
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed.")
@click.option("-v", "--verbose", is_flag=True, help="Say more on standard error.")
@click.pass_context
def command(
    context: click.Context,
    state: Path,
    events: Path,
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
    import logging
    import os
    import signal
    from contextlib import suppress

    from slurm_client import Commands, connect
    from slurm_client.munge import MungeError, prepare
    from slurm_plugin.explain_service import drop_privileges, slurm_user
    from usage.controllerd import Controllerd, Site, collect, load, wait_for_config

    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="controllerd: %(message)s")
    site = Site(
        connect(conf=slurm_conf, prefix=slurm_prefix, timeout=30),
        Commands(prefix=slurm_prefix, conf=slurm_conf, timeout=30),
        state,
        events=events,
    )
    modules = load(DUTIES)  # while root: a development checkout may be shut to SlurmUser
    for name in _LATER:
        importlib.import_module(name)
    with suppress(MungeError):  # told by whoever needs it
        prepare()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: site.stopping.set())
    config = wait_for_config(site)
    if config is None:
        return
    user = slurm_user(config)
    if os.geteuid() == 0:  # elsewhere than under systemd, nobody has made it
        state.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.chown(state, user, -1)
    drop_privileges(user)
    Controllerd(site, collect(modules, site)).serve()


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole report.")
@click.pass_obj
def status(state: Path, as_json: bool) -> None:
    """What the duties of this controller's daemon did last (root and SlurmUser)."""
    import json
    import time

    from sluice_base.errors import SluiceError

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
