"""A file that a client uploads: its bytes go through the form's parser and the check of lines to the disk while they
come.

What waits for the disk is bounded: the client is not read meanwhile. An upload that is refused is read to its end, so
that the client sees why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

from sluice.serve.gateway.form import Form, number_of
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.shelf import Incoming, Owner, Shelf

_MOST_WAITING: Final = 1 << 20
_LEAST_S: Final = 3600
PURPOSE: Final = "batch"

InThread = Callable[..., Awaitable[Any]]


class Reading(Protocol):
    """The connection that it comes over."""

    def hold(self) -> None:
        """Read no more."""

    def go_on(self) -> None:
        """Read."""


class Upload:
    """One file. `shelf_of`: says whose it is, and where it goes; `in_thread`, `later`: do what blocks."""

    def __init__(
        self,
        client: Reading,
        content_type: bytes,
        size: int,
        shelf_of: Callable[[], Awaitable[tuple[Shelf, Owner]]],
        in_thread: InThread,
        later: Callable[[Callable[[], None]], Any],
    ) -> None:
        """`size`: at most so many bytes. Raises RefusalError."""
        self._client = client
        self._form = Form(content_type, self._take)
        self._size = size
        self._shelf_of = shelf_of
        self._in_thread = in_thread
        self._later = later
        self._incoming: Incoming | None = None
        self._waiting = bytearray()
        self._refused = False
        self._complete = False
        self._more = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run())
        """Its document, or why there is none."""
        self.task.add_done_callback(self._over)

    def feed(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._refused:
            return
        self._waiting += data
        if len(self._waiting) > _MOST_WAITING:
            self._client.hold()
        self._more.set()

    def end(self) -> None:
        """The body is there."""
        self._complete = True
        self._more.set()

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self.task.cancel()

    def _over(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._refused = True
        self._waiting = bytearray()
        if self._incoming is not None:
            self._later(self._incoming.drop)
        if not task.cancelled():
            task.exception()  # who answers the client says it
            self._client.go_on()

    def _begin(self, shelf: Shelf, owner: Owner) -> None:
        self._incoming = shelf.begin(owner, self._size)
        if self._refused:
            self._incoming.drop()

    def _take(self, data: bytes) -> None:
        if self._incoming is not None:
            self._incoming.write(data)

    async def _run(self) -> dict[str, Any]:
        try:
            return await self._receive()
        except Exception:
            if self._incoming is not None:
                with suppress(RefusalError):  # its room is free again before the client knows
                    await self._in_thread(self._incoming.drop)
            raise

    async def _receive(self) -> dict[str, Any]:
        shelf, owner = await self._shelf_of()
        await self._in_thread(self._begin, shelf, owner)
        incoming = cast(Incoming, self._incoming)
        while True:
            await self._more.wait()
            self._more.clear()
            complete, data = self._complete, bytes(self._waiting)
            self._waiting = bytearray()
            if data:
                await self._in_thread(self._form.feed, data)
                self._client.go_on()
            if complete and not self._waiting:
                break
        self._form.end()
        if self._form.values.get("purpose") != PURPOSE:
            raise RefusalError(
                400, "purpose: not `batch`", remedy="files for other purposes are not kept here", param="purpose"
            )
        seconds = number_of(self._form.values, "expires_after[seconds]", _LEAST_S, 10**9) or shelf.keep_s
        expires_at = time.time() + min(seconds, shelf.keep_s)
        found: dict[str, Any] = await self._in_thread(incoming.done, self._form.filename or "", expires_at)
        return found
