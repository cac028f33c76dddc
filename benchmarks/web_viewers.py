"""Viewers of `sluice web` in a process of their own: each follows the stream and reads 100 jobs every few seconds.

    python -m benchmarks.web_viewers URL PERIOD_S <TOKENS

Prints a line once all have their streams, and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import httpx

from sluice.client import ApiError, AsyncClient


async def _view(url: str, token: str, number: int, period_s: float, ready: asyncio.Semaphore) -> None:
    """One, with an address of its own as viewers have."""
    transport = httpx.AsyncHTTPTransport(local_address=f"127.0.{2 + number // 200}.{1 + number % 200}")
    async with AsyncClient(url, token=token, transport=transport, timeout=120) as sluice:

        async def follow() -> None:
            async for change in sluice.events("jobs", "gpus", "parts"):
                if change.topic == "reset":
                    ready.release()

        follower = asyncio.create_task(follow())
        await asyncio.sleep(random.uniform(0, period_s))
        while not follower.done():
            try:
                await sluice.jobs_page(limit=100)
            except ApiError as error:
                print(error, file=sys.stderr)
            await asyncio.sleep(period_s)
        follower.result()


async def _main(url: str, period_s: float, tokens: list[str]) -> None:
    ready = asyncio.Semaphore(0)
    views = [asyncio.create_task(_view(url, token, n, period_s, ready)) for n, token in enumerate(tokens)]
    for _ in tokens:
        await ready.acquire()
    print("ready", flush=True)
    await asyncio.gather(*views)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2]), json.load(sys.stdin)))
