"""Requests that a client may send twice: those with an Idempotency-Key.

Both have one id in the usage records, and are billed once, where the first has no bill yet: its gateway has died. So
that nobody gets two answers for one bill, what comes after a bill has an id of its own, and a bill of its own: all of
it, or, of a stream that goes on,
what is new. Two gateways remember each for themselves. The table is shared by the workers of a
gateway; what two of them write at once is, at worst, forgotten.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import secrets
import struct
from typing import Any, Final

_ENTRY: Final = struct.Struct("<QQ")
ENTRIES: Final = 1 << 16
SIZE: Final = ENTRIES * _ENTRY.size


class Repeated:
    """The table."""

    def __init__(self, region: mmap.mmap | bytearray) -> None:
        self._region = region

    def name(self, key: str, idempotency_key: bytes, document: dict[str, Any]) -> tuple[str, bool]:
        """The id of a request, and whether there is a bill for what it repeats."""
        said = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        name = hashlib.sha256(b"\0".join((key.encode(), idempotency_key, said))).hexdigest()[:32]
        return (secrets.token_hex(16), True) if self.billed(name) else (name, False)

    def bill(self, name: str) -> None:
        """It has a bill from now on."""
        at, first, second = self._place(name)
        _ENTRY.pack_into(self._region, at, first, second)

    def billed(self, name: str) -> bool:
        """Whether it has a bill."""
        at, first, second = self._place(name)
        return bool(_ENTRY.unpack_from(self._region, at) == (first, second))

    def _place(self, name: str) -> tuple[int, int, int]:
        first, second = int(name[:16], 16), int(name[16:], 16)
        return first % ENTRIES * _ENTRY.size, first, second
