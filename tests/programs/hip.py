# ruff: noqa: F401, RUF012
"""HIP's runtime, in short: sizes are in MiB; a call that fails returns its code as a negative number."""

import ctypes as c
import json
import os
import sys

hip = c.CDLL("libamdhip64.so")
MIB = 1 << 20


def ok(code):
    assert code == 0, code


def size(mib):
    return c.c_size_t(int(mib * MIB))


def alloc(mib, function="hipMalloc", *more):
    p = c.c_void_p()
    code = getattr(hip, function)(c.byref(p), size(mib), *more)
    return p if code == 0 else code


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


class Node(c.Structure):
    _fields_ = [
        ("pool", Pool),
        ("access", c.c_void_p),
        ("count", c.c_size_t),
        ("bytes", c.c_size_t),
        ("address", c.c_uint64),
    ]


def graph_of(*mibs):
    graph, executable = c.c_void_p(), c.c_void_p()
    ok(hip.hipInit(0))
    ok(hip.hipGraphCreate(c.byref(graph), 0))
    for mib in mibs:
        node = Node(pool=Pool(1, 0, 1, 0), bytes=int(mib * MIB))
        ok(hip.hipGraphAddMemAllocNode(c.byref(c.c_void_p()), graph, None, c.c_size_t(0), c.byref(node)))
    ok(hip.hipGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return executable


def info():
    left, total = c.c_size_t(), c.c_size_t()
    ok(hip.hipMemGetInfo(c.byref(left), c.byref(total)))
    return [left.value // MIB, total.value // MIB]


def step(name):
    print(name, flush=True)
    sys.stdin.readline()
