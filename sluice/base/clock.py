"""The clock that nobody sets, and since which boot it runs."""

from __future__ import annotations

import time
from pathlib import Path


def uptime() -> float:
    """Seconds since the machine was booted, suspended ones included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Another one after each boot; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
