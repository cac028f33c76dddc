"""Finding processes of a cluster from outside: by what was written down, and by the marker in their environment."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from dev_cluster.layout import MARKER


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names a process for ever.

    None where there is none, or only what its parent has not yet collected of it.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def marked(folder: Path) -> list[int]:
    """Process 1 of the cluster in `folder` (and its parent while it starts), whatever is or is not written down."""
    wanted = f"{MARKER}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is the kernel's
    return found


def kill(pid: int, *, timeout: float) -> bool:
    """SIGKILL and wait until it, and with process 1 all of its namespace, has ended. False after `timeout` seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(select.select([descriptor], [], [], timeout)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)
