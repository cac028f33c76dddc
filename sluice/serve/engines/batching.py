"""Requests that come at the same time as one call: at most so many inputs, none of which waits longer than a bound.

A call is made when enough inputs wait, or when the first of them has waited `max_delay`; what comes while a call is
made waits for its end, and makes the next one. Where a call of several requests fails, each of them is tried alone, so
that nobody's input makes another's request fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.base.errors import SluiceError


class FullError(SluiceError):
    """Too many inputs wait already."""


class OutputError(SluiceError):
    """The function returned something else than as many outputs as it got inputs."""


@dataclass(eq=False, slots=True)
class _Request:
    inputs: Sequence[Any]
    done: asyncio.Future[list[Any]]
    came: float
    taken: int = 0
    outputs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Figures:
    """Since the start, and now."""

    calls: int = 0
    inputs: int = 0
    largest: int = 0
    running: int = 0
    longest_wait: float = 0.0


class Batcher:
    """One for each function. `function` is awaited, one call at a time."""

    def __init__(
        self,
        function: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        *,
        max_batch: int,
        max_delay: float,
        most_waiting: int = 65_536,
    ) -> None:
        self._function, self._batch, self._delay, self._most = function, max_batch, max_delay, most_waiting
        self._queue: deque[_Request] = deque()
        self._count = 0  # of inputs that wait
        self._enough = asyncio.Event()
        self._some = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.figures = Figures()
        self._task = self._loop.create_task(self._run())

    @property
    def waiting(self) -> int:
        """Inputs that are in no call yet."""
        return self._count

    async def ask(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs to these inputs, which may be of several calls. Raises FullError, or what the function raises."""
        if not inputs:
            return []
        if self._count + len(inputs) > self._most:
            raise FullError(f"{self._count} inputs wait", remedy="send fewer at once, or have more replicas")
        request = _Request(inputs, self._loop.create_future(), self._loop.time())
        self._queue.append(request)
        self._count += len(inputs)
        self._some.set()
        if self._count >= self._batch:
            self._enough.set()
        try:
            return await request.done
        except asyncio.CancelledError:
            if request in self._queue:
                self._queue.remove(request)
                self._count -= len(inputs) - request.taken
            raise

    def close(self) -> None:
        """Make no more calls."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._some.clear()
                await self._some.wait()
            await self._gather()
            if parts := self._take():
                await self._call(parts)

    async def _gather(self) -> None:
        """Wait for more inputs, until the first one has waited as long as it may."""
        left = self._queue[0].came + self._delay - self._loop.time()
        if left > 0 and self._count < self._batch:
            self._enough.clear()
            try:
                await asyncio.wait_for(self._enough.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[tuple[_Request, Sequence[Any]]]:
        """The next call's inputs: whole requests where they fit, and else the first part of one."""
        parts: list[tuple[_Request, Sequence[Any]]] = []
        room, now = self._batch, self._loop.time()
        while self._queue and room:
            request = self._queue[0]
            piece = request.inputs[request.taken : request.taken + room]
            if not request.taken:
                self.figures.longest_wait = max(self.figures.longest_wait, now - request.came)
            request.taken += len(piece)
            room -= len(piece)
            self._count -= len(piece)
            parts.append((request, piece))
            if request.taken == len(request.inputs):
                self._queue.popleft()
        return parts

    async def _call(self, parts: list[tuple[_Request, Sequence[Any]]]) -> None:
        try:
            outputs = await self._outputs([one for _, piece in parts for one in piece])
        except Exception as error:
            if len(parts) == 1:
                self._fail(parts[0][0], error)
                return
            for part in parts:
                await self._call([part])
            return
        place = 0
        for request, piece in parts:
            request.outputs += outputs[place : place + len(piece)]
            place += len(piece)
            if len(request.outputs) == len(request.inputs) and not request.done.done():
                request.done.set_result(request.outputs)

    async def _outputs(self, inputs: list[Any]) -> list[Any]:
        figures = self.figures
        figures.calls += 1
        figures.inputs += len(inputs)
        figures.largest = max(figures.largest, len(inputs))
        figures.running = len(inputs)
        try:
            outputs = list(await self._function(inputs))
        finally:
            figures.running = 0
        if len(outputs) != len(inputs):
            raise OutputError(
                f"{len(outputs)} outputs to {len(inputs)} inputs", remedy="return one for each, in their order"
            )
        return outputs

    def _fail(self, request: _Request, error: Exception) -> None:
        if request in self._queue:  # its other inputs are of no use
            self._queue.remove(request)
            self._count -= len(request.inputs) - request.taken
        if not request.done.done():
            request.done.set_exception(error)
