"""`sluice gateway`: the OpenAI API before the replicas of services."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import oidc_option, tokens_option, verbose_option
from sluice.cli.listening import Listening, check_networks, listening_options

_PATH = click.Path(path_type=Path)


@click.command("gateway")
@listening_options(6825, least=0, variable="SLUICE_GATEWAY_PORT")
@click.option("--workers", type=click.IntRange(1, 12), default=2, show_default=True, metavar="N", help="Processes.")
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="NETWORK",
    help="A load balancer's address, whose X-Forwarded-For holds.",
)
@click.option(
    "--metrics-from", multiple=True, default=("127.0.0.0/8", "::1"), metavar="NETWORK", help="Who may read /metrics."
)
@click.option(
    "--replicad",
    type=_PATH,
    default=Path("/run/sluice-serve/socket"),
    show_default=True,
    metavar="SOCKET",
    help="That of sluice-replicad.",
)
@tokens_option
@oidc_option
@click.option(
    "--records",
    type=_PATH,
    default=Path("/var/lib/sluice-gateway/requests"),
    show_default=True,
    metavar="FOLDER",
    help="Where usage records go.",
)
@click.option(
    "--services",
    type=_PATH,
    default=Path("/etc/slurm/sluice.services.json"),
    show_default=True,
    metavar="FILE",
    help="What `sluice apply` wrote next to slurm.conf; for files and batches.",
)
@click.option(
    "--keep-records", type=click.IntRange(1), default=400, show_default=True, metavar="DAYS", help="How long."
)
@click.option("--no-access-log", is_flag=True, help="No line for each request on standard error.")
@verbose_option
def command(
    listening: Listening,
    workers: int,
    proxies: tuple[str, ...],
    metrics_from: tuple[str, ...],
    replicad: Path,
    tokens: Path,
    oidc: Path,
    records: Path,
    services: Path,
    keep_records: int,
    no_access_log: bool,
    verbose: bool,
) -> None:
    """Serve the OpenAI API until SIGTERM. Runs as a user of its own; SIGHUP replaces its workers.

    No connection is lost then: old workers end what they have.
    """
    import os

    from sluice.base.errors import SluiceError, UsageError
    from sluice.base.log import start_logging
    from sluice.base.oidc import load_settings

    if os.geteuid() == 0:
        raise SluiceError(
            "root: this service needs no right", remedy="start it as sluice-gateway (sluice-gateway.service)"
        )
    listening.check("keys and prompts")
    check_networks("--proxy", proxies)
    check_networks("--metrics-from", metrics_from)
    if not records.is_dir() or not os.access(records, os.W_OK):
        raise UsageError(f"--records {records}: not a folder that may be written", remedy="make it, for this user")
    load_settings(oidc)
    start_logging(verbose=verbose)
    try:
        from sluice.serve.gateway.parent import Options, serve
        from sluice.serve.gateway.worker import Settings, client_context
    except ModuleNotFoundError as error:
        raise SluiceError(f"{error.name}: not installed", remedy="pip install 'sluice-slurm[serve]'") from error
    certificate, key = (None if path is None else str(path) for path in (listening.certificate, listening.key))
    if certificate is not None and key is not None:
        client_context(certificate, key)
    settings = Settings(
        listening=-1, region=-1, repeated=-1, wakes=(), tokens=str(tokens), oidc=str(oidc), records=str(records),
        proxies=proxies, metrics_from=metrics_from, certificate=certificate, key=key, access_log=not no_access_log,
        verbose=verbose, services=str(services),
    )  # fmt: skip
    serve(Options(listening.address, listening.port, workers, replicad, keep_records * 86_400.0, settings))
