"""Chapter: Sluice inside slurmctld."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from dev_cluster.demo.stage import SLUICE, Stage
from dev_cluster.layout import INSIDE

_TOGETHER = timedelta(seconds=1)
"""What one pass may lie on both sides of: Slurm writes down whole seconds."""


def schedule(stage: Stage) -> None:
    """What Sluice's plugins in slurmctld do: refuse with a reason, pack, start gangs together, explain."""
    stage.step(
        "A request that the tenant may not make",
        "Alice's tenant may use four H100 in a job. A larger job is refused at submission, with the reason.",
    )
    refused = stage.run(["sbatch", "--gres=gpu:h100:8", "--wrap=true"], user="alice", check=False)
    stage.expect("hopper" in refused and "4" in refused, "the refusal names the class and what is allowed")

    stage.step(
        "Packing: four shares of a GPU, then seven whole GPUs of that node",
        "First as stock Slurm does it: one line sets the plugins' level to off, without a restart. Then at level "
        "place: stock Slurm still checks and allocates, on the node and the GPUs that Sluice's core has chosen.",
    )
    for level in ("off", "place"):
        stage.sluice("plugin", "level", level, node="ctl1")
        stage.wait(f"level {level}", lambda level=level: _level(stage) == level)  # type: ignore[misc]
        shares = [_job(stage, "--gres=shard:19456", "-C", "nvlink8", "-J", "quarter", running=True) for _ in range(4)]
        whole = _job(stage, "--gres=gpu:h100:7", "-n8", "-J", "seven-gpus")
        stage.wait("the seven whole GPUs were looked at", lambda whole=whole: _decided(stage, whole))  # type: ignore[misc]
        stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %.16b %r"])
        held = [stage.gpus(job) for job in shares]
        print(f"   the four shares are on GPUs {', '.join(held)}", flush=True)
        if level == "place":
            stage.expect(len(set(held)) == 1, "the four shares are on one GPU")
            stage.expect(stage.state(whole) == "RUNNING", "the seven whole GPUs were left over")
        else:
            stage.expect(len(set(held)) > 1, "stock Slurm spreads the four shares over several GPUs")
            stage.expect(stage.state(whole) == "PENDING", "no seven whole GPUs were left over")
        _cancel(stage)

    stage.step(
        "A gang starts together or not at all",
        "Three jobs of one gang. The first two wait, with the reason in squeue; when the third is there and all have a "
        "place, they start together.",
    )
    gang = []
    for number in (1, 2, 3):
        said = stage.run(
            [
                "sbatch",
                "--gang=ring:3",
                "--gres=gpu:2",
                "-n2",
                "-J",
                f"ring-{number}",
                "-o/dev/null",
                "--wrap=sleep 600",
            ],
            user="bob",
            shown=f"sbatch --gang=ring:3 --gres=gpu:2 -n2 -J ring-{number} train.sh",
        )
        gang.append(said.split()[-1])
        if number == 2:
            stage.wait("the reason is shown", lambda: "2 of 3" in stage.cluster.run(["squeue", "-o", "%r"]).stdout)
            stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %r"])
    stage.wait("all run", lambda: all(stage.state(job) == "RUNNING" for job in gang))
    stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %.20S"])
    starts = _starts(stage, gang)
    stage.expect(len(starts) == 3 and max(starts) - min(starts) <= _TOGETHER, "the three started together")

    stage.step(
        "Why there, and why not yet",
        "Every decision is recorded, and can be replayed outside slurmctld with the same result. Users ask from the "
        "login host, and see their own jobs.",
    )
    waiting = _job(stage, "--gres=gpu:h100:8", "-n8", "-J", "whole-node", running=True)
    behind = _job(stage, "--gres=gpu:h100:5", "-n5", "-J", "behind")
    stage.wait("it was looked at", lambda: stage.state(behind) == "PENDING" and bool(_explained(stage, behind)))
    stage.sluice("explain", gang[-1])
    explained = stage.sluice("explain", behind)
    stage.expect("wait" in explained and waiting != behind, "it is explained why the job waits")
    _cancel(stage)


def _job(stage: Stage, *options: str, running: bool = False) -> str:
    line = ["sbatch", "--parsable", "-t30", *options, "-o/dev/null", "--wrap=sleep 600"]
    job = stage.cluster.run(line, user="bob").stdout.strip()
    if running:
        stage.wait(f"job {job} runs", lambda: stage.state(job) == "RUNNING")
    return job


def _decided(stage: Stage, job: str) -> bool:
    """Whether a job runs, or was looked at and has to wait for GPUs."""
    said = stage.cluster.run(["squeue", "-h", "-j", job, "-o", "%T %r"]).stdout.strip()
    return said in ("RUNNING None", "PENDING Resources", "PENDING Priority")


def _starts(stage: Stage, jobs: list[str]) -> list[datetime]:
    shown = stage.cluster.run(["squeue", "-h", "-j", ",".join(jobs), "-o", "%S"]).stdout
    return [datetime.fromisoformat(line) for line in shown.split()]


def _level(stage: Stage) -> str:
    text = stage.cluster.run(["cat", f"{INSIDE}/state/sluice.status.ctl1"]).stdout
    return str(json.loads(text)["level"])


def _explained(stage: Stage, job: str) -> str:
    done = stage.cluster.run([*SLUICE, "explain", job], check=False)
    return done.stdout if done.returncode == 0 and "wait" in done.stdout else ""


def _cancel(stage: Stage) -> None:
    stage.cluster.run(["scancel", "-u", "bob"])
    stage.wait("no job is left", lambda: stage.cluster.run(["squeue", "-h"]).stdout == "")
