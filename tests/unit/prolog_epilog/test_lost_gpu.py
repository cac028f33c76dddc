"""A GPU that falls off the bus while the driver is open and a job has it: the others are still read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import set_values

PROGRAM = """
import sys
from prolog_epilog.sampling import Sampler
sampler = Sampler(sys.argv[1])
names = [reading.uuid for reading in sampler.reader.readings()]
print(len(names), flush=True)
input()
for one in (sampler, None):
    one = one or Sampler(sys.argv[1])
    told = one.sample({"full": True, "used": True, "devices": names, "some": names})
    full = told["full"].values()
    print(len(full), sum(reading["lost"] for reading in full), len(told["devices"]), names[1] in told["devices"])
"""


@pytest.mark.parametrize(
    ("platform", "vendor", "count"),
    [("dgx-h100", "nvidia", 8), ("mi300x-platform", "amd", 8), ("intel-max-1550x4", "intel", 4)],
)
def test_a_lost_gpu_does_not_silence_the_others(tmp_path: Path, platform: str, vendor: str, count: int) -> None:
    if not library_dir().exists():
        pytest.skip("no simulated libraries: make build")
    write_node_state(tmp_path / "node", load_platform(platform), "n1")
    libraries = {"SLUICE_SIM_STATE": str(tmp_path / "node/state"), "LD_LIBRARY_PATH": str(library_dir())}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, vendor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **libraries},
        cwd=Path(__file__).parents[3],
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == f"{count}\n"
        set_values(tmp_path / "node", 1, {"lost": "yes"})
        said, _ = program.communicate("\n", timeout=60)
    open_then, opened_again = (line.split() for line in said.splitlines())
    assert open_then[:2] == [str(count), "1"]  # known, and lost
    assert int(open_then[2]) >= count - 1
    assert opened_again == [str(count - 1), "0", str(count - 1), "False"]
