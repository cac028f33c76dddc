"""Jobs that changed, as the plugins in slurmctld write them (`slurm_plugin/changes/changes.h` has the lines).

A reader has all jobs by `begin`, then a listing, then what `read` gives: what changed meanwhile comes again. Files are
the daemon's own user's, and nothing in them is believed to be whole: half a line is read on later, and what cannot be
read, or is not continued, ends with `None`, after which all jobs have to be listed again.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sluice.slurm.answers import Job
from sluice.slurm.text import job_of_fields

WANTED = "changes.wanted"
FOLLOWED_S = 15.0
"""Looks are more frequent, also on a busy host; where the last one is older, nobody looks any more."""
_LAST = 64 << 10
_WANT_S = 10.0
_MOST_READ = 32 << 20
_FILE = re.compile(r"changes\.(\d{12})")


@lru_cache(maxsize=65536)
def _known_name(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def user_name(uid: int) -> str:
    """As squeue writes it: the number of a user without a name."""
    try:
        return _known_name(uid)
    except KeyError:
        return str(uid)


@dataclass(slots=True)
class Changes:
    """What changed since the last reading."""

    at: float
    """All that had changed until then is known."""
    jobs: dict[int, Job | None] = field(default_factory=dict)
    """None: slurmctld does not know it any more."""


class JobChanges:
    """Follows the files in a folder. One thread."""

    def __init__(self, folder: Path, name_of: Callable[[int], str] = user_name) -> None:
        self._folder = folder
        self._name_of = name_of
        self._wanted = 0.0
        self._number = 0
        self._offset = 0
        self._at = 0.0

    def want(self) -> None:
        """Let slurmctld's side know that somebody reads."""
        now = time.monotonic()
        if self._wanted and now < self._wanted + _WANT_S:
            return
        self._wanted = now
        with suppress(OSError):
            descriptor = os.open(self._folder / WANTED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)

    def begin(self) -> bool:
        """Before a listing: what is written from now on is read after it. False where nothing is written."""
        self._number, self._at = 0, time.time()
        try:
            names = (_FILE.fullmatch(name) for name in os.listdir(self._folder))
            number = max((int(found[1]) for found in names if found), default=0)
            if number and self._at - self._last_look(number) < FOLLOWED_S:
                self._number = number
        except OSError:
            pass
        return self._number > 0

    def _last_look(self, number: int) -> float:
        """The time of a file's last look, or 0; what comes after its end is read from now on."""
        with self._path(number).open("rb") as file:
            self._offset = file.seek(0, os.SEEK_END)
            file.seek(max(0, self._offset - _LAST))
            looks = re.findall(rb'^\["look", ([0-9.]+),.*\]\n', file.read(), re.MULTILINE)
        return float(looks[-1]) if looks else 0.0

    def read(self) -> Changes | None:
        """What was written since; ``at`` stays as it was where no look has ended. None: list all jobs again."""
        found = Changes(self._at)
        if not self._number:
            return None
        data = self._rest()
        if data is None:
            self._number = 0
            return None
        end = data.rfind(b'\n["look"') + 1
        end = data.find(b"\n", end) + 1 if end or data.startswith(b'["look"') else 0
        try:
            for line in data[:end].split(b"\n")[:-1]:
                if not self._take(json.loads(line.decode(errors="replace")), found):
                    self._number = 0
                    return None
        except (ValueError, TypeError, IndexError, KeyError, RecursionError):
            self._number = 0
            return None
        self._offset += end
        self._at = found.at
        return found

    def _rest(self) -> bytes | None:
        """What comes after the last that was read, of one file; the next one's where this one is at its end."""
        data = self._data(self._number, self._offset)
        if data == b"":
            following = self._data(self._number + 1, 0)
            if following:
                if data == (late := self._data(self._number, self._offset)):
                    self._number, self._offset = self._number + 1, 0
                    return following
                return late
        return data

    def _data(self, number: int, offset: int) -> bytes | None:
        try:
            with self._path(number).open("rb") as file:
                if os.fstat(file.fileno()).st_size < offset:
                    return None
                file.seek(offset)
                return file.read(_MOST_READ)
        except OSError:
            return None

    def _take(self, words: list[object], found: Changes) -> bool:
        kind = words[0]
        if kind == "job":
            job = job_of_fields([str(word) for word in words[1:]], self._name_of)
            found.jobs[job.id] = job
        elif kind == "gone":
            found.jobs[int(str(words[1]))] = None
        elif kind == "look":
            found.at = max(found.at, float(str(words[1])))  # one that began before the listing ends after it
        else:
            return kind == "on"
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"changes.{number:012}"
