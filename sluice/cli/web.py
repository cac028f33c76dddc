"""`sluice web`: the page and the REST API."""

from __future__ import annotations

from pathlib import Path

import click

_PATH = click.Path(path_type=Path)


@click.command("web")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=6823, show_default=True, metavar="PORT", help="Where.")
@click.option("--certificate", type=_PATH, metavar="FILE", help="TLS: the certificate and those above it, PEM.")
@click.option("--key", type=_PATH, metavar="FILE", help="TLS: its key, PEM.")
@click.option(
    "--proxy", "peers", multiple=True, metavar="NETWORK", help="A reverse proxy's address, whose header says who calls."
)
@click.option("--proxy-header", default="X-Remote-User", show_default=True, metavar="NAME", help="That header.")
@click.option("--without-tls", is_flag=True, help="Listen on other addresses than this host's without TLS.")
@click.option(
    "--snapshot",
    type=_PATH,
    default=Path("/run/sluice-snapshot/socket"),
    show_default=True,
    metavar="SOCKET",
    help="That of sluice-controllerd.",
)
@click.option(
    "--tokens",
    type=_PATH,
    default=Path("/etc/sluice/tokens.json"),
    show_default=True,
    metavar="FILE",
    help="The store of `sluice token`.",
)
@click.option(
    "--oidc",
    "provider",
    type=_PATH,
    default=Path("/etc/sluice/oidc.json"),
    show_default=True,
    metavar="FILE",
    help="The identity provider at which users log in, if it is there.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log more on standard error.")
def command(
    address: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    peers: tuple[str, ...],
    proxy_header: str,
    without_tls: bool,
    snapshot: Path,
    tokens: Path,
    provider: Path,
    verbose: bool,
) -> None:
    """Serve the page and the REST API until SIGTERM. Runs as a user of its own, who has no right in Slurm."""
    import os

    from sluice.base.errors import SluiceError
    from sluice.base.log import start_logging
    from sluice.base.oidc import load_settings
    from sluice.cli.listening import check_listening, check_networks

    if os.geteuid() == 0:
        raise SluiceError("root: this service needs no right", remedy="start it as sluice-web (sluice-web.service)")
    check_listening(address, certificate, key, without_tls=without_tls, secrets="tokens")
    networks = check_networks("--proxy", peers)
    settings = load_settings(provider)
    start_logging(verbose=verbose)
    try:
        from sluice.web.serve import serve

        serve(address, port, snapshot, tokens, networks, proxy_header, certificate, key, settings)
    except ModuleNotFoundError as error:
        raise SluiceError(f"{error.name}: not installed", remedy="pip install 'sluice-slurm[web]'") from error
