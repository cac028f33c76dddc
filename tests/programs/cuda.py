# ruff: noqa: F401, RUF012
"""CUDA's driver, in short: sizes are in MiB; a call that fails returns its code as a negative number."""

import ctypes as c
import json
import os
import sys
import threading
import time

cu = c.CDLL("libcuda.so.1")
MIB = 1 << 20


def ok(code):
    assert code == 0, code


def start(device=0):
    ok(cu.cuInit(0))
    context = c.c_void_p()
    code = cu.cuDevicePrimaryCtxRetain(c.byref(context), device)
    if code == 0:
        ok(cu.cuCtxSetCurrent(context))
    return context if code == 0 else -code


def alloc(mib):
    address = c.c_uint64()
    code = cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(int(mib * MIB)))
    return address.value if code == 0 else -code


def free(address):
    return cu.cuMemFree_v2(c.c_uint64(address))


def info():
    left, total = c.c_size_t(), c.c_size_t()
    ok(cu.cuMemGetInfo_v2(c.byref(left), c.byref(total)))
    return [left.value // MIB, total.value // MIB]


def fill():
    "All that can be had, in ever smaller pieces; MiB."
    got, piece = 0, 1 << 16
    while piece >= 1:
        if alloc(piece) > 0:
            got += piece
        else:
            piece //= 2
    return got


class Prop(c.Structure):
    _fields_ = [
        ("type", c.c_int),
        ("handles", c.c_int),
        ("where", c.c_int),
        ("id", c.c_int),
        ("w", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    ]


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


class Array(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("format", c.c_int), ("channels", c.c_uint)]


class Array3(c.Structure):
    _fields_ = [
        ("width", c.c_size_t),
        ("height", c.c_size_t),
        ("depth", c.c_size_t),
        ("format", c.c_int),
        ("channels", c.c_uint),
        ("flags", c.c_uint),
    ]


class Node(c.Structure):
    _fields_ = [
        ("pool", Pool),
        ("access", c.c_void_p),
        ("count", c.c_size_t),
        ("bytes", c.c_size_t),
        ("address", c.c_uint64),
    ]


def size(mib):
    return c.c_size_t(int(mib * MIB))


def create(mib, device=0):
    handle = c.c_uint64()
    code = cu.cuMemCreate(c.byref(handle), size(mib), c.byref(Prop(1, 1, 1, device)), c.c_ulonglong(0))
    return handle.value if code == 0 else -code


def reserve(mib):
    place = c.c_uint64()
    ok(cu.cuMemAddressReserve(c.byref(place), size(mib), c.c_size_t(0), c.c_uint64(0), c.c_ulonglong(0)))
    return place.value


def map_(place, mib, handle):
    return cu.cuMemMap(c.c_uint64(place), size(mib), c.c_size_t(0), c.c_uint64(handle), c.c_ulonglong(0))


def unmap(place, mib):
    return cu.cuMemUnmap(c.c_uint64(place), size(mib))


def release(handle):
    return cu.cuMemRelease(c.c_uint64(handle))


def alloc_async(mib, stream=None, pool=None):
    address = c.c_uint64()
    code = (
        cu.cuMemAllocAsync(c.byref(address), size(mib), stream)
        if pool is None
        else cu.cuMemAllocFromPoolAsync(c.byref(address), size(mib), pool, stream)
    )
    return address.value if code == 0 else -code


def graph_of(*mibs):
    graph, executable = c.c_void_p(), c.c_void_p()
    ok(cu.cuGraphCreate(c.byref(graph), 0))
    for mib in mibs:
        node = Node(pool=Pool(1, 0, 1, 0), bytes=int(mib * MIB))
        ok(cu.cuGraphAddMemAllocNode(c.byref(c.c_void_p()), graph, None, c.c_size_t(0), c.byref(node)))
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return executable


def step(name):
    print(name, flush=True)
    sys.stdin.readline()
