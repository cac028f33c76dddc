"""Server-sent events, as far as a relay needs them: where each one ends, and what kind it is.

Events are not decoded. Within a string of JSON a quotation mark is written with a backslash before it, so that
`"usage"` with its quotation marks is never a part of what a model says, but a member's name or a whole string.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any, Final

from sluice.serve.gateway.bounds import MOST_EVENT

_DONE: Final = b"[DONE]"


class TooLongError(Exception):
    """An event that is longer than is allowed."""


class Kind(Enum):
    """Of an event."""

    TEXT = auto()  # a part of the answer
    USAGE = auto()  # may have the usage
    ERROR = auto()
    DONE = auto()
    OTHER = auto()  # a comment, or nothing


class Events:
    """Cuts what arrives after each event."""

    __slots__ = ("_at", "rest")

    def __init__(self) -> None:
        self.rest = b""
        """What has come of the next event."""
        self._at = 0  # so far it was searched

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, each with the empty line at its end. Raises TooLongError."""
        if self.rest:
            data = self.rest + data
        elif data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            return [data]
        found = []
        begin, at = 0, self._at
        while (end := _end(data, at)) >= 0:
            found.append(data[begin:end])
            begin = at = end
        self.rest = data[begin:]
        self._at = max(len(self.rest) - 3, 0)
        if len(self.rest) > MOST_EVENT:
            raise TooLongError
        return found


def _end(data: bytes, at: int) -> int:
    """Where the event ends that goes on at `at`; -1: not here."""
    plain = data.find(b"\n\n", at)
    if b"\r" not in data:
        return plain + 2 if plain >= 0 else -1
    ends = [
        place + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r") if (place := data.find(mark, at)) >= 0
    ]
    return min(ends, default=-1)


def kind_of(event: bytes) -> Kind:
    """What an event is."""
    if b'"usage"' in event and b'"usage":null' not in event:
        return Kind.USAGE
    if b'"error"' in event:
        return Kind.ERROR
    if event.startswith(b"data:"):
        return Kind.DONE if event[5:].strip() == _DONE else Kind.TEXT
    return Kind.TEXT if b"\ndata:" in event else Kind.OTHER


def document_of(event: bytes) -> dict[str, Any] | None:
    """The object of an event's data, if it is one."""
    if event.startswith(b"data: ") and event.find(b"\n", 6) >= len(event) - 2:
        data = event[6:]
    else:
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def event_of(document: dict[str, Any]) -> bytes:
    """An event with an object."""
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"
    )
