"""Requests that a client may send twice: those with an Idempotency-Key.

Both have one id in the usage records, and are billed once, where the first has no bill yet: its gateway has died. So
that nobody gets two answers for one bill, what comes after a bill has an id of its own, and a bill of its own: all of
it, or, of a stream that goes on, what is new; its prompt is free once, and is billed each time after that. Of several
gateways one at a time answers (`sluice.serve.gateway.claims`); where no authority says which, each remembers for
itself, and the readers of records count the largest bill of an id. The table is shared by the workers of a gateway;
what two of them write at once is, at worst, forgotten. A bill is forgotten where another one takes its place, and
nobody can choose a key that takes a certain place: it depends on a secret.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import secrets
import struct
from typing import Any, Final, Self

_ENTRY: Final = struct.Struct("<QQ")
ENTRIES: Final = 1 << 16
_SECRET: Final = 32
SIZE: Final = ENTRIES * _ENTRY.size + _SECRET


class Repeated:
    """The table."""

    def __init__(self, region: mmap.mmap | bytearray) -> None:
        self._region = region
        self._secret = bytes(region[SIZE - _SECRET : SIZE])

    @classmethod
    def create(cls, region: mmap.mmap | bytearray) -> Self:
        """An empty one, in memory that is all 0."""
        region[SIZE - _SECRET : SIZE] = secrets.token_bytes(_SECRET)
        return cls(region)

    def name(self, key: str, idempotency_key: bytes, document: dict[str, Any]) -> tuple[str, bool]:
        """The id of a request, and whether there is a bill for what it repeats."""
        name = _name(key, idempotency_key, document)
        return (secrets.token_hex(16), True) if self.billed(name) else (name, False)

    @staticmethod
    def rest(key: str, idempotency_key: bytes, document: dict[str, Any]) -> str:
        """What a bill for the rest of a stream is remembered by."""
        return _name(key, idempotency_key, document, b"rest")

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
        place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4, key=self._secret).digest(), "little")
        return place % ENTRIES * _ENTRY.size, first, second


def _name(key: str, idempotency_key: bytes, document: dict[str, Any], *more: bytes) -> str:
    said = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(b"\0".join((key.encode(), idempotency_key, said, *more))).hexdigest()[:32]
