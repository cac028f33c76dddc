"""A model's copy in pieces, which come in any order, from the site's storage or from other replicas."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

DIGEST = 32
_LEAST, _MOST = 4 << 20, 32 << 20
PART = 1 << 20
"""What `parts` gives at most at a time."""
_WANTED = 4096  # pieces of a model, as far as these bounds allow


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model."""

    name: str  # in the model's folder; empty: the model is this one file
    path: Path
    size: int
    changed: int


class Pieces:
    """Which pieces of a copy are there, each with its SHA-256. Thread-safe."""

    def __init__(
        self, entry: str, target: Path, files: Sequence[ModelFile], digests: bytes = b"", *, hashed: bool = False
    ) -> None:
        """`digests`: of a copy that is whole, see `digests`. `hashed`: its hash is wanted, see `file_digests`."""
        self.entry, self.target = entry, target
        self.taken = 0
        """Bytes that came from other replicas."""
        self.given_up = False
        """A thread that got pieces has failed: the others end, too."""
        self._files = files
        piece = min(max(_LEAST, sum(file.size for file in files) // _WANTED), _MOST)  # the same on all nodes
        self._table = [
            (number, at, min(piece, file.size - at))
            for number, file in enumerate(files)
            for at in range(0, file.size, piece)
        ]
        if digests and len(digests) != DIGEST * len(self._table):
            raise ValueError(f"{len(digests)} bytes of digests for {len(self._table)} pieces")
        self._digests = [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)] or [b""] * len(self._table)
        self._free = {number for number, digest in enumerate(self._digests) if not digest}
        self._missing = len(self._free)
        self._bits = bytearray((b"\0" if self._free else b"\xff") * -(-len(self._table) // 8))
        self._lock = threading.Lock()
        self._moved = time.monotonic()
        self._hashing = [_Hashing(hashlib.sha256()) for _ in files] if hashed else []
        at = 0
        for number, one in enumerate(self._hashing):
            one.next, at = at, at + sum(1 for file, _, _ in self._table if file == number)
            one.end = at

    def __len__(self) -> int:
        return len(self._table)

    @property
    def whole(self) -> bool:
        """Whether all are there."""
        return not self._missing

    @property
    def digests(self) -> bytes:
        """Of all pieces, one after the other."""
        return b"".join(self._digests)

    def digest(self, number: int) -> bytes:
        """Of a piece; empty: it is not there."""
        return self._digests[number]

    @property
    def bits(self) -> bytes:
        """One for each piece that is there."""
        return bytes(self._bits)

    def size(self, number: int) -> int:
        """Of a piece."""
        return self._table[number][2]

    def idle_s(self) -> float:
        """For how long none has come."""
        return time.monotonic() - self._moved

    # ---- who gets which ----

    def claim(self, among: AbstractSet[int] | None = None) -> int | None:
        """A piece that nobody gets yet: the first, or one of `among` by chance, so that not all have the same."""
        with self._lock:
            if among is None:
                number = min(self._free, default=None)
            else:
                found = self._free & among
                number = random.choice(tuple(found)) if found else None  # noqa: S311 - not a secret
            if number is not None:
                self._free.discard(number)
            return number

    def give_back(self, number: int) -> None:
        """It did not come."""
        with self._lock:
            self._free.add(number)

    # ---- bytes ----

    def make_files(self) -> None:
        """Empty ones, of their sizes."""
        for file in self._files:
            path = self._path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as made:
                made.truncate(file.size)

    def put(self, number: int, data: bytes | bytearray, digest: bytes, *, taken: bool = False) -> None:
        """A piece that has come, and that was checked. Raises OSError."""
        file, at, _ = self._table[number]
        with self._path(self._files[file]).open("r+b", buffering=0) as target:
            done = 0
            while done < len(data):
                done += os.pwrite(target.fileno(), data[done:], at + done)
        with self._lock:
            self._digests[number] = digest
            self._bits[number >> 3] |= 1 << (number & 7)
            self._missing -= 1
            self._moved = time.monotonic()
            self.taken += len(data) if taken else 0
        if self._hashing:
            self._hash_on(self._hashing[file], number, data)

    def get(self, number: int) -> bytes:
        """A piece that is there. Raises OSError."""
        return b"".join(self._read(self._path(self._files[self._table[number][0]]), number, _MOST))

    def parts(self, number: int) -> Iterator[bytes]:
        """The same in small parts: who gives to many keeps no piece for each. Raises OSError."""
        return self._read(self._path(self._files[self._table[number][0]]), number, PART)

    def read_source(self, number: int) -> bytes:
        """The piece from where the site keeps the model. Raises OSError."""
        return b"".join(self._read(self._files[self._table[number][0]].path, number, _MOST))

    def sync(self) -> None:
        """To the disk."""
        for file in self._files:
            descriptor = os.open(self._path(file), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def file_digests(self) -> list[str]:
        """SHA-256 of each file, in hexadecimal, of a copy that is whole."""
        return [one.sha256.hexdigest() for one in self._hashing]

    def _hash_on(self, one: _Hashing, number: int, data: bytes | bytearray) -> None:
        """Go on with a file's hash, as far as its pieces are there without a gap."""
        with one.lock:
            while one.next < one.end and self._digests[one.next]:
                one.sha256.update(data if one.next == number else self.get(one.next))
                one.next += 1

    def _read(self, path: Path, number: int, most: int) -> Iterator[bytes]:
        _, at, size = self._table[number]
        end = at + size
        with path.open("rb", buffering=0) as file:
            while at < end:
                data = os.pread(file.fileno(), min(most, end - at), at)
                if not data:
                    raise OSError(5, "shorter than it was", str(path))
                at += len(data)
                yield data

    def _path(self, file: ModelFile) -> Path:
        return self.target / file.name if file.name else self.target


class _Hashing:
    """How far a file was hashed."""

    def __init__(self, sha256: hashlib._Hash) -> None:
        self.sha256 = sha256
        self.lock = threading.Lock()
        self.next = self.end = 0
