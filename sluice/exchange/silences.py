"""Silences: alerts of which no notices are sent until a time. One file next to slurmctld's, for all controllers."""

from __future__ import annotations

import fcntl
import fnmatch
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.base.text import one_line

FOLDER = "sluice.alerts"
"""In StateSaveLocation."""
_FILE = "silences.json"
_MOST = 10_000

log = logging.getLogger("sluice.alerts")


@dataclass(frozen=True, slots=True)
class Silence:
    """Matching alerts are not sent until a time."""

    id: str
    rule: str  # a pattern, as the shell's
    subject: str
    until: float
    by: str = ""
    comment: str = ""

    def matches(self, rule: str, subject: str) -> bool:
        """Whether it holds for a rule's subject."""
        return fnmatch.fnmatchcase(rule, self.rule) and fnmatch.fnmatchcase(subject, self.subject)


def read_silences(folder: Path, now: float) -> list[Silence]:
    """Those in force."""
    path = folder / _FILE
    entries: object = []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["silences"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("%s: %s; starting empty", path, one_line(str(error)))
    found = []
    for one in entries if isinstance(entries, list) else []:
        try:
            silence = Silence(**one)
        except TypeError:
            continue
        if silence.until > now:
            found.append(silence)
    return found


def write_silences(folder: Path, silences: Iterable[Silence]) -> None:
    """Replace them. Raises OSError."""
    document = {"schema_version": 1, "silences": [asdict(one) for one in silences]}
    write_atomic(folder / _FILE, json.dumps(document, indent=1) + "\n", mode=0o644, follow_links=False)


def add_silence(folder: Path, made: Silence, now: float) -> None:
    """Add one, or replace that with its id. Raises UsageError, SluiceError, OSError."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: not there", remedy="sluice controllerd makes it once the policy has alerts")
    with _locked(folder):
        others = [one for one in read_silences(folder, now) if one.id != made.id]
        if len(others) >= _MOST:
            raise SluiceError(f"{folder}: has {_MOST} silences", remedy="end some: sluice alerts silence --remove")
        write_silences(folder, [*others, made])


def end_silence(folder: Path, name: str, now: float) -> Silence:
    """Remove the one with an id, and return it. Raises UsageError where there is none, OSError."""
    if folder.is_dir():
        with _locked(folder):
            silences = read_silences(folder, now)
            for one in silences:
                if one.id == name:
                    write_silences(folder, [other for other in silences if other is not one])
                    return one
    raise UsageError(f"silence {name!r}: there is none", remedy="see sluice alerts list --all")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / ".silences.lock", flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
