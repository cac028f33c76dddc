"""Jobs with a GPU that are saved as they run, and the site where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from dev_cluster.cluster import DevCluster
from tests.integration.jobs import shown, submit
from tests.integration.platforms import PAIR
from tests.integration.saved_jobs import GPU_COUNTER, NODE, Counter, can_save, images, saving_cluster, set_policy
from tests.integration.settled import until

ONE = ("--gres=gpu:1", "-c1")
SAVING_PAIR = PAIR.replace("550.90.07", "580.65.06").replace("runtime: 12040", "runtime: 13000")
"""With a driver that saves what is on its GPUs."""
USED = """
import ctypes as c, json
nvml, count, found = c.CDLL("libnvidia-ml.so.1"), c.c_uint(), []
nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(c.byref(count))
for index in range(count.value):
    handle, processes = c.c_void_p(), c.c_uint(0)
    nvml.nvmlDeviceGetHandleByIndex_v2(index, c.byref(handle))
    nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, c.byref(processes), None)
    found.append(processes.value)
print(json.dumps(found))
"""


def gpu_site(make: Callable[..., DevCluster], folder: Path, root: Path | None = None) -> DevCluster:
    """A node with two GPUs. `root`: the tree of another system, with its Slurm."""
    made = saving_cluster(make, folder, SAVING_PAIR, root=root)
    set_policy(made, {})
    until(lambda: can_save(made), timeout=60)
    return made


def processes(cluster: DevCluster) -> list[int]:
    """How many use each GPU."""
    found: list[int] = json.loads(cluster.run(["/usr/bin/python3", "-c", USED], node=NODE).stdout)
    return found


def index_of(cluster: DevCluster, job: str) -> str:
    """Of its GPU, as Slurm numbers it."""
    return shown(cluster, job)["GRES"].partition("IDX:")[2].rstrip(")")


def await_saved(job: Counter) -> None:
    until(lambda: shown(job.cluster, job.id)["JobState"], lambda state: state == "PENDING", shows=job.all_said)


def goes_on_on_another_gpu(cluster: DevCluster) -> None:
    """It finds what it had in the memory of its GPU in that of the one it has now."""
    job = Counter(cluster, "moves", *ONE, script=GPU_COUNTER)
    (job.folder / "hold").touch()
    job.counts(10)
    assert processes(cluster) == [1, 0]
    job.save()
    await_saved(job)
    assert processes(cluster) == [0, 0]
    other = submit(cluster, *ONE)
    until(lambda: shown(cluster, other)["JobState"], lambda state: state == "RUNNING")
    assert index_of(cluster, other) == "0"
    job.start_again()
    until(lambda: processes(cluster), [0, 1].__eq__, shows=job.all_said)
    assert index_of(cluster, job.id) == "1"
    (job.folder / "hold").unlink()
    assert job.ended()["ExitCode"] == "7:0"
    read = ["sluice", "agent", "record", job.id, "--json"]  # of the last run that has ended
    record = until(lambda: json.loads(cluster.run(read, node=NODE).stdout), lambda found: found["restarts"] == 1)
    (took_s,) = (stage["took_s"] for stage in record["stages"] if stage["name"] == "restore")
    assert 0 < took_s < record["ran_s"]
    assert job.is_exact(), job.all_said()
    assert list(images(cluster).iterdir()) == []
    cluster.run(["scancel", other])
