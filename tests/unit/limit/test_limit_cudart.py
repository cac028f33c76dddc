"""CUDA's own runtime library, unmodified, on the simulated driver: programs that know nothing of the driver are limited
like those that call it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import Job
from runtimes import RUNTIMES, Runtime
from sim_node import Node

from gpu_sim import holdings, load_platform, write_node_state
from tests.programs.begin import CUDART
from tests.programs.build import build_program

CONTEXT = 520
MakeJob = Callable[..., Job]


@pytest.fixture(params=RUNTIMES, ids=[f"cudart{runtime.version}" for runtime in RUNTIMES])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    found: Runtime = request.param
    return found


@pytest.fixture
def node(tmp_path: Path, trees: Path, runtime: Runtime) -> Node:
    platform = load_platform("dgx-h100").model_copy(update={"drivers": {"nvidia": runtime.driver}})
    folder = tmp_path / "node"
    write_node_state(folder, platform, "n1", shared=trees)
    folder.chmod(0o755)
    return Node(folder)


EACH_KIND = """
kinds = {
    "memory": (alloc, free),
    "managed": (managed, free),
    "pitched": (pitched, free),
    "3D": (box, free),
    "array": (array, free_array),
    "3D array": (array_3d, free_array),
    "mipmap": (mipmap, free_mipmap),
    "asynchronous": (alloc_async, free_async),
}
said = {}
for name, (take, give) in kinds.items():
    too_much, left, all_of_it = take(322), info(), take(320)
    said[name] = [too_much, left, all_of_it > 0, info(), take(2), alloc(1)]
    said[name] += [give(all_of_it) or rt.cudaDeviceSynchronize(), info()]
print(json.dumps(said))
"""


def test_every_kind_to_the_last_mib(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """One MiB more than the limit is refused with cudaErrorMemoryAllocation; what is freed can be had again."""
    out, err = make_job(CONTEXT + 320, node=node).run(CUDART + EACH_KIND, CUDART=runtime.library)
    said = json.loads(out)
    assert len(said) == 8
    for name, found in said.items():
        assert found == [-2, [320, 840], True, [0, 840], -2, -2, 0, [320, 840]], name
    assert err == ""


STEPS = """
count = c.c_int()
ok(rt.cudaGetDeviceCount(c.byref(count))); step("counted")
ok(rt.cudaSetDevice(0)); ok(rt.cudaFree(None)); step("context")
memory = alloc(100); step("memory")
kept = managed(64); step("managed")
ok(free(memory)); ok(free(kept)); step("freed")
it = array_3d(33); step("array")
ok(free_array(it)); step("destroyed")
one, own = alloc_async(50), pool(); step("from the pool")
other = alloc_from(own, 70); step("from a pool of its own")
ok(free_async(one)); ok(free_async(other)); step("given back")
ok(rt.cudaMemPoolDestroy(own)); step("pool destroyed")
executable = graph_of(40, 24); step("recorded")
ok(launch(executable)); ok(rt.cudaDeviceSynchronize()); step("launched")
host = c.c_void_p()
ok(rt.cudaMallocHost(c.byref(host), size(64))); step("host")
ok(rt.cudaDeviceSetLimit(2, size(40))); step("a larger heap for kernels")
ok(rt.cudaSetDevice(1)); alloc(10); step("the other device")
ok(rt.cudaDeviceReset()); step("reset")
ok(rt.cudaSetDevice(0)); alloc(20); alloc_async(30); step("the first device again")
ok(rt.cudaDeviceReset()); step("reset, too")
alloc(5); step("a new context")
"""


def test_charged_is_what_the_vendors_tool_shows(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """At every step, whatever way the runtime takes into the driver."""
    job = make_job(5000, 5000, node=node)
    process = job.start(CUDART + STEPS, CUDART=runtime.library)
    assert process.stdout and process.stdin and process.stderr
    steps = []
    while name := process.stdout.readline().strip():
        shown = {h.gpu: h.memory_mib for h in holdings(node.folder) if h.pid == process.pid}
        assert [job.charged(0), job.charged(1)] == [shown.get(0, 0), shown.get(1, 0)], name
        steps.append((name, job.charged(0)))
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0, process.stderr.read()
    assert steps[:3] == [("counted", 0), ("context", CONTEXT), ("memory", CONTEXT + 100)]
    assert steps[-2:] == [("reset, too", 0), ("a new context", CONTEXT + 6)]


def test_the_properties_of_a_device_are_the_jobs(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """`totalGlobalMem` comes after a name of 256 bytes, a UUID and a LUID with its mask."""
    name = "cudaGetDeviceProperties" + ("_v2" if runtime.version == 12 else "")
    ask = f"""
properties = c.create_string_buffer(4096)
ok(rt.{name}(properties, 0))
print(json.dumps([properties.value.decode(), int.from_bytes(properties.raw[288:296], "little") // MIB]))
"""
    out, _ = make_job(2000, node=node).run(CUDART + ask, CUDART=runtime.library)
    assert json.loads(out) == ["NVIDIA H100 80GB HBM3", 2000]


def test_recorded_allocations_are_charged_when_they_run(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    ask = """
large, fits = graph_of(60, 70), graph_of(60, 68)
print(json.dumps([info()[0], launch(large), info()[0], launch(fits), info()[0], alloc(1)]))
"""
    out, _ = make_job(CONTEXT + 128, node=node).run(CUDART + ask, CUDART=runtime.library)
    assert json.loads(out) == [128, 2, 128, 0, 0, -2]


def test_memory_of_a_peer_is_charged_to_it_alone(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    job = make_job(2 * CONTEXT + 100, node=node)
    give = job.start(
        CUDART
        + """
address, handle = alloc(80), c.create_string_buffer(64)
ok(rt.cudaMemcpy(c.c_void_p(address), b"hello", c.c_size_t(5), 1))
ok(rt.cudaIpcGetMemHandle(handle, c.c_void_p(address)))
step(handle.raw.hex())
""",
        CUDART=runtime.library,
    )
    assert give.stdout
    take = """
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]
it, back = c.c_void_p(), c.create_string_buffer(5)
ok(rt.cudaIpcOpenMemHandle(c.byref(it), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), 1))
ok(rt.cudaMemcpy(back, it, c.c_size_t(5), 2))
left = info()[0]
ok(rt.cudaIpcCloseMemHandle(it))
print(json.dumps([back.raw.decode(), left, info()[0], alloc(21), alloc(20) > 0]))
"""
    out, _ = job.run(CUDART + take, give.stdout.readline().strip(), CUDART=runtime.library)
    assert json.loads(out) == ["hello", 20, 20, -2, True]


def test_virtual_memory_by_the_runtimes_look_up(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """Driver functions that cudaGetDriverEntryPoint finds are the limiter's."""
    ask = """
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("where", c.c_int), ("id", c.c_int), ("w", c.c_void_p),
                ("flags", c.c_ubyte * 8)]
make, release = driver("cuMemCreate", 10020), driver("cuMemRelease", 10020)
def create(mib):
    handle = c.c_uint64()
    code = make(c.byref(handle), size(mib), c.byref(Prop(1, 1, 1, 0)), c.c_ulonglong(0))
    return handle.value if code == 0 else -code
ok(rt.cudaFree(None))
said, all_of_it = [create(302)], create(300)
said += [create(2), alloc(1), info()[0], release(c.c_uint64(all_of_it)), info()[0]]
print(json.dumps(said))
"""
    out, _ = make_job(CONTEXT + 300, node=node).run(CUDART + ask, CUDART=runtime.library)
    assert json.loads(out) == [-2, -2, -2, 0, 0, 300]


def test_pools_of_locations(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """CUDA 13 names pools by location and type: charged where they are, whatever device is current, and by what they
    keep; the host's are not."""
    if runtime.version < 13:
        pytest.skip("new in CUDA 13")
    ask = """
class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]
def of(call, where, id, type):
    it = c.c_void_p()
    ok(getattr(rt, call)(c.byref(it), c.byref(Location(where, id)), type))
    return it
ok(rt.cudaSetDevice(1)); ok(rt.cudaFree(None))
said = []
for call in "cudaMemGetDefaultMemPool", "cudaMemGetMemPool":
    ok(rt.cudaSetDevice(0))
    for type in 1, 2:
        pool = of(call, 1, 1, type)
        said += [alloc_from(pool, 322), info()[0]]
        one = alloc_from(pool, 320)
        ok(rt.cudaSetDevice(1))
        said += [one > 0, info()[0], free_async(one) or rt.cudaDeviceSynchronize(), info()[0]]
        ok(rt.cudaSetDevice(0))
    host = alloc_from(of(call, 2, 0, 1), 5000)
    said += [host > 0, info()[0], free_async(host)]
print(json.dumps(said))
"""
    out, err = make_job(CONTEXT + 200, CONTEXT + 320, node=node).run(CUDART + ask, CUDART=runtime.library)
    on_device = [-2, 200, True, 0, 0, 320]
    assert json.loads(out) == 2 * [*on_device, *on_device, True, 200, 0], err


def test_no_room_for_a_context(make_job: MakeJob, node: Node, runtime: Runtime) -> None:
    """The runtime's own way to primary contexts makes none that is not charged."""
    job = make_job(2 * CONTEXT - 1, node=node)
    first = job.start(CUDART + "alloc(1); step('held')", CUDART=runtime.library)
    assert first.stdout and first.stdout.readline() == "held\n"
    ask = "print(json.dumps([rt.cudaSetDevice(0), alloc(1), managed(1), rt.cudaFree(None)]))"
    out, _ = job.run(CUDART + ask, CUDART=runtime.library)
    assert json.loads(out)[1:] == [-2, -2, 2]
    assert sum(h.memory_mib for h in holdings(node.folder)) == CONTEXT + 2


def test_linked_into_the_program(make_job: MakeJob, node: Node, runtime: Runtime, tmp_path: Path) -> None:
    archives = [runtime.file("lib/libcudart_static.a")]
    program = build_program("cudart_static", tmp_path / "static", *archives, "-lpthread", "-lrt")
    out, err = make_job(CONTEXT + 300, node=node).run([str(program)])
    assert (out, err) == ("300 2 0 2 2 2 0 300 0\n", "")


def test_the_limiter_knows_the_versions_of_functions(runtime: Runtime) -> None:
    """cuGetProcAddress is asked for a name and a version: what it means by them is in the types of CUDA's headers."""
    types = runtime.file("include/cudaTypedefs.h").read_text()
    known: dict[str, set[int]] = {}
    for name, version in re.findall(r"\*PFN_(cu\w+?)_v(\d+)(?:_pt[sd][sz])?\)", types):
        known.setdefault(name, set()).add(int(version))
    source = (Path(__file__).parents[3] / "native/limit/cuda.c").read_text()
    compared = 0
    for name, since in re.findall(r"CALL\((cu\w+), (\d+)", source):
        symbol, form = re.fullmatch(r"(\w+?)(?:_v(\d))?(?:_ptsz)?", name).groups()  # type: ignore[union-attr]
        versions = sorted(known.get(symbol, ()))
        if len(versions) >= int(form or 1) and int(since) > 0:
            assert int(since) == versions[int(form or 1) - 1], name
            compared += 1
    assert compared > 60
