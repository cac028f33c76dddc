"""Pieces over UCX, so that RDMA moves them; what is said of them, and by whom, stays in TLS.

A connection that has shown the key is asked for UCX. The one that gives answers with a new key, or with zeros; the one
that takes then sends the address at which it receives, and hears in a byte whether the other one can send there: if
not, the connection goes on by TLS. Each has a process for this connection, `sluice-ucx`
(native/ucx), which knows UCX and nothing else: UCX neither encrypts nor proves who sends, and memory that is registered
for RDMA may be read by others' adapters. So parts of pieces are encrypted here by AES-256-GCM, the number of the part
being the nonce, and only that is in the memory that both share. What does not decrypt is not used, and a piece is
compared with its SHA-256 as one that came by TLS.

Whatever fails, a process or a connection, raises UcxError; who takes asks the same peer again, by TLS.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import sluice
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.exchange.serving import DataPath
from sluice.serve.replica.path import exactly
from sluice.serve.replica.pieces import PART

PROGRAM = Path(sluice.__file__).parent / "core" / "sluice-ucx"
MOST = 8
"""Connections of a replica with UCX at once, both directions: each has a process, its memory and a part of an adapter.
Further ones have TLS."""
MOST_FAILURES = 3
"""Until it is used no more, where nothing has ever come: as where adapters do not reach each other."""
START_S = 10.0
KEY = 32
_NO_KEY = bytes(KEY)
_TAG, _NONCE = 16, 12
_SLOTS = 4  # parts that are on their way at once
_SLOT = PART + mmap.PAGESIZE
_ORDER = struct.Struct("=II")  # as in native/ucx/main.c
_SIZE = struct.Struct("=I")
_LENGTH = struct.Struct(">H")  # of an address
_MOST_ADDRESS = 16384
_READY, _DONE, _FAILED = b"R", b"D", b"F"
_YES, _NO = b"\1", b"\0"
_OWN = {
    "UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n",
}  # fmt: skip
"""It allocates what it registers once, and says itself what is wrong."""
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""They are the engine's: UCX's modules would open them."""


class UcxError(OSError):
    """This connection cannot go on with UCX. The peer may be well."""


class Ucx:
    """What a replica has of UCX, for all of its connections. Thread-safe."""

    def __init__(self, wanted: DataPath) -> None:
        """`wanted`: `auto` with RDMA alone, `ucx` also without, `tcp` never."""
        self.taken = 0
        """Bytes of pieces that came so."""
        self._wanted = wanted
        self._lock = threading.Lock()
        self._usable: bool | None = None  # None: nobody has asked yet
        self._places = threading.BoundedSemaphore(MOST)
        self._said: set[str] = set()
        self._failures = 0

    def take(self, connection: ssl.SSLSocket, question: bytes) -> UcxPath | None:
        """A path to receive by, if both ends have UCX: by asking this. Raises OSError."""
        place = self._enter()
        if place is None:
            return None
        with ExitStack() as undo:
            undo.callback(place.release)
            connection.sendall(question)
            key = bytes(exactly(connection, KEY))
            if key == _NO_KEY:
                self._say("another replica has no UCX, or no place left for it")
                return None
            path = UcxPath("take", connection, key, self._wanted, place.release, self._add)
            undo.pop_all()  # the path has the place
            undo.callback(path.close)
            connection.sendall(_LENGTH.pack(len(path.address)) + path.address)
            if exactly(connection, len(_YES)) == _YES:
                undo.pop_all()
                return path
            self.failed()
            self._say("UCX failed at another replica, whose output says why")
        return None

    def give(self, connection: ssl.SSLSocket) -> UcxPath | None:
        """Answer the question: a path to send by. Raises OSError."""
        place = self._enter()
        if place is None:
            connection.sendall(_NO_KEY)
            return None
        with ExitStack() as undo:
            undo.callback(place.release)
            key = os.urandom(KEY)
            connection.sendall(key)
            (length,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
            address = bytes(exactly(connection, length))
            try:
                if not 0 < length <= _MOST_ADDRESS:
                    raise UcxError(f"an address of {length} bytes")
                path = UcxPath("give", connection, key, self._wanted, place.release, self._add, address)
            except UcxError as error:
                log("ucx-failed", what=error)
                connection.sendall(_NO)
                return None
            undo.pop_all()  # the path has the place
            undo.callback(path.close)
            connection.sendall(_YES)
            undo.pop_all()
            return path

    def failed(self) -> None:
        """With a peer: UcxError."""
        with self._lock:
            self._failures += 1
            if self._usable and self._failures >= MOST_FAILURES and not self.taken:
                self._usable = False
                log("data-path", path="tcp", why=f"UCX failed with {self._failures} replicas, and with none it worked")

    def _enter(self) -> threading.BoundedSemaphore | None:
        """A place for one more connection; None: it has TLS alone."""
        with self._lock:
            if self._usable is None:
                why = why_not(self._wanted)
                self._usable = not why
                log("data-path", path="tcp" if why else "ucx", why=why or "-")
        return self._places if self._usable and self._places.acquire(blocking=False) else None

    def _say(self, why: str) -> None:
        """Why a connection has TLS; once."""
        with self._lock:
            new = why not in self._said
            self._said.add(why)
        if new:
            log("data-path", path="tcp", why=why)

    def _add(self, size: int) -> None:
        with self._lock:
            self.taken += size


def why_not(wanted: DataPath, root: Path = Path("/")) -> str:
    """Why this replica uses no UCX; empty: it does."""
    if wanted == "tcp":
        return "serving.data_path is tcp"
    if not PROGRAM.exists():
        return "Sluice was built without UCX (Debian: libucx-dev)"
    if wanted == "auto" and not any(_is_active(one, root) and _may_open(one, root) for one in _devices(root)):
        return "no RDMA device with an active port that this job may open"
    try:
        process = subprocess.Popen(
            [PROGRAM, "check"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=_environment(wanted),
        )  # fmt: skip
    except OSError as error:
        return one_line(str(error))
    try:
        said = one_line(process.communicate(timeout=START_S)[0][1:].decode(errors="replace"))
    except subprocess.TimeoutExpired:
        _end(process)
        return f"{PROGRAM.name}: nothing for {START_S:g} s"
    return "" if process.returncode == 0 else said or f"exit status {process.returncode} of {PROGRAM.name}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it
        process.wait(START_S)


def _devices(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband_verbs").glob("uverbs*"))


def _is_active(device: Path, root: Path) -> bool:
    """Whether one of its ports is."""
    with suppress(OSError):
        adapter = root / "sys/class/infiniband" / (device / "ibdev").read_text().strip()
        return any(state.read_text().startswith("4:") for state in adapter.glob("ports/*/state"))  # "4: ACTIVE"
    return False


def _may_open(device: Path, root: Path) -> bool:
    """The job's cgroup may forbid it, of which its mode says nothing."""
    try:
        os.close(os.open(root / "dev/infiniband" / device.name, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _environment(wanted: DataPath) -> dict[str, str]:
    """What the site or the job says of UCX wins."""
    transports = {"UCX_TLS": "ib" if wanted == "auto" else "ib,tcp"}
    return {**transports, **_OWN, **os.environ, **_NO_GPUS}


class UcxPath:
    """Of one connection, with its process."""

    def __init__(
        self, kind: Literal["take", "give"], connection: ssl.SSLSocket, key: bytes, wanted: DataPath,
        free: Callable[[], None], add: Callable[[int], None], address: bytes = b"",
    ) -> None:  # fmt: skip
        """`free` is called when it is closed, `add` with the size of each piece that came; `address`: where to send.
        Raises UcxError."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._connection, self._cipher, self._add = connection, AESGCM(key), add
        self._begun = self._done = 0  # parts
        file = os.memfd_create("sluice-ucx", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _SLOTS * _SLOT)
            self._memory = mmap.mmap(file, _SLOTS * _SLOT)
            self._words, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                self._process = subprocess.Popen(
                    [PROGRAM, kind, str(file)], env=_environment(wanted), pass_fds=(file,),
                    stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError as error:
            raise UcxError(f"{PROGRAM.name}: {error}") from error
        finally:
            os.close(file)
        self._free: Callable[[], None] | None = None  # from here on, who made this closes it
        try:
            if address:
                self._say(address)
            self.address = self._word(START_S, _READY, watched=False)
            """Where it receives; empty: it sends."""
        except BaseException:
            self.close()
            raise
        self._free = free

    def send(self, parts: Iterable[bytes]) -> None:
        """See Path. The last parts may still be on their way when it returns."""
        for part in parts:
            if self._begun - self._done == _SLOTS:
                self._settle()
            sealed = self._cipher.encrypt(self._nonce(self._begun), part, None)
            at = self._slot(self._begun)
            self._memory[at : at + len(sealed)] = sealed
            self._begin(len(sealed))

    def receive(self, size: int) -> bytearray:
        """See Path."""
        data, done = bytearray(size), 0
        while done < size:
            while self._begun - self._done < _SLOTS and done + (self._begun - self._done) * PART < size:
                self._begin(PART + _TAG)
            part = self._opened()
            if not 0 < len(part) <= size - done:
                raise UcxError(f"a part of {len(part)} bytes, and {size - done} are left of the piece")
            data[done : done + len(part)] = part
            done += len(part)
        self._add(size)
        return data

    def close(self) -> None:
        """See Path: its process with all that it holds."""
        free, self._free = self._free, None
        self._words.close()
        _end(self._process)
        self._memory.close()
        if free is not None:
            free()

    def _opened(self) -> bytes:
        """The next part that has come, decrypted."""
        from cryptography.exceptions import InvalidTag

        at, nonce = self._slot(self._done), self._nonce(self._done)
        length = self._settle()
        if not _TAG < length <= PART + _TAG:
            raise UcxError(f"a part of {length} bytes")
        with memoryview(self._memory) as memory, memory[at : at + length] as sealed:
            try:
                return self._cipher.decrypt(nonce, sealed, None)
            except InvalidTag:
                raise UcxError("a part that the other end did not encrypt") from None

    def _begin(self, size: int) -> None:
        """Let the process send or receive the next part."""
        self._say(_ORDER.pack(self._slot(self._begun), size))
        self._begun += 1

    def _settle(self) -> int:
        """Wait for the first part that is on its way; its size, encrypted."""
        said = self._word(self._connection.gettimeout(), _DONE)
        self._done += 1
        return int(_SIZE.unpack(said)[0])

    def _slot(self, part: int) -> int:
        return part % _SLOTS * _SLOT

    def _nonce(self, part: int) -> bytes:
        return part.to_bytes(_NONCE, "big")

    def _say(self, words: bytes) -> None:
        try:
            self._words.send(words)
        except OSError:  # it has ended, and may have said why
            while True:
                self._word(START_S, _DONE, watched=False)

    def _word(self, seconds: float | None, kind: bytes, *, watched: bool = True) -> bytes:
        """What the process says next. `watched`: the other end has nothing to say meanwhile but that it ends."""
        poll = select.poll()
        poll.register(self._words, select.POLLIN)
        if watched:
            poll.register(self._connection, select.POLLIN)
        ready = {file for file, _ in poll.poll(None if seconds is None else 1000 * seconds)}
        if self._words.fileno() in ready:
            word = self._heard()
            if word[:1] == kind:
                return word[1:]
            why = word[1:].decode(errors="replace") if word[:1] == _FAILED else "ended"
            raise UcxError(f"{PROGRAM.name}: {one_line(why)}")
        if ready:
            raise UcxError("the other end has ended the connection")
        raise UcxError(f"{PROGRAM.name}: nothing for {seconds:g} s")

    def _heard(self) -> bytes:
        """Empty: it has ended."""
        for _ in range(2):
            with suppress(ConnectionResetError):  # once, if it had not read all: what it said before is still there
                return self._words.recv(1 + _MOST_ADDRESS)
        return b""
