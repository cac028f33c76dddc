"""One snapshot of the cluster for all viewers: what the controllers' daemon publishes over a local socket.

The snapshot is rows of sections, each with a key. Every change has a number; a reader asks for what came after the last
number that it has, and gets it in pieces of bounded size (`sluice.base.line_server`: one line, one answer), so that no
reader holds the writer up, however slowly it reads. A reader from before what is still known gets all again.
"""

from __future__ import annotations

import heapq
import json
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError

VERSION = 1
SOCKET = Path("/run/sluice-snapshot/socket")
MOST_REQUEST = 64 << 10
MOST_ANSWER = 4 << 20
"""Bytes of rows in one answer; a single row is never that large."""
_MOST_ROW = 1 << 20
_LEAST_GONE = 10_000
_GONE = b"null"
_NO_ANSWER = "the controllers' daemon gave no answer"
_NO_ANSWER_REMEDY = "is it running, and is this the user of its --web-user?"

Row = tuple[str, str, Any]
"""Section, key, and what it says; None: it is not there any more."""


class Snapshot:
    """The rows. Thread-safe."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._sections: dict[str, dict[str, tuple[int, bytes]]] = {}  # each in the order of its changes
        self._gone: dict[str, int] = {}  # rows of a section that are gone, and kept for readers
        self._last = 0
        self._forgotten = 0  # the last change of which a row that is gone is not known any more

    def put(self, section: str, rows: Mapping[str, Any]) -> int:
        """Make these the rows of a section; how many changed. What is equal is no change."""
        made = {key: encode(section, key, value) for key, value in rows.items()}
        with self._lock:
            mine = self._sections.setdefault(section, {})
            return self._change(section, mine, made, [key for key in mine if key not in made])

    def change(self, section: str, changed: Mapping[str, bytes], gone: Iterable[str]) -> int:
        """Set some rows of a section, made by `encode`, and remove some; how many changed."""
        with self._lock:
            return self._change(section, self._sections.setdefault(section, {}), changed, gone)

    def _change(
        self, section: str, mine: dict[str, tuple[int, bytes]], made: Mapping[str, bytes], gone: Iterable[str]
    ) -> int:
        changed = 0
        for key in gone:
            if mine.get(key, (0, _GONE))[1] is not _GONE:
                self._set(mine, key, _GONE)
                self._gone[section] = self._gone.get(section, 0) + 1
                changed += 1
        for key, text in made.items():
            before = mine.get(key)
            if before is None or before[1] != text:
                if before is not None and before[1] is _GONE:
                    self._gone[section] -= 1
                self._set(mine, key, text)
                changed += 1
        self._forget(section, mine)
        return changed

    def put_one(self, section: str, key: str, value: Any) -> None:
        """Set one row of a section and leave the others."""
        text = encode(section, key, value)
        with self._lock:
            mine = self._sections.setdefault(section, {})
            before = mine.get(key)
            if before is None or before[1] != text:
                self._set(mine, key, text)

    def get(self, section: str, key: str) -> Any:
        """One row, or None."""
        with self._lock:
            found = self._sections.get(section, {}).get(key)
        return None if found is None else json.loads(found[1])

    def rows_with(self, section: str, name: str, value: int) -> Iterator[Any]:
        """Rows with this number in their field `name`. Looks at all of the section: 20 ms for 100,000 jobs."""
        with self._lock:
            texts = [text for _, text in self._sections.get(section, {}).values()]
        field = json.dumps({name: value}, separators=(",", ":")).encode()[1:-1]  # never in a text: its quotes are not
        for text in texts:
            if field + b"," in text or field + b"}" in text:
                yield json.loads(text)

    def after(self, epoch: str, last: int) -> bytes:
        """The answer to a reader that has all up to the change `last` of an epoch: a line of JSON."""
        with self._lock:
            reset = epoch != self.epoch or not 0 < last <= self._last or last < self._forgotten
            since = 0 if reset else last
            found = heapq.merge(*(self._newer(section, since) for section in self._sections))
            pieces: list[bytes] = []
            size, upto, more = 0, self._last, False
            for number, section, key, text in found:
                if text is _GONE and not since:
                    continue
                if size + len(text) > MOST_ANSWER and pieces:
                    more = True
                    break
                size += len(text) + len(key) + 32
                pieces.append(b"[%s,%s,%s]" % (json.dumps(section).encode(), json.dumps(key).encode(), text))
                upto = number
            if not more:
                upto = self._last
        head = {"version": VERSION, "epoch": self.epoch, "last": upto, "more": more, "reset": reset}
        return json.dumps(head).encode()[:-1] + b', "rows": [' + b",".join(pieces) + b"]}\n"

    def _newer(self, section: str, since: int) -> Iterator[tuple[int, str, str, bytes]]:
        """The rows of a section that changed after `since`, in the order of their changes. Few of them, as nearly
        always, are found from the end; of many those that are wanted first, from the beginning."""
        mine = self._sections[section]
        if self._last - since < len(mine) // 4:
            few = list(takewhile(lambda one: mine[one][0] > since, reversed(mine)))
            keys: Iterable[str] = reversed(few)
        else:
            keys = (key for key, (number, _) in mine.items() if number > since)
        for key in keys:
            number, text = mine[key]
            yield number, section, key, text

    def _set(self, mine: dict[str, tuple[int, bytes]], key: str, text: bytes) -> None:
        self._last += 1
        mine.pop(key, None)
        mine[key] = self._last, text

    def _forget(self, section: str, mine: dict[str, tuple[int, bytes]]) -> None:
        """Drop the older half of the rows that are gone, where they are many."""
        count = self._gone.get(section, 0)
        if count <= max(_LEAST_GONE, len(mine) // 2):
            return
        gone = [(key, number) for key, (number, text) in mine.items() if text is _GONE]
        for key, number in gone[: count // 2]:
            del mine[key]
            self._forgotten = max(self._forgotten, number)
        self._gone[section] = count - count // 2


def encode(section: str, key: str, value: Any) -> bytes:
    """A row's bytes. Raises SluiceError for one that is too large."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > _MOST_ROW:
        raise SluiceError(f"{section} {key[:80]!r}: larger than {_MOST_ROW} bytes", remedy="it is not published")
    return text


def render_request(do: str, **words: Any) -> bytes:
    """A request's line."""
    return json.dumps({"version": VERSION, "do": do, **words}).encode() + b"\n"


def render_answer(document: Mapping[str, Any]) -> bytes:
    """An answer's line."""
    return json.dumps({"version": VERSION, **document}, separators=(",", ":")).encode() + b"\n"


def parse_answer(line: bytes) -> dict[str, Any]:
    """An answer's object. Raises SluiceError with the daemon's words, or for what is no answer."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SluiceError(_NO_ANSWER, remedy=_NO_ANSWER_REMEDY) from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise SluiceError(
            f"the controllers' daemon: not an answer of version {VERSION}",
            remedy="install one version of Sluice and restart both",
        )
    if "error" in document:
        usage = document.get("usage") is True
        raise SluiceError(str(document["error"]), remedy=str(document.get("remedy", "")), usage=usage)
    return document


class AwayError(SluiceError):
    """The daemon cannot be asked."""


def ask(path: Path, do: str, *, timeout: float = 10.0, **words: Any) -> dict[str, Any]:
    """Ask the daemon at a socket. Raises SluiceError; AwayError where it is not there, or does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(render_request(do, **words))
            with connection.makefile("rb") as answers:
                answer = answers.readline()
    except OSError as error:
        raise AwayError(
            f"{path}: {error.strerror or error}", remedy="is sluice-controllerd running on this host?"
        ) from error
    if not answer.endswith(b"\n"):
        raise AwayError(_NO_ANSWER, remedy=_NO_ANSWER_REMEDY)
    return parse_answer(answer)
