# ruff: noqa: F401, RUF012
"""CUDA's runtime, in short: sizes are in MiB; a call that fails returns its code as a negative number."""

import ctypes as c
import json
import os
import sys

rt = c.CDLL(os.environ["CUDART"])
MIB = 1 << 20


def ok(code):
    assert code == 0, code


def size(mib):
    return c.c_size_t(int(mib * MIB))


def got(code, handle):
    return handle.value if code == 0 else -code


class Extent(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("depth", c.c_size_t)]


class Pitched(c.Structure):
    _fields_ = [("address", c.c_void_p), ("pitch", c.c_size_t), ("x", c.c_size_t), ("y", c.c_size_t)]


class Format(c.Structure):
    _fields_ = [("x", c.c_int), ("y", c.c_int), ("z", c.c_int), ("w", c.c_int), ("kind", c.c_int)]


class Pool(c.Structure):
    _fields_ = [
        ("type", c.c_int),
        ("handles", c.c_int),
        ("where", c.c_int),
        ("id", c.c_int),
        ("w", c.c_void_p),
        ("most", c.c_size_t),
        ("reserved", c.c_ubyte * 56),
    ]


FLOAT = Format(32, 0, 0, 0, 2)
rt.cudaMalloc3D.argtypes = [c.c_void_p, Extent]
rt.cudaMalloc3DArray.argtypes = [c.c_void_p, c.c_void_p, Extent, c.c_uint]
rt.cudaMallocMipmappedArray.argtypes = [c.c_void_p, c.c_void_p, Extent, c.c_uint, c.c_uint]


def info():
    left, total = c.c_size_t(), c.c_size_t()
    ok(rt.cudaMemGetInfo(c.byref(left), c.byref(total)))
    return [left.value // MIB, total.value // MIB]


def alloc(mib):
    address = c.c_void_p()
    return got(rt.cudaMalloc(c.byref(address), size(mib)), address)


def free(address):
    return rt.cudaFree(c.c_void_p(address))


def managed(mib):
    address = c.c_void_p()
    return got(rt.cudaMallocManaged(c.byref(address), size(mib), 1), address)


def pitched(mib):
    address = c.c_void_p()
    return got(rt.cudaMallocPitch(c.byref(address), c.byref(c.c_size_t()), size(1), c.c_size_t(mib)), address)


def box(mib):
    it = Pitched()
    code = rt.cudaMalloc3D(c.byref(it), Extent(MIB, mib, 1))
    return it.address if code == 0 else -code


def array(mib):
    it = c.c_void_p()
    return got(rt.cudaMallocArray(c.byref(it), c.byref(FLOAT), c.c_size_t(1024), c.c_size_t(256 * mib), 0), it)


def array_3d(mib):
    it = c.c_void_p()
    return got(rt.cudaMalloc3DArray(c.byref(it), c.byref(FLOAT), Extent(1024, 256, mib), 0), it)


def mipmap(mib):
    it = c.c_void_p()
    return got(rt.cudaMallocMipmappedArray(c.byref(it), c.byref(FLOAT), Extent(1024, 256 * mib, 0), 1, 0), it)


def free_array(it):
    return rt.cudaFreeArray(c.c_void_p(it))


def free_mipmap(it):
    return rt.cudaFreeMipmappedArray(c.c_void_p(it))


def stream():
    it = c.c_void_p()
    ok(rt.cudaStreamCreateWithFlags(c.byref(it), 1))
    return it


def alloc_async(mib, stream=None):
    address = c.c_void_p()
    return got(rt.cudaMallocAsync(c.byref(address), size(mib), stream), address)


def free_async(address, stream=None):
    code = rt.cudaFreeAsync(c.c_void_p(address), stream)
    ok(rt.cudaStreamSynchronize(stream))
    return code


def pool(device=0):
    it = c.c_void_p()
    ok(rt.cudaMemPoolCreate(c.byref(it), c.byref(Pool(1, 0, 1, device))))
    return it


def alloc_from(pool, mib, stream=None):
    address = c.c_void_p()
    return got(rt.cudaMallocFromPoolAsync(c.byref(address), size(mib), pool, stream), address)


def graph_of(*mibs):
    "A stream's recording of allocations, which its launch makes."
    recorded, graph, executable = stream(), c.c_void_p(), c.c_void_p()
    ok(rt.cudaStreamBeginCapture(recorded, 0))
    for mib in mibs:
        assert alloc_async(mib, recorded) > 0
    ok(rt.cudaStreamEndCapture(recorded, c.byref(graph)))
    ok(rt.cudaGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return executable


def launch(executable):
    return rt.cudaGraphLaunch(executable, None)


def driver(name, version, result=c.c_int):
    "A function of the driver, as the runtime gives it to programs."
    it, found = c.c_void_p(), c.c_int()
    ok(rt.cudaGetDriverEntryPointByVersion(name.encode(), c.byref(it), version, c.c_ulonglong(0), c.byref(found)))
    assert found.value == 0, found.value
    return c.CFUNCTYPE(result)(it.value)


def step(name):
    print(name, flush=True)
    sys.stdin.readline()
