"""The limiter on a real NVIDIA GPU: no Slurm, no simulation; root, the driver, and nvidia-ml-py."""

from __future__ import annotations

import json
import os
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
print(json.dumps([name, total.value, n.nvmlDeviceGetMemoryInfo(gpu).used - before]))
"""
)
ROOM = 1000  # MiB in addition to the context


@pytest.fixture(scope="module")
def gpu() -> Device:
    """Device 0, with its context measured."""
    if os.environ.get("SLUICE_TEST_GPU") != "simulated" and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    done = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"the NVIDIA driver does not answer: {done.stderr.strip()[-300:]}")
    uuid, total, context = json.loads(done.stdout)
    return Device(total, context + ROOM * MIB, context, uuid=uuid)


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


def test_charged_is_what_the_vendors_tool_shows(real_job: Callable[..., Job], gpu: Device) -> None:
    """Within one page for each kind of piece, as NVML sees this process from outside."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    job = real_job()
    process = job.start(CUDA + "start(); alloc(300); step('-'); create(100); step('-'); alloc_async(128); step('-')")
    assert process.stdout and process.stdin
    for _ in range(3):
        assert process.stdout.readline() == "-\n"
        shown = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == process.pid]
        assert shown, "NVML does not list the process: run outside of a PID namespace"
        assert abs(job.charged() - shown[0] // MIB) <= 4
        process.stdin.write("\n")
        process.stdin.flush()


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
