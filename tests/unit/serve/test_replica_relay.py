"""The relay of a replica, over real TLS and real sockets: who is let through, and what it costs.

With SLUICE_TEST_SCALE=full it moves a GiB and refuses 10,000 connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvloop

from sluice.serve.replica import relay as relay_module
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.relay import Relay
from tests.unit.serve.replica_bed import connect, read_all, until

SECRET = "ab" * 32


class Bed:
    """A relay in a thread of its own, and the engine behind it: a function that gets each connection."""

    def __init__(self, folder: Path, engine: Callable[[socket.socket], None]) -> None:
        self.address = folder / "engine.sock"
        self.engine = socket.socket(socket.AF_UNIX)
        self.engine.bind(str(self.address))
        self.engine.listen(1024)
        self.serve = engine
        self.fingerprint = ""
        self.port = 0
        self.relay: Relay
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        threading.Thread(target=self._accept, daemon=True).start()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run(folder)), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self.engine.accept()
                threading.Thread(target=self._one, args=(accepted,), daemon=True).start()

    def _one(self, accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            self.serve(accepted)

    async def _run(self, folder: Path) -> None:
        context, self.fingerprint = make_context("tiny")
        self.relay = Relay(context, SECRET, self.address)
        self.relay.open = True
        self.port = self.relay.listen("127.0.0.1")
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        self.relay.close()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self.engine.close()


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


Make = Callable[..., Bed]


@pytest.fixture
def make_bed(tmp_path: Path) -> Iterator[Make]:
    made: list[Bed] = []

    def make(engine: Callable[[socket.socket], None] = echo) -> Bed:
        made.append(Bed(tmp_path, engine))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_the_secret_opens_and_the_certificate_is_the_one_named(make_bed: Make) -> None:
    bed = make_bed()
    with connect(bed.port, SECRET) as connection:
        certificate = connection.getpeercert(binary_form=True)
        assert certificate is not None and hashlib.sha256(certificate).hexdigest() == bed.fingerprint
        assert connection.version() == "TLSv1.3"
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello" and bed.relay.connections == 1
    until(lambda: bed.relay.connections == 0)


def test_the_key_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: str, flags: int, *more: int) -> int:
        assert not flags & os.O_CREAT, path
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", opened)
    before = len(os.listdir("/proc/self/fd"))
    context, fingerprint = make_context("tiny")
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3 and len(fingerprint) == 64
    assert len(os.listdir("/proc/self/fd")) == before


def test_secret_and_request_in_one_piece(make_bed: Make) -> None:
    bed = make_bed()
    with connect(bed.port, f"{SECRET}\n".encode() + b"x" * 100_000) as connection:
        got = b""
        while len(got) < 100_000:
            got += connection.recv(65536)
        assert got == b"x" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        b"cd" * 32 + b"\n", b"\n", SECRET[:-1].encode() + b"\n", SECRET.encode() + b"0\n", SECRET.encode() + b"\r\n",
        SECRET.upper().encode() + b"\n", b"\xff" * 64 + b"\n", b"z" * 100_000,
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)  # fmt: skip
def test_a_wrong_first_line_is_closed_without_a_word(make_bed: Make, line: bytes) -> None:
    reached = []
    bed = make_bed(lambda connection: reached.append(connection.recv(1)))
    with connect(bed.port, None) as connection:
        with suppress(OSError):  # it is closed before all of a long one is sent
            connection.sendall(line)
        assert read_all(connection) == b""
    assert until(lambda: bed.relay.refused["secret"]) == 1 and not reached


def test_plain_http_is_refused(make_bed: Make) -> None:
    bed = make_bed()
    with socket.create_connection(("127.0.0.1", bed.port), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + SECRET.encode() + b"\n")
        assert b"HTTP" not in read_all(connection)
    assert until(lambda: bed.relay.refused["tls"]) == 1


def test_a_slow_secret_is_not_waited_for(make_bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SHOW_S", 0.3)
    bed = make_bed()
    with connect(bed.port, SECRET[:30].encode()) as connection:
        assert read_all(connection) == b""
    assert until(lambda: bed.relay.refused["slow"]) == 1
    with socket.create_connection(("127.0.0.1", bed.port), timeout=30) as silent:  # no handshake at all
        assert silent.recv(1) == b""
    until(lambda: bed.relay.refused["tls"] + bed.relay.refused["slow"] == 2)


def test_a_replica_that_is_not_ready_lets_nobody_through(make_bed: Make) -> None:
    bed = make_bed()
    bed.relay.open = False
    with connect(bed.port, SECRET) as connection:
        assert read_all(connection) == b""
    assert until(lambda: bed.relay.refused["not ready"]) == 1


def test_an_engine_that_is_not_there_closes(make_bed: Make) -> None:
    bed = make_bed()
    bed.address.unlink()
    with connect(bed.port, SECRET + "\nGET") as connection:
        assert read_all(connection) == b""
    until(lambda: bed.relay.refused["engine"] == 1 and bed.relay.connections == 0)


def test_gateways_of_an_engine_that_hangs_give_way_to_nobody(make_bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MOST_UNKNOWN", 2), ("GRACE_S", 0.0), ("ENGINE_S", 5.0)):
        monkeypatch.setattr(relay_module, name, value, raising=False)
    bed = make_bed()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as engine, ExitStack() as open_:
        bed.relay._address = engine.getsockname()[1]
        for _ in range(4):  # more than the kernel takes for it
            filler = open_.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(engine.getsockname())
        gateways: list[ssl.SSLSocket] = []
        for _ in range(4):
            gateways.append(open_.enter_context(connect(bed.port, SECRET)))
            until(lambda: bed.relay.connections == len(gateways))
        assert not bed.relay.refused["too many"]
        assert [read_all(one) for one in gateways] == [b""] * 4
    until(lambda: bed.relay.refused["engine"] == 4 and bed.relay.connections == 0)


def test_what_the_engine_said_before_its_end_arrives_whole(make_bed: Make) -> None:
    """Closed by the engine while the reader is slow: nothing is cut."""

    def engine(connection: socket.socket) -> None:
        connection.recv(10)
        connection.sendall(b"y" * 5_000_000)

    bed = make_bed(engine)
    with connect(bed.port, SECRET + "\ngo") as connection:
        time.sleep(1.0)
        assert len(read_all(connection)) == 5_000_000


def test_a_client_that_goes_ends_the_engine_s_work(make_bed: Make) -> None:
    ended = threading.Event()

    def engine(connection: socket.socket) -> None:
        connection.sendall(b"token")
        while connection.recv(100):
            pass
        ended.set()

    bed = make_bed(engine)
    with connect(bed.port, SECRET) as connection:
        assert connection.recv(5) == b"token"
    assert ended.wait(30)


def rss() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
SIZE = (1 << 30) if FULL else (256 << 20)
UPLOAD = SIZE // 4


def test_a_gigabyte_takes_bounded_memory(make_bed: Make) -> None:
    """With a reader that begins late: what nobody takes is not read."""
    block = os.urandom(1 << 20)
    received = [0]

    def engine(connection: socket.socket) -> None:
        connection.recv(1)
        for _ in range(SIZE >> 20):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(1 << 20):
            received[0] += len(data)

    bed = make_bed(engine)
    with connect(bed.port, SECRET + "\ng", timeout=300) as connection:
        before = rss()
        time.sleep(0.5)
        most, got, digest = rss(), 0, hashlib.sha256()
        view = memoryview(bytearray(1 << 20))
        while count := connection.recv_into(view):
            if got < 8 << 20:
                digest.update(view[: min(count, (8 << 20) - got)])
            got += count
            if got % (64 << 20) < count:
                most = max(most, rss())
        assert got == SIZE and digest.digest() == hashlib.sha256(block * 8).digest()
    assert most - before < 48 << 20


def test_uploads_to_an_engine_that_reads_late(make_bed: Make) -> None:
    block = os.urandom(1 << 20)
    received, done = [0], threading.Event()
    go = threading.Event()

    def engine(connection: socket.socket) -> None:
        go.wait(60)
        while received[0] < UPLOAD and (data := connection.recv(1 << 20)):
            received[0] += len(data)
        done.set()

    bed = make_bed(engine)
    with connect(bed.port, SECRET, timeout=300) as connection:
        before, most, sent = rss(), 0, 0
        connection.settimeout(1)
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += connection.send(block)
        assert sent < 32 << 20, "it read what the engine does not take"
        most = rss()
        go.set()
        connection.settimeout(300)
        while sent < UPLOAD:
            sent += connection.send(block[: min(len(block), UPLOAD - sent)])
            most = max(most, rss()) if sent % (64 << 20) < len(block) else most
        assert done.wait(120) and received[0] == UPLOAD
    assert most - before < 48 << 20


def test_thousands_are_refused_in_order(make_bed: Make) -> None:
    """Strangers at once, by all that they may try; the gateway is served meanwhile, and nothing of them stays."""
    bed = make_bed()
    number, threads = 10_000 if FULL else 1_000, 16
    before = len(os.listdir("/proc/self/fd"))
    stop = threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answered = []

    def stranger(first: int) -> None:
        for one in range(first, number, threads):
            with suppress(OSError), socket.create_connection(("127.0.0.1", bed.port), timeout=60) as plain:
                if one % 8:
                    plain.sendall(b"GET / HTTP/1.1\r\n\r\n" if one % 3 else os.urandom(64))
                    answered.append(b"HTTP" in read_all(plain))
                else:
                    with context.wrap_socket(plain) as connection:
                        connection.sendall(b"0" * 64 + b"\n")
                        answered.append(read_all(connection) != b"")

    def gateway() -> None:
        while not stop.is_set():
            with connect(bed.port, SECRET, timeout=60) as connection:
                connection.sendall(b"mine")
                served.append(connection.recv(10))

    served: list[bytes] = []
    workers = [threading.Thread(target=stranger, args=(one,)) for one in range(threads)]
    mine = threading.Thread(target=gateway)
    for worker in (*workers, mine):
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    mine.join()
    assert len(answered) > number * 0.99 and not any(answered)
    assert until(lambda: sum(bed.relay.refused.values()) >= len(answered))
    assert served and set(served) == {b"mine"}
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)


def test_silent_strangers_do_not_keep_a_gateway_out(make_bed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MOST_UNKNOWN", 16)
    bed = make_bed()
    silent = [socket.create_connection(("127.0.0.1", bed.port)) for _ in range(64)]
    try:
        with connect(bed.port, SECRET) as connection:
            connection.sendall(b"mine")
            assert connection.recv(10) == b"mine"
        assert bed.relay.refused["too many"] >= 1
    finally:
        for one in silent:
            one.close()
