"""The list of GPUs that are out of service, which the placement hook reads (slurm_plugin/runtime/withdrawn.h)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_if_changed

FILE_NAME = "sluice.withdrawn"
"""Its name in StateSaveLocation."""
MOST = 65536
_HEAD = "sluice-withdrawn 1\n"
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,63}) (0|[1-9]\d{0,2})")
_LAST = re.compile(r"checksum = crc32:([0-9a-f]{8})\n\Z")
_MAX_BYTES = 8 << 20

Gpu = tuple[str, int]
"""A node's name, and the number of one of its GPUs: the bit of gres/gpu."""


def render(gpus: Iterable[Gpu]) -> str:
    """The file's text. Raises SluiceError for what the plugin would refuse."""
    wanted = sorted(set(gpus))
    if len(wanted) > MOST:
        raise SluiceError(f"{len(wanted)} GPUs out of service: at most {MOST} can be", remedy="drain the nodes instead")
    lines = [f"{node} {number}" for node, number in wanted]
    for line, (_, number) in zip(lines, wanted, strict=True):
        if not _LINE.fullmatch(line) or number > 255:
            raise SluiceError(f"{line!r}: not a node's name and a GPU's number from 0 to 255")
    body = _HEAD + "".join(line + "\n" for line in lines)
    return f"{body}checksum = crc32:{zlib.crc32(body.encode()):08x}\n"


def parse(text: str, *, source: str) -> list[Gpu]:
    """The GPUs of a file. Raises SluiceError that names `source`."""
    remedy = "remove it: the controllers' daemon writes it again"
    last = _LAST.search(text)
    body = text[: last.start()] if last else ""
    if last is None or f"{zlib.crc32(body.encode()):08x}" != last[1]:
        raise SluiceError(f"{source}: damaged: wrong checksum", remedy=remedy)
    if not body.startswith(_HEAD):
        raise SluiceError(f"{source}: not in the format of this version", remedy=remedy)
    found = []
    for line in body[len(_HEAD) :].splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise SluiceError(f"{source}: {line[:80]!r} is not a GPU of a node", remedy=remedy)
        found.append((match[1], int(match[2])))
    return found


def read(path: Path) -> list[Gpu]:
    """The GPUs that a file names; none where there is no file. Raises SluiceError, OSError."""
    try:
        with path.open("rb") as file:
            return parse(file.read(_MAX_BYTES).decode("utf-8", "replace"), source=str(path))
    except FileNotFoundError:
        return []


def write(path: Path, gpus: Iterable[Gpu]) -> bool:
    """Write the list; True where the file changed. Raises SluiceError, OSError."""
    return write_if_changed(path, render(gpus), mode=0o644)
