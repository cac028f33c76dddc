"""`sluice gateway-rpc`: the gRPC door."""

from __future__ import annotations

from pathlib import Path

import click

_PATH = click.Path(path_type=Path)


@click.command("gateway-rpc")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=6826, show_default=True, metavar="PORT", help="Where.")
@click.option("--certificate", type=_PATH, metavar="FILE", help="TLS: the certificate and those above it, PEM.")
@click.option("--key", type=_PATH, metavar="FILE", help="TLS: its key, PEM.")
@click.option("--without-tls", is_flag=True, help="Listen on other addresses than this host's without TLS.")
@click.option("--gateway", default="http://127.0.0.1:6825", show_default=True, metavar="URL", help="`sluice gateway`.")
@click.option("--api", default="http://127.0.0.1:6823", show_default=True, metavar="URL", help="`sluice web`.")
@click.option("--api-ca", type=_PATH, metavar="FILE", help="Certificates that are trusted instead of the host's.")
@click.option("--program", default="", metavar="PATH", help="Of batch jobs, on the nodes (default: next to sluice).")
@click.option("-v", "--verbose", is_flag=True, help="Log more on standard error.")
def command(
    address: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    without_tls: bool,
    gateway: str,
    api: str,
    api_ca: Path | None,
    program: str,
    verbose: bool,
) -> None:
    """Serve gRPC until SIGTERM: requests to models by the gateway of this host, batch jobs by the REST API."""
    import os
    import re
    import sys

    from sluice.base.errors import SluiceError, UsageError
    from sluice.base.log import start_logging
    from sluice.cli.listening import check_listening

    if os.geteuid() == 0:
        raise SluiceError("root: this service needs no right", remedy="start it as sluice-gateway")
    found = check_listening(address, certificate, key, without_tls=without_tls, secrets="tokens")
    if program and not re.fullmatch(r"(/[A-Za-z0-9_.+-]+)+", program):  # it becomes a word of a script
        raise UsageError(f"--program {program!r}: not a plain path", remedy="write /opt/sluice/bin/sluice-batch")
    start_logging(verbose=verbose)
    try:
        from sluice.serve.rpc.server import Addresses, serve
    except ModuleNotFoundError as error:
        raise SluiceError(f"{error.name}: not installed", remedy="pip install 'sluice-slurm[grpc]'") from error
    listen = f"[{address}]:{port}" if found.version == 6 else f"{address}:{port}"
    serve(
        Addresses(
            listen,
            gateway,
            api,
            None if api_ca is None else str(api_ca),
            program or str(Path(sys.executable).with_name("sluice-batch")),
            certificate,
            key,
        )
    )
