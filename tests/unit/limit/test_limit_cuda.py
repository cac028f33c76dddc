"""Exactness: what is charged is what the vendor's tool shows, the last MiB is granted, and one more is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
from limited import Job
from sim_node import Node

from gpu_sim import holdings
from tests.programs.begin import CUDA

CONTEXT = 520
MakeJob = Callable[..., Job]

EVERYTHING = (
    CUDA
    + """
start(); step("context")
p = c.c_uint64()
big = alloc(100); step("memory")
small = [alloc(1 / 1024) for _ in range(5000)]; step("small pieces")
for address in small[::2]:
    ok(free(address))
step("some freed")
for address in small[1::2]:
    ok(free(address))
ok(free(big)); step("all freed")
ok(cu.cuMemAllocManaged(c.byref(p), size(64), 1)); step("managed")
ok(free(p.value))
pitch = c.c_size_t()
ok(cu.cuMemAllocPitch_v2(c.byref(p), c.byref(pitch), c.c_size_t(1000), c.c_size_t(65536), 4)); step("pitch")
ok(free(p.value)); step("freed")
array = c.c_void_p()
ok(cu.cuArrayCreate_v2(c.byref(array), c.byref(Array(4096, 4096, 0x20, 4)))); step("array")
ok(cu.cuArrayDestroy(array)); step("destroyed")
ok(cu.cuArray3DCreate_v2(c.byref(array), c.byref(Array3(512, 512, 37, 0x10, 2, 0)))); step("array of three dimensions")
ok(cu.cuArrayDestroy(array))
ok(cu.cuMipmappedArrayCreate(c.byref(array), c.byref(Array3(4096, 4096, 0, 0x20, 1, 0)), 13)); step("mipmaps")
ok(cu.cuMipmappedArrayDestroy(array)); step("destroyed")
one, two = alloc_async(50), alloc_async(70); step("from the pool")
ok(cu.cuMemFreeAsync(c.c_uint64(one), None)); step("one freed")
pool = c.c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(c.byref(pool), 0))
ok(cu.cuMemPoolSetAttribute(pool, 4, c.byref(c.c_uint64(2**63))))
ok(free(two)); step("other freed, kept by the threshold")
ok(cu.cuMemPoolTrimTo(pool, size(20))); step("trimmed")
ok(cu.cuMemPoolTrimTo(pool, size(0))); step("trimmed to nothing")
mine = c.c_void_p()
ok(cu.cuMemPoolCreate(c.byref(mine), c.byref(Pool(1, 0, 1, 1))))
address = alloc_async(30, pool=mine); step("from a pool of another device")
ok(cu.cuMemFreeAsync(c.c_uint64(address), None))
ok(cu.cuMemPoolDestroy(mine)); step("pool destroyed")
handle, place = create(64), reserve(128); step("physical")
ok(map_(place, 64, handle)); ok(map_(place + 64 * MIB, 64, handle)); step("mapped twice")
ok(release(handle)); step("released, still mapped")
ok(unmap(place, 64)); step("one mapping left")
again = c.c_uint64()
ok(cu.cuMemRetainAllocationHandle(c.byref(again), c.c_void_p(place + 65 * MIB)))
ok(unmap(place + 64 * MIB, 64)); step("a handle taken from the mapping")
ok(release(again.value)); step("gone")
far = create(32, device=1); step("physical on the other device")
ok(release(far)); step("gone")
executable = graph_of(40, 24); step("graph made")
ok(cu.cuGraphLaunch(executable, None)); step("launched")
ok(cu.cuGraphLaunch(executable, None)); step("launched again")
ok(cu.cuGraphExecDestroy(executable)); ok(cu.cuDeviceGraphMemTrim(0)); step("still held")
context = c.c_void_p()
ok(cu.cuCtxCreate_v2(c.byref(context), 0, 1)); step("context on the other device")
alloc(10); alloc(0.1); step("memory in it")
ok(cu.cuCtxSetLimit(2, size(40))); step("a larger heap for kernels")
ok(cu.cuCtxDestroy_v2(context)); step("destroyed with all in it")
start(); alloc(20); step("memory")
ok(cu.cuDevicePrimaryCtxRelease_v2(0)); step("one reference less")
ok(cu.cuDevicePrimaryCtxReset_v2(0)); step("reset")
"""
)


def test_charged_is_what_the_vendors_tool_shows(make_job: MakeJob, dgx: Node) -> None:
    """At every step of a program that uses every kind of memory, per device and to the MiB."""
    job = make_job(5000, 5000)
    steps = 0
    process = job.start(EVERYTHING)
    assert process.stdout and process.stdin and process.stderr
    while name := process.stdout.readline().strip():
        shown = {h.gpu: h.memory_mib for h in holdings(dgx.folder) if h.pid == process.pid}
        assert [job.charged(0), job.charged(1)] == [shown.get(0, 0), shown.get(1, 0)], name
        steps += 1
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0, process.stderr.read()
    assert steps > 35


KINDS = {
    "memory": "alloc(n)",
    "managed": "-cu.cuMemAllocManaged(c.byref(c.c_uint64()), size(n), 1)",
    "pitch": "-cu.cuMemAllocPitch_v2(c.byref(c.c_uint64()), c.byref(c.c_size_t()), size(1), c.c_size_t(n), 4)",
    "array": "-cu.cuArray3DCreate_v2(c.byref(c.c_void_p()), c.byref(Array3(1024, 256, n, 0x20, 1, 0)))",
    "mipmap": "-cu.cuMipmappedArrayCreate(c.byref(c.c_void_p()), c.byref(Array3(1024, 256, n, 0x20, 1, 0)), 1)",
    "mipmap, 0 levels": "-cu.cuMipmappedArrayCreate(c.byref(c.c_void_p()), c.byref(Array3(1024, n, 256, 32, 1, 0)), 0)",
    "pool": "alloc_async(n)",
    "physical": "create(n)",
    "graph": "-cu.cuGraphLaunch(graph_of(n), None)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_mib_is_granted_and_one_more_refused(make_job: MakeJob, kind: str) -> None:
    """Refused with the vendor's own code, for every way to allocate; nothing stays allocated or charged."""
    job = make_job(CONTEXT + 320)  # 10 steps of a pool
    out, err = job.run(
        CUDA
        + f"""
start()
def take(n):
    return {KINDS[kind]}
print(json.dumps([take(322), info(), take(320) >= 0, info(), take(2), alloc(1), alloc(0.001), info()]))
"""
    )
    assert json.loads(out) == [-2, [320, 840], True, [0, 840], -2, -2, -2, [0, 840]]
    assert err == ""
    with job.region() as region:
        assert region.usage(0).peak >> 20 == 840
        assert region.usage(0).refused >= 4


def test_queries_tell_the_truth_within_the_limit(make_job: MakeJob) -> None:
    job = make_job(2000)
    out, _ = job.run(
        CUDA
        + """
import pynvml as n
start()
total = c.c_size_t()
ok(cu.cuDeviceTotalMem_v2(c.byref(total), 0))
alloc(100)
n.nvmlInit()
gpu, other = (n.nvmlDeviceGetHandleByIndex(i) for i in range(2))
one, two = n.nvmlDeviceGetMemoryInfo(gpu), n.nvmlDeviceGetMemoryInfo(gpu, n.nvmlMemory_v2)
free_gpu = n.nvmlDeviceGetMemoryInfo(other)
print(json.dumps([total.value // MIB, info(), [v // MIB for v in (one.total, one.used, one.free)],
    [v // MIB for v in (two.total, two.used, two.free, two.reserved)], free_gpu.total // MIB,
    [[p.pid == os.getpid(), p.usedGpuMemory // MIB] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)]]))
"""
    )
    assert json.loads(out) == [
        2000,
        [1380, 2000],
        [2000, 620, 1380],
        [2000, 620, 1380, 0],
        81559,
        [[True, 620]],
    ]


def test_other_jobs_processes_are_not_shown(make_job: MakeJob, dgx: Node) -> None:
    mine, other = make_job(2000), make_job(3000)
    held = other.start(CUDA + "start(); alloc(500); step('held')")
    assert held.stdout and held.stdout.readline() == "held\n"
    ask = """
import pynvml as n
start()
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([n.nvmlDeviceGetMemoryInfo(gpu).used // MIB, [p.pid == os.getpid() for p in
      n.nvmlDeviceGetComputeRunningProcesses(gpu)], info()]))
"""
    assert json.loads(mine.run(CUDA + ask)[0]) == [CONTEXT, [True], [2000 - CONTEXT, 2000]]


def test_a_gpu_that_is_not_the_jobs_gives_no_memory(make_job: MakeJob) -> None:
    job = make_job(2000)
    assert json.loads(job.run(CUDA + "start(); print(json.dumps([create(2, 0) > 0, create(2, 1), start(1)]))")[0]) == [
        True,
        -2,
        -2,
    ]


def test_no_room_for_a_context_is_out_of_memory(make_job: MakeJob) -> None:
    job = make_job(2 * CONTEXT - 1)
    second = "start(); print(json.dumps([cu.cuCtxCreate_v2(c.byref(c.c_void_p()), 0, 0), info()[0]]))"
    assert json.loads(job.run(CUDA + second)[0]) == [2, CONTEXT - 1]


def test_a_limit_may_change_while_programs_run(make_job: MakeJob) -> None:
    job = make_job(1000)
    process = job.start(
        CUDA + "start(); print(alloc(600) > 0, info()); step('-'); print(alloc(600) > 0, info());"
        "step('-'); print(alloc(1), info())"
    )
    assert process.stdout and process.stdin
    assert process.stdout.readline() == "False [480, 1000]\n"
    for limit, expected in ((2000, "True [880, 2000]\n"), (1000, "-2 [0, 1000]\n")):
        assert process.stdout.readline() == "-\n"
        with job.region() as region:
            region.set_limit(0, limit << 20)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == expected


# ---- many processes ----

RACE = CUDA + "start(); step('ready'); print(fill(), flush=True); sys.stdin.readline()"


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()


def test_eight_processes_race_for_the_last_mib(make_job: MakeJob, dgx: Node, full_scale: bool) -> None:
    for _ in range(10 if full_scale else 2):
        job = make_job(8 * CONTEXT + 3333)
        processes = [job.start(RACE) for _ in range(8)]
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        go(*processes)
        got = [int(process.stdout.readline()) for process in processes if process.stdout]
        # Single MiB share pages with others of their process, so that what is charged is even.
        assert job.charged() == sum(h.memory_mib for h in holdings(dgx.folder)) == 8 * CONTEXT + 3332
        assert 3332 - 8 * 2 <= sum(got) <= 3332
        job.end()
        assert job.charged() == 0


def test_forked_children_account_for_themselves(make_job: MakeJob, dgx: Node) -> None:
    """A child made before the driver was started is a process like any other; one made after it holds nothing."""
    job = make_job(2 * CONTEXT + 1000)
    out, _ = job.run(
        CUDA
        + """
to_child, from_child = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.read(to_child[0], 1)
    start()
    print(json.dumps(["child", alloc(700) > 0, alloc(200), alloc(100) > 0]), flush=True)
    os._exit(0)
start()
held = alloc(200)
os.write(to_child[1], b"-")
os.waitpid(child, 0)
print(json.dumps(["parent", alloc(700) > 0]), flush=True)
late = os.fork()
if late == 0:
    print(json.dumps(["late", free(held) != 0, alloc(1)]), flush=True)  # the driver does not survive a fork
    os._exit(0)
os.waitpid(late, 0)
print(json.dumps(["parent", alloc(700), info()[0], free(held), alloc(700 - 500) > 0]), flush=True)
"""
    )
    assert [json.loads(line) for line in out.splitlines()] == [
        ["child", True, -2, True],
        ["parent", True],
        ["late", True, -3],
        ["parent", -2, CONTEXT + 100, 0, True],
    ]
    assert job.charged() == 0


def test_a_program_that_becomes_another_holds_nothing(make_job: MakeJob) -> None:
    """Memory is free for others after exec, whether the new program is limited or uses no GPU."""
    job = make_job(2 * CONTEXT + 1000)
    become = "os.execv('/bin/sleep', ['sleep', '60'])"
    process = job.start(CUDA + f"start(); alloc(900); print(os.getpid(), flush=True); {become}")
    assert process.stdout and process.stdout.readline()
    assert job.run(CUDA + "start(); print(alloc(1400) > 0)")[0] == "True\n"
    again = "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    code = CUDA + "start(); print(alloc(1400) > 0)"
    assert job.run(CUDA + f"start(); alloc(900); {again}", code)[0] == "True\n"


def test_threads_share_one_account(make_job: MakeJob) -> None:
    job = make_job(CONTEXT + 1000)
    out, _ = job.run(
        CUDA
        + """
context = start()
counts = []
def work():
    cu.cuCtxSetCurrent(context)
    got = []
    for _ in range(400):
        a = alloc(7)
        if a > 0:
            got.append(a)
        if len(got) > 20 or a < 0:
            while got:
                ok(free(got.pop()))
    counts.append(1)
    while got:
        ok(free(got.pop()))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps([len(counts), info(), alloc(1000) > 0, alloc(1)]))
"""
    )
    assert json.loads(out) == [8, [1000, CONTEXT + 1000], True, -2]


def test_what_the_driver_does_not_know_it_refuses_itself(make_job: MakeJob) -> None:
    """Before cuInit, without a context, with a device that is not there: the driver's own codes, as without us."""
    ask = """
said = [cu.cuDevicePrimaryCtxRetain(c.byref(c.c_void_p()), 0), -alloc(1), cu.cuMemGetInfo_v2(c.byref(c.c_size_t()), c.byref(c.c_size_t()))]
ok(cu.cuInit(0))
said += [-alloc(1), cu.cuDevicePrimaryCtxRetain(c.byref(c.c_void_p()), 99), cu.cuCtxCreate_v2(c.byref(c.c_void_p()), 0, -1)]
start()
said += [-create(2, 77), -create(3), cu.cuMemFree_v2(c.c_uint64(123)), cu.cuMemAlloc_v2(None, size(1)), -alloc(0), release(5)]
said += [cu.cuMemMap(c.c_uint64(4096), size(2), c.c_size_t(0), c.c_uint64(1), c.c_ulonglong(0)), unmap(4096, 2)]
said += [-alloc_async(0), cu.cuMemFreeAsync(c.c_uint64(77), None), cu.cuMemPoolDestroy(None), cu.cuGraphLaunch(None, None)]
print(json.dumps(said))
"""  # noqa: E501
    job = make_job(1000)
    limited = json.loads(job.run(CUDA + ask)[0])
    job.preload = ""
    assert limited == json.loads(job.run(CUDA + ask)[0])
    assert limited[:2] == [3, 3]
