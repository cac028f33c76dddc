"""Options that several of Sluice's daemons have."""

from __future__ import annotations

from pathlib import Path

import click

_PATH = click.Path(path_type=Path)

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Log more on standard error.")

tokens_option = click.option(
    "--tokens",
    type=_PATH,
    default=Path("/etc/sluice/tokens.json"),
    show_default=True,
    metavar="FILE",
    help="The store of `sluice token`.",
)

oidc_option = click.option(
    "--oidc",
    type=_PATH,
    default=Path("/etc/sluice/oidc.json"),
    show_default=True,
    metavar="FILE",
    help="The OpenID provider whose users and tokens are taken, if it is there.",
)

snapshot_option = click.option(
    "--snapshot",
    type=_PATH,
    default=Path("/run/sluice-snapshot/socket"),
    show_default=True,
    metavar="SOCKET",
    help="That of sluice-controllerd.",
)
