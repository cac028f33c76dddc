"""Who did what, when, and by which version of the policy file: an append-only log whose entries are chained.

An entry is one line of JSON. Its `hash` is SHA-256 over the line without it, which holds the `hash` of the entry
before: an entry that is changed, left out or put in breaks the chain from there on. `head` next to the log says how
long it is, so that a cut end shows, too. Anyone who can write both files can forge both: send the entries on as they
are made (`sluice audit export --syslog`) where that matters.

Others append through `append`: submissions and refusals, GPUs granted to and returned by jobs (`ACTIONS`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.base.text import one_line

SCHEMA_VERSION = 1
ACTIONS = frozenset({"submit", "refuse", "grant", "return"})
"""What programs other than `sluice` may append."""
ROTATE_BYTES = 64 * 1024 * 1024
_START = "0" * 64
_NAME = "audit.log"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry."""

    seq: int
    time: float  # seconds since 1970
    user: str  # who; of entries about jobs: whose job
    action: str  # e.g. "apply", "tenant create", "submit"
    subject: str  # a tenant, job or file
    detail: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""  # of the policy file
    host: str = ""
    prev: str = _START
    hash: str = ""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class AuditEvent(BaseModel):
    """What others append, one JSON object a line."""

    model_config = ConfigDict(extra="forbid")
    time: float = Field(ge=0, le=1e11)
    user: str = Field(max_length=128)
    action: str = Field(max_length=32)
    subject: str = Field(max_length=256)
    detail: dict[str, str | int | float | bool | None] = Field(default={}, max_length=64)
    version: str = Field(default="", max_length=128)


class AuditLog:
    """The log in a folder."""

    def __init__(self, folder: Path, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.folder = folder
        self.rotate_bytes = rotate_bytes

    # ---- writing ----

    def refuse_unwritable(self) -> None:
        """Raise SluiceError unless entries can be written: a change that cannot be recorded is not made."""
        try:
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise SluiceError(
                f"{self.folder}: {error.strerror}: changes cannot be recorded, so nothing is changed",
                remedy="run it as a user who may write there (root, or a member of the folder's group)",
            ) from error

    def append(
        self, user: str, action: str, subject: str, detail: Mapping[str, Any] | None = None, *, version: str = ""
    ) -> AuditEntry:
        """Add an entry of now. Raises SluiceError when the log is damaged at its end, OSError when it is unwritable."""
        return self._append([AuditEntry(0, time.time(), user, action, subject, detail or {}, version)])[0]

    def append_events(self, lines: Iterable[str]) -> int:
        """Add what others recorded: JSON lines of `AuditEvent`. Raises UsageError, adding none, if one is malformed."""
        events = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                event = AuditEvent.model_validate_json(line)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                place = ".".join(str(part) for part in first["loc"])
                raise UsageError(f"line {number}: {place}: {first['msg']}", remedy="see sluice-audit(1)") from error
            if event.action not in ACTIONS:
                raise UsageError(
                    f"line {number}: action {one_line(event.action)!r}",
                    remedy=f"use one of {', '.join(sorted(ACTIONS))}",
                )
            events.append(event)
        self.add(events)
        return len(events)

    def add(self, events: Iterable[AuditEvent]) -> None:
        """Add what happened elsewhere: all of it, or, when the writer is killed, none."""
        self._append(
            [AuditEntry(0, one.time, one.user, one.action, one.subject, one.detail, one.version) for one in events]
        )

    def _append(self, entries: list[AuditEntry]) -> list[AuditEntry]:
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        host = os.uname().nodename
        with self._locked():
            seq, last, size = self._head()
            written = []
            for entry in entries:
                seq += 1
                document = {**entry.document(), "seq": seq, "host": host, "prev": last}
                document["hash"] = last = _hash(document)
                written.append(document)
            text = "".join(_line(document) for document in written).encode()
            path = self.folder / _NAME
            if size and size + len(text) > self.rotate_bytes:
                path.rename(self.folder / f"audit-{written[0]['seq'] - 1:012}.log")
                size = 0
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(size)  # half an entry of a process that was killed
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            head = {"seq": seq, "hash": last, "size": size + len(text)}
            write_atomic(self.folder / "head", json.dumps(head) + "\n", mode=0o640)
            return [AuditEntry(**document) for document in written]

    def _head(self) -> tuple[int, str, int]:
        """Number and hash of the last entry, and the size of the file that it ends."""
        path = self.folder / _NAME
        try:
            head = json.loads((self.folder / "head").read_text())
            size = int(head["size"])
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise SluiceError(
                    f"{path}: {there} bytes, and it had {size}: it was cut off",
                    remedy="see what is missing: sluice audit verify",
                )
            seq, last = int(head["seq"]), str(head["hash"])
        except FileNotFoundError:
            if path.exists():
                raise SluiceError(f"{self.folder / 'head'}: missing", remedy="see: sluice audit verify") from None
            return 0, _START, 0
        except (ValueError, KeyError, TypeError) as error:
            raise SluiceError(f"{self.folder / 'head'}: damaged", remedy="see: sluice audit verify") from error
        # Entries that were written whole when the writer was killed before `head`.
        with (path if path.exists() else Path(os.devnull)).open("rb") as file:
            file.seek(size)
            for line in file:
                document = _parse(line) if line.endswith(b"\n") else None
                if document is None or document.get("prev") != last or _hash(document) != document.get("hash"):
                    break
                seq, last, size = int(document["seq"]), str(document["hash"]), size + len(line)
        return seq, last, size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / ".lock", flags, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # ---- reading ----

    def files(self) -> list[Path]:
        """The log's files, the oldest first."""
        return [*sorted(self.folder.glob("audit-*.log")), *([self.folder / _NAME])]

    def entries(self) -> Iterator[AuditEntry]:
        """All entries in order. Lines that are none are left out: `verify` names them. Raises SluiceError."""
        for path in self.files():
            yield from self.entries_of(path)

    def entries_of(self, path: Path) -> Iterator[AuditEntry]:
        """The entries of one file; none where there is no file. Raises SluiceError."""
        try:
            with path.open("rb") as file:
                for line in file:
                    document = _parse(line)
                    if document is not None:
                        yield AuditEntry(**document)
        except FileNotFoundError:
            return
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="run it as a user who may read it") from error

    def newest(self, most: int) -> Iterator[AuditEntry]:
        """The entries from the newest on, of about the last `most` bytes. Raises OSError."""
        for path in reversed(self.files()):
            if most <= 0 or not path.exists():
                return
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most))
                lines = file.read(most).splitlines()
            most -= size
            for line in reversed(lines):
                document = _parse(line)
                if document is not None:
                    yield AuditEntry(**document)

    def verify(self) -> tuple[int, list[str]]:
        """How many entries are in an unbroken chain, and what is wrong with the rest."""
        seq, last, problems = 0, _START, []
        for path in self.files():
            if not path.exists():
                continue
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    document = _parse(line)
                    if document is None:
                        problems.append(f"{path}:{number}: not an entry")
                        continue
                    if document["seq"] != seq + 1:
                        problems.append(f"{path}:{number}: entry {document['seq']} follows entry {seq}")
                    if document["prev"] != last:
                        problems.append(f"{path}:{number}: does not continue the entry before it")
                    if _hash(document) != document["hash"]:
                        problems.append(f"{path}:{number}: entry {document['seq']} was changed")
                    seq, last = int(document["seq"]), str(document["hash"])
        try:
            head = json.loads((self.folder / "head").read_text())
            if head["seq"] > seq or (head["seq"] == seq and head["hash"] != last):
                problems.append(f"{self.folder / 'head'}: the log ended with entry {head['seq']}, now with {seq}")
        except FileNotFoundError:
            if seq:
                problems.append(f"{self.folder / 'head'}: missing")
        except (ValueError, KeyError, TypeError):
            problems.append(f"{self.folder / 'head'}: damaged")
        return seq, problems


def _hash(document: Mapping[str, Any]) -> str:
    body = {key: value for key, value in document.items() if key != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":")) + "\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
        if set(document) == set(AuditEntry.__slots__) and isinstance(document["seq"], int):
            return dict(document)
    except (ValueError, TypeError, RecursionError):
        pass
    return None


def syslog_line(entry: AuditEntry) -> str:
    """An entry as an RFC 5424 message: facility authpriv, severity notice."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.time))
    return f"<85>1 {stamp} {entry.host or '-'} sluice - audit - {_line(entry.document()).strip()}"
