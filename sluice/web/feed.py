"""Follows the snapshot of the controllers' daemon, and asks it what only it may read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.exchange.snapshot import MOST_ANSWER, parse_answer, render_request
from sluice.web.store import Change, Store

PERIOD_S = 0.25
_TIMEOUT_S = 10.0
_AT_A_TIME = 8

log = logging.getLogger("sluice.web")


class Feed:
    """The connection to the daemon's socket."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self.changed: Callable[[list[Change]], None] = lambda _: None
        """Gets what each answer has changed, once the store is complete."""
        self._turns = asyncio.Semaphore(_AT_A_TIME)

    async def follow(self) -> None:
        """For ever; a daemon that does not answer is asked again."""
        while True:
            try:
                more = await self.step()
            except (SluiceError, KeyError, TypeError, ValueError) as error:
                problem = one_line(str(error), limit=300)
                if self.store.connected or not self.store.problem:
                    log.warning("the snapshot stays as it was: %s", problem)
                self.store.lost(problem)
                more = False
            await asyncio.sleep(0 if more else PERIOD_S)

    async def step(self) -> bool:
        """Ask for what is new; whether there is more. Raises SluiceError, and what a bad answer raises."""
        answer = await self._ask("changes", epoch=self.store.epoch, last=self.store.last)
        if not self.store.connected and self.store.answered:
            log.warning("the controllers' daemon answers again")
        changes: list[Change] = []
        for _ in self.store.applying(answer, changes):
            await asyncio.sleep(0)
        if self.store.complete:
            self.changed(changes)
        return bool(answer["more"])

    async def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """Any other request; few at a time. Raises SluiceError."""
        async with self._turns:
            return await self._ask(do, **words)

    async def _ask(self, do: str, **words: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self.path), limit=2 * MOST_ANSWER)
                try:
                    writer.write(render_request(do, **words))
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error) or "no answer in time"
            raise SluiceError(f"{self.path}: {said}", remedy="is sluice-controllerd running on this host?") from error
        return parse_answer(line)
