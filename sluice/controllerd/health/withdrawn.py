"""The list of GPUs that are out of service, which the placement hook reads (slurm_plugin/runtime/withdrawn.h)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_if_changed
from sluice.exchange.plugin_list import checksummed, items_of, read_list

FILE_NAME = "sluice.withdrawn"
"""Its name in StateSaveLocation."""
MOST = 65536
_HEAD = "sluice-withdrawn 1\n"
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,63}) (0|[1-9]\d{0,2})")

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
    return checksummed(_HEAD + "".join(line + "\n" for line in lines))


def parse(text: str, *, source: str) -> list[Gpu]:
    """The GPUs of a file. Raises SluiceError that names `source`."""
    remedy = "remove it: the controllers' daemon writes it again"
    found = items_of(text, head=_HEAD, line=_LINE, what="a GPU of a node", source=source, remedy=remedy)
    return [(node, int(number)) for node, number in found]


def read(path: Path) -> list[Gpu]:
    """The GPUs that a file names; none where there is no file. Raises SluiceError, OSError."""
    return read_list(path, lambda text: parse(text, source=str(path)))


def write(path: Path, gpus: Iterable[Gpu]) -> bool:
    """Write the list; True where the file changed. Raises SluiceError, OSError."""
    return write_if_changed(path, render(gpus), mode=0o644)
