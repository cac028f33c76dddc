"""Slurm's version numbers, e.g. ``22.05.8`` or ``slurm 24.11.5-1``."""

from __future__ import annotations

import re
from typing import TypeAlias

from sluice.base.errors import UsageError

SlurmVersion: TypeAlias = tuple[int, int, int]

OLDEST: SlurmVersion = (22, 5, 0)  # the oldest that Sluice supports


def parse_slurm_version(text: str) -> SlurmVersion:
    """``"slurm 22.05.8"`` as ``(22, 5, 8)``; a missing last part is 0. Raises UsageError on anything else."""
    match = re.search(r"(?<![\d.])(\d{2})\.(\d{1,2})(?:\.(\d{1,3}))?(?![\d.])", text)
    if not match:
        raise UsageError(f"Slurm version {text!r}: not a version", remedy="write it as 22.05 or 24.11.5")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def format_slurm_version(version: SlurmVersion) -> str:
    """``(22, 5, 8)`` as ``"22.05.8"``."""
    return f"{version[0]}.{version[1]:02}.{version[2]}"
