"""A program that clears a GPU's memory: it takes all that is free, writes zeros, and prints ``cleared BYTES``.

``python -m prolog_epilog.scrub VENDOR PLACE``; PLACE is what the vendor's visible-devices variable takes. What the
driver keeps for itself, and pieces smaller than 2 MiB, are out of reach; alone on the device it reaches all the rest.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

_LARGEST, _SMALLEST = 4 << 30, 2 << 20
_REACHED = 0.97  # of what was free: a context's own growth and fragments are the rest


def _check(what: str, status: int) -> None:
    if status != 0:
        print(f"{what} answers {status}")
        sys.exit(1)


def _fill(free: int, allocate: Callable[[int], int | None], clear: Callable[[int, int], int]) -> int:
    """Take memory in pieces that halve when they no longer fit, clear each; bytes that were cleared."""
    size, cleared = _LARGEST, 0
    while size >= _SMALLEST:
        address = allocate(size)
        if address is None:
            size //= 2
            continue
        _check("fill", clear(address, size))
        cleared += size
    if cleared < free * _REACHED:
        print(f"{cleared} of {free} free bytes could be reached: something else is on the device")
        sys.exit(1)
    return cleared


def cuda() -> int:
    """All of a CUDA device's free memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), 0))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    _check("cuMemGetInfo", driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))

    def allocate(size: int) -> int | None:
        address = ctypes.c_uint64()
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        return address.value if status == 0 else None

    def clear(address: int, size: int) -> int:
        return int(driver.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size)))

    cleared = _fill(free.value, allocate, clear)
    _check("cuCtxSynchronize", driver.cuCtxSynchronize())
    return cleared


def hip() -> int:
    """All of a HIP device's free memory."""
    runtime = ctypes.CDLL("libamdhip64.so")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check("hipSetDevice", runtime.hipSetDevice(0))
    _check("hipMemGetInfo", runtime.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)))

    def allocate(size: int) -> int | None:
        address = ctypes.c_void_p()
        status = runtime.hipMalloc(ctypes.byref(address), ctypes.c_size_t(size))
        return address.value if status == 0 else None

    def clear(address: int, size: int) -> int:
        return int(runtime.hipMemset(ctypes.c_void_p(address), 0, ctypes.c_size_t(size)))

    cleared = _fill(free.value, allocate, clear)
    _check("hipDeviceSynchronize", runtime.hipDeviceSynchronize())
    return cleared


def main() -> None:
    """Clear the device, and print how much."""
    vendor, place = sys.argv[1:]
    variable, clear = {"nvidia": ("CUDA_VISIBLE_DEVICES", cuda), "amd": ("ROCR_VISIBLE_DEVICES", hip)}[vendor]
    os.environ[variable] = place
    try:
        cleared = clear()
    except OSError as error:
        print(str(error))
        sys.exit(1)
    print(f"cleared {cleared}")


if __name__ == "__main__":
    main()
