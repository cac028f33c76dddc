"""Chapter: a GPU that fails, next to seven that do not."""

from __future__ import annotations

import json
import re

from dev_cluster.demo.stage import SLUICE, Stage
from gpu_sim.fields import set_values

NODE = "h100-1"
SICK = 3
POLICY = (
    "health: {interval: 1s, passes: 2, breaker: {share: 50}, checks: {xid: {window: 20s}}}\nmonitoring: {running: 5s}\n"
)


def health(stage: Stage) -> None:
    """Found, taken out of service, its job started again, and back in service."""
    stage.step(
        "A GPU fails",
        "A job has all eight GPUs of a node when one reports XID 79 (fallen off the bus). The node agent finds it, the "
        "controllers' daemon takes that GPU out and starts the job again, elsewhere; the other seven stay in service.",
    )
    job = stage.cluster.run(
        ["sbatch", "--parsable", "-w", NODE, "-N1", "--gres=gpu:8", "--requeue", "-o/dev/null", "--wrap=sleep 600"],
        user="bob",
    ).stdout.strip()
    stage.wait("the job runs", lambda: stage.state(job) == "RUNNING")
    set_values(stage.cluster.layout.gpu_sim(NODE), SICK, {"xid": "79"})
    stage.wait("the GPU is out of service", lambda: _out(stage))
    stage.sluice("health", "list")
    stage.wait("the job was taken back", lambda: stage.state(job) in ("PENDING", "COMPLETING"))
    stage.run(["squeue", "-u", "bob", "-o", "%.6i %.10T %.10N %.16b %r"])
    stage.cluster.run(["scancel", job])
    seven = stage.run(
        ["srun", "-w", NODE, "--gres=gpu:7", "-n1", "bash", "-c", "echo $SLURM_STEP_GPUS"],
        user="bob",
        shown=f"srun -w {NODE} --gres=gpu:7 bash -c 'echo $SLURM_STEP_GPUS'",
    )
    given = next((line for line in seven.splitlines() if re.fullmatch(r"[\d,]+", line)), "").split(",")
    stage.expect(len(given) == 7 and str(SICK) not in given, "the seven others are given out")
    stage.wait("it comes back when its checks pass", lambda: not _out(stage))
    stage.sluice("health", "history")


def _out(stage: Stage) -> bool:
    done = stage.cluster.run([*SLUICE, "health", "list", "--json"], check=False)
    return bool(done.stdout) and any(row["state"] == "out" for row in json.loads(done.stdout)["rows"])
