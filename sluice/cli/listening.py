"""What services check of the address that they are to listen on."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from sluice.base.errors import UsageError


def check_listening(
    address: str, certificate: Path | None, key: Path | None, *, without_tls: bool, secrets: str
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address. `secrets`: what clients send. Raises UsageError where others could read it on the way."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"--address: {error}", remedy="write 10.0.0.1") from error
    if (certificate is None) != (key is None):
        raise UsageError("--certificate and --key belong together", remedy="name both")
    if not found.is_loopback and certificate is None and not without_tls:
        raise UsageError(
            f"--address {address}: without TLS, {secrets} could be read on the way",
            remedy="give --certificate and --key, or listen on 127.0.0.1 behind a proxy",
        )
    return found


def check_networks(option: str, networks: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """What an option names. Raises UsageError."""
    try:
        return [ipaddress.ip_network(one) for one in networks]
    except ValueError as error:
        raise UsageError(f"{option}: {error}", remedy="write 10.0.0.1, or 10.0.0.0/24") from error
