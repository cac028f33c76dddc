"""What replicas do wrong, and what a client sees of it: one whole stream, or an end that nobody takes for one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sluice.core.gate import MAX_AMOUNT
from sluice.exchange.serving import Abilities, State
from sluice.serve.gateway import bounds, upstream
from sluice.serve.gateway.sse import event_of
from tests.unit.serve.gateway_bed import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Answer,
    Heard,
    Script,
    answer_of,
    bed,
    chunk,
    in_chunk,
    plain,
    role_chunk,
    run,
    service_row,
    stream_of,
    until,
    usage_chunk,
)

WORDS = [
    "It",
    " is",
    " a",
    " truth",
    " univers",
    "ally",
    " acknow",
    "ledged",
    ",",
    ' "usage"',
    " [DONE]",
    "\n\n",
    "ü€𝄞",
]
ASK: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "begin"}]}


async def goes_on(heard: Heard) -> None:
    """A replica that says the rest of WORDS after what was said, or how long the prompt is."""
    if not heard.document.get("stream"):
        await counts(heard)
        return
    last = heard.document["messages"][-1]
    said = last["content"] if last["role"] == "assistant" else ""
    at = 0
    while "".join(WORDS[:at]) != said:
        at += 1
        assert at <= len(WORDS), said
    heard.writer.write(stream_of(WORDS[at:], name="chatcmpl-2", before=at))


async def counts(heard: Heard) -> None:
    assert heard.document["max_tokens"] == 1 and heard.document["messages"] == ASK["messages"]
    heard.writer.write(answer_of({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}))


def dies_after(data: bytes, at: int, *, abort: bool = True) -> Script:
    async def script(heard: Heard) -> None:
        heard.writer.write(data[:at])
        await heard.writer.drain()
        await asyncio.sleep(0)
        if abort:
            heard.writer.transport.abort()
        raise ConnectionResetError

    return script


def test_the_head_of_a_stream_does_not_wait_for_its_first_token(tmp_path: Path) -> None:
    async def work() -> None:
        thought = asyncio.Event()

        async def thinks(heard: Heard) -> None:
            heard.writer.write(STREAM_HEAD)
            await heard.writer.drain()
            await thought.wait()
            heard.writer.write(stream_of(WORDS).removeprefix(STREAM_HEAD))

        async with bed(tmp_path, thinks) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request(ASK))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            thought.set()
            answer = Answer.of(head + await asyncio.wait_for(reader.read(), 30))
            writer.close()
            assert answer.whole and answer.text == "".join(WORDS)

    run(work())


def test_a_stream_whose_replica_is_silent_gets_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that neither its client nor a proxy gives up; an answer that is no stream gets none within its bytes."""
    monkeypatch.setattr(bounds, "WAITING_S", 0.3)
    whole = answer_of(CHAT | {"x": "y" * (bounds.MOST_KEPT_ANSWER + 100_000)})

    async def work() -> None:
        goes_on = asyncio.Event()

        async def pauses(heard: Heard) -> None:
            data = stream_of(WORDS) if heard.document.get("stream") else whole
            heard.writer.write(data[:-100])
            await heard.writer.drain()
            await goes_on.wait()
            heard.writer.write(data[-100:])

        async with bed(tmp_path, pauses) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request(ASK))
            said = b""
            while said.count(b": waiting\n\n") < 2:
                said += await asyncio.wait_for(reader.read(1 << 16), 30)
            plain_one = asyncio.create_task(one.ask(ASK | {"stream": False}))
            await until(lambda: len(one.replicas[0].heard) == 2)
            await asyncio.sleep(1)
            goes_on.set()
            answer = Answer.of(said + await asyncio.wait_for(reader.read(), 30))
            writer.close()
            assert answer.whole and answer.text == "".join(WORDS)
            assert (await plain_one).body == whole.partition(b"\r\n\r\n")[2]

    run(work())


@pytest.mark.parametrize("shows_usage", [False, True])
def test_a_replica_that_dies_at_any_byte_breaks_no_stream(
    tmp_path: Path, shows_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_S", 60.0)  # on a busy machine all of this process may wait for 3 s
    data = stream_of(WORDS)
    asked = ASK | ({"stream_options": {"include_usage": True}} if shows_usage else {})

    async def work() -> None:
        places = range(0, len(data), 1 if not shows_usage else 7)
        async with bed(tmp_path, plain, goes_on) as one:
            for at in places:
                one.replicas[0].script = dies_after(data, at)
                one.replicas[1].suspect = True  # chosen last
                one.publish()
                task = asyncio.create_task(one.ask(asked))
                answer = await task
                assert answer.status == 200 and answer.whole, at
                assert answer.text == "".join(WORDS), at
                assert answer.events[-1] == "[DONE]", at
                documents = answer.events[:-1]
                assert {one["id"] for one in documents} <= {"chatcmpl-1"} or at < data.index(b"\n\n") + 2, at
                assert len({one["id"] for one in documents}) == 1, at
                assert [c["finish_reason"] for d in documents for c in d["choices"] if c["finish_reason"]] == [
                    "stop"
                ], at
                assert usages_of(answer) == [(5, len(WORDS), 5 + len(WORDS))] * int(shows_usage), at
                one.worker.pools[0xA1].worked()
            records = one.records()
            assert len(records) == len(places) == len({record.id for record in records})
            assert {record.outcome for record in records} == {"ok"}
            # The engine counted all of its tokens, and those before its death are a part of its prompt.
            assert {(record.prompt_tokens, record.completion_tokens) for record in records} == {(5, len(WORDS))}
            assert one.worker.calls == {} and one.worker.waiting == {}

    run(work(), 400)  # some hundred streams: on a busy machine more than two minutes


def usages_of(answer: Answer) -> list[tuple[int, int, int]]:
    names = "prompt_tokens", "completion_tokens", "total_tokens"
    found = [one["usage"] for one in answer.events if isinstance(one, dict) and one.get("usage")]
    return [(usage[names[0]], usage[names[1]], usage[names[2]]) for usage in found]


def without_usage(words: list[str], finish: str | None) -> bytes:
    """A stream up to the end of its text."""
    return STREAM_HEAD + b"".join(map(in_chunk, [role_chunk(), *map(chunk, words), chunk(finish=finish)]))


@pytest.mark.parametrize("finish", ["stop", None])
def test_the_prompt_of_a_stream_without_its_end_is_counted_by_another_replica(
    tmp_path: Path, finish: str | None
) -> None:
    """Its replica ends after the last word, before the usage; without a reason, where all tokens have come."""
    asked = ASK | {"stream_options": {"include_usage": True}, "max_tokens": len(WORDS), "n_predict": len(WORDS)}

    async def work() -> None:
        async with bed(tmp_path, dies_after(without_usage(WORDS, finish), 1 << 20), counts) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(asked)
            assert answer.whole and answer.text == "".join(WORDS) and answer.events[-1] == "[DONE]"
            reasons = [choice["finish_reason"] for event in answer.events[:-1] for choice in event["choices"]]
            assert [reason for reason in reasons if reason] == [finish or "length"]
            assert usages_of(answer) == [(5, len(WORDS), 5 + len(WORDS))]
            (record,) = one.records()
            assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("ok", 5, len(WORDS))
            (heard,) = one.replicas[1].heard
            assert not {"stream", "stream_options", "n_predict"} & heard.document.keys()

    run(work())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nobody_is_asked_for_a_prompt_of_which_the_token_ids_came(tmp_path: Path, path: str) -> None:
    """As of vLLM, whose replica is killed between the reason for its end and its usage: the bill is known."""
    asked = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    asked |= {"messages": ASK["messages"]} if "chat" in path else {"prompt": "begin"}

    async def killed_before_its_usage(heard: Heard) -> None:
        assert heard.document["return_token_ids"] is True
        choices: list[dict[str, Any]] = [
            {"index": 0, "token_ids": [number], "finish_reason": None}
            | ({"delta": {"content": word}} if "chat" in path else {"text": word})
            for number, word in enumerate(WORDS)
        ]
        events = [{"id": "1", "object": "o", "created": 1, "model": "e", "choices": [one]} for one in choices]
        (events[0] if "chat" in path else choices[0])["prompt_token_ids"] = [7, 8, 9]
        choices[-1]["finish_reason"] = "stop"
        data = b"".join(map(in_chunk, map(event_of, events)))
        await dies_after(STREAM_HEAD + data, 1 << 20)(heard)

    async def work() -> None:
        services = {"m": service_row(engine="vllm")}
        async with bed(tmp_path, killed_before_its_usage, plain, services=services) as one:
            for replica in one.replicas:
                replica.abilities = Abilities(chat=True, completions=True, resume="tokens")
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(asked, path)
            assert answer.whole and answer.text == "".join(WORDS) and answer.events[-1] == "[DONE]"
            assert usages_of(answer) == [(3, len(WORDS), 3 + len(WORDS))] and b"token_ids" not in answer.body
            (record,) = one.records()
            assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("ok", 3, len(WORDS))
            assert record.resumed == 0 and one.replicas[1].heard == []

    run(work())


@pytest.mark.parametrize("shows_usage", [False, True])
def test_a_part_of_several_words_counts_as_several_in_sglangs_chats(tmp_path: Path, shows_usage: bool) -> None:
    """It has no token ids there, and says with each part how many there were: whoever goes on gets so many fewer."""

    def counted(text: str, prompt: int, completion: int) -> bytes:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "details": {"reasoning_tokens": 0}}
        return in_chunk(chunk(text, usage=usage))

    async def two_then_one(heard: Heard) -> None:
        assert heard.document["stream_options"]["continuous_usage_stats"] is True
        data = STREAM_HEAD + in_chunk(role_chunk()) + counted("one two", 5, 2) + counted(" three", 5, 3)
        await dies_after(data, 1 << 20)(heard)

    async def two_more(heard: Heard) -> None:
        assert heard.document["max_tokens"] == 2 and heard.document["stream_options"]["continuous_usage_stats"] is True
        heard.writer.write(STREAM_HEAD + counted(" four five", 8, 2) + in_chunk(chunk(finish="length")))
        heard.writer.write(b"".join(map(in_chunk, (usage_chunk(8, 2), DONE))) + b"0\r\n\r\n")

    async def work() -> None:
        asked = ASK | {"max_tokens": 5} | ({"stream_options": {"include_usage": True}} if shows_usage else {})
        async with bed(tmp_path, two_then_one, two_more, services={"m": service_row(engine="sglang")}) as one:
            for replica in one.replicas:
                replica.abilities = Abilities(chat=True, resume="tokens")
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(asked)
            assert answer.whole and answer.text == "one two three four five" and answer.events[-1] == "[DONE]"
            assert not any("usage" in event for event in answer.events[:-1] if event["choices"])
            assert usages_of(answer) == [(5, 5, 10)] * int(shows_usage)
            (record,) = one.records()
            assert (record.prompt_tokens, record.completion_tokens, record.resumed) == (5, 5, 1)

    run(work())


def test_a_usage_that_came_with_the_last_word_is_the_clients(tmp_path: Path) -> None:
    """Of a replica that goes on and ends before the stream does."""
    begun = STREAM_HEAD + b"".join(map(in_chunk, [role_chunk(), chunk("one")]))
    usage = {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    rest = STREAM_HEAD + in_chunk(chunk(" two", usage=None)) + in_chunk(chunk(finish="stop", usage=usage))

    async def work() -> None:
        async with bed(tmp_path, dies_after(begun, 1 << 20), dies_after(rest, 1 << 20)) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(ASK | {"stream_options": {"include_usage": True}})
            assert answer.whole and answer.text == "one two" and answer.events[-1] == "[DONE]"
            assert usages_of(answer) == [(5, 2, 7)]
            (record,) = one.records()
            assert (record.prompt_tokens, record.completion_tokens, record.resumed) == (5, 2, 1)

    run(work())


def test_a_client_that_sees_token_ids_gets_each_once_from_three_replicas(tmp_path: Path) -> None:
    """Each replica says what its prompt is: of those that go on, what was said before is a part of it."""
    prompts = []

    async def two_more(heard: Heard) -> None:
        prompt = heard.document["prompt"]
        ids = [1, 2] if prompt == "begin" else prompt
        prompts.append(ids)
        events = []
        for number in (len(ids), len(ids) + 1):
            choice = {"index": 0, "text": f" {number}", "token_ids": [number], "finish_reason": None}
            events.append({"id": "cmpl-1", "created": 1, "model": "e", "choices": [choice]})
        events[0]["choices"][0]["prompt_token_ids"] = ids
        if len(prompts) == 3:
            events[1]["choices"][0]["finish_reason"] = "stop"
        data = b"".join(in_chunk(b"data: " + json.dumps(one).encode() + b"\n\n") for one in events)
        await dies_after(STREAM_HEAD + data, 1 << 20)(heard)

    async def work() -> None:
        services = {"m": service_row(engine="vllm")}
        async with bed(tmp_path, two_more, two_more, two_more, services=services) as one:
            for replica in one.replicas:
                replica.abilities = Abilities(completions=True, resume="tokens")
            one.publish()
            asked = {"model": "m", "stream": True, "prompt": "begin", "return_token_ids": True}
            answer = await one.ask(asked, "/v1/completions")
            assert answer.whole and answer.text == " 2 3 4 5 6 7"
            assert prompts == [[1, 2], [1, 2, 2, 3], [1, 2, 2, 3, 4, 5]]
            (record,) = one.records()
            assert (record.prompt_tokens, record.completion_tokens, record.resumed) == (2, 6, 2)

    run(work())


async def _refuses(heard: Heard) -> None:
    heard.writer.write(answer_of({"error": {"message": "no"}}, 400))


async def _is_silent(heard: Heard) -> None:
    await heard.reader.read()


async def _babbles(heard: Heard) -> None:
    heard.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n")
    for _ in range(64):
        heard.writer.write(b" " * (1 << 16))
        await heard.writer.drain()
        await asyncio.sleep(0.001)
    await heard.reader.read()


@pytest.mark.parametrize("other", [_refuses, _is_silent, _babbles, dies_after(b"", 0), None])
def test_a_stream_ends_where_nobody_counts_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Script | None
) -> None:
    monkeypatch.setattr(bounds, "COUNT_S", 1.0)
    asked = ASK | {"stream_options": {"include_usage": True}}
    dies = dies_after(without_usage(WORDS, "stop"), 1 << 20)

    async def work() -> None:
        async with bed(tmp_path, dies, *[other] * (other is not None)) as one:
            for replica in one.replicas[1:]:
                replica.suspect = True  # chosen last
            one.publish()
            answer = await asyncio.wait_for(one.ask(asked), 20)
            assert answer.whole and answer.text == "".join(WORDS) and answer.events[-1] == "[DONE]"
            ((prompt, completion, _),) = usages_of(answer)
            (record,) = one.records()
            assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("ok", prompt, completion)
            assert prompt > 0 and completion == len(WORDS) and one.worker.calls == {}
            assert all(len(replica.heard) == 1 for replica in one.replicas[1:])

    run(work())


def test_an_answer_that_is_not_streamed_comes_from_another_replica(tmp_path: Path) -> None:
    whole = answer_of(CHAT)

    async def work() -> None:
        async with bed(tmp_path, plain, plain) as one:
            for at in range(0, len(whole), 5):
                for replica in one.replicas:
                    replica.script = plain
                one.replicas[0].script = one.replicas[1].script = first_dies(whole, at)
                answer = await one.ask({"model": "m", "messages": []})
                assert (answer.status, answer.document) == (200, CHAT), at
            assert {(record.outcome, record.completion_tokens) for record in one.records()} == {("ok", 3)}

    def first_dies(data: bytes, at: int) -> Script:
        died = False

        async def script(heard: Heard) -> None:
            nonlocal died
            if died:
                heard.writer.write(data)
                return
            died = True
            heard.writer.write(data[:at])
            await heard.writer.drain()
            heard.writer.transport.abort()
            raise ConnectionResetError

        return script

    run(work())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "several choices"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "bound to a form"),
        ({"grammar": "root ::= 'a'"}, "bound to a form"),
    ],
)
def test_what_cannot_go_on_ends_with_an_error_that_no_client_overlooks(
    tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    data = stream_of(WORDS)
    at = data.index(b"univers") + 60

    async def work() -> None:
        async with bed(tmp_path, dies_after(data, at), goes_on, slots=64) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(ASK | more)
            assert answer.status == 200 and not answer.whole
            last = answer.events[-1]
            assert last["error"]["code"] == "stream_broken" and why in last["error"]["message"]
            assert "[DONE]" not in answer.events and one.replicas[1].heard == []
            (record,) = one.records()
            assert record.outcome == "failed" and record.completion_tokens > 0

            def by_openai() -> str:
                import openai

                client = openai.OpenAI(base_url=one.url, api_key=one.key, max_retries=0)
                with pytest.raises(openai.APIError) as error:
                    for _ in client.chat.completions.create(**ASK, extra_body=more):
                        pass
                return str(error.value)

            assert "the stream broke" in await asyncio.to_thread(by_openai)

    run(work())


def test_a_tool_call_that_was_begun_is_not_continued(tmp_path: Path) -> None:
    choice = {
        "index": 0,
        "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]},
        "finish_reason": None,
    }
    call = b"data: " + json.dumps({"id": "c", "created": 1, "model": "e", "choices": [choice]}).encode() + b"\n\n"

    async def work() -> None:
        async with bed(tmp_path, dies_after(STREAM_HEAD + in_chunk(call), 10_000), plain) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            answer = await one.ask(ASK)
            assert not answer.whole and "called a tool" in answer.events[-1]["error"]["message"]

    run(work())


def test_an_engine_that_cannot_go_on_is_not_asked_to(tmp_path: Path) -> None:
    data = stream_of(WORDS)

    async def work() -> None:
        async with bed(tmp_path, dies_after(data, len(data) // 2), plain) as one:
            for replica in one.replicas:
                replica.abilities = type(replica.abilities)(chat=True, resume="none")
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            task = asyncio.create_task(one.ask(ASK))
            answer = await task
            assert not answer.whole and "cannot go on" in answer.events[-1]["error"]["message"]

    run(work())


BROKEN = {
    "a length that is too large": b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}",
    "no HTTP": b"hello\r\n\r\n",
    "an old HTTP": b"HTTP/0.9 200 OK\r\n\r\n{}",
    "a chunk that is no number": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\n" + b"x-filler: y\r\n" * 20_000,
    "no words": b"",
    "a stream without its end": STREAM_HEAD + in_chunk(role_chunk()) + b"0\r\n\r\n",
    "a stream of no events": STREAM_HEAD + b"0\r\n\r\n",
    "busy": answer_of({"error": "busy"}, 503),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_replica_may_not_say_is_another_replicas_turn(tmp_path: Path, what: str, stream: bool) -> None:
    async def work() -> None:
        async with bed(tmp_path, dies_after(BROKEN[what], 1 << 20, abort=False), plain) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            task = asyncio.create_task(one.ask(ASK if stream else {"model": "m", "messages": []}))
            answer = await task
            assert answer.status == 200 and answer.whole
            if stream:
                assert answer.text == "hello world" and answer.events[-1] == "[DONE]"
            else:
                assert answer.document == CHAT

    run(work())


def test_a_replica_that_another_worker_has_removed_hinders_no_news(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain, plain, plain) as one:
            last = one.replicas.pop()
            one.publish()
            one.worker.gate.remove_replica(0xA1)  # by another worker, which was told first
            one.replicas = [last]
            one.publish()
            assert [replica.name for replica in one.worker.gate.replicas()] == [0xA3]
            assert (await one.ask(ASK)).status == 200 and len(last.heard) == 1

    run(work())


def test_what_ends_every_replica_is_not_sent_to_all_of_them(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, *[dies_after(b"", 0)] * 6) as one:
            answer = await one.ask({"model": "m", "messages": []})
            assert answer.status == 502 and answer.document["error"]["code"] == "replica_failed"
            assert sum(len(replica.heard) for replica in one.replicas) == bounds.MOST_TRIES

    run(work())


def test_an_answer_of_the_engine_goes_through_as_it_is(tmp_path: Path) -> None:
    wrong = {"error": {"message": "temperature: too high", "type": "invalid_request_error", "param": None, "code": 400}}

    async def refuses(heard: Heard) -> None:
        heard.writer.write(answer_of(wrong, 400))

    async def work() -> None:
        async with bed(tmp_path, refuses) as one:
            for asked in (ASK, {"model": "m", "messages": []}):
                answer = await one.ask(asked)
                assert (answer.status, answer.document) == (400, wrong)
            assert {(record.outcome, record.prompt_tokens) for record in one.records()} == {("failed", 0)}

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_counts_more_than_there_can_be_is_answered_and_billed(tmp_path: Path, stream: bool) -> None:
    async def boasts(heard: Heard) -> None:
        usage = {"prompt_tokens": 1 << 50, "completion_tokens": 1 << 31, "total_tokens": 1}
        whole = STREAM_HEAD + in_chunk(chunk("a")) + in_chunk(usage_chunk(1 << 50, 1 << 31)) + in_chunk(DONE)
        heard.writer.write(whole + b"0\r\n\r\n" if stream else answer_of({**CHAT, "usage": usage}))

    async def work() -> None:
        async with bed(tmp_path, boasts) as one:
            asked = ASK if stream else {"model": "m", "messages": []}
            answer = await asyncio.wait_for(one.ask(asked), 20)
            assert answer.status == 200 and answer.whole
            (record,) = one.records()
            assert (record.outcome, record.prompt_tokens) == ("ok", MAX_AMOUNT) and one.worker.calls == {}
            # nor does a client's bound surprise the gate
            assert (await one.ask({**asked, "max_tokens": 1 << 30, "n": 2})).status == 200

    run(work())


def test_an_error_in_a_stream_ends_it_where_it_is(tmp_path: Path) -> None:
    said = b'data: {"error":{"message":"out of memory","code":500}}\n\n'

    async def fails(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD + in_chunk(chunk("a")) + in_chunk(said) + in_chunk(DONE) + b"0\r\n\r\n")

    async def work() -> None:
        async with bed(tmp_path, fails) as one:
            answer = await one.ask(ASK)
            assert not answer.whole and answer.events[-1]["error"]["message"] == "out of memory"
            assert one.records()[0].outcome == "failed"

    run(work())


def test_text_that_looks_like_the_protocol_is_text(tmp_path: Path) -> None:
    words = [
        '"usage"',
        "usage",
        "error",
        '{"error":1}',
        "[DONE]",
        "data: [DONE]\n\n",
        "\r\n\r\n",
        '"finish_reason":"stop"',
    ]

    async def says(heard: Heard) -> None:
        heard.writer.write(stream_of(words))

    async def work() -> None:
        async with bed(tmp_path, says) as one:
            answer = await one.ask(ASK)
            assert answer.whole and answer.text == "".join(words)

    run(work())


def test_a_replica_that_hangs_is_left_out_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SILENT_S", 0.5)
    monkeypatch.setattr(bounds, "SUSPECT_SILENT_S", 0.2)
    data = stream_of(WORDS)

    async def hangs(heard: Heard) -> None:
        heard.writer.write(data[: data.index(b"univers") + 200])
        await heard.reader.read(1)
        raise ConnectionResetError

    async def work() -> None:
        async with bed(tmp_path, hangs, goes_on) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            first = asyncio.create_task(one.ask(ASK))
            answer = await first
            assert answer.whole and answer.text == "".join(WORDS)
            assert one.worker.pools[0xA1].out_until > 0
            quick = await asyncio.wait_for(one.ask(ASK), 2)
            assert quick.whole and len(one.replicas[0].heard) == 1
            await until(lambda: one.replicas[0].writers == set())  # and what it did is cancelled

    run(work())


def test_a_replica_that_is_not_heard_is_given_up_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SUSPECT_SILENT_S", 0.2)

    async def hangs(heard: Heard) -> None:
        await asyncio.sleep(30)

    async def work() -> None:
        async with bed(tmp_path, hangs, plain) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            first = asyncio.create_task(one.ask(ASK))
            await until(lambda: len(one.replicas[0].heard) > 0)
            await asyncio.sleep(0.8)
            assert not first.done()
            one.replicas[0].suspect, one.replicas[1].state = True, State.READY
            one.publish()
            assert (await first).text == "hello world"

    run(work())


def test_an_engine_that_hangs_and_says_that_it_is_well_holds_a_request_as_long_as_its_service_says(
    tmp_path: Path,
) -> None:
    async def hangs(heard: Heard) -> None:
        await heard.reader.read()

    async def work() -> None:
        services = {"m": service_row(answer_s=0.5)}
        async with bed(tmp_path, hangs, hangs, services=services) as one:
            answer = await one.ask({"model": "m", "messages": []})
            error = answer.document["error"]
            assert (answer.status, error["code"]) == (504, "answer_timeout") and answer.whole
            assert "within 0.5 s (answer_within)" in error["message"]
            assert sum(len(replica.heard) for replica in one.replicas) == 1 and one.worker.calls == {}
            await until(lambda: all(replica.writers == set() for replica in one.replicas))  # its work is cancelled
            (record,) = one.records()
            assert (record.outcome, record.status, record.prompt_tokens) == ("failed", 504, 0)

    run(work())


def test_a_replica_that_is_not_heard_is_no_engine_that_hangs_however_short_answer_within_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SUSPECT_SILENT_S", 1.0)

    async def hangs(heard: Heard) -> None:
        await asyncio.sleep(30)

    async def work() -> None:
        async with bed(tmp_path, hangs, plain, services={"m": service_row(answer_s=1.0)}) as one:
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            first = asyncio.create_task(one.ask({"model": "m", "messages": []}))
            await until(lambda: len(one.replicas[0].heard) > 0)
            one.replicas[0].suspect, one.replicas[1].suspect = True, False
            one.publish()
            assert (await first).status == 200

    run(work())


def test_only_the_certificate_that_a_replica_named_gets_the_secret(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain, plain) as one:
            one.replicas[0].fingerprint = "0" * 64
            one.replicas[1].suspect = True  # chosen last
            one.publish()
            task = asyncio.create_task(one.ask({"model": "m", "messages": []}))
            await until(lambda: one.worker.pools[0xA1].out_until > 0)
            one.replicas[1].state = State.READY
            one.publish()
            assert (await task).status == 200
            assert one.replicas[0].heard == []

    run(work())


def test_a_connection_that_ended_between_two_requests_says_nothing_of_its_replica(tmp_path: Path) -> None:
    async def closes(heard: Heard) -> None:
        heard.writer.write(answer_of(CHAT))
        await heard.writer.drain()
        if len(connections[id(heard.writer)]) == 1:
            await heard.reader.readexactly(1)  # the next request: close, as an engine's idle time-out would
            raise ConnectionResetError

    class Connections(dict[int, list[int]]):
        def __missing__(self, key: int) -> list[int]:
            self[key] = [0]
            return self[key]

    connections = Connections()

    async def work() -> None:
        async with bed(tmp_path, closes) as one:
            for _ in range(4):
                assert (await one.ask({"model": "m", "messages": []})).status == 200
            assert one.worker.pools[0xA1].out_until == 0.0 and one.replicas[0].connections == 4

    run(work())


def test_usage_of_a_stream_is_billed_once_and_shown_to_whom_wants_it(tmp_path: Path) -> None:
    async def says(heard: Heard) -> None:
        assert heard.document["stream_options"]["include_usage"] is True
        heard.writer.write(
            STREAM_HEAD + b"".join(map(in_chunk, [chunk("a"), chunk("b"), usage_chunk(7, 2), DONE])) + b"0\r\n\r\n"
        )

    async def work() -> None:
        async with bed(tmp_path, says) as one:
            assert all(event == "[DONE]" or event["choices"] for event in (await one.ask(ASK)).events)
            shown = await one.ask(ASK | {"stream_options": {"include_usage": True}})
            assert shown.events[-2]["usage"]["total_tokens"] == 9
            assert [(r.prompt_tokens, r.completion_tokens) for r in one.records()] == [(7, 2), (7, 2)]

    run(work())


def test_nobody_can_serve_it_a_request_waits_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "WAITING_S", 0.3)

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            one.replicas[0].state = State.STARTING
            one.publish()
            tasks = [asyncio.create_task(one.ask(asked)) for asked in (ASK, {"model": "m", "messages": []})]
            await until(lambda: any(message.get("demand") for message in one.told), 0.5)
            demand = next(message["demand"][0] for message in one.told if message.get("demand"))
            assert (demand["service"], demand["in_flight"]) == ("m", 0) and demand["waiting"] in (1, 2)
            await asyncio.sleep(1.2)
            one.replicas[0].state = State.READY
            one.publish()
            stream, whole = await asyncio.gather(*tasks)
            assert stream.body.count(b": waiting\n\n") >= 2 and stream.text == "hello world" and stream.whole
            assert whole.document == CHAT

    run(work())


def test_a_deadline_is_held_and_its_refusal_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        rows = {"m": service_row(why="no GPU is free", eta_s=30.0)}
        async with bed(tmp_path, services=rows) as one:
            answer = await one.ask({"model": "m", "messages": []}, sluice_deadline="0.3")
            assert answer.status == 503 and "no GPU is free" in answer.document["error"]["message"]
            assert answer.headers["retry-after"] == "30"
            assert one.records()[0].outcome == "expired" and one.worker.calls == {}
            for text in ("0", "-1", "x", "nan", "1e9"):
                assert (await one.ask({"model": "m", "messages": []}, sluice_deadline=text)).status == 400

    run(work())


def test_a_client_that_goes_ends_the_replicas_work_and_pays_for_what_was_done(tmp_path: Path) -> None:
    async def slow(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD + in_chunk(role_chunk()))
        for word in WORDS[:3]:
            heard.writer.write(in_chunk(chunk(word)))
        await heard.writer.drain()
        await heard.reader.read(1)
        raise ConnectionResetError

    async def work() -> None:
        async with bed(tmp_path, slow) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request(ASK))
            await reader.readuntil(b' a"')
            writer.close()
            await until(lambda: one.replicas[0].gone == 1 and one.worker.calls == {})
            (record,) = one.records()
            assert (record.outcome, record.status, record.completion_tokens) == ("cancelled", 499, 3)

    run(work())


def test_a_client_that_goes_while_it_waits_leaves_the_queue(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.request(ASK))
            await until(lambda: len(one.worker.waiting) == 1)
            writer.close()
            await until(lambda: one.worker.calls == {} and one.worker.waiting == {})
            assert (one.records()[0].outcome, one.records()[0].prompt_tokens) == ("cancelled", 0)

    run(work())
