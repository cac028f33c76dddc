"""The monotonic clock since boot, and the boot that it counts from."""

from __future__ import annotations

import time
from pathlib import Path


def uptime() -> float:
    """Seconds since the machine was booted, time in suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The ID of this boot; empty where the kernel does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
