"""Streams of a real engine, llama.cpp, whose replicas are killed: the text that arrives is exact.

With SLUICE_TEST_SCALE=full a thousand streams, else a few dozen.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.serving import Abilities
from tests.serve_models import PLAIN_TEMPLATE, counted, make_model, make_projector, word
from tests.unit.serve.gateway_bed import SECRET, Answer, Bed, Replica, bed, certificate, run, service_row, until

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
TOKENS = Abilities(chat=True, completions=True, responses=True, resume="tokens")
_ENGINE = (sys.executable, "-P", "-m", "sluice.serve.engines.xllamacpp_server")


@dataclass
class LlamaReplica(Replica):
    """The relay of a replica, before an engine that can be killed."""

    address: Path | int = Path()
    process: subprocess.Popen[bytes] | None = None
    lets_through: int | None = None
    """Bytes of each answer, as of an engine that is killed before it has more. None: all."""
    asked: bytearray = field(default_factory=bytearray)
    """All that the gateway sent."""

    def engine(self, model: Path, slots: int = 8, *options: str) -> None:
        assert isinstance(self.address, Path)
        self.address.unlink(missing_ok=True)
        arguments = ["--model", str(model), "--host", str(self.address), "--parallel", str(slots), "--alias", "m"]
        arguments += ["--ctx-size", str(2048 * slots), "--threads", "1", *options]
        root = Path(__file__).resolve().parents[3]
        self.process = subprocess.Popen(
            [*_ENGINE, *arguments], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
        )

    async def ready(self, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await self._connect()
                    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                    answer = await reader.read(64)
                    writer.close()
                    if b" 200 " in answer:
                        return
                await asyncio.sleep(0.05)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.address, Path):
            return await asyncio.open_unix_connection(self.address)
        return await asyncio.open_connection("127.0.0.1", self.address)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            assert await reader.readline() == SECRET.encode() + b"\n"
            ours, engine = await self._connect()
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
            return
        self.writers |= {writer, engine}
        await asyncio.gather(_pipe(reader, engine, seen=self.asked), _pipe(ours, writer, self.lets_through))
        self.writers -= {writer, engine}

    def kill_engine(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.kill_engine()
        super().kill()


async def _pipe(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None = None, seen: bytearray | None = None
) -> None:
    left = sys.maxsize if most is None else most
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            if seen is not None:
                seen += data
            writer.write(data[:left])
            left -= len(data[:left])
            await writer.drain()
    writer.transport.abort()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    # Slow enough that a replica can be killed in the middle of its streams.
    make_model(folder / "counting.gguf", "counting", layers=2, feed=2048)
    make_model(folder / "random.gguf", "random", layers=2, feed=2048)
    return folder


@asynccontextmanager
async def llama(
    folder: Path, model: Path, count: int = 2, *options: str
) -> AsyncIterator[tuple[Bed, list[LlamaReplica]]]:
    context, fingerprint = certificate(folder)
    async with bed(folder, services={"m": service_row(engine="llama.cpp", deadline_s=60.0)}) as one:
        made = []
        for number in range(count):
            replica = LlamaReplica(unused, context, fingerprint, f"{0xB1 + number:016x}", slots=8, abilities=TOKENS)
            replica.address = folder / f"{number}.sock"
            replica.engine(model, 8, *options)
            made.append(replica)
            one.replicas.append(await replica.start())
        for replica in made:
            await replica.ready()
        one.publish()
        yield one, made


async def unused(heard: Any) -> None:
    """The script of a replica with an engine."""
    raise AssertionError


def asked(path: str, after: int, number: int, **more: Any) -> dict[str, Any]:
    """A request that the counting model answers with the next words."""
    before = word(after)
    prompt = {"messages": [{"role": "user", "content": before}]} if "chat" in path else {"prompt": f" {before}"}
    return {"model": "m", "stream": True, "max_tokens": number, **prompt, **more}


def whole(answer: Answer, prompt: int, number: int, text: str, chat: bool) -> None:
    """One stream with one id, exact text, one end and the usage of all of it."""
    assert answer.whole and answer.events[-1] == "[DONE]", answer.body[-300:]
    assert answer.text == text
    documents = answer.events[:-1]
    assert len({one["id"] for one in documents}) == 1 and len({one["object"] for one in documents}) == 1
    choices = [choice for one in documents for choice in one["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert b"__verbose" not in answer.body and b'"tokens":' not in answer.body
    if chat:
        assert sum(1 for choice in choices if choice["delta"].get("role")) == 1
    (usage,) = [one["usage"] for one in documents if one.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        prompt,
        number,
        prompt + number,
    )


def has_said(one: Bed, victim: LlamaReplica, tasks: list[asyncio.Task[Answer]], parts: int) -> bool:
    """Whether one of a replica's streams has so many parts, or all are over."""
    calls = [each for each in one.worker.calls.values() if each.replica and each.replica.launch == victim.launch]
    return any(call._count >= parts for call in calls) or all(task.done() for task in tasks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_are_exact_while_their_replicas_are_killed(tmp_path: Path, models: Path, path: str) -> None:
    rounds, streams = (63, 8) if FULL else (4, 6)
    number = 120
    draw = random.Random(18)
    chat = "chat" in path

    async def work() -> None:
        async with llama(tmp_path, models / "counting.gguf") as (one, replicas):
            for round_ in range(rounds):
                starts = [draw.randrange(1, 1500) for _ in range(streams)]
                more = {"stream_options": {"include_usage": True}}
                tasks = [asyncio.create_task(one.ask(asked(path, at, number, **more), path)) for at in starts]
                victim = replicas[round_ % 2]
                await until(partial(has_said, one, victim, tasks, draw.randrange(60)), 60)
                victim.kill_engine()
                victim.engine(models / "counting.gguf")
                answers = await asyncio.gather(*tasks)
                for at, answer in zip(starts, answers, strict=True):
                    whole(answer, 6 if chat else 2, number, counted(at, number), chat)
                await victim.ready()
            records = one.records()
            assert len(records) == rounds * streams == len({record.id for record in records})
            assert {(r.outcome, r.prompt_tokens, r.completion_tokens) for r in records} == {
                ("ok", 6 if chat else 2, number)
            }
            assert sum(record.resumed for record in records) >= rounds // 2, "no stream was in the middle"

    run(work())


# llama.cpp's logits depend a little on what else is in a batch: asked directly, it gives other texts where the two best
# tokens are within 0.05. For these beginnings none are within 0.18.
_FAR_FROM_TIES = {"/v1/chat/completions": (582, 239, 610, 1450), "/v1/completions": (1268, 393, 1002, 981)}


@pytest.mark.parametrize("path", _FAR_FROM_TIES)
def test_a_text_that_depends_on_all_of_its_prompt_is_the_uninterrupted_one(
    tmp_path: Path, models: Path, path: str
) -> None:
    async def work() -> None:
        async with llama(tmp_path, models / "random.gguf") as (one, replicas):
            requests = [asked(path, at, 100, temperature=0, seed=1) for at in _FAR_FROM_TIES[path]]
            wanted = [(await one.ask(each, path)).text for each in requests]
            assert len(set(wanted)) == 4 and all(len(text.split()) == 100 for text in wanted)
            assert all(len(set(text.split())) > 30 for text in wanted), "in a circle a lost word does not show"
            resumed = 0
            for turn in range(20 if FULL else 6):
                tasks = [asyncio.create_task(one.ask(each, path)) for each in requests]
                victim = replicas[turn % 2]
                await until(partial(has_said, one, victim, tasks, 15 * (turn % 6)), 60)
                victim.kill_engine()
                victim.engine(models / "random.gguf")
                assert [answer.text for answer in await asyncio.gather(*tasks)] == wanted
                resumed = sum(record.resumed for record in one.records())
                await victim.ready()
            assert resumed > 0

    run(work())


def test_the_openai_client_sees_one_stream(tmp_path: Path, models: Path) -> None:
    async def work() -> None:
        async with llama(tmp_path, models / "counting.gguf") as (one, replicas):

            def by_openai() -> tuple[str, Any]:
                import openai

                client = openai.OpenAI(base_url=one.url, api_key=one.key, max_retries=0)
                said, usage = "", None
                with client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "one"}], max_tokens=150, stream=True,
                    stream_options={"include_usage": True},
                ) as stream:  # fmt: skip
                    for part in stream:
                        usage = part.usage or usage
                        said += (part.choices[0].delta.content or "") if part.choices else ""
                return said, usage

            for replica in replicas:
                replica.lets_through = 16_384  # of some 40,000 bytes, however fast the engine is
            task = asyncio.create_task(asyncio.to_thread(by_openai))
            await until(lambda: any(call._count > 20 for call in one.worker.calls.values()), 60)
            for replica in replicas:
                replica.lets_through = None
            (serving,) = [replica for replica in replicas if replica.writers]
            serving.kill_engine()
            said, usage = await task
            assert said == counted(1, 150) and usage.completion_tokens == 150
            (record,) = one.records()
            assert (record.resumed, record.outcome) == (1, "ok")

    run(work())


def test_what_the_openai_client_can_ask(tmp_path: Path, models: Path) -> None:
    async def work() -> None:
        async with llama(tmp_path, models / "counting.gguf", 1) as (one, _):

            def by_openai() -> None:
                import openai

                client = openai.OpenAI(base_url=one.url, api_key=one.key, max_retries=0)
                assert [model.id for model in client.models.list()] == ["m"]
                assert client.models.retrieve("m").owned_by == "physics"
                said = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "six"}], max_tokens=3
                )
                assert said.choices[0].message.content == counted(6, 3)
                text = client.completions.create(model="m", prompt=" six", max_tokens=3)
                assert text.choices[0].text == counted(6, 3) and text.usage is not None
                found = client.responses.create(model="m", input="six", max_output_tokens=3)
                assert found.output_text.strip() == counted(6, 3).strip()
                events = [
                    event.type
                    for event in client.responses.create(model="m", input="six", max_output_tokens=3, stream=True)
                ]
                assert events[0] == "response.created" and events[-1] == "response.completed"
                with pytest.raises(openai.NotFoundError, match="not there"):
                    client.models.retrieve("other")
                with pytest.raises(openai.BadRequestError, match="does not serve"):
                    client.embeddings.create(model="m", input="x")
                with pytest.raises(openai.AuthenticationError):
                    openai.OpenAI(base_url=one.url, api_key="sk-x", max_retries=0).models.list()

            await asyncio.to_thread(by_openai)
            assert {record.completion_tokens for record in one.records()} == {3}

    run(work())


def png(rows: list[bytes]) -> bytes:
    """An image of such rows, three bytes a pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(rows[0]) // 3, len(rows), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_images_reach_the_engine_byte_for_byte_and_are_answered(tmp_path: Path) -> None:
    """Of a model with a vision encoder of random weights: its text depends on the image, also on a large one's."""
    model = make_model(tmp_path / "vision.gguf", "random", template=PLAIN_TEMPLATE)
    projector = make_projector(tmp_path / "projector.gguf")
    draw = random.Random(18)
    images = [png([colour * 32] * 32) for colour in (b"\xff\0\0", b"\0\0\xff")]
    images.append(png([draw.randbytes(3 * 200) for _ in range(200)]))
    assert len(images[-1]) > 100_000

    def chat(image: bytes, **more: Any) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
        } | more

    async def work() -> None:
        async with llama(tmp_path, model, 1, "--mmproj", str(projector)) as (one, (replica,)):
            said = []
            for image in images:
                for stream in (False, True):
                    body = chat(image, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
                    answer = await one.ask(body)
                    assert answer.status == 200 and answer.whole, answer.body[-300:]
                    assert json.dumps(body).encode() in replica.asked
                    said.append(answer.text if stream else json.loads(answer.body)["choices"][0]["message"]["content"])
            assert said[0::2] == said[1::2] and len(set(said)) == 3, said
            # As many tokens as the engine says: the image's are four, however many bytes it has.
            assert {(record.outcome, record.completion_tokens) for record in one.records()} == {("ok", 8)}
            assert len({record.prompt_tokens for record in one.records()}) == 1

    run(work())
