"""The lines of a batch's file, checked while they come: what is wrong is found before a job is queued.

Bounded whatever comes: one line is held, and a digest of each custom_id. A file whose lines are wrong is kept, and its
batches fail with what was found, as OpenAI's do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from sluice.exchange.batches import ENDPOINTS, MOST_LINE

MOST_LINES: Final = 50_000
_MOST_ERRORS: Final = 100
_MOST_ID: Final = 512
_MOST_PARSED: Final = 64 << 20
_PARSED: Final = 200
"""Bytes that an object or a list takes when it is parsed."""


@dataclass(slots=True)
class Contents:
    """What a file has. `url` and `model`: of its first request; all others have the same, or there are errors."""

    rows: int = 0
    """Lines, those included that are empty."""
    requests: int = 0
    url: str = ""
    model: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Of batches with this file, as the API has them; the first hundred."""


class _WrongError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Lines:
    """The check."""

    def __init__(self) -> None:
        self.found = Contents()
        self._rest = bytearray()
        self._size = 0
        self._ids: set[bytes] = set()

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0:
            self._add(data[begin:end])
            self._line()
            begin = end + 1
        self._add(data[begin:])

    def end(self) -> Contents:
        """The file is complete."""
        if self._size:
            self._line()
        if not self.found.requests and not self.found.errors:
            self._wrong(_WrongError("empty_file", "the file has no requests; write one a line"), None)
        return self.found

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= MOST_LINE:
            self._rest += piece

    def _line(self) -> None:
        found, line, size = self.found, bytes(self._rest), self._size
        self._rest, self._size = bytearray(), 0
        found.rows += 1
        if found.rows > MOST_LINES:
            if found.rows == MOST_LINES + 1:
                self._wrong(_WrongError("too_many_tasks", f"more than {MOST_LINES} lines; split the file"), found.rows)
            return
        if size <= MOST_LINE and not line.strip():
            return
        found.requests += 1
        try:
            if size > MOST_LINE:
                raise _WrongError("too_long", f"{size} bytes; {MOST_LINE} at most")
            self._check(line)
        except _WrongError as error:
            self._wrong(error, found.rows)

    def _wrong(self, error: _WrongError, line: int | None) -> None:
        if len(self.found.errors) < _MOST_ERRORS:
            said = {"code": error.code, "message": str(error), "param": error.param, "line": line}
            self.found.errors.append(said)

    def _check(self, line: bytes) -> None:
        document = _parse(line)
        name = document.get("custom_id")
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_ID:
            raise _WrongError("missing_required_parameter", f"custom_id: not 1 to {_MOST_ID} characters", "custom_id")
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            raise _WrongError("duplicate_custom_id", f"custom_id {name[:80]!r}: twice", "custom_id")
        self._ids.add(digest)
        if document.get("method") != "POST":
            raise _WrongError("invalid_method", "method: not POST", "method")
        url, body = document.get("url"), document.get("body")
        if not isinstance(url, str) or url not in ENDPOINTS:
            raise _WrongError("invalid_url", f"url: not one of {', '.join(ENDPOINTS)}", "url")
        if not isinstance(body, dict):
            raise _WrongError("missing_required_parameter", "body: not an object", "body")
        model = body.get("model")
        if not isinstance(model, str) or not 0 < len(model) <= _MOST_ID:
            raise _WrongError("missing_required_parameter", "body.model: not a name", "body.model")
        if body.get("stream"):
            raise _WrongError("invalid_request", "body.stream: set; answers are written whole", "body.stream")
        found = self.found
        found.url, found.model = found.url or url, found.model or model
        if url != found.url:
            raise _WrongError("mismatched_url", f"url {url}: lines before have {found.url}", "url")
        if model != found.model:
            raise _WrongError(
                "mismatched_model", f"body.model {model[:80]!r}: lines before have {found.model[:80]!r}", "body.model"
            )


def _parse(line: bytes) -> dict[str, Any]:
    """A line's object; small, whatever the line is made of. Raises an exception that says why it is none."""
    if (line.count(b"{") + line.count(b"[")) * _PARSED > _MOST_PARSED:
        raise _WrongError("invalid_json_line", "too many objects and lists")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise _WrongError("invalid_json_line", f"not JSON{where}") from error
    if not isinstance(document, dict):
        raise _WrongError("invalid_json_line", "not an object")
    return document
