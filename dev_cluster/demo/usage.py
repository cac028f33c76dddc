"""Chapter: who used what."""

from __future__ import annotations

from dev_cluster.demo.stage import Stage


def usage(stage: Stage) -> None:
    """What accounting knows."""
    stage.step("Who used what", "Slurm's accounting has every GPU and every MiB, by tenant.")
    fields = ["sacct", "-a", "-X", "-S", "now-1hour", "-o", "JobID,User,Account,AllocTRES%62,State,Elapsed"]
    stage.wait("accounting has all jobs", lambda: _settled(stage))
    accounted = stage.run(fields, lines=24)
    stage.expect("gres/shard=10240" in accounted and "biology" in accounted, "shares of GPU memory are accounted")

    stage.step(
        "What each tenant used, and how well",
        "From Slurm's accounting and the jobs' own records; no metrics database is needed. Users see what Slurm's "
        "PrivateData lets them see.",
    )
    tenants = stage.sluice("report", "tenants", "-S", "now-1hour", "-t", "minutes")
    stage.expect("physics" in tenants and "biology" in tenants, "both tenants are in the report")

    stage.step("One job on one page", "What was asked, granted and used, and what to ask next time: for a ticket.")
    trained = _newest(stage, "train-bob")
    page = stage.sluice("report", "job", trained, lines=60)
    stage.expect("--gpu-mem" in page, "the page says what to ask next time")


def _newest(stage: Stage, name: str) -> str:
    listed = stage.cluster.run(["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hour", f"--name={name}", "-o", "JobID"])
    return listed.stdout.split()[-1]


def _settled(stage: Stage) -> bool:
    listed = stage.cluster.run(["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "JobIDRaw,State"]).stdout
    states = dict(line.split("|") for line in listed.splitlines())
    ended = not any(state.startswith(("RUNNING", "PENDING")) for state in states.values())
    return len(states) >= 7 and ended and set(stage.acknowledged) <= states.keys()
