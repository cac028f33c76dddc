"""What anonymous clients can hold: connections, memory and time."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from sluice.base.networks import network_of
from sluice.exchange.snapshot import parse_answer
from sluice.web import limits, serve
from sluice.web.api import ENDPOINTS
from sluice.web.app import make_app
from sluice.web.endpoint import PREFIX
from sluice.web.limits import BoundedProtocol
from sluice.web.login import Proxy
from sluice.web.serve import make_site
from sluice.web.stream import MOST_OF_USER
from tests.unit.web.test_access import a_snapshot

ANSWER = b"x" * (16 << 20)  # more than the kernel keeps
Talk = Callable[[tuple[str, int]], Awaitable[None]]


async def _large(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at length, once for each path's number of seconds."""
    await asyncio.sleep(float(scope["path"][1:] or 0))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER})


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Talk], None]]:
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    monkeypatch.setattr(limits, "WRITE_S", 0.2)
    assert not BoundedProtocol._open

    def run(talk: Talk, app: Any = _large) -> None:
        async def main() -> None:
            config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, timeout_keep_alive=1, lifespan="off")
            config.load()
            state = uvicorn.server.ServerState()
            loop = asyncio.get_running_loop()

            def made() -> asyncio.Protocol:
                return BoundedProtocol(config=config, server_state=state, app_state={})

            server = await loop.create_server(made, "127.0.0.1", 0)
            await talk(server.sockets[0].getsockname())
            for _ in range(100):
                if not state.connections:
                    break
                await asyncio.sleep(0.05)
            assert not state.connections, "a connection is held"
            server.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    yield run
    assert not BoundedProtocol._open, "each connection was counted once in and once out"


def _client(address: tuple[str, int], sent: bytes) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(address)
    one.sendall(sent)
    one.setblocking(False)
    return one


async def _is_cut(one: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(5):
            while await loop.sock_recv(one, 1 << 16):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_client_that_does_not_read_does_not_keep_its_connection(serving: Any) -> None:
    kept = []

    async def talk(address: tuple[str, int]) -> None:
        kept.append(_client(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
        await asyncio.sleep(0.3)

    serving(talk)
    kept[0].close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /9 HTTP/1.1\r\nhost: x\r\n\r\n" * 2000,
        b"GET /9 HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
        b"GET /9 HTTP/1.1\r\nhost: ",
        b"GET /9 HTTP/1.1\r\nhost: " + b"x" * 1_000_000,
        b"POST /9 HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc",
        b"POST /9 HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" + b"x" * 1_000_000,
        b"POST /9 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n",
        b"GET /9 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n",
    ],
    ids=[
        "many requests at once",
        "many headers",
        "half a head",
        "a long header",
        "half a body",
        "a long body",
        "half a body in pieces",
        "half a body of GET",
    ],
)
def test_a_request_that_costs_too_much_ends_its_connection(serving: Any, sent: bytes) -> None:
    async def talk(address: tuple[str, int]) -> None:
        with _client(address, sent) as one:
            assert await _is_cut(one)

    serving(talk)


async def _prompt(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, and reads nothing."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("pieces", [1000, 3], ids=["that never ends", "that pauses"])
def test_a_body_that_trickles_ends_its_connection(serving: Any, pieces: int) -> None:
    """Also where the answer is there long before."""

    async def talk(address: tuple[str, int]) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        with _client(address, head) as one:
            cut = asyncio.ensure_future(_is_cut(one))
            for _ in range(pieces):
                if cut.done():
                    break
                with suppress(OSError):
                    one.send(b"x")
                await asyncio.sleep(0.02)
            assert await cut

    serving(talk, _prompt)


def test_a_body_of_a_gigabyte_is_refused_before_it_is_sent(serving: Any, tmp_path: Path) -> None:
    app = make_app(make_site(tmp_path / "socket", tmp_path / "tokens.json", Proxy()), follow=False)
    paths = [f"{PREFIX}{one.path}" for one in ENDPOINTS if one.method == "POST"] + ["/login", "/logout", "/x"]
    said = []

    async def talk(address: tuple[str, int]) -> None:
        for path in paths:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 30}\r\n\r\n"
            with _client(address, head.encode()) as one:
                said.append(await asyncio.get_running_loop().sock_recv(one, 20))
                assert await _is_cut(one)

    serving(talk, app)
    assert {line.split()[1] for line in said} == {b"413"} and len(said) == len(paths)


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_streams_are_refused_in_order(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many tries to hold one, by a user of many addresses and by users of one."""
    tries, most = (10_000, 400) if os.environ.get("SLUICE_TEST_SCALE") == "full" else (2000, 60)
    monkeypatch.setattr(limits, "HEAD_S", 30.0)
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", (1000, most))
    site = make_site(tmp_path / "socket", tmp_path / "tokens.json", Proxy())
    site.store.apply(parse_answer(a_snapshot([]).after("", 0)))
    tokens = [
        site.login.tokens.create(user, ["read"], now=time.time(), seconds=600)[1] for user in ("alice", "bob", "oscar")
    ]
    answers: Counter[str] = Counter()
    before = _resident()

    async def one_try(number: int, address: tuple[str, int], held: list[socket.socket]) -> None:
        one = socket.socket()
        one.setblocking(False)
        one.bind((f"127.{number % 7}.0.{1 + number % 5}", 0))
        loop = asyncio.get_running_loop()
        head = f"GET {PREFIX}/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tokens[number % 3]}\r\n\r\n"
        try:
            await loop.sock_connect(one, address)
            await loop.sock_sendall(one, head.encode())
            line = await loop.sock_recv(one, 12)
        except ConnectionError:
            line = b""
        answers[line.decode()[-3:] or "cut"] += 1
        held.append(one)

    async def talk(address: tuple[str, int]) -> None:
        held: list[socket.socket] = []
        try:
            for first in range(0, tries, 50):
                async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                    for number in range(first, first + 50):
                        group.create_task(one_try(number, address, held))
            assert len(site.streams._open) == 3 * MOST_OF_USER
            with socket.create_connection(address) as other:  # from an address that holds none
                other.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(other, b"GET /login HTTP/1.1\r\nhost: x\r\n\r\n")
                answers["other " + (await asyncio.get_running_loop().sock_recv(other, 12)).decode()[-3:]] += 1
            assert _resident() - before < 100 << 20
        finally:
            for one in held:
                one.close()

    serving(talk, make_app(site, follow=False))
    assert answers.pop("200") == 3 * MOST_OF_USER and answers.pop("other 200") == 1, answers
    assert set(answers) <= {"429", "cut"} and sum(answers.values()) == tries - 3 * MOST_OF_USER
    assert not site.streams._open and not site.streams._users, "none is left"


def test_an_address_has_so_many_connections_and_a_proxy_any_number(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", (5, 3))
    monkeypatch.setattr(limits, "HEAD_S", 30.0)
    counts = []

    async def talk(address: tuple[str, int]) -> None:
        crowd = [_client(address, b"") for _ in range(6)]
        await asyncio.sleep(0.3)
        open_now = 0
        for one in crowd:
            try:
                open_now += one.recv(1) != b""
            except BlockingIOError:
                open_now += 1
            except ConnectionError:
                pass
        counts.append(open_now)
        for one in crowd:
            one.close()

    serving(talk)
    monkeypatch.setattr(BoundedProtocol, "trusted", staticmethod(lambda address: address == "127.0.0.1"))
    serving(talk)
    assert counts == [3, 6]


def test_tls_has_only_ciphers_with_forward_secrecy_and_authentication() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(serve._CIPHERS)
    old = [one["name"] for one in context.get_ciphers() if one["protocol"] != "TLSv1.3"]
    assert old and all(name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name) for name in old)


def test_ipv4_in_ipv6_is_not_one_network() -> None:
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("::ffff:10.0.1.1")
    assert network_of("2001:db8::1")[0] == network_of("2001:db8::2")[0]
