"""What a preflight measures of a real NVIDIA GPU: no Slurm, no simulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prolog_epilog.preflight_gpus import GpuTests
from tests.unit.prolog_epilog.examples import device

pytestmark = pytest.mark.gpu

ABOUT = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
pci = n.nvmlDeviceGetPciInfo(h).busId
print(json.dumps([pci.decode() if isinstance(pci, bytes) else pci, n.nvmlDeviceGetMaxClockInfo(h, 1)]))
"""
ROUNDS = 3


def test_a_gpu_is_measured_the_same_each_time(record_property: Callable[[str, object], None]) -> None:
    if os.environ.get("SLUICE_TEST_GPU") == "simulated":
        pytest.skip("copies of the simulated driver take as long as this machine's: see test_gpu_test.py")
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    pci, highest = json.loads(subprocess.check_output([sys.executable, "-c", ABOUT], timeout=60))
    tests = [{"id": kind, "kind": kind, "gpu": "0", "other_gpu": ""} for kind in ("clock", "memory", "pcie")]
    rounds = []
    began = time.monotonic()
    with GpuTests([device(0, pci=pci[-12:].lower())]) as made:
        for _ in range(ROUNDS):
            rounds.append(made.measure(tests, time.monotonic() + 30))
            record_property(f"until_round_{len(rounds)}_s", round(time.monotonic() - began, 2))
    for kind in ("clock", "memory", "pcie"):
        values = [found[kind][0] for found in rounds]
        record_property(kind, [round(value, 1) for value in values])
        assert [found[kind][2] for found in rounds] == [""] * ROUNDS
        assert min(values) > 0.75 * max(values), "a result below 75 % of its like is slow"
    assert 0.3 * highest < max(found["clock"][0] for found in rounds) < 1.05 * highest
