"""Files of profiles as the injected library writes them (native/include/sluice/profile.h), for tests and benchmarks."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

HEADER = struct.Struct("<8sIIIIQQIIIIIIII64s64s40s16x")
RECORD = struct.Struct("<HHIQQIIII24s")
SECOND = 10**9


@dataclass
class Writer:
    """One process's file; `started` is of its node's CLOCK_MONOTONIC, `ahead` how far its time of day is."""

    host: str = "n1"
    pid: int = 100
    job: int = 17
    rank: int = 0
    started: int = 1000 * SECOND
    time_of_day: int = 1_790_000_000 * SECOND
    boot: str = "boot-1"
    program: str = "train"
    number: int = 1
    step: int = 0
    records: list[bytes] = field(default_factory=list)
    ended: bytes = bytes(64)
    names: int = 0

    def record(self, kind: int, start: int = 0, end: int = 0, body: bytes = b"", **more: int) -> None:
        """Times are from the profile's start; any of slots, device, context, stream, correlation and name."""
        self.records.append(self._packed(kind, self.started + start, self.started + end, body, **more))

    @staticmethod
    def _packed(kind: int, start: int, end: int, body: bytes, **more: int) -> bytes:
        get = more.get
        return RECORD.pack(
            kind, get("slots", 0), get("device", 0), start, end, get("context", 1), get("stream", 7),
            get("correlation", 0), get("name", 0), body,
        )  # fmt: skip

    def name(self, text: str) -> int:
        """A name's number."""
        self.names += 1
        raw = text.encode()
        slots = -(-len(raw) // 64)
        self.record(1, slots=slots, name=self.names, body=struct.pack("<Q", len(raw)))
        self.records.append(raw.ljust(64 * slots, b"\0"))
        return self.names

    def device(self, number: int, uuid: bytes, name: str = "NVIDIA H100") -> None:
        """A GPU."""
        self.record(2, device=number, name=self.name(name), body=uuid + struct.pack("<Q", 80 << 30))

    def sample(self, name: int, start: int, thread: int) -> None:
        """Of the processor, 10 ms long."""
        self.record(10, start, start + SECOND // 100, struct.pack("<I", thread), name=name, device=0xFFFFFFFF)

    def kernel(self, name: int, start: int, end: int, device: int = 0, stream: int = 7) -> None:
        """A kernel that ran."""
        self.record(3, start, end, struct.pack("<6I", 1, 1, 1, 256, 1, 1), name=name, device=device, stream=stream)

    def copy(self, start: int, end: int, size: int, places: tuple[int, int] = (2, 3), device: int = 0) -> None:
        """A copy, from pinned memory to the device unless `places` says otherwise."""
        self.record(4, start, end, struct.pack("<QBB2xI", size, *places, 0xFFFFFFFF), device=device, stream=8)

    def clock(self, at: int, jump: int = 0) -> None:
        """What time of day it was."""
        self.record(11, at, at, struct.pack("<QQ", self.time_of_day + at + jump, 100))

    def lost(self, events: int, reason: int) -> None:
        """Events that are missing."""
        self.record(13, body=struct.pack("<QIIQ", events, reason, 0, 0))

    def end(self, at: int, reason: int = 1, cost: int = 0, name: int = 0) -> None:
        """Why and when it ended."""
        body = struct.pack("<QIIQ", len(self.records), reason, 0, cost)
        self.ended = self._packed(14, self.started, self.started + at, body, name=name)

    def content(self) -> bytes:
        """The file."""
        head = HEADER.pack(
            b"SLUPROF1", 1, 256, 64, 1, self.started, self.time_of_day, self.pid, self.number, self.job, self.step,
            self.rank, 0, 47, 10_000, self.host.encode(), self.program.encode(), self.boot.encode(),
        )  # fmt: skip
        return b"".join([head, self.ended, *self.records])

    @property
    def file_name(self) -> str:
        """As the library names it."""
        return f"{self.host}.{self.pid}.{self.number}.profile"


def training(writer: Writer, events: int, seed: int, slower: float = 1.0) -> Writer:
    """Steps of a training job: two kernels, a copy that overlaps the first, and a collective, until so many events."""
    rng = random.Random(seed)
    gemm, norm, reduce = (
        writer.name("void gemm<float>(int)"),
        writer.name("layer_norm"),
        writer.name("ncclAllReduce_f32"),
    )
    writer.device(0, rng.randbytes(16))
    at = 0
    writer.clock(0)
    for _ in range(events // 4):
        took = int(rng.uniform(80_000, 120_000) * slower)
        writer.kernel(gemm, at, at + took)
        writer.copy(at + 10_000, at + 60_000, 1 << 20)
        writer.kernel(norm, at + took, at + took + 20_000)
        writer.kernel(reduce, at + took + 20_000, at + 200_000)
        at += 250_000
    writer.clock(at)
    writer.end(at, cost=at // 200)
    return writer
