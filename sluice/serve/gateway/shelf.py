"""Files of callers, in a folder that all gateways share and that nobody else can read.

    TENANT/USER/files/ID.json ID.data          what was uploaded, and what batches answered
    TENANT/USER/batches/ID/                    see batch_state.py

A file is looked for in the folder of the user and tenant of the key that asks alone, so that one that is not there and
one that is somebody else's are the same. Its id has 128 random bits. A file that is being written has its whole size
from the begin, so that quotas hold whoever writes at once. All functions block.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policy.service_jobs import BatchPolicy, ServicesFile
from sluice.base.files import write_atomic
from sluice.serve.batch.lines import Contents, Lines
from sluice.serve.gateway.refusals import RefusalError

MOST_FILE: Final = 200 << 20
"""Bytes of a file."""
MOST_ENTRIES: Final = 1000
"""Files, and batches, of one user in one tenant."""
FILE_ID: Final = re.compile(r"file-[0-9a-f]{40}\Z")
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$-]{0,127}\Z")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_OLD_S: Final = 86_400.0  # what has no document then has no writer any more


log = logging.getLogger("sluice.gateway")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose files they are: a user's, in one tenant."""

    tenant: str
    user: str


class Shelf:
    """The folder. `quota`: bytes of each tenant; `keep_s`: how long anything stays."""

    def __init__(self, folder: Path, quota: int, keep_s: float) -> None:
        self.folder = folder
        self.quota = quota
        self.keep_s = keep_s
        self._secret = b""

    def prepare(self) -> None:
        """Make the folder, if its own folder is there; `token` does not block from then on.

        Raises RefusalError where others may read it, OSError.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.stat().st_mode & 0o077:
            log.error("%s: others may read it; chmod 700 %s", self.folder, self.folder)
            raise RefusalError(
                503, "files: others could read them here", remedy="tell an admin to see the log of sluice-gateway"
            )
        self._key()

    def of(self, owner: Owner, kind: str) -> Path:
        """The folder of somebody's `files` or `batches`. Raises RefusalError for names that are no parts of a path."""
        if not (_PART.match(owner.tenant) and _PART.match(owner.user)):
            raise RefusalError(
                403, f"user {owner.user[:80]!a} of {owner.tenant[:80]!a}: has no files", remedy="ask an admin"
            )
        return self.folder / owner.tenant / owner.user / kind

    def token(self, words: str) -> str:
        """What only gateways can make of these words. Raises OSError."""
        return hmac.digest(self._key(), words.encode(), "sha256").hex()

    def _key(self) -> bytes:
        """The gateways' secret; the first one that asks makes it."""
        if not self._secret:
            path = self.folder / ".secret"
            if not path.exists():
                fresh = self.folder / f".secret.{secrets.token_hex(8)}"
                write_atomic(fresh, secrets.token_bytes(32), mode=0o600, follow_links=False)
                with suppress(FileExistsError):
                    os.link(fresh, path)
                fresh.unlink()
            self._secret = path.read_bytes()
        return self._secret

    # ---- room ----

    def check_room(self, tenant: str) -> None:
        """Raises RefusalError where a tenant's files are more than its quota."""
        used = sum(_sizes(self.folder / tenant))
        if used > self.quota:
            raise RefusalError(
                403, f"tenant {tenant}: its files take {used} bytes of {self.quota}",
                remedy="delete some: files.delete(ID)", code="storage_quota_exceeded",
            )  # fmt: skip

    # ---- files ----

    def begin(self, owner: Owner, size: int) -> Incoming:
        """A new file of at most `size` bytes. Raises RefusalError, OSError."""
        folder = self.of(owner, "files")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(1 for _ in folder.glob("file-*.json")) >= MOST_ENTRIES:
            raise RefusalError(
                403, f"user {owner.user}: has {MOST_ENTRIES} files", remedy="delete some", code="too_many_files"
            )
        incoming = Incoming(folder, size)
        try:
            self.check_room(owner.tenant)
        except BaseException:
            incoming.drop()
            raise
        return incoming

    def file(self, owner: Owner, name: str) -> dict[str, Any]:
        """What is known of a file. Raises RefusalError, the same for one that is not there and one of others."""
        if FILE_ID.match(name):
            found = read_document(self.of(owner, "files") / f"{name}.json")
            if found is not None and found["expires_at"] > time.time():
                return found
        raise not_there("file", name)

    def data(self, owner: Owner, name: str) -> Path:
        """Where its bytes are. Raises RefusalError."""
        self.file(owner, name)
        return self.of(owner, "files") / f"{name}.data"

    def files(self, owner: Owner) -> list[dict[str, Any]]:
        """All of somebody's, the newest first, without what is in them. Raises RefusalError."""
        now, found = time.time(), []
        for path in sorted(self.of(owner, "files").glob("file-*.json"), reverse=True):
            one = read_document(path)
            if one is not None and one["expires_at"] > now:
                one.pop("contents", None)
                found.append(one)
        return found

    def remove(self, owner: Owner, name: str) -> None:
        """Remove a file; a batch that needs it has a link of its own. Raises RefusalError, OSError."""
        self.file(owner, name)
        _unlink_file(self.of(owner, "files"), name)

    def keep(self, owner: Owner, name: str, source: Path, filename: str) -> None:
        """Make a file of what a batch has written; again, nothing is changed. Raises OSError."""
        folder = self.of(owner, "files")
        with suppress(FileExistsError):
            os.link(source, folder / f"{name}.data")
        document = _document(name, source.stat().st_size, filename, "batch_output", time.time() + self.keep_s)
        _write(folder, document)

    # ---- what is old ----

    def prune(self, now: float) -> int:
        """Remove what has been kept for long enough; how much. Raises OSError."""
        removed = 0
        for path in self.folder.glob("*/*/files/*"):
            if path.suffix == ".json":
                one = read_document(path)
                if one is not None and one["expires_at"] <= now:
                    _unlink_file(path.parent, path.stem)
                    removed += 1
            elif not path.with_suffix(".json").exists() and _changed(path) < now - _OLD_S:
                path.unlink(missing_ok=True)
        for folder in self.folder.glob("*/*/batches/*"):
            one = read_document(folder / "batch.json")
            over = _changed(folder) if one is None else one.get("finalizing_at") or one["expires_at"]
            if over < now - self.keep_s:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed


def shelf_of(policy: BatchPolicy) -> Shelf:
    """The folder that a policy names."""
    return Shelf(Path(policy.folder), policy.quota << 20, float(policy.keep))


def prune_files(services: Path, now: float) -> None:
    """Remove what is old, by the policy in a file. Raises OSError."""
    policy = ServicesFile(services).current().batches
    if policy is not None and (removed := shelf_of(policy).prune(now)):
        log.info("%s: %d files and batches removed", policy.folder, removed)


class Incoming:
    """A file that is being written."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = 0
        self._folder = folder
        self._most = size
        self._path = folder / f".{secrets.token_hex(16)}"
        self._lines = Lines()
        self._lock = threading.Lock()  # it may be dropped while a thread writes
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, size)

    def write(self, data: bytes) -> None:
        """Its next bytes. Raises RefusalError, OSError."""
        self.size += len(data)
        if self.size > self._most:
            raise RefusalError(
                413, f"file: more than {self._most} bytes", remedy="split it", code="request_too_large", param="file"
            )
        with self._lock:
            write_all(self._descriptor, data)
        self._lines.feed(data)

    def done(self, filename: str, expires_at: float) -> dict[str, Any]:
        """It is complete: what is known of it. Raises OSError."""
        contents = self._lines.end()
        name = new_id("file-")
        with self._lock:
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
            self._path.replace(self._folder / f"{name}.data")
        document = _document(name, self.size, filename, "batch", expires_at, contents)
        try:
            _write(self._folder, document)
        except OSError:
            _unlink_file(self._folder, name)
            raise
        return document

    def drop(self) -> None:
        """It is over; what was not completed is removed."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                self._path.unlink(missing_ok=True)


def new_id(prefix: str, mark: str = "") -> str:
    """An id that sorts by its time and cannot be guessed. `mark`: 32 digits of it that are known; it then sorts by the
    second."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    return f"{prefix}{seconds:08x}{mark or f'{rest:08x}{secrets.token_hex(12)}'}"


def not_there(what: str, name: str) -> RefusalError:
    """For an id of a file or a batch, whatever the reason."""
    where = {"file": "/v1/files", "batch": "/v1/batches"}[what]
    return RefusalError(
        404, f"{what} {name[:80]!a}: not there, or not yours", remedy=f"GET {where} lists yours", code="not_found",
        param=f"{what}_id",
    )  # fmt: skip


def full(error: OSError) -> bool:
    """Whether a disk has no more room."""
    return error.errno in _FULL


def write_all(descriptor: int, data: bytes) -> None:
    """All of it. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_document(path: Path) -> dict[str, Any] | None:
    """An object of JSON that a gateway wrote; None where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time, of all gateways. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _document(
    name: str, size: int, filename: str, purpose: str, expires_at: float, contents: Contents | None = None
) -> dict[str, Any]:
    found = {
        "id": name, "bytes": size, "filename": filename, "purpose": purpose, "created_at": int(time.time()),
        "expires_at": int(expires_at),
    }  # fmt: skip
    if contents is not None:
        found["contents"] = {
            "rows": contents.rows, "requests": contents.requests, "url": contents.url, "model": contents.model,
            "errors": contents.errors,
        }  # fmt: skip
    return found


def _write(folder: Path, document: dict[str, Any]) -> None:
    write_atomic(folder / f"{document['id']}.json", json.dumps(document), mode=0o600, follow_links=False)


def _unlink_file(folder: Path, name: str) -> None:
    for suffix in ("json", "data"):
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def _changed(path: Path) -> float:
    """When it got its name; now, where it has lost it meanwhile."""
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return time.time()


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes of the files below; those of two names count once."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for one in entries:
            if one.is_dir(follow_symlinks=False):
                yield from _sizes(Path(one.path))
            else:
                with suppress(FileNotFoundError):
                    facts = one.stat(follow_symlinks=False)
                    yield facts.st_size // facts.st_nlink
