"""Writes: passes what a caller asks, with the caller's own proof, to root's helper (`sluice actd`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.exchange.acts import (
    MOST_ANSWER,
    MOST_BODY,
    SOCKET,
    ActError,
    Request,
    is_key,
    parse_answer,
    render_request,
)  # fmt: skip
from sluice.web.access import Viewer
from sluice.web.problems import ProblemError

_TIMEOUT_S = 120.0
_AT_A_TIME = 16
_OF_USER = 4
_READS = frozenset({"audit", "policy-drift", "profile-summary"})
_QUEUED_OF_USER = 64
_HELD_OF_USER = 2 * MOST_BODY
_HELD = 16 * MOST_BODY


class Bodies:
    """How many bytes of requests are held, by each user and by all."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextmanager
    def room(self, user: str, size: int) -> Iterator[None]:
        """For a request's body. Raises ProblemError where there is none."""
        if self._held[user] + size > _HELD_OF_USER or self._held.total() + size > _HELD:
            raise ProblemError(
                429,
                "too many large requests at a time",
                remedy="send one after the other",
                headers={"retry-after": "1"},
            )
        self._held[user] += size
        try:
            yield
        finally:
            self._held[user] -= size
            if not self._held[user]:
                del self._held[user]


class Acts:
    """The helper's socket. `ask` is all that endpoints need."""

    def __init__(self, path: Path = SOCKET) -> None:
        self.path = path
        self.bodies = Bodies()
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._users: dict[str, asyncio.Semaphore] = {}
        self._waiting: Counter[str] = Counter()

    async def ask(
        self, viewer: Viewer, do: str, *, request_id: str | None = None, key: str | None = None, **words: Any
    ) -> dict[str, Any]:
        """What was done. `request_id` and `key` are those of the viewer's request where they are not given.

        Raises ProblemError: 400, 403, 404, 409, 413, 422, 429, 503.
        """
        if viewer.proof is None:
            raise read_only("a user whom a proxy names")
        if "write" not in viewer.scopes and do not in _READS:
            raise read_only("this token")
        key = viewer.asked.key if key is None else key
        if key is not None and not is_key(key):
            raise ProblemError(400, "Idempotency-Key: not a key", remedy="send 1 to 128 printable ASCII characters")
        asked = viewer.asked
        try:
            line = render_request(
                Request(do, viewer.proof, words, request_id or asked.request_id, key, asked.address[:128])
            )
            return parse_answer(await self._in_turn(viewer.user, line))
        except ActError as error:
            headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
            raise ProblemError(error.status, error.what, remedy=error.remedy, headers=headers) from error

    async def _in_turn(self, user: str, line: bytes) -> bytes:
        """Few of a user at a time, so that nobody takes the turns of all."""
        if self._waiting[user] >= _QUEUED_OF_USER:
            raise ActError(429, "too many requests of this user wait", remedy="send fewer at a time", retry_after=1)
        self._waiting[user] += 1
        mine = self._users.setdefault(user, asyncio.Semaphore(_OF_USER))
        try:
            async with mine, self._turns:
                return await self._send(line)
        finally:
            self._waiting[user] -= 1
            if not self._waiting[user]:
                del self._waiting[user], self._users[user]

    async def _send(self, line: bytes) -> bytes:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self.path), limit=2 * MOST_ANSWER)
                try:
                    writer.write(line)
                    return await reader.readline()
                finally:
                    writer.close()
        except ConnectionResetError:
            return b""
        except (OSError, TimeoutError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error) or "no answer in time"
            raise ActError(
                503, f"{self.path}: {said}", remedy="is sluice-actd running on this host?", retry_after=5
            ) from error


def read_only(who: str) -> ProblemError:
    """For a caller that can only read."""
    return ProblemError(
        403,
        f"{who} can only read",
        remedy="send a token that can write: sluice token create --scope read --scope write",
    )
