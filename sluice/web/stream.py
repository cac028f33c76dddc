"""Server-sent events: what changes in the snapshot, for each viewer what it may see.

A stream keeps the names of rows that changed and not their contents: what changes ten times while the client is slow
is sent once. One that falls behind by too many rows is told to read all again.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

from sluice.web.access import Viewer
from sluice.web.problems import ProblemError
from sluice.web.store import Change, Job, Store, text_of

TOPICS = ("jobs", "nodes", "gpus", "events", "tenants", "services", "parts")
MOST = 1000
MOST_OF_USER = 16
_MOST_PENDING = 5000
_LATER = {"retry-after": "30", "connection": "close"}  # who is refused does not keep a connection either
_PING_S = 15.0
_PACE_S = 0.5  # between two batches of one stream: parts alone change several times a second
_BATCH = 200

Pending = dict[tuple[str, str], bool]
"""Rows that changed, and whether the viewer saw them before."""


class Stream:
    """One client."""

    def __init__(self, viewer: Viewer, topics: frozenset[str], *, rows: bool = True) -> None:
        self.viewer = viewer
        self.topics = topics
        self.rows = rows
        self.pending: Pending = {}
        self.reset = False
        self.wake = asyncio.Event()


def shown(viewer: Viewer, section: str, row: Any) -> Any:
    """A row as the viewer sees it, or None."""
    if row is None:
        return None
    if section == "jobs":
        return row.document() if viewer.sees_job(row) else None
    if section == "nodes":
        return row if viewer.sees_nodes else None
    if section == "gpus":
        return viewer.gpu(row)
    if section == "tenants":
        return viewer.tenant(row)
    if section == "services":
        return viewer.service(row)
    if section == "events":
        return viewer.event(row)
    return viewer.part(row) if section == "parts" else None


def sees(viewer: Viewer, section: str, row: Any) -> bool:
    """Whether the viewer sees anything of a row."""
    if section == "jobs":
        return viewer.sees_job(row)  # without its document
    return shown(viewer, section, row) is not None


def _text(viewer: Viewer, section: str, row: Any) -> str | None:
    """A row as the viewer sees it, in JSON, or None."""
    if section == "jobs":
        return text_of(row) if viewer.sees_job(row) else None
    now = shown(viewer, section, row)
    return None if now is None else json.dumps(now, separators=(",", ":"))


class Streams:
    """All of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open: set[Stream] = set()
        self._users: Counter[str] = Counter()

    def changed(self, changes: Iterable[Change]) -> None:
        """The store has changed."""
        if not self._open:
            return
        found = [change for change in changes if change[0] in TOPICS or not change[0]]
        for stream in self._open:
            self._note(stream, found)

    def _note(self, stream: Stream, changes: list[Change]) -> None:
        """What the viewer sees neither before nor after does not even wake it: it would tell that others are active."""
        for section, key, before, now in changes:
            if not section:
                stream.reset = True
            elif section in stream.topics:
                saw = sees(stream.viewer, section, before)
                if saw and section in ("tenants", "services"):
                    if shown(stream.viewer, section, before) == shown(stream.viewer, section, now):
                        continue  # what changed is kept from it
                elif not saw and not sees(stream.viewer, section, now):
                    continue
                stream.pending[section, key] = stream.pending.get((section, key), False) or saw
        if len(stream.pending) > _MOST_PENDING:
            stream.reset = True
        if stream.reset:
            stream.pending.clear()
        if stream.reset or stream.pending:
            stream.wake.set()

    def enter(self, viewer: Viewer, topics: frozenset[str], *, rows: bool = True) -> Stream:
        """A new stream; without `rows` it gets only the topics of what changed.

        Raises ProblemError where there are too many.
        """
        if self._users[viewer.user] >= MOST_OF_USER:
            raise ProblemError(429, f"{viewer.user} has {MOST_OF_USER} streams", remedy="close some", headers=_LATER)
        if len(self._open) >= MOST:
            raise ProblemError(503, f"this server has {MOST} streams", remedy="try again later", headers=_LATER)
        stream = Stream(viewer, topics, rows=rows)
        self._open.add(stream)
        self._users[viewer.user] += 1
        return stream

    def leave(self, stream: Stream) -> None:
        """Its client has gone."""
        if stream in self._open:
            self._open.remove(stream)
            self._users[stream.viewer.user] -= 1
            self._users += Counter()  # without zeros

    async def send(self, stream: Stream, viewer_now: Any) -> AsyncIterator[bytes]:
        """The stream's bytes. `viewer_now` is awaited before each batch: a token that was revoked ends it."""
        try:
            yield b"retry: 3000\n\n"
            while True:
                try:
                    async with asyncio.timeout(_PING_S):
                        await stream.wake.wait()
                except TimeoutError:
                    await viewer_now()
                    yield b"event: quiet\ndata: {}\n\n"  # pages do not see comments
                    continue
                try:
                    stream.viewer = await viewer_now()
                except ProblemError:
                    return
                yield self._batch(stream)
                await asyncio.sleep(_PACE_S)
        except ProblemError:
            return
        finally:
            self.leave(stream)

    def _batch(self, stream: Stream) -> bytes:
        stream.wake.clear()
        if stream.reset:
            stream.reset = False
            return b"event: reset\ndata: {}\n\n"
        if not stream.rows:
            changed = sorted({section for section, _ in stream.pending})
            stream.pending.clear()
            return b"".join(f"event: {section}\ndata: {{}}\n\n".encode() for section in changed)
        pieces = []
        for section, key in list(stream.pending)[:_BATCH]:
            saw = stream.pending.pop((section, key))
            row: Job | Any = (
                self.store.jobs.by_id.get(int(key)) if section == "jobs" else self.store.rows(section).get(key)
            )
            now = _text(stream.viewer, section, row)
            if now is None and not saw:
                continue
            more = "" if now is None else f',"row":{now}'
            pieces.append(f'event: {section}\ndata: {{"key":{json.dumps(key)}{more}}}\n\n'.encode())
        if stream.pending:
            stream.wake.set()
        return b"".join(pieces) or b": nothing for you\n\n"
