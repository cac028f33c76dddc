"""What Python programs use GPUs with, unmodified, on the simulated driver: NVIDIA's bindings, cuBLAS, numba, CuPy and
PyTorch, to the last MiB of their jobs. `pip install -e .[gpu-python]` brings them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
from limited import Job

CONTEXT = 520
ROOM = 300
MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def _at_full_scale(full_scale: bool) -> None:
    if not full_scale:
        pytest.skip("packages of hundreds of MB: SLUICE_TEST_SCALE=full")


def has(package: str) -> pytest.MarkDecorator:
    try:
        there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        there = False
    return pytest.mark.skipif(not there, reason=f"{package} is not installed: pip install -e .[gpu-python]")


PROGRAMS = {
    "cuda.bindings": """
import json
from cuda.bindings import driver, runtime
def left():
    return runtime.cudaMemGetInfo()[1] >> 20
def take(call, mib):
    code, address = call(mib << 20)
    return int(code), address
said = [left(), take(runtime.cudaMalloc, 302)[0]]
code, address = take(runtime.cudaMalloc, 200)
said += [code, take(driver.cuMemAlloc, 102)[0], take(driver.cuMemAlloc, 100)[0], left()]
said += [int(runtime.cudaFree(address)[0]), left(), int(runtime.cudaMallocAsync(202 << 20, 0)[0])]
print(json.dumps(said))
""",
    "nvidia.cublas": """
import ctypes as c, importlib.util, json
from pathlib import Path
[package] = importlib.util.find_spec("nvidia.cublas").submodule_search_locations
[library] = Path(package).glob("lib/libcublas.so.*")
c.CDLL(str(library).replace("cublas.so", "cublasLt.so"), mode=c.RTLD_GLOBAL)
blas, cu = c.CDLL(str(library)), c.CDLL("libcuda.so.1")
context, handle = c.c_void_p(), c.c_void_p()
codes = [cu.cuInit(0), cu.cuDevicePrimaryCtxRetain(c.byref(context), 0), cu.cuCtxSetCurrent(context)]
def left():
    free = c.c_size_t()
    assert cu.cuMemGetInfo_v2(c.byref(free), c.byref(c.c_size_t())) == 0
    return free.value >> 20
def take(mib):
    address = c.c_uint64()
    return cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(mib << 20)), address
def create():
    return blas.cublasCreate_v2(c.byref(handle))
said = [max(codes), left(), take(300)]
code, rest = said.pop()
said += [code, create(), cu.cuMemFree_v2(rest), create()]
own = 300 - left()
code, vector = take(left())
one = c.byref(c.c_float(1))
said += [0 < own < 100, code, take(2)[0], blas.cublasSaxpy_v2(handle, 1000, one, vector, 1, vector, 1)]
said += [cu.cuCtxSynchronize(), blas.cublasDestroy_v2(handle), cu.cuMemFree_v2(vector), 300 - left()]
print(json.dumps(said))
""",
    "numba.cuda": """
import json
from numba import cuda
def left():
    return cuda.current_context().get_memory_info().free >> 20
def take(mib):
    try:
        return cuda.device_array(mib << 20, dtype="u1")
    except Exception as error:
        assert "OUT_OF_MEMORY" in str(error), error
said = [left(), take(302) is None]
it = take(200)
other = take(100)
said += [it is not None, take(2) is None, other is not None, left()]
del it
cuda.current_context().deallocations.clear()
said += [left(), take(202) is None]
print(json.dumps(said))
""",
    "cupy": """
import json
import cupy
def left():
    return cupy.cuda.runtime.memGetInfo()[0] >> 20
def take(pool, mib):
    try:
        return pool.malloc(mib << 20)
    except cupy.cuda.memory.OutOfMemoryError:
        return None
pool, other = cupy.cuda.MemoryPool(), cupy.cuda.MemoryAsyncPool()
said = [left(), take(pool, 302) is None]
it = take(pool, 200)
second = take(other, 100)  # its step does not fit
third = take(other, 96)
said += [it is not None, second is None, third is not None, take(other, 2) is None, left()]
del it
said += [left(), take(other, 102) is None]  # the pool keeps what was freed
pool.free_all_blocks()
said += [left(), take(other, 102) is not None]
print(json.dumps(said))
""",
    "torch": """
import json
import torch
def left():
    return torch.cuda.mem_get_info()[0] >> 20
def take(mib):
    try:
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return None
said = [left(), take(302) is None]
it, other = take(200), take(100)
said += [it is not None, take(2) is None, other is not None, left()]
del it
torch.cuda.synchronize()
torch.cuda.empty_cache()
said += [left(), take(202) is None, take(200) is not None]
print(json.dumps(said))
""",
}
EXPECTED = {
    "cuda.bindings": [ROOM, 2, 0, 2, 0, 0, 0, 200, 2],
    "nvidia.cublas": [0, ROOM, 0, 3, 0, 0, True, 0, 2, 0, 0, 0, 0, 0],
    "numba.cuda": [ROOM, True, True, True, True, 0, 200, True],
    "cupy": [ROOM, True, True, True, True, True, 4, 4, True, 204, True],
    "torch": [ROOM, True, True, True, True, 0, 200, True, True],
}


@pytest.mark.parametrize("package", [pytest.param(name, marks=has(name)) for name in PROGRAMS if name != "torch"])
def test_to_the_last_mib(make_job: MakeJob, package: str) -> None:
    out, err = make_job(CONTEXT + ROOM).run(PROGRAMS[package], CUDA_VISIBLE_DEVICES="0")
    assert json.loads(out.splitlines()[-1]) == EXPECTED[package], err


@has("torch")
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_each_allocator_of_pytorch(make_job: MakeJob, allocator: str) -> None:
    """Its own, on memory or on virtual memory, and the driver's."""
    program, expected, room = PROGRAMS["torch"], EXPECTED["torch"], ROOM
    if allocator == "backend:cudaMallocAsync":  # in whole steps of the pool, of which 120 MiB need four
        program, room = program.replace("302", "322").replace("take(100)", "take(120)"), 320
        expected = [320, True, True, True, True, 0, 192, True, True]
    job = make_job(CONTEXT + room)
    out, err = job.run(program, CUDA_VISIBLE_DEVICES="0", PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert json.loads(out.splitlines()[-1]) == expected, err
