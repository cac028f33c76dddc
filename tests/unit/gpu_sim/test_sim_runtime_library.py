"""NVIDIA's runtime library, unmodified, on the simulated driver: what it copies, records and launches."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtimes import RUNTIMES, Runtime
from sim_node import Node

from gpu_sim import load_platform, write_node_state
from tests.programs.begin import CUDART, KERNEL


@pytest.fixture(params=RUNTIMES, ids=[f"cudart{runtime.version}" for runtime in RUNTIMES])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    found: Runtime = request.param
    return found


@pytest.fixture
def node(tmp_path: Path, runtime: Runtime) -> Node:
    platform = load_platform("dgx-h100").model_copy(update={"drivers": {"nvidia": runtime.driver}})
    write_node_state(tmp_path, platform, "n1")
    return Node(tmp_path)


def test_a_driver_that_is_too_old_is_refused(node: Node, runtime: Runtime) -> None:
    """CUDA 13 needs a driver of 13; minor versions do not matter."""
    old = load_platform("l40s-x4")
    write_node_state(node.folder, old, "n1")
    ask = "print(json.dumps([rt.cudaGetDeviceCount(c.byref(c.c_int()))]))"
    assert node.run(CUDART + ask, CUDART=runtime.library) == [0 if runtime.version == 12 else 35]


def test_a_device_is_in_use_only_when_something_needs_it(node: Node, runtime: Runtime) -> None:
    ask = """
count = c.c_int()
driver = c.CDLL("libcuda.so.1")
def active():
    state = c.c_int()
    ok(driver.cuDevicePrimaryCtxGetState(0, c.byref(c.c_uint()), c.byref(state)))
    return state.value
ok(rt.cudaGetDeviceCount(c.byref(count)))
said = [count.value, active()]
alloc(1)
said += [active(), rt.cudaDeviceReset(), active(), alloc(1) > 0, active()]
print(json.dumps(said))
"""
    assert node.run(CUDART + ask, CUDART=runtime.library) == [8, 0, 1, 0, 0, True, 1]


def test_copies_of_two_and_three_dimensions(node: Node, runtime: Runtime) -> None:
    ask = """
class Place(c.Structure):
    _fields_ = [("x", c.c_size_t), ("y", c.c_size_t), ("z", c.c_size_t)]
class Copy(c.Structure):
    _fields_ = [("from_array", c.c_void_p), ("from_place", Place), ("from_", Pitched),
                ("to_array", c.c_void_p), ("to_place", Place), ("to", Pitched), ("extent", Extent), ("kind", c.c_int)]
data, back = os.urandom(100 * 50), c.create_string_buffer(100 * 50)
n = c.c_size_t
# rows of a pitched allocation
address, pitch = c.c_void_p(), n()
ok(rt.cudaMallocPitch(c.byref(address), c.byref(pitch), n(100), n(50)))
ok(rt.cudaMemcpy2D(address, pitch, data, n(100), n(100), n(50), 1))
ok(rt.cudaMemcpy2D(back, n(100), address, pitch, n(100), n(50), 2))
said = [pitch.value, back.raw == data]
ok(rt.cudaMemset2D(address, pitch, 7, n(100), n(25)))
ok(rt.cudaMemcpy2D(back, n(100), address, pitch, n(100), n(50), 2))
said += [back.raw == b"\\7" * 2500 + data[2500:]]
# an array of 25 x 50 floats
it = c.c_void_p()
ok(rt.cudaMallocArray(c.byref(it), c.byref(FLOAT), n(25), n(50), 0))
ok(rt.cudaMemcpy2DToArray(it, n(0), n(0), data, n(100), n(100), n(50), 1))
ok(rt.cudaMemcpy2DFromArray(back, n(100), it, n(0), n(0), n(100), n(50), 2))
extent = Extent()
ok(rt.cudaArrayGetInfo(c.byref(Format()), c.byref(extent), c.byref(c.c_uint()), it))
said += [back.raw == data, extent.width, extent.height]
# a box of 10 x 10 x 50 bytes
box = Pitched()
ok(rt.cudaMalloc3D(c.byref(box), Extent(10, 10, 50)))
one = c.create_string_buffer(data)
there = Copy(from_=Pitched(c.addressof(one), 10, 10, 10), to=box, extent=Extent(10, 10, 50), kind=1)
here = Copy(from_=box, to=Pitched(c.addressof(back), 10, 10, 10), extent=Extent(10, 10, 50), kind=2)
back.raw = bytes(5000)
ok(rt.cudaMemcpy3D(c.byref(there)))
ok(rt.cudaMemcpy3D(c.byref(here)))
print(json.dumps(said + [back.raw == data]))
"""
    assert node.run(CUDART + ask, CUDART=runtime.library) == [512, True, True, True, 25, 50, True]


def test_what_is_recorded_is_done_when_the_graph_is_launched(node: Node, runtime: Runtime) -> None:
    ask = """
memory, recorded, graph, executable = alloc(1), stream(), c.c_void_p(), c.c_void_p()
called, back = [], c.create_string_buffer(8)
callback = c.CFUNCTYPE(None, c.c_void_p)(lambda _: called.append(1))
ok(rt.cudaStreamBeginCapture(recorded, 0))
ok(rt.cudaMemsetAsync(c.c_void_p(memory), 5, c.c_size_t(8), recorded))
ok(rt.cudaMemcpyAsync(back, c.c_void_p(memory), c.c_size_t(8), 2, recorded))
ok(rt.cudaLaunchHostFunc(recorded, callback, None))
ok(rt.cudaStreamEndCapture(recorded, c.byref(graph)))
ok(rt.cudaGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(0)))
said = [back.raw[0], called[:]]
for _ in range(2):
    ok(launch(executable))
ok(rt.cudaDeviceSynchronize())
print(json.dumps(said + [back.raw[0], called]))
"""
    assert node.run(CUDART + ask, CUDART=runtime.library) == [0, [], 5, [1, 1]]


def test_a_kernel_takes_its_time_and_does_nothing(node: Node, runtime: Runtime) -> None:
    """As the compiler's start code registers it: a fat binary, of which the simulated driver reads nothing."""
    ask = """
import time
ok(rt.cudaFree(None))
start = time.monotonic()
codes = [rt.cudaLaunchKernel(kernel, Size(1, 1, 1), Size(threads, 1, 1), None, 0, None) for threads in (32, 2048)]
ok(rt.cudaDeviceSynchronize())
print(json.dumps(codes + [time.monotonic() - start >= 0.2]))
"""
    codes = node.run(CUDART + KERNEL + ask, CUDART=runtime.library, SLUICE_SIM_KERNEL_US="200000")
    assert codes[0] == 0 and codes[1] != 0 and codes[2]
