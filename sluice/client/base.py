"""The two clients without their calls, which `calls.py` adds. What both do is in `transport.py` and `follow.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel

from sluice.client import models
from sluice.client.follow import Change, Stream, Watched, page_call
from sluice.client.transport import ApiError, Call, Connection, import_httpx, steps

T = TypeVar("T", bound=BaseModel)


class _Page(Protocol):
    next: str | None


P = TypeVar("P", bound=_Page)


class BaseClient:
    """A connection to `sluice web`; use it in a `with`. See `Connection` for the arguments.

    Raises UsageError and SluiceError for arguments that cannot be used, and ApiError from every call.
    """

    def __init__(
        self, url: str = "", *, token: str = "", token_file: str | Path = "", ca: str | Path | None = None,
        timeout: float = 30.0, retries: int = 4, without_tls: bool = False,
        sleep: Callable[[float], None] = time.sleep, transport: Any = None,
    ) -> None:  # fmt: skip
        import_httpx()
        import httpx

        self._retries, self._sleep = retries, sleep
        connection = Connection(url, token, token_file, ca, timeout, without_tls)
        self._http = httpx.Client(transport=transport, **connection.options())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def call(self, call: Call[T]) -> T:
        """Make a call. Raises ApiError."""
        import httpx

        made = steps(call, self._http, self._retries)
        answer: Any = None
        while True:
            try:
                step = made.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, float):
                self._sleep(step)
                continue
            try:
                answer = self._http.send(step)
            except httpx.RequestError as error:
                answer = error

    def events(self, *topics: str) -> Generator[Change, None, None]:
        """What changes, without end: connects again where the connection is lost. Each connection begins with a change
        of the topic `reset`: read then what you need, and nothing is missed. Raises ApiError where that does not help.
        """
        import httpx

        stream = Stream(topics, self._retries)
        while True:
            answer: Any = None
            try:
                answer = self._http.send(stream.request(self._http), stream=True)
                with closing(answer):
                    if answer.status_code == 200:
                        yield stream.opened()
                        for line in answer.iter_lines():
                            if (change := stream.line(line)) is not None:
                                yield change
                        answer = None
                    else:
                        answer.read()
            except httpx.RequestError as error:
                answer = error
            self._sleep(stream.pause(answer))

    def watch(self, *jobs: int) -> Iterator[models.Job]:
        """These jobs each time that they change, until all have ended. Raises ApiError."""
        watched = Watched(jobs)
        with closing(self.events(*watched.topics)) as changes:
            for change in changes:
                for number in watched.to_read(change):
                    yield from watched.read(number, self._read(number))
                yield from watched.changed(change)
                if watched.over:
                    return

    def _read(self, number: int) -> models.Job | ApiError:
        try:
            return self.call(page_call(number)).job
        except ApiError as error:
            return error

    def _pages(self, page: Callable[[str], P]) -> Iterator[P]:
        cursor: str | None = ""
        while cursor is not None:
            found = page(cursor)
            yield found
            cursor = found.next


class BaseAsyncClient:
    """As `BaseClient`; use it in an `async with`."""

    def __init__(
        self, url: str = "", *, token: str = "", token_file: str | Path = "", ca: str | Path | None = None,
        timeout: float = 30.0, retries: int = 4, without_tls: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, transport: Any = None,
    ) -> None:  # fmt: skip
        import_httpx()
        import httpx

        self._retries, self._sleep = retries, sleep
        connection = Connection(url, token, token_file, ca, timeout, without_tls)
        self._http = httpx.AsyncClient(transport=transport, **connection.options())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def call(self, call: Call[T]) -> T:
        """Make a call. Raises ApiError."""
        import httpx

        made = steps(call, self._http, self._retries)
        answer: Any = None
        while True:
            try:
                step = made.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, float):
                await self._sleep(step)
                continue
            try:
                answer = await self._http.send(step)
            except httpx.RequestError as error:
                answer = error

    async def events(self, *topics: str) -> AsyncGenerator[Change, None]:
        """As `BaseClient.events`."""
        import httpx

        stream = Stream(topics, self._retries)
        while True:
            answer: Any = None
            try:
                answer = await self._http.send(stream.request(self._http), stream=True)
                try:
                    if answer.status_code == 200:
                        yield stream.opened()
                        async for line in answer.aiter_lines():
                            if (change := stream.line(line)) is not None:
                                yield change
                        answer = None
                    else:
                        await answer.aread()
                finally:
                    if answer is not None:
                        await answer.aclose()
            except httpx.RequestError as error:
                answer = error
            await self._sleep(stream.pause(answer))

    async def watch(self, *jobs: int) -> AsyncIterator[models.Job]:
        """As `BaseClient.watch`."""
        watched = Watched(jobs)
        async with aclosing(self.events(*watched.topics)) as changes:
            async for change in changes:
                for number in watched.to_read(change):
                    for job in watched.read(number, await self._read(number)):
                        yield job
                for job in watched.changed(change):
                    yield job
                if watched.over:
                    return

    async def _read(self, number: int) -> models.Job | ApiError:
        try:
            return (await self.call(page_call(number))).job
        except ApiError as error:
            return error

    async def _pages(self, page: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
        cursor: str | None = ""
        while cursor is not None:
            found = await page(cursor)
            yield found
            cursor = found.next
