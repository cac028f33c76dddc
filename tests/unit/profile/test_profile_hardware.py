"""Profiles on a real NVIDIA GPU, through NVIDIA's CUPTI: no Slurm, no simulation."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest
from profiled import (
    CLOCK,
    COPY,
    EXIT,
    FILL,
    KERNEL,
    KNOWN,
    LOOP,
    MEMORY,
    NO_LIBRARY,
    STOPPED,
    SYNC,
    Profile,
    Profiled,
    ask,
    known_work,
)
from test_profile_peers import PACKAGES, cupti_folder

pytestmark = pytest.mark.gpu
SIMULATED = os.environ.get("SLUICE_TEST_GPU") == "simulated"


@pytest.fixture(scope="module")
def cupti() -> str:
    """The wheel's library of the driver's major version; the simulated one where the GPU is."""
    if SIMULATED:
        return "libcupti.so.12"
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    major = version.value // 1000
    if major not in PACKAGES:
        pytest.skip(f"no CUPTI for a driver of CUDA {major}; the tests have {sorted(PACKAGES)}")
    return str(cupti_folder(major) / f"lib/libcupti.so.{major}")


def refused(profile: Profile) -> None:
    if profile.reason == NO_LIBRARY:
        pytest.skip(f"CUPTI may not be used here: {profile.words}")


def test_known_work_is_in_the_profile(tmp_path: Path, cupti: str) -> None:
    number = ask(tmp_path)
    before = time.monotonic_ns()
    profile = known_work(Profiled.on_hardware(tmp_path, KNOWN, SLUICE_PROFILE_CUPTI=cupti), number)
    after = time.monotonic_ns()
    refused(profile)
    assert profile.reason == EXIT
    assert (len(profile.named("gemm")), len(profile.named("small"))) == (105, 10)
    for one in profile.of(KERNEL, COPY, FILL, SYNC):
        assert before < one.start <= one.end < after, "CUPTI's clock was moved to the node's"
    assert len({one.stream for one in profile.named("gemm")}) == 2
    assert 1 << 20 in {int.from_bytes(one.rest[:8], "little") for one in profile.of(COPY)}
    assert 4096 in {int.from_bytes(one.rest[:8], "little") for one in profile.of(FILL)}
    assert any(one.rest[17] == 1 for one in profile.of(MEMORY))


def test_a_running_program_is_profiled_twice(tmp_path: Path, cupti: str) -> None:
    """It began with CUDA long before, and runs on as before."""
    program = Profiled.on_hardware(tmp_path, LOOP, SLUICE_PROFILE_CUPTI=cupti)
    try:
        program.hears()
        for _ in range(2):
            number = program.ask()
            while not (seen := program.wait_for(number, program.process.pid)).of(CLOCK) and seen.end is None:
                time.sleep(0.02)
            time.sleep(1)
            profile = program.stop(number)
            refused(profile)
            assert profile.reason == STOPPED and profile.named("gemm")
        program.tell()
        assert int(program.ends()) > 0
    finally:
        program.end()
