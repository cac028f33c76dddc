"""`sluice explaind`: answers `sluice explain` on the controllers."""

from __future__ import annotations

from pathlib import Path

import click

from admin_cli.explain import DEFAULT_PORT


@click.command("explaind")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, envvar="SLUICE_EXPLAIN_PORT", show_default=True,
    metavar="PORT", help="Where to listen.",
)  # fmt: skip
@click.option("--address", "addresses", multiple=True, metavar="ADDRESS", help="Listen here only; default: everywhere.")
@click.option(
    "--records", type=click.Path(path_type=Path), metavar="DIR",
    help="The decision records; default: sluice.records in StateSaveLocation.",
)  # fmt: skip
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed.")
@click.option("-v", "--verbose", is_flag=True, help="Also say which requests are refused.")
def command(
    port: int,
    addresses: tuple[str, ...],
    records: Path | None,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    verbose: bool,
) -> None:
    """Answer `sluice explain` of users on other hosts. Runs on the controllers, as SlurmUser; root is dropped.

    Reads slurmctld's decision records and asks Slurm's commands; writes nothing. Who asks is known by munge, and
    PrivateData (jobs, nodes, usage) holds.
    """
    import logging
    import signal
    import threading

    from slurm_client.munge_service import listen
    from slurm_plugin.explain_service import Server, drop_privileges, open_site, records_folder, slurm_user

    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="explaind: %(message)s")
    site = open_site(slurm_conf, slurm_prefix)
    config = site.config()
    sockets = listen(addresses, port)
    drop_privileges(slurm_user(config))
    server = Server(site, records or records_folder(config), sockets)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    click.echo(f"explaind: listening on port {port}, records in {server.records}", err=True)
    thread = threading.Thread(target=server.serve)
    thread.start()
    thread.join()
