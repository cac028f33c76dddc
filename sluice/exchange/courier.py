"""Sends the records of jobs that ended from a node to the controllers, in the background, until one has stored them.

Records to be sent are in a folder, one file for each run of a job, so that no restart of the agent and no
outage of controllers for days loses a record. Runs in the agent; MUNGE proves to the controller that root of a node
sends, and the node which user answers.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.base.duties import NotYet
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.exchange.record import JobRecord, Store
from sluice.slurm.slurm_conf import read_config

VERSION = 1
DEFAULT_PORT = 6822
PORT_VARIABLE = "SLUICE_CONTROLLERD_PORT"
MAX_REQUEST = 512 << 10
"""Bytes of one request before munge encodes it; munge itself takes 1 MiB."""
_MAX_ANSWER = 2 * MAX_REQUEST  # with its credential
_MOST_RECORD = MAX_REQUEST - 1024
_MOST_REFUSED = 8  # records that are tried alone, one after the other, before there is a pause
_FIRST_WAIT, _LAST_WAIT = 2.0, 60.0  # seconds after a failure
_CONNECT_S = 5.0
_ANSWER_S = 20.0
_HOST = re.compile(r"([^()\s]{1,255})(?:\(([^()\s]{1,255})\))?\Z")
_RECORD = re.compile(r"\d{1,10}-\d{1,16}\.json")
_DEFAULT_SPOOL = "/var/spool/slurmd"
_CONFS = ("/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf")  # configless nodes have the first


def port() -> int:
    """Where the controllers listen. Raises SluiceError for a variable that is not a port."""
    text = os.environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise SluiceError(f"{PORT_VARIABLE}={text!r}: not a port", remedy="use one from 1 to 65535")
    return int(text)


@dataclass(frozen=True, slots=True)
class Controllers:
    """Addresses, the primary first, and the uids whose answers are trusted: SlurmUser's and root's.

    `user`: SlurmUser, the only one who can decode requests; None: any holder of the MUNGE key.
    """

    hosts: tuple[str, ...]
    trusted: frozenset[int]
    user: int | None = None


def _slurm_conf() -> Path | None:
    names = (Path(os.environ.get("SLURM_CONF") or ""), *map(Path, _CONFS))
    return next((name for name in names if name.is_file()), None)


def slurmd_spool() -> str:
    """SlurmdSpoolDir as slurm.conf has it, with its %n and %h; slurmd's default where it is not set."""
    found = _DEFAULT_SPOOL
    path = _slurm_conf()
    with suppress(SluiceError):
        for line in read_config(path).lines if path else ():
            for value in line.pairs:
                if value.key.lower() == "slurmdspooldir":
                    found = value.text
    return found


def controllers(conf: Path | None = None) -> Controllers:
    """The controllers, as slurm.conf has them. Raises SluiceError."""
    path = conf or _slurm_conf()
    if path is None or not path.is_file():
        raise SluiceError("no slurm.conf on this node", remedy="set SLURM_CONF to its path")
    hosts, user = [], "root"
    for line in read_config(path).lines:
        for value in line.pairs:
            match = _HOST.match(value.text) if value.key.lower() == "slurmctldhost" else None
            if match:
                hosts.append(match[2] or match[1])
            elif value.key.lower() == "slurmuser":
                user = value.text
    if not hosts:
        raise SluiceError(f"{path}: names no SlurmctldHost", remedy="add it: nodes send records of jobs there")
    try:
        uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise SluiceError(f"{path}: SlurmUser={user}: no such user on this node", remedy="add the user") from None
    return Controllers(tuple(hosts), frozenset({0, uid}), uid)


class AnswerError(SluiceError):
    """A controller has read the request, and does not accept it."""

    @property
    def said(self) -> str:
        """The controller's own words."""
        return self.what.partition("(")[2].removesuffix(")").partition(": ")[2] or self.what


class Outbox:
    """Records that are to be sent, a file for each run of a job: the store has a requeued job's last run only."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.on_put: Callable[[], None] = lambda: None
        self._refused: set[Path] = set()  # by the controllers, when they were asked last

    def prepare(self) -> None:
        """Make the folder; take over the empty files by which earlier versions named records. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob("*.json"):
            if path.stem.isdecimal():
                with suppress(SluiceError):
                    self.put(self.store.load(int(path.stem)))
                path.unlink(missing_ok=True)

    def put(self, record: JobRecord) -> None:
        """Store a record to be sent. Raises OSError."""
        name = f"{record.job}-{round(record.started * 1000)}.json"
        write_atomic(self.folder / name, record.to_json(), mode=0o600, follow_links=False)
        self.on_put()

    def waiting(self) -> list[int]:
        """The jobs whose records are to be sent, the oldest first; each as often as it ran."""
        return [int(path.name.partition("-")[0]) for path in self._files()]

    def _files(self) -> list[Path]:
        found = []
        for path in self.folder.glob("*.json"):
            with suppress(OSError):
                if _RECORD.fullmatch(path.name):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _next(self, done: Collection[Path]) -> list[Path]:
        """What is to be sent, the oldest first; what was refused before when there is nothing else."""
        left = [path for path in self._files() if path not in done]
        return [path for path in left if path not in self._refused] or left

    def prune(self, before: float) -> None:
        """Remove what has waited since before a time, as its record is gone too."""
        for path in self._files():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()

    def batch(self, paths: list[Path]) -> tuple[list[tuple[Path, str, tuple[int, int]]], list[Path]]:
        """Files, records and marks for one request, and the files that cannot be sent."""
        taken: list[tuple[Path, str, tuple[int, int]]] = []
        bad: list[Path] = []
        size = 0
        for path in paths:
            mark = _mark(path)
            try:
                text = _small(JobRecord.from_json(path.read_text(), str(path))).to_json().strip()
            except (FileNotFoundError, SluiceError, UnicodeDecodeError):
                bad.append(path)
                continue
            if len(text) > _MOST_RECORD:
                log(
                    "problem", what=f"{path}: {len(text)} bytes are not sent", remedy=f"it stays in {self.store.folder}"
                )
                bad.append(path)
                continue
            size += len(text) + 2
            if taken and size > _MOST_RECORD:
                break
            taken.append((path, text, mark))
        return taken, bad

    def send(self, to: Controllers, where: int) -> int:
        """Send what waits, one request at a time; how many were stored. Raises SluiceError when no controller accepts
        it.

        What the controllers do not accept is sent alone, and waits behind the others.
        """
        sent, alone = 0, 0
        refused: dict[Path, AnswerError] = {}
        while paths := self._next(refused):
            request = _Request(self, paths[:1] if alone else paths)
            try:
                ask(to, where, request.payload)
            except AnswerError as error:
                if len(request.taken) > 1:
                    alone = len(request.taken)
                    continue
                refused |= dict.fromkeys([path for path, _, _ in request.taken] or paths[:1], error)
                if len(refused) >= _MOST_REFUSED:
                    break
            else:
                sent += len(request.taken)
                request.forget()
            alone = max(0, alone - 1)
        self._refused = {path for path in (*refused, *self._refused) if path.exists()}
        if refused:
            raise next(iter(refused.values()))
        return sent


class _Request:
    """The first of some files that fit together, read again for each controller that is asked."""

    def __init__(self, outbox: Outbox, paths: list[Path]) -> None:
        self._outbox = outbox
        self._paths = paths
        self.taken: list[tuple[Path, str, tuple[int, int]]] = []  # with their texts and marks
        self._bad: list[Path] = []

    def payload(self) -> bytes:
        """The request."""
        self.taken, self._bad = self._outbox.batch(self._paths)
        texts = ",".join(text for _, text, _ in self.taken)
        return f'{{"version":{VERSION},"do":"records","records":[{texts}]}}'.encode()

    def forget(self) -> None:
        """It is stored: remove the files, and those that cannot be sent."""
        for path in self._bad:
            path.unlink(missing_ok=True)
        for path, _, mark in self.taken:
            if _mark(path) == mark:  # else it was written again in the meantime
                path.unlink(missing_ok=True)


def _mark(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError:
        return 0, 0
    return state.st_ino, state.st_mtime_ns


def _small(record: JobRecord) -> JobRecord:
    """The record, without its last events where it would not fit into a request."""
    while len(record.to_json()) > MAX_REQUEST // 2 and record.events:
        gone = len(record.events) - len(record.events) // 2
        record.events = record.events[: len(record.events) // 2]
        record.events_left_out += gone
    return record


def ask(to: Controllers, where: int, payload: bytes | Callable[[], bytes]) -> dict[str, Any]:
    """Ask the controllers in turn; the answer of the first that accepts it. Raises SluiceError when none does, and
    AnswerError when one has read it.

    `payload` may be a function, which is called for each controller that listens: a large payload is not built
    while there is none.
    """
    failures = []
    kind = SluiceError
    for host in to.hosts:
        try:
            return _ask_one(host, where, payload, to)
        except (OSError, SluiceError) as error:
            failures.append(f"{host}: {getattr(error, 'strerror', None) or error}")
            kind = AnswerError if isinstance(error, AnswerError) else kind
    raise kind(
        f"no controller accepts requests on port {where} ({'; '.join(failures)})",
        remedy="start sluice-controllerd on the controllers; records of jobs wait on the nodes until then",
    )


def _ask_one(host: str, where: int, payload: bytes | Callable[[], bytes], to: Controllers) -> dict[str, Any]:
    from sluice.slurm.munge import decode, encode
    from sluice.slurm.munge_service import connect

    with connect(host, where, _CONNECT_S) as connection:
        request = encode(payload() if callable(payload) else payload, readable_by=to.user)
        connection.sendall(request.encode() + b"\n")
        connection.settimeout(_ANSWER_S)
        data, until = b"", time.monotonic() + _ANSWER_S
        while not data.endswith(b"\n"):
            part = connection.recv(1 << 16)
            data += part
            if not part or len(data) > _MAX_ANSWER or time.monotonic() > until:
                raise SluiceError("closed the connection; check that it leads, and that MUNGE keys and clocks agree")
    message = decode(data.decode("ascii", "replace").strip())
    if message.uid not in to.trusted:
        raise SluiceError(f"the answer is from uid {message.uid}, not from SlurmUser")
    try:
        answer = json.loads(message.payload)
    except ValueError as error:
        raise SluiceError("the answer is not JSON") from error
    if not isinstance(answer, dict) or "ok" not in answer:
        raise AnswerError(str(answer.get("error", "no answer") if isinstance(answer, dict) else "no answer")[:500])
    return dict(answer["ok"])


class Courier:
    """Sends the outbox, and waits longer after each failure. `asking`: around each attempt (`Uplink.asking`)."""

    def __init__(self, outbox: Outbox, asking: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.outbox = outbox
        self._asking = asking
        self._wait = 0.0
        self._next = 0.0

    def run(self) -> float | None:
        """A duty of the agent; seconds until the next try. Raises SluiceError when no controller accepts what waits."""
        now = time.monotonic()
        if now < self._next:
            return NotYet(self._next - now)
        if not self.outbox.waiting():
            return None
        try:
            with self._asking():
                sent = self.outbox.send(controllers(), port())
        except SluiceError:
            self._wait = min(max(2 * self._wait, _FIRST_WAIT), _LAST_WAIT)
            self._next = time.monotonic() + self._wait
            raise
        self._wait = 0.0
        log("sent", records=sent)
        return None
