"""A job's limits of GPU memory on one node, for root (``sluice/limit.h``): makes, reads, changes, removes its region.

The preloaded library, `library_path()`, holds the job's processes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sluice.core._limit import ffi, lib
from sluice.core.errors import check, new_error_text

FOLDER = Path("/run/sluice/limit")
"""The folder of regions: one folder for each job, named by a part of its cgroup's path (``job_12``)."""

JOB = FOLDER / "job"
"""Where a process looks first: the job's region, bound there in the job's own mount namespace."""

DEFAULT_PROCESSES: int = lib.SLUICE_LIMIT_DEFAULT_PROCESSES


@dataclass(frozen=True)
class Device:
    """A GPU or MIG instance of a job, known by UUID, PCI address or OpenCL name; sizes in bytes.

    `total` is what its driver reports to programs, `context` what one driver context takes, `spill` what may be in host
    memory beyond `limit`.
    """

    total: int
    limit: int
    context: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    spill: int = 0


@dataclass(frozen=True)
class Usage:
    """Bytes of one device (contexts included), and how often the limit refused; all but `limit` is the job's claim."""

    limit: int
    charged: int
    peak: int
    refused: int
    spilled: int


def library_path() -> Path:
    """The library to preload into a job's processes."""
    return Path(__file__).with_name("libsluice_limit.so")


def launcher_path() -> Path:
    """The program that jobs which can be saved run under; nodes have it next to `sluice-task-init`."""
    return Path(__file__).with_name("sluice-launch")


def create(
    folder: Path, devices: Sequence[Device], uid: int, processes: int = DEFAULT_PROCESSES, *, mounted: bool = True
) -> None:
    """Make a region for a job of user `uid`; `folder` must not exist, its parent must. CoreError says why not.

    Without `mounted` it gets no tmpfs of its own, and the user can fill the file system that it is on: for tests.
    """
    terms = ffi.new("struct sluice_limit_device[]", max(len(devices), 1))
    for place, device in zip(terms, devices, strict=False):
        place.uuid, place.pci, place.name = _name(device.uuid), _name(device.pci), _name(device.name)
        place.total, place.limit = _bytes(device.total), _bytes(device.limit)
        place.context, place.spill = _bytes(device.context), _bytes(device.spill)
    text = new_error_text()
    check(lib.sluice_limit_create(bytes(folder), terms, len(devices), processes, uid, mounted, text), text)


def make_folder(folder: Path, uid: int, size: int, inodes: int) -> None:
    """A job's folder on its own tmpfs, which only root and user `uid` can enter. Raises CoreError."""
    text = new_error_text()
    check(lib.sluice_limit_make_folder(bytes(folder), uid, size, inodes, text), text)


def remove_folder(folder: Path) -> None:
    """Remove it in one step with its content; a missing one is not an error. Raises CoreError."""
    text = new_error_text()
    check(lib.sluice_limit_remove_folder(bytes(folder), text), text)


def remove(folder: Path) -> None:
    """Remove a region; a missing one is not an error."""
    text = new_error_text()
    check(lib.sluice_limit_remove(bytes(folder), text), text)


class Region:
    """A job's region, opened by its owner, who does not trust the ledger. Every method raises CoreError."""

    def __init__(self, folder: Path) -> None:
        handle, text = ffi.new("struct sluice_limit **"), new_error_text()
        check(lib.sluice_limit_open(bytes(folder), handle, text), text)
        self._handle = handle[0]

    def close(self) -> None:
        """Unmap it; nothing else may be called afterwards."""
        lib.sluice_limit_close(self._handle)
        self._handle = ffi.NULL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def devices(self) -> list[Device]:
        """The job's devices, with the limits in force."""
        terms, found = ffi.new("struct sluice_limit_device *"), []
        for index in range(lib.sluice_limit_device_count(self._handle)):
            self._call(lib.sluice_limit_get_device, index, terms)
            uuid, pci, name = (ffi.string(text).decode() for text in (terms.uuid, terms.pci, terms.name))
            found.append(Device(terms.total, terms.limit, terms.context, uuid, pci, name, terms.spill))
        return found

    def set_limit(self, device: int, limit: int) -> None:
        """Change what the job may hold of a device: whatever is granted from here on is by the new limit."""
        self._call(lib.sluice_limit_set, device, _bytes(limit))

    def usage(self, device: int) -> Usage:
        """Figures of a device; dead processes count until a process of the job removes them."""
        usage = ffi.new("struct sluice_limit_usage *")
        self._call(lib.sluice_limit_get_usage, device, usage)
        return Usage(usage.limit, usage.charged, usage.peak, usage.refused, usage.spilled)

    def _call(self, function: Any, *arguments: Any) -> None:
        text = new_error_text()
        check(function(self._handle, *arguments, text), text)


def _name(text: str) -> bytes:
    """As C holds it; one that is too long is refused there, for want of an end."""
    return text.encode()[: lib.SLUICE_LIMIT_NAME_SIZE]


def _bytes(size: int) -> int:
    """A size that C can hold; what it cannot is out of every range there."""
    return size if 0 <= size < 2**64 else 2**64 - 1
