"""Files of decisions for tests: made by the plugins' own code, or forged."""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from pathlib import Path


def run_churn(
    churn: Path, folder: Path, seed: int, *, steps: int = 1500, file_bytes: int = 1 << 20, ring: int = 1 << 20
) -> dict[str, int]:
    """Make decisions; what the recorder counted."""
    done = subprocess.run(
        [churn, folder, str(seed), str(steps), str(file_bytes), str(ring)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", done.stdout)}


def forge(payloads: list[tuple[int, bytes]], time_us: int = 0) -> bytes:
    """A file with correct checksums around any payloads."""
    data = struct.pack("<8sII", b"SLUICEDR", 1, 0)
    for number, (kind, payload) in enumerate(payloads):
        head = struct.pack("<IHHQq", len(payload), kind, 0, number, time_us)
        data += head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head)))
    return data


def raw_entries(path: Path) -> list[tuple[int, bytes]]:
    data, at, found = path.read_bytes(), 16, []
    while at < len(data):
        length, kind = struct.unpack_from("<IH", data, at)
        found.append((kind, data[at + 24 : at + 24 + length]))
        at += 24 + length + 4
    return found
