#!/usr/bin/python3 -IS
"""Measures a job's GPUs before it starts. The node agent starts it as a user without rights.

The first line that it reads has the GPUs: ``[{"gpu": NAME, "vendor": "nvidia", "pci": ADDRESS}, ...]``; it answers
``{"ready": true}`` when their drivers do. Each other line is a list of tests. It says ``{"began": ID}`` of each test,
then its result. A test has `id`, `kind`, `gpu` and, between two GPUs, `other_gpu`; a result `id`, `value` (None where
there is none) and `fault`: what went wrong, empty where nothing did, or where it is not known to be the GPU's. GPUs are
tested at once; by PCIe one of each NUMA node, as several may share a switch.

clock   MHz of the multiprocessors at work: the time of a kernel that ends after so many of their cycles
memory  GB/s that the GPU copies in its own memory (read and written bytes count), and that the copy is the same
pcie    GB/s between pinned memory of the host, next to the GPU, and the GPU: the slower direction, and the same data
nvlink  GB/s between two GPUs, the slower direction, and the same data

The vendors' own libraries do it: CUDA's driver, which compiles the kernel, and HIP. HIP has no compiler of its own
here, so AMD GPUs have no test of the clock. Standard library only: it runs outside of the agent's environment.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

SMALLEST, HOST, LARGEST = 4 << 20, 32 << 20, 512 << 20
"""Bytes of a copy: at first, at most to or from the host, and at most on GPUs."""
CHECKED = {"memory": 256 << 20, "nvlink": 64 << 20}  # bytes of a copy that are compared
LONG_MS = 1.0  # a copy that takes so long is measured: its start is no part of it
BURST_MS = 4.0
BURSTS = 3  # of which the best counts
MOST_COPIES = 64  # of a burst
CYCLES = 20_000_000  # some 10 ms
LAUNCHES = 5  # of which the best counts: the first ones find the clock low
THREADS = 256
PATTERN = 0xA5C3_0FF1
KERNEL = f"sluice_cycles_{CYCLES}"
PTX = f"""
.version 6.0
.target sm_52
.address_size 64
.visible .entry {KERNEL}(.param .u64 out)
{{
    .reg .pred %p<3>;
    .reg .f32 %f<6>;
    .reg .b64 %r<5>;
    mov.u64 %r1, %clock64;
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F000000;
    mov.f32 %f3, 0f3E800000;
    mov.f32 %f4, 0f3F7FBE77;
    mov.f32 %f5, 0f3A83126F;
again:
    fma.rn.f32 %f1, %f1, %f4, %f5;
    fma.rn.f32 %f2, %f2, %f4, %f5;
    fma.rn.f32 %f3, %f3, %f4, %f5;
    fma.rn.f32 %f1, %f1, %f4, %f2;
    fma.rn.f32 %f2, %f2, %f4, %f3;
    mov.u64 %r2, %clock64;
    sub.u64 %r3, %r2, %r1;
    setp.lt.u64 %p1, %r3, {CYCLES};
    @%p1 bra again;
    add.f32 %f1, %f1, %f2;
    setp.eq.f32 %p2, %f1, 0f00000000;
    @!%p2 bra done;
    ld.param.u64 %r4, [out];
    cvta.to.global.u64 %r4, %r4;
    st.global.f32 [%r4], %f1;
done:
    ret;
}}
"""

FAULTS = {101, 214, 220, 226, 700, 702, *range(714, 720), 999}
"""Errors that are the GPU's, of CUDA and of HIP: not there, ECC, NVLink, a kernel that failed, unknown. All others can
be the node's: memory in use, exclusive mode, no access to peers, a driver without its compiler."""
KINDS = ("clock", "memory", "pcie", "nvlink")
SAYING = threading.Lock()
LIBC = ctypes.CDLL(None)
LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBC.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
PR_SET_DUMPABLE = 4
SIZE, POINTER = ctypes.c_size_t, ctypes.c_uint64


class DriverError(Exception):
    """A call of the driver failed. `fault` is empty where that need not be the GPU's: others have its memory, say."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} answers {status}")
        self.fault = str(self) if status in FAULTS else ""


class WrongDataError(Exception):
    """A copy is not what was copied."""


class Library:
    """A vendor's library: how its calls are named, and what they take. All raise DriverError."""

    files: tuple[str, ...]  # the first that is there
    kinds: frozenset[str]
    names: dict[str, str]

    def __init__(self) -> None:
        self.library = load(self.files)
        self.call("init", ctypes.c_uint(0))

    def call(self, what: str, *arguments: Any) -> None:
        """By our name, or the library's."""
        name = self.names.get(what, what)
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise DriverError(name, status)

    def device(self, pci: str) -> int:
        """By its address on PCI."""
        device = ctypes.c_int()
        self.call("by_pci", ctypes.byref(device), pci.encode())
        return device.value

    def context(self, device: int) -> Any:
        """Made where it is not there."""
        raise NotImplementedError

    def use(self, context: Any) -> None:
        """What follows is of this GPU."""
        raise NotImplementedError

    def reach(self, context: Any, other: Any) -> None:
        """The GPU in use reaches another one without the host; both are on one link."""
        raise NotImplementedError

    def host(self, size: int) -> int:
        """Pinned memory."""
        raise NotImplementedError

    def copy(self, to: int, source: int, size: int) -> None:
        """Queued, wherever these are."""
        raise NotImplementedError

    def memory(self, size: int) -> int:
        """Of the GPU in use."""
        address = POINTER()
        self.call("allocate", ctypes.byref(address), SIZE(size))
        return address.value

    def free(self, address: int) -> None:
        """Of a GPU."""
        self.call("free", POINTER(address))

    def free_host(self, address: int) -> None:
        """Of the host."""
        self.call("free_host", ctypes.c_void_p(address))

    def wait(self) -> None:
        """Until all is done that the GPU in use was given."""
        self.call("wait")

    def timed(self, work: Callable[[], None]) -> float:
        """Milliseconds on the GPU in use that what is queued takes."""
        begin, end, took = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        for event in (begin, end):
            self.call("event", ctypes.byref(event), *self.event_flags)
        try:
            self.call("record", begin, None)
            work()
            self.call("record", end, None)
            self.call("await", end)
            self.call("elapsed", ctypes.byref(took), begin, end)
        finally:
            for event in (begin, end):
                self.call("drop", event)
        return max(took.value, 1e-3)

    event_flags: tuple[Any, ...] = ()


def load(files: tuple[str, ...]) -> ctypes.CDLL:
    """The first of a library's names that is there. Raises OSError."""
    for file in files[:-1]:
        with suppress(OSError):
            return ctypes.CDLL(file)
    return ctypes.CDLL(files[-1])


class Cuda(Library):
    """CUDA's driver."""

    files = ("libcuda.so.1",)
    kinds = frozenset({"clock", "memory", "pcie", "nvlink"})
    event_flags = (ctypes.c_uint(0),)
    names = {  # noqa: RUF012 - nothing changes it
        "init": "cuInit",
        "by_pci": "cuDeviceGetByPCIBusId",
        "allocate": "cuMemAlloc_v2",
        "free": "cuMemFree_v2",
        "free_host": "cuMemFreeHost",
        "wait": "cuCtxSynchronize",
        "event": "cuEventCreate",
        "record": "cuEventRecord",
        "await": "cuEventSynchronize",
        "elapsed": "cuEventElapsedTime",
        "drop": "cuEventDestroy_v2",
    }

    def context(self, device: int) -> Any:
        """The device's primary one."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        return context

    def use(self, context: Any) -> None:
        """See above."""
        self.call("cuCtxSetCurrent", context)

    def reach(self, context: Any, other: Any) -> None:
        """See above."""
        enabled_before = 704
        for one, peer in ((context, other), (other, context)):
            self.use(one)
            try:
                self.call("cuCtxEnablePeerAccess", peer, ctypes.c_uint(0))
            except DriverError as error:
                if not str(error).endswith(f" {enabled_before}"):
                    raise

    def host(self, size: int) -> int:
        """See above."""
        address = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(address), SIZE(size))
        return address.value or 0

    def copy(self, to: int, source: int, size: int) -> None:
        """See above."""
        self.call("cuMemcpyAsync", POINTER(to), POINTER(source), SIZE(size), None)

    def fill(self, to: int, size: int) -> None:
        """With the pattern."""
        self.call("cuMemsetD32_v2", POINTER(to), ctypes.c_uint(PATTERN), SIZE(size // 4))

    def clock(self, device: int) -> float:
        """MHz at work."""
        code, function, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        multiprocessors = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.call("cuDeviceGetAttribute", ctypes.byref(count), ctypes.c_int(multiprocessors), ctypes.c_int(device))
        self.call("cuModuleLoadData", ctypes.byref(code), PTX.encode())
        try:
            self.call("cuModuleGetFunction", ctypes.byref(function), code, KERNEL.encode())
            out = self.memory(4096)
            try:
                argument = POINTER(out)
                arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
                grid = [ctypes.c_uint(one) for one in (count.value, 1, 1, THREADS, 1, 1, 0)]

                def launch() -> None:
                    self.call("cuLaunchKernel", function, *grid, None, arguments, None)

                return max(CYCLES / self.timed(launch) / 1e3 for _ in range(LAUNCHES))
            finally:
                self.free(out)
        finally:
            self.call("cuModuleUnload", code)


class Hip(Library):
    """AMD's HIP."""

    files = ("libamdhip64.so", *(f"libamdhip64.so.{major}" for major in range(7, 4, -1)))
    kinds = frozenset({"memory", "pcie"})
    names = {  # noqa: RUF012 - nothing changes it
        "init": "hipInit",
        "by_pci": "hipDeviceGetByPCIBusId",
        "allocate": "hipMalloc",
        "free": "hipFree",
        "free_host": "hipHostFree",
        "wait": "hipDeviceSynchronize",
        "event": "hipEventCreate",
        "record": "hipEventRecord",
        "await": "hipEventSynchronize",
        "elapsed": "hipEventElapsedTime",
        "drop": "hipEventDestroy",
    }

    def context(self, device: int) -> Any:
        """HIP makes it with the first allocation."""
        return device

    def use(self, context: Any) -> None:
        """See above."""
        self.call("hipSetDevice", ctypes.c_int(context))

    def host(self, size: int) -> int:
        """See above."""
        address = ctypes.c_void_p()
        self.call("hipHostMalloc", ctypes.byref(address), SIZE(size), ctypes.c_uint(0))
        return address.value or 0

    def copy(self, to: int, source: int, size: int) -> None:
        """See above."""
        wherever = 4  # hipMemcpyDefault
        self.call("hipMemcpyAsync", ctypes.c_void_p(to), ctypes.c_void_p(source), SIZE(size), wherever, None)

    def fill(self, to: int, size: int) -> None:
        """With the pattern."""
        self.call("hipMemsetD32", ctypes.c_void_p(to), ctypes.c_int(PATTERN - (1 << 32)), SIZE(size // 4))


LIBRARIES: dict[str, type[Cuda] | type[Hip]] = {"nvidia": Cuda, "amd": Hip}


class Gpu:
    """One of the job's. Raises DriverError where its driver does not open it."""

    def __init__(self, library: Cuda | Hip, pci: str) -> None:
        self.library = library
        self.pci = pci
        self.device = library.device(pci)
        self.context = library.context(self.device)

    def test(self, kind: str, other: Gpu | None) -> float | None:
        """The figure of a test; None for one that this library does not have. Raises DriverError, WrongDataError."""
        if kind not in self.library.kinds:
            return None
        self.library.use(self.context)
        if kind == "clock":
            assert isinstance(self.library, Cuda)  # noqa: S101 - it alone has this kind
            return self.library.clock(self.device)
        if kind == "memory":
            return self.memory()
        return self.pcie() if other is None else self.nvlink(other)

    def rate(self, copy: Callable[[int], None], most: int) -> tuple[float, int]:
        """GB/s of copies that are long enough, and how long they are in bytes."""
        library, size = self.library, SMALLEST
        library.timed(partial(copy, size))
        while (took := library.timed(partial(copy, size))) < LONG_MS and size < most:
            size *= 2
        count = min(MOST_COPIES, math.ceil(BURST_MS / took))

        def burst() -> None:
            for _ in range(count):
                copy(size)

        return max(count * size / library.timed(burst) / 1e6 for _ in range(BURSTS)), size

    def pcie(self) -> float:
        """See the module."""
        self.go_near()
        library = self.library
        with Memory(library) as memory:
            here, back, there = memory.host(HOST), memory.host(HOST), memory.device(HOST)
            to, size = self.rate(lambda size: library.copy(there, here, size), HOST)
            out, _ = self.rate(lambda size: library.copy(back, there, size), HOST)
            self.check_way(here, there, back, size)
        return min(to, out)

    def check_way(self, here: int, there: int, back: int, size: int) -> None:
        """Data from the host to the GPU and back is the same. Raises WrongDataError."""
        library = self.library
        some = os.urandom(1 << 20)
        for at in range(0, size, len(some)):
            LIBC.memmove(here + at, some, min(len(some), size - at))
        library.copy(there, here, size)
        library.copy(back, there, size)
        library.wait()
        compare(here, back, size)

    def is_way_good(self, here: int, there: int, back: int) -> bool:
        """Whether `check_way` is content."""
        try:
            self.check_way(here, there, back, SMALLEST)
        except WrongDataError:
            return False
        return True

    def memory(self) -> float:
        """See the module."""
        library = self.library
        with Memory(library) as memory:
            size, one, other = memory.pair()
            rate, used = self.rate(lambda size: library.copy(other, one, size), size)
            library.fill(one, used)
            library.copy(other, one, used)
            library.wait()
            self.check_pattern(memory, other, min(used, CHECKED["memory"]))
        return 2 * rate

    def check_pattern(self, memory: Memory, at: int, size: int) -> None:
        """All of it has the pattern. Raises WrongDataError, unless data gets lost on the way to the host."""
        piece = min(size, HOST)
        wanted, got = memory.host(piece), memory.host(piece)
        some = PATTERN.to_bytes(4, "little") * (1 << 18)
        for place in range(0, piece, len(some)):
            LIBC.memmove(wanted + place, some, min(len(some), piece - place))
        for place in range(0, size, piece):
            length = min(piece, size - place)
            self.library.copy(got, at + place, length)
            self.library.wait()
            try:
                compare(wanted, got, length)
            except WrongDataError:
                if self.is_way_good(wanted, memory.device(SMALLEST), got):
                    raise
                return  # the test of PCIe says so

    def nvlink(self, other: Gpu) -> float:
        """See the module."""
        library = self.library
        library.reach(self.context, other.context)
        with Memory(other.library) as theirs:
            library.use(other.context)
            size = min(theirs.largest(), LARGEST)
            there = theirs.device(size)
            library.use(self.context)
            with Memory(library) as memory:
                here = memory.device(size)
                to, used = self.rate(lambda size: library.copy(there, here, size), size)
                back, _ = self.rate(lambda size: library.copy(here, there, size), size)
                library.fill(here, used)
                library.copy(there, here, used)
                library.wait()
                library.use(other.context)
                other.check_pattern(theirs, there, min(used, CHECKED["nvlink"]))
                library.use(self.context)
            library.use(other.context)
        return min(to, back)

    def go_near(self) -> None:
        """Run on the GPU's own NUMA node, whose memory pinned memory then is."""
        with suppress(OSError, ValueError):
            with open(f"/sys/bus/pci/devices/{self.pci}/local_cpulist", encoding="ascii") as file:  # noqa: PTH123
                cpus = cpus_of(file.read())
            os.sched_setaffinity(0, cpus)


class Memory:
    """What a test has allocated; given back when it is over, whatever came of it."""

    def __init__(self, library: Cuda | Hip) -> None:
        self.library = library
        self.of_host: list[int] = []
        self.of_device: list[int] = []

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(DriverError):  # what is wrong with the GPU is said by the test
            for address in self.of_device:
                self.library.free(address)
            for address in self.of_host:
                self.library.free_host(address)

    def host(self, size: int) -> int:
        """Pinned."""
        self.of_host.append(self.library.host(size))
        return self.of_host[-1]

    def device(self, size: int) -> int:
        """Of the GPU in use."""
        self.of_device.append(self.library.memory(size))
        return self.of_device[-1]

    def largest(self) -> int:
        """Bytes of which the GPU in use has twice as many."""
        size = LARGEST
        while size > SMALLEST:
            try:
                self.library.free(self.library.memory(2 * size))
            except DriverError:
                size //= 2
            else:
                return size
        return size

    def pair(self) -> tuple[int, int, int]:
        """Two pieces of the GPU's memory, and how large they are."""
        size = self.largest()
        return size, self.device(size), self.device(size)


def compare(wanted: int, got: int, size: int) -> None:
    """Raises WrongDataError."""
    if LIBC.memcmp(wanted, got, size) != 0:
        raise WrongDataError


def cpus_of(text: str) -> set[int]:
    """CPUs of the kernel's list, as in ``0-3,8``. Raises ValueError."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    cpus = {cpu for first, last in found for cpu in range(int(first), int(last or first) + 1)}
    if not cpus:
        raise ValueError(text)
    return cpus


class Tester:
    """All GPUs of the job on this node. Raises OSError, DriverError where a vendor's library does not start."""

    def __init__(self, gpus: list[dict[str, str]]) -> None:
        self.known = {one["gpu"]: one for one in gpus}
        self.libraries = {vendor: LIBRARIES[vendor]() for vendor in {one["vendor"] for one in gpus}}
        self.opened: dict[str, Gpu] = {}
        self.opening = {name: threading.Lock() for name in self.known}

    def open(self) -> None:
        """All GPUs, meanwhile; the tests say of which that fails."""
        for name in self.known:
            threading.Thread(target=self.try_open, args=(name,), daemon=True).start()

    def try_open(self, name: str) -> None:
        """See above."""
        with suppress(DriverError):
            self.gpu(name)

    def gpu(self, name: str) -> Gpu:
        """Raises DriverError."""
        with self.opening[name]:
            if name not in self.opened:
                one = self.known[name]
                self.opened[name] = Gpu(self.libraries[one["vendor"]], one["pci"])
            return self.opened[name]

    def busy(self, test: dict[str, str]) -> set[str]:
        """What a test needs for itself."""
        if test["kind"] == "pcie":
            return {f"host {numa_node(self.known[test['gpu']]['pci'])}"}
        return {test["gpu"], test["other_gpu"]} if test["kind"] == "nvlink" else {test["gpu"]}

    def run(self, test: dict[str, str]) -> None:
        """One test, and its result; in a thread of its own, as contexts and CPUs are a thread's."""
        value, fault = None, ""
        say({"began": test["id"]})
        try:
            other = self.gpu(test["other_gpu"]) if test["kind"] == "nvlink" else None
            value = self.gpu(test["gpu"]).test(test["kind"], other)
        except DriverError as error:
            fault = error.fault
        except WrongDataError:
            fault = "wrong data"
        say({"id": test["id"], "value": value, "fault": fault})


def at_once(tests: list[dict[str, str]], busy: Callable[[dict[str, str]], set[str]]) -> list[list[dict[str, str]]]:
    """In which order they are made. Those that are made at once are of one kind, and keep nothing busy together."""
    found: list[tuple[str, set[str], list[dict[str, str]]]] = []
    for test in sorted(tests, key=lambda one: KINDS.index(one["kind"])):
        needs = busy(test)
        for kind, taken, some in found:
            if kind == test["kind"] and taken.isdisjoint(needs):
                some.append(test)
                taken |= needs
                break
        else:
            found.append((test["kind"], needs, [test]))
    return [some for _, _, some in found]


def numa_node(pci: str) -> str:
    """Of a device; empty where it is not known."""
    try:
        with open(f"/sys/bus/pci/devices/{pci}/numa_node", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def say(words: dict[str, Any]) -> None:
    """One line to the agent."""
    with SAYING:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Until the agent closes standard input."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        tester = Tester(json.loads(sys.stdin.readline()))
    except (OSError, DriverError) as error:
        say({"ready": False, "why": str(error)})
        return
    say({"ready": True})
    tester.open()
    for line in sys.stdin:
        for tests in at_once(json.loads(line), tester.busy):
            threads = [threading.Thread(target=tester.run, args=(test,), daemon=True) for test in tests]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
