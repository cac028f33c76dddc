"""Chapter: the leading controller dies."""

from __future__ import annotations

import json
import signal
import time

from dev_cluster.demo.stage import SLUICE, Stage

_JOBS = 30
_KILLED_AFTER = 12


def failover(stage: Stage) -> None:
    """SIGKILL of the primary under load: what was acknowledged before and after."""
    stage.step(
        "The leading controller is killed under load",
        f"{_JOBS} jobs are submitted, one after the other; after answer {_KILLED_AFTER} the leading slurmctld dies "
        "by SIGKILL, without a chance to save anything. Each job was on disk, in the failover journal, before its user "
        "was answered; the other controller takes the lease, takes over, and has them all.",
    )
    stage.sluice("failover", "status", node="ctl1")
    acknowledged = stage.acknowledged
    began = 0.0
    for number in range(_JOBS):
        if number == _KILLED_AFTER:
            began = time.monotonic()
            stage.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
        done = stage.cluster.run(
            ["sbatch", "--parsable", "--gres=gpu:1", "-t30", "-o/dev/null", "--wrap=sleep 600"],
            user=("alice", "bob")[number % 2],
            check=False,
            timeout=120,
        )
        if done.returncode == 0:
            acknowledged.append(done.stdout.strip())
            if number == _KILLED_AFTER:
                print(f"   the first submission after the SIGKILL was answered {time.monotonic() - began:.0f} s later")
    known = set(stage.cluster.run(["squeue", "-h", "-o", "%A"]).stdout.split())
    print(
        f"   acknowledged: {len(acknowledged)} jobs; known to the new leader: {len(known & set(acknowledged))}",
        flush=True,
    )
    stage.expect(len(acknowledged) >= _KILLED_AFTER, "jobs were acknowledged before and after")
    stage.expect(set(acknowledged) <= known, "no acknowledged job is missing")
    stage.run(["scontrol", "ping"])
    stage.cluster.start_daemon("slurmctld@ctl1")
    stage.wait("the primary leads again", lambda: _leads(stage, "ctl1"))
    stage.sluice("failover", "history", node="ctl1", lines=12)
    for user in ("alice", "bob"):
        stage.cluster.run(["scancel", "-u", user])
    stage.wait("no job is left", lambda: stage.cluster.run(["squeue", "-h"]).stdout == "")


def _leads(stage: Stage, host: str) -> bool:
    done = stage.cluster.run([*SLUICE, "failover", "status", "--json"], node=host, check=False)
    return bool(done.stdout) and json.loads(done.stdout)["leader"] == host
