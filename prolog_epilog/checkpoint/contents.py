"""What an image of CRIU may hold: nothing for which root would create, change or remove a file by its name.

CRIU makes deleted files and sockets with names again, and writes into FIFOs, in whatever folder their names lead to
when the job is resumed: the job's user could have put any other there. A file that was on its way in a socket is
opened, too, and is in no process's table where it could be looked at (opened.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sluice.base.errors import SluiceError

FILES = "files.img"
"""What there is in each image."""
FILES_MOST = 256 << 20
"""Bytes of it."""
_OF_PROCESSES = r"(?:core|fdinfo|fs|ids|mm|pagemap|pagemap-shmem|pages|pidns|timens)-\d+"
_OF_ALL = "cgroup|files|filelocks|inventory|memfd|pipes-data|pstree|seccomp"
_NAME = re.compile(rf"(?:{_OF_PROCESSES}|{_OF_ALL})\.img\Z")
_REASONS = (
    (re.compile(r"ghost-file|remap-fpath"), "it has a deleted file open"),
    (re.compile(r"sk-queues"), "it has data on its way in a socket"),
    (re.compile(r"tty"), "it has a terminal open"),
)
# CRIU's numbers of kinds of files (images/fdinfo.proto): regular files, pipes, UNIX sockets, eventfd, epoll, signalfd,
# timerfd and memfd.
_KINDS = {1, 2, 5, 6, 7, 9, 17, 18}
_KIND, _SOCKET, _SOCKET_NAME = 1, 16, 11  # fields of a file's entry, and of that of a UNIX socket
_UNIX = 5
_MAGIC = 8

Field = tuple[int, int | bytes]


def check_name(name: str) -> None:
    """Raises SluiceError with the reason for a file that CRIU writes and that is not resumed."""
    if not _NAME.match(name):
        known = (words for pattern, words in _REASONS if pattern.match(name))
        raise SluiceError(next(known, f"CRIU keeps {name} of it, which is not resumed"))


def check_files(content: bytes) -> None:
    """Of `FILES`. Raises SluiceError with the reason for what is not resumed."""
    try:
        for entry in _entries(content):
            _check_file(dict(_fields(entry)))
    except (IndexError, TypeError, ValueError):
        raise SluiceError("what CRIU writes of files is not understood") from None


def _check_file(entry: dict[int, int | bytes]) -> None:
    kind = entry.get(_KIND)
    if kind not in _KINDS:
        raise SluiceError(f"it has a file open of a kind that is not resumed (CRIU's {kind!r})")
    if kind == _UNIX:
        name = dict(_fields(_bytes(entry.get(_SOCKET)))).get(_SOCKET_NAME, b"")
        if _bytes(name)[:1] not in (b"", b"\0"):
            raise SluiceError("it has a socket with a name in a folder")


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _entries(content: bytes) -> Iterator[bytes]:
    at = _MAGIC
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        entry = content[at + 4 : at + 4 + size]
        if len(entry) != size:
            raise ValueError
        yield entry
        at += 4 + size


def _fields(message: bytes) -> Iterator[Field]:
    """Of a message of Protocol Buffers. Raises IndexError, ValueError."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        kind, size = key & 7, 0
        if kind == 0:
            value, at = _number(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _number(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError
        if at + size > len(message):
            raise ValueError
        yield key >> 3, message[at : at + size]
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
