"""The limiter on a real NVIDIA GPU: no Slurm, no simulation; root, the driver, and nvidia-ml-py."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limited import MIB, Job, new_job
from runtimes import RUNTIMES, Runtime
from test_limit_python import EXPECTED, PROGRAMS, has
from test_limit_python import ROOM as PYTHON_ROOM

from sluice.core.limit import Device
from tests.programs.begin import CUDA, CUDART

pytestmark = pytest.mark.gpu

ABOUT = (
    CUDA
    + """
import pynvml as n
n.nvmlInit()
code = cu.cuInit(0)
uuid, total = (c.c_ubyte * 16)(), c.c_size_t()
assert code == 0 and cu.cuDeviceGetUuid(uuid, 0) == 0 and cu.cuDeviceTotalMem_v2(c.byref(total), 0) == 0
text = bytes(uuid).hex()
name = "-".join(["GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
gpu = n.nvmlDeviceGetHandleByUUID(name)
before = n.nvmlDeviceGetMemoryInfo(gpu).used
start()
shown = [p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(gpu) if p.pid == os.getpid()]
print(json.dumps([name, total.value, n.nvmlDeviceGetMemoryInfo(gpu).used - before, sum(shown)]))
"""
)
ROOM = 1000  # MiB in addition to the context


@pytest.fixture(scope="module")
def about() -> tuple[Device, int]:
    """Device 0, with its context measured by what of the device is in use; the same context as NVML shows it for the
    process, in bytes, which is less where the driver keeps something for all processes."""
    if os.environ.get("SLUICE_TEST_GPU") != "simulated" and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    done = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"the NVIDIA driver does not answer: {done.stderr.strip()[-300:]}")
    uuid, total, context, shown = json.loads(done.stdout)
    return Device(total, context + ROOM * MIB, context, uuid=uuid), shown


@pytest.fixture(scope="module")
def gpu(about: tuple[Device, int]) -> Device:
    return about[0]


def shown_of(gpu: Device, *pids: int) -> int:
    """MiB, as NVML shows these processes from outside."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    shown = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid in pids]
    assert len(shown) == len(pids), "NVML does not list the process: run outside of a PID namespace"
    return int(sum(shown)) // MIB


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def real_job(tmp_path: Path, gpu: Device) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(contexts: int = 1, room: int = ROOM) -> Job:
        device = Device(gpu.total, contexts * gpu.context + room * MIB, gpu.context, uuid=gpu.uuid)
        jobs.append(new_job(tmp_path / f"region{len(jobs)}", dict(os.environ), [device]))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_the_last_mib_is_granted_and_one_more_refused(real_job: Callable[..., Job]) -> None:
    out, err = real_job().run(
        CUDA + "start(); print(json.dumps([info()[0], alloc(1002), alloc(1000) > 0, info()[0], alloc(2)]))"
    )
    assert json.loads(out) == [ROOM, -2, True, 0, -2], err


@pytest.mark.parametrize(
    "take",
    [
        "-cu.cuMemAllocManaged(c.byref(c.c_uint64()), size(n), 1)",
        "-cu.cuArray3DCreate_v2(c.byref(c.c_void_p()), c.byref(Array3(1024, 256, n, 0x20, 1, 0)))",
        "alloc_async(n)",
        "create(n)",
        "-cu.cuGraphLaunch(graph_of(n), None)",
    ],
    ids=["managed", "array", "asynchronous", "virtual memory", "graph"],
)
def test_every_kind_is_refused_beyond_the_limit(real_job: Callable[..., Job], take: str) -> None:
    out, err = real_job().run(
        CUDA + f"start()\ntake = lambda n: {take}\nprint(json.dumps([take(1100), take(800) >= 0]))"
    )
    assert json.loads(out) == [-2, True], err


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: f"cudart{runtime.version}")
@pytest.mark.parametrize("take", ["alloc", "managed", "box", "array_3d", "alloc_async"])
def test_the_runtime_is_refused_beyond_the_limit(real_job: Callable[..., Job], runtime: Runtime, take: str) -> None:
    ask = f"""
code = rt.cudaFree(None)
print(json.dumps([code] if code else [code, info()[0], {take}(1100), {take}(800) > 0, alloc(300)]))
"""
    out, err = real_job().run(CUDART + ask, CUDART=runtime.library)
    said = json.loads(out)
    if said == [35]:
        pytest.skip(f"the driver is older than CUDA {runtime.version}")
    assert said == [0, ROOM, -2, True, -2], err


@pytest.mark.parametrize("package", [pytest.param(name, marks=has(name)) for name in PROGRAMS])
def test_python_packages_to_the_last_mib(real_job: Callable[..., Job], package: str) -> None:
    """NVIDIA's bindings, numba, CuPy and PyTorch, where they are installed."""
    out, err = real_job(room=PYTHON_ROOM).run(PROGRAMS[package], CUDA_VISIBLE_DEVICES="0")
    assert json.loads(out.splitlines()[-1]) == EXPECTED[package], err


def test_charged_is_what_the_vendors_tool_shows(real_job: Callable[..., Job], about: tuple[Device, int]) -> None:
    """To the MiB for each kind of piece, as NVML sees this process from outside; the context is charged as it was
    measured, and differs by what its own two figures do."""
    gpu, context_shown = about
    job = real_job()
    process = job.start(
        CUDA + "start(); step('-'); alloc(300); step('-'); create(100); step('-'); alloc_async(128); step('-')"
    )
    assert process.stdout
    said = []
    for _ in range(4):
        assert process.stdout.readline() == "-\n"
        said.append((job.charged(), shown_of(gpu, process.pid)))
        answer(process)
    charged, shown = said[0]
    assert charged == gpu.context // MIB
    assert abs((charged - shown) - (gpu.context - context_shown) // MIB) <= 1
    assert [(more - charged, seen - shown) for more, seen in said] == [(n, n) for n in (0, 300, 400, 528)]


POOLS = (
    CUDA
    + """
start(); ok(cu.cuGraphLaunch(graph_of(), None)); ok(cu.cuCtxSynchronize()); step("context")
pool = c.c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(c.byref(pool), 0))
def figure(which):
    value = c.c_uint64()
    ok(cu.cuMemPoolGetAttribute(pool, which, c.byref(value)))
    return value.value // MIB
def wait():
    ok(cu.cuCtxSynchronize())
"""
)
KEEPS = "ok(cu.cuMemPoolSetAttribute(pool, 4, c.byref(c.c_uint64(2**64 - 1))))\n"


def run_watched(job: Job, gpu: Device, program: str, count: int = 1) -> list[list[object]]:
    """What such programs print, of which each ends with a step; NVML's figure for them, looked at all the time from
    outside, is never above what the limit leaves next to their contexts."""
    processes = [job.start(POOLS + program) for _ in range(count)]
    pids = [process.pid for process in processes]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "context\n"
    contexts = shown_of(gpu, *pids)
    with job.region() as region:
        room = (region.usage(0).limit - count * gpu.context) // MIB
    for process in processes:
        answer(process)
    waiting = [process.stdout for process in processes if process.stdout]
    said = []
    while waiting:
        assert shown_of(gpu, *pids) - contexts <= room
        for stream in select.select(waiting, [], [], 0.002)[0]:
            said.append(json.loads(stream.readline()))
            waiting.remove(stream)
    held = shown_of(gpu, *pids) - contexts
    with job.region() as region:
        assert held <= room and held == (region.usage(0).charged - count * gpu.context) // MIB
    return said


@pytest.mark.parametrize("keeps", ["", KEEPS], ids=["releases", "keeps"])
def test_the_last_piece_of_a_pool(real_job: Callable[..., Job], gpu: Device, keeps: str) -> None:
    """A pool grows by 32 MiB at a time: a piece that fits, but whose steps do not, is refused, again and again; one
    that is whole steps is granted; what is in the last step can be had. Other drivers' steps may be other ones."""
    program = (
        keeps
        + """
said = [alloc(200) > 0, alloc_async(100)]
wait()
said += [alloc_async(100), figure(5), alloc_async(70) > 0, alloc_async(26) > 0, figure(5), figure(7)]
said += [alloc_async(5), alloc_async(1 / MIB), info()[0], alloc(4) > 0, info()[0], alloc_async(1 / MIB)]
step(json.dumps(said))
"""
    )
    [said] = run_watched(real_job(room=300), gpu, program)
    assert said == [True, -2, -2, 0, True, True, 96, 96, -2, -2, 4, True, 0, -2]


def test_pieces_of_pools_are_freed_and_asked_for_again(real_job: Callable[..., Job], gpu: Device) -> None:
    """Two processes, several pools, with trims and waits in between: never above the limit."""
    program = (
        KEEPS
        + """
import random
draw, held, granted, own = random.Random(os.getpid()), [], 0, c.c_void_p()
ok(cu.cuMemPoolCreate(c.byref(own), c.byref(Pool(1, 0, 1, 0))))
for _ in range(400):
    address = alloc_async(draw.choice((1 / MIB, 1, 20, 33, 64, 100)), pool=draw.choice((pool, own)))
    held += [address] if address > 0 else []
    granted += address > 0
    if held and draw.random() < 0.6:
        ok(cu.cuMemFreeAsync(c.c_uint64(held.pop(draw.randrange(len(held)))), None))
    if draw.random() < 0.2:
        wait()
    if draw.random() < 0.1:
        ok(cu.cuMemPoolTrimTo(draw.choice((pool, own)), size(0)))
wait(); info()
step(json.dumps([granted]))
"""
    )
    said = run_watched(real_job(contexts=2, room=330), gpu, program, 2)
    assert 50 < sum(int(str(granted)) for [granted] in said) < 800


def test_graphs_at_the_limit(real_job: Callable[..., Job], gpu: Device) -> None:
    """What a graph's memory grows by is the driver's business: it is refused, or it fits."""
    program = """
graphs = [graph_of(60, 40), graph_of(60, 36), graph_of(1), graph_of(1, 1, 1)]
step(json.dumps([cu.cuGraphLaunch(graph, None) or cu.cuCtxSynchronize() for graph in graphs]))
"""
    [said] = run_watched(real_job(room=100), gpu, program)
    assert set(said) <= {0, 2} and said[:2] != [0, 0]


def test_processes_race_and_die(real_job: Callable[..., Job]) -> None:
    job = real_job(contexts=4)
    processes = [job.start(CUDA + "start(); step('ready'); print(fill(), flush=True); step('-')") for _ in range(4)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    got = sum(int(process.stdout.readline()) for process in processes if process.stdout)
    assert ROOM - 4 * 2 <= got <= ROOM
    job.end()
    assert job.charged() == 0
