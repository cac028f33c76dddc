"""Chapter: a pool whose nodes are launched when a job needs them, and end when none does."""

from __future__ import annotations

import time

from dev_cluster.cluster import DevCluster
from dev_cluster.demo.stage import Stage
from dev_cluster.layout import INSIDE
from sluice.exchange.fleet import NodeStatus, read_status

NODE = "burst-1"
POOL = {
    "driver": "local", "settings": {"boot": "1"}, "nodes": NODE, "idle": "1s", "end_within": "2s",
    "shapes": [{"name": "small", "cpus": 2, "memory": "1G", "price": 2.5}],
}  # fmt: skip
FLEET = {"programs": f"{INSIDE}/bin"}
_BOUND_S = 60.0


def elastic(stage: Stage, cluster: DevCluster) -> None:
    """No node, a machine, the job, no machine."""
    stage.step(
        "A cluster that grows",
        "A job asks for a partition that has no node yet. Slurm decides that one is needed, and fleetd launches it: "
        "here a slurmd on this machine, on a site an instance of its provider.",
    )
    began = time.monotonic()
    stage.run(["sinfo", "--noheader", "-p", "burst", "-o", "%n %T"])
    job = stage.run(["sbatch", "--parsable", "-p", "burst", "-o/dev/null", "--wrap=sleep 2"], user="alice").strip()
    stage.wait("the job runs", lambda: stage.state(job) == "RUNNING", _BOUND_S)
    stage.run(["squeue", "--noheader", "-j", job, "-o", "%i %T %N"])
    print(f"   it runs {time.monotonic() - began:.1f} s after it was submitted", flush=True)
    stage.wait("the machine is gone", lambda: _node(cluster).stage is None and stage.state(job) == "", _BOUND_S)
    print(f"   the machine is gone {time.monotonic() - began:.1f} s after it", flush=True)
    history = stage.sluice("pool", "history", "burst", "--status", f"{INSIDE}/fleet/status.json", node="ctl1")
    steps = [word for word in ("asked", "launched", "registered", "terminating", "gone") if word in history]
    stage.expect(steps[-1:] == ["gone"] and "launched" in steps, "one machine was launched, and ended")


def _node(cluster: DevCluster) -> NodeStatus:
    return next(one for one in read_status(cluster.folder / "fleet/status.json").nodes if one.node == NODE)
