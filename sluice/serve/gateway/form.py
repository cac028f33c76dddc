"""The form of an upload (multipart/form-data), taken apart while it comes: the file's bytes are passed on, and the few
other fields are small."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sluice.serve.gateway.refusals import RefusalError

_MOST_PARTS: Final = 16
_MOST_VALUE: Final = 1024
_MOST_NAME: Final = 255
_FILE: Final = "file"

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it repeats what clients send


class Form:
    """The parser. `take` gets the bytes of the field `file`."""

    def __init__(self, content_type: bytes, take: Callable[[bytes], None]) -> None:
        """Raises RefusalError."""
        kind, options = parse_options_header(content_type.decode("latin-1"))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
            raise RefusalError(
                415, "header content-type: not multipart/form-data with a boundary", remedy="upload the file as a form"
            )
        self.values: dict[str, str] = {}
        """Of the other fields."""
        self.filename: str | None = None
        """None: there was no file yet."""
        self._take = take
        self._parts = 0
        self._complete = False
        self._name = ""
        self._header = self._disposition = self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """The next bytes of the body. Raises RefusalError, and what `take` raises."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _wrong("body: not a form", "send multipart/form-data") from error

    def end(self) -> None:
        """The body is there. Raises RefusalError for one that is not whole."""
        if not self._complete:
            raise _wrong("body: the form has no end", "send all of it")
        if self.filename is None:
            raise _wrong("file: not there", "upload it as the field `file`", _FILE)

    # ---- what the parser finds ----

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _wrong(f"body: more than {_MOST_PARTS} fields", "send fewer")
        self._header = self._disposition = self._value = b""

    def _on_field(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _on_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        kind, options = parse_options_header(self._disposition.decode("latin-1"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not 0 < len(self._name) <= _MOST_NAME or self._name in self.values:
            raise _wrong("body: a field without a name, or one that is there twice", "name each once")
        if self._name != _FILE:
            return
        if self.filename is not None:
            raise _wrong("file: there twice", "upload one file at a time", _FILE)
        name = options.get(b"filename", b"file").decode("utf-8", "replace")[:_MOST_NAME]
        self.filename = "".join(one for one in name if one.isprintable()) or "file"

    def _on_data(self, data: bytes, begin: int, end: int) -> None:
        if self._name == _FILE:
            self._take(data[begin:end])
            return
        self._value += data[begin:end]
        if len(self._value) > _MOST_VALUE:
            raise _wrong(f"{self._name}: more than {_MOST_VALUE} bytes", "shorten it", self._name)

    def _end(self) -> None:
        if self._name != _FILE:
            self.values[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._complete = True


def _wrong(what: str, remedy: str, param: str | None = None) -> RefusalError:
    return RefusalError(400, what, remedy=remedy, param=param)


def number_of(values: dict[str, str], name: str, least: int, most: int) -> int | None:
    """A field that is a number. Raises RefusalError."""
    text: Any = values.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise _wrong(f"{name}: not a number from {least} to {most}", "correct it", name)
    return int(text)
