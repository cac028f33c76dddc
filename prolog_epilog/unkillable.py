"""Steps that no signal ends, as a process waits for a file system that another process serves: FUSE, as any user can.

Where the server is the process itself it waits without end. Slurm drains a node on which it cannot end a step ("Kill
task failed"), and what the process holds of a GPU stays held. The kernel's way out is to abort the file system's
connection: here only those of the process's user, and of them those that some process waits for.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

from prolog_epilog import cgroups
from prolog_epilog.cgroups import PROC, ROOT
from prolog_epilog.subuids import Subuids
from sluice.base.log import log

PERIOD_S = 5.0
CONNECTIONS = Path("/sys/fs/fuse/connections")
# Passes after which a process does not end: Slurm waits for UnkillableStepTimeout. One that exits by itself takes no
# signal any more, so it is not known whether it was killed then; and it may have much to write.
_KILLED, _EXITS = 2, 6
_MOST_CONNECTIONS = 1 << 14  # in one pass; the next one continues after them
_MOST_STEPS = 4096
_MOST_PROCESSES = 8  # of a step: in one that was killed none goes on
_MOST_THREADS = 32
_SIGKILL = 1 << 8  # in the pending signals of /proc/PID/status


class Unkillable:
    """Finds those steps among the jobs', and aborts what they wait for. For one thread."""

    def __init__(
        self,
        *,
        connections: Path = CONNECTIONS,
        proc: Path = PROC,
        root: Path = ROOT,
        subuids: Subuids | None = None,
    ) -> None:
        self._connections = connections
        self._proc = proc
        self._root = root
        self._subuids = subuids or Subuids()
        self._entries: Iterator[os.DirEntry[str]] | None = None
        self._looks: dict[int, int] = {}  # at processes that have not ended since

    def run(self) -> None:
        """A duty: what a process waits for that does not end is aborted. Raises OSError."""
        connections = list(self._of_users())
        ending = dict(self._look()) if connections or self._looks else {}
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in ending}
        stuck = [pid for pid, most in ending.items() if self._looks[pid] >= most]
        users = {self._user(uid) for pid in stuck if (uid := cgroups.uid_of(pid, self._proc))}
        for connection in connections if users else ():
            with suppress(OSError):  # it is unmounted just now
                self._abort(connection, users)

    def _of_users(self) -> Iterator[str]:
        """Connections that are not root's, out of a bounded number."""
        with suppress(FileNotFoundError):
            self._entries = self._entries or os.scandir(self._connections)
        entries = list(islice(self._entries or (), _MOST_CONNECTIONS))
        if len(entries) < _MOST_CONNECTIONS:
            self._entries = None
        for entry in entries:
            with suppress(OSError):
                if entry.stat().st_uid:
                    yield entry.path

    def _abort(self, connection: str, users: Iterable[int]) -> None:
        """Abort it if it is theirs and a process waits for it: its number may have become another's. Raises OSError."""
        folder = os.open(connection, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            within = partial(os.open, dir_fd=folder)
            uid = os.fstat(folder).st_uid
            with open("waiting", opener=within) as waiting:
                is_awaited = int(waiting.read()) > 0
            if uid and is_awaited and self._user(uid) in users:
                with open("abort", "w", opener=within) as abort:
                    abort.write("1")
                log("unkillable", user=uid, connection=Path(connection).name, what="a step waits for it: aborted")
        finally:
            os.close(folder)

    def _look(self) -> Iterator[tuple[int, int]]:
        """Processes of steps in which none makes progress, and after how many passes they are stuck."""
        for folder in islice(cgroups.task_folders(self._root), _MOST_STEPS):
            with suppress(OSError):  # one ends just now
                yield from self._ending(folder).items()

    def _ending(self, step: Path) -> dict[int, int]:
        """The same for one step; empty when a process makes progress. Raises OSError."""
        found = {}
        with (step / "cgroup.procs").open() as file:
            for pid in map(int, islice(file, _MOST_PROCESSES)):
                found[pid] = _patience(self._proc / str(pid) / "task")
                if not found[pid]:
                    return {}
        return found

    def _user(self, uid: int) -> int:
        """The user whose subordinate uid it is, else the uid."""
        owner = self._subuids.owner(uid)
        return (_number_of(owner) if owner else None) or uid


def _patience(tasks: Path) -> int:
    """How many passes a process may take to end; 0: it was not killed, and a thread does not exit. Raises OSError."""
    looks = 0
    with os.scandir(tasks) as threads:
        for thread in islice(threads, _MOST_THREADS):
            if _was_killed(cgroups.read(f"{thread.path}/status")):
                return _KILLED
            if not cgroups.has_exited(int(thread.name), tasks):
                return 0
            looks = _EXITS
    return looks


def _was_killed(status: str) -> bool:
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s+([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(signals, 16) & _SIGKILL for signals in pending)


@lru_cache(maxsize=256)  # one pass may ask thousands of times, and the answer may come by LDAP
def _number_of(user: str) -> int | None:
    with suppress(KeyError):
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    return None
