"""Functions of HIP that the simulated runtime does not have, on a stand-in that grants everything: what is charged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limited import MIB, Job, new_job

from sluice.core.limit import Device
from tests.programs.build import build_library

CONTEXT = 10
BEGIN = """
import ctypes as c, json
hip = c.CDLL("libamdhip64.so.6")
class Pitched(c.Structure):
    _fields_ = [("address", c.c_void_p), ("pitch", c.c_size_t), ("width", c.c_size_t), ("height", c.c_size_t)]
class Extent(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("depth", c.c_size_t)]
class Channel(c.Structure):
    _fields_ = [(n, c.c_int) for n in "xyzwk"]
class Desc(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("format", c.c_int), ("channels", c.c_uint)]
class Desc3(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("depth", c.c_size_t), ("format", c.c_int),
                ("channels", c.c_uint), ("flags", c.c_uint)]
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]
MIB = 1 << 20
def alloc(mib):
    p = c.c_void_p()
    code = hip.hipMalloc(c.byref(p), c.c_size_t(int(mib * MIB)))
    return p if code == 0 else code
def free(p):
    return hip.hipFree(p)
def left():
    "MiB that can still be had."
    kept = []
    while not isinstance(one := alloc(1), int):
        kept.append(one)
    for one in kept:
        free(one)
    return len(kept)
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    build_library("hip_stand_in", folder / "libamdhip64.so.6", "-Wl,-soname,libamdhip64.so.6")
    return folder


@pytest.fixture
def job(tmp_path: Path, runtime: Path) -> Iterator[Callable[[int], Job]]:
    jobs: list[Job] = []

    def make(mib: int) -> Job:
        device = Device(1 << 40, (CONTEXT + mib) * MIB, CONTEXT * MIB, pci="0000:05:00.0")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(runtime)}
        jobs.append(new_job(tmp_path / f"region{len(jobs)}", environment, [device]))
        return jobs[-1]

    yield make
    for one in jobs:
        one.end()


KINDS = {
    "hipMalloc3D": (
        "m = Pitched(); code = hip.hipMalloc3D(c.byref(m), Extent(MIB, 30, 2)); m = c.c_void_p(m.address)",
        "hip.hipFree(m)",
    ),
    "hipArrayCreate": (
        "m = c.c_void_p(); code = hip.hipArrayCreate(c.byref(m), c.byref(Desc(4096, 3840, 0x20, 1)))",
        "hip.hipArrayDestroy(m)",
    ),
    "hipArray3DCreate": (
        "m = c.c_void_p(); code = hip.hipArray3DCreate(c.byref(m), c.byref(Desc3(1024, 1024, 15, 0x08, 4, 0)))",
        "hip.hipArrayDestroy(m)",
    ),
    "hipMallocMipmappedArray": (
        "m, what = c.c_void_p(), Channel(32, 0, 0, 0, 2); "
        "code = hip.hipMallocMipmappedArray(c.byref(m), c.byref(what), Extent(1024, 1024, 15), 1, 0)",
        "hip.hipFreeMipmappedArray(m)",
    ),
    "hipMipmappedArrayCreate": (
        "m, what = c.c_void_p(), Desc3(1024, 1024, 15, 0x20, 1, 0); "
        "code = hip.hipMipmappedArrayCreate(c.byref(m), c.byref(what), 1)",
        "hip.hipMipmappedArrayDestroy(m)",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_charged_and_given_back(job: Callable[[int], Job], kind: str) -> None:
    """60 MiB of 100: a second one does not fit, and after the first is gone all is there again."""
    make, drop = KINDS[kind]
    out, err = job(100).run(
        BEGIN
        + f"""
def make():
    {make}
    return m if code == 0 else code
said = [left()]
m = make()
said += [left(), make()]
said += [{drop}, left()]
print(json.dumps([one if isinstance(one, int) else "?" for one in said]))
"""
    )
    assert json.loads(out) == [100, 40, 2, 0, 100], err


def test_an_array_whose_size_has_more_than_64_bits_is_refused(job: Callable[[int], Job]) -> None:
    out, err = job(100).run(
        BEGIN
        + """
m, what = c.c_void_p(), Channel(1 << 30, 1 << 30, 1 << 30, 1 << 30, 0)
print(hip.hipMallocMipmappedArray(c.byref(m), c.byref(what), Extent(1 << 20, 1 << 20, 1 << 6), 1, 0))
"""
    )
    assert out == "2\n", err


def test_functions_found_by_name_are_limited(job: Callable[[int], Job]) -> None:
    out, err = job(100).run(
        BEGIN
        + """
found, p = c.c_void_p(), c.c_void_p()
assert hip.hipGetProcAddress(b"hipMalloc", c.byref(found), 60000, c.c_uint64(0), None) == 0
make = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_size_t)(found.value)
print(json.dumps([make(c.addressof(p), 101 * MIB), make(c.addressof(p), 60 * MIB), left()]))
"""
    )
    assert json.loads(out) == [2, 0, 40], err


def test_memory_of_others_and_pools_pass_through_and_cost_nothing(job: Callable[[int], Job]) -> None:
    out, err = job(100).run(
        BEGIN
        + """
own, handle, opened, pool, file = alloc(30), Handle(), c.c_void_p(), c.c_void_p(), c.c_int()
said = [hip.hipIpcGetMemHandle(c.byref(handle), own), hip.hipIpcOpenMemHandle(c.byref(opened), handle, 1)]
said += [opened.value == own.value, left(), hip.hipIpcCloseMemHandle(opened), free(own), left()]
said += [hip.hipMemPoolExportToShareableHandle(c.byref(file), None, 1, 0), file.value]
said += [hip.hipMemPoolImportFromShareableHandle(c.byref(pool), c.c_void_p(42), 1, 0), left()]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [0, 0, True, 70, 0, 0, 100, 0, 42, 0, 100], err
