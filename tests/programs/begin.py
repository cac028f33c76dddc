"""How Python programs that use a GPU begin: the text of cuda.py, cudart.py or hip.py, to which a test adds its own.

KERNEL follows CUDART.
"""

from pathlib import Path

_NAMES = ("cuda.py", "cudart.py", "cudart_kernel.py", "hip.py")
CUDA, CUDART, KERNEL, HIP = (Path(__file__).with_name(name).read_text() for name in _NAMES)

# ---- whole ones ----

HOLD = """
import ctypes, sys, time
cu, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0
seconds, *sizes = sys.argv[1:]
for mib in sizes:
    print(cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20)), flush=True)
time.sleep(float(seconds))
"""
"""So many seconds, after it took so many MiB, one after the other; prints what each allocation returned."""
FILL = """
import ctypes as c
cu, context, address, got = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64(), 0
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
while (code := cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(2 << 20))) == 0:
    got += 2
print(got, code)
"""
"""Prints how many MiB it got, and the code of what it did not get."""
ESCAPE = 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"'
"""A shell's script, in a mount namespace of the user's own: nothing is preloaded, as in a rootless container."""
