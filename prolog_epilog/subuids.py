"""Finds the user of a uid of a user namespace: /etc/subuid gives users ranges of uids, which count as theirs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sluice.base.log import log

_SUBUID = Path("/etc/subuid")
_MOST_SUBUID = 1 << 20  # bytes


class Subuids:
    """/etc/subuid: who owns which ranges of subordinate uids. Read again when it changes."""

    def __init__(self, path: Path = _SUBUID) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []

    def owner(self, uid: int) -> str:
        """The name, or number, of the user whose subordinate uid it is; empty for none."""
        with suppress(OSError):
            self._update()
        place = bisect.bisect_right(self._starts, uid) - 1
        if place < 0:
            return ""
        start, count, name = self._ranges[place]
        return name if uid < start + count else ""

    def _update(self) -> None:
        try:
            state = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._starts, self._ranges = None, [], []
            return
        stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        with self._path.open("rb") as file:
            text = file.read(_MOST_SUBUID + 1)
        if len(text) > _MOST_SUBUID:
            log("problem", what=f"{self._path}: larger than {_MOST_SUBUID} bytes", remedy="the rest of it is not read")
            text = text[:_MOST_SUBUID].rpartition(b"\n")[0]
        self._ranges = sorted(parse_subuids(text.decode(errors="replace")))
        self._starts = [start for start, _, _ in self._ranges]


def parse_subuids(text: str) -> Iterable[tuple[int, int, str]]:
    """First uid, how many, and whose they are; invalid lines are left out."""
    for line in text.splitlines():
        words = line.strip().split(":")
        if len(words) == 3 and words[0] and all(word.isascii() and word.isdecimal() for word in words[1:]):
            start, count = int(words[1][:10]), int(words[2][:10])
            if start and count:  # root belongs to no user
                yield start, count, words[0]
