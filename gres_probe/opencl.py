"""What OpenCL says of GPUs that no vendor's library describes: enough to know them, not to give them to jobs.

The constants and functions are those of the Khronos headers (cl.h, and cl_ext.h for cl_khr_pci_bus_info).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char, c_uint32, c_uint64, c_void_p
from typing import Any

from gres_probe.inventory import OpenClDevice
from gres_probe.machine import Machine, pci_address
from gres_probe.vendors import Findings, VendorSpec
from sluice.base.text import one_line

LIBRARY = "libOpenCL.so.1"
GPUS = (1 << 2) | (1 << 3)  # CL_DEVICE_TYPE_GPU and _ACCELERATOR
ANY = 0xFFFFFFFF  # CL_DEVICE_TYPE_ALL: processors, too
_MOST = 64  # platforms, and devices of one
_PLATFORM_NAME = 0x0902
_COMPUTE_UNITS, _MEMORY, _NAME, _VENDOR, _DRIVER, _PCI = 0x1002, 0x101F, 0x102B, 0x102C, 0x102D, 0x410F
_Ask = Callable[[int, ctypes.Array[Any]], bool]


def opencl_devices(types: int) -> list[OpenClDevice]:
    """All devices of these types; none where there is no OpenCL. Loads drivers, so it belongs into a child process."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    found = []
    for platform in _handles(library.clGetPlatformIDs):
        title = _text(_asking(library.clGetPlatformInfo, platform), _PLATFORM_NAME)
        for device in _handles(library.clGetDeviceIDs, c_void_p(platform), c_uint64(types)):
            found.append(_describe(_asking(library.clGetDeviceInfo, device), title))
    return found


def _handles(function: Any, *arguments: Any) -> list[int]:
    handles, count = (c_void_p * _MOST)(), c_uint32()
    if function(*arguments, c_uint32(_MOST), handles, ctypes.byref(count)) != 0:
        return []
    return [handle for handle in handles[: min(count.value, _MOST)] if handle]


def _asking(function: Any, handle: int) -> _Ask:
    def ask(what: int, room: ctypes.Array[Any]) -> bool:
        size = ctypes.c_size_t(ctypes.sizeof(room))
        return bool(function(c_void_p(handle), c_uint32(what), size, room, None) == 0)

    return ask


def _text(ask: _Ask, what: int) -> str:
    room = (c_char * 1024)()
    return one_line(room.value.decode(errors="replace")) if ask(what, room) else ""


def _number(ask: _Ask, what: int, kind: type[c_uint32] | type[c_uint64]) -> int | None:
    room = (kind * 1)()
    return int(room[0]) if ask(what, room) else None


def _describe(ask: _Ask, platform: str) -> OpenClDevice:
    memory = _number(ask, _MEMORY, c_uint64)
    place = (c_uint32 * 4)()  # domain, bus, device, function
    return OpenClDevice(
        name=_text(ask, _NAME) or "unknown",
        vendor=_text(ask, _VENDOR) or "unknown",
        platform=platform or "unknown",
        driver_version=_text(ask, _DRIVER),
        memory_mib=None if memory is None else memory >> 20,
        compute_units=_number(ask, _COMPUTE_UNITS, c_uint32),
        pci_address=pci_address(*place) if ask(_PCI, place) else "",
    )


def _probe(_: Machine) -> Findings:
    return Findings(opencl=opencl_devices(GPUS))


SPEC = VendorSpec("opencl", "OpenCL", 0, "", LIBRARY, "", _probe)
"""Not a vendor: found by no name, and asked only for GPUs that no vendor's library describes."""
