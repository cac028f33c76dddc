"""Files that slurmctld's plugins and Python read of each other (`slurm_plugin/runtime/listing.h`).

A first line with kind and version, a line for each item, and a checksum.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sluice.base.errors import SluiceError

_Item = TypeVar("_Item")
_LAST = re.compile(r"checksum = crc32:([0-9a-f]{8})\n\Z")
_MOST_BYTES = 8 << 20


def checksummed(body: str) -> str:
    """A file's text with its last line."""
    return f"{body}checksum = crc32:{zlib.crc32(body.encode()):08x}\n"


def items_of(
    text: str, *, head: str, line: re.Pattern[str], what: str, source: str, remedy: str
) -> list[tuple[str, ...]]:
    """The groups of each line of a file. `what`: an item in words. Raises SluiceError that names `source`."""
    last = _LAST.search(text)
    body = text[: last.start()] if last else ""
    if checksummed(body) != text:
        raise SluiceError(f"{source}: damaged: wrong checksum", remedy=remedy)
    if not body.startswith(head):
        raise SluiceError(f"{source}: not in the format of this version", remedy=remedy)
    found = []
    for one in body[len(head) :].splitlines():
        match = line.fullmatch(one)
        if match is None:
            raise SluiceError(f"{source}: {one[:80]!r} is not {what}", remedy=remedy)
        found.append(match.groups())
    return found


def read_list(path: Path, parse: Callable[[str], list[_Item]]) -> list[_Item]:
    """What `parse` makes of a file; none where there is no file. Raises OSError, and what `parse` raises."""
    try:
        with path.open("rb") as file:
            return parse(file.read(_MOST_BYTES).decode("utf-8", "replace"))
    except FileNotFoundError:
        return []
