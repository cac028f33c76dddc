"""Files with secrets: read only where nobody but their owner can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sluice.base.errors import SluiceError


def check_private(path: Path) -> None:
    """As `read_private`, for a file that a library reads. Raises FileNotFoundError, SluiceError."""
    read_private(path, 0)


def read_private(path: Path, most: int, *, follow_links: bool = True) -> bytes:
    """At most `most` bytes of a regular file that root or this user owns and nobody else can read or change.

    Neither blocks at a FIFO nor reads a device. Raises FileNotFoundError where there is no file, SluiceError for one
    that cannot be read or that others can.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy=_remedy(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid not in (0, os.geteuid()):
            raise SluiceError(
                f"{path}: others than its owner can read it or change it, or another user owns it", remedy=_remedy(path)
            )
        return file.read(most)


def _remedy(path: Path) -> str:
    return f"chown it to root or to the user that reads it (SlurmUser on controllers); chmod 600 {path}"
