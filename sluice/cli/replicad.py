"""`sluice replicad`: keeps the replicas of services."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import snapshot_option, verbose_option

_PATH = click.Path(path_type=Path)


@click.command("replicad")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="ADDRESS",
    help="Where to listen for replicas; default: on all addresses of this host.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Where; default: SLUICE_REPLICAD_PORT of the environment, else 6824.",
)
@click.option(
    "--socket",
    "path",
    type=_PATH,
    default=Path("/run/sluice-serve/socket"),
    show_default=True,
    metavar="SOCKET",
    help="Where the gateways of this host ask.",
)
@click.option(
    "--gateway-user",
    default="sluice-gateway",
    show_default=True,
    metavar="USER",
    help="Who may ask there, besides root; Slurm's user may have the status.",
)
@snapshot_option
@click.option(
    "--actd",
    type=_PATH,
    default=Path("/run/sluice-act/socket"),
    show_default=True,
    metavar="SOCKET",
    help="That of sluice-actd, which launches and ends replicas.",
)
@click.option(
    "--state-dir",
    "state",
    type=_PATH,
    default=Path("/var/lib/sluice/replicad"),
    show_default=True,
    metavar="DIR",
    help="Of the launches that were asked for, and of the need of earlier days.",
)
@click.option("--slurm-conf", "conf", type=_PATH, metavar="PATH", help="slurm.conf or its folder.")
@verbose_option
def command(
    addresses: tuple[str, ...],
    port: int | None,
    path: Path,
    gateway_user: str,
    snapshot: Path,
    actd: Path,
    state: Path,
    conf: Path | None,
    verbose: bool,
) -> None:
    """Keep as many replicas of each service as are wanted, until SIGTERM.

    One on each controller, as a user of its own, who has no right in Slurm; it acts where that controller leads.
    """
    import os
    import signal
    import threading

    from sluice.base.errors import SluiceError
    from sluice.base.log import start_logging
    from sluice.serve.replicad.daemon import Replicad, Settings
    from sluice.slurm.munge import prepare

    if os.geteuid() == 0:
        raise SluiceError(
            "root: this daemon needs no right", remedy="start it as sluice-serve (sluice-replicad.service)"
        )
    start_logging(verbose=verbose)
    os.umask(0o077)
    prepare()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    file = conf or Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    settings = Settings(
        file / "slurm.conf" if file.is_dir() else file, state, path, snapshot, actd, gateway_user, addresses, port or 0
    )
    Replicad(settings, stopping).serve()
