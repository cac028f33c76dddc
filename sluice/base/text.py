"""Untrusted text, made safe for one line of a terminal, a table or a message."""

from __future__ import annotations

import re

# Characters that are not text: control characters, among them terminal escapes; line separators; marks that are
# invisible or turn the direction of text; halves of surrogate pairs. For use within brackets of a regular expression.
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_BUT_LINES = re.compile(rf"(?![\n\t])[{UNPRINTABLE}]")
_GAPS = re.compile(rf"[{UNPRINTABLE}\s]+")


def one_line(text: str, *, limit: int | None = 256) -> str:
    """The text on one line: runs of white space and of what cannot be printed become one space, the ends are trimmed.

    `limit` is the most characters that are kept; None keeps all.
    """
    return _GAPS.sub(" ", text).strip()[:limit]


def printable(text: str) -> str:
    """The text with its lines, tabs and spaces as they are; other characters that are not text become "?"."""
    return _BUT_LINES.sub("?", text)
