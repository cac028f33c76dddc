"""Where services listen: their options, and what they check of them."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from sluice.base.errors import UsageError

_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Listening:
    """What the options of `listening_options` say."""

    address: str
    port: int
    certificate: Path | None
    key: Path | None
    without_tls: bool

    def check(self, secrets: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The address. `secrets`: what clients send. Raises UsageError where others could read it on the way."""
        try:
            found = ipaddress.ip_address(self.address)
        except ValueError as error:
            raise UsageError(f"--address: {error}", remedy="write 10.0.0.1") from error
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--certificate and --key belong together", remedy="name both")
        if not found.is_loopback and self.certificate is None and not self.without_tls:
            raise UsageError(
                f"--address {self.address}: without TLS, {secrets} could be read on the way",
                remedy="give --certificate and --key, or listen on 127.0.0.1 behind a proxy",
            )
        return found


def listening_options(port: int, *, least: int = 1, variable: str | None = None) -> Callable[..., Callable[..., Any]]:
    """--address, --port, --certificate, --key and --without-tls, given to the command as one `Listening`, `listening`.

    `port`: the default; `least`: 0 where any free port may be asked for; `variable`: of the environment, for the port.
    """

    def options(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            listening = Listening(**{name: given.pop(name) for name in Listening.__slots__})
            return command(listening=listening, **given)

        wrapped: Callable[..., Any] = call
        for option in (
            click.option("--without-tls", is_flag=True, help="Listen on other addresses than this host's without TLS."),
            click.option("--key", type=_PATH, metavar="FILE", help="TLS: its key, PEM."),
            click.option(
                "--certificate", type=_PATH, metavar="FILE", help="TLS: the certificate and those above it, PEM."
            ),
            click.option(
                "--port",
                type=click.IntRange(least, 65535),
                default=port,
                envvar=variable,
                show_default=True,
                metavar="PORT",
                help="Where.",
            ),
            click.option(
                "--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen."
            ),
        ):
            wrapped = option(wrapped)
        return wrapped

    return options


def check_networks(option: str, networks: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """What an option names. Raises UsageError."""
    try:
        return [ipaddress.ip_network(one) for one in networks]
    except ValueError as error:
        raise UsageError(f"{option}: {error}", remedy="write 10.0.0.1, or 10.0.0.0/24") from error
