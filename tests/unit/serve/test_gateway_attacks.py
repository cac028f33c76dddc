"""What a client or a replica of bad intent might gain, or cost others."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.serving import AccountRow
from sluice.serve.gateway import body, bounds, continuation
from tests.unit.serve.gateway_bed import STREAM_HEAD, Bed, Heard, bed, chunk, in_chunk, plain, run, stream_of, until

PIECE = b"a" * 65_536
MUCH = 64 * len(PIECE)


async def taken(one: Bed, first: bytes) -> int:
    """How many bytes a gateway takes after these, until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(first)
    count = 0
    with suppress(OSError):
        while count < MUCH and not reader.at_eof() and not one.worker.metrics.counts.get(("refused", "", "431")):
            writer.write(PIECE)
            await writer.drain()
            count += len(PIECE)
            await asyncio.sleep(0.001)
    writer.close()
    return count


@pytest.mark.parametrize("with_key", [False, True])
def test_a_trailer_without_end_is_not_held(tmp_path: Path, with_key: bool) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            path = "POST /v1/chat/completions" if with_key else "GET /health"
            key = f"authorization: Bearer {one.key}\r\n" if with_key else ""
            head = f"{path} HTTP/1.1\r\nhost: x\r\n{key}transfer-encoding: chunked\r\n\r\n"
            assert await taken(one, head.encode() + b"2\r\n{}\r\n0\r\nx: ") < MUCH // 4

    run(work())


def test_a_body_in_small_chunks_is_taken(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            text = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * 60_000}]})
            body = "".join(f"1\r\n{byte}\r\n" for byte in text) + "0\r\n\r\n"
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {one.key}\r\n"
            answer = await one.send(f"{head}connection: close\r\ntransfer-encoding: chunked\r\n\r\n{body}".encode())
            assert answer.startswith(b"HTTP/1.1 200")

    run(work())


def test_a_replicas_trailer_without_end_is_not_held(tmp_path: Path) -> None:
    sent = 0

    async def script(heard: Heard) -> None:
        nonlocal sent
        heard.writer.write(STREAM_HEAD + in_chunk(chunk("a")) + b"0\r\nx: ")
        while sent < MUCH:
            heard.writer.write(PIECE)
            await heard.writer.drain()
            sent += len(PIECE)
            await asyncio.sleep(0.001)

    async def work() -> None:
        async with bed(tmp_path, script) as one:
            answer = await one.ask({"model": "m", "stream": True, "messages": [], "tools": [{}]})
            assert not answer.whole or "error" in answer.events[-1]
            assert sent < MUCH // 4

    run(work())


def test_what_a_body_takes_when_it_is_parsed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HELD_BODIES", 1 << 20)

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            many = {"model": "m", "messages": [], "x": [{}] * 10_000}
            answer = await one.ask(many)
            assert answer.status == 503 and one.worker.held == 0
            assert (await one.ask({"model": "m", "messages": [], "x": "a" * 40_000})).status == 200
            assert one.worker.held == 0

    run(work())


def test_an_answer_whose_end_is_not_taken_is_billed(tmp_path: Path) -> None:
    async def script(heard: Heard) -> None:
        heard.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3000000\r\n\r\n")
        heard.writer.write(b"a" * 2_999_000)
        await heard.reader.read(1)

    async def work() -> None:
        async with bed(tmp_path, script) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request({"model": "m", "messages": [], "max_tokens": 5000}))
            await reader.readexactly(2_000_000)
            writer.close()
            await until(lambda: bool(one.records()))
            assert one.records()[0].completion_tokens == 5000

    run(work())


def test_a_call_that_cannot_be_sent_costs_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = {"id": "x", "created": 1, "model": "m", "text": "It is", "tokens": 2}
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}

    def broken(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(continuation, "plan", broken)

    async def work() -> None:
        async with bed(tmp_path, plain, slots=1) as one:
            for number in range(3):
                answer = await one.ask({**asked, "sluice_resume": resume}, idempotency_key=f"k{number}")
                assert answer.status == 500
            assert one.worker.calls == {}
            assert (await one.ask(asked)).whole

    run(work())


async def key_of_bob(one: Bed) -> str:
    """Of another user and tenant."""
    _, key = one.store.create("bob", ["serve"], now=time.time(), seconds=3600)
    one.worker.keys.refresh()
    one.accounts.append(AccountRow("bob", ("chemistry",)))
    one.publish()
    return f"Bearer {key}"


def test_the_name_of_a_request_gives_nobody_else_its_answer(tmp_path: Path) -> None:
    """Neither the answer, nor whether there is one."""
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    rest: dict[str, Any] = {"id": "chatcmpl-alice", "created": 100, "model": "m", "text": "mine", "tokens": 1}

    words = iter(["zanzibar", "other", "other"])

    async def speaks(heard: Heard) -> None:
        heard.writer.write(stream_of([next(words)], name=rest["id"]))

    async def work() -> None:
        async with bed(tmp_path, speaks) as one:
            bob = await key_of_bob(one)
            assert (await one.ask(asked, idempotency_key="k")).text == "zanzibar"
            theirs = [
                await one.ask(asked, idempotency_key="k", authorization=bob),
                await one.ask(asked | {"sluice_resume": rest}, idempotency_key="k", authorization=bob),
            ]
            assert [(answer.status, answer.text) for answer in theirs] == [(200, "other")] * 2
            sent = [heard.body for heard in one.replicas[0].heard[1:]]
            assert len(sent) == 2 and not any(b"zanzibar" in said for said in sent)
            first, second, third = one.records()
            assert [(record.user, record.tenant) for record in (second, third)] == [("bob", "chemistry")] * 2
            assert len({first.id, second.id, third.id}) == 3
            # the prompt is billed to the one who sends it, as if nobody had sent it before
            assert second.prompt_tokens == first.prompt_tokens > 0
            names = [message["name"] for message in one.told if "claim" in message]
            assert len(names) == len(set(names)) == 2  # bob's second repeats his first, which has a bill

    run(work())


@pytest.mark.parametrize(
    "more", [{"max_completion_tokens": 0, "max_tokens": 500}, {"max_tokens": 500, "n": 0}, {"max_tokens": 500}]
)
def test_what_is_reserved_is_the_most_that_an_engine_may_make_of_it(more: dict[str, int]) -> None:
    assert body.read("chat", json.dumps({"model": "m", "messages": [], **more}).encode()).reserved(7) > 500


def test_a_client_that_goes_before_the_first_byte_pays_for_the_prompt_that_was_read(tmp_path: Path) -> None:
    async def reads(heard: Heard) -> None:
        await heard.reader.read(1)
        raise ConnectionResetError

    async def work() -> None:
        async with bed(tmp_path, reads) as one:
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request({"model": "m", "messages": [{"role": "user", "content": "word " * 4000}]}))
            await until(lambda: len(one.replicas[0].heard) == 1)
            writer.close()
            await until(lambda: one.worker.calls == {} and one.replicas[0].gone == 1)
            (record,) = one.records()
            assert record.outcome == "cancelled" and record.prompt_tokens >= 4000 and record.completion_tokens == 0

    run(work())
