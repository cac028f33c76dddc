"""Finds who may hold memory of a GPU though the driver names no living process: an open device file keeps it.

A descriptor may have been sent to another process of the user's, wait in a socket, or be kept by a mapping. So those
come first that have the device's file open, by name; all other processes of the users come last, as nothing identifies
them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from prolog_epilog import cgroups
from prolog_epilog.cgroups import PROC
from prolog_epilog.owners import Owner
from prolog_epilog.subuids import Subuids

_MOST_PROCESSES = 4096  # in one pass; the next one continues after them
_MOST_FILES = 1 << 14  # the same of open files


@dataclass
class Suspects:
    """Looks through the node's processes, a bounded number each time. For one epilog."""

    users: Mapping[int, str]
    proc: Path = PROC
    subuids: Subuids = field(default_factory=Subuids)
    recorded: set[int] = field(default_factory=set)  # processes that are in a record already
    _last: int = 0
    _files: int = 0

    def look(self, files: Collection[str] | None) -> Iterator[tuple[int, Owner]]:
        """The users' processes that have one of these files open; None: all of the users' processes."""
        self._files = _MOST_FILES
        pids = sorted(int(name) for name in os.listdir(self.proc) if name.isdecimal())
        later = [pid for pid in pids if pid > self._last]
        self._last = 0
        for pid in later[:_MOST_PROCESSES]:
            uid = cgroups.uid_of(pid, self.proc)
            if uid is None or not self._is_users(owner := Owner(None, uid, self.subuids.owner(uid))):
                continue
            if files is None or self._has_open(pid, files):
                yield pid, Owner(cgroups.place_of(pid, self.proc), uid, owner.name)
            if self._files <= 0:
                self._last = pid
                return
        if len(later) > _MOST_PROCESSES:
            self._last = later[_MOST_PROCESSES - 1]

    def _is_users(self, owner: Owner) -> bool:
        return any(owner.is_user(uid, name) for uid, name in self.users.items())

    def _has_open(self, pid: int, files: Collection[str]) -> bool:
        with suppress(OSError), os.scandir(f"{self.proc}/{pid}/fd") as entries:
            for entry in islice(entries, self._files):
                self._files -= 1
                with suppress(OSError):  # closed meanwhile
                    if os.readlink(entry.path) in files:  # noqa: PTH115 - the file is not asked: it may be a tenant's
                        return True
        return False
