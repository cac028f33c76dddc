"""Simulated drivers under real jobs: what they allocate, what they see change, and what they cannot touch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dev_cluster.cluster import DevCluster
from gpu_sim import holdings
from gpu_sim.fields import set_values
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

CUDA = """
import ctypes as c, os, sys, time
cu = c.CDLL("libcuda.so.1")
context, address, count, total = c.c_void_p(), c.c_uint64(), c.c_int(), c.c_size_t()
assert cu.cuInit(0) == 0 and cu.cuDeviceGetCount(c.byref(count)) == 0
assert cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
assert cu.cuDeviceTotalMem_v2(c.byref(total), 0) == 0
"""

PROCESSES = """
import json, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
print(json.dumps([[i, p.pid, p.usedGpuMemory >> 20] for i, h in enumerate(handles)
                  for p in n.nvmlDeviceGetComputeRunningProcesses(h)]))
"""


def test_a_jobs_memory_shows_on_its_node_and_goes_with_it(demo: DevCluster) -> None:
    folder = demo.node_folder("h100-1") / "gpu_sim"
    hold = CUDA + "assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(5000 << 20)) == 0\ntime.sleep(600)"
    demo.run(["sbatch", "--job-name=hold", "-w", "h100-1", "--gres=gpu:1", "-o", "/dev/null", "--wrap",
              f"exec python3 -c '{hold}'"], user="alice")  # fmt: skip
    try:
        until(lambda: [holding.memory_mib for holding in holdings(folder)] == [5520])
        [[_, pid, memory]] = json.loads(demo.run([sys.executable, "-c", PROCESSES], node="h100-1").stdout)
        assert memory == 5520
        owner = demo.run(["stat", "-c", "%U", f"/proc/{pid}"], node="h100-1").stdout.strip()
        assert owner == "alice"
    finally:
        demo.run(["scancel", "--signal=KILL", "--full", "--name=hold"], user="root")
    until(lambda: holdings(folder) == [])
    assert json.loads(demo.run([sys.executable, "-c", PROCESSES], node="h100-1").stdout) == []


def test_a_running_job_sees_its_gpu_fall_ill(demo: DevCluster) -> None:
    folder = demo.node_folder("l40s-1") / "gpu_sim"
    watch = (
        "import pynvml as n, time\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n"
        "print(n.nvmlDeviceGetTemperature(h, 0), flush=True)\n"
        "while n.nvmlDeviceGetTemperature(h, 0) != 88: time.sleep(0.05)\nprint(88)"
    )
    job = ["srun", "-w", "l40s-1", "--gres=gpu:4", sys.executable, "-c", watch]
    try:
        with subprocess.Popen(demo.command(job, user="bob"), stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout
            assert program.stdout.readline() == "33\n"
            set_values(folder, 0, {"temperature": "88"})
            assert program.stdout.readline() == "88\n"
    finally:
        set_values(folder, 0, {"temperature": "33"})


@pytest.mark.parametrize(("profile", "memory"), [("1g.10gb", 9984), ("3g.40gb", 40448)])
def test_a_job_has_the_memory_of_its_mig_instance(demo: DevCluster, profile: str, memory: int) -> None:
    report = CUDA + "print(count.value, total.value >> 20)"
    job = ["srun", "-w", "mig-1", f"--gres=gpu:h100_{profile}:1", "python3", "-c", report]
    assert demo.run(job, user="carol").stdout == f"1 {memory}\n"


def test_a_job_cannot_change_hardware(demo: DevCluster) -> None:
    attack = (
        "import os\nfor path in ('state', 'lock', 'new'):\n"
        "    try:\n        open('/dev/sluice-sim/' + path, 'w')\n        print(path, 'written')\n"
        "    except OSError as error:\n        print(path, 'refused')\n"
        "try:\n    os.unlink('/dev/sluice-sim/state')\nexcept OSError:\n    print('unlink refused')"
    )
    job = ["srun", "-w", "h100-1", "--gres=gpu:1", "python3", "-c", attack]
    said = demo.run(job, user="alice").stdout.splitlines()
    assert said == ["state refused", "lock refused", "new refused", "unlink refused"]


def test_the_environment_does_not_choose_the_hardware(demo: DevCluster) -> None:
    report = CUDA + "print(count.value)"
    job = ["srun", "-w", "h100-1", "--gres=gpu:2", "env", "SLUICE_SIM_STATE=/tmp/none", "python3", "-c", report]
    assert demo.run(job, user="alice").stdout == "2\n"


def test_hip_memory_of_a_job(demo: DevCluster) -> None:
    allocate = (
        "import ctypes as c\nhip = c.CDLL('libamdhip64.so')\np, n = c.c_void_p(), c.c_int()\n"
        "free, total = c.c_size_t(), c.c_size_t()\n"
        "assert hip.hipGetDeviceCount(c.byref(n)) == 0 and hip.hipMalloc(c.byref(p), c.c_size_t(1000 << 20)) == 0\n"
        "assert hip.hipMemGetInfo(c.byref(free), c.byref(total)) == 0\nprint(n.value, total.value - free.value >> 20)"
    )
    job = ["srun", "-w", "mi300x-1", "--gres=gpu:1", "python3", "-c", allocate]
    assert demo.run(job, user="bob").stdout == f"1 {1000 + 310}\n"
