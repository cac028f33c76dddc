"""Staged models from replica to replica, so that the site's storage is read about once however many nodes start.

A replica listens on a port of its own, with its certificate, and gives pieces of the one model that it has or receives
to those who know a key that replicad tells replicas of the same service alone. A peer's connection begins with the key
and the name of the staged copy, in a line. Each question is four bytes: the number of a piece, or ASK. The answer to
ASK is one bit for each piece that is there; that to a number is the SHA-256 of the piece and the piece, or zeros where
it is not there or its turn would come too late. UCX asks for pieces over UCX from then on: sluice/serve/replica/ucx.py.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from sluice.base.log import log
from sluice.exchange.serving import DataPath, Orders, Peer, Weights, peer_key
from sluice.serve.replica.path import Path, Tls, exactly
from sluice.serve.replica.pieces import DIGEST, Pieces
from sluice.serve.replica.ucx import Ucx, UcxError

MOST_CONNECTIONS = 32
"""That have shown the key; and as many that have not."""
CONNECT_S = 5.0
"""Also for the handshake and the first line."""
ANSWER_S = 20.0
_IDLE_S = 60.0
_LOOK_S = 0.25
_AGAIN_S = 3.0  # until one that failed is asked again
_NEVER = float("inf")  # where what it gave was not the piece
_ASK = 0xFFFFFFFF
_UCX = 0xFFFFFFFE  # a version before answers with zeros: there is no such piece
_NOTHING = bytes(DIGEST)
_NUMBER = struct.Struct(">I")
_MOST_LINE = 256


class Share:
    """What a replica gives, and of whom it takes. Thread-safe."""

    def __init__(
        self, context: ssl.SSLContext, secret: str, rate: int, changed: Callable[[], None],
        data_path: DataPath = "tcp",
    ) -> None:  # fmt: skip
        """`rate`: bytes a second that are given at most; `changed`: replicad should hear of it at once."""
        self.weights: Weights | None = None
        """For heartbeats."""
        self.told = threading.Event()
        """Set by the first orders after `offer`."""
        self.ucx = Ucx(data_path)
        self._reads = True
        self._peers: tuple[Peer, ...] = ()
        self._links: dict[Peer, Link] = {}  # those that no thread has
        self._busy: set[Peer] = set()
        self._failed: dict[Peer, float] = {}  # until when they are left alone
        self._without_ucx: set[Peer] = set()  # with them it failed
        self._context, self._key, self._rate, self._changed = context, peer_key(secret).encode(), rate, changed
        self._pieces: Pieces | None = None
        self._socket: socket.socket | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[ssl.SSLSocket] = set()  # those that have shown the key
        self._strangers: dict[ssl.SSLSocket, str] = {}  # the others, with their addresses, the oldest first
        self._free_at = 0.0  # when the next piece may be given

    @property
    def reads(self) -> bool:
        """Whether this replica reads the storage: replicad says so, or nothing; or what others gave was wrong."""
        wrong = bool(self._peers) and all(self._failed.get(one) == _NEVER for one in self._peers)
        return self._reads or wrong or not self.told.is_set()

    def tell(self, orders: Orders) -> None:
        """What replicad says."""
        if self.weights is not None:
            self._peers, self._reads = orders.peers, orders.reads
            self.told.set()

    def offer(self, pieces: Pieces) -> None:
        """Give these from now on, if there is a port."""
        if self._socket is None:
            try:
                self._socket = socket.create_server(("", 0), backlog=MOST_CONNECTIONS)
            except OSError as error:
                log("share-failed", what=error)
                return
            threading.Thread(target=self._listen, args=(self._socket,), name="share", daemon=True).start()
        self._pieces = pieces
        self.weights = Weights(pieces.entry, int(self._socket.getsockname()[1]), pieces.whole)
        self._changed()

    def withdraw(self) -> None:
        """Give these no more."""
        self.weights = self._pieces = None
        self._changed()

    def end(self) -> None:
        """Give and take no more."""
        self._over.set()
        self.weights = self._pieces = None
        with self._lock:
            sockets = [*self._connections, *self._strangers, *([self._socket] if self._socket is not None else [])]
        for one in sockets:
            _shut(one)
        self.close_links()

    # ---- taking ----

    def links(self) -> Iterator[Link]:
        """Connections to the others in an order by chance, as far as no other thread has them: each is to be given to
        `give_back` or `failed`."""
        for peer in random.sample(self._peers, len(self._peers)):
            pieces, now = self._pieces, time.monotonic()
            with self._lock:
                if peer in self._busy or self._failed.get(peer, 0.0) > now or pieces is None:
                    continue
                self._busy.add(peer)
                link = self._links.pop(peer, None)
            try:
                yield link or Link(peer, pieces, None if peer in self._without_ucx else self.ucx)
            except (OSError, ValueError) as error:
                self._leave(peer, error)

    def give_back(self, link: Link) -> None:
        """It can be used again."""
        with self._lock:
            self._links[link.peer] = link
            self._busy.discard(link.peer)

    def failed(self, link: Link, error: Exception) -> None:
        """It cannot: what came is not the piece, or nothing came."""
        link.close()
        self._leave(link.peer, error)

    def close_links(self) -> None:
        """Those that no thread has: with UCX each has a process, and one of this replica's places."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def _leave(self, peer: Peer, error: Exception) -> None:
        log("share-failed", peer=f"{peer.host}:{peer.port}", what=error)
        if isinstance(error, UcxError):
            self.ucx.failed()
        with self._lock:
            if isinstance(error, UcxError):
                self._without_ucx.add(peer)
            else:
                self._failed[peer] = time.monotonic() + _AGAIN_S if isinstance(error, OSError) else _NEVER
            self._busy.discard(peer)

    # ---- giving ----

    def _listen(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, address = listening.accept()
            except OSError:  # it is over; or there is no descriptor left, for a while
                if self._over.wait(_LOOK_S):
                    listening.close()
                    return
                continue
            try:
                peer = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
            except OSError:  # gone again
                accepted.close()
                continue
            with self._lock:
                if len(self._strangers) >= MOST_CONNECTIONS:
                    self._end_a_stranger()
                self._strangers[peer] = address[0]
            threading.Thread(target=self._serve, args=(peer,), name="share", daemon=True).start()

    def _end_a_stranger(self) -> None:
        """The oldest of the address with the most. Who has the key shows it at once."""
        ((most, _),) = Counter(self._strangers.values()).most_common(1)
        oldest = next(one for one, address in self._strangers.items() if address == most)
        del self._strangers[oldest]
        _shut(oldest)

    def _serve(self, peer: ssl.SSLSocket) -> None:
        guard = threading.Timer(CONNECT_S, _shut, (peer,))
        guard.daemon = True
        guard.start()
        try:
            with suppress(OSError, ValueError):
                peer.settimeout(_IDLE_S)
                peer.do_handshake()
                if self._may_have(_line(peer)) and self._let_in(peer):
                    guard.cancel()
                    self._give(peer)
        finally:
            guard.cancel()
            with self._lock:
                self._connections.discard(peer)
                self._strangers.pop(peer, None)
            peer.close()

    def _let_in(self, peer: ssl.SSLSocket) -> bool:
        with self._lock:
            if self._strangers.pop(peer, None) is None or len(self._connections) >= MOST_CONNECTIONS:
                return False
            self._connections.add(peer)
        return True

    def _may_have(self, line: bytes) -> bool:
        key, _, entry = line.partition(b" ")
        pieces = self._pieces
        return hmac.compare_digest(key, self._key) and pieces is not None and entry == pieces.entry.encode()

    def _give(self, peer: ssl.SSLSocket) -> None:
        path: Path = Tls(peer)
        try:
            while (pieces := self._pieces) is not None:
                (number,) = _NUMBER.unpack(exactly(peer, _NUMBER.size))
                if number == _UCX and isinstance(path, Tls):
                    path = self.ucx.give(peer) or path
                elif number == _ASK:
                    peer.sendall(pieces.bits)
                else:
                    self._give_piece(peer, path, pieces, number)
        except UcxError as error:
            log("ucx-failed", what=error)
        finally:
            path.close()

    def _give_piece(self, peer: ssl.SSLSocket, path: Path, pieces: Pieces, number: int) -> None:
        digest = pieces.digest(number) if number < len(pieces) else b""
        if not digest or not self._wait(pieces.size(number)):
            peer.sendall(_NOTHING)
            return
        peer.sendall(digest)
        path.send(pieces.parts(number))

    def _wait(self, size: int) -> bool:
        """So that all connections together have no more than the rate; False: it would take longer than peers wait."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            if begin - now > ANSWER_S / 2:
                return False
            self._free_at = begin + size / self._rate
        time.sleep(begin - now)
        return True


class Link:
    """A connection to one that gives."""

    def __init__(self, peer: Peer, pieces: Pieces, ucx: Ucx | None = None) -> None:
        """`ucx`: it is used, if the peer has it, too. Raises OSError, ValueError."""
        self.peer, self._pieces = peer, pieces
        self.has: set[int] = set()
        """Pieces that it had when it was asked."""
        self._asked = float("-inf")
        plain = socket.create_connection((peer.host, peer.port), timeout=CONNECT_S)
        try:
            self._tls = pinned(plain, peer.fingerprint)
        except BaseException:
            plain.close()
            raise
        self._path: Path = Tls(self._tls)
        self._tls.settimeout(ANSWER_S)
        self._tls.sendall(f"{peer.key} {pieces.entry}\n".encode())
        self.look()
        if ucx is not None:
            try:
                self._path = ucx.take(self._tls, _NUMBER.pack(_UCX)) or self._path
            except BaseException:
                self._tls.close()
                raise

    def look(self) -> None:
        """Ask which it has, if that was not done a moment ago. Raises OSError, ValueError."""
        if time.monotonic() - self._asked < _LOOK_S:
            return
        self._asked = time.monotonic()
        self._tls.sendall(_NUMBER.pack(_ASK))
        bits = exactly(self._tls, len(self._pieces.bits))
        self.has = {number for number in range(len(self._pieces)) if bits[number >> 3] >> (number & 7) & 1}

    def get(self, number: int) -> tuple[bytearray, bytes]:
        """A piece and its digest, compared. Raises OSError, ValueError (it is another one)."""
        self._tls.sendall(_NUMBER.pack(number))
        digest = bytes(exactly(self._tls, DIGEST))
        if digest == _NOTHING:
            raise OSError(f"piece {number}: not given now")
        data = self._path.receive(self._pieces.size(number))
        if hashlib.sha256(data).digest() != digest:
            raise ValueError(f"piece {number}: not what its SHA-256 says")
        return data, digest

    def close(self) -> None:
        """End it."""
        self._path.close()
        self._tls.close()


def pinned(plain: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """TLS with the one whose certificate has this fingerprint. Raises OSError, ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    secured = context.wrap_socket(plain)
    found = hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, fingerprint):
        secured.close()
        raise ValueError("another certificate than its heartbeats named")
    return secured


def _line(connection: ssl.SSLSocket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(line) > _MOST_LINE:
            raise OSError("no line")
        line += piece
    return line[:-1]


def _shut(one: socket.socket) -> None:
    """End a connection that another thread may be using: what it is used for fails."""
    with suppress(OSError):
        socket.socket.shutdown(one, socket.SHUT_RDWR)  # SSLSocket's own would go on without TLS
