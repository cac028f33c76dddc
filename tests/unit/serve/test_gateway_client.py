"""Streams whose gateway dies, and the client that goes on with another one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.core.gate import MAX_AMOUNT
from sluice.serve.client import AsyncResumingStream, ResumingStream, StreamError
from tests.unit.serve.gateway_bed import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Bed,
    Heard,
    answer_of,
    bed,
    chunk,
    in_chunk,
    plain,
    run,
    stream_of,
    until,
    usage_chunk,
)
from tests.unit.serve.test_gateway_replicas import ASK, WORDS, goes_on

TEXT = "".join(WORDS)


async def cut(one: Bed, at: int) -> tuple[asyncio.Server, str]:
    """A gateway in between that dies after so many bytes of its first answer, and of no later one."""
    budget = [at]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = await asyncio.open_connection("127.0.0.1", one.port)

        async def up() -> None:
            while data := await reader.read(1 << 16):
                theirs.write(data)
            theirs.close()

        task = asyncio.create_task(up())
        while data := await ours.read(1 << 16):
            if len(data) >= budget[0]:
                writer.write(data[: budget[0]])
                await writer.drain()
                budget[0] = 1 << 30
                break
            budget[0] -= len(data)
            writer.write(data)
        theirs.close()
        task.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("shows_usage", [False, True])
def test_a_stream_goes_on_wherever_its_gateway_died(tmp_path: Path, shows_usage: bool) -> None:
    body = ASK | ({"stream_options": {"include_usage": True}} if shows_usage else {})

    async def work() -> None:
        async with bed(tmp_path, goes_on) as one:
            whole = len(await one.send(one.request(body)))
            step = 97
            for at in range(1, whole, step):
                server, url = await cut(one, at)
                async with AsyncResumingStream([url, one.url], one.key, body) as stream:
                    parts = [part async for part in stream]
                server.close()
                said = "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])
                assert said == TEXT, at
                assert len({part["id"] for part in parts}) == 1, at
                ends = [c["finish_reason"] for part in parts for c in part["choices"] if c["finish_reason"]]
                assert ends == ["stop"], at
                usages = [part["usage"] for part in parts if part.get("usage")]
                assert len(usages) == int(shows_usage), at
                if usages:
                    assert usages[0]["completion_tokens"] == len(WORDS), at
                await until(lambda: one.worker.calls == {})
            records = one.records()[1:]
            assert sum(record.outcome == "ok" for record in records) >= len(range(1, whole, step))
            assert all(0 <= record.completion_tokens <= len(WORDS) for record in records)

    run(work())


def test_a_stream_that_was_billed_in_part_is_billed_for_the_rest(tmp_path: Path) -> None:
    async def hangs(heard: Heard) -> None:
        if heard.document["messages"][-1]["role"] == "assistant":
            await goes_on(heard)
            return
        data = stream_of(WORDS)
        heard.writer.write(data[: data.index(b" truth") + 100])
        await heard.reader.read(1)
        raise ConnectionResetError

    async def work() -> None:
        async with bed(tmp_path, hangs) as one:
            server, url = await cut(one, 900)
            async with AsyncResumingStream([url], one.key, ASK) as stream:
                assert "".join([part async for part in stream.text()]) == TEXT
            server.close()
            records = one.records()
            assert [record.outcome for record in records] == ["cancelled", "ok"]
            # The first one has a bill: the second one's is what was new, and its prompt was paid for.
            assert len({record.id for record in records}) == 2
            said = one.replicas[0].heard[-1].document["messages"][-1]["content"]
            new = len(WORDS) - next(at for at in range(len(WORDS)) if "".join(WORDS[:at]) == said)
            assert (records[1].prompt_tokens, records[1].completion_tokens) == (0, new)
            # Once its answer was sent whole, the same key is another request: nobody gets two answers for one bill.
            one.replicas[0].script = goes_on
            resume = {"id": "x", "created": 1, "model": "m", "text": "It", "tokens": 1}
            assert "idempotency-key" not in one.replicas[0].heard[-1].head.lower()
            await one.ask(ASK, idempotency_key="same")
            await one.ask(ASK | {"sluice_resume": resume}, idempotency_key="same")
            await one.ask(ASK, idempotency_key="other")
            assert len({record.id for record in one.records()[2:]}) == 3

    run(work())


def test_a_stream_is_resumed_once_without_its_prompt(tmp_path: Path) -> None:
    resume = {"id": "x", "created": 1, "model": "m", "text": "It", "tokens": 1}

    async def work() -> None:
        async with bed(tmp_path, goes_on) as one:
            await one.ask(ASK, idempotency_key="k")
            for _ in range(3):
                answer = await one.ask(ASK | {"sluice_resume": resume}, idempotency_key="k")
                assert answer.text == TEXT.removeprefix("It")
            # an end that is all that is missing needs no replica, and no bill
            await one.ask(ASK | {"sluice_resume": resume | {"finish_reason": "stop"}}, idempotency_key="k")
            found = [(record.prompt_tokens, record.completion_tokens) for record in one.records()]
            rest = len(WORDS) - 1
            assert found == [(5, rest + 1), (0, rest), (6, rest), (6, rest), (0, 0)]
            assert len({record.id for record in one.records()}) == 5

    run(work())


def test_a_rest_of_which_an_engine_counts_more_than_there_can_be_is_billed(tmp_path: Path) -> None:
    """Its second bill has the prompt and what the client has of the answer: together no more than the gate takes."""
    resume = {"id": "x", "created": 1, "model": "m", "text": "It", "tokens": 1}

    async def boasts(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD + b"".join(map(in_chunk, [chunk("a"), usage_chunk(1 << 50, -(1 << 50)), DONE])))
        heard.writer.write(b"0\r\n\r\n")

    async def work() -> None:
        async with bed(tmp_path, boasts) as one:
            asked = ASK | {"stream_options": {"include_usage": True}}
            await one.ask(asked, idempotency_key="k")
            for _ in range(2):
                answer = await asyncio.wait_for(one.ask(asked | {"sluice_resume": resume}, idempotency_key="k"), 20)
                assert answer.whole and answer.events[-2]["usage"]["completion_tokens"] == 1, "not below what was said"
            found = [(record.prompt_tokens, record.completion_tokens) for record in one.records()]
            assert found == [(MAX_AMOUNT, 0), (0, 0), (MAX_AMOUNT, 0)] and one.worker.calls == {}

    run(work())


def test_a_request_that_does_not_stream_may_be_sent_twice(tmp_path: Path) -> None:
    calls: list[Heard] = []

    async def script(heard: Heard) -> None:
        calls.append(heard)
        if len(calls) == 1:
            await heard.reader.read(1)
            raise ConnectionResetError
        heard.writer.write(answer_of(CHAT))

    async def work() -> None:
        async with bed(tmp_path, script) as one:
            document = {"model": "m", "messages": []}
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request(document, idempotency_key="k"))
            await until(lambda: len(calls) == 1)
            writer.close()
            await until(lambda: one.worker.calls == {})
            assert (await one.ask(document, idempotency_key="k")).document == CHAT
            broken, whole = one.records()  # a replica read the prompt twice: each has its bill
            assert (broken.outcome, broken.completion_tokens, whole.outcome) == ("cancelled", 0, "ok")
            assert broken.prompt_tokens > 0 and broken.id != whole.id
            other = {**document, "temperature": 1}
            await one.ask(other, idempotency_key="k")
            assert len({record.id for record in one.records()}) == 3

    run(work())


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    resume = {"id": "x", "created": 1, "model": "m", "text": "It is", "tokens": 2}
    wrong: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"sluice_resume": resume}, {}),  # without a key
        ({"sluice_resume": "x"}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume, "stream": False}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume, "n": 2}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume | {"tokens": 99}}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume | {"tokens": -1}}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume | {"text": None}}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume | {"id": "a\nb"}}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume | {"finish_reason": "tool_calls"}}, {"idempotency_key": "k"}),
        ({"sluice_resume": resume}, {"idempotency_key": "k" * 256}),
    ]

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            for more, headers in wrong:
                answer = await one.ask(ASK | more, **headers)
                assert answer.status == 400, (more, headers, answer)
            assert one.replicas[0].heard == [] and one.worker.calls == {}

    run(work())


def test_the_client_gives_up_where_trying_does_not_help() -> None:
    answers: list[tuple[int, bytes, dict[str, str]]] = []

    def client(*given: tuple[int, bytes, dict[str, str]], retries: int = 2) -> ResumingStream:
        answers[:] = given
        made = ResumingStream(["http://a", "http://b/v1/"], "key", ASK, retries=retries)

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append((str(request.url), json.loads(request.content)))
            status, data, headers = answers.pop(0)
            return httpx.Response(status, content=data, headers=headers)

        made._http = httpx.Client(transport=httpx.MockTransport(answer))
        return made

    asked: list[tuple[str, dict[str, Any]]] = []
    choice = b'{"index":0,"delta":{"content":"It"},"finish_reason":null}'
    part = b'data: {"id":"c","created":1,"model":"m","choices":[%b]}\n\n' % choice
    refused = b'{"error":{"message":"no key"}}'
    with pytest.raises(StreamError, match="401: no key") as error:
        list(client((401, refused, {})))
    assert error.value.status == 401
    with pytest.raises(StreamError, match="3 tries"):
        list(client(*[(503, refused, {"retry-after": "0"})] * 3))
    assert [url for url, _ in asked[-3:]] == [
        "http://a/v1/chat/completions",
        "http://b/v1/chat/completions",
        "http://a/v1/chat/completions",
    ]
    with pytest.raises(StreamError, match="the stream broke") as broke:
        list(client((200, part + b'data: {"error":{"message":"the stream broke"}}\n\n', {})))
    assert broke.value.text == "It"
    assert "".join(client((200, part, {}), (200, part + b"data: [DONE]\n\n", {})).text()) == "ItIt"
    assert asked[-1][1]["sluice_resume"] == {"id": "c", "created": 1, "model": "m", "text": "It", "tokens": 1}
    tool = part.replace(b'"content":"It"', b'"tool_calls":[{"index":0}]')
    with pytest.raises(StreamError, match="called a tool"):
        list(client((200, tool, {})))
