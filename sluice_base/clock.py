"""The clock that nobody sets."""

from __future__ import annotations

import time


def uptime() -> float:
    """Seconds since the machine was booted, suspended ones included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
