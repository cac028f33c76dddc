"""Pools, which grow in steps and keep what was freed in a stream until the host has waited: the limit holds for what
the driver has for them, as its own figures and the vendor's tool show it."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Callable

import pytest
from limited import Job
from sim_node import Node

from gpu_sim import holdings
from tests.programs.begin import CUDA

CONTEXT = 520
STEP = 32  # MiB, as measured on an H200
MakeJob = Callable[..., Job]

BEGIN = (
    CUDA
    + """
start()
RESERVED, RESERVED_HIGH, USED, THRESHOLD = 5, 6, 7, 4
default = c.c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(c.byref(default), 0))
def pool_of(kind=1):
    made = c.c_void_p()
    ok(cu.cuMemPoolCreate(c.byref(made), c.byref(Pool(kind, 0, 1, 0))))
    return made
def figure(which, pool=default):
    value = c.c_uint64()
    ok(cu.cuMemPoolGetAttribute(pool, which, c.byref(value)))
    return value.value // MIB
def keep(pool=default):
    ok(cu.cuMemPoolSetAttribute(pool, THRESHOLD, c.byref(c.c_uint64(2**64 - 1))))
def free_async(address, stream=None):
    ok(cu.cuMemFreeAsync(c.c_uint64(address), stream))
def wait():
    ok(cu.cuCtxSynchronize())
"""
)


def shown(node: Node, *processes: int) -> int:
    """MiB on GPU 0, as the vendor's tool shows them."""
    return sum(h.memory_mib for h in holdings(node.folder) if h.gpu == 0 and h.pid in processes)


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("threshold", ["", "keep()"], ids=["releases", "keeps"])
def test_a_pool_never_grows_past_the_limit(make_job: MakeJob, dgx: Node, threshold: str) -> None:
    """The last piece that fits, but whose step does not, is refused whether or not the program waits and asks again."""
    job = make_job(CONTEXT + 300)
    process = job.start(
        BEGIN
        + threshold
        + """
said = [alloc(200) > 0, alloc_async(100)]
wait()
said += [alloc_async(100), figure(RESERVED_HIGH), alloc_async(96) > 0, alloc_async(5), alloc_async(1 / MIB)]
said += [figure(RESERVED), figure(RESERVED_HIGH), info()[0], alloc(4) > 0, info()[0]]
step(json.dumps(said))
"""
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [True, -2, -2, 0, True, -2, -2, 96, 96, 4, True, 0]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 300


def test_what_a_pool_has_in_its_last_step_can_be_used(make_job: MakeJob) -> None:
    """Of a step that is charged, all can be had: where the pool need not grow, no room is needed."""
    out, err = make_job(CONTEXT + 300).run(
        BEGIN
        + """
said = [alloc(172) > 0, alloc_async(100) > 0, info()[0], alloc_async(28) > 0, info()[0], alloc_async(1 / MIB)]
print(json.dumps([*said, figure(RESERVED), figure(USED)]))
"""
    )
    assert json.loads(out) == [True, True, 0, True, 0, -2, 128, 128], err


@pytest.mark.parametrize("room", [0, 1, 31, 32, 33, 63, 64])
def test_one_byte_needs_a_step(make_job: MakeJob, room: int) -> None:
    out, err = make_job(CONTEXT + 200 + room).run(
        BEGIN
        + """
alloc(200)
got = [alloc_async(1 / MIB) > 0 for _ in range(3)]
print(json.dumps([*got, figure(RESERVED_HIGH), alloc_async(31) > 0, figure(RESERVED_HIGH)]))
"""
    )
    steps = room // STEP
    assert json.loads(out) == [*[steps > 0] * 3, STEP * (steps > 0), steps > 0, STEP * (steps > 0)], err


def test_a_driver_with_larger_steps_is_corrected(make_job: MakeJob, dgx: Node) -> None:
    """What it grew by too much is not handed out: it is freed, nothing else is granted while the driver still has it,
    and it goes when the program waits, whatever the pool's threshold says."""
    job = make_job(CONTEXT + 300)
    process = job.start(
        BEGIN
        + """
keep()
step(json.dumps([alloc(200) > 0, alloc_async(90), alloc_async(90), alloc_async(1 / MIB), alloc(2), figure(USED)]))
wait()
step(json.dumps([figure(RESERVED), info()[0], alloc_async(64) > 0, alloc_async(1), wait(), alloc(36) > 0, info()[0]]))
""",
        SLUICE_SIM_POOL_STEP_MIB="64",
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [True, -2, -2, -2, -2, 0]
    assert job.charged() == CONTEXT + 296
    answer(process)
    assert json.loads(process.stdout.readline()) == [0, 100, True, -2, None, True, 0]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 300


def test_the_limit_is_lowered_below_what_a_pool_has(make_job: MakeJob, dgx: Node) -> None:
    """The pool can still be used, but does not grow."""
    job = make_job(CONTEXT + 400)
    process = job.start(
        BEGIN
        + """
keep()
one, two = alloc_async(100), alloc_async(200)
free_async(one)
step(json.dumps([one > 0, two > 0, figure(RESERVED)]))
step(json.dumps([alloc_async(96) > 0, alloc_async(100), figure(RESERVED), alloc(2), info()[0]]))
"""
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [True, True, 320]
    with job.region() as region:
        region.set_limit(0, (CONTEXT + 200) << 20)
    answer(process)
    assert json.loads(process.stdout.readline()) == [True, -2, 320, -2, 0]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 320


@pytest.mark.parametrize("kind", [1, 2], ids=["device", "managed"])
def test_several_pools_share_the_room(make_job: MakeJob, dgx: Node, kind: int) -> None:
    """Each loses less than a step; what they have together is charged."""
    job = make_job(CONTEXT + 200)
    process = job.start(
        BEGIN
        + f"""
pools = [pool_of({kind}) for _ in range(8)]
for pool in pools:
    keep(pool)
got = [alloc_async(20, pool=pool) > 0 for pool in pools]
high = sum(figure(RESERVED_HIGH, pool) for pool in pools)
step(json.dumps([got.count(True), high, info()[0]]))
"""
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [6, 192, 8]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 192


def test_trimmed_room_is_anothers(make_job: MakeJob) -> None:
    out, err = make_job(CONTEXT + 128).run(
        BEGIN
        + """
keep()
mine = pool_of()
one = alloc_async(100)
said = [alloc_async(1, pool=mine)]
free_async(one); ok(cu.cuMemPoolTrimTo(default, size(0)))
said += [figure(RESERVED), alloc_async(1, pool=mine)]
wait(); ok(cu.cuMemPoolTrimTo(default, size(0)))
print(json.dumps([*said, figure(RESERVED), alloc_async(100, pool=mine) > 0, alloc_async(1), figure(RESERVED, mine)]))
"""
    )
    assert json.loads(out) == [-2, 128, -2, 0, True, -2, 128], err


def test_graphs_grow_in_steps(make_job: MakeJob, dgx: Node) -> None:
    job = make_job(CONTEXT + 100)
    process = job.start(
        BEGIN
        + """
def reserved(which=3):
    value = c.c_uint64()
    ok(cu.cuDeviceGetGraphMemAttribute(0, which, c.byref(value)))
    return value.value // MIB
small, large, fits = graph_of(1), graph_of(60, 40), graph_of(60, 36)
said = [cu.cuGraphLaunch(large, None), reserved(), cu.cuGraphLaunch(fits, None), cu.cuGraphLaunch(fits, None)]
step(json.dumps([*said, cu.cuGraphLaunch(small, None), reserved(), info()[0], alloc_async(1 / MIB)]))
"""
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [2, 0, 0, 0, 2, 96, 4, -2]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 96


def test_graphs_in_turns_hold_no_more_than_the_limit(make_job: MakeJob, dgx: Node) -> None:
    """What a graph had when it ran last may be another's now."""
    job = make_job(CONTEXT + 100)
    process = job.start(
        BEGIN
        + """
def made():
    graph, executable, node = c.c_void_p(), c.c_void_p(), Node(pool=Pool(1, 0, 1, 0), bytes=90 * MIB)
    ok(cu.cuGraphCreate(c.byref(graph), 0))
    ok(cu.cuGraphAddMemAllocNode(c.byref(c.c_void_p()), graph, None, c.c_size_t(0), c.byref(node)))
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return executable, node.address
def launch(graph):
    return cu.cuGraphLaunch(graph, None)
(one, its), (other, others) = made(), made()
said = [launch(one), launch(other), launch(one), free(its), launch(other), launch(one), launch(other)]
said += [free(others), launch(one), launch(one), info()[0]]
step(json.dumps(said))
"""
    )
    assert process.stdout
    assert json.loads(process.stdout.readline()) == [0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 4]
    assert job.charged() == shown(dgx, process.pid) == CONTEXT + 96


def test_processes_and_threads_race_with_their_pools(make_job: MakeJob, dgx: Node, full_scale: bool) -> None:
    """Looked at from outside all the time: never above the limit, and in the end all of it is in use but for less than
    a step."""
    rounds = 400 if full_scale else 60
    job = make_job(2 * CONTEXT + 330)
    processes = [
        job.start(
            BEGIN
            + f"""
import random
def work(seed):
    ok(cu.cuCtxSetCurrent(context))
    draw, mine, held = random.Random(seed), pool_of(), []
    keep(mine)
    for _ in range({rounds}):
        pool = draw.choice((default, mine))
        address = alloc_async(draw.choice((1 / MIB, 1, 20, 33, 64, 100)), pool=pool)
        held += [address] if address > 0 else []
        if held and draw.random() < 0.6:
            free_async(held.pop(draw.randrange(len(held))))
        if draw.random() < 0.2:
            wait()
        if draw.random() < 0.1:
            ok(cu.cuMemPoolTrimTo(pool, size(0)))
    for address in held:
        free_async(address)
    wait()
    ok(cu.cuMemPoolDestroy(mine))
context = c.c_void_p()
ok(cu.cuCtxGetCurrent(c.byref(context)))
step("ready")
threads = [threading.Thread(target=work, args=[{who} * 10 + i]) for i in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
print("done", flush=True)
step("-")
while alloc_async(1) > 0:
    pass
step("full")
"""
        )
        for who in range(2)
    ]

    ids = [process.pid for process in processes]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        answer(process)
    most = 0
    waiting = [process.stdout for process in processes if process.stdout]
    while waiting:
        most = max(most, shown(dgx, *ids))
        for stream in select.select(waiting, [], [], 0.001)[0]:
            assert stream.readline() == "done\n"
            waiting.remove(stream)
    assert 2 * CONTEXT < most <= 2 * CONTEXT + 330
    assert job.charged() == shown(dgx, *ids) == 2 * CONTEXT
    for process in processes:
        answer(process)
    for process in processes:
        assert process.stdout and process.stdout.readline() == "-\n"
        assert process.stdout.readline() == "full\n"
    assert job.charged() == shown(dgx, *ids) == 2 * CONTEXT + 330 // STEP * STEP
