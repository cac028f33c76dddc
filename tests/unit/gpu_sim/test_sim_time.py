"""Simulated CUDA and HIP: kernels take time on their stream, and programs wait for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_node import Node

BEGIN = """
import ctypes as c, json, time
cu = c.CDLL("libcuda.so.1")
def ok(code): assert code == 0, code
context, module, slow, fast = (c.c_void_p() for _ in range(4))
ok(cu.cuInit(0))
ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0))
ok(cu.cuCtxSetCurrent(context))
ok(cu.cuModuleLoadData(c.byref(module), b"any"))
ok(cu.cuModuleGetFunction(c.byref(slow), module, b"slow"))
ok(cu.cuModuleGetFunction(c.byref(fast), module, b"fast"))
def new_stream(flags=1):
    stream = c.c_void_p()
    ok(cu.cuStreamCreate(c.byref(stream), flags))
    return stream
def new_event():
    event = c.c_void_p()
    ok(cu.cuEventCreate(c.byref(event), 0))
    return event
def launch(function, stream=None):
    one = c.c_uint(1)
    ok(cu.cuLaunchKernel(function, one, one, one, one, one, one, c.c_uint(0), stream, None, None))
def ms(start, end):
    took = c.c_float()
    ok(cu.cuEventElapsedTime(c.byref(took), start, end))
    return took.value
def waited(call, *arguments):
    before = time.monotonic()
    ok(call(*arguments))
    return time.monotonic() - before
"""
# The same names for HIP's functions.
HIP = BEGIN.replace(
    'cu = c.CDLL("libcuda.so.1")\n',
    """
hip = c.CDLL("libamdhip64.so")
class Cu:
    others = {"cuLaunchKernel": "hipModuleLaunchKernel", "cuStreamCreate": "hipStreamCreateWithFlags"}
    def __getattr__(self, name):
        return getattr(hip, self.others.get(name, "hip" + name.removeprefix("cu")))
    def cuDevicePrimaryCtxRetain(self, *_): return 0
    def cuCtxSetCurrent(self, *_): return 0
    def cuEventCreate(self, event, _): return hip.hipEventCreate(event)
cu = Cu()
""",
)
NOT_READY = 600


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_stream_is_busy_until_its_kernels_are_done(make_node: Callable[..., Node], vendor: str) -> None:
    ask = """
stream, other, first, last = new_stream(), new_stream(), new_event(), new_event()
before = time.monotonic()
ok(cu.cuEventRecord(first, stream))
for _ in range(3):
    launch(slow, stream)
ok(cu.cuEventRecord(last, stream))
launched = time.monotonic() - before
said = [launched < 0.3, cu.cuStreamQuery(stream), cu.cuStreamQuery(other), cu.cuEventQuery(last)]
waited(cu.cuStreamSynchronize, other)
said += [cu.cuStreamQuery(stream), waited(cu.cuStreamSynchronize, stream) > 0.1]
said += [cu.cuStreamQuery(stream), cu.cuEventQuery(last), 590 < ms(first, last) < 700]
print(json.dumps(said))
"""
    platform, begin = ("mi300x-platform", HIP) if vendor == "amd" else ("dgx-h100", BEGIN)
    said = make_node(platform).run(begin + ask, SLUICE_SIM_KERNEL_US="slow=200000,1")
    assert said == [True, NOT_READY, 0, NOT_READY, NOT_READY, True, 0, 0, True]


def test_streams_wait_for_events_and_for_the_default_stream(dgx: Node) -> None:
    ask = """
one, other, blocking, event = new_stream(), new_stream(), new_stream(0), new_event()
launch(slow, one)
ok(cu.cuEventRecord(event, one))
ok(cu.cuStreamWaitEvent(other, event, 0))
launch(fast, other)
said = [cu.cuStreamQuery(other), waited(cu.cuStreamSynchronize, other) > 0.1]
launch(slow)
launch(fast, blocking)
said += [cu.cuStreamQuery(blocking), waited(cu.cuCtxSynchronize) > 0.1, cu.cuStreamQuery(blocking)]
launch(slow)
said += [waited(cu.cuEventSynchronize, event) < 0.1, waited(cu.cuStreamSynchronize, None) > 0.05]
print(json.dumps(said))
"""
    said = dgx.run(BEGIN + ask, SLUICE_SIM_KERNEL_US="slow=250000,1")
    assert said == [NOT_READY, True, NOT_READY, True, 0, True, True]


def test_a_stream_takes_so_many_launches(dgx: Node) -> None:
    """1,024 of 1 ms fit; the next 100 wait."""
    ask = """
stream = new_stream()
before = time.monotonic()
for _ in range(1124):
    launch(slow, stream)
print(json.dumps(time.monotonic() - before))
"""
    assert dgx.run(BEGIN + ask, SLUICE_SIM_KERNEL_US="1000") > 0.09
