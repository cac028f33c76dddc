"""Ways around other limiters, each of which fails here; and public test programs, rewritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import Job
from sim_node import Node

from gpu_sim import holdings, library_dir
from tests.programs.begin import CUDA
from tests.programs.build import build_library, build_program

CONTEXT = 520
MakeJob = Callable[..., Job]


def test_release_before_unmap_gives_nothing_back(make_job: MakeJob) -> None:
    """Memory that a mapping still holds is still counted, however early its handle is released."""
    job = make_job(CONTEXT + 100)
    out, _ = job.run(
        CUDA
        + """
start()
place, codes = reserve(1000), []
for i in range(4):
    handle = create(32)
    codes += [handle > 0 and map_(place + 32 * i * MIB, 32, handle), handle > 0 and release(handle)]
left = info()[0]
ok(unmap(place, 96))
print(json.dumps([codes, left, info()[0]]))
"""
    )
    assert json.loads(out) == [[0, 0, 0, 0, 0, 0, False, False], 4, 100]


def test_memory_is_charged_where_it_lies(make_job: MakeJob) -> None:
    """location.id decides, not the current device."""
    job = make_job(CONTEXT + 50, 600)
    out, _ = job.run(
        CUDA + "start(0); print(json.dumps([create(600, 1) > 0, create(2, 1), info()[0], create(50, 0) > 0]))"
    )
    assert json.loads(out) == [True, -2, 50, True]


IN_DOMAIN = {
    "physical": """
handle = c.c_uint64()
take = lambda mib: cu.cuMemCreate(c.byref(handle), size(mib), c.byref(Prop(1, 1, 6, where)), c.c_ulonglong(0))
""",
    "pool": """
mine = c.c_void_p()
ok(cu.cuMemPoolCreate(c.byref(mine), c.byref(Pool(1, 0, 6, where))))
take = lambda mib: max(0, -alloc_async(mib, pool=mine))
""",
    "graph": """
def take(mib):
    graph, executable, node = c.c_void_p(), c.c_void_p(), Node(pool=Pool(1, 0, 6, where), bytes=mib * MIB)
    ok(cu.cuGraphCreate(c.byref(graph), 0))
    ok(cu.cuGraphAddMemAllocNode(c.byref(c.c_void_p()), graph, None, c.c_size_t(0), c.byref(node)))
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return cu.cuGraphLaunch(executable, None)
""",
}


@pytest.mark.parametrize("kind", IN_DOMAIN)
def test_a_part_of_a_device_is_charged_to_the_device(make_job: MakeJob, kind: str) -> None:
    """CUDA 13 names a domain of locality as a place: the device in the lowest byte, the domain in the next one."""
    job = make_job(CONTEXT + 50, 608)
    out, _ = job.run(CUDA + "start()\nwhere = 1\n" + IN_DOMAIN[kind] + "print(json.dumps([take(610), take(608)]))")
    assert json.loads(out) == [2, 0]
    with job.region() as region:
        assert (region.usage(0).peak >> 20, region.usage(1).peak >> 20) == (CONTEXT, 608)


def test_contexts_of_the_drivers_unnamed_function_are_charged(make_job: MakeJob) -> None:
    """cuGetExportTable's table for tools creates contexts, too."""
    out, _ = make_job(2 * CONTEXT - 1).run(
        CUDA
        + """
start()
table, context = c.POINTER(c.c_void_p)(), c.c_void_p()
ok(cu.cuGetExportTable(c.byref(table), bytes.fromhex("0ca50b8c1004929a89a7d0df10e77286")))
create = c.CFUNCTYPE(c.c_int)(table[1])
said = [create(c.byref(context), 0, 0), info()[0]]
ok(cu.cuDevicePrimaryCtxReset_v2(0))
said += [create(c.byref(context), 0, 0), info()[0], cu.cuCtxDestroy_v2(context)]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [2, CONTEXT - 1, 0, CONTEXT - 1, 0]


def test_what_a_file_keeps_stays_charged(make_job: MakeJob, dgx: Node) -> None:
    """Export, release, import: the memory stays allocated by the file, and cannot be allocated twice."""
    job = make_job(CONTEXT + 100)
    out, _ = job.run(
        CUDA
        + """
start()
files, seen = [], []
for _ in range(3):
    handle, file = create(64), c.c_int(-1)
    if handle > 0:
        ok(cu.cuMemExportToShareableHandle(c.byref(file), c.c_uint64(handle), 1, c.c_ulonglong(0)))
        ok(release(handle))
        files.append(file.value)
    seen.append(handle > 0)
again, place = c.c_uint64(), reserve(64)
ok(cu.cuMemImportFromShareableHandle(c.byref(again), c.c_void_p(files[0]), 1))
ok(map_(place, 64, again.value)); ok(release(again.value)); ok(unmap(place, 64))
seen.append(create(64))
os.close(files[0])
seen.append(create(100) > 0)
print(json.dumps(seen))
"""
    )
    assert json.loads(out) == [True, False, False, -2, True]


def test_memory_of_a_peer_is_charged_to_it_alone(make_job: MakeJob, dgx: Node) -> None:
    """Two processes of a job share memory: it counts once, and its bytes are the same."""
    job = make_job(2 * CONTEXT + 100)
    give = job.start(
        CUDA
        + """
start()
address, handle = alloc(80), c.create_string_buffer(64)
ok(cu.cuMemcpyHtoD_v2(c.c_uint64(address), b"hello", c.c_size_t(5)))
ok(cu.cuIpcGetMemHandle(handle, c.c_uint64(address)))
step(handle.raw.hex())
"""
    )
    assert give.stdout
    take = """
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]
start()
p, back = c.c_uint64(), c.create_string_buffer(5)
ok(cu.cuIpcOpenMemHandle_v2(c.byref(p), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), 1))
ok(cu.cuMemcpyDtoH_v2(back, p, c.c_size_t(5)))
left = info()[0]
ok(cu.cuIpcCloseMemHandle(p))
print(json.dumps([back.raw.decode(), left, info()[0], alloc(21), alloc(20) > 0]))
"""
    out, _ = job.run(CUDA + take, give.stdout.readline().strip())
    assert json.loads(out) == ["hello", 20, 20, -2, True]


def test_imported_memory_outlives_its_exporter(make_job: MakeJob) -> None:
    """A process that exported memory and died is removed only when no other process holds that memory."""
    job = make_job(2 * CONTEXT + 100)
    out, _ = job.run(
        CUDA
        + """
import socket
one, other = socket.socketpair()
child = os.fork()
if child == 0:
    start()
    handle, file = create(80), c.c_int()
    ok(cu.cuMemExportToShareableHandle(c.byref(file), c.c_uint64(handle), 1, c.c_ulonglong(0)))
    socket.send_fds(other, [b"-"], [file.value])
    os._exit(0)
start()
said = [alloc(10) > 0]
_, [file], _, _ = socket.recv_fds(one, 1, 1)
handle, place = c.c_uint64(), reserve(80)
ok(cu.cuMemImportFromShareableHandle(c.byref(handle), c.c_void_p(file), 1))
ok(map_(place, 80, handle.value)); ok(release(handle.value))
os.waitpid(child, 0)
said += [alloc(20), info()[0]]
ok(unmap(place, 80))
said += [alloc(20)]  # the file is still there, and the memory could be had from it again
os.close(file)
said += [alloc(100) > 0, info()[0]]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [True, -2, 10, -2, True, CONTEXT - 10]


def test_recorded_allocations_are_charged_when_they_run(make_job: MakeJob) -> None:
    """A stream's recording allocates nothing; its graph does, and is refused where there is no room."""
    job = make_job(CONTEXT + 128)
    out, _ = job.run(
        CUDA
        + """
start()
stream = c.c_void_p()
ok(cu.cuStreamCreate(c.byref(stream), 0))
def record(*mibs):
    graph, executable = c.c_void_p(), c.c_void_p()
    ok(cu.cuStreamBeginCapture_v2(stream, 0))
    for mib in mibs:
        assert alloc_async(mib, stream) > 0
    ok(cu.cuStreamEndCapture(stream, c.byref(graph)))
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(1)))
    return executable
large, fits = record(60, 70), record(60, 68)
said = [info()[0], cu.cuGraphLaunch(large, stream), info()[0], cu.cuGraphLaunch(fits, stream), info()[0], alloc(1)]
said += [cu.cuGraphLaunch(fits, stream), info()[0]]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [128, 2, 128, 0, 0, -2, 0, 0]


def test_graphs_within_graphs_are_charged(make_job: MakeJob) -> None:
    job = make_job(CONTEXT + 128)
    out, _ = job.run(
        CUDA
        + """
start()
def within(mib):
    inner, outer, executable = c.c_void_p(), c.c_void_p(), c.c_void_p()
    ok(cu.cuGraphCreate(c.byref(inner), 0)); ok(cu.cuGraphCreate(c.byref(outer), 0))
    node = Node(pool=Pool(1, 0, 1, 0), bytes=mib * MIB)
    ok(cu.cuGraphAddMemAllocNode(c.byref(c.c_void_p()), inner, None, c.c_size_t(0), c.byref(node)))
    ok(cu.cuGraphAddChildGraphNode(c.byref(c.c_void_p()), outer, None, c.c_size_t(0), inner))
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), outer, c.c_ulonglong(1)))
    return executable
print(json.dumps([cu.cuGraphLaunch(within(129), None), info()[0], cu.cuGraphLaunch(within(90), None), info()[0]]))
"""
    )
    assert json.loads(out) == [2, 128, 0, 32]


def test_pools_are_charged_with_what_they_keep(make_job: MakeJob) -> None:
    job = make_job(CONTEXT + 128)
    out, _ = job.run(
        CUDA
        + """
start()
pool = c.c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(c.byref(pool), 0))
ok(cu.cuMemPoolSetAttribute(pool, 4, c.byref(c.c_uint64(2**63))))
one = alloc_async(128)
said = [one > 0, alloc_async(1)]
ok(cu.cuMemFreeAsync(c.c_uint64(one), None))
said += [info()[0], alloc(2), alloc_async(60) > 0, alloc_async(68) > 0, alloc_async(1)]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [True, -2, 0, -2, True, True, -2]


def test_forms_of_32_bits_lead_nowhere(make_job: MakeJob, tmp_path: Path) -> None:
    driver = build_library("cuda_old_driver", tmp_path / "libdriver.so")
    program = build_program("cuda_old_forms", tmp_path / "old", driver)
    assert make_job(2000).run([str(program)])[0] == "801 801\n"


# ---- ways into the driver ----


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("programs")
    library = library_dir() / "libcuda.so.1"
    return {
        "looked-up": build_program("cuda_looked_up", folder / "looked-up"),
        "linked": build_program("cuda_linked", folder / "linked", library),
        "copy-of-driver.so": Path(shutil.copy(library, folder / "copy-of-driver.so")),
    }


def test_the_runtimes_way_into_the_driver(make_job: MakeJob, programs: dict[str, Path]) -> None:
    assert make_job(CONTEXT + 100).run([str(programs["looked-up"])])[0] == "0 2 2 1\n"


def test_a_profile_leads_past_no_limit(make_job: MakeJob, programs: dict[str, Path]) -> None:
    """Its library comes before, as /etc/ld.so.preload comes after LD_PRELOAD, and has a dlsym of its own, too."""
    job = make_job(CONTEXT + 100)
    preload = f"{Path(job.preload).with_name('libsluice_profile_preload.so')}:{job.preload}"
    assert job.run([str(programs["looked-up"])], LD_PRELOAD=preload)[0] == "0 2 2 1\n"


def test_a_linked_program(make_job: MakeJob, programs: dict[str, Path]) -> None:
    assert make_job(CONTEXT + 100).run([str(programs["linked"])])[0].endswith("\n0 2\n")


def test_a_copy_of_the_driver_is_the_driver(make_job: MakeJob, programs: dict[str, Path]) -> None:
    """Loaded by a path of the tenant's own."""
    assert make_job(CONTEXT + 100).run([str(programs["looked-up"]), programs["copy-of-driver.so"]])[0] == "0 2 2 1\n"


def test_the_environment_sets_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    """Variables of other limiters do not change a limit, and our own names do not."""
    job = make_job(CONTEXT + 100)
    other = make_job(90000 // 2)
    names = {name: "80000m" for name in ("CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "SLUICE_LIMIT")}
    names |= {"SLUICE_LIMIT_FOLDER": str(other.folder), "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(other.folder)}
    assert job.run(CUDA + "start(); print(info(), alloc(101))", **names)[0] == "[100, 620] -2\n"


def test_loaded_by_the_namespace_it_cannot_be_unset(
    make_job: MakeJob, programs: dict[str, Path], tmp_path: Path
) -> None:
    """/etc/ld.so.preload of the job's own mount namespace loads the library for any value of LD_PRELOAD."""
    job = make_job(CONTEXT + 100)
    preload = tmp_path / "ld.so.preload"
    preload.write_text(f"{job.preload}\n")
    script = (
        f"mkdir -p {tmp_path}/up {tmp_path}/work /run/etc && cp {preload} {tmp_path}/up/ && "
        f"mount -t overlay overlay -o lowerdir=/etc,upperdir={tmp_path}/up,workdir={tmp_path}/work /etc || exit 77; "
        f"exec env -i LD_LIBRARY_PATH=$LD_LIBRARY_PATH SLUICE_SIM_STATE=$SLUICE_SIM_STATE {programs['looked-up']}"
    )
    process = job.start(["sh", "-c", script], LD_PRELOAD="")
    out, err = process.communicate(timeout=60)
    if process.returncode == 77:
        pytest.skip(f"no overlay over /etc on this machine: {err}")
    assert (out, process.returncode) == ("0 2 2 1\n", 0), err


# ---- no region, no memory ----


def test_without_a_region_there_is_no_memory(make_job: MakeJob) -> None:
    job = make_job(1000)
    job.folder = Path()
    out, err = job.run(CUDA + "print(start(), create(2)); print(start())")
    assert out == "-2 -2\n-2\n"
    assert err == "sluice: this process gets no GPU memory: no region of this job in /run/sluice/limit\n"


def test_a_region_of_somebody_else_is_none(make_job: MakeJob) -> None:
    job = make_job(50000)
    for name in ("limits", "ledger"):
        os.chown(job.folder / name, 12345, -1)
        out, err = job.run(CUDA + "print(start())")
        assert out == "-2\n"
        assert f"/run/sluice/limit/job/{name}: owner 12345" in err
        os.chown(job.folder / name, 0, -1)
    (job.folder / "ledger").chmod(0o666)
    assert "nobody else's to write" in job.run(CUDA + "print(start())")[1]


def test_a_damaged_region_is_none(make_job: MakeJob) -> None:
    job = make_job(50000)
    good = {name: (job.folder / name).read_bytes() for name in ("limits", "ledger")}
    cases = [
        ("limits", b""),
        ("limits", good["limits"][:-1]),
        ("limits", b"\xff" * len(good["limits"])),
        ("limits", good["limits"][:40] + b"x" + good["limits"][41:]),
        ("ledger", b""),
        ("ledger", good["ledger"][:-64]),
        ("ledger", b"\x00" * len(good["ledger"])),
    ]
    for name, content in cases:
        (job.folder / name).write_bytes(content)
        out, err = job.run(CUDA + "print(start())")
        assert out == "-2\n"
        assert err.startswith("sluice: this process gets no GPU memory: "), err
        assert err.count("\n") == 1
        (job.folder / name).write_bytes(good[name])
    assert job.run(CUDA + "start(); print(alloc(1) > 0)")[0] == "True\n"


def test_a_limit_in_the_ledger_is_not_believed(make_job: MakeJob) -> None:
    """The job's user can write the ledger, as its processes must; the limit in force is in a file of root's."""
    job = make_job(1000)
    with (job.folder / "ledger").open("r+b") as file:
        whole = file.read()
        device = whole.index(b"slledger") + 64  # two pairs of 16 bytes, then limit and granularity
        file.seek(device + 32)
        file.write((70000 << 20).to_bytes(8, "little") * 2)
    assert job.run(CUDA + "start(); print(alloc(481), alloc(480) > 0)")[0] == "-2 True\n"


def test_a_jobs_user_can_use_but_not_change_the_region(make_job: MakeJob, dgx: Node) -> None:
    job = make_job(1000, uid=23456)
    (dgx.folder / "processes").chmod(0o666)
    out, err = job.run(
        CUDA
        + """
start()
said = [os.getuid(), alloc(480) > 0, alloc(1)]
for name in ("limits", "ledger"):
    for what in (lambda p: open(p, "r+b"), os.unlink, lambda p: os.chmod(p, 0o777), lambda p: os.rename(p, p + "x")):
        try:
            what("/run/sluice/limit/job/" + name)
            said.append(name)
        except OSError:
            pass
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [23456, True, -2, "ledger"], err  # which he may write, as his processes must


def test_another_user_gets_nothing(make_job: MakeJob, dgx: Node) -> None:
    job = make_job(1000, uid=23456)
    (dgx.folder / "processes").chmod(0o666)
    job.uid = 34567
    out, err = job.run(CUDA + "print(start())")
    assert out == "-2\n"
    assert "Permission denied" in err


def test_the_region_is_found_by_the_cgroup(make_job: MakeJob) -> None:
    """Where nothing is bound in the job's namespace: by the innermost part of the cgroup's path that names a region."""
    root = Path("/sys/fs/cgroup")
    trees = [root / "freezer", root / "cpu", root]
    for tree in trees:
        try:
            cgroup = tree / "sluice-test" / "uid_0" / "job_4711" / "step_0"
            cgroup.mkdir(parents=True, exist_ok=True)
            break
        except OSError:
            continue
    else:
        pytest.skip("no cgroup can be made here")
    try:
        job = make_job(1000)
        job.place = "job_4711"
        line = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
        code = CUDA + "start(); print(alloc(480) > 0, alloc(1))"
        out, err = job.run(["sh", "-c", line, "sh", "python3", "-c", code])
        assert out == "True -2\n", err
        job.place = "job_4712"
        assert job.run(["sh", "-c", line, "sh", "python3", "-c", CUDA + "print(start())"])[0] == "-2\n"
    finally:
        for folder in (cgroup, *cgroup.parents[:3]):
            folder.rmdir()


# ---- memory beyond the limit, where policy allows it ----


def test_more_than_the_limit_spills_to_the_host(make_job: MakeJob, dgx: Node) -> None:
    job = make_job(CONTEXT + 100, spill=60)
    process = job.start(
        CUDA
        + """
start()
said = [info(), alloc(90) > 0]
more = alloc(50)
said += [more > 0, info(), alloc(20)]
ok(cu.cuMemcpyHtoD_v2(c.c_uint64(more), b"hello", c.c_size_t(5)))
back = c.create_string_buffer(5)
ok(cu.cuMemcpyDtoH_v2(back, c.c_uint64(more), c.c_size_t(5)))
said += [back.raw.decode(), cu.cuMemPrefetchAsync(c.c_uint64(more), size(50), 0, None)]
said += [cu.cuMemAdvise(c.c_uint64(more), size(50), 3, 0)]
step(json.dumps(said))
print(free(more), info(), alloc(60) > 0)
"""
    )
    assert process.stdout and process.stdin
    assert json.loads(process.stdout.readline()) == [[160, 680], True, True, [20, 680], -2, "hello", 0, 0]
    assert [h.memory_mib for h in holdings(dgx.folder)] == [CONTEXT + 90]  # nothing of it lies on the device
    assert job.charged() == CONTEXT + 90
    with job.region() as region:
        assert region.usage(0).spilled >> 20 == 50
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0 [70, 680] True\n"


# ---- public test programs of another limiter, as they describe themselves ----


def test_public_scenarios(make_job: MakeJob) -> None:
    """Allocate and free in turn; allocate of every kind; host memory and registered memory cost nothing; more than the
    limit at once; many small pieces; a device's properties; two devices of one process."""
    job = make_job(CONTEXT + 200, CONTEXT + 300)
    out, _ = job.run(
        CUDA
        + """
context, said = start(), []
for _ in range(500):
    ok(free(alloc(150)))
host = c.c_void_p()
ok(cu.cuMemHostAlloc(c.byref(host), size(1000), 0)); ok(cu.cuMemAllocHost_v2(c.byref(c.c_void_p()), size(1000)))
own = c.create_string_buffer(1 << 20)
ok(cu.cuMemHostRegister_v2(own, c.c_size_t(1 << 20), 0)); ok(cu.cuMemHostUnregister(own))
said += [info()[0], alloc(201), alloc(80000), alloc(1 << 40)]
kept = [alloc(1 / 16) for _ in range(3200)]
said += [sum(a > 0 for a in kept), alloc(1 / 16)]
[ok(free(a)) for a in kept if a > 0]
said.append(info()[0])
second = c.c_void_p()
ok(cu.cuDevicePrimaryCtxRetain(c.byref(second), 1)); ok(cu.cuCtxSetCurrent(second))
said += [alloc(300) > 0, alloc(1), info()]
ok(cu.cuCtxSetCurrent(context))
said += [alloc(200) > 0, alloc(1), free(12345 << 20) != 0, cu.cuMemFree_v2(c.c_uint64(0))]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [200, -2, -2, -2, 3200, -2, 200, True, -2, [0, CONTEXT + 300], True, -2, True, 0]


def test_what_was_spilled_stays_on_the_host_in_batches(make_job: MakeJob, dgx: Node) -> None:
    """CUDA 13 moves several pieces at once, with or without their contents."""
    process = make_job(CONTEXT + 100, spill=60).start(
        CUDA
        + """
class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]
start()
kept, spilled, stream = alloc(100), alloc(50), c.c_void_p()
ok(cu.cuStreamCreate(c.byref(stream), 1))
pieces, sizes = (c.c_uint64 * 1)(spilled), (c.c_size_t * 1)(50 * MIB)
for call in cu.cuMemPrefetchBatchAsync, cu.cuMemDiscardAndPrefetchBatchAsync:
    ok(call(pieces, sizes, c.c_size_t(1), c.byref(Location(1, 0)), c.byref(c.c_size_t(0)), c.c_size_t(1),
            c.c_ulonglong(0), stream))
for place in Location(1, 0), Location(6, 0):  # the device, and its domain of locality
    ok(cu.cuMemPrefetchAsync_v2(c.c_uint64(spilled), c.c_size_t(50 * MIB), place, 0, stream))
step("moved")
"""
    )
    assert process.stdout and process.stdout.readline() == "moved\n"
    assert sum(h.memory_mib for h in holdings(dgx.folder)) == CONTEXT + 100


def test_green_contexts_cost_what_their_primary_one_does(make_job: MakeJob, dgx: Node) -> None:
    process = make_job(CONTEXT + 100).start(
        CUDA
        + """
ok(cu.cuInit(0))
def green():
    it, context = c.c_void_p(), c.c_void_p()
    code = cu.cuGreenCtxCreate(c.byref(it), c.byref(c.c_int()), 0, 1)
    if code == 0:
        ok(cu.cuCtxFromGreenCtx(c.byref(context), it)); ok(cu.cuCtxSetCurrent(context))
    return it if code == 0 else code
first, second = green(), green()
said = [alloc(102), alloc(100) > 0]
step(json.dumps(said))
ok(cu.cuGreenCtxDestroy(first)); step("one left")
ok(cu.cuGreenCtxDestroy(second)); step("none")
other = green(); step(json.dumps([info()[0], alloc(100) > 0]))
"""
    )
    assert process.stdout and process.stdin
    shown = []
    for _ in range(4):
        said = process.stdout.readline().strip()
        shown.append((said, sum(h.memory_mib for h in holdings(dgx.folder))))
        process.stdin.write("\n")
        process.stdin.flush()
    assert shown == [
        ("[-2, true]", CONTEXT + 100),
        ("one left", CONTEXT + 100),
        ("none", 0),
        ("[100, true]", CONTEXT + 100),
    ]


def test_no_room_for_a_green_context(make_job: MakeJob, dgx: Node) -> None:
    """The first one creates the primary context."""
    job = make_job(2 * CONTEXT - 1)
    first = job.start(CUDA + "start(); step('held')")
    assert first.stdout and first.stdout.readline() == "held\n"
    out, err = job.run(CUDA + "ok(cu.cuInit(0)); print(cu.cuGreenCtxCreate(c.byref(c.c_void_p()), b'any', 0, 1))")
    assert out == "2\n", err
    assert sum(h.memory_mib for h in holdings(dgx.folder)) == CONTEXT


def test_a_table_of_unnamed_functions_keeps_its_length(make_job: MakeJob) -> None:
    """Its first place is its size in bytes; all others but the one that creates contexts are the driver's."""
    out, err = make_job(2 * CONTEXT + 10).run(
        CUDA
        + """
ok(cu.cuInit(0))
table, context = c.POINTER(c.c_void_p)(), c.c_void_p()
for _ in range(2):
    ok(cu.cuGetExportTable(c.byref(table), bytes.fromhex("0ca50b8c1004929a89a7d0df10e77286")))
create = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint, c.c_int)(table[1])
said = [table[0], c.CFUNCTYPE(c.c_int)(table[2])()]
said += [create(c.addressof(context), 0, 0) for _ in range(3)]
print(json.dumps(said))
"""
    )
    assert json.loads(out) == [24, 42, 0, 0, 2], err
