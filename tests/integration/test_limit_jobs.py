"""The preloaded limiter under real Slurm jobs: found by the job's cgroup, as its user, with signals as ever."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from gpu_sim import holdings
from gpu_sim.fields import get_values
from sluice.core.limit import library_path
from tests.integration.jobs import sbatch
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

NODE = "h100-1"
MIB = 1 << 20

MAKE = """
import json, sys
from pathlib import Path
from sluice.core.limit import Device, Region, create
name, limit, uid, uuids = json.loads(sys.argv[1])
Path("/run/sluice/limit").mkdir(parents=True, exist_ok=True)
devices = [Device(81008 << 20, limit << 20, 520 << 20, uuid=uuid) for uuid in uuids]
create(Path("/run/sluice/limit") / name, devices, uid)
"""

FIGURES = """
import json, sys
from pathlib import Path
from sluice.core.limit import Region
with Region(Path("/run/sluice/limit") / sys.argv[1]) as region:
    figures = [region.usage(i) for i in range(8)]
    print(json.dumps([sum(f.charged for f in figures) >> 20, max(f.peak for f in figures) >> 20]))
"""
LOOK = Path(__file__).parents[2] / "build/editable/native/limit/look_at_region"

PROGRAM = """
import ctypes as c, json, os, signal, sys, time
cu = c.CDLL("libcuda.so.1")
context, address = c.c_void_p(), c.c_uint64()
def alloc(mib):
    return cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(mib << 20))
assert cu.cuInit(0) == 0
made = cu.cuDevicePrimaryCtxRetain(c.byref(context), 0)
cu.cuCtxSetCurrent(context)
print(json.dumps([made, alloc(400), alloc(200)]), flush=True)
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
end = time.monotonic() + 60
while len(sys.argv) > 1 and not caught and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps([caught, alloc(80), alloc(1)]), flush=True)
"""


@pytest.fixture
def output() -> Iterator[Path]:
    """Where jobs write: hosts of a cluster have /tmp in common."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def submit(demo: DevCluster, output: Path, words: str, limit: int | None) -> tuple[str, Path]:
    """A job of alice's with a region, or without; its number and where it writes."""
    (output / "program.py").write_text(PROGRAM)
    script = f"export LD_PRELOAD={library_path()}; srun {sys.executable} {output}/program.py {words}"
    job = sbatch(demo, "--hold", "-w", NODE, "--gres=gpu:1", "-o", str(output / "%j"), f"--wrap={script}")
    if limit is not None:
        uid = int(demo.run(["id", "-u", "alice"], node=NODE).stdout)
        uuids = [get_values(demo.node_folder(NODE) / "gpu_sim", i)["uuid"] for i in range(8)]
        demo.run([sys.executable, "-c", MAKE, json.dumps([f"job_{job}", limit, uid, uuids])], node=NODE)
    demo.run(["scontrol", "release", job], user="root")
    return job, output / job


def said(path: Path, lines: int) -> list[str]:
    return list(until(path.read_text, lambda text: text.count("\n") >= lines).splitlines())


def figures(demo: DevCluster, job: str) -> list[int]:
    """How many of its processes had ended and are left, and MiB charged and at most."""
    looked = json.loads(demo.run([str(LOOK), f"/run/sluice/limit/job_{job}"], node=NODE).stdout)
    read = json.loads(demo.run([sys.executable, "-c", FIGURES, f"job_{job}"], node=NODE).stdout)
    return [looked[1], len(looked[2]), *read]


def test_a_job_is_held_to_its_memory(demo: DevCluster, output: Path) -> None:
    job, path = submit(demo, output, "wait", limit=1000)
    assert said(path, 1) == ["[0, 0, 2]"]
    assert [h.memory_mib for h in holdings(demo.node_folder(NODE) / "gpu_sim")] == [920]
    assert figures(demo, job) == [0, 1, 920, 920]
    demo.run(["scancel", "--signal=USR1", f"{job}.0"], user="alice")
    assert said(path, 2) == ["[0, 0, 2]", "[[10], 0, 2]"]
    until(lambda: demo.run(["squeue", "-h", "-j", job], user="root", check=False).stdout == "")
    assert figures(demo, job) == [1, 0, 0, 1000]


def test_a_job_without_a_region_gets_nothing(demo: DevCluster, output: Path) -> None:
    _, path = submit(demo, output, "", limit=None)
    lines = said(path, 3)
    assert "sluice: this process gets no GPU memory: no region of this job in /run/sluice/limit" in lines
    assert "[2, 201, 201]" in lines
