"""Sizes of memory as Slurm's users write them. The unit inside the project is MiB."""

from __future__ import annotations

import re

from sluice.base.errors import UsageError

_FACTORS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def parse_mib(text: str) -> int:
    """``10G``, ``512M``, ``1.5T`` or plain MiB as whole MiB, rounded up. Raises UsageError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"size {text!r}: not a size of memory", remedy="write a number with K, M, G or T, e.g. 10G")
    mib = float(match.group(1)) * _FACTORS[match.group(2).upper()]
    if mib > 2**40:
        raise UsageError(f"size {text!r}: more than any machine has", remedy="write a number with K, M, G or T")
    whole = int(mib)
    return whole if whole == mib else whole + 1


def format_mib(mib: int) -> str:
    """MiB for people: ``80G`` where whole, else one decimal, e.g. ``79.6G``."""
    for unit, factor in (("T", 1024**2), ("G", 1024)):
        if mib >= factor:
            value = mib / factor
            return f"{value:.0f}{unit}" if mib % factor == 0 else f"{value:.1f}{unit}"
    return f"{mib}M"
