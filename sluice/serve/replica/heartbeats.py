"""Says to each replicad how the replica is, and takes its orders: credentials of munge, a line each way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.exchange.serving import HEARTBEAT_S, MOST_MESSAGE, Heartbeat, Orders, Peer, render

_CONNECT_S = 2.0
_ANSWER_S = 3.0
_LAST_S = 1.5
_MOST_ANSWER = 2 * MOST_MESSAGE


class Heartbeats:
    """A thread for each replicad: one that does not answer keeps no other from hearing."""

    def __init__(
        self,
        registries: list[tuple[str, int]],
        registry_uid: int,
        beat: Callable[[], Heartbeat],
        obey: Callable[[Orders], None],
    ) -> None:
        self._uid, self._beat, self._obey = registry_uid, beat, obey
        self._tickets: dict[tuple[str, int], tuple[str, str]] = {}  # for the next one and, if it fails, the one after
        self._threads = [
            _Thread(f"{host}:{port}", (host, port), self._exchange) for host, port in registries
        ]  # fmt: skip

    def start(self) -> None:
        """The first ones are sent now."""
        for one in self._threads:
            one.start()

    def now(self) -> None:
        """Something has changed: do not wait for the next second."""
        for one in self._threads:
            one.wake()

    def end(self) -> None:
        """A last one to each, and no more; takes a bounded time."""
        for one in self._threads:
            one.finish()
        until = time.monotonic() + _LAST_S
        for one in self._threads:
            one.join(max(0.0, until - time.monotonic()))

    def _exchange(self, address: tuple[str, int]) -> None:
        from sluice.slurm.munge import decode, encode

        credential = encode(render(self._beat()), readable_by=self._uid)
        ticket, other = self._tickets.get(address, ("", ""))  # no other thread has this address
        line = f"{ticket} {credential}\n".lstrip()
        try:
            with socket.create_connection(address, timeout=_CONNECT_S) as connection:
                connection.settimeout(_ANSWER_S)
                connection.sendall(line.encode())
                answer = _line(connection)
        except SluiceError:
            self._tickets[address] = other, ticket  # by turns: it may be of a version that takes none, or only busy
            raise
        message = decode(answer)
        if message.uid != self._uid:
            raise SluiceError(f"orders of uid {message.uid}, and not of {self._uid}", remedy="see who has its port")
        orders = parse_orders(message.payload)
        self._tickets[address] = orders.ticket, ""
        self._obey(orders)


class _Thread(threading.Thread):
    def __init__(self, name: str, address: tuple[str, int], exchange: Callable[[tuple[str, int]], None]) -> None:
        super().__init__(name=f"heartbeats {name}", daemon=True)
        self._address, self._exchange = address, exchange
        self._wanted = threading.Event()
        self._last = False
        self._problem = ""

    def wake(self) -> None:
        self._wanted.set()

    def finish(self) -> None:
        self._last = True
        self._wanted.set()

    def run(self) -> None:
        while True:
            last = self._last
            self._wanted.clear()
            begun = time.monotonic()
            try:
                self._exchange(self._address)
                self._problem = ""
            except (OSError, SluiceError) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    log("heartbeat-failed", to=self.name, what=error)
            if last:
                return
            self._wanted.wait(max(0.05, begun + HEARTBEAT_S - time.monotonic()))


def _line(connection: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise SluiceError("no orders: it closed the connection", remedy="see replicad's log")
        text += piece
        if len(text) > _MOST_ANSWER:
            raise SluiceError(f"orders of more than {_MOST_ANSWER} bytes", remedy="see who has its port")
    return text.decode("ascii", errors="replace").strip()


def parse_orders(payload: bytes) -> Orders:
    """Orders, without pydantic. Raises SluiceError."""
    import json

    with suppress(ValueError, TypeError, AttributeError, KeyError):
        said = json.loads(payload)
        do, reads = said["do"], said["reads"]
        peers = tuple(
            Peer(str(one["host"]), int(one["port"]), str(one["fingerprint"]), str(one["key"])) for one in said["peers"]
        )
        if do in ("go on", "drain", "stop") and isinstance(reads, bool):
            return Orders(do, peers, reads, str(said.get("ticket", "")))
    raise SluiceError("orders that are not known", remedy="run one version of Sluice everywhere")


def addresses(registries: tuple[str, ...]) -> list[tuple[str, int]]:
    """Of HOST:PORT. Raises SluiceError."""
    found = []
    for one in registries:
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SluiceError(f"registry {one[:80]!r}: not HOST:PORT", remedy="correct serving.registries")
        found.append((host.strip("[]"), int(port)))
    return found
