"""What a daemon tells systemd, which started it: sd_notify(3), a datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*states: str) -> None:
    """Send lines such as ``READY=1``; without systemd, or where it does not take them, nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        datagrams.sendall("\n".join(states).encode())
