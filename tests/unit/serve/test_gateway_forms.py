"""Tools, JSON modes and logprobs of a real engine, llama.cpp: each byte of its answers passes, and what cannot go on
exactly after a killed replica says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve_models import PLAIN_TEMPLATE, counted, make_model
from tests.unit.serve import test_gateway_llama
from tests.unit.serve.gateway_bed import Answer, Bed, run, until
from tests.unit.serve.test_gateway_llama import LlamaReplica, llama

CHAT = "/v1/chat/completions"
WORD = {"type": "object", "properties": {"word": {"const": "six"}}, "required": ["word"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "a word", "parameters": WORD}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "word", "schema": WORD, "strict": True}}
FORMS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 12},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "json_schema": {"response_format": SCHEMA, "max_tokens": 100},
    "tools": {"tools": [TOOL], "max_tokens": 30},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms") / "counting.gguf"
    return make_model(path, "counting", layers=2, feed=2048, template=PLAIN_TEMPLATE)


@pytest.fixture(scope="module")
def calling(model: Path) -> Path:
    """A model that calls the tool whatever it is asked."""
    call = json.dumps({"name": "look_up", "arguments": {"word": "six"}})
    says = f"<tool_call>\n{call}\n</tool_call>"
    return make_model(model.with_name("calling.gguf"), "counting", template=PLAIN_TEMPLATE, says=says)


def asked(form: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": "m", "messages": [{"role": "user", "content": "six"}], "temperature": 0, **form, **more}


@contextmanager
def overheard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytearray]]:
    """What engines send on each connection."""
    found: list[bytearray] = []
    pipe = test_gateway_llama._pipe

    class Writer:
        def __init__(self, writer: asyncio.StreamWriter) -> None:
            self._writer, self._said = writer, bytearray()
            found.append(self._said)

        def write(self, data: bytes) -> None:
            self._said += data
            self._writer.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._writer, name)

    async def listen(reader: Any, writer: Any, *more: Any, **others: Any) -> None:
        await pipe(reader, Writer(writer), *more, **others)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(test_gateway_llama, "_pipe", listen)
        yield found


def message_of(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """Text, arguments of tools, and logprobs, of a stream put together."""
    if not stream:
        choice = answer.document["choices"][0]
        return {"said": choice["message"], "logprobs": choice.get("logprobs")}
    said: dict[str, Any] = {"content": "", "arguments": "", "name": ""}
    logprobs: list[Any] = []
    for one in answer.events[:-1]:
        for choice in one["choices"]:
            said["content"] += choice["delta"].get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            for call in choice["delta"].get("tool_calls") or ():
                said["name"] += call["function"].get("name") or ""
                said["arguments"] += call["function"].get("arguments") or ""
    tools = [{"function": {"name": said["name"], "arguments": said["arguments"]}}] if said["name"] else None
    return {"said": {"content": said["content"], "tool_calls": tools}, "logprobs": {"content": logprobs}}


def check(name: str, found: dict[str, Any]) -> None:
    said = found["said"]
    if name == "tools":
        (call,) = said["tool_calls"]
        assert call["function"]["name"] == "look_up" and json.loads(call["function"]["arguments"]) == {"word": "six"}
    elif name == "json_schema":
        assert json.loads(said["content"]) == {"word": "six"}
    elif name == "json_object":
        assert said["content"].lstrip().startswith("{")
    else:
        assert said["content"] == counted(0, 12)
        rows = found["logprobs"]["content"]
        assert "".join(row["token"] for row in rows) == counted(0, 12)
        assert all(len(row["top_logprobs"]) == 2 and row["logprob"] <= 0 for row in rows)


@pytest.mark.parametrize("names", [("logprobs", "json_object", "json_schema"), ("tools",)], ids=["forms", "tools"])
def test_each_byte_of_the_engine_passes(
    tmp_path: Path, model: Path, calling: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    async def work() -> None:
        with overheard(monkeypatch) as said:
            async with llama(tmp_path, calling if names == ("tools",) else model, 1) as (one, _):
                for name, form in [(name, FORMS[name]) for name in names]:
                    for stream in (False, True):
                        before = [len(each) for each in said]
                        answer = await one.ask(asked(form, stream=stream), CHAT)
                        assert answer.status == 200 and answer.whole, answer
                        heard = b"".join(
                            bytes(each)[before[number] if number < len(before) else 0 :]
                            for number, each in enumerate(said)
                        )
                        engine = heard[heard.index(b"HTTP/1.1 200") :]
                        assert answer.body == Answer.of(engine).body, (name, stream)
                        check(name, message_of(answer, stream=stream))
                records = one.records()
                assert {record.outcome for record in records} == {"ok"} and len(records) == 2 * len(names)
                assert all(record.completion_tokens > 0 for record in records)

    run(work())


CANNOT = {
    "it has logprobs": {"logprobs": True},
    "it may call tools": {"tools": [TOOL]},
    "its output is bound to a form": {"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "type": "array", "items": {"const": "six"}, "minItems": 150,
    }}}},
}  # fmt: skip


@pytest.mark.parametrize("why", CANNOT)
def test_a_stream_that_cannot_go_on_exactly_ends_with_one_clear_error(tmp_path: Path, model: Path, why: str) -> None:
    async def work() -> None:
        async with llama(tmp_path, model) as (one, replicas):
            answer = await interrupted(one, replicas, asked({**CANNOT[why], "max_tokens": 600}, stream=True))
            assert not answer.whole and b"[DONE]" not in answer.body
            error = answer.events[-1]["error"]
            assert error["code"] == "stream_broken" and f"nobody can go on: {why}" in error["message"]
            (record,) = one.records()
            assert (record.outcome, record.resumed) == ("failed", 0) and record.completion_tokens > 0
            # Before its first byte, and where it is not streamed, another replica has the whole of it.
            for replica in replicas:
                if replica.process is not None and replica.process.poll() is not None:
                    one.replicas.remove(replica)
            one.publish()
            assert (await one.ask(asked({**FORMS["json_schema"]}, stream=False), CHAT)).status == 200

    run(work())


async def interrupted(one: Bed, replicas: list[LlamaReplica], document: dict[str, Any]) -> Answer:
    """The answer to a request whose engine is killed in the middle."""
    for replica in replicas:
        replica.lets_through = 32_768
    task = asyncio.create_task(one.ask(document, CHAT))
    await until(lambda: any(call._count > 5 for call in one.worker.calls.values()), 60)
    (serving,) = [replica for replica in replicas if replica.writers]
    for replica in replicas:
        replica.lets_through = None
    serving.kill_engine()
    return await task


def test_an_answer_in_a_form_whose_replica_is_killed_comes_of_another_one(tmp_path: Path, model: Path) -> None:
    async def work() -> None:
        async with llama(tmp_path, model) as (one, replicas):
            task = asyncio.create_task(one.ask(asked({**FORMS["logprobs"], "max_tokens": 400}, stream=False), CHAT))
            await until(lambda: any(replica.writers for replica in replicas))
            (serving,) = [replica for replica in replicas if replica.writers]
            serving.kill_engine()
            answer = await task
            assert answer.status == 200 and answer.document["choices"][0]["message"]["content"] == counted(0, 400)
            (record,) = one.records()
            assert (record.outcome, record.completion_tokens) == ("ok", 400)

    run(work())
