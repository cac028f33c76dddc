"""Finds whose the processes are that a driver lists: once for each sample, in bounded time, also with hostile tenants.

A process is identified by an open file of its folder in /proc, so that another one with its number is not mistaken for
it, and the result is kept: in version 1 of cgroups one whose threads have all exited is in no job's cgroup any more,
but may hold memory for a moment longer.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from prolog_epilog import cgroups
from prolog_epilog.cgroups import PROC, Place
from prolog_epilog.subuids import Subuids

MEASURES_AS = 65533
"""User and group of programs that measure for preflights, and nobody else's: services share nobody's, and could trace
or end them."""
_MOST_FILES = 256  # of the open files that an agent may have
_MOST_LOOKS = 2048  # at processes whose file is not open, in one sample
_MOST_THREADED = 32  # at processes whose leader has exited, in one sample
_ENDING_S = 2.0  # how long one that is ending counts to no owner
_MOST_TEXT = 1 << 14


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a process is: a job's (`place`), or its real user's; neither where nothing is known of it."""

    place: Place | None = None
    uid: int | None = None
    name: str = ""  # where the uid is one of a user's subordinate ones: that user, by name or number
    ending: bool = False  # it is about to end, and in no job's cgroup any more

    def is_stray(self) -> bool:
        """Whether it belongs to a user and to no job."""
        return self.place is None and not self.ending and self.uid not in (0, None, MEASURES_AS)

    def is_user(self, uid: int, name: str) -> bool:
        """Whether it belongs to the user, or is in a container of that user."""
        return self.uid == uid or (self.name != "" and self.name in (name, str(uid)))


_NOBODY = Owner()


@dataclass(slots=True)
class _Known:
    owner: Owner = _NOBODY
    file: int | None = None
    ending_since: float | None = None


class Owners:
    """The owners of one vendor's processes, from sample to sample. For one thread."""

    def __init__(
        self,
        proc: Path = PROC,
        *,
        subuids: Subuids | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_files: int = _MOST_FILES,
    ) -> None:
        self._proc = proc
        self._subuids = subuids or Subuids()
        self._clock = clock
        self._most_files = most_files
        self._known: dict[int, _Known] = {}
        self._open = 0
        self._threaded = 0

    def look(self, pids: Iterable[int]) -> dict[int, Owner]:
        """The owners of these processes, given in order of importance; all others are forgotten.

        Where there are too many for one sample, what is known of the others is from an earlier sample, and nothing is
        known of new ones before the next sample.
        """
        self._threaded = _MOST_THREADED
        wanted = dict.fromkeys(pids)
        for pid in self._known.keys() - wanted:
            self._forget(pid)
        late = []
        for pid in wanted:
            known = self._known.get(pid)
            if known is None or known.file is None:
                late.append(pid)
            else:
                self._refresh(pid, known)
        new = sorted(late, key=lambda pid: pid in self._known)  # those of which nothing is known first; stable
        for pid in new[:_MOST_LOOKS]:
            self._refresh(pid, self._known.pop(pid, _Known()))
        return {pid: self._known[pid].owner for pid in wanted if pid in self._known}

    def of_user(self, uid: int) -> Owner:
        """The owner of processes of which only the user is known."""
        return Owner(uid=uid, name=self._subuids.owner(uid))

    def is_still(self, pid: int, owner: Owner) -> bool:
        """Whether a process is what it was found to be; asked before it is ended."""
        place = cgroups.place_of(pid, self._proc)
        if owner.place is None:
            return place is None and cgroups.uid_of(pid, self._proc) == owner.uid
        return place == owner.place or (place is None and self._holds(pid))

    def _holds(self, pid: int) -> bool:
        """Whether it is the same process: its open file can still be read."""
        known = self._known.get(pid)
        if known is None or known.file is None:
            return False
        try:
            return bool(os.pread(known.file, 1, 0))
        except OSError:
            return False

    def _refresh(self, pid: int, known: _Known) -> None:
        text = self._text(pid, known)
        if text is None:  # it has ended: the driver may list it for a moment longer, or another one has its number
            self._forget(pid)
            known = _Known()
            text = self._text(pid, known)
        self._known[pid] = known
        known.owner = _NOBODY if text is None else self._owner(pid, known, text)

    def _text(self, pid: int, known: _Known) -> str | None:
        """The content of its cgroup file; None for one that has ended.

        Older kernels do not show a path longer than PATH_MAX, and in version 1 a step's user can make one: such a
        process is in no known job, and counts to its user.
        """
        path = f"{self._proc}/{pid}/cgroup"
        try:
            if known.file is None and self._open < self._most_files:
                known.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open += 1
            if known.file is None:
                return cgroups.read(path)
            return _read_all(known.file)
        except OSError as error:
            return "" if error.errno == errno.ENAMETOOLONG else None

    def _owner(self, pid: int, known: _Known, text: str) -> Owner:
        before = known.owner
        place = cgroups.parse_place(text)
        if place is not None:
            return before if before.place == place else self._with_user(pid, Owner(place))
        threads = self._threads(pid)
        if threads is None:
            return self._with_user(pid, _NOBODY)
        place = threads.place or before.place
        if place is not None:
            return before if before.place == place else self._with_user(pid, Owner(place))
        if not threads.ending:
            return self._with_user(pid, _NOBODY)
        known.ending_since = known.ending_since or self._clock()
        owner = self._with_user(pid, _NOBODY)
        return replace(owner, ending=self._clock() - known.ending_since < _ENDING_S)

    def _threads(self, pid: int) -> cgroups.Threads | None:
        """The owner of a process whose leader has exited; None where it lives, or too many were looked up already."""
        try:
            if not cgroups.has_exited(pid, self._proc):
                return None
            self._threaded -= 1
            return cgroups.threads_of(pid, self._proc) if self._threaded >= 0 else cgroups.Threads()
        except OSError:
            return cgroups.Threads(ending=True)

    def _with_user(self, pid: int, owner: Owner) -> Owner:
        uid = cgroups.uid_of(pid, self._proc)
        return owner if uid is None else replace(self.of_user(uid), place=owner.place)

    def _forget(self, pid: int) -> None:
        known = self._known.pop(pid, None)
        if known is not None and known.file is not None:
            os.close(known.file)
            self._open -= 1


def _read_all(file: int) -> str:
    text = b""
    while part := os.pread(file, _MOST_TEXT, len(text)):
        text += part
        if len(part) < _MOST_TEXT:
            break
    return text.decode(errors="replace")
