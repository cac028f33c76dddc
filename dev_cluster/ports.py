"""Free ports on this machine, claimed so that two clusters that start at once do not choose the same ones."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack

from sluice.base.errors import SluiceError

_BLOCK = 64
_FIRST = 12032  # below the range from which Linux takes client ports, above most services
_LAST = 32704


class PortClaim:
    """A run of free TCP ports: `base` to ``base + count - 1``. The claim holds while `sockets` are open somewhere."""

    def __init__(self, base: int, count: int, sockets: list[socket.socket]) -> None:
        self.base = base
        self.count = count
        self.sockets = sockets

    def close(self) -> None:
        """Give up our copy of the claim; a process that inherited the sockets keeps it."""
        for claim in self.sockets:
            claim.close()


def claim_ports(count: int, *, base: int | None = None) -> PortClaim:
    """Claim `count` ports from `base`, or from the first place where all are free. Raises SluiceError."""
    if base is not None:
        if base + count > 65536:
            raise SluiceError(
                f"port_base {base}: {count} ports are needed from there, the last one is 65535",
                remedy="choose a smaller port_base, or leave it out",
            )
        claim = _try(base, count)
        if isinstance(claim, int):
            raise SluiceError(
                f"port {claim}: taken by another program or cluster",
                remedy="choose another port_base, or leave it out to have free ports chosen",
            )
        return claim
    for candidate in range(_FIRST, _LAST - count, _BLOCK):
        claim = _try(candidate, count)
        if not isinstance(claim, int):
            return claim
    raise SluiceError(f"no {count} free ports between {_FIRST} and {_LAST}", remedy="bring another cluster down")


def _try(base: int, count: int) -> PortClaim | int:
    """The claim, or the port that is not free."""
    with ExitStack() as stack:
        claims = []
        for block in range(base // _BLOCK, (base + count - 1) // _BLOCK + 1):
            # An abstract socket's name is unique in the network namespace, as ports are, and goes with its holder.
            claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                claim.bind(f"\0sluice-cluster-ports-{block}")
            except OSError:
                return max(base, block * _BLOCK)
            claims.append(claim)
        taken = _first_taken(range(base, base + count))
        if taken is not None:
            return taken
        stack.pop_all()
        return PortClaim(base, count, claims)


def _first_taken(ports: Iterable[int]) -> int | None:
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the daemons do, so that connections of an earlier cluster in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))  # noqa: S104 - as the daemons do
            except OSError:
                return port
    return None


def listens(address: str, port: int) -> bool:
    """Whether a socket listens there, or on all addresses; unlike a connection, asking leaves no error in its log."""
    wanted = {f"{int.from_bytes(socket.inet_aton(a), sys.byteorder):08X}:{port:04X}" for a in (address, "0.0.0.0")}  # noqa: S104
    with open("/proc/net/tcp") as table:  # noqa: PTH123
        fields = (line.split() for line in table)
        return any(field[1] in wanted and field[3] == "0A" for field in fields)
