"""The injected library in programs on a simulated GPU: what is collected, and when it begins and ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import (
    BUDGET,
    CALL,
    CALLS,
    CLOCK,
    COPY,
    DEVICE,
    DISK,
    EXIT,
    FILL,
    GAP,
    GPU,
    KERNEL,
    KNOWN,
    LIBRARY,
    LOOP,
    LOST,
    MEMORY,
    NO_LIBRARY,
    OCCUPIED,
    QUOTA,
    SYNC,
    TIME,
    Profile,
    Profiled,
    ask,
    known_work,
    write_control,
)

Make = Callable[..., Profiled]
each_vendor = pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel"])
NUMBERS = {"nvidia": 1, "amd": 2, "intel": 3}
DEVICES = {
    "nvidia": ("NVIDIA H100 80GB HBM3", 1),
    "amd": ("AMD Instinct MI300X", 8),
    "intel": ("Intel(R) Data Center GPU Max 1550", 4),
}
LAUNCH = {
    "nvidia": "cuLaunchKernel",
    "amd": "hipModuleLaunchKernel",
    "intel": "zeCommandListAppendLaunchKernel",
}
# What a record more costs the program, ns.
PRICE = {"nvidia": "SLUICE_SIM_CUPTI_NS", "amd": "SLUICE_SIM_ROCPROFILER_NS", "intel": "SLUICE_SIM_LEVEL_ZERO_NS"}


@each_vendor
def test_all_that_a_program_does_is_in_its_profile(make: Make, tmp_path: Path, vendor: str) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    number = ask(folder)
    before = time.monotonic_ns()
    profile = known_work(make(KNOWN, SLUICE_SIM_KERNEL_US="gemm=50,5", SLURM_JOB_ID="7", SLURM_PROCID="3"), number)
    after = time.monotonic_ns()
    assert profile.reason == EXIT
    assert (len(profile.named("gemm")), len(profile.named("small"))) == (105, 10)
    assert {one.end - one.start for one in profile.named("gemm")} == {50_000}
    assert {one.end - one.start for one in profile.named("small")} == {5_000}
    by_stream: dict[int, list[int]] = {}
    for one in sorted(profile.named("gemm") + profile.named("small"), key=lambda one: one.start):
        assert before < one.start < one.end < after
        assert one.start >= by_stream.get(one.stream, [0])[-1], "kernels of a stream follow each other"
        by_stream.setdefault(one.stream, []).append(one.end)
        assert int.from_bytes(one.rest[12:16], "little") == 128  # threads of a block
    assert len(by_stream) == 2
    (copy,) = profile.of(COPY)
    assert (int.from_bytes(copy.rest[:8], "little"), *copy.rest[8:10]) == (1 << 20, 1, 3)  # from the host to the device
    fills = [(int.from_bytes(fill.rest[:8], "little"), *fill.rest[8:10]) for fill in profile.of(FILL)]
    (freed,) = profile.of(MEMORY)
    assert freed.rest[17] == 1
    if vendor == "amd":  # where fills are kernels of HIP's own, and nobody says how much was released
        assert len(profile.named("__amd_rocclr_fillBufferAligned")) == 1 and fills == []
    else:
        assert fills == [(4096, 0, 3)] and int.from_bytes(freed.rest[:8], "little") == 1 << 20
    assert len(profile.of(SYNC)) >= (1 if vendor == "amd" else 2)
    assert {one.device for one in profile.of(KERNEL, COPY)} == {0}
    device, *others = profile.of(DEVICE)
    assert (profile.names[device.name], 1 + len(others)) == DEVICES[vendor] and any(device.rest[:16])
    assert len({one.rest for one in profile.of(DEVICE)}) == 1 + len(others)
    assert profile.vendor == NUMBERS[vendor]
    assert not profile.of(GAP, LOST, CALL)


@each_vendor
def test_calls_are_collected_where_they_are_wanted(make: Make, tmp_path: Path, vendor: str) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    profile = known_work(make(KNOWN), ask(folder, 1 | CALLS))
    kernels = profile.named("gemm") + profile.named("small")
    calls = [one for one in profile.of(CALL) if profile.names[one.name] == LAUNCH[vendor]]
    assert len(calls) == len(kernels) == 115
    others = {"zeCommandListAppendMemoryCopy", "zeCommandListAppendMemoryFill"} if vendor == "intel" else set()
    assert {profile.names[one.name] for one in profile.of(CALL)} == {LAUNCH[vendor]} | others
    assert {one.correlation for one in calls} == {one.correlation for one in kernels}
    assert not profile.of(COPY, FILL, MEMORY, SYNC)


@each_vendor
def test_a_running_program_is_profiled_again_and_again(make: Make) -> None:
    """Two profiles, and nothing of CUPTI in the process before the first. AMD's library itself loads ours."""
    program = make(LOOP, SLUICE_SIM_KERNEL_US="20")
    assert program.hears() == "ready"
    time.sleep(0.5)
    maps = Path(f"/proc/{program.process.pid}/maps").read_text()
    assert "libsluice_profile.so" in maps and "libcupti" not in maps
    assert program.files() == []
    profiles = []
    for _ in range(2):
        number = program.ask()
        program.collects(number)
        profiles.append(program.stop(number))
        time.sleep(0.3)
    first, second = profiles
    assert first.reason == second.reason == 1
    assert max(one.end for one in first.of(KERNEL)) < min(one.start for one in second.of(KERNEL))
    for profile in profiles:
        assert len(profile.of(CLOCK)) >= 2 and not profile.of(GAP, LOST)
    sizes = [path.stat().st_size for path in program.files()]
    time.sleep(0.3)
    assert [path.stat().st_size for path in program.files()] == sizes, "something is written after the end"
    program.tell()
    program.ends()


@each_vendor
def test_a_profile_ends_by_itself(make: Make) -> None:
    program = make(LOOP)
    program.hears()
    number = program.ask(seconds=0.8)
    profile = program.profile(number)
    assert profile.reason == TIME and profile.of(KERNEL)
    program.tell()
    assert int(program.ends()) > len(profile.of(KERNEL))


@each_vendor
def test_seconds_count_from_when_the_process_begins_with_the_gpu(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    write_control(folder, 47, 1, seconds=1)
    program = make(LOOP.replace("begin()\nsay", "time.sleep(1.5)\nbegin()\nsay", 1))
    profile = program.profile(1)
    assert profile.reason == TIME and profile.of(KERNEL)
    assert profile.end is not None and profile.end.end - profile.end.start >= 900_000_000
    program.tell()
    program.ends()


@each_vendor
def test_what_a_killed_program_did_is_there(make: Make) -> None:
    program = make(LOOP)
    program.hears()
    number = program.ask()
    program.collects(number)
    time.sleep(0.5)
    program.process.send_signal(signal.SIGKILL)
    killed = time.monotonic_ns()
    program.process.wait()
    profile = program.wait_for(number, program.process.pid)
    assert profile.end is None
    assert killed - max(one.end for one in profile.of(KERNEL)) < 1_000_000_000  # a tick of 100 ms, on a busy machine


FORKS = LOOP.replace("say()\n", "say()\ntold()\n", 1).replace(
    "while not",
    """
for how in ("exit", "_exit", "exec"):
    child = os.fork()
    if child == 0:
        if how == "exec":
            os.execv(sys.executable, [sys.executable, "-c", os.environ["CHILD"]])
        os._exit(0) if how == "_exit" else sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
say("forked")
while not""",
)


@each_vendor
def test_forks_leave_the_profile_alone(make: Make) -> None:
    """Children end in each way; one that begins with CUDA by itself has a profile of its own."""
    program = make(FORKS, CHILD=GPU + "begin()\ntime.sleep(0.6)\nrun(7)\nwait()\n")
    program.hears()
    number = program.ask()
    program.wait_for(number, program.process.pid)
    program.tell()
    assert program.hears() == "forked"
    program.collects(number)
    program.tell()
    launched = int(program.ends())
    profile = program.profile(number)
    assert profile.reason == EXIT and 0 < len(profile.named("gemm")) <= launched
    (other,) = [path for path in program.files() if path != profile.path]
    child = Profile.read(other)
    assert child.reason == EXIT and len(child.named("gemm")) == 7


@each_vendor
def test_a_program_with_threads(make: Make, tmp_path: Path) -> None:
    code = KNOWN.replace(
        "run(100)\n",
        """
import threading
def work(context=c.c_void_p()):
    if "cu" in globals():
        ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0))
        ok(cu.cuCtxSetCurrent(context))
    run(1000)
threads = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
""",
    )
    folder = tmp_path / "profile"
    folder.mkdir()
    profile = known_work(make(code), ask(folder))
    assert len(profile.named("gemm")) == 4005
    assert len({one.correlation for one in profile.named("gemm") + profile.named("small")}) == 4015


@each_vendor
def test_two_programs_on_one_gpu(make: Make, tmp_path: Path) -> None:
    """Each has its own work, and nothing of the other's; one is killed, and the other goes on."""
    programs = [make(LOOP, folder=tmp_path / name) for name in ("one", "other")]
    for program in programs:
        program.hears()
    numbers = [program.ask() for program in programs]
    for program, number in zip(programs, numbers, strict=True):
        program.collects(number)
    killed, other = programs
    killed.process.kill()
    killed.process.wait()
    other.collects(numbers[1])
    other.tell()
    launched = int(other.ends())
    profile = other.profile(numbers[1])
    assert profile.reason == EXIT and 0 < len(profile.named("gemm")) <= launched
    assert killed.wait_for(numbers[0], killed.process.pid).of(KERNEL)


@each_vendor
def test_tracing_that_costs_too_much_is_interrupted(make: Make, vendor: str) -> None:
    """Each record costs 200 us: with 1 % of the time, most is left out, and that is said. So also where the program has
    a tenth of a processor."""
    program = make(LOOP, **{PRICE[vendor]: "200000"})
    program.hears()
    number = program.ask(budget=10_000)
    program.collects(number)
    time.sleep(3)
    profile = program.stop(number)
    gaps = profile.of(GAP)
    assert gaps and {one.loss[1] for one in gaps} == {BUDGET} and all(one.loss[0] > 0 for one in gaps)
    assert profile.end is not None
    cost, elapsed = profile.end.loss[2], profile.end.end - profile.end.start
    assert cost < elapsed * 0.1  # test_profile_governor.c is exact: here our thread may wait for a processor
    missing = sum(one.end - one.start for one in gaps)
    assert missing > elapsed / 2
    for gap in gaps:
        inside = [one for one in profile.of(KERNEL) if gap.start + 1_000_000 < one.start < gap.end - 1_000_000]
        assert not inside, "something was collected in a gap"
    program.tell()
    program.ends()


@each_vendor
def test_a_program_that_waits_for_its_gpu_is_profiled_all_the_time(make: Make, vendor: str) -> None:
    """It needs little of a processor, and so little time of one in which tracing could be paid; it has the rest."""
    program = make(LOOP.replace("sleep(0.002)", "sleep(0.02)"))
    program.hears()
    number = program.ask(budget=0)  # the default, 1 %
    late = program.wait_for(number, program.process.pid).started + 4_000_000_000
    deadline = time.monotonic() + 20
    while not any(one.start > late for one in program.wait_for(number, program.process.pid).of(KERNEL)):
        assert time.monotonic() < deadline, "nothing is collected any more"
        time.sleep(0.2)
    profile = program.stop(number)
    assert profile.end is not None
    missing = sum(one.end - one.start for one in profile.of(GAP))
    assert missing < (profile.end.end - profile.end.start) / 2
    program.tell()
    program.ends()


@each_vendor
def test_a_profile_has_a_limit_of_bytes(make: Make) -> None:
    program = make(LOOP)
    program.hears()
    number = program.ask(limit=200_000)
    profile = program.profile(number)
    assert profile.reason == QUOTA
    assert profile.path.stat().st_size <= 200_000
    (lost,) = profile.of(LOST)
    assert lost.loss[:2] == (lost.loss[0], QUOTA) and lost.loss[0] > 0
    program.tell()
    program.ends()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_the_profile_and_not_the_program(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    os.system(f"mount -t tmpfs -o size=256k none {folder}")
    try:
        program = make(LOOP, folder=folder)
        program.hears()
        number = program.ask()
        profile = program.profile(number)
        assert profile.reason == DISK and profile.of(KERNEL)
        program.tell()
        assert int(program.ends()) > len(profile.of(KERNEL))
    finally:
        program.end()
        os.system(f"umount {folder}")


def test_another_profiler_is_left_alone(make: Make) -> None:
    """A program that has subscribed to CUPTI, as PyTorch's profiler does, keeps it."""
    own = LOOP.replace(
        "say()\n",
        """
cupti, subscriber, heard = c.CDLL("libcupti.so.12"), c.c_void_p(), []
callback = c.CFUNCTYPE(None, c.c_void_p, c.c_uint, c.c_uint, c.c_void_p)(lambda *_: heard.append(1))
ok(cupti.cuptiSubscribe(c.byref(subscriber), callback, None))
ok(cupti.cuptiEnableCallback(1, subscriber, 1, 307))
say()
""",
        1,
    ).replace(
        "say(str(launched))",
        "assert len(heard) == 2 * launched\nok(cupti.cuptiUnsubscribe(subscriber))\nsay(str(launched))",
    )
    program = make(own)
    program.hears()
    profile = program.profile(program.ask())
    assert profile.reason == OCCUPIED and "another profiler, such as PyTorch's" in profile.words
    assert "39" in profile.words and not profile.records
    program.tell()
    program.ends()


def test_without_cupti_the_profile_says_so(make: Make, tmp_path: Path) -> None:
    program = make(LOOP, SLUICE_PROFILE_CUPTI=str(tmp_path / "none.so"))
    program.hears()
    profile = program.profile(program.ask())
    assert profile.reason == NO_LIBRARY
    assert "no CUPTI was found" in profile.words and "SLUICE_PROFILE_CUPTI" in profile.words
    program.tell()
    program.ends()


@pytest.mark.parametrize("vendor", ["amd"])
def test_a_rocprofiler_that_is_too_old_is_not_used(make: Make) -> None:
    """Versions before 1.0 pass other structures."""
    program = make(LOOP, SLUICE_SIM_ROCPROFILER_VERSION="500")
    program.hears()
    profile = program.profile(program.ask())
    assert profile.reason == NO_LIBRARY and not profile.records
    assert profile.words == "this rocprofiler-sdk is version 0.5; one of ROCm 7 or later is needed"
    program.tell()
    program.ends()


@pytest.mark.parametrize("vendor", ["amd"])
def test_next_to_a_users_other_tools(make: Make) -> None:
    """ROCm loads each library that the variable names; one that is not there is nothing."""
    program = make(LOOP, ROCP_TOOL_LIBRARIES=f"/none.so:{LIBRARY}")
    program.hears()
    number = program.ask()
    program.collects(number)
    assert program.stop(number).reason == 1
    program.tell()
    program.ends()


def test_a_control_file_that_is_none_is_nothing(make: Make, tmp_path: Path) -> None:
    program = make(LOOP)
    program.hears()
    control = program.folder / "control"
    write_control(tmp_path, 47, 1)
    places: list[Callable[[], object]] = [
        lambda: control.write_bytes(b"SLUPCTL1"),
        lambda: control.write_bytes(bytes(64)),
        lambda: control.symlink_to(tmp_path / "control"),
        lambda: os.mkfifo(control),
        control.mkdir,
    ]
    for place in places:
        place()
        time.sleep(0.4)
        assert program.files() == []
        control.rmdir() if control.is_dir() and not control.is_symlink() else control.unlink()
    program.collects(program.ask())  # it is still looked for
    program.tell()
    assert int(program.ends()) > 0
