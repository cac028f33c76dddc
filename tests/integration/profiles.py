"""Jobs that use a GPU until they are cancelled, and what `sluice profile` shows of them."""

from __future__ import annotations

import json
from typing import Any

from dev_cluster.cluster import DevCluster
from tests.integration.jobs import sbatch

# It waits for the launches before its last ones, so that its GPU has work while the machine has none for it.
PROGRAM = """
import ctypes as c, itertools, sys
cu = c.CDLL("libcuda.so.1")
context, module, function, *ends = (c.c_void_p() for _ in range(5))
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0 and cu.cuModuleLoadData(c.byref(module), b"any") == 0
assert cu.cuModuleGetFunction(c.byref(function), module, sys.argv[1].encode()) == 0
assert [cu.cuEventCreate(c.byref(end), 0) for end in ends] == [0, 0]
one = c.c_uint(1)
for last, before in itertools.cycle((ends, ends[::-1])):
    for _ in range(10):
        assert cu.cuLaunchKernel(function, one, one, one, one, one, one, 0, None, None, None) == 0
    assert cu.cuEventRecord(last, None) == 0 and cu.cuEventSynchronize(before) == 0
"""


def working(cluster: DevCluster, *words: str, kernel: str, user: str) -> str:
    """A job, in /tmp, whose one process launches kernels of 2 ms."""
    script = f"SLUICE_SIM_KERNEL_US=2000 exec /usr/bin/python3 -c '{PROGRAM}' {kernel}"
    return sbatch(cluster, *words, "--mem=50M", f"--wrap={script}", user=user, cwd="/tmp")


def summary(cluster: DevCluster, job: str, *words: str, user: str) -> dict[str, Any]:
    """Of `sluice profile summary`."""
    done = cluster.run(["sluice", "profile", "summary", job, "--json", *words], user=user, cwd="/tmp", timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kernels(found: dict[str, Any]) -> dict[str, int]:
    """How often each was called."""
    return {one["name"]: one["calls"] for one in found["kernels"]}
