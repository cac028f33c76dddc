"""`sluice web`: the page and the REST API."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import oidc_option, snapshot_option, tokens_option, verbose_option
from sluice.cli.listening import Listening, check_networks, listening_options

_PATH = click.Path(path_type=Path)


@click.command("web")
@listening_options(6823)
@click.option(
    "--proxy", "peers", multiple=True, metavar="NETWORK", help="A reverse proxy's address, whose header says who calls."
)
@click.option("--proxy-header", default="X-Remote-User", show_default=True, metavar="NAME", help="That header.")
@snapshot_option
@tokens_option
@oidc_option
@verbose_option
def command(
    listening: Listening,
    peers: tuple[str, ...],
    proxy_header: str,
    snapshot: Path,
    tokens: Path,
    oidc: Path,
    verbose: bool,
) -> None:
    """Serve the page and the REST API until SIGTERM. Runs as a user of its own, who has no right in Slurm."""
    import os

    from sluice.base.errors import SluiceError
    from sluice.base.log import start_logging
    from sluice.base.oidc import load_settings

    if os.geteuid() == 0:
        raise SluiceError("root: this service needs no right", remedy="start it as sluice-web (sluice-web.service)")
    listening.check("tokens")
    networks = check_networks("--proxy", peers)
    settings = load_settings(oidc)
    start_logging(verbose=verbose)
    try:
        from sluice.web.serve import serve

        serve(
            listening.address,
            listening.port,
            snapshot,
            tokens,
            networks,
            proxy_header,
            listening.certificate,
            listening.key,
            settings,
        )
    except ModuleNotFoundError as error:
        raise SluiceError(f"{error.name}: not installed", remedy="pip install 'sluice-slurm[web]'") from error
