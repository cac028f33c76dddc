"""Rungs under real jobs: MPS, and `sluice mig apply` on a node - drained, laid out, its GRES in Slurm, resumed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from dev_cluster.cluster import DevCluster
from gpu_sim.fields import get_values
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from tests.integration.beds import Bed
from tests.integration.laid_out import restart_slurm, take_over_gres
from tests.integration.settled import until
from tests.programs.begin import FILL

pytestmark = pytest.mark.cluster

NODE = "mig-1"
PYTHON = "/usr/bin/python3"
# Opens its GPU, waits until it is exclusive, and says what a second process of the job is answered then.
EXCLUSIVE = """
import ctypes as c, os, subprocess, sys, time
cu, context, mode = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_int()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == (46 if "second" in sys.argv else 0)
if "second" in sys.argv:
    sys.exit()
print(os.environ.get("SLURM_STEP_GPUS") or os.environ["SLURM_JOB_GPUS"], flush=True)
end = time.monotonic() + 60
while mode.value != 3 and time.monotonic() < end:
    assert cu.cuDeviceGetAttribute(c.byref(mode), 20, 0) == 0
    time.sleep(0.05)
print(mode.value, subprocess.run([sys.executable, "-c", sys.argv[1], "", "second"]).returncode)
"""
SET_EXCLUSIVE = """
import ctypes as c, sys
nvml, device = c.CDLL("libnvidia-ml.so.1"), c.c_void_p()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(int(sys.argv[1]), c.byref(device)) == 0
assert nvml.nvmlDeviceSetComputeMode(device, 3) == 0
"""


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], bed: Bed) -> DevCluster:
    made: DevCluster = make_shared_cluster(
        {
            "nodes": [{"names": NODE, "platform": "dgx-h100"}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "users": [{"name": "alice"}],
            **bed.description,
        },
        **bed.options,
    )
    take_over_gres(made, NODE)
    return made


def apply(cluster: DevCluster, *options: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(["sluice", "mig", "apply", "--node", NODE, *options], node=NODE, check=False, timeout=180)


def state(cluster: DevCluster) -> str:
    return cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T %E"]).stdout.strip()


def test_mps_holds_a_job_and_leaves_nothing_behind(cluster: DevCluster) -> None:
    until(lambda: state(cluster).startswith("idle "))
    policy = cluster.slurm_conf_dir() / "sluice.node.json"
    policy.write_text(NodePolicy(limits=NodeLimits(ladder=("mps", "limiter", "watchdog"))).render())
    script = (
        f'echo $CUDA_MPS_PIPE_DIRECTORY $SLURM_JOB_ID; {PYTHON} -c "$1"; CUDA_MPS_PIPE_DIRECTORY=/none {PYTHON} -c "$1"'
    )
    job = ["srun", "--quiet", "-w", NODE, "--gres=shard:4096", "sh", "-c", script, "x", FILL]
    pipes, number, *filled = cluster.run(job, user="alice", timeout=60).stdout.split()
    assert pipes == f"/run/sluice/mps/job_{number}/pipe"
    assert filled == [str(4096 - 520), "2"] * 2  # who leaves MPS meets the limiter
    record = cluster.node_folder(NODE) / f"records/{number}.json"
    until(record.exists)
    [grant] = json.loads(record.read_text())["grants"]
    assert (grant["rung"], grant["clean"]) == ("mps", True)
    until(lambda: cluster.run(["ls", "/run/sluice/mps"], node=NODE).stdout == "")


def test_a_compute_mode_that_a_job_was_given_is_its_own(cluster: DevCluster) -> None:
    """A site's --gpu_cmode (a SPANK plugin sets it as root) works as without Sluice; the next job has it not."""
    until(lambda: state(cluster).startswith("idle "))
    (cluster.slurm_conf_dir() / "sluice.node.json").write_text(NodePolicy().render())
    sim = cluster.node_folder(NODE) / "gpu_sim"
    job = cluster.command(
        ["srun", "--quiet", "-w", NODE, "--gres=gpu:1", PYTHON, "-c", EXCLUSIVE, EXCLUSIVE], user="alice"
    )
    with subprocess.Popen(job, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        gpu = int(running.stdout.readline())
        cluster.run([PYTHON, "-c", SET_EXCLUSIVE, str(gpu)], node=NODE)
        assert running.stdout.read().split() == ["3", "0"]
    until(lambda: get_values(sim, gpu)["compute_mode"] == "0")
    folder = cluster.node_folder(NODE) / "records"

    def resets() -> list[object]:
        events = [event for path in folder.glob("*.json") for event in json.loads(path.read_text())["events"]]
        return [event["detail"]["what"] for event in events if event["action"] == "reset"]

    until(lambda: resets() == [["compute_mode"]])


def test_a_node_is_laid_out_and_its_instances_hold_their_jobs(cluster: DevCluster) -> None:
    policy = cluster.slurm_conf_dir() / "sluice.node.json"
    policy.write_text(NodePolicy(limits=NodeLimits(mig={f"{NODE}:0": ("3g.40gb", "3g.40gb")})).render())
    sim = cluster.node_folder(NODE) / "gpu_sim"
    job = cluster.command(
        ["srun", "--quiet", "-w", NODE, "--gres=gpu:1", "sh", "-c", "echo up; sleep 600"], user="alice"
    )
    with subprocess.Popen(job, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stdout.readline() == "up\n"
        busy = apply(cluster)
        assert busy.returncode == 1 and "jobs are on it" in busy.stderr
        assert get_values(sim, 0)["mig"] == "no"  # nothing was touched
        assert "drain" in state(cluster)
        cluster.run(["scancel", "--user=alice"])
        running.wait(120)

    done = apply(cluster, "--wait", "120")
    assert get_values(sim, 0)["mig_layout"] == "3g.40gb,3g.40gb", done.stderr
    assert done.returncode == 1 and "restart slurmctld and the node's slurmd" in done.stderr
    restart_slurm(cluster, NODE)
    until(lambda: apply(cluster).returncode == 0)
    until(lambda: state(cluster).startswith("idle "))
    assert "nothing to change" in apply(cluster).stderr

    partition = ["srun", "--quiet", "-w", NODE, "--gres=gpu:h100_3g.40gb:1", PYTHON, "-c", FILL]
    assert cluster.run(partition, user="alice", timeout=60).stdout.split() == [str(40448 - 520), "2"]
    folder = cluster.node_folder(NODE) / "records"

    def grants() -> list[dict[str, object]]:
        return [grant for path in folder.glob("*.json") for grant in json.loads(path.read_text())["grants"]]

    until(lambda: [grant["rung"] for grant in grants() if str(grant["uuid"]).startswith("MIG-")] == ["mig"])


def test_a_node_that_somebody_else_drained_stays_drained(cluster: DevCluster) -> None:
    until(lambda: state(cluster).startswith("idle "))
    policy = cluster.slurm_conf_dir() / "sluice.node.json"
    policy.write_text(NodePolicy(limits=NodeLimits(mig={f"{NODE}:0": ("4g.40gb", "3g.40gb")})).render())
    cluster.run(["scontrol", "update", f"nodename={NODE}", "state=drain", "reason=fan"])
    done = apply(cluster)
    assert "was drained already (fan" in done.stderr
    assert get_values(cluster.node_folder(NODE) / "gpu_sim", 0)["mig_layout"] == "4g.40gb,3g.40gb"
    assert state(cluster).endswith("fan")
