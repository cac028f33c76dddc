"""Addresses of clients, the networks that they are of, and who is behind a proxy."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@lru_cache(maxsize=4096)
def network_of(address: str) -> tuple[str, str]:
    """An address with its network before it: a host with one IPv6 address has them all."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address, address
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped  # else all of IPv4 were one network
    packed = found.packed[:8] if found.version == 6 else found.packed[:3]
    return packed.hex(), str(found)


def within(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address is in one of the networks."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


def client_of(peer: str, forwarded: str, proxies: Sequence[Network]) -> str:
    """The address of who calls: the last that a proxy added, where the connection is a proxy's."""
    last = forwarded.rpartition(",")[2].strip()
    if not last or not within(peer, proxies):
        return peer
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return peer


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks as people write them. Raises ValueError."""
    return tuple(ipaddress.ip_network(one) for one in texts)
