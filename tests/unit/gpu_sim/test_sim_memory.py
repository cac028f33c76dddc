"""What processes allocate through CUDA and HIP, alone and against each other."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_node import Node

from gpu_sim import holdings, layout

MIB = 1 << 20

CUDA = """
import ctypes as c, json, os, sys
cu = c.CDLL("libcuda.so.1")
MIB = 1 << 20
def ok(code):
    assert code == 0, code
def start(device=0):
    ok(cu.cuInit(0))
    context = c.c_void_p()
    ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), device))
    ok(cu.cuCtxSetCurrent(context))
    return context
def alloc(mib, function=None):
    address = c.c_uint64()
    code = cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(int(mib * MIB)))
    return address.value if code == 0 else -code
def info():
    free, total = c.c_size_t(), c.c_size_t()
    ok(cu.cuMemGetInfo_v2(c.byref(free), c.byref(total)))
    return free.value // MIB, total.value // MIB
import pynvml as n
n.nvmlInit()
def used(device=0):
    return n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(device), version=n.nvmlMemory_v2).used // MIB
def mine(device=0):
    handle = n.nvmlDeviceGetHandleByIndex(device)
    return [p.usedGpuMemory // MIB for p in n.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
"""
CONTEXT = 520  # MiB, of the H100 in models.yaml


def test_what_is_allocated_shows_as_the_processs(dgx: Node) -> None:
    found = dgx.run(
        CUDA
        + """
steps = [used()]
context = start()
steps += [used(), mine()]
big = alloc(1000)
small = [alloc(1 / 1024) for _ in range(2048)]  # 1 KiB each: they share pages of 2 MiB
steps += [used(), mine(), info()]
ok(cu.cuMemFree_v2(c.c_uint64(big)))
for address in small:
    ok(cu.cuMemFree_v2(c.c_uint64(address)))
steps += [used()]
alloc(64)
ok(cu.cuDevicePrimaryCtxRelease_v2(0))
steps += [used(), mine()]
print(json.dumps(steps))
"""
    )
    assert found == [
        0,
        CONTEXT,
        [CONTEXT],
        CONTEXT + 1002,
        [CONTEXT + 1002],
        [81008 - CONTEXT - 1002, 81008],
        CONTEXT,
        0,
        [],
    ]


def test_every_way_to_allocate_is_charged(dgx: Node) -> None:
    found = dgx.run(
        CUDA
        + """
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("where", c.c_int), ("id", c.c_int), ("w", c.c_void_p),
                ("flags", c.c_ubyte * 8)]
class Array(c.Structure):
    _fields_ = [("width", c.c_size_t), ("height", c.c_size_t), ("format", c.c_int), ("channels", c.c_uint)]
start()
base, steps = used(), {}
p, size = c.c_uint64(), c.c_size_t(64 * MIB)
def step(name):
    steps[name] = used() - base
ok(cu.cuMemAllocManaged(c.byref(p), size, 1)); step("managed")
ok(cu.cuMemFree_v2(p))
pitch = c.c_size_t()
ok(cu.cuMemAllocPitch_v2(c.byref(p), c.byref(pitch), c.c_size_t(1000), c.c_size_t(65536), 4)); step("pitch")
assert pitch.value == 1024
ok(cu.cuMemFree_v2(p))
ok(cu.cuMemAllocAsync(c.byref(p), size, None)); step("pool")
ok(cu.cuMemFreeAsync(p, None)); step("pool freed in the stream")
ok(cu.cuStreamSynchronize(None)); step("pool freed")
ok(cu.cuMemAllocAsync(c.byref(p), c.c_size_t(100 * MIB), None)); step("pool in steps")
ok(cu.cuMemFree_v2(p)); step("pool freed at once")
pool = c.c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(c.byref(pool), 0))
ok(cu.cuMemPoolSetAttribute(pool, 4, c.byref(c.c_uint64(2**63))))
ok(cu.cuMemAllocAsync(c.byref(p), size, None))
ok(cu.cuMemFreeAsync(p, None))
ok(cu.cuMemPoolTrimTo(pool, c.c_size_t(0))); step("pool trimmed too early")
ok(cu.cuCtxSynchronize()); step("pool kept")
ok(cu.cuMemPoolTrimTo(pool, c.c_size_t(0))); step("pool trimmed")
array = c.c_void_p()
ok(cu.cuArrayCreate_v2(c.byref(array), c.byref(Array(4096, 4096, 0x20, 1)))); step("array")
ok(cu.cuArrayDestroy(array))
handle, place = c.c_uint64(), c.c_uint64()
ok(cu.cuMemAddressReserve(c.byref(place), size, c.c_size_t(0), c.c_uint64(0), c.c_ulonglong(0))); step("reserved")
ok(cu.cuMemCreate(c.byref(handle), size, c.byref(Prop(1, 0, 1, 0)), c.c_ulonglong(0))); step("created")
ok(cu.cuMemMap(place, size, c.c_size_t(0), handle, c.c_ulonglong(0)))
ok(cu.cuMemRelease(handle)); step("mapped")
ok(cu.cuMemsetD32_v2(place, c.c_uint(7), c.c_size_t(16)))
assert cu.cuMemAddressFree(place, size) != 0
ok(cu.cuMemUnmap(place, size)); step("unmapped")
ok(cu.cuMemAddressFree(place, size))
ok(cu.cuMemHostAlloc(c.byref(array), size, 0)); step("host")
ok(cu.cuMemFreeHost(array))
context = c.c_void_p()
ok(cu.cuCtxCreate_v2(c.byref(context), 0, 0)); step("second context")
alloc(10)
ok(cu.cuCtxDestroy_v2(context)); step("destroyed")
print(json.dumps(steps))
"""
    )
    assert found == {
        "managed": 64,
        "pitch": 64,
        "pool": 64,
        "pool freed in the stream": 64,
        "pool freed": 0,
        "pool in steps": 128,
        "pool freed at once": 0,
        "pool trimmed too early": 64,
        "pool kept": 64,
        "pool trimmed": 0,
        "array": 64,
        "reserved": 0,
        "created": 64,
        "mapped": 64,
        "unmapped": 0,
        "host": 0,
        "second context": CONTEXT,
        "destroyed": 0,
    }


def test_misuse_is_answered_as_by_the_driver(dgx: Node) -> None:
    found = dgx.run(
        CUDA
        + """
codes = [alloc(1)]  # before cuInit
ok(cu.cuInit(0))
codes += [alloc(1)]  # without a context
start()
address = alloc(1)
codes += [alloc(90000), cu.cuMemFree_v2(c.c_uint64(address + 8)), cu.cuMemFree_v2(c.c_uint64(address)),
          cu.cuMemFree_v2(c.c_uint64(address)), cu.cuMemFree_v2(c.c_uint64(0)),
          cu.cuDeviceGet(c.byref(c.c_int()), 8), cu.cuCtxSetCurrent(c.c_void_p(4096)),
          cu.cuMemRelease(c.c_uint64(1)), cu.cuModuleLoadData(None, None)]
pid = os.fork()
if pid == 0:
    os._exit(-alloc(1) if cu.cuInit(0) == 3 else 99)  # the driver does not survive a fork
codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""
    )
    assert found == [-3, -201, -2, 1, 0, 1, 0, 101, 201, 1, 1, 3]


def test_copies_and_fills_keep_their_bytes(dgx: Node) -> None:
    assert dgx.run(
        CUDA
        + """
start()
one, other = alloc(8), alloc(8)
data = os.urandom(100_000)
ok(cu.cuMemcpyHtoD_v2(c.c_uint64(one), data, c.c_size_t(len(data))))
ok(cu.cuMemcpyDtoD_v2(c.c_uint64(other), c.c_uint64(one), c.c_size_t(len(data))))
ok(cu.cuMemsetD8_v2(c.c_uint64(one), c.c_ubyte(0), c.c_size_t(8 * MIB)))
ok(cu.cuMemsetD32_v2(c.c_uint64(one + 4), c.c_uint(0x01020304), c.c_size_t(1)))
back, zero = c.create_string_buffer(len(data)), c.create_string_buffer(12)
ok(cu.cuMemcpyDtoH_v2(back, c.c_uint64(other), c.c_size_t(len(data))))
ok(cu.cuMemcpyDtoH_v2(zero, c.c_uint64(one), c.c_size_t(12)))
print(json.dumps([back.raw == data, zero.raw.hex()]))
"""
    ) == [True, "000000000403020100000000"]


def test_visible_devices(make_node: Callable[..., Node]) -> None:
    node = make_node("dgx-h100-mig")
    ask = (
        CUDA
        + """
names = []
code = cu.cuInit(0)
count = c.c_int()
cu.cuDeviceGetCount(c.byref(count))
for device in range(count.value):
    text, total = c.create_string_buffer(16), c.c_size_t()
    ok(cu.cuDeviceGetPCIBusId(text, 16, device))
    ok(cu.cuDeviceTotalMem_v2(c.byref(total), device))
    names.append([text.value.decode()[5:7], total.value // MIB])
print(json.dumps([code, names]))
"""
    )
    h100 = 81008
    everything = node.run(ask)[1]
    assert everything == [["1B", 9984], *[[bus, h100] for bus in ("9D", "C3", "D1", "DF")]]  # one MIG device at most
    assert node.run(ask, CUDA_VISIBLE_DEVICES="4,1")[1] == [["DF", h100], ["9D", h100]]
    assert node.run(ask, CUDA_VISIBLE_DEVICES="1,9,2")[1] == [["9D", h100]]  # nothing after what is wrong
    assert node.run(ask, CUDA_VISIBLE_DEVICES=node.get(6, "uuid"))[1] == [["D1", h100]]
    assert node.run(ask, CUDA_VISIBLE_DEVICES="") == [100, []]
    instance = node.run(
        """
import json, pynvml as n
n.nvmlInit()
print(json.dumps(n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(n.nvmlDeviceGetHandleByIndex(1), 0))))
"""
    )
    assert node.run(ask, CUDA_VISIBLE_DEVICES=instance)[1] == [["43", 40448]]


def test_memory_of_a_mig_instance_is_its_own(make_node: Callable[..., Node]) -> None:
    node = make_node("dgx-h100-mig")
    found = node.run(
        CUDA
        + """
start()  # the first instance of GPU 0, 9984 MiB
codes = [alloc(9000) > 0, alloc(1000)]
gpu = n.nvmlDeviceGetHandleByIndex(0)
parts = [n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, k) for k in range(2)]
print(json.dumps([codes, [n.nvmlDeviceGetMemoryInfo(p).used // MIB for p in parts], used(),
                  [[p.gpuInstanceId, p.usedGpuMemory // MIB] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)]]))
"""
    )
    assert found == [[True, -2], [9000 + CONTEXT, 0], 9000 + CONTEXT, [[7, 9000 + CONTEXT]]]


HOLD = (
    CUDA
    + """
start()
print("ready", flush=True)
sys.stdin.readline()
taken = [alloc(int(sys.argv[1])) for _ in range(int(sys.argv[2]))]
print(json.dumps([os.getpid(), sum(address > 0 for address in taken)]), flush=True)
sys.stdin.readline()
"""
)


def go(*programs: subprocess.Popen[str]) -> list[tuple[int, int]]:
    """Let HOLD programs allocate at the same time; the process number and blocks of each."""
    for program in programs:
        assert program.stdout and program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin
        program.stdin.write("\n")
        program.stdin.flush()
    return [tuple(json.loads(program.stdout.readline())) for program in programs if program.stdout]


def test_memory_goes_with_a_killed_process(dgx: Node) -> None:
    with dgx.start(HOLD, 1000, 3) as program:
        [(pid, _)] = go(program)
        assert [(h.pid, h.gpu, h.memory_mib) for h in holdings(dgx.folder)] == [(pid, 0, 3000 + CONTEXT)]
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert holdings(dgx.folder) == []
        assert dgx.run(CUDA + "print(json.dumps(used()))") == 0


def test_processes_together_never_hold_more_than_there_is(dgx: Node, full_scale: bool) -> None:
    """Six ask for more than there is at the same time, half of them are killed, and their share can be had again."""
    rounds = 20 if full_scale else 2
    for _ in range(rounds):
        programs = [dgx.start(HOLD, 500, 40) for _ in range(6)]
        try:
            said = go(*programs)
            blocks = sum(count for _, count in said)
            free = 81008 - 6 * CONTEXT - blocks * 500
            assert 0 <= free < 500  # every block that fits was given out, and none more
            for program in programs[:3]:
                program.kill()
                program.wait()
            left = [holding.memory_mib for holding in holdings(dgx.folder)]
            assert sorted(left) == sorted(count * 500 + CONTEXT for _, count in said[3:])
            rest = (81008 - sum(left) - CONTEXT) // 500
            assert dgx.run(CUDA + "start(); print(json.dumps(sum(alloc(500) > 0 for _ in range(200))))") == rest
        finally:
            for program in programs:
                program.kill()
                program.communicate()


def test_a_job_that_damages_the_registry_harms_no_reader(dgx: Node) -> None:
    registry = dgx.folder / "processes"
    ask = CUDA + "print(json.dumps([used(), mine()]))"
    for damage in (b"", b"\x01" * 17, b"\xff" * 4096, b"\x00" * (1 << 20)):
        registry.write_bytes(damage)
        assert dgx.run(ask) == [0, []]
        assert isinstance(dgx.run(CUDA + "start(); print(json.dumps(alloc(10)))"), int)
    registry.unlink()
    assert dgx.run(ask) == [0, []]


def test_what_is_held_limits_what_can_be_set(dgx: Node) -> None:
    with dgx.start(HOLD, 40000, 1) as program:
        go(program)
        with pytest.raises(Exception, match="in use of 81008 usable"):
            dgx.set(0, memory_used="41000M")
        with pytest.raises(Exception, match="processes use it"):
            dgx.set(0, mig="on")
        dgx.set(1, memory_used="41000M")
        program.kill()


HIP = """
import ctypes as c, json, os, sys
hip = c.CDLL("libamdhip64.so")
MIB = 1 << 20
def alloc(mib, function="hipMalloc", *more):
    p = c.c_void_p()
    code = getattr(hip, function)(c.byref(p), c.c_size_t(int(mib * MIB)), *more)
    return p if code == 0 else code
import amdsmi as a
a.amdsmi_init()
hs = a.amdsmi_get_processor_handles()
def used(device=0):
    return a.amdsmi_get_gpu_vram_usage(hs[device])["vram_used"]
"""


def test_hip_memory_shows_in_amd_smi(make_node: Callable[..., Node]) -> None:
    node = make_node("mi300x-platform")
    found = node.run(
        HIP
        + """
steps = [used()]
free, total, name = c.c_size_t(), c.c_size_t(), c.create_string_buffer(64)
assert hip.hipDeviceGetName(name, 64, 0) == 0
steps += [used(), name.value.decode()]
first = alloc(1000)
steps += [used()]
pool = alloc(100, "hipMallocAsync", None)
managed = alloc(50, "hipMallocManaged", 1)
assert hip.hipMemGetInfo(c.byref(free), c.byref(total)) == 0
steps += [used(), free.value // MIB, total.value // MIB]
assert hip.hipMemset(first, 5, c.c_size_t(100)) == 0
back = c.create_string_buffer(2)
assert hip.hipMemcpy(back, first, c.c_size_t(2), 2) == 0 and back.raw == b"\\x05\\x05"
steps += [alloc(300000), hip.hipGetLastError(), hip.hipGetLastError()]
steps += [hip.hipFree(first), hip.hipFree(first), hip.hipFree(None), hip.hipFreeAsync(pool, None), hip.hipFree(managed)]
steps += [used()]
assert hip.hipSetDevice(7) == 0
alloc(10)
steps += [used(7), hip.hipSetDevice(8)]
[mine] = [p for p in a.amdsmi_get_gpu_process_list(hs[7])]
steps += [mine["pid"] == os.getpid(), mine["memory_usage"]["vram_mem"] // MIB]
print(json.dumps(steps))
"""
    )
    base, context = 284, 310
    assert found == [
        base,
        base,
        "AMD Instinct MI300X",
        base + context + 1000,
        base + context + 1150,
        196592 - 284 - context - 1150,
        196592 - 284,
        2,
        2,
        0,
        0,
        17,
        0,
        0,
        0,
        base + context,
        base + context + 10,
        101,
        True,
        context + 10,
    ]


def test_hip_visible_devices(make_node: Callable[..., Node]) -> None:
    node = make_node("mi300x-platform")
    ask = (
        HIP
        + """
count = c.c_int()
hip.hipGetDeviceCount(c.byref(count))
buses = []
for device in range(count.value):
    text = c.create_string_buffer(16)
    hip.hipDeviceGetPCIBusId(text, 16, device)
    buses.append(text.value.decode()[5:7])
print(json.dumps(buses))
"""
    )
    assert node.run(ask, HIP_VISIBLE_DEVICES="7,0") == ["e5", "05"]
    assert node.run(ask, ROCR_VISIBLE_DEVICES="1,2,3", HIP_VISIBLE_DEVICES="2") == ["65"]
    serial = node.run(HIP + "print(json.dumps(a.amdsmi_get_gpu_enumeration_info(hs[4])['hip_uuid']))")
    assert node.run(ask, ROCR_VISIBLE_DEVICES=serial) == ["85"]


def test_threads_allocate_side_by_side(dgx: Node) -> None:
    assert dgx.run(
        CUDA
        + """
import threading
context = start()
failed = []
def work():
    cu.cuCtxSetCurrent(context)
    for _ in range(200):
        p = c.c_uint64()
        if cu.cuMemAlloc_v2(c.byref(p), c.c_size_t(3 * MIB)) or cu.cuMemFree_v2(p):
            failed.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps([len(failed), used()]))
"""
    ) == [0, CONTEXT]


def test_a_variable_of_code_has_memory_in_each_context_until_the_code_or_the_context_goes(dgx: Node) -> None:
    assert dgx.run(
        CUDA
        + """
def load():
    it = c.c_void_p()
    ok(cu.cuModuleLoadData(c.byref(it), b"code"))
    return it
def variable(module, name=b"table", call=cu.cuModuleGetGlobal_v2):
    address, size = c.c_uint64(), c.c_size_t()
    code = call(c.byref(address), c.byref(size), module, name)
    return (address.value, size.value // 1024) if code == 0 else -code
start()
before, module = used(), load()
table, size = variable(module)
same = [variable(module) == (table, 64), variable(module, call=cu.cuLibraryGetGlobal) == (table, 64)]
others = {table, variable(module, b"other")[0], variable(load())[0]}
wrong = [variable(None), variable(module, b""), cu.cuModuleGetGlobal_v2(None, None, module, b"table")]
data, back = os.urandom(size * 1024), c.create_string_buffer(size * 1024)
ok(cu.cuMemcpyHtoD_v2(c.c_uint64(table), data, c.c_size_t(len(data))))
ok(cu.cuMemcpyDtoH_v2(back, c.c_uint64(table), c.c_size_t(len(data))))
context = c.c_void_p()
ok(cu.cuCtxCreate_v2(c.byref(context), 0, 0))
elsewhere = variable(module)[0] not in others
ok(cu.cuCtxDestroy_v2(context))
held = used() - before
ok(cu.cuModuleUnload(module))
fresh = load()
ok(cu.cuDevicePrimaryCtxReset_v2(0))
start()
after = used()
ok(cu.cuMemcpyHtoD_v2(c.c_uint64(variable(fresh)[0]), data, c.c_size_t(len(data))))
ok(cu.cuModuleUnload(fresh))
print(json.dumps([size, same, len(others), wrong, back.raw == data, elsewhere, held, after - before, used() - before]))
"""
    ) == [64, [True, True], 3, [-1, -1, 0], True, True, 2, 0, 0]


def test_a_slot_without_its_owners_lock_holds_nothing(dgx: Node) -> None:
    """What a dead process left does not count, and what was forged for a live one does not; the slot is used again."""
    forged = layout.Slot(pid=os.getpid(), gpu=0, instance=layout.NO_INSTANCE, start=1, bytes=5000 * MIB, space=1)
    (dgx.folder / "processes").write_bytes(bytes(forged))
    assert dgx.run(CUDA + "print(json.dumps([used(), mine()]))") == [0, []]
    assert holdings(dgx.folder) == []
    with dgx.start(HOLD, 1000, 1) as program:
        [(pid, _)] = go(program)
        slots = (dgx.folder / "processes").read_bytes()
        assert len(slots) == ctypes.sizeof(layout.Slot)
        assert layout.Slot.from_buffer_copy(slots).pid == pid
        program.kill()


def test_a_program_that_closes_all_files_still_holds_its_memory(dgx: Node) -> None:
    assert dgx.run(
        CUDA
        + """
start()
alloc(100)
os.closerange(3, 256)
alloc(100)
print(json.dumps([used(), mine()]))
"""
    ) == [CONTEXT + 200, [CONTEXT + 200]]


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of one's own needs root")
def test_containers_share_a_gpu_and_are_seen_from_the_node(dgx: Node) -> None:
    """Process numbers mean nothing across PID namespaces; memory counts there too, under the node's own number."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    with subprocess.Popen(
        [*inside, HOLD, "60000", "1"],
        env=dgx.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    ) as program:
        [(pid, blocks)] = go(program)
        assert (pid, blocks) == (1, 1)
        look = """
handle = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([used(), [[p.pid, p.usedGpuMemory // MIB] for p in n.nvmlDeviceGetComputeRunningProcesses(handle)]]))
"""
        total, [[number, memory]] = dgx.run(CUDA + look)
        assert (total, memory) == (60000 + CONTEXT, 60000 + CONTEXT)
        assert b"cuMemAlloc" in Path(f"/proc/{number}/cmdline").read_bytes()
        again = subprocess.run(
            [*inside, CUDA + "start(); print(json.dumps([alloc(30000), used()]))"],
            env=dgx.environment(),
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
        assert json.loads(again.stdout) == [-2, 60000 + 2 * CONTEXT]  # another container has less memory
        program.kill()
    assert dgx.run(CUDA + "print(json.dumps(used()))") == 0


# ---- compute modes ----

OPEN = """
import ctypes as c, json, sys
cu, context, mode, p = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_int(), c.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDeviceGetAttribute(c.byref(mode), 20, 0) == 0
def try_it():
    code = cu.cuDevicePrimaryCtxRetain(c.byref(context), 0)
    if code == 0:
        code = cu.cuCtxSetCurrent(context) or cu.cuMemAlloc_v2(c.byref(p), c.c_size_t(2 << 20))
    print(json.dumps([mode.value, code]), flush=True)
try_it()
for line in sys.stdin:
    try_it()
"""
PROHIBITED, EXCLUSIVE, UNAVAILABLE = 2, 3, 46


def test_an_exclusive_gpu_is_one_processs(dgx: Node) -> None:
    dgx.set(0, compute_mode=EXCLUSIVE)
    with dgx.start(OPEN) as first, dgx.start(OPEN) as second:
        assert first.stdin and first.stdout and second.stdin and second.stdout
        answers = [json.loads(one.stdout.readline()) for one in (first, second)]  # type: ignore[union-attr]
        assert sorted(code for _, code in answers) == [0, UNAVAILABLE] and {mode for mode, _ in answers} == {EXCLUSIVE}
        holder, other = (first, second) if answers[0][1] == 0 else (second, first)
        for one, code in ((holder, 0), (other, UNAVAILABLE)):  # a second context of the holder's is allowed
            assert one.stdin and one.stdout
            one.stdin.write("again\n")
            one.stdin.flush()
            assert json.loads(one.stdout.readline())[1] == code
        holder.kill()
        holder.wait()
        assert other.stdin and other.stdout
        other.stdin.write("again\n")
        other.stdin.flush()
        assert json.loads(other.stdout.readline())[1] == 0
        other.stdin.close()
    dgx.set(0, compute_mode=0, process="4194000:1G")
    dgx.set(0, compute_mode=EXCLUSIVE)
    assert run_once(dgx) == [EXCLUSIVE, UNAVAILABLE]


def test_nobody_opens_a_prohibited_gpu_and_who_has_it_keeps_it(dgx: Node) -> None:
    with dgx.start(OPEN) as program:
        assert program.stdin and program.stdout
        assert json.loads(program.stdout.readline()) == [0, 0]
        dgx.set(0, compute_mode=PROHIBITED)
        assert run_once(dgx) == [PROHIBITED, UNAVAILABLE]
        program.stdin.write("more\n")
        program.stdin.flush()
        assert json.loads(program.stdout.readline())[1] == 0
        program.stdin.close()
    assert run_once(dgx, CUDA_VISIBLE_DEVICES="1") == [0, 0]


def run_once(node: Node, **extra: str) -> list[int]:
    with node.start(OPEN, **extra) as program:
        out, err = program.communicate("", timeout=60)
    assert program.returncode == 0, err
    return list(json.loads(out))
