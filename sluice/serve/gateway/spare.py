"""Room on the disk for usage records that is taken before it is needed: what cannot be written elsewhere, because the
disk is full, is in it when its process is killed.

Each process has a file of its own, locked while it lives. What a dead one left is written to where records belong by
`recover`, once: what is there already is left out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from sluice.exchange.requests import MOST_LINE, RequestLog, RequestRecord, parse, render

SIZE: Final = 8 << 20
"""Bytes: of ten thousand records, as long as they usually are."""
_ENDING: Final = ".spare"
_END: Final = b"\0"


class Spare:
    """The file of this process."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where there is no room now."""
        self._path = folder / f".{secrets.token_hex(8)}{_ENDING}"
        self._at = 0
        self._descriptor = self._create()
        try:
            os.posix_fallocate(self._descriptor, 0, SIZE)
        except OSError:
            self.close()
            raise

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except OSError:
                self._path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
            os.close(descriptor)  # `recover` of another process had it before it was locked, and has removed it

    def keep(self, record: RequestRecord) -> None:
        """One more, if it has room: it survives this process."""
        line = render(record)
        if len(line) <= MOST_LINE and self._at + len(line) < SIZE:
            with suppress(OSError):  # a file system that copies what it writes needs room for that, too
                os.pwrite(self._descriptor, line + _END, self._at)
                self._at += len(line)

    def clear(self) -> None:
        """All are where they belong."""
        if self._at:
            with suppress(OSError):  # as above; what stays is known by its ids
                os.pwrite(self._descriptor, _END, 0)
            self._at = 0

    def close(self) -> None:
        """The process ends; what is in it stays for `recover`."""
        if not self._at:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def recover(folder: Path, log: RequestLog) -> int:
    """Write what dead processes left; how many records. Raises OSError where there is no room yet."""
    count = 0
    left = list(folder.glob(f".*{_ENDING}"))
    if left and not os.statvfs(folder).f_bavail:  # before all of a day's file is read, each second
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    for path in left:
        with suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lines = os.pread(descriptor, SIZE, 0).partition(_END)[0].splitlines()
                for record in log.missing([one for one in map(parse, lines) if one is not None]):
                    log.write(record)
                    count += 1
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
    return count
