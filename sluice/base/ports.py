"""Ports for programs that listen later than they are started."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST: Final = 10_000
_TRIES: Final = 100


def free_port(host: str = "127.0.0.1") -> int:
    """One that is free on `host` now ("": on all addresses), and that no connection takes by itself until the program
    listens, which may be minutes later: below the kernel's own range, where that leaves room. Raises OSError."""
    ours = range(_LEAST, _first_of_kernel())
    for number in random.SystemRandom().sample(ours, min(_TRIES, len(ours))):
        with suppress(OSError):
            return _bound(host, number)
    return _bound(host, 0)


def _first_of_kernel() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_RANGE.read_text().split()[0])
    return 32_768


def _bound(host: str, number: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, number))
        return int(probe.getsockname()[1])
