"""HIP under the limiter: the same guarantees as for CUDA, in pages of 4 KiB."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limited import MIB, Job, new_job
from sim_node import Node

from gpu_sim import holdings
from sluice.core.limit import Device
from tests.programs.begin import HIP

CONTEXT = 310
TOTAL = (196592 - 284) * MIB
MakeJob = Callable[..., Job]


@pytest.fixture
def mi300(make_node: Callable[[str], Node]) -> Node:
    return make_node("mi300x-platform")


@pytest.fixture
def amd_job(tmp_path: Path, mi300: Node) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(*limits: int, spill: int = 0) -> Job:
        pci = ["0000:05:00.0", "0000:26:00.0"]
        devices = [
            Device(TOTAL, n * MIB, CONTEXT * MIB, pci=p, spill=spill * MIB) for n, p in zip(limits, pci, strict=False)
        ]
        jobs.append(new_job(tmp_path / f"region{len(jobs)}", mi300.environment(), devices))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


EVERYTHING = (
    HIP
    + """
free, total, p = c.c_size_t(), c.c_size_t(), c.c_void_p()
step("nothing yet")
ok(hip.hipHostMalloc(c.byref(p), size(10), 0)); step("a context, by host memory")
big = alloc(100); step("memory")
small = [alloc(1 / 1024) for _ in range(5000)]; step("small pieces")
for q in small: ok(hip.hipFree(q))
ok(hip.hipFree(big)); step("freed")
managed = alloc(64, "hipMallocManaged", 1); step("managed")
ok(hip.hipFree(managed))
flagged = alloc(12, "hipExtMallocWithFlags", 0); step("with flags")
ok(hip.hipFree(flagged))
ok(hip.hipMallocPitch(c.byref(p), c.byref(free), c.c_size_t(1000), c.c_size_t(65536))); step("pitch")
ok(hip.hipFree(p))
class Channel(c.Structure):
    _fields_ = [(n, c.c_int) for n in "xyzwk"]
ok(hip.hipMallocArray(c.byref(p), c.byref(Channel(32, 32, 0, 0, 2)), c.c_size_t(1024), c.c_size_t(1000), 0))
step("array")
ok(hip.hipFreeArray(p)); step("freed")
one, two = alloc(50, "hipMallocAsync", None), alloc(70, "hipMallocAsync", None); step("from the pool")
ok(hip.hipFreeAsync(one, None)); step("one freed")
ok(hip.hipFree(two)); step("both freed")
executable = graph_of(20, 12); step("graph made")
ok(hip.hipGraphLaunch(executable, None)); step("launched")
ok(hip.hipGraphExecDestroy(executable)); ok(hip.hipDeviceGraphMemTrim(0)); step("still held")
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("where", c.c_int), ("id", c.c_int), ("w", c.c_void_p),
                ("flags", c.c_ubyte * 8)]
handle, place = c.c_uint64(), c.c_void_p()
ok(hip.hipMemCreate(c.byref(handle), size(64), c.byref(Prop(1, 0, 1, 1)), c.c_ulonglong(0)))
step("physical, other device")
ok(hip.hipMemAddressReserve(c.byref(place), size(64), c.c_size_t(0), None, c.c_ulonglong(0)))
ok(hip.hipMemMap(place, size(64), c.c_size_t(0), handle, c.c_ulonglong(0)))
ok(hip.hipMemRelease(handle)); step("released, still mapped")
ok(hip.hipMemUnmap(place, size(64))); step("unmapped")
ok(hip.hipSetDevice(1)); alloc(30); step("the other device")
ok(hip.hipDeviceReset()); step("reset")
"""
)


def test_charged_is_what_the_vendors_tool_shows(amd_job: MakeJob, mi300: Node) -> None:
    job = amd_job(5000, 5000)
    process = job.start(EVERYTHING)
    assert process.stdout and process.stdin and process.stderr
    steps = 0
    while name := process.stdout.readline().strip():
        shown = {h.gpu: h.memory_mib for h in holdings(mi300.folder) if h.pid == process.pid}
        assert [job.charged(0), job.charged(1)] == [shown.get(0, 0), shown.get(1, 0)], name
        steps += 1
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0, process.stderr.read()
    assert steps > 14


@pytest.mark.parametrize(
    "take",
    [
        "alloc(n)",
        'alloc(n, "hipExtMallocWithFlags", 0)',
        'alloc(n, "hipMallocManaged", 1)',
        'alloc(n, "hipMallocAsync", None)',
        "hip.hipGraphLaunch(graph_of(n), None) if n else 0",
        "hip.hipMallocPitch(c.byref(c.c_void_p()), c.byref(c.c_size_t()), size(1), c.c_size_t(n))",
    ],
)
def test_the_last_mib_is_granted_and_one_more_refused(amd_job: MakeJob, take: str) -> None:
    job = amd_job(CONTEXT + 301)
    out, err = job.run(
        HIP
        + f"""
def take(n):
    code = {take}
    return code if isinstance(code, int) else 0
print(json.dumps([take(302), take(301), info(), take(1), take(0), hip.hipGetLastError() in (0, 2)]))
"""
    )
    assert json.loads(out)[:4] == [2, 0, [0, CONTEXT + 301], 2], err


def test_queries(amd_job: MakeJob) -> None:
    out, _ = amd_job(1000).run(
        HIP
        + """
total, properties = c.c_size_t(), c.create_string_buffer(2000)
ok(hip.hipDeviceTotalMem(c.byref(total), 0))
ok(hip.hipGetDevicePropertiesR0600(properties, 0))
print(json.dumps([total.value // MIB, int.from_bytes(properties.raw[288:296], "little") // MIB, info(),
                  alloc(1, "hipMalloc"). __class__.__name__, hip.hipSetDevice(1), alloc(1)]))
"""
    )
    assert json.loads(out) == [1000, 1000, [1000 - CONTEXT, 1000], "c_void_p", 0, 2]


def test_spill(amd_job: MakeJob, mi300: Node) -> None:
    process = amd_job(CONTEXT + 100, spill=60).start(
        HIP + "a = alloc(90); b = alloc(50)\nstep(json.dumps([info(), alloc(20)]))\nprint(hip.hipFree(b), info())"
    )
    assert process.stdout and process.stdin
    assert json.loads(process.stdout.readline()) == [[20, CONTEXT + 160], 2]
    assert [h.memory_mib for h in holdings(mi300.folder)] == [CONTEXT + 90]
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"0 [70, {CONTEXT + 160}]\n"
