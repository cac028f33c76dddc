"""The agent's side of `sluice-guard`, its parent, which restarts it and freezes what is not watched until then.

Messages go through a socket that never blocks the agent: what does not fit is sent with the next beat. Whose
data a thread is reading is in a shared page, so that it is known however the agent dies.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.exchange.record import JobRecord

VARIABLE = "SLUICE_GUARD"
"""Environment variable in which the guard passes its two files: SOCKET,PAGE."""
MEMORY = Path("agent/guard")
"""Below /run/sluice: what the guard records (`prolog_epilog.outages` reads it)."""
PROGRAM = "sluice-guard"
_SLOT = struct.Struct("=I")
_SLOTS = 64  # of the page: threads that read at a time
_HOLDS_BY_ITSELF = ("mig",)  # rungs that need no watch


class Guard:
    """Messages of the agent to its guard; without one nothing is sent. Thread-safe."""

    def __init__(self, link: socket.socket | None = None, page: mmap.mmap | None = None) -> None:
        self._link = link
        self._page = page
        self._lock = threading.Lock()
        self._watched: dict[int, str] = {}
        self._bound: int | None = None
        self._unsaid: dict[str, str] = {}  # by what it is about: what the socket had no room for
        self._slots = list(range(_SLOTS))

    @classmethod
    def inherited(cls) -> Guard:
        """The guard that the environment names; its files are not inherited by children."""
        words = os.environ.pop(VARIABLE, "")
        if not words:
            return cls()
        link, page = (int(word) for word in words.split(","))
        for descriptor in (link, page):
            os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=link), mmap.mmap(page, _SLOTS * _SLOT.size))

    def ready(self) -> None:
        """The agent answers, and has named all jobs that are to be watched."""
        self._keep("ready", "ready")

    def beat(self, vendor: str) -> None:
        """The loop that watches a vendor is alive."""
        with self._lock:
            for about, words in list(self._unsaid.items()):
                if not self._send(words):
                    return
                del self._unsaid[about]
            self._send(f"beat {vendor}")

    def sampled(self, vendor: str) -> None:
        """A vendor's processes were sampled."""
        with self._lock:
            self._send(f"sample {vendor}")

    def watch(self, record: JobRecord) -> None:
        """A job may have got its limits or its cgroup; the guard needs both."""
        vendors = {
            grant.vendor for grant in record.grants if grant.limit is not None and grant.rung not in _HOLDS_BY_ITSELF
        }
        if not vendors or not record.cgroup:
            return
        words = f"watch {record.job} {','.join(sorted(vendors))} {record.cgroup}"
        if self._watched.get(record.job) != words:
            self._watched[record.job] = words
            self._keep(str(record.job), words)

    def forget(self, job: int) -> None:
        """A job has ended."""
        if self._watched.pop(job, None) is not None:
            self._keep(str(job), f"forget {job}")

    def bound(self, seconds: int) -> None:
        """How long a job may run unwatched; 0: without limit."""
        if seconds != self._bound:
            self._bound = seconds
            self._keep("bound", f"bound {seconds}")

    @contextmanager
    def about(self, job: int) -> Iterator[None]:
        """Marks the time in which data that a job's processes wrote is read."""
        if self._page is None:
            yield
            return
        try:
            slot = self._slots.pop()
        except IndexError:  # more threads than the page has room for
            yield
            return
        _SLOT.pack_into(self._page, slot * _SLOT.size, job)
        try:
            yield
        finally:
            _SLOT.pack_into(self._page, slot * _SLOT.size, 0)
            self._slots.append(slot)

    def _keep(self, about: str, words: str) -> None:
        """Send something that must arrive, after what is still to be sent."""
        with self._lock:
            self._unsaid.pop(about, None)
            if self._unsaid or not self._send(words):
                self._unsaid[about] = words

    def _send(self, words: str) -> bool:
        """False where there is no room. Without its guard the agent ends, too."""
        if self._link is None:
            return True
        try:
            self._link.send(words.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
