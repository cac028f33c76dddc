"""Samples of the processor, in programs on a simulated GPU."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable

import pytest
from profiled import ALL, FORBIDDEN, GAP, KERNEL, LOOP, LOST, SAMPLE, SAMPLES, Profile, Profiled

_PERF_EVENT_OPEN = 298
_HZ = 99

# The main thread computes between its launches; from a word on, until another one, a second thread in the C library.
BUSY = LOOP.replace("    time.sleep(0.002)\n", "    sum(range(50_000))\n").replace(
    "say()\n",
    """
import threading, zlib
data = bytes(1 << 20)
def busy():
    say(str(threading.get_native_id()))
    while not done:
        zlib.crc32(data)
done = []
say()
if told() == "busy":
    threading.Thread(target=busy, daemon=True).start()
""",
    1,
)
# No perf_event_open in this process, as in a container.
DENIED = """
import ctypes as c, struct
filter = b"".join(struct.pack("<HBBI", *one) for one in
                  [(0x20, 0, 0, 0), (0x15, 0, 1, 298), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)])
class Program(c.Structure):
    _fields_ = [("length", c.c_ushort), ("filter", c.c_char_p)]
libc = c.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, c.byref(Program(4, filter))) == 0
"""


@pytest.fixture(autouse=True)
def _permitted() -> None:
    attributes = bytearray(128)
    struct.pack_into("<IIQQQ", attributes, 0, 1, 128, 0, 10**7, 7)
    struct.pack_into("<Q", attributes, 40, 1 << 5)  # not of the kernel
    place = (ctypes.c_char * 128).from_buffer(attributes)
    opened = ctypes.CDLL(None).syscall(_PERF_EVENT_OPEN, place, 0, -1, -1, 0)
    if opened < 0:
        pytest.skip("perf_event_open is forbidden here")
    os.close(opened)


def sampled(profile: Profile) -> dict[int, list[str]]:
    """The functions of each thread."""
    found: dict[int, list[str]] = {}
    for one in profile.of(SAMPLE):
        found.setdefault(int.from_bytes(one.rest[:4], "little"), []).append(profile.names[one.name])
    return found


def test_each_thread_of_a_program_is_sampled(make: Callable[..., Profiled]) -> None:
    """One that begins while a profile runs, too; and a profile without samples has none."""
    program = make(BUSY)
    assert program.hears() == "ready"
    number = program.ask(ALL | SAMPLES)
    program.tell("busy")
    thread = int(program.hears())
    program.collects(number)
    before = time.monotonic()
    since = {one: thread_seconds(program.process.pid, one) for one in (program.process.pid, thread)}
    used = {one: computes(program.process.pid, one, then, 0.5) for one, then in since.items()}
    elapsed = time.monotonic() - before
    profile = program.stop(number)
    threads = sampled(profile)
    assert set(threads) == {program.process.pid, thread}, "the library's own thread is not the program's"
    assert any("crc32" in name or name.startswith("[libz") for name in threads[thread]), threads[thread][:5]
    for one, seconds in used.items():
        assert len(threads[one]) > 0.5 * _HZ * seconds and len(threads[one]) < 3 * _HZ * (elapsed + 2)
    for one in profile.of(SAMPLE):
        assert profile.started <= one.start < one.end and one.end - one.start == 10**9 // _HZ
    assert profile.of(KERNEL) and not profile.of(GAP, LOST)
    number = program.ask()
    program.collects(number)
    without = program.stop(number)
    assert not without.of(SAMPLE)
    assert perf_files(program.process.pid) == 0
    program.tell()
    program.end()


def thread_seconds(process: int, thread: int) -> float:
    with open(f"/proc/{process}/task/{thread}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def computes(process: int, thread: int, since: float, seconds: float) -> float:
    """Wait until a thread has used so much of the processor since then; how much it is."""
    deadline = time.monotonic() + 60
    while (used := thread_seconds(process, thread) - since) < seconds:
        assert time.monotonic() < deadline, f"thread {thread} used {used} s"
        time.sleep(0.05)
    return used


def perf_files(process: int) -> int:
    folder = f"/proc/{process}/fd"
    return sum("perf_event" in os.readlink(f"{folder}/{name}") for name in os.listdir(folder))  # noqa: PTH115


def test_where_samples_are_forbidden_the_rest_is_there(make: Callable[..., Profiled]) -> None:
    program = make(DENIED + LOOP)
    program.hears()
    number = program.ask(ALL | SAMPLES)
    program.collects(number)
    time.sleep(0.3)
    profile = program.stop(number)
    assert [one.loss[:2] for one in profile.of(LOST)] == [(0, FORBIDDEN)]
    assert profile.of(KERNEL) and not profile.of(SAMPLE)
    program.tell()
    program.ends()


def test_samples_count_against_the_budget(make: Callable[..., Profiled]) -> None:
    """With a thousandth of a per cent there is no room for them."""
    program = make(BUSY)
    program.hears()
    number = program.ask(SAMPLES, budget=10)
    program.tell("busy")
    program.hears()
    time.sleep(2)
    profile = program.stop(number)
    gaps = profile.of(GAP)
    assert gaps
    for gap in gaps:
        assert not [one for one in profile.of(SAMPLE) if gap.start + 20_000_000 < one.start < gap.end - 20_000_000]
    program.tell()
    program.end()


FORKS = BUSY.replace("while not select", "assert os.fork() or os._exit(0) is None\nos.wait()\nwhile not select", 1)
# What another library's own handler of forks maps in the child is where the parent has its rings.
MAPS = """
import ctypes as c
libc = c.CDLL(None)
libc.mmap.restype = c.c_void_p
mapped = []
@c.CFUNCTYPE(None)
def after():
    for _ in range(64):
        mapped.append(libc.mmap(None, c.c_size_t(8192), 3, 0x22, -1, 0))
assert libc.__register_atfork(None, None, after, None) == 0
"""
MAPS_AND_FORKS = MAPS + FORKS.replace(
    "assert os.fork() or os._exit(0) is None\nos.wait()",
    "assert os.fork() or [c.memset(one, 1, 8192) for one in mapped] and os._exit(0)\nassert os.wait()[1] == 0",
)


@pytest.mark.parametrize("code", [FORKS, MAPS_AND_FORKS], ids=["child", "child that maps"])
def test_a_fork_leaves_the_samples_alone(make: Callable[..., Profiled], code: str) -> None:
    """The child has none, and keeps what others map there."""
    program = make(code)
    program.hears()
    number = program.ask(ALL | SAMPLES)
    program.wait_for(number, program.process.pid)
    time.sleep(0.5)
    program.tell("no")
    program.collects(number)
    time.sleep(0.5)
    assert sampled(program.stop(number)).keys() == {program.process.pid}
    program.tell()
    program.ends()


def test_threads_beyond_the_64_are_said(make: Callable[..., Profiled]) -> None:
    waits = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    program = make(f"import threading\nfor _ in range(70): {waits}\n" + LOOP)
    program.hears()
    number = program.ask(ALL | SAMPLES)
    program.collects(number)
    time.sleep(0.3)
    profile = program.stop(number)
    assert [one.loss[:2] for one in profile.of(LOST)] == [(0, FORBIDDEN)]


def test_samples_hold_no_file(make: Callable[..., Profiled]) -> None:
    """A program may close files that it did not open, and all that the kernel has no name for are one inode."""
    program = make(BUSY)
    program.hears()
    number = program.ask(ALL | SAMPLES)
    program.tell("busy")
    program.hears()
    program.collects(number)
    time.sleep(0.5)
    assert [perf_files(program.process.pid) for _ in range(20)].count(0) > 10  # one may be opened just now
    assert sampled(program.stop(number))
    program.tell()
    program.end()
