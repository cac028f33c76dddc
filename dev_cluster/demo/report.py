"""Chapter: who used what."""

from __future__ import annotations

from dev_cluster.demo.stage import Stage


def report(stage: Stage) -> None:
    """What accounting knows."""
    stage.step("Who used what", "Slurm's accounting has every GPU and every MiB, by tenant.")
    fields = ["sacct", "-a", "-X", "-S", "now-1hour", "-o", "JobID,User,Account,AllocTRES%62,State,Elapsed"]
    stage.wait("accounting has all jobs", lambda: _settled(stage))
    accounted = stage.run(fields)
    stage.expect("gres/shard=10240" in accounted and "biology" in accounted, "shares of GPU memory are accounted")


def _settled(stage: Stage) -> bool:
    listed = stage.cluster.run(["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "State"]).stdout.split("\n")
    states = [state for state in listed if state]
    return len(states) >= 7 and not any(state.startswith(("RUNNING", "PENDING")) for state in states)
