"""What the agent samples, on a real NVIDIA GPU: no Slurm, and no root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ASK = """
import json
from prolog_epilog.sampling import Nvidia
library = Nvidia()
readings, used = library.reader().readings(), library.used()
assert readings, "no readings"
for one in readings:
    assert one.uuid in used, (one.uuid, used)
    assert used[one.uuid] >= 0
    assert one.temperature_c is not None and 0 < one.temperature_c < 120, one
    assert one.power_mw is not None and 0 < one.power_mw < 3_000_000, one
print(len(readings))
"""


def test_each_gpu_has_memory_temperature_and_power() -> None:
    if os.environ.get("SLUICE_TEST_GPU") != "simulated" and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
