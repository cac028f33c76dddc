"""`sluice gateway-rpc`: the gRPC door."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import verbose_option
from sluice.cli.listening import Listening, listening_options

_PATH = click.Path(path_type=Path)


@click.command("gateway-rpc")
@listening_options(6826)
@click.option("--gateway", default="http://127.0.0.1:6825", show_default=True, metavar="URL", help="`sluice gateway`.")
@click.option("--api", default="http://127.0.0.1:6823", show_default=True, metavar="URL", help="`sluice web`.")
@click.option("--api-ca", type=_PATH, metavar="FILE", help="Certificates that are trusted instead of the host's.")
@click.option("--program", default="", metavar="PATH", help="Of batch jobs, on the nodes (default: next to sluice).")
@verbose_option
def command(
    listening: Listening,
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

    if os.geteuid() == 0:
        raise SluiceError("root: this service needs no right", remedy="start it as sluice-gateway")
    found = listening.check("tokens")
    if program and not re.fullmatch(r"(/[A-Za-z0-9_.+-]+)+", program):  # it becomes a word of a script
        raise UsageError(f"--program {program!r}: not a plain path", remedy="write /opt/sluice/bin/sluice-batch")
    start_logging(verbose=verbose)
    try:
        from sluice.serve.rpc.server import Addresses, serve
    except ModuleNotFoundError as error:
        raise SluiceError(f"{error.name}: not installed", remedy="pip install 'sluice-slurm[grpc]'") from error
    host = f"[{listening.address}]" if found.version == 6 else listening.address
    serve(
        Addresses(
            f"{host}:{listening.port}",
            gateway,
            api,
            None if api_ca is None else str(api_ca),
            program or str(Path(sys.executable).with_name("sluice-batch")),
            listening.certificate,
            listening.key,
        )
    )
