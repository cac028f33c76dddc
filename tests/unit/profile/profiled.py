"""Programs that are profiled, and their profiles by a reader of the tests' own."""

from __future__ import annotations

import itertools
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sim_node import Node

LIBRARY = Path(__file__).parents[3] / "sluice/core/libsluice_profile.so"
PRELOAD = LIBRARY.with_name("libsluice_profile_preload.so")
INJECTED = {
    "nvidia": {"CUDA_INJECTION64_PATH": str(LIBRARY)},
    "amd": {"ROCP_TOOL_LIBRARIES": str(LIBRARY)},
    "intel": {"LD_PRELOAD": str(PRELOAD), "ZE_ENABLE_TRACING_LAYER": "1"},
}
CONTROL = struct.Struct("<8sIIQIIQ24x")
HEADER = struct.Struct("<8sIIIIQQIIIIIIII64s64s40s16x")
RECORD = struct.Struct("<HHIQQIIII24s")
LOSS = struct.Struct("<QI4xQ")

NAME, DEVICE, KERNEL, COPY, FILL, SYNC, MEMORY, CALL = range(1, 9)
COLLECTIVE, SAMPLE = 9, 10
CLOCK, GAP, LOST, END = range(11, 15)
STOPPED, TIME, EXIT, QUOTA, DISK, BUDGET, BUFFERS, NO_LIBRARY, OCCUPIED, FORBIDDEN, NOT_TIMED = range(1, 12)
ALL, CALLS, SAMPLES, KERNELS = 47, 16, 64, 1
NO_LIMIT = 1_000_000  # of the budget: all of the time

# What a program does: begin() with a context and a module, run(launches, function=gemm), copy(), wait(). Says "ready".
ANY = """
import ctypes as c, os, sys, time
def ok(code): assert code == 0, code
one, block, none = c.c_uint(1), c.c_uint(128), c.c_uint(0)
def run(count, function=None, stream=None):
    for _ in range(count):
        ok(launch(function or gemm, one, one, one, block, one, one, none, stream, None, None))
def say(text="ready"):
    print(text, flush=True)
def told():
    return sys.stdin.readline().strip()
"""
CUDA = (
    ANY
    + """
cu = c.CDLL("libcuda.so.1")
launch = cu.cuLaunchKernel
PTX = b".version 6.0\\n.target sm_50\\n.address_size 64\\n" + b"".join(
    b".visible .entry %s() { ret; }\\n" % name for name in (b"gemm", b"small"))
def begin():
    global gemm, small, memory
    context, module, gemm, small, memory = (c.c_void_p() for _ in range(5))
    ok(cu.cuInit(0))
    ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0))
    ok(cu.cuCtxSetCurrent(context))
    ok(cu.cuModuleLoadData(c.byref(module), PTX))
    ok(cu.cuModuleGetFunction(c.byref(gemm), module, b"gemm"))
    ok(cu.cuModuleGetFunction(c.byref(small), module, b"small"))
    ok(cu.cuMemAlloc_v2(c.byref(memory), c.c_size_t(1 << 20)))
def copy(size=1 << 20):
    ok(cu.cuMemcpyHtoD_v2(memory, bytes(size), c.c_size_t(size)))
def wait():
    ok(cu.cuCtxSynchronize())
def new_stream():
    stream = c.c_void_p()
    ok(cu.cuStreamCreate(c.byref(stream), 1))
    return stream
def fill():
    ok(cu.cuMemsetD8_v2(memory, c.c_ubyte(1), c.c_size_t(4096)))
def free():
    ok(cu.cuMemFree_v2(memory))
"""
)
HIP = (
    ANY
    + """
hip = c.CDLL("libamdhip64.so.6")
launch = hip.hipModuleLaunchKernel
def begin():
    global gemm, small, memory
    module, gemm, small, memory = (c.c_void_p() for _ in range(4))
    ok(hip.hipInit(0))
    ok(hip.hipModuleLoadData(c.byref(module), b"code"))
    ok(hip.hipModuleGetFunction(c.byref(gemm), module, b"gemm"))
    ok(hip.hipModuleGetFunction(c.byref(small), module, b"small"))
    ok(hip.hipMalloc(c.byref(memory), c.c_size_t(1 << 20)))
def copy(size=1 << 20):
    ok(hip.hipMemcpy(memory, bytes(size), c.c_size_t(size), 1))
def wait():
    ok(hip.hipDeviceSynchronize())
def new_stream():
    stream = c.c_void_p()
    ok(hip.hipStreamCreateWithFlags(c.byref(stream), 1))
    return stream
def fill():
    ok(hip.hipMemset(memory, 1, c.c_size_t(4096)))
def free():
    ok(hip.hipFree(memory))
"""
)
ZE = (
    ANY
    + """
ze = c.CDLL("libze_loader.so.1")
FOREVER = c.c_uint64(2**64 - 1)
class Groups(c.Structure):
    _fields_ = [("x", c.c_uint32), ("y", c.c_uint32), ("z", c.c_uint32)]
class Kernel(c.Structure):
    _fields_ = [("type", c.c_uint32), ("next", c.c_void_p), ("flags", c.c_uint32), ("name", c.c_char_p)]
how = bytes(256)
def made(function, *arguments):
    handle = c.c_void_p()
    ok(function(*arguments, c.byref(handle)))
    return handle
def kernel(name):
    return made(ze.zeKernelCreate, module, c.byref(Kernel(0x1d, None, 0, name)))
def begin():
    global device, context, module, main, gemm, small, memory
    ok(ze.zeInit(0))
    driver = made(ze.zeDriverGet, c.byref(c.c_uint32(1)))
    device = made(ze.zeDeviceGet, driver, c.byref(c.c_uint32(1)))
    context = made(ze.zeContextCreate, driver, how)
    module = c.c_void_p()
    ok(ze.zeModuleCreate(context, device, how, c.byref(module), None))
    gemm, small, main = kernel(b"gemm"), kernel(b"small"), new_stream()
    memory = made(ze.zeMemAllocDevice, context, how, c.c_size_t(1 << 20), c.c_size_t(64), device)
def new_stream():
    return made(ze.zeCommandListCreateImmediate, context, device, how)
def launch(function, x, y, z, block_x, block_y, block_z, shared, stream, parameters, extra, signal=None):
    ok(ze.zeKernelSetGroupSize(function, block_x, block_y, block_z))
    return ze.zeCommandListAppendLaunchKernel(stream or main, function, c.byref(Groups(1, 1, 1)), signal, none, None)
def copy(size=1 << 20):
    ok(ze.zeCommandListAppendMemoryCopy(main, memory, bytes(size), c.c_size_t(size), None, none, None))
    wait()
def wait():
    ok(ze.zeCommandListHostSynchronize(main, FOREVER))
def fill():
    byte, sizes = c.c_ubyte(1), (c.c_size_t(1), c.c_size_t(4096))
    ok(ze.zeCommandListAppendMemoryFill(main, memory, c.byref(byte), *sizes, None, none, None))
def free():
    ok(ze.zeMemFree(context, memory))
"""
)
# The same program on the GPUs of each vendor.
GPU = f"import os\nexec({ {'nvidia': CUDA, 'amd': HIP, 'intel': ZE}!r}[os.environ['VENDOR']])\n"
# Works until its standard input says something, then says how many kernels it launched.
LOOP = (
    GPU
    + """
import select
begin()
say()
launched = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    run(20)
    launched += 20
    copy(4096)
    wait()
    time.sleep(0.002)
say(str(launched))
"""
)

# Asked for before it starts: waits until that is seen, then does a known amount of work.
KNOWN = (
    GPU
    + """
begin()
say()
told()
run(100)
run(10, small)
run(5, gemm, new_stream())
copy()
fill()
free()
wait()
"""
)


class Record(NamedTuple):
    kind: int
    slots: int
    device: int
    start: int
    end: int
    context: int
    stream: int
    correlation: int
    name: int
    rest: bytes

    @property
    def loss(self) -> tuple[int, int, int]:
        """Events, reason, cost."""
        events, reason, cost = LOSS.unpack(self.rest)
        return events, reason, cost


@dataclass
class Profile:
    """All of a file, which must be whole records but for the last."""

    path: Path
    pid: int = 0
    number: int = 0
    vendor: int = 0
    started: int = 0
    end: Record | None = None
    names: dict[int, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Profile:
        data = path.read_bytes()
        magic, version, size, record_size, vendor, started, _, pid, number, *_ = HEADER.unpack(data[: HEADER.size])
        assert (magic, version, size, record_size) == (b"SLUPROF1", 1, 256, 64)
        profile = cls(path, pid, number, vendor, started)
        body = data[size:]
        records = [Record._make(raw) for raw in RECORD.iter_unpack(body[: len(body) // 64 * 64])]
        if records and records[0].kind == END:
            profile.end = records[0]
        place = 1
        while place < len(records):
            one = records[place]
            if one.kind == NAME:
                length = int.from_bytes(one.rest[:8], "little")
                text = body[(place + 1) * 64 : (place + 1) * 64 + length]
                assert one.slots == (length + 63) // 64
                profile.names[one.name] = text.decode()
            else:
                profile.records.append(one)
            place += 1 + one.slots
        return profile

    def of(self, *kinds: int) -> list[Record]:
        return [one for one in self.records if one.kind in kinds]

    @property
    def reason(self) -> int:
        assert self.end is not None, f"{self.path} has no end"
        return self.end.loss[1]

    @property
    def words(self) -> str:
        assert self.end is not None
        return self.names.get(self.end.name, "")

    def named(self, name: str) -> list[Record]:
        return [one for one in self.of(KERNEL) if self.names[one.name] == name]


numbers = itertools.count(1)


def has_begun(path: Path, ended: bool) -> bool:
    """Whether its first record is there; `ended`: and says that it was the last."""
    with path.open("rb") as file:
        start = file.read(HEADER.size + RECORD.size)
    return len(start) == HEADER.size + RECORD.size and (start[HEADER.size] == END or not ended)


@dataclass
class Profiled:
    """A program and the folder of its profiles."""

    process: subprocess.Popen[str]
    folder: Path

    @classmethod
    def on_hardware(cls, folder: Path, code: str, **environment: str) -> Profiled:
        """With the driver of this machine."""
        names = {"CUDA_INJECTION64_PATH": str(LIBRARY), "SLUICE_PROFILE_FOLDER": str(folder), "VENDOR": "nvidia"}
        pipe = subprocess.PIPE
        words = [sys.executable, "-c", code]
        environment = os.environ | names | environment
        return cls(subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True), folder)

    @classmethod
    def start(
        cls, node: Node, folder: Path, code: str, *arguments: object, vendor: str = "nvidia", **environment: str
    ) -> Profiled:
        names = {**INJECTED[vendor], "SLUICE_PROFILE_FOLDER": str(folder), "VENDOR": vendor}
        return cls(node.start(code, *arguments, **(names | environment)), folder)

    def hears(self, timeout: float = 30) -> str:
        """The next line that the program prints."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout)[0], "the program says nothing"
        line = self.process.stdout.readline().strip()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(self.process.stderr.read())
        return line

    def tell(self, word: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ends(self) -> str:
        """The rest of what it prints; it must exit with 0."""
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err
        return out.strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ask(self, wanted: int = ALL, *, seconds: float = 0, budget: int = NO_LIMIT, limit: int = 0) -> int:
        """Ask for a profile; its number."""
        return ask(self.folder, wanted, seconds=seconds, budget=budget, limit=limit)

    def stop(self, number: int) -> Profile:
        write_control(self.folder, 0, number)
        return self.profile(number)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.profile"))

    def profile(self, number: int | None = None, *, pid: int | None = None) -> Profile:
        """The profile, when it has ended."""
        number = number if number is not None else 1
        return self.wait_for(number, pid or self.process.pid, ended=True)

    def wait_for(self, number: int, pid: int, *, ended: bool = False) -> Profile:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for path in self.files():
                if path.name.endswith(f".{pid}.{number}.profile") and has_begun(path, ended):
                    return Profile.read(path)
            time.sleep(0.02)
        raise AssertionError(f"no profile {number} of {pid} among {self.files()}")

    def collects_anything(self, number: int) -> None:
        """Wait until collection has begun, also where the program does nothing."""
        deadline = time.monotonic() + 20
        while not self.wait_for(number, self.process.pid).of(CLOCK):
            assert time.monotonic() < deadline, "it does not begin"
            time.sleep(0.02)
        time.sleep(0.05)

    def collects(self, number: int) -> None:
        """Wait until kernels are in the file."""
        deadline = time.monotonic() + 20
        while not self.wait_for(number, self.process.pid).of(KERNEL):
            assert time.monotonic() < deadline, "nothing is collected"
            time.sleep(0.02)


def ask(folder: Path, wanted: int = ALL, *, seconds: float = 0, budget: int = NO_LIMIT, limit: int = 0) -> int:
    """Of all processes that look into this folder."""
    number = next(numbers)
    until = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0
    write_control(folder, wanted, number, until, budget, limit)
    return number


def write_control(
    folder: Path, wanted: int, number: int, until: int = 0, budget: int = 0, limit: int = 0, seconds: int = 0
) -> None:
    fresh = folder / ".control"
    fresh.write_bytes(CONTROL.pack(b"SLUPCTL1", seconds, wanted, until, budget, number, limit))
    fresh.replace(folder / "control")


def known_work(program: Profiled, number: int) -> Profile:
    """When the profile runs, and its first launches are no longer timed before collection."""
    assert program.hears() == "ready"
    program.collects_anything(number)
    program.tell()
    program.ends()
    return program.profile(number)
