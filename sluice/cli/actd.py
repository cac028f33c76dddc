"""`sluice actd`: does what callers of `sluice web` ask, as them."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.daemon_options import oidc_option, tokens_option, verbose_option

_PATH = click.Path(path_type=Path)


@click.command("actd")
@click.option(
    "--socket",
    "path",
    type=_PATH,
    default=Path("/run/sluice-act/socket"),
    show_default=True,
    metavar="SOCKET",
    help="Where the web process asks.",
)
@click.option("--web-user", default="sluice-web", show_default=True, metavar="USER", help="Who may ask besides root.")
@tokens_option
@oidc_option
@click.option(
    "--policy",
    type=_PATH,
    default=Path("/etc/sluice/sluice.yaml"),
    show_default=True,
    metavar="FILE",
    help="The policy file that an applied plan replaces.",
)
@click.option(
    "--state-dir",
    "state",
    type=_PATH,
    default=Path("/var/lib/sluice"),
    show_default=True,
    metavar="DIR",
    help="Of the audit log, and of what was asked.",
)
@click.option(
    "--serve-user",
    default="sluice-serve",
    show_default=True,
    metavar="USER",
    help="Who may launch and end replicas of services, and nothing else.",
)
@click.option(
    "--replica-program",
    "replica",
    type=_PATH,
    metavar="FILE",
    help="What a replica's job runs, as nodes have it; default: sluice-replica next to this program.",
)
@click.option("--slurm-conf", "conf", type=_PATH, metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", "prefix", type=_PATH, metavar="DIR", help="Where Slurm is installed.")
@verbose_option
def command(
    path: Path, web_user: str, tokens: Path, oidc: Path, policy: Path, state: Path, serve_user: str,
    replica: Path | None, conf: Path | None, prefix: Path | None, verbose: bool,
) -> None:  # fmt: skip
    """Act for callers of `sluice web`, as them, until SIGTERM. Runs as root, next to it."""
    import os
    import signal
    import threading
    from contextlib import suppress
    from dataclasses import replace

    from sluice.actd.become import gain_nothing
    from sluice.actd.server import Actd, Settings
    from sluice.base.errors import SluiceError
    from sluice.base.log import start_logging
    from sluice.base.service import notify

    if os.geteuid() != 0:
        raise SluiceError(f"uid {os.geteuid()}: cannot become users", remedy="start it as root (sluice-actd.service)")
    start_logging(verbose=verbose)
    os.umask(0o022)
    gain_nothing()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with suppress(FileExistsError):  # without systemd
        path.parent.mkdir(mode=0o755)
    settings = Settings(path, web_user, tokens, oidc, state, policy, conf, prefix, serve_user)
    actd = Actd(settings if replica is None else replace(settings, replica=replica))
    notify("READY=1")
    actd.serve(stopping)
