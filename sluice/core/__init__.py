"""The native scheduling core from Python: a thin, typed layer over ``sluice/core.h``."""

from __future__ import annotations

from sluice.core._core import ffi, lib
from sluice.core.errors import CoreError, check

__all__ = ["CoreError", "check", "ffi", "lib", "version"]


def version() -> str:
    """Version of the native library."""
    text: bytes = ffi.string(lib.sluice_core_version())
    return text.decode()
