"""Takes CRIU's files from it as it writes them (`criu dump --stream`), so that none of them is on disk as it is.

CRIU connects to a UNIX socket in its folder and says there of each file first its name, then the end of a pipe that it
writes the file into. Files are open at once, so each has a thread. Whoever cannot take one closes its pipe: CRIU fails
with it, and lets what it has stopped go on. A pipe also ends where CRIU is killed: what was taken counts when CRIU has
ended without an error, and not before. Source of the protocol: CRIU's img-streamer.c and images/img-streamer.proto.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sluice.base.errors import SluiceError

SOCKET = "streamer-capture.sock"
_PIPE = 1 << 20  # bytes; what a user without rights may have, too
_LARGE = "pages"
_MOST_NAME = 4096
_FILENAME = b"\x0a"  # field 1, a string
_MOST_THREADS = 64
_LOOK_S = 0.005
_ENDS_S = 60.0  # at least, for what is in the pipes when CRIU has ended

Take = Callable[[str, BinaryIO], None]
"""Gets the name of a file and what it contains, in a thread of the file's own; may raise SluiceError, OSError."""


class Stream:
    """What CRIU writes until `deadline` (as of time.monotonic)."""

    def __init__(self, take: Take, deadline: float) -> None:
        self._take, self._deadline = take, deadline
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.error: Exception | None = None
        """The first reason for which something was not taken."""

    def listen(self, server: socket.socket) -> None:
        """Take all files of one connection."""
        try:
            connection, _ = server.accept()
        except OSError:  # CRIU has ended before
            return
        with connection:
            try:
                while (name := _name(connection)) is not None:
                    pipe = _Pipe(_end_of_pipe(connection), self._deadline)
                    if name.startswith(_LARGE):
                        with suppress(OSError):  # a limit of the system
                            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
                    self._start(name, pipe)
            except (OSError, RuntimeError, SluiceError) as error:
                self._fail(error)

    def _start(self, name: str, pipe: _Pipe) -> None:
        """A thread; CRIU waits where there are many, as disks are slow, and it has few files open itself."""
        while len(self._threads) >= _MOST_THREADS and time.monotonic() < self._deadline:
            time.sleep(_LOOK_S)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._one, args=(name, pipe), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of the system
            pipe.close()
            raise
        self._threads.append(thread)

    def _one(self, name: str, pipe: _Pipe) -> None:
        try:
            with io.BufferedReader(pipe) as plain:
                self._take(name, plain)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error

    def finish(self, listener: threading.Thread) -> None:
        """CRIU has ended: wait until all is taken. Where some is not, `error` says why."""
        end = max(self._deadline, time.monotonic() + _ENDS_S)
        self._await(listener, end)  # it may start others
        for thread in self._threads:
            self._await(thread, end)

    def _await(self, thread: threading.Thread, end: float) -> None:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            self._fail(SluiceError("what CRIU writes does not come to its end"))


class _Pipe(io.RawIOBase):
    """The reading end of one."""

    def __init__(self, descriptor: int, deadline: float) -> None:
        self._descriptor, self._deadline = descriptor, deadline

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if time.monotonic() > self._deadline:
            raise SluiceError("it was not saved in time (checkpoint.system.time)")
        return os.readv(self._descriptor, [buffer])

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


@contextmanager
def taken(folder: Path, take: Take, seconds: float) -> Iterator[Stream]:
    """CRIU runs meanwhile, with that folder. When this ends all threads have, too. Raises OSError."""
    stream = Stream(take, time.monotonic() + seconds)
    with socket.socket(socket.AF_UNIX) as server:
        above = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            server.bind(f"/proc/self/fd/{above}/{SOCKET}")  # whatever the length of the folder's name
        finally:
            os.close(above)
        server.listen(1)
        listener = threading.Thread(target=stream.listen, args=(server,), daemon=True)
        listener.start()
        try:
            yield stream
        finally:
            server.shutdown(socket.SHUT_RDWR)  # a CRIU that never connected is not waited for
            stream.finish(listener)
            (folder / SOCKET).unlink(missing_ok=True)


def _name(connection: socket.socket) -> str | None:
    """Of the next file; None: there is none. Raises SluiceError, OSError."""
    size = int.from_bytes(_read(connection, 4), "little")
    message = _read(connection, size) if size <= _MOST_NAME else b""
    if not size:
        return None
    length, name = _varint(message[1:])
    if message[:1] != _FILENAME or len(name) != length:
        raise SluiceError("what CRIU says of a file is not understood")
    return name.decode(errors="replace")


def _varint(data: bytes) -> tuple[int, bytes]:
    """The number that it begins with, and the rest."""
    value = 0
    for at, byte in enumerate(data):
        value |= (byte & 127) << 7 * at
        if byte < 128:
            return value, data[at + 1 :]
    return 0, b""


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none at the end. A descriptor comes with the byte after them, so no more are taken."""
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found if len(found) == size else b""


def _end_of_pipe(connection: socket.socket) -> int:
    """Raises SluiceError, OSError."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) != 1:
        raise SluiceError("CRIU gave no pipe for a file")
    return descriptors[0]
