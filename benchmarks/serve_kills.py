"""What clients see when replicas and gateways are killed: the `openai` package, and Sluice's client for streams."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.serve_peers import peer
from benchmarks.serve_site import MODEL, GatewaySite, PlainReplica, RealReplica, free_port, quantile, stop
from sluice.base.errors import SluiceError
from sluice.exchange.serving import LOST_S, SUSPECT_S, Abilities
from sluice.serve.client import AsyncResumingStream
from tests.serve_models import counted, make_model, word

_ABILITIES = Abilities(chat=True, completions=True, responses=True, resume="tokens")
_SLOTS = 8
_OPTIONS = ("--threads", "1", "--ctx-size", str(1024 * _SLOTS))
_CLIENTS = 12
_WORDS = 60
_AFTER_FAILURE_S = 1.0


class _Replicas:
    """So many, of which one is killed now and then; another takes its place."""

    def __init__(self, folder: Path, count: int, every_s: float) -> None:
        self.killed = 0
        self._count, self._every_s = count, every_s
        self._model = make_model(folder / "counting.gguf", "counting", layers=6, feed=8192)
        self._running: dict[str, RealReplica | PlainReplica] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def start(self) -> None:
        """All, and then the killing."""
        for _ in range(self._count):
            self._running |= self._new()
        self._thread.start()

    def stop(self) -> None:
        """End them."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(60)
        for one in self._running.values():
            one.kill()

    def _kill(self) -> None:
        choose = random.Random(18)
        while not self._over.wait(self._every_s):
            name = choose.choice(sorted(self._running))
            self._running.pop(name).kill()
            self.killed += 1
            self._running |= self._new(name)

    def _new(self, instead_of: str = "") -> dict[str, RealReplica | PlainReplica]:
        """One that is ready, and its name."""
        raise NotImplementedError


class PlainReplicas(_Replicas):
    """What peers are told of: ports that stay."""

    @property
    def ports(self) -> list[int]:
        """Of those that run."""
        return [int(port) for port in self._running]

    def _new(self, instead_of: str = "") -> dict[str, RealReplica | PlainReplica]:
        one = PlainReplica(self._model, int(instead_of or free_port()), _SLOTS, *_OPTIONS)
        one.wait()
        return {str(one.port): one}


class Replicas(_Replicas):
    """What replicad would publish of them, too."""

    def __init__(self, site: GatewaySite, count: int, every_s: float) -> None:
        super().__init__(site.folder, count, every_s)
        self._site = site
        self._made = 0
        self._gone: dict[str, float] = {}

    def _new(self, instead_of: str = "") -> dict[str, RealReplica | PlainReplica]:
        if instead_of:
            self._gone[instead_of] = time.monotonic()
        one = RealReplica(self._model, _SLOTS, *_OPTIONS)
        one.wait()
        self._made += 1
        launch = f"{self._made:016x}"
        words = one.facts
        self._site.add_replica(
            launch,
            words["port"],
            _SLOTS,
            secret=words["secret"],
            fingerprint=words["fingerprint"],
            abilities=_ABILITIES,
        )
        self._forget()
        return {launch: one}

    def _forget(self) -> None:
        """What replicad says of those that it does not hear any more."""
        for launch, at in list(self._gone.items()):
            silent = time.monotonic() - at
            if silent > LOST_S:
                del self._gone[launch]
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
        "streams_broken": float(sum(one.seconds is None for one in found)),
        "streams_not_exact": float(sum(one.seconds is not None and not one.exact for one in found)),
        "streams_wrong_usage": float(sum(one.seconds is not None and one.tokens != _WORDS for one in found)),
        "stream_longest_gap_p99_s": quantile([one.longest for one in found], 0.99),
        "stream_s": median(one.seconds or 0.0 for one in found),
    }


def peers(figures: dict[str, float], streams: int, folder: Path | None, names: Iterable[str]) -> None:
    """The same streams through routers, whose replicas are killed likewise and come back at the same port."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as place:
            kept = PlainReplicas(Path(place), 2, 3.0)
            try:
                kept.start()
                with peer(name, folder, Path(place), kept.ports, "sk-1") as router:
                    found = asyncio.run(_stream_all(router.port, "sk-1", streams))
            finally:
                kept.stop()
        figures |= {
            f"{name}_replicas_killed": float(kept.killed),
            f"{name}_streams_broken": float(sum(one.seconds is None and one.text != "" for one in found)),
            f"{name}_streams_refused": float(sum(one.seconds is None and one.text == "" for one in found)),
            f"{name}_streams_not_exact": float(sum(one.seconds is not None and not one.exact for one in found)),
        }


@dataclass(frozen=True, slots=True)
class _Stream:
    """What became of one. `seconds`: None, it broke; `longest`: without a word."""

    seconds: float | None
    text: str
    exact: bool
    tokens: int
    longest: float


async def _stream_all(port: int, key: str, streams: int) -> list[_Stream]:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, timeout=120)
    left = iter(range(streams))
    found = []

    async def ask() -> None:
        for number in left:
            found.append(await _stream_one(client, 1 + number % 800))
            if found[-1].seconds is None:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async with client:
        await asyncio.gather(*(ask() for _ in range(_CLIENTS)))
    return found


async def _stream_one(client: AsyncOpenAI, start: int) -> _Stream:
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
        return _Stream(None, text, False, tokens, longest)
    return _Stream(time.monotonic() - began, text, text.strip() == counted(start, _WORDS).strip(), tokens, longest)


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
