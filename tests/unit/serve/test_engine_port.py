"""The port of an engine that has no socket file: others of the node may have taken it first."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from sluice.serve.replica import asking


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::"),
    ],
)
def test_only_the_users_own_listener_is_told_the_key(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, address: str
) -> None:
    told: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async def work(uid: int) -> tuple[int, bytes] | None:
        listening = socket.socket(family)
        listening.bind((address, 0))
        async with await asyncio.start_server(answer, sock=listening):
            monkeypatch.setattr(os, "geteuid", lambda: uid)
            return await asking.get(int(listening.getsockname()[1]), "/health", "key", 5.0)

    own = os.geteuid()
    assert asyncio.run(work(own)) == (200, b"ok") and len(told) == 1
    assert asyncio.run(work(own + 1)) is None and len(told) == 1


def test_a_port_where_nobody_listens_is_not_own() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert not asking.is_own_port(one.getsockname()[1])
