"""Whether this process may load an eBPF program for the devices of a cgroup, as slurmstepd does for each job."""

from __future__ import annotations

import ctypes
import os
import struct

_SYS_BPF = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "riscv64": 280, "s390x": 351}
_PROG_LOAD, _CGROUP_DEVICE = 5, 15
_ALLOW_ALL = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)  # r0 = 1; exit


def refused() -> int:
    """The error number with which the kernel refuses it; 0: it does not. The program is attached to nothing."""
    number = _SYS_BPF.get(os.uname().machine)
    if number is None:
        return 0
    program, licence = ctypes.create_string_buffer(_ALLOW_ALL), ctypes.create_string_buffer(b"GPL")
    places = (ctypes.addressof(program), ctypes.addressof(licence))
    attributes = ctypes.create_string_buffer(struct.pack("=IIQQ", _CGROUP_DEVICE, 2, *places), 128)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(ctypes.c_long(number), _PROG_LOAD, attributes, ctypes.c_uint(128))
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0
