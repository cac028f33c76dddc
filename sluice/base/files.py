"""Atomic writes: files are complete or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from sluice.base.errors import SluiceError

_Content = TypeVar("_Content")


def write_atomic(
    path: Path,
    content: str | bytes,
    *,
    mode: int = 0o644,
    follow_links: bool = True,
    like: os.stat_result | None = None,
) -> None:
    """Replace `path` by `content` in one step that survives a crash; parent folder must exist.

    A symbolic link is followed, so that a linked configuration file stays linked; without `follow_links`, for folders
    where others may create links, it is replaced. `like`: the file has this owner and group before it is seen, as far
    as the caller may give them. Raises OSError with the file's name, leaving the old file as it was.
    """
    target = path.resolve() if follow_links else path
    data = content.encode() if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if like is not None:
                with contextlib.suppress(PermissionError):  # who is not root keeps the group at most
                    os.fchown(file.fileno(), like.st_uid if os.geteuid() == 0 else -1, like.st_gid)
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        if isinstance(error, OSError):  # a failed write has no file name, and `name` is temporary
            error.filename, error.filename2 = str(target), None
        raise
    _sync_folder(target.parent)


def write_if_changed(
    path: Path, content: str | bytes, *, mode: int = 0o644, like: os.stat_result | None = None
) -> bool:
    """Like `write_atomic`, but leave an equal file untouched; True when something was written."""
    data = content.encode() if isinstance(content, str) else content
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return False
    write_atomic(path, data, mode=mode, like=like)
    return True


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes each time a file is replaced: inode, time in ns, size; None: there is no file. Raises OSError."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


class KeptFile(Generic[_Content]):
    """What a file says that others replace as `write_atomic` does: it is read again only after that. Thread-safe.

    `read` makes something of the file, or of no file, and raises SluiceError. What it makes is shared by all callers:
    they do not change it. What cannot be read is tried again each time.
    """

    def __init__(self, path: Path, read: Callable[[Path], _Content]) -> None:
        self.path = path
        self._read = read
        self._lock = threading.Lock()  # of many who ask after it was replaced one reads it
        self._kept: tuple[tuple[int, int, int] | None, _Content] | None = None

    def current(self) -> _Content:
        """As it is now. Raises SluiceError."""
        with self._lock:
            try:
                stamp = stamp_of(self.path)  # before it is read: if it is replaced meanwhile, it is read again
                if self._kept is None or self._kept[0] != stamp:
                    self._kept = stamp, self._read(self.path)
            except OSError as error:
                raise SluiceError(f"{self.path}: {error.strerror}") from error
            return self._kept[1]


def mount_of(descriptor: int) -> str:
    """The number, in mountinfo, of the mount that an open file is on. Raises OSError."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("mnt_id:"))


@contextlib.contextmanager
def open_unmounted(folder: Path, *names: str) -> Iterator[int]:
    """A descriptor, to look at and not to read, of what `names` lead to below a folder of root's: no link is followed,
    and a file system that a user mounted on the way is asked nothing, as it need not answer. Raises OSError."""
    found = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        mount = mount_of(found)
        for name in names:
            above, found = found, os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found)
            os.close(above)
            if mount_of(found) != mount:
                raise OSError(errno.EXDEV, "a file system is mounted there", name)
        yield found
    finally:
        os.close(found)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
