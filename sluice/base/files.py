"""Atomic writes: files are complete or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
