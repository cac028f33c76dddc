"""A batch on disk: what is to do, what has a result, and its ends.

Its folder has `batch.json`, `input` (a link to the file), `output` and `errors` (lines as OpenAI has them), `index` (a
line for each time that results were stored, with the sizes that the other two have then), `heard` and `lock`. A result
counts when its line of the index is there; what output and errors have more is cut off before anything is added. So
whatever dies, and wherever, each line of the input has one result; bills of one line have one id, so that one of them
counts. Changes are made under a lock that all gateways share. All functions block.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from sluice.base.files import write_atomic
from sluice.exchange.batches import GIVEN, MOST_GIVEN, MOST_LINE
from sluice.exchange.requests import BATCHES, RequestRecord
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.shelf import MOST_ENTRIES, Owner, Shelf, locked, new_id, not_there, read_document, write_all
from sluice.serve.gateway.usage import Usage

BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{40}\Z")
LIVING: Final = ("in_progress", "cancelling")
MOST_LIVING: Final = 50
"""Batches of one user in one tenant that are not over."""
MOST_RESULTS: Final = 256
"""That are stored at a time."""
_MOST_READ: Final = 16 << 20  # of the input at a time, for lines without a result
_TAIL: Final = 16 << 10  # longer than a line of the index
_ROOM_S: Final = 30.0
_MOST_KNOWN: Final = 64
_BYTES_A_TOKEN: Final = 4
_CODES: Final = {"expired": "batch_expired", "cancelled": "batch_cancelled"}
_NOT_DONE: Final = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed before the batch was cancelled.",
}

Bill = Callable[[RequestRecord], None]
"""Writes a usage record. Raises OSError."""


@dataclass(slots=True)
class Totals:
    """What the last line of an index says."""

    completed: int = 0
    failed: int = 0
    output: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Progress:
    """What an index says, as far as it was read."""

    done: bytearray
    """By line: whether it has a result."""
    at: int = 0
    totals: Totals = field(default_factory=Totals)
    room_at: float = 0.0
    """When the tenant's room was looked at."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a batch is created with."""

    file: str
    endpoint: str
    window_s: int
    window: str
    model: str
    metadata: dict[str, str] | None
    key: str
    """Public part of the caller's key."""
    errors: list[dict[str, Any]]
    mark: str = ""
    """Of its id, where the same request gets the same batch."""


class Batches:
    """All batches of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._known: OrderedDict[Path, Progress] = OrderedDict()

    # ---- documents ----

    def folder(self, owner: Owner, name: str) -> Path:
        """Where a batch is. Raises RefusalError, the same for one that is not there and one of another caller."""
        if BATCH_ID.match(name):
            path = self.shelf.of(owner, "batches") / name
            if (path / "batch.json").exists():
                return path
        raise not_there("batch", name)

    def read(self, owner: Owner, name: str) -> dict[str, Any]:
        """What is known of a batch, with its counts as they are now. Raises RefusalError."""
        path = self.folder(owner, name)
        document = read_document(path / "batch.json")
        if document is None:
            raise not_there("batch", name)
        if document["status"] in LIVING:
            document["totals"] = _totals(_last(path / "index"))
        return document

    def names(self, owner: Owner) -> list[str]:
        """All of somebody's, the newest first. Raises RefusalError."""
        with suppress(FileNotFoundError):
            return sorted(filter(BATCH_ID.match, os.listdir(self.shelf.of(owner, "batches"))), reverse=True)
        return []

    def create(self, owner: Owner, asked: Asked) -> dict[str, Any]:
        """A batch; one that has failed where its file is wrong. Raises RefusalError, OSError."""
        folder = self.shelf.of(owner, "batches")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder.with_name(".batches.lock")):
            return self._create(owner, asked, folder)

    def _create(self, owner: Owner, asked: Asked, folder: Path) -> dict[str, Any]:
        names = self.names(owner)
        if asked.mark:
            for name in names:
                if name.endswith(asked.mark):
                    return self.read(owner, name)
        living = sum(1 for name in names if self._status(owner, name) in LIVING)
        if len(names) >= MOST_ENTRIES or living >= MOST_LIVING:
            raise RefusalError(
                429, f"user {owner.user}: has {living} batches that are not over, {len(names)} in all",
                remedy=f"{MOST_LIVING} and {MOST_ENTRIES} are possible; wait until some are over",
                code="too_many_batches",
            )  # fmt: skip
        contents = self.shelf.file(owner, asked.file)["contents"]
        now = int(time.time())
        name = new_id("batch_", asked.mark)
        document = {
            "id": name, "tenant": owner.tenant, "user": owner.user, "key": asked.key, "endpoint": asked.endpoint,
            "model": asked.model, "input_file_id": asked.file, "completion_window": asked.window, "created_at": now,
            "expires_at": now + asked.window_s, "metadata": asked.metadata, "rows": contents["rows"],
            "requests": contents["requests"], "status": "in_progress", "in_progress_at": now, "errors": asked.errors,
            "totals": _totals(None), "job": None, "tries": 0, "submitted_at": 0,
        }  # fmt: skip
        if asked.errors:
            document |= {"status": "failed", "in_progress_at": None, "failed_at": now}
        made = folder / f".{name}"
        made.mkdir(mode=0o700)
        try:
            os.link(self.shelf.data(owner, asked.file), made / "input")
            _write(made, document)
            made.rename(folder / name)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return document

    def _status(self, owner: Owner, name: str) -> str:
        found = read_document(self.shelf.of(owner, "batches") / name / "batch.json")
        return "" if found is None else str(found["status"])

    @contextmanager
    def change(self, owner: Owner, name: str) -> Iterator[dict[str, Any]]:
        """A batch that nobody else changes meanwhile; what is changed in it is kept. Raises RefusalError, OSError."""
        path = self.folder(owner, name)
        with locked(path / "lock"):
            document = read_document(path / "batch.json")
            if document is None:
                raise not_there("batch", name)
            before = dict(document)
            yield document
            if document != before:
                _write(path, document)

    def heard(self, owner: Owner, name: str) -> float:
        """When its job has said something. Raises OSError."""
        with suppress(FileNotFoundError):
            return (self.folder(owner, name) / "heard").stat().st_mtime
        return 0.0

    # ---- results ----

    def exchange(
        self, owner: Owner, name: str, said: dict[str, Any], bill: Bill, *, has_budget: bool
    ) -> dict[str, Any]:
        """Store what a batch's job has said; what it is to do. Raises RefusalError, OSError."""
        path = self.folder(owner, name)
        with self.change(owner, name) as document:
            (path / "heard").touch(mode=0o600)
            if document["status"] not in LIVING:
                return {"do": "stop"}
            progress = self._progress(path, document)
            self._store(path, document, progress, _results(said, document["rows"]), bill)
            self._ends(owner, document, progress, str(said.get("why") or ""), has_budget=has_budget)
            if document["status"] != "in_progress":
                return {"do": "stop"}
            done = bytes(progress.done)
        if "at" not in said:
            return {"do": "go on"}
        at, requests = _lines_from(path / "input", said["at"], done)
        return {"do": "go on", "at": at, "requests": requests}

    def _ends(self, owner: Owner, document: dict[str, Any], progress: Progress, why: str, *, has_budget: bool) -> None:
        """End it where it has an end."""
        if progress.totals.completed + progress.totals.failed >= document["requests"]:
            self.finish(owner, document, "completed")
        elif document["status"] == "cancelling":
            return
        elif time.time() > document["expires_at"]:
            self.finish(owner, document, "expired")
        elif why:
            self.finish(owner, document, "failed", "engine_failed", why[:1000])
        elif not has_budget:
            said = f"tenant {owner.tenant}: has used its tokens of this period; see: sluice report services"
            self.finish(owner, document, "failed", "insufficient_quota", said)
        elif time.time() > progress.room_at + _ROOM_S:
            progress.room_at = time.time()
            try:
                self.shelf.check_room(owner.tenant)
            except RefusalError as refusal:
                self.finish(owner, document, "failed", refusal.code or "", str(refusal))

    def _progress(self, path: Path, document: dict[str, Any]) -> Progress:
        """What has a result; output and errors end with it. Under the lock. Raises OSError."""
        progress = self._known.pop(path, None) or Progress(bytearray(document["rows"] + 1))
        self._known[path] = progress
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        with suppress(FileNotFoundError), (path / "index").open("rb") as file:
            file.seek(progress.at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                progress.at += len(line)
                words = json.loads(line)
                for number in words["lines"]:
                    progress.done[number] = 1
                progress.totals = Totals(**words["totals"])
        for name, size in (
            ("index", progress.at),
            ("output", progress.totals.output),
            ("errors", progress.totals.errors),
        ):
            with suppress(FileNotFoundError):
                if (path / name).stat().st_size > size:
                    os.truncate(path / name, size)
        return progress

    def _store(
        self,
        path: Path,
        document: dict[str, Any],
        progress: Progress,
        results: Iterable[tuple[int, str, int, Any]],
        bill: Bill,
    ) -> None:
        """Those of lines that have no result yet: the bills first, then the answers. Raises OSError."""
        found: dict[int, bytes] = {}
        totals = replace(progress.totals)
        output, errors = bytearray(), bytearray()
        for line, custom_id, status, body in results:
            if progress.done[line] or line in found:
                continue
            ok = status == 200
            tokens = _tokens(body) if ok else (0, 0, 0)
            bill(_record(document, line, status, tokens))
            found[line] = b""
            response = (
                None if not status else {"status_code": status, "request_id": _line_id(document, line), "body": body}
            )
            error = None if status else {"code": "request_failed", "message": str(body)[:1000]}
            (output if ok else errors).extend(_result(document, line, custom_id, response, error))
            totals.completed, totals.failed = totals.completed + ok, totals.failed + (not ok)
            totals.prompt_tokens, totals.completion_tokens = (
                totals.prompt_tokens + tokens[0], totals.completion_tokens + tokens[1]
            )  # fmt: skip
        if found:
            self._commit(path, progress, totals, list(found), bytes(output), bytes(errors))

    def _commit(
        self, path: Path, progress: Progress, totals: Totals, lines: list[int], output: bytes, errors: bytes
    ) -> None:
        for name, data in (("output", output), ("errors", errors)):
            if data:
                _append(path / name, data)
        totals.output, totals.errors = totals.output + len(output), totals.errors + len(errors)
        words = json.dumps({"lines": lines, "totals": asdict(totals)}, separators=(",", ":")).encode() + b"\n"
        _append(path / "index", words)
        progress.at += len(words)
        progress.totals = totals
        for line in lines:
            progress.done[line] = 1

    # ---- ends ----

    def finish(self, owner: Owner, document: dict[str, Any], status: str, code: str = "", message: str = "") -> None:
        """End a batch, within `change`: its files, and an error for each line without a result. Raises OSError."""
        path = self.folder(owner, document["id"])
        progress = self._progress(path, document)
        if status != "completed":
            self._give_up(path, document, progress, code or _CODES[status], message or _NOT_DONE[status])
        now = int(time.time())
        totals = progress.totals
        for name, field_, size in (
            ("output", "output_file_id", totals.output),
            ("errors", "error_file_id", totals.errors),
        ):
            if size:
                named = f"file-{document['created_at']:08x}{self.shelf.token(document['id'] + name)[:32]}"
                self.shelf.keep(owner, named, path / name, f"{document['id']}_{name}.jsonl")
                document[field_] = named
        if status == "failed":
            document["errors"] = [{"code": code, "message": message, "param": None, "line": None}]
        document |= {
            "status": status, f"{status}_at": now, "finalizing_at": now, "totals": asdict(totals)
        }  # fmt: skip
        _write(path, document)
        self._known.pop(path, None)
        for name in ("input", "index", "output", "errors"):
            (path / name).unlink(missing_ok=True)

    def _give_up(self, path: Path, document: dict[str, Any], progress: Progress, code: str, message: str) -> None:
        """An error for each line without a result."""
        at: list[int] | None = [0, 0]
        while at is not None:
            at, requests = _lines_from(path / "input", at, bytes(progress.done))
            if requests:
                totals = replace(progress.totals)
                totals.failed += len(requests)
                error = {"code": code, "message": message}
                lines = [_result(document, line, _custom_id(text), None, error) for line, text in requests]
                self._commit(path, progress, totals, [line for line, _ in requests], b"", b"".join(lines))


def _results(said: dict[str, Any], rows: int) -> list[tuple[int, str, int, Any]]:
    """What a job has sent, as far as it can be. Raises RefusalError."""
    results = said.get("results", [])
    if not isinstance(results, list) or len(results) > MOST_RESULTS:
        raise RefusalError(400, f"results: not a list of at most {MOST_RESULTS}", remedy="run one version of Sluice")
    found = []
    for one in results:
        if not isinstance(one, list) or len(one) != 4:
            raise RefusalError(400, "results: not [LINE, CUSTOM_ID, STATUS, BODY]", remedy="run one version of Sluice")
        line, name, status, body = one
        if type(line) is not int or not 0 < line <= rows or type(status) is not int or not 0 <= status < 1000:
            raise RefusalError(400, f"results: line {str(line)[:20]}", remedy="run one version of Sluice")
        found.append((line, str(name)[:512], status, body))
    return found


def _lines_from(path: Path, at: Any, done: bytes) -> tuple[list[int] | None, list[tuple[int, str]]]:
    """Lines of a file that have no result, with their numbers, and where to go on. Raises RefusalError, OSError."""
    if at is None:
        at = [0, 0]
    if not isinstance(at, list) or len(at) != 2 or not all(type(one) is int and 0 <= one < 1 << 40 for one in at):
        raise RefusalError(400, "at: not a place that a gateway has given", remedy="run one version of Sluice")
    place, number = at
    found: list[tuple[int, str]] = []
    size, begin = 0, place
    try:
        with path.open("rb") as file:
            file.seek(place)
            while len(found) < GIVEN and size < MOST_GIVEN and place - begin < _MOST_READ:
                line = file.readline(MOST_LINE + 2)
                if not line:
                    return None, found
                place, number = place + len(line), number + 1
                if number < len(done) and not done[number] and (text := line.strip()):
                    found.append((number, text.decode("utf-8", "replace")))
                    size += len(text)
    except FileNotFoundError:  # the batch is over
        return None, []
    return [place, number], found


def _custom_id(text: str) -> str:
    try:
        return str(json.loads(text)["custom_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _result(document: dict[str, Any], line: int, custom_id: str, response: Any, error: Any) -> bytes:
    words = {
        "id": f"batch_req_{_line_id(document, line)}", "custom_id": custom_id, "response": response, "error": error
    }  # fmt: skip
    return json.dumps(words, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def _line_id(document: dict[str, Any], line: int) -> str:
    """The same for each bill of a line."""
    return blake2b(f"{document['id']}:{line}".encode(), digest_size=16).hexdigest()


def _tokens(body: Any) -> tuple[int, int, int]:
    """Of the prompt, of the answer, and cached ones: what the job's engine says, else what the answer's length says."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if isinstance(usage, dict):
        found = Usage(usage)
        return found.prompt, found.completion, found.cached
    return 0, len(json.dumps(body)) // _BYTES_A_TOKEN, 0


def _record(document: dict[str, Any], line: int, status: int, tokens: tuple[int, int, int]) -> RequestRecord:
    now = time.time()
    return RequestRecord(
        _line_id(document, line), now, now, document["key"], document["user"], document["tenant"], document["model"],
        document["job"] or 0, *tokens, "ok" if status == 200 else "failed", status or 502, 0.0, None, 0.0, BATCHES,
    )  # fmt: skip


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _last(path: Path) -> bytes | None:
    """The last whole line of an index."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        whole = [line for line in file if line.endswith(b"\n")]
        return whole[-1] if whole else None
    return None


def _totals(line: bytes | None) -> dict[str, int]:
    return asdict(Totals()) if line is None else dict(json.loads(line)["totals"])


def _write(path: Path, document: dict[str, Any]) -> None:
    write_atomic(path / "batch.json", json.dumps(document), mode=0o600, follow_links=False)
