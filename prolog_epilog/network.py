"""The network interface by which the nodes of a cluster reach each other."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from sluice.base.errors import SluiceError
from sluice.exchange.courier import controllers

NETWORK_S = 60.0
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: IPv4 only
_DISCARD = 9  # any port would do: nothing is sent


class Network:
    """Where this node's way to the controllers begins: the nodes of a cluster share their network."""

    def __init__(self) -> None:
        self.interface = ""
        """Empty: not known, or loopback."""

    def run(self) -> None:
        """A duty, as names are looked up. A host that cannot be found changes nothing."""
        with suppress(SluiceError):
            for host in controllers().hosts:
                with suppress(OSError):
                    self.interface = interface_to(host)
                    return


def interface_to(host: str) -> str:
    """The interface that has this host's address towards another one; empty: none, loopback, or only IPv6.

    Raises OSError where the host is not known or there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
        end.connect((host, _DISCARD))
        address = socket.inet_aton(end.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(end, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if found[20:24] == address and address[0] != 127:
                    return name
    return ""
