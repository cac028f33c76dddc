"""`sluice explaind`: answers `sluice explain` on the controllers."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.decisions_option import decisions_option
from sluice.cli.explain import DEFAULT_PORT


@click.command("explaind")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    envvar="SLUICE_EXPLAIN_PORT",
    show_default=True,
    metavar="PORT",
    help="Where to listen.",
)
@click.option("--address", "addresses", multiple=True, metavar="ADDRESS", help="Listen here only; default: everywhere.")
@decisions_option()
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed.")
@click.option("-v", "--verbose", is_flag=True, help="Also log refused requests.")
def command(
    port: int,
    addresses: tuple[str, ...],
    decisions: Path | None,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    verbose: bool,
) -> None:
    """Answer `sluice explain` of users on other hosts. Runs on the controllers, as SlurmUser; root is dropped.

    Reads slurmctld's decisions and asks Slurm's commands; writes nothing. Who asks is known by munge, and
    PrivateData (jobs, nodes, usage) holds.
    """
    import signal
    import threading
    from contextlib import suppress

    from sluice.base.log import PREFIX, start_logging
    from sluice.base.service import notify
    from sluice.explain.explain_service import Server, decisions_folder, open_site
    from sluice.slurm.munge import MungeError, prepare
    from sluice.slurm.munge_service import listen
    from sluice.slurm.user import drop_privileges, slurm_user

    start_logging(verbose=verbose)
    site = open_site(slurm_conf, slurm_prefix)
    config = site.config()
    sockets = listen(addresses, port)
    with suppress(MungeError):  # reported when a request needs it
        prepare()  # while root: SlurmUser may not be able to read a development checkout
    drop_privileges(slurm_user(config))
    server = Server(site, decisions or decisions_folder(config), sockets)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    click.echo(f"{PREFIX}listening on port {port}, decisions in {server.decisions}", err=True)
    thread = threading.Thread(target=server.serve)
    thread.start()
    notify("READY=1")
    thread.join()
