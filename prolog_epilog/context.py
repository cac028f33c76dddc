"""A program that opens a device through CUDA or HIP, prints ``total BYTES``, and waits: what it then uses is a context.

``python -m prolog_epilog.context VENDOR PLACE``; PLACE is what the vendor's visible-devices variable takes.
"""

from __future__ import annotations

import ctypes
import os
import sys


def _check(what: str, status: int) -> None:
    if status != 0:
        print(f"{what} answers {status}", flush=True)
        sys.exit(1)


def cuda() -> int:
    """Retain the primary context of the only visible device; its total memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, total, device = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), 0))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    return total.value


def hip() -> int:
    """The same through HIP, where a first allocation makes the context."""
    runtime = ctypes.CDLL("libamdhip64.so")
    address, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    _check("hipSetDevice", runtime.hipSetDevice(0))
    _check("hipMalloc", runtime.hipMalloc(ctypes.byref(address), ctypes.c_size_t(4096)))
    _check("hipFree", runtime.hipFree(address))
    _check("hipMemGetInfo", runtime.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
    return total.value


def main() -> None:
    """Open, print, wait until the parent ends or kills this process."""
    vendor, place = sys.argv[1:]
    variable, start = {"nvidia": ("CUDA_VISIBLE_DEVICES", cuda), "amd": ("ROCR_VISIBLE_DEVICES", hip)}[vendor]
    os.environ[variable] = place
    try:
        total = start()
    except OSError as error:
        print(str(error), flush=True)
        sys.exit(1)
    print(f"total {total}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
