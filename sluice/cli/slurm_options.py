"""Options of all commands that look at a Slurm site: where its configuration is, and which Slurm it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import UsageError

if TYPE_CHECKING:
    from sluice.base.slurm_version import SlurmVersion


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--slurm-conf and --slurm-prefix of commands that ask a running cluster: `conf` and `prefix`."""
    for option in (
        click.option(
            "--slurm-prefix", "prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed."
        ),
        click.option(
            "--slurm-conf",
            "conf",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="slurm.conf or its folder; default: SLURM_CONF, else Slurm's own.",
        ),
    ):
        command = option(command)
    return command


def site_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--slurm-conf, --slurm-prefix and --slurm-version."""
    for option in (
        click.option(
            "--slurm-version",
            metavar="VERSION",
            help="The oldest Slurm that reads the files; default: what sinfo says.",
        ),
        click.option(
            "--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed."
        ),
        click.option(
            "--slurm-conf",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="slurm.conf or its folder; default: SLURM_CONF, else /etc/slurm.",
        ),
    ):
        command = option(command)
    return command


def find_slurm_conf(given: Path | None, *, required: bool = True) -> Path | None:
    """The slurm.conf to look at. Raises UsageError when it is not there, unless it was neither named nor `required`."""
    path = given or Path(os.environ.get("SLURM_CONF") or "/etc/slurm")
    file = path / "slurm.conf" if path.is_dir() else path
    if file.is_file():
        return file
    if given is None and not required:
        return None
    raise UsageError(f"{file}: no such file", remedy="name slurm.conf or its folder with --slurm-conf")


def find_version(given: str | None, prefix: Path | None) -> SlurmVersion:
    """The Slurm version that was named, else that of the installed commands, else the oldest that Sluice supports."""
    from sluice.base.slurm_version import OLDEST, parse_slurm_version

    if given is not None:
        return parse_slurm_version(given)
    from sluice.base.errors import SluiceError
    from sluice.slurm import connect

    try:
        return connect(prefix=prefix, timeout=10).version()
    except UsageError:
        raise
    except SluiceError:
        return OLDEST
