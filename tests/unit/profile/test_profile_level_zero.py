"""Profiles on Intel's GPUs: events of the program's own, recorded lists, ends of contexts, and the way in."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import (
    COPY,
    EXIT,
    GAP,
    GPU,
    INJECTED,
    KERNEL,
    KERNELS,
    KNOWN,
    LOOP,
    LOST,
    NO_LIBRARY,
    NOT_TIMED,
    PRELOAD,
    SYNC,
    Profile,
    Profiled,
    ask,
    known_work,
)

Make = Callable[..., Profiled]


@pytest.fixture
def vendor() -> str:
    return "intel"


@pytest.fixture
def profiled(make: Make, tmp_path: Path) -> Callable[[str], Profile]:
    """The profile of a program that begins, waits for a word and does this; gemm takes 50 us, small 5.

    A device that waits for an event sees its signal so late that the event is reset before: it ends the program.
    """

    def run(work: str) -> Profile:
        folder = tmp_path / "profile"
        folder.mkdir()
        how = {"SLUICE_SIM_KERNEL_US": "gemm=50,5", "SLUICE_SIM_LEVEL_ZERO_SEEN_NS": "50000000"}
        start = KNOWN[: KNOWN.index("run(100)")]
        profile = known_work(make(start + EVENTS + work, **how), ask(folder))
        assert profile.reason == EXIT
        return profile

    return run


EVENTS = """
class Pool(c.Structure):
    _fields_ = [("type", c.c_uint32), ("next", c.c_void_p), ("flags", c.c_uint32), ("count", c.c_uint32)]
class Event(c.Structure):
    _fields_ = [("type", c.c_uint32), ("next", c.c_void_p), ("index", c.c_uint32), ("scopes", c.c_uint32 * 2)]
def new_event(flags):
    pool = c.c_void_p()
    ok(ze.zeEventPoolCreate(context, c.byref(Pool(0x10, None, flags, 1)), 0, None, c.byref(pool)))
    return made(ze.zeEventCreate, pool, c.byref(Event(0x11, None, 0, (4, 4))))
def signals(event, function=None, stream=None):
    ok(launch(function or gemm, 1, 1, 1, 32, 1, 1, 0, stream, None, None, event))
def times(event):
    read = (c.c_uint64 * 4)()
    ok(ze.zeEventQueryKernelTimestamp(event, read))
    return read[1] - read[0]
"""
TIMED, PLAIN = 5, 1


def spans(profile: Profile, name: str = "gemm") -> list[int]:
    return [one.end - one.start for one in profile.named(name)]


def test_a_programs_own_event_with_times_stays_its_own(profiled: Callable[[str], Profile]) -> None:
    profile = profiled(f"""
event = new_event({TIMED})
for _ in range(20):
    signals(event)
    ok(ze.zeEventHostSynchronize(event, FOREVER))
    assert times(event) == 50_000
    ok(ze.zeEventHostReset(event))
wait()
""")
    assert spans(profile) == [50_000] * 20 and not profile.of(GAP, LOST)
    assert len(profile.of(SYNC)) == 21


def test_a_programs_own_event_without_times_gets_its_signal(profiled: Callable[[str], Profile]) -> None:
    """Behind the kernel, and not before it."""
    profile = profiled(f"""
event = new_event({PLAIN})
for _ in range(20):
    before = time.monotonic_ns()
    signals(event)
    ok(ze.zeEventHostSynchronize(event, FOREVER))
    assert time.monotonic_ns() - before >= 50_000
    ok(ze.zeEventHostReset(event))
""")
    assert spans(profile) == [50_000] * 20 and not profile.of(GAP, LOST)
    assert len(profile.of(SYNC)) == 20


RECORDED = f"""
queue = made(ze.zeCommandQueueCreate, context, device, how)
recorded = made(ze.zeCommandListCreate, context, device, how)
own = new_event({TIMED})
def record():
    run(10, gemm, recorded)
    signals(own, small, recorded)
    ok(ze.zeCommandListClose(recorded))
def execute():
    ok(ze.zeCommandQueueExecuteCommandLists(queue, 1, c.byref(recorded), None))
def finish():
    ok(ze.zeCommandQueueSynchronize(queue, FOREVER))
record()
"""


def test_recorded_lists_are_seen_whenever_they_are_executed(profiled: Callable[[str], Profile]) -> None:
    profile = profiled(
        RECORDED
        + """
for _ in range(5):
    execute()
    finish()
ok(ze.zeCommandListReset(recorded))
record()
execute()
finish()
ok(ze.zeCommandListDestroy(recorded))
"""
    )
    assert spans(profile) == [50_000] * 60 and spans(profile, "small") == [5_000] * 6
    by_time = sorted(profile.of(KERNEL), key=lambda one: one.start)
    assert all(one.end <= other.start for one, other in itertools.pairwise(by_time))
    assert not profile.of(GAP, LOST)


def test_executions_that_overlap_are_seen_or_counted(profiled: Callable[[str], Profile]) -> None:
    """An event has the times of one execution."""
    profile = profiled(RECORDED + "execute()\nexecute()\nexecute()\nfinish()\n")
    lost = sum(one.loss[0] for one in profile.of(LOST))
    assert len(profile.of(KERNEL)) + lost == 33 and len(profile.of(KERNEL)) >= 11
    assert set(spans(profile)) == {50_000}


OVER_PROFILES = (
    GPU
    + "begin()\n"
    + EVENTS
    + RECORDED.removesuffix("record()\n")
    + """
import select
def until_told(work):
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        work()
    told()
def again():
    execute()
    finish()
def others():
    run(5, small)
    wait()
say()
told()
record()
until_told(again)
ok(ze.zeCommandListDestroy(recorded))
say("destroyed")
until_told(others)
"""
)


def test_a_recorded_list_keeps_our_events_over_profiles(make: Make) -> None:
    """It is executed between them, too, and the next profile sees it; when it is gone, so are they."""
    program = make(OVER_PROFILES, SLUICE_SIM_KERNEL_US="50")
    program.hears()
    first = program.ask()
    program.wait_for(first, program.process.pid)
    time.sleep(0.2)
    program.tell()
    program.collects(first)
    assert set(spans(program.stop(first))) == {50_000}
    time.sleep(0.3)
    for _ in range(2):
        number = program.ask()
        program.collects(number)
        profile = program.stop(number)
        assert set(spans(profile)) == {50_000} and not profile.of(GAP, LOST)
        more = len(profile.named("gemm")) - 10 * len(profile.named("small"))  # of the last, which the end may cut
        assert 0 <= more <= 10
    program.tell()
    assert program.hears() == "destroyed"
    for _ in range(2):
        number = program.ask()
        program.collects(number)
        profile = program.stop(number)
        assert not profile.named("gemm") and not profile.of(GAP, LOST)
    program.tell()
    program.ends()


BEFORE = (
    GPU
    + "begin()\n"
    + EVENTS
    + RECORDED
    + """
recorded_at_once, recorded = recorded, made(ze.zeCommandListCreate, context, device, how)
run(7, gemm, recorded)
byte = c.c_ubyte(1)
ok(ze.zeCommandListAppendMemoryFill(recorded, memory, c.byref(byte), c.c_size_t(1), c.c_size_t(4096), None, none, None))
ok(ze.zeCommandListReset(recorded))
run(3, gemm, recorded)
ok(ze.zeCommandListAppendMemoryFill(recorded, memory, c.byref(byte), c.c_size_t(1), c.c_size_t(4096), None, none, None))
ok(ze.zeCommandListClose(recorded))
def work():
    execute()
    finish()
    run(2)
    wait()
say()
while (word := told()) != "end":
    for _ in range(int(word)):
        work()
    say()
ok(ze.zeCommandListDestroy(recorded))
recorded = made(ze.zeCommandListCreate, context, device, how)
ok(ze.zeCommandListClose(recorded))
execute()
finish()
say()
told()
"""
)


def unseen(profile: Profile) -> int:
    """Of lists that were recorded before it began; nothing else is lost."""
    lost = [one.loss for one in profile.of(LOST)]
    assert {reason for _, reason, _ in lost} <= {NOT_TIMED}
    return sum(events for events, _, _ in lost)


def test_what_was_recorded_before_is_counted_whenever_it_runs(make: Make) -> None:
    """Neither what ran before the profile, nor what a reset removed, nor kernels of immediate lists, which are seen."""
    program = make(BEFORE)
    program.hears()
    program.tell("3")
    program.hears()
    for executions in (5, 2):
        number = program.ask()
        program.collects_anything(number)
        program.tell(str(executions))
        program.hears()
        profile = program.stop(number)
        assert unseen(profile) == 4 * executions and len(profile.named("gemm")) == 2 * executions
    number = program.ask(KERNELS)
    program.collects_anything(number)
    program.tell("4")
    program.hears()
    assert unseen(program.stop(number)) == 3 * 4
    number = program.ask()
    program.collects_anything(number)
    program.tell("end")
    program.hears()
    assert unseen(program.stop(number)) == 0
    program.tell()
    program.ends()


def test_what_is_recorded_as_profiles_begin_and_end_is_timed_or_counted(make: Make) -> None:
    """Never both, and never neither: each append takes so long that collection ends within one."""
    program = make(
        GPU
        + """
import select
begin()
queue = made(ze.zeCommandQueueCreate, context, device, how)
recorded = made(ze.zeCommandListCreate, context, device, how)
say()
appended = 0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    run(1, gemm, recorded)
    appended += 1
told()
ok(ze.zeCommandListClose(recorded))
say(str(appended))
told()
ok(ze.zeCommandQueueExecuteCommandLists(queue, 1, c.byref(recorded), None))
ok(ze.zeCommandQueueSynchronize(queue, FOREVER))
say()
told()
""",
        SLUICE_SIM_KERNEL_US="gemm=1,1",
        SLUICE_SIM_LEVEL_ZERO_NS="5000000",
    )
    program.hears()
    for _ in range(3):
        number = program.ask()
        program.collects_anything(number)
        program.stop(number)
    program.tell()
    appended = int(program.hears())
    number = program.ask()
    program.collects_anything(number)
    program.tell()
    program.hears()
    profile = program.stop(number)
    assert unseen(profile) > 0 and profile.named("gemm")
    assert unseen(profile) + len(profile.named("gemm")) == appended
    program.tell()
    program.ends()


def test_a_context_ends_with_our_events_in_it(make: Make) -> None:
    """The simulated driver refuses to end one that has pools; another one may come to be at the same address."""
    program = make(
        LOOP.replace("while not", "contexts = 0\nwhile not").replace(
            "    wait()\n",
            """
    wait()
    ok(ze.zeMemFree(context, memory))
    for kernel_of_context in (gemm, small):
        ok(ze.zeKernelDestroy(kernel_of_context))
    ok(ze.zeCommandListDestroy(main))
    ok(ze.zeModuleDestroy(module))
    ok(ze.zeContextDestroy(context))
    begin()
""",
        )
    )
    assert program.hears() == "ready"
    for _ in range(2):
        number = program.ask()
        program.collects(number)
        time.sleep(0.5)
        profile = program.stop(number)
        assert len({one.context for one in profile.of(KERNEL)}) > 10 and profile.of(COPY)
        assert not profile.of(GAP, LOST)
    program.tell()
    program.ends()


def test_without_the_tracing_layer_the_profile_says_so(make: Make) -> None:
    program = make(LOOP, ZE_ENABLE_TRACING_LAYER="0")
    program.hears()
    profile = program.profile(program.ask())
    assert profile.reason == NO_LIBRARY and not profile.records
    assert profile.words == "zelTracerCreate answered 0x78000001: is ZE_ENABLE_TRACING_LAYER=1 in the environment?"
    program.tell()
    program.ends()


def test_a_program_without_level_zero_has_nothing_of_it() -> None:
    """No thread, no library of profiles, and no zeInit that there is not."""
    code = """
import ctypes as c, os
assert len(os.listdir("/proc/self/task")) == 1
assert "libsluice_profile_preload.so" in open("/proc/self/maps").read()
assert "libsluice_profile.so" not in open("/proc/self/maps").read()
for name in "zeInit", "zeInitDrivers", "onecclAllReduce":
    assert not hasattr(c.CDLL(None), name)
"""
    environment = {**os.environ, **INJECTED["intel"], "SLUICE_PROFILE_FOLDER": "/tmp"}
    done = subprocess.run(["python3", "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_programs_of_musl_start_with_it() -> None:
    """Which has no dlvsym, and takes no symbol that has a version and is not its default, as dlsym here. What is called
    in it is musl's own."""
    done = subprocess.run(["nm", "-D", PRELOAD], capture_output=True, text=True, check=True)
    symbols = [line.split()[-2:] for line in done.stdout.splitlines()]
    exported = {name for kind, name in symbols if kind not in ("U", "w", "A")}
    others = {name for name in exported if not name.startswith("oneccl")}
    assert {name.split("@GLIBC_")[0] for name in others} == {"dlsym", "zeInit", "zeInitDrivers"}
    assert "dlsym" not in exported and not any("@@" in name for name in exported)
    assert [kind for kind, name in symbols if name.startswith("dlvsym@")] == ["w"]
    assert [name.partition("@")[0] for kind, name in symbols if kind == "U" and "dlsym" in name] == ["dlsym"]


@pytest.mark.parametrize("name", ["sbatch", "srun", "salloc", "train"])
def test_what_a_step_submits_does_not_inherit_the_library(tmp_path: Path, name: str) -> None:
    """It may run where there is none, and ld.so would say so of each of its programs."""
    program = tmp_path / name
    program.symlink_to("/usr/bin/env")
    for given, left in (
        (f"{PRELOAD}", None),
        (f"libdl.so.2:{PRELOAD}", "libdl.so.2"),
        (f"libdl.so.2 {PRELOAD}:libm.so.6", "libdl.so.2:libm.so.6"),
    ):
        done = subprocess.run([program], env={"LD_PRELOAD": given}, capture_output=True, text=True, check=True)
        found = dict(line.split("=", 1) for line in done.stdout.splitlines())
        assert found.get("LD_PRELOAD") == (given if name == "train" else left)
        assert done.stderr == ""


@pytest.mark.parametrize(
    "way",
    ["c.CDLL('libze_loader.so.1', c.RTLD_GLOBAL); ze = c.CDLL(None)", "ze = c.CDLL('libze_loader.so.1')"],
    ids=["linked", "looked up"],
)
@pytest.mark.parametrize("call", ["zeInit(0)", "zeInitDrivers(c.byref(c.c_uint32(0)), None, bytes(64))"])
def test_each_way_to_begin_with_level_zero_is_found(make: Make, way: str, call: str) -> None:
    program = make(
        f"import ctypes as c\n{way}\nassert ze.{call} == 0\n"
        "print('libsluice_profile.so' in open('/proc/self/maps').read(), flush=True)"
    )
    assert program.hears() == "True"
    program.ends()
