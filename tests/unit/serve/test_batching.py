"""Requests put together: sizes, delays, failures, and the clients that go away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from sluice.serve.engines.batching import Batcher, FullError, OutputError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


class Doubler:
    """Each call is recorded; it takes a while, and fails for what is negative."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: list[list[int]] = []
        self.seconds = seconds

    async def __call__(self, inputs: list[int]) -> Sequence[int]:
        self.calls.append(inputs)
        await asyncio.sleep(self.seconds)
        if any(one < 0 for one in inputs):
            raise ValueError(min(inputs))
        return [2 * one for one in inputs]


def test_what_comes_together_is_one_call() -> None:
    async def work() -> None:
        function = Doubler()
        batcher = Batcher(function, max_batch=8, max_delay=5)
        asked = await asyncio.gather(*(batcher.ask([one]) for one in range(8)))  # full: it does not wait 5 s
        assert asked == [[2 * one] for one in range(8)] and function.calls == [list(range(8))]

    run(work())


def test_one_alone_waits_no_longer_than_the_delay() -> None:
    async def work() -> None:
        function = Doubler()
        batcher = Batcher(function, max_batch=8, max_delay=0.05)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert await batcher.ask([4]) == [8]
        assert 0.04 <= loop.time() - begun < 1 and batcher.figures.longest_wait < 0.5

    run(work())


def test_what_comes_during_a_call_makes_the_next_at_once() -> None:
    async def work() -> None:
        function = Doubler(0.1)
        batcher = Batcher(function, max_batch=4, max_delay=0.0)
        first = asyncio.create_task(batcher.ask([0]))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, *(batcher.ask([one]) for one in range(1, 7)))
        assert function.calls == [[0], [1, 2, 3, 4], [5, 6]]

    run(work())


def test_a_large_request_is_cut_and_put_together() -> None:
    async def work() -> None:
        function = Doubler()
        batcher = Batcher(function, max_batch=4, max_delay=0.01)
        large, small = await asyncio.gather(batcher.ask(range(10)), batcher.ask([100]))
        assert large == [2 * one for one in range(10)] and small == [200]
        assert max(map(len, function.calls)) == 4 and len(function.calls) == 3
        assert await batcher.ask([]) == []

    run(work())


def test_one_that_fails_fails_alone() -> None:
    async def work() -> None:
        function = Doubler()
        batcher = Batcher(function, max_batch=4, max_delay=5)
        asked = await asyncio.gather(*(batcher.ask([one]) for one in (1, -2, 3, 4)), return_exceptions=True)
        assert asked[0] == [2] and asked[2:] == [[6], [8]] and isinstance(asked[1], ValueError)
        assert await asyncio.gather(*(batcher.ask([one]) for one in (5, 6, 7, 8))) == [[10], [12], [14], [16]]

    run(work())


def test_a_function_that_loses_outputs() -> None:
    async def lossy(inputs: list[int]) -> list[int]:
        return inputs[1:]

    async def work() -> None:
        with pytest.raises(OutputError, match="1 outputs to 2 inputs"):
            await Batcher(lossy, max_batch=4, max_delay=0).ask([1, 2])

    run(work())


def test_the_queue_is_bounded() -> None:
    async def work() -> None:
        batcher = Batcher(Doubler(0.2), max_batch=1, max_delay=0, most_waiting=3)
        asked = [asyncio.create_task(batcher.ask([1])) for _ in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(FullError, match="inputs wait; send fewer"):
            await batcher.ask([1, 1])
        assert [one for one in await asyncio.gather(*asked, return_exceptions=True) if one != [2]]

    run(work())


def test_clients_that_go_away_are_not_computed() -> None:
    async def work() -> None:
        function = Doubler(0.1)
        batcher = Batcher(function, max_batch=1, max_delay=0)
        first, gone, last = (asyncio.create_task(batcher.ask([one])) for one in (1, 2, 3))
        await asyncio.sleep(0.05)
        gone.cancel()
        assert await first == [2] and await last == [6] and function.calls == [[1], [3]]
        assert batcher.waiting == 0

    run(work())


@pytest.mark.parametrize("seed", range(20))
def test_each_gets_its_own_whatever_happens(seed: int) -> None:
    """Random sizes, cancellations and failures: every answer is that of its own request, and nothing is left over."""

    async def work() -> None:
        draw = random.Random(seed)
        function = Doubler(0.001)
        batcher = Batcher(function, max_batch=draw.randint(1, 9), max_delay=draw.choice([0, 0.002]))

        async def client(number: int) -> None:
            inputs = [draw.choice([number, number, number, -number]) if number % 7 == 0 else number + place
                      for place in range(draw.randint(1, 12))]  # fmt: skip
            task = asyncio.create_task(batcher.ask(inputs))
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.01)
                task.cancel()
            try:
                assert await task == [2 * one for one in inputs] and min(inputs) >= 0
            except ValueError as error:
                assert min(inputs) < 0, error
            except asyncio.CancelledError:
                assert task.cancelled()

        await asyncio.gather(*(client(number) for number in range(1, 80)))
        assert batcher.waiting == 0 and max(map(len, function.calls)) <= batcher._batch
        batcher.close()

    run(work())
