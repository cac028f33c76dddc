"""What clients see when replicas and gateways are killed: the `openai` package, and Sluice's client for streams."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from statistics import median

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.serve_site import MODEL, GatewaySite, RealReplica, free_port, quantile, stop
from sluice.base.errors import SluiceError
from sluice.exchange.serving import LOST_S, SUSPECT_S, Abilities
from sluice.serve.client import AsyncResumingStream
from tests.serve_models import counted, make_model, word

_ABILITIES = Abilities(chat=True, completions=True, responses=True, resume="tokens")
_SLOTS = 8
_CLIENTS = 12
_WORDS = 60


class Replicas:
    """So many, of which one is killed now and then; another takes its place, as replicad does it."""

    def __init__(self, site: GatewaySite, count: int, every_s: float) -> None:
        self.killed = 0
        self._site, self._count, self._every_s = site, count, every_s
        self._model = make_model(site.folder / "counting.gguf", "counting", layers=6, feed=8192)
        self._running: dict[str, RealReplica] = {}
        self._made = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def start(self) -> None:
        """All, and then the killing."""
        made = [self._new() for _ in range(self._count)]
        for one in made:
            self._ready(one)
        self._thread.start()

    def stop(self) -> None:
        """End them."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(60)
        for one in self._running.values():
            one.kill()

    def _new(self) -> RealReplica:
        options = ("--threads", "1", "--ctx-size", str(1024 * _SLOTS))
        return RealReplica(self._model, _SLOTS, *options)

    def _ready(self, one: RealReplica) -> None:
        one.wait()
        self._made += 1
        launch = f"{self._made:016x}"
        self._running[launch] = one
        words = one.facts
        self._site.add_replica(
            launch,
            words["port"],
            _SLOTS,
            secret=words["secret"],
            fingerprint=words["fingerprint"],
            abilities=_ABILITIES,
        )

    def _kill(self) -> None:
        choose = random.Random(18)
        gone: dict[str, float] = {}
        while not self._over.wait(self._every_s):
            launch = choose.choice(sorted(self._running))
            self._running.pop(launch).kill()
            self.killed += 1
            gone[launch] = time.monotonic()
            self._ready(self._new())
            self._forget(gone)

    def _forget(self, gone: dict[str, float]) -> None:
        """What replicad says of those that it does not hear any more."""
        for launch, at in list(gone.items()):
            silent = time.monotonic() - at
            if silent > LOST_S:
                del gone[launch]
                self._site.replicas.pop(launch, None)
            elif silent > SUSPECT_S:
                self._site.replicas[launch] = replace(self._site.replicas[launch], suspect=True)
        self._site.publish_replicas()


def _messages(start: int) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": word(start)}]


def replicas(figures: dict[str, float], streams: int) -> None:
    """Streams of the `openai` package with its defaults."""
    with GatewaySite() as site:
        (key,) = site.keys("alice")
        site.publish({"alice": "physics"}, slots=_SLOTS)
        kept = Replicas(site, 2, 3.0)
        try:
            kept.start()
            port = site.start(2)
            found = asyncio.run(_stream_all(port, key, streams))
        finally:
            kept.stop()
    figures |= {
        "streams": float(streams),
        "replicas_killed": float(kept.killed),
        "streams_broken": float(sum(one[0] is None for one in found)),
        "streams_not_exact": float(sum(one[0] is not None and not one[1] for one in found)),
        "streams_wrong_usage": float(sum(one[0] is not None and one[2] != _WORDS for one in found)),
        "stream_longest_gap_p99_s": quantile([one[3] for one in found], 0.99),
        "stream_s": median(one[0] or 0.0 for one in found),
    }


async def _stream_all(port: int, key: str, streams: int) -> list[tuple[float | None, bool, int, float]]:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, timeout=120)
    left = iter(range(streams))
    found = []

    async def ask() -> None:
        for number in left:
            found.append(await _stream_one(client, 1 + number % 800))

    async with client:
        await asyncio.gather(*(ask() for _ in range(_CLIENTS)))
    return found


async def _stream_one(client: AsyncOpenAI, start: int) -> tuple[float | None, bool, int, float]:
    """Seconds (None: broken), whether the text is exact, tokens of the bill, the longest time without a word."""
    text, tokens, longest = "", 0, 0.0
    began = last = time.monotonic()
    try:
        stream = await client.chat.completions.create(
            model=MODEL, messages=_messages(start), max_tokens=_WORDS, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        async for chunk in stream:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    except openai.OpenAIError as error:
        print(f"stream of {start}: {type(error).__name__} {str(error)[:200]} after {len(text)} characters", flush=True)
        return None, False, tokens, longest
    return time.monotonic() - began, text.strip() == counted(start, _WORDS).strip(), tokens, longest


# ---- two gateways of one address ----


def gateways(figures: dict[str, float], minutes: float) -> None:
    """Requests by the `openai` package's default retries, streams by Sluice's client."""
    with GatewaySite() as site:
        (key,) = site.keys("alice")
        site.publish({"alice": "physics"}, slots=_SLOTS)
        kept = Replicas(site, 2, 20.0)
        over = threading.Event()
        killed = [0]
        port = free_port()

        def kill() -> None:
            while not over.wait(min(60.0, 6 * minutes)):
                one = site.gateways.pop(0)
                one.kill()
                stop(one)
                killed[0] += 1
                site.start(1, port)

        killer = threading.Thread(target=kill, daemon=True)
        try:
            kept.start()
            site.start(1, port)
            site.start(1, port)
            killer.start()
            asked, failed, wrong = asyncio.run(ask_all(f"http://127.0.0.1:{port}", key, 60 * minutes))
        finally:
            over.set()
            killer.join(90)
            kept.stop()
    figures |= {
        "gateway_kills": float(killed[0]),
        "gateway_kills_requests": float(asked),
        "gateway_kills_failed": float(failed),
        "gateway_kills_not_exact": float(wrong),
    }


async def ask_all(
    base: str, key: str, seconds: float, *, model: str = MODEL, clients: int = 4, pause_s: float = 0.0
) -> tuple[int, int, int]:
    """So many clients of whole answers and as many of streams, which pause after each: how many were asked, failed, and
    said something else."""
    until = time.monotonic() + seconds
    counts = [0, 0, 0]

    def count(start: int, text: str) -> None:
        counts[2] += text.strip() != counted(start, _WORDS).strip()

    async def whole(client: AsyncOpenAI, start: int) -> None:
        answer = await client.chat.completions.create(
            model=model, messages=_messages(start), max_tokens=_WORDS, temperature=0
        )
        count(start, answer.choices[0].message.content or "")

    async def streamed(_: AsyncOpenAI, start: int) -> None:
        body = {"model": model, "messages": _messages(start), "max_tokens": _WORDS, "temperature": 0}
        async with AsyncResumingStream([base], key, body) as stream:
            count(start, "".join([part async for part in stream.text()]))

    async def again(ask: Callable[[AsyncOpenAI, int], Awaitable[None]], client: AsyncOpenAI, start: int) -> None:
        while time.monotonic() < until:
            start = start % 800 + 1
            counts[0] += 1
            try:
                await ask(client, start)
            except (openai.OpenAIError, SluiceError) as error:
                print(f"{ask.__name__}: {type(error).__name__} {str(error)[:300]}", flush=True)
                counts[1] += 1
            await asyncio.sleep(pause_s)

    async with AsyncOpenAI(base_url=f"{base}/v1", api_key=key, timeout=120) as client:
        asks = [again(ask, client, 100 * n) for ask in (whole, streamed) for n in range(clients)]
        await asyncio.gather(*asks)
    return counts[0], counts[1], counts[2]
