"""The memory ledger from Python: who holds how much GPU memory, in memory that processes share (``sluice/core.h``)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, Self

from sluice.core._core import ffi, lib
from sluice.core.errors import check, new_error_text

Region = bytearray | memoryview | mmap.mmap

UNLIMITED = 2**64 - 1
"""A quota that leaves only the device's limit."""

ALIGNMENT: int = lib.SLUICE_LEDGER_ALIGNMENT


@dataclass(frozen=True)
class Shape:
    """How much a region has room for: devices, owners (jobs or tenants) and living processes."""

    devices: int
    owners: int
    processes: int

    def size(self) -> int:
        """Bytes that a region of this shape takes."""
        size: int = lib.sluice_ledger_size(self.to_c())
        if size == 0:
            Ledger.format(bytearray(), self)  # refuses and says why
        return size

    def to_c(self) -> Any:
        """As ``struct sluice_ledger_shape *``."""
        return ffi.new("struct sluice_ledger_shape *", (self.devices, self.owners, self.processes))


@dataclass(frozen=True)
class Usage:
    """Bytes of a device, or of an owner or a process on it; see ``struct sluice_ledger_usage``."""

    limit: int
    charged: int
    available: int
    peak: int
    committed: int
    context: int
    slack: int
    refused: int

    @property
    def reserved(self) -> int:
        """Charged, but not allocated yet."""
        return self.charged - self.committed


@dataclass(frozen=True)
class Process:
    """A process in the ledger; `id` names it in calls, pid and start time in the world."""

    id: int
    owner: int
    pid: int
    start: int


@dataclass(frozen=True)
class Fragmentation:
    """Free bytes that large requests cannot use; see ``struct sluice_ledger_fragmentation``."""

    free: int
    largest: int
    largest_device: int
    external_permille: int
    slack: int


class Charge:
    """A reservation or an allocation; holds nothing after its release."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def asked(self) -> int:
        """Bytes asked for."""
        return int(self.handle.asked)

    @property
    def charged(self) -> int:
        """Bytes charged: asked, rounded up; 0 after release."""
        return int(self.handle.charged)

    @property
    def device(self) -> int:
        """The device charged."""
        return int(self.handle.device)

    @property
    def committed(self) -> bool:
        """Whether the device has granted it."""
        return bool(self.handle.committed)


class Ledger:
    """A view of a formatted region, e.g. an `mmap` of a shared file, which it keeps alive.

    Every method raises CoreError with the core's own message; `code` distinguishes quota from capacity.
    """

    def __init__(self, region: Region, attempts: int = 0) -> None:
        self._region = ffi.from_buffer("unsigned char[]", region, require_writable=True)
        handle, text = ffi.new("struct sluice_ledger **"), new_error_text()
        check(lib.sluice_ledger_new(self._region, len(self._region), attempts, handle, text), text)
        self._handle = ffi.gc(handle[0], lib.sluice_ledger_free)

    @classmethod
    def format(cls, region: Region, shape: Shape) -> None:
        """Make an empty ledger in `region`, before any other use of it; all devices are closed, all quotas 0."""
        memory, text = ffi.from_buffer("unsigned char[]", region, require_writable=True), new_error_text()
        check(lib.sluice_ledger_format(memory, len(memory), shape.to_c(), text), text)

    @classmethod
    def create(cls, region: Region, shape: Shape) -> Self:
        """Format and open."""
        cls.format(region, shape)
        return cls(region)

    @property
    def shape(self) -> Shape:
        """What the region has room for."""
        shape = ffi.new("struct sluice_ledger_shape *")
        lib.sluice_ledger_get_shape(self._handle, shape)
        return Shape(shape.devices, shape.owners, shape.processes)

    def set_device(
        self, device: int, *, capacity: int, granularity: int = 1, oversubscription_permille: int = 1000
    ) -> None:
        """Terms of a device, sizes in bytes; capacity 0 closes it."""
        terms = ffi.new("struct sluice_ledger_device *", (capacity, granularity, oversubscription_permille, 0))
        self._call(lib.sluice_ledger_set_device, device, terms)

    def set_quota(self, owner: int, device: int, quota: int) -> None:
        """What `owner` may hold of `device`, in bytes, or UNLIMITED."""
        self._call(lib.sluice_ledger_set_quota, owner, device, quota)

    def join(self, owner: int, pid: int, start: int) -> int:
        """Enter a process; its id in further calls. What the same pid left in the ledger before is released."""
        process = ffi.new("uint32_t *")
        self._call(lib.sluice_ledger_join, owner, pid, start, process)
        return int(process[0])

    def reap(self, pid: int, start: int) -> int:
        """Release all that an ended process holds, and remove it; the bytes released."""
        released = ffi.new("uint64_t *")
        self._call(lib.sluice_ledger_reap, pid, start, released)
        return int(released[0])

    def reserve(self, process: int, device: int, bytes_: int, granularity: int = 0) -> Charge:
        """Charge `bytes_`, rounded up to `granularity` (0: the device's), before allocating them on the device."""
        charge = ffi.new("struct sluice_ledger_charge *")
        self._call(lib.sluice_ledger_reserve, process, device, bytes_, granularity, charge)
        return Charge(charge)

    def commit(self, process: int, charge: Charge) -> None:
        """The device has granted what was reserved."""
        self._call(lib.sluice_ledger_commit, process, charge.handle)

    def release(self, process: int, charge: Charge) -> None:
        """Release a charge, committed or not."""
        self._call(lib.sluice_ledger_release, process, charge.handle)

    def set_context(self, process: int, device: int, bytes_: int) -> None:
        """Set how much the process's driver context takes on `device`; 0 when it is gone."""
        self._call(lib.sluice_ledger_set_context, process, device, bytes_)

    def device_usage(self, device: int) -> Usage:
        """Figures of a device."""
        return self._usage(lib.sluice_ledger_device_usage, device)

    def owner_usage(self, owner: int, device: int) -> Usage:
        """Figures of an owner on a device."""
        return self._usage(lib.sluice_ledger_owner_usage, owner, device)

    def process_usage(self, process: int, device: int) -> Usage:
        """Figures of a process on a device."""
        return self._usage(lib.sluice_ledger_process_usage, process, device)

    def processes(self) -> list[Process]:
        """All processes in the ledger."""
        room = self.shape.processes
        ids, who = ffi.new("uint32_t[]", room), ffi.new("struct sluice_ledger_process[]", room)
        count = ffi.new("uint32_t *")
        self._call(lib.sluice_ledger_processes, room, ids, who, count)
        return [Process(ids[i], who[i].owner, who[i].pid, who[i].start) for i in range(min(count[0], room))]

    def audit(self) -> None:
        """Raise CoreError unless each device's charge is the sum over owners and over processes."""
        self._call(lib.sluice_ledger_audit)

    def fragmentation(self) -> Fragmentation:
        """How free memory is spread over the devices, and what rounding costs."""
        found = ffi.new("struct sluice_ledger_fragmentation *")
        self._call(lib.sluice_ledger_get_fragmentation, found)
        return Fragmentation(found.free, found.largest, found.largest_device, found.external_permille, found.slack)

    def _call(self, function: Any, *arguments: Any) -> None:
        text = new_error_text()
        check(function(self._handle, *arguments, text), text)

    def _usage(self, function: Any, *arguments: Any) -> Usage:
        usage = ffi.new("struct sluice_ledger_usage *")
        self._call(function, *arguments, usage)
        return Usage(*(getattr(usage, name) for name in Usage.__dataclass_fields__))
