"""The injected library next to others in the process: NVIDIA's own libraries, and the memory limiter."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import COLLECTIVE, CUDA, EXIT, KERNEL, LIBRARY, LOOP, NO_LIBRARY, Profile, Profiled, ask
from runtimes import RUNTIMES, Runtime
from sim_node import Node

from gpu_sim import load_platform, write_node_state
from tests.programs import begin

sys.path.insert(0, str(Path(__file__).parents[1] / "limit"))

ROOT = Path(__file__).parents[3]
PACKAGES = {12: ("nvidia-cuda-cupti-cu12", "nvidia/cuda_cupti"), 13: ("nvidia-cuda-cupti", "nvidia/cu13")}
TYPES = {12: ("Kernel9", "Memcpy6", "Memset4"), 13: ("Kernel13", "Memcpy7", "Memset5")}


def cupti_folder(version: int) -> Path:
    package, folder = PACKAGES[version]
    return Path(str(importlib.metadata.distribution(package).locate_file(folder)))


def symbols() -> list[str]:
    """What the library looks up in CUPTI."""
    return re.findall(r"CALL\((cupti\w+),", (ROOT / "native/profile/cupti_abi.h").read_text())


@pytest.fixture(params=RUNTIMES, ids=[f"cuda{runtime.version}" for runtime in RUNTIMES])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    found: Runtime = request.param
    return found


def test_records_are_laid_out_as_in_nvidias_headers(runtime: Runtime, tmp_path: Path) -> None:
    kernel, memcpy, memset = TYPES[runtime.version]
    folders = [cupti_folder(runtime.version) / "include", runtime.file("include")]
    compiler = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-fsyntax-only", f"-I{ROOT}/native/include"]
    compiler += ["-iquote", f"{ROOT}/native/profile"]
    words = [f"-I{folder}" for folder in folders]
    if runtime != RUNTIMES[-1]:
        words += ["-idirafter", str(RUNTIMES[-1].file("include"))]  # crt/, which the wheels have for CUDA 13 alone
    words += [f"-DKERNEL_TYPE=CUpti_Activity{kernel}", f"-DMEMCPY_TYPE=CUpti_Activity{memcpy}"]
    words += [f"-DMEMSET_TYPE=CUpti_Activity{memset}"]
    source = ROOT / "native/profile/tests/cupti_abi_check.c"
    done = subprocess.run([*compiler, *words, source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_layout_is_that_of_amds_headers() -> None:
    """No package index has them: SLUICE_ROCM_INCLUDE names the folder of a ROCm 7 (/opt/rocm/include)."""
    folder = os.environ.get("SLUICE_ROCM_INCLUDE", "/opt/rocm/include")
    if not (Path(folder.split(":")[0]) / "rocprofiler-sdk").is_dir():
        pytest.skip(f"no headers of rocprofiler-sdk in {folder}")
    compiler = ["cc", "-std=gnu11", "-fsyntax-only", "-D__HIP_PLATFORM_AMD__", "-Wno-deprecated-declarations"]
    words = [f"-I{one}" for one in (*folder.split(":"), ROOT / "native/include", ROOT / "native/profile")]
    source = ROOT / "native/profile/tests/rocprofiler_abi_check.c"
    done = subprocess.run([*compiler, *words, source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_layout_is_that_of_intels_headers() -> None:
    """Of Debian's libze-dev; SLUICE_LEVEL_ZERO_INCLUDE names another folder with level_zero in it."""
    folder = os.environ.get("SLUICE_LEVEL_ZERO_INCLUDE", "/usr/include")
    if not (Path(folder) / "level_zero/layers").is_dir():
        pytest.skip(f"no headers of Level Zero in {folder}")
    words = [f"-I{folder}", f"-I{ROOT}/native/profile"]
    source = ROOT / "native/profile/tests/level_zero_abi_check.c"
    done = subprocess.run(
        ["cc", "-std=gnu11", "-fsyntax-only", *words, source], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_nvidias_library_has_all_that_is_used(runtime: Runtime) -> None:
    real = ctypes.CDLL(str(cupti_folder(runtime.version) / f"lib/libcupti.so.{runtime.version}"))
    assert len(symbols()) == 12
    assert [name for name in symbols() if not hasattr(real, name)] == []


def test_what_nvidias_library_refuses_is_said(make: Callable[..., Profiled], runtime: Runtime) -> None:
    """The real one finds no real driver."""
    real = cupti_folder(runtime.version) / f"lib/libcupti.so.{runtime.version}"
    program = make(LOOP, SLUICE_PROFILE_CUPTI=str(real))
    program.hears()
    profile = program.profile(program.ask())
    assert profile.reason == NO_LIBRARY
    assert profile.words.startswith("cuptiSubscribe answered ")
    program.tell()
    assert int(program.ends()) > 0


def test_kernels_of_the_runtime_library(runtime: Runtime, tmp_path: Path) -> None:
    """Launched, and recorded in a graph that is launched."""
    code = (
        begin.CUDART
        + begin.KERNEL
        + """
size, recorded, graph, executable = Size(1, 1, 1), stream(), c.c_void_p(), c.c_void_p()
ok(rt.cudaFree(None))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    ok(rt.cudaLaunchKernel(kernel, size, size, None, 0, None))
ok(rt.cudaStreamBeginCapture(recorded, 0))
rt.cudaLaunchKernel(kernel, size, size, None, 0, recorded)
ok(rt.cudaStreamEndCapture(recorded, c.byref(graph)))
ok(rt.cudaGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(0)))
for _ in range(3):
    ok(launch(executable))
ok(rt.cudaDeviceSynchronize())
"""
    )
    folder = tmp_path / "profile"
    folder.mkdir()
    number = ask(folder)
    platform = load_platform("h100x1").model_copy(update={"drivers": {"nvidia": runtime.driver}})
    write_node_state(tmp_path / "n1", platform, "n1")
    program = Profiled.start(
        Node(tmp_path / "n1"),
        folder,
        "import sys\n" + code,
        CUDART=runtime.library,
        SLUICE_PROFILE_CUPTI="libcupti.so.12",
    )
    assert program.hears() == "ready"
    while not program.wait_for(number, program.process.pid).records:
        pass
    program.tell()
    program.ends()
    profile = program.profile(number)
    assert profile.reason == EXIT and len(profile.named("add")) == 13


@pytest.mark.skipif(os.geteuid() != 0, reason="a job's region is root's")
def test_the_limiter_charges_the_same(h100: Node, tmp_path: Path) -> None:
    """A program under the memory limiter, with and without a profile: the same figures, and the kernels are there."""
    from limited import MIB, new_job

    from sluice.core.limit import Device

    code = CUDA + (
        "begin()\nsay()\nrun(50)\ncopy()\nwait()\nfree, all = c.c_size_t(), c.c_size_t()\n"
        "again = c.c_void_p()\ncode = cu.cuMemAlloc_v2(c.byref(again), c.c_size_t(200 << 20))\n"
        "ok(cu.cuMemGetInfo_v2(c.byref(free), c.byref(all)))\ntime.sleep(0.8)\nrun(50)\n"
        "say(f'{code} {free.value} {all.value}')\ntold()\n"
    )
    total, context = 81559 * MIB, 520 * MIB
    seen = []
    for profiled in (False, True):
        folder = tmp_path / f"profile{profiled}"
        folder.mkdir()
        number = ask(folder) if profiled else 0
        device = Device(total, context + 100 * MIB, context, uuid=h100.get(0, "uuid"))
        environment = h100.environment(SLUICE_PROFILE_FOLDER=str(folder))
        if profiled:
            environment["CUDA_INJECTION64_PATH"] = str(LIBRARY)
        job = new_job(tmp_path / f"region{profiled}", environment, [device])
        process = job.start(code)
        assert process.stdout is not None and process.stdin is not None
        said = [process.stdout.readline(), process.stdout.readline()]
        seen.append((said, job.charged()))
        assert process.communicate("go\n", timeout=30)[0] == "" and process.returncode == 0
        job.end()
        if profiled:
            (path,) = folder.glob(f"*.{number}.profile")
            assert Profile.read(path).of(KERNEL)
    assert seen[0] == seen[1] and seen[0][0][1].startswith("2 ")


# Does what NCCL 2.27 and later do with a profiler plugin; `mask` is what NCCL looks at before each call.
NCCL = (
    CUDA
    + """
class Event(c.Structure):
    _fields_ = [("type", c.c_uint8), ("parent", c.c_void_p), ("rank", c.c_int), ("sequence", c.c_uint64),
                ("function", c.c_char_p), ("send", c.c_void_p), ("receive", c.c_void_p), ("count", c.c_size_t),
                ("root", c.c_int), ("datatype", c.c_char_p), ("more", c.c_char * 64)]
class Plugin(c.Structure):
    _fields_ = [("name", c.c_char_p),
                ("init", c.CFUNCTYPE(c.c_int, c.POINTER(c.c_void_p), c.POINTER(c.c_int), c.c_char_p, c.c_uint64,
                                     c.c_int, c.c_int, c.c_int, c.c_void_p)),
                ("start", c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_void_p), c.POINTER(Event))),
                ("stop", c.CFUNCTYPE(c.c_int, c.c_void_p)), ("state", c.c_void_p),
                ("finalize", c.CFUNCTYPE(c.c_int, c.c_void_p))]
begin()
plugin = Plugin.in_dll(c.CDLL(os.environ["NCCL_PROFILER_PLUGIN"]), "ncclProfiler_v4")
context, mask = c.c_void_p(), c.c_int(-1)
ok(plugin.init(c.byref(context), c.byref(mask), b"", 0xC0FFEE, 2, 16, 3, None))
def call(function=b"AllReduce", count=1000, datatype=b"ncclBfloat16"):
    handle = c.c_void_p(1)
    event = Event(type=2, function=function, count=count, datatype=datatype)
    ok(plugin.start(context, c.byref(handle), c.byref(event)))
    time.sleep(0.001)
    ok(plugin.stop(handle))
    return handle.value
def until(value):
    end = time.monotonic() + 20
    while mask.value != value:
        assert time.monotonic() < end, mask.value
        time.sleep(0.01)
assert mask.value == 0 and call() is None, "collected before anybody asked"
say()
until(6)
assert all(call() for _ in range(20)) and call(b"AllGather", 10, b"ncclFloat64")
say("called")
until(0)
ok(plugin.finalize(context))
mask.value = 77
say("finalized")
told()
assert mask.value == 77, "NCCL's memory was written after its end"
"""
)


def test_calls_of_nccl(make: Callable[..., Profiled]) -> None:
    program = make(NCCL, NCCL_PROFILER_PLUGIN=str(LIBRARY))
    assert program.hears() == "ready"
    number = program.ask()
    assert program.hears() == "called"
    profile = program.stop(number)
    assert program.hears() == "finalized"
    again = program.ask()
    program.wait_for(again, program.process.pid)
    program.stop(again)
    program.tell()
    program.ends()
    calls = profile.of(COLLECTIVE)
    assert [profile.names[one.name] for one in calls] == ["AllReduce"] * 20 + ["AllGather"]
    for one in calls:
        thread, result, size, communicator = struct.unpack("<IiQQ", one.rest)
        assert (thread, result, communicator) == (program.process.pid, 0, 0xC0FFEE)
        assert size == (80 if one is calls[-1] else 2000) and one.end - one.start > 1_000_000
