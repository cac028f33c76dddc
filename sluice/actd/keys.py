"""What was asked with an idempotency key, and what became of it: on disk before it is done, and before the answer.

A key is its user's, with one request. One file each has the request's digest, and either the answer, or that it was
begun: `mark` is a random word that is in a job's script, by which a job is found that was queued when this process was
killed. While a program acts for it, that program holds a lock on the file, also when this process has died.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.files import write_atomic
from sluice.exchange.acts import ActError

KEPT_S = 24 * 3600.0
_OF_USER = 10_000
_OF_ALL = 50_000
_MOST_FILE = 1 << 20
_PRUNE_S = 60.0
_MOST_JOBS = 20_000
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$-]{0,128}\Z")
_FILE = re.compile(r"[0-9a-f]{64}\.json\Z")


@dataclass(slots=True)
class Entry:
    """One key's request. `answer` None: it was begun, and what became of it is not known yet."""

    path: Path
    user: str
    do: str
    digest: str
    mark: str
    created: float
    begun: float  # the last time
    answer: dict[str, Any] | None = None
    again: bool = False  # begun by a request before this one
    lock: int = field(default=-1)  # a descriptor of the file


class Keys:
    """The folder of them, which is root's. Thread-safe."""

    def __init__(self, folder: Path, *, of_user: int = _OF_USER, of_all: int = _OF_ALL) -> None:
        self.folder = folder
        self._of_user, self._of_all = of_user, of_all
        self._lock = threading.Lock()
        self._busy: set[Path] = set()
        self._known: dict[str, dict[Path, float]] = {}  # of each user, the oldest first
        self._jobs: dict[str, set[int]] = {}  # of users that were asked for
        self._next = 0.0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [(path.stat().st_mtime, path) for path in folder.glob("*/*.json") if _FILE.fullmatch(path.name)]
        for created, path in sorted(found):
            self._known.setdefault(path.parent.name, {})[path] = created

    def begin(self, user: str, key: str, do: str, words: dict[str, Any]) -> Entry:
        """The entry of a request, which is the caller's until `leave`. Raises ActError 409, 422, OSError."""
        if not _USER.match(user):
            raise ActError(403, f"user {user!r}: not a name that is written into a path", remedy="use sluice(1)")
        path = self.folder / user / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        text = json.dumps([do, words], sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            if path in self._busy:
                raise _busy()
            self._busy.add(path)
        try:
            self._prune(time.time())
            entry = _read(path, user)
            if entry is not None and entry.created < time.time() - KEPT_S:
                entry = None
            if entry is not None and entry.digest != digest:
                raise ActError(422, "Idempotency-Key: was sent with another request", remedy="use a new key for each")
            if entry is None:
                entry = Entry(path, user, do, digest, secrets.token_hex(16), time.time(), time.time())
                self._write(entry)
            if entry.answer is None:
                entry.lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                _lock(entry)
            return entry
        except BaseException:
            self._free(path)
            raise

    def end(self, entry: Entry, answer: dict[str, Any]) -> None:
        """Note what was done. Raises OSError."""
        entry.answer = answer
        self._write(entry)
        with self._lock:
            if "job_id" in answer and (jobs := self._jobs.pop(entry.user, None)) is not None and len(jobs) < _MOST_JOBS:
                self._jobs[entry.user] = jobs | {answer["job_id"]}

    def jobs(self, user: str) -> set[int]:
        """The jobs that a user's requests have: none of them is another's."""
        with self._lock:
            found, paths = self._jobs.get(user), list(self._known.get(user, ()))
        if found is None:
            entries = (_read(path, user) for path in paths)
            answers = (entry.answer for entry in entries if entry is not None and entry.answer is not None)
            found = {answer["job_id"] for answer in answers if "job_id" in answer}
            with self._lock:
                self._jobs[user] = found
        return found

    def renew(self, entry: Entry) -> None:
        """It is begun once more: nothing was done before. Raises OSError."""
        if entry.answer is None:
            entry.begun = time.time()
            self._write(entry)
            os.close(entry.lock)
            entry.lock = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _lock(entry)

    def undo(self, entry: Entry) -> None:
        """Nothing was done: the same may be asked again."""
        with suppress(FileNotFoundError):
            entry.path.unlink()
        with self._lock:
            self._known.get(entry.user, {}).pop(entry.path, None)

    def leave(self, entry: Entry) -> None:
        """The caller has no more to do with it."""
        if entry.lock >= 0:
            os.close(entry.lock)
            entry.lock = -1
        self._free(entry.path)

    def open_entries(self) -> Iterator[Entry]:
        """Those of which it is not known what became of them; each is the caller's until `leave`."""
        with self._lock:
            paths = [path for mine in self._known.values() for path in mine if path not in self._busy]
        for path in paths:
            entry = _read(path, path.parent.name)
            if entry is None or entry.answer is not None:
                continue
            with self._lock:
                if path in self._busy:
                    continue
                self._busy.add(path)
            entry.again = True
            yield entry

    def _free(self, path: Path) -> None:
        with self._lock:
            self._busy.discard(path)

    def _write(self, entry: Entry) -> None:
        document = {
            "do": entry.do,
            "digest": entry.digest,
            "mark": entry.mark,
            "created": entry.created,
            "begun": entry.begun,
            "answer": entry.answer,
        }
        entry.path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(entry.path, json.dumps(document) + "\n", mode=0o600, follow_links=False)
        with self._lock:
            self._known.setdefault(entry.user, {}).setdefault(entry.path, entry.created)

    def _prune(self, now: float) -> None:
        """Forget what is older than a day, and the oldest of those who have most."""
        gone: list[Path] = []
        with self._lock:
            if now >= self._next:
                self._next = now + _PRUNE_S
                for mine in self._known.values():
                    gone += [path for path, created in mine.items() if created < now - KEPT_S]
            large = max(self._known.values(), key=len, default={})
            if len(large) > self._of_user or sum(map(len, self._known.values())) > self._of_all:
                gone += [path for path in list(large)[:64] if path not in self._busy][: max(1, len(large) // 100)]
            for path in gone:
                self._known[path.parent.name].pop(path, None)
        for path in gone:
            with suppress(FileNotFoundError):
                path.unlink()


def _busy() -> ActError:
    return ActError(409, "a request with this key is being done", remedy="ask again with it", retry_after=1)


def _lock(entry: Entry) -> None:
    """Raises ActError 409 while a program that this process's predecessor started still acts for it."""
    try:
        fcntl.flock(entry.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(entry.lock)
        entry.lock = -1
        raise _busy() from None


def _read(path: Path, user: str) -> Entry | None:
    """None where there is none. Raises ActError 503 for one that is damaged: what was done is not known."""
    try:
        with path.open("rb") as file:
            one = json.loads(file.read(_MOST_FILE))
        texts = [str(one[name]) for name in ("do", "digest", "mark")]
        created, begun = float(one["created"]), float(one["begun"])
        return Entry(path, user, texts[0], texts[1], texts[2], created, begun, one["answer"], again=True)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ActError(503, f"{path}: damaged", remedy="an administrator looks at it and removes it") from error
