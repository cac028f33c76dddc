"""Clients that ask a gateway all the time: whole answers and streams of the model that counts, and what went wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.serve_models import counted, word

WORDS = 300
_PAUSE_S = 0.3  # of each client between requests: the machine is shared


@dataclass
class Traffic:
    """Use it in a `with`. `clients`: how many ask, every second one for a stream; it may change."""

    base_url: str
    key: str
    model: str
    clients: int = 2
    asked: int = 0
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120)

    async def _run(self) -> None:
        running: list[asyncio.Task[None]] = []
        # no retries: what fails is seen
        async with AsyncOpenAI(base_url=self.base_url, api_key=self.key, timeout=120, max_retries=0) as client:
            while not self._over.is_set():
                while len(running) < self.clients:
                    running.append(asyncio.create_task(self._ask(client, len(running))))
                await asyncio.sleep(0.1)
            await asyncio.gather(*running)

    async def _ask(self, client: AsyncOpenAI, number: int) -> None:
        start = 100 * number
        while not self._over.is_set():
            if number >= self.clients:
                await asyncio.sleep(_PAUSE_S)
                continue
            start = start % 1500 + 1
            began = time.monotonic()
            try:
                said = await (self._stream if number % 2 else self._whole)(client, start)
                why = "" if said == counted(start, WORDS).strip() else f"said {said[:60]!r}...{said[-60:]!r}"
            except openai.OpenAIError as error:
                why = f"{type(error).__name__} {error}"
            self.asked += 1
            if why:
                self.failed.append(f"{number}, after {word(start)}, {time.monotonic() - began:.1f} s: {why}")
            await asyncio.sleep(_PAUSE_S)

    async def _whole(self, client: AsyncOpenAI, start: int) -> str:
        answer = await client.chat.completions.create(
            model=self.model, messages=_messages(start), max_tokens=WORDS, temperature=0
        )
        return (answer.choices[0].message.content or "").strip()

    async def _stream(self, client: AsyncOpenAI, start: int) -> str:
        said = ""
        async for part in await client.chat.completions.create(
            model=self.model, messages=_messages(start), max_tokens=WORDS, temperature=0, stream=True
        ):
            said += "".join(choice.delta.content or "" for choice in part.choices)
        return said.strip()


def _messages(start: int) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": word(start)}]
