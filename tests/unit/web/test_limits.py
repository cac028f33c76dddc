"""What anonymous clients can hold: connections, memory and time."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from sluice.web import limits, serve
from sluice.web.limits import BoundedProtocol, network_of

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
    monkeypatch.setattr(limits, "WRITE_S", 0.2)
    assert not BoundedProtocol._open

    def run(talk: Talk) -> None:
        async def main() -> None:
            config = uvicorn.Config(_large, http=BoundedProtocol, log_config=None, timeout_keep_alive=1, lifespan="off")
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
        b"GET /9 HTTP/1.1\r\nhost: " + b"x" * 100_000,
    ],
    ids=["many requests at once", "many headers", "half a head", "a long header"],
)
def test_a_request_that_costs_too_much_ends_its_connection(serving: Any, sent: bytes) -> None:
    async def talk(address: tuple[str, int]) -> None:
        with _client(address, sent) as one:
            assert await _is_cut(one)

    serving(talk)


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
