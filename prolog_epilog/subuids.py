"""Whose a uid of a user namespace is: /etc/subuid gives users ranges of uids, which count as theirs."""

from __future__ import annotations

import pwd
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUBUID = Path("/etc/subuid")


@dataclass(frozen=True, slots=True)
class _Range:
    first: int
    count: int
    owner: int


class Subuids:
    """The file, read again when it changes. A file that cannot be read gives nobody anything."""

    def __init__(self, path: Path = SUBUID) -> None:
        self._path = path
        self._mark: tuple[int, int] | None = None
        self._ranges: list[_Range] = []

    def owner_of(self, uid: int) -> int:
        """The user who has the uid: itself, unless it lies in somebody's range."""
        self._look()
        found = (one.owner for one in self._ranges if one.first <= uid < one.first + one.count)
        return next(found, uid)

    def _look(self) -> None:
        try:
            state = self._path.stat()
            mark = state.st_ino, state.st_mtime_ns
            if mark == self._mark:
                return
            text = self._path.read_text(errors="replace")
        except OSError:
            mark, text = None, ""
        self._mark, self._ranges = mark, _parse(text)


def _parse(text: str) -> list[_Range]:
    found = []
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        with suppress(KeyError, ValueError):
            owner = int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
            if owner != 0:  # root's own ranges, e.g. of a container engine: nobody gets root's places by them
                found.append(_Range(int(first), int(count), owner))
    return found
