"""The names of all vendors: those of the modules in `gres_probe.vendors`."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def vendor_names() -> tuple[str, ...]:
    """The names of all vendors, in order."""
    return tuple(sorted(path.stem for path in Path(__file__).with_name("vendors").glob("[a-z]*.py")))
