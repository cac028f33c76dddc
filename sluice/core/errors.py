"""Refusals of the core as exceptions."""

from __future__ import annotations

from typing import Any

from sluice.base.errors import SluiceError
from sluice.core._core import ffi, lib

UNKNOWN: int = lib.SLUICE_ERROR_UNKNOWN
"""Code of an error: what the call names is not there."""


class CoreError(SluiceError):
    """The core refused a call; `code` is its ``enum sluice_error``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text or ffi.string(lib.sluice_strerror(code)).decode())
        self.code = code


def new_error_text() -> Any:
    """Room for the core's explanation, to be passed as a call's last argument and then to `check`."""
    return ffi.new("struct sluice_error_text *")


def check(code: int, error_text: Any = None) -> None:
    """Raise CoreError unless `code` is SLUICE_OK."""
    if code != lib.SLUICE_OK:
        raise CoreError(code, ffi.string(error_text.text).decode() if error_text is not None else "")
