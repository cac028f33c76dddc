"""The rungs on a real NVIDIA GPU: no Slurm, no simulation; root, the driver, and nvidia-ml-py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prolog_epilog.agent import Agent
from prolog_epilog.devices import NodeDevice
from prolog_epilog.rungs.driver import OLDEST_DRIVER
from prolog_epilog.rungs.mps import CONTROL, Mps
from prolog_epilog.state import Settings
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice.exchange.record import Grant, JobRecord

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
ABOUT = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetMemoryInfo(h).total, n.nvmlSystemGetDriverVersion()]))
"""
# Takes memory until it is refused; prints MiB of its allocations, the last code, and what NVML says that it has.
FILL = """
import ctypes as c, json, os, pynvml as n
cu, context, address, got = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64(), 0
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
while (code := cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(2 << 20))) == 0:
    got += 2
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
held = [p.usedGpuMemory or 0 for p in n.nvmlDeviceGetComputeRunningProcesses(h) if p.pid == os.getpid()]
sms = c.c_int()
cu.cuDeviceGetAttribute(c.byref(sms), 16, 0)
print(json.dumps([got, code, max(held, default=0) >> 20, sms.value]))
"""


def run(code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent that knows GPU 0 of this machine, not started."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    if os.geteuid() != 0:
        pytest.skip("limits are root's to set")
    uuid, total, version = run(ABOUT)
    made = Agent(Settings(run=tmp_path / "run", records=tmp_path / "records", policy=tmp_path / "sluice.policy"))
    (tmp_path / "run").mkdir()
    made.watcher.watches["nvidia"] = Watch(Worker("nvidia", timeout=30))
    made.state.devices = [
        NodeDevice(0, "nvidia", "GPU", uuid, "0", ("/dev/nvidia0",), "/dev/nvidia0", total // MIB, version, 0, "", ())
    ]
    yield made
    made.watcher.watches["nvidia"].worker.close()


def job(agent: Agent, limit: int | None, **more: Any) -> JobRecord:
    device = agent.state.devices[0]
    grant = Grant(0, device.uuid, "nvidia", device.model, device.memory_mib * MIB, limit, limit)
    return JobRecord(4711, 0, "root", "a", "p", "n", 1.0, grants=[grant], **more)


def test_mps_holds_a_client_and_gives_it_its_share(agent: Agent) -> None:
    if shutil.which(CONTROL) is None:
        pytest.skip(f"no {CONTROL} on this machine")
    whole = run(FILL.replace("while (code", "while got < 64 and (code"))[3]
    record, mps = job(agent, 4 * GIB, share_percent=25), Mps(agent.state)
    try:
        mps.apply(record, record.grants[0])
        assert mps.verify(record, record.grants[0]) == ""
        got, code, held, sms = run(FILL, **mps.exports(record))
        assert code == 2 and 2048 < got <= 4096 and held <= 4096 + 64
        assert abs(sms / whole - 0.25) <= 0.05
    finally:
        mps.remove(record)
    assert not mps.runs(record)


def test_the_driver_limits_a_cgroup(agent: Agent) -> None:
    branch = agent.state.devices[0].driver_version.partition(".")[0]
    group = Path("/sys/fs/cgroup/sluice-gpu-test")
    if not branch.isdecimal() or int(branch) < OLDEST_DRIVER:
        pytest.skip(f"driver {branch}; needs {OLDEST_DRIVER}")
    if not Path("/sys/fs/cgroup/cgroup.procs").exists():
        pytest.skip("no cgroups of version 2 at /sys/fs/cgroup")
    group.mkdir()
    worker = agent.watcher.watches["nvidia"].worker
    uuid = agent.state.devices[0].uuid
    try:
        worker.ask(do="cgroup_limit", uuid=uuid, folder=str(group), hard=4 * GIB)
        assert worker.ask(do="cgroup_limit_of", uuid=uuid, folder=str(group))["hard"] == 4 * GIB
        got, code, held, _ = run(f"open('{group}/cgroup.procs', 'w').write('0')\n" + FILL)
        assert code == 2 and 2048 < got <= 4096 and held <= 4096
        worker.ask(do="cgroup_limit", uuid=uuid, folder=str(group), hard=None)
    finally:
        group.rmdir()


def test_memory_is_cleared(agent: Agent) -> None:
    uuid = agent.state.devices[0].uuid
    done = subprocess.run(
        [sys.executable, "-m", "prolog_epilog.scrub", "nvidia", uuid], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.startswith("cleared "), done.stdout + done.stderr


def test_modes_are_put_back_and_layouts_read(agent: Agent) -> None:
    uuid = agent.state.devices[0].uuid
    answer = agent.watcher.watches["nvidia"].worker.ask(do="reset", uuids=[uuid])
    assert uuid in answer["reset"] and answer["failed"] == {}
    code = "import json; from gres_probe.mig import Mig; print(json.dumps([one.uuid for one in Mig().layouts()]))"
    assert uuid in run(code)
