"""A program under the limiter runs as without: its own preloads, signals, umask, threads, forks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import Job, look
from sim_node import Node

from tests.programs.begin import CUDA
from tests.programs.build import build_library, build_program

CONTEXT = 520
MakeJob = Callable[..., Job]


@pytest.mark.parametrize("order", ["before", "after"])
def test_preloaded_libraries_of_the_tenant_stay_in_the_chain(make_job: MakeJob, tmp_path: Path, order: str) -> None:
    from gpu_sim import library_dir

    job = make_job(CONTEXT + 100)
    ours = job.preload
    theirs = [str(build_library("cuda_interposer", tmp_path / f"{i}.so", f"-DWEIGHT={i}")) for i in (1000000, 2000000)]
    program = build_program("cuda_linked", tmp_path / "program", library_dir() / "libcuda.so.1")
    job.preload = ":".join([*theirs, ours] if order == "before" else [ours, *theirs])
    out, err = job.run([str(program)])
    parent, codes = out.splitlines()
    assert int(parent) == 3000000 + os.getpid()
    assert codes == "0 2"
    seen = ["tenant 1000000 sees 94371840", "tenant 2000000 sees 94371840"]
    assert [line for line in seen if line in err.splitlines()] == seen


def test_nothing_of_the_process_is_touched(make_job: MakeJob) -> None:
    """Signals, umask, threads, environment, open files and limits are after the first allocation what they were."""
    job = make_job(CONTEXT + 100)
    out, err = job.run(
        CUDA
        + """
import resource, signal
def state():
    status = open("/proc/self/status").read().splitlines()
    # Not SigQ: it counts what is queued for all processes of the user.
    names = ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Threads", "Umask")
    chosen = {l.split(":")[0]: l.split(":")[1].strip() for l in status if l.startswith(names)}
    files = sorted(os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd") if int(f) > 2 and
                   os.path.exists(f"/proc/self/fd/{f}"))
    return [chosen, dict(os.environ), resource.getrlimit(resource.RLIMIT_CORE), files]
os.umask(0o027)
caught = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda n, frame: caught.append(n))
before = state()
start()
[alloc(50), alloc(60), info(), alloc_async(5)]
after = state()
before[3] = [f for f in after[3] if f not in before[3] and "sluice/limit" in f]
after[3] = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    os.kill(os.getpid(), number)
print(json.dumps([before == after, caught == [10, 12, 15], after[0]["Threads"], after[0]["Umask"]]))
"""
    )
    assert json.loads(out) == [True, True, "1", "0027"], out
    assert err == ""


def test_programs_without_a_gpu_are_left_alone(make_job: MakeJob) -> None:
    """No message, no files, no mapping; forks, shells and Python's own extension modules work."""
    job = make_job(1000)
    code = (
        "import ssl, sqlite3, ctypes, subprocess\n"
        "print(subprocess.run(['sh', '-c', 'echo $((6 * 7))'], capture_output=True).stdout)"
    )
    assert job.run(code) == ("b'42\\n'\n", "")
    maps = "print('ledger' in open('/proc/self/maps').read())"
    assert job.run(maps) == ("False\n", "")
    assert look(job.folder).processes == {}


def test_looking_for_a_driver_that_is_not_there(make_job: MakeJob) -> None:
    """A program that asks whether a driver is loaded gets the right answer, though we export its names."""
    job = make_job(1000)
    code = """
import ctypes
own = ctypes.CDLL(None)
names = ("cuMemAlloc_v2", "hipMalloc", "clCreateBuffer", "nvmlDeviceGetMemoryInfo", "dlsym")
print([hasattr(own, name) for name in names])
"""
    assert job.run(code) == ("[False, False, False, False, True]\n", "")


def test_the_errors_of_dlsym_are_its_own(make_job: MakeJob) -> None:
    job = make_job(1000)
    code = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
for library, name in ((cu, "cuMemAlloc_v9"), (cu, "nothing")):
    try:
        getattr(library, name)
    except AttributeError as error:
        print(str(error).split(": ")[-2:])
"""
    out, err = job.run(code)
    assert [line.count("undefined symbol") for line in out.splitlines()] == [1, 1], out
    assert err == ""


def test_a_crash_dumps_core_as_ever(make_job: MakeJob, tmp_path: Path) -> None:
    process = make_job(1000).start(CUDA + "start(); alloc(10); os.kill(os.getpid(), 11)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV


def test_closing_all_files_does_not_end_the_account(make_job: MakeJob) -> None:
    job = make_job(CONTEXT + 100)
    out, _ = job.run(CUDA + "start(); alloc(90); os.closerange(3, 1024); print(alloc(20), info()[0])")
    assert out == "-2 10\n"


def test_multiprocessing_and_threads_of_python(make_job: MakeJob) -> None:
    job = make_job(4 * CONTEXT + 100)
    code = (
        CUDA
        + """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
def work(mib):
    start()
    return alloc(mib) > 0
with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
    print(list(pool.map(work, [1, 2, 3, 4, 5, 6])))
start(); print(info()[0])
"""
    )
    out, _ = job.run(code)
    assert out.splitlines()[0] == str([True] * 6)
    assert job.charged() == 0


def test_user_namespaces_are_limited_too(make_job: MakeJob, dgx: Node) -> None:
    """As in a rootless container: the tenant is root there, and the region's owner is nobody."""
    job = make_job(CONTEXT + 100, uid=23456)
    (dgx.folder / "processes").chmod(0o666)
    inside = ["unshare", "--user", "--map-root-user", "--mount", "python3", "-c"]
    process = job.start([*inside, CUDA + "start(); print(os.getuid(), alloc(90) > 0, alloc(20))"])
    out, err = process.communicate(timeout=60)
    if "unshare failed" in err:
        pytest.skip(f"no user namespaces on this machine: {err}")
    assert out == "0 True -2\n", err


def test_a_region_of_the_tenants_own_making_is_none(make_job: MakeJob, dgx: Node) -> None:
    """Root in a user's own namespace is not root: a region made and bound there has no effect."""
    job = make_job(CONTEXT + 100, uid=23456)
    (dgx.folder / "processes").chmod(0o666)
    bind = (
        "rm -rf /tmp/sluice-own-region; python3 -c \"import sys; sys.path[:0] = sys.argv[2].split(':');"
        "from pathlib import Path; from sluice.core.limit import *; "
        "create(Path('/tmp/sluice-own-region'), [Device(81008 << 20, 80000 << 20, 0, uuid=sys.argv[1])], 0)\" "
        '"$1" "$2" && mount --bind /tmp/sluice-own-region /run/sluice/limit/job && exec python3 -c "$3"'
    )
    import sys

    words = [dgx.get(0, "uuid"), ":".join(p for p in sys.path if p), CUDA + "print(start())"]
    process = job.start(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", bind, "sh", *words])
    out, err = process.communicate(timeout=60)
    if "unshare failed" in err or "ModuleNotFoundError" in err:
        pytest.skip(f"cannot be tried on this machine: {err}")
    assert out == "-2\n", err
    assert "owner 0" in err
