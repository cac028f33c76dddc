"""`sluice fleetd`: launches and ends the nodes of pools."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import verbose_option
from sluice.cli.slurm_options import where_options

_PATH = click.Path(path_type=Path)
_LATER = ("ClusterShell.NodeSet", "sluice.slurm.text")
"""What is imported when it is first needed: imported while root."""


@click.command("fleetd")
@click.option(
    "--state-dir",
    "state",
    type=_PATH,
    default=Path("/var/lib/sluice/fleet"),
    show_default=True,
    metavar="DIR",
    help="Of the journal and what is published, to which the default folder gets links; SlurmUser's, with two "
    "controllers on storage that both have.",
)
@click.option(
    "--requests",
    type=_PATH,
    default=Path("/run/sluice-fleet/requests"),
    show_default=True,
    metavar="DIR",
    help="Where sluice-resume and sluice-suspend leave their requests; SlurmUser's.",
)
@click.option(
    "--credentials",
    type=_PATH,
    default=Path("/etc/sluice/fleet"),
    show_default=True,
    metavar="DIR",
    help="Credentials of drivers whose providers have no place of their own: POOL.json.",
)
@where_options
@verbose_option
def command(
    state: Path, requests: Path, credentials: Path, conf: Path | None, prefix: Path | None, verbose: bool
) -> None:
    """Launch the nodes of pools that Slurm wants, and end those that it calls off, until SIGTERM.

    One on each controller, as SlurmUser (root is dropped); it acts where that controller leads.
    """
    import importlib
    import os
    import signal
    import threading

    from sluice.base.log import start_logging
    from sluice.exchange.fleet import STATE
    from sluice.fleet.daemon import Fleetd, Settings
    from sluice.fleet.published import lead_to
    from sluice.slurm import Commands, connect
    from sluice.slurm.leader import wait_for_config
    from sluice.slurm.user import drop_privileges, slurm_user

    start_logging(verbose=verbose)
    os.umask(0o022)
    for name in _LATER:
        importlib.import_module(name)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    client = connect(conf=conf, prefix=prefix, timeout=30)
    config = wait_for_config(client.config, stopping)
    if config is None:
        return
    user = slurm_user(config)
    if os.geteuid() == 0:  # without systemd, they do not exist yet
        for folder in (state, requests, STATE):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            os.chown(folder, user, -1)
    drop_privileges(user)
    lead_to(state)
    file = Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    settings = Settings(file, state, requests, credentials)
    Fleetd(settings, client, Commands(prefix=prefix, conf=conf, timeout=30), stopping).serve()
