"""A cluster with a policy file, and `sluice` on it, for the tests of policies and tenants."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.live import Live, read_live
from policy.site import Comparison, Site, load_source
from tests.integration.settled import PATIENCE, await_policy, status, until

INSIDE = "/run/sluice-cluster/scratch"
USERS = ("alice", "bob", "carol", "dave", "erin", "oper", "mallory")


def description(**more: Any) -> dict[str, Any]:
    """Four nodes with eight H100 each, one with four L40S."""
    return {
        "nodes": [{"names": "g-[1-4]", "platform": "dgx-h100"}, {"names": "l-1", "platform": "l40s-x4"}],
        "controllers": 1,
        "users": [{"name": name} for name in USERS],
        "slurm_conf": "AccountingStorageTRES=gres/gpu,gres/shard,gres/gpu:h100,gres/gpu:l40s\n"
        "AccountingStorageEnforce=associations,limits,qos,safe\nPreemptType=preempt/qos\nPreemptMode=REQUEUE\nSlurmctldParameters=preempt_send_user_signal\nJobRequeue=1\nPriorityCalcPeriod=1\n"
        "SchedulerParameters=bf_interval=1,sched_interval=2,default_queue_depth=1000,batch_sched_delay=0\n",
        **more,
    }


@dataclass
class PolicySite:
    """The cluster and its files."""

    cluster: DevCluster

    @property
    def scratch(self) -> Path:
        return self.cluster.layout.scratch

    @property
    def file(self) -> Path:
        return self.scratch / "sluice.yaml"

    def write(self, text: str) -> None:
        self.file.write_text(text)
        self.file.chmod(0o644)

    def sluice(
        self,
        *words: str,
        user: str = "root",
        check: bool = True,
        state: str = f"{INSIDE}/state",
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `sluice` on the login host; `--state-dir` is added, and `--file` where the command has it."""
        group = words[0]
        takes_file = (group in ("plan", "apply") and "--last" not in words) or words[:2] in (
            ("tenant", "create"),
            ("tenant", "set"),
            ("tenant", "remove"),
            ("tenant", "members"),
            ("quota", "set"),
            *(("serve", word) for word in ("create", "set", "scale", "pause", "resume", "remove")),
        )
        line = ["sluice", *words]
        if takes_file:
            line += ["--file", f"{INSIDE}/sluice.yaml"]
        if group != "policy":
            line += ["--state-dir", state]
        done = self.cluster.run(line, user=user, check=False, timeout=120, env=env)
        if check and done.returncode not in (0,):
            raise AssertionError(f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def apply(self, text: str | None = None, *words: str) -> str:
        """Apply a policy, or the one that is there."""
        if text is not None:
            self.write(text)
        return self.sluice("apply", "--yes", *words).stderr

    def in_force(self, level: str, host: str = "ctl1") -> None:
        """Wait until the plugins go by what was applied."""
        await_policy(self.cluster, host)
        until(lambda: status(self.cluster, host)["level"], lambda now: now == level)

    def changes(self) -> list[dict[str, Any]]:
        """What `plan --json` finds."""
        done = self.sluice("plan", "--json", check=False)
        document = json.loads(done.stdout)
        assert done.returncode == (3 if document["changes"] else 0), done.stderr
        return list(document["changes"])

    def run(self, *words: str, user: str = "root", check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(list(words), user=user, check=check, **more)

    def sacctmgr(self, *words: str) -> str:
        return self.run("sacctmgr", "--immediate", "--noheader", "--parsable2", *words).stdout.strip()

    def sbatch(self, user: str, *words: str, seconds: int = 300, check: bool = True) -> str:
        """Submit a job that sleeps; its id, or sbatch's complaint where `check` is off."""
        done = self.run(
            "sbatch",
            "--parsable",
            "-o",
            "/dev/null",
            *words,
            f"--wrap=exec sleep {seconds}",
            user=user,
            check=False,
            cwd="/",
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()

    def jobs(self, fmt: str = "%i|%T|%r|%u|%a|%q|%b", states: str = "all") -> list[list[str]]:
        lines = self.run("squeue", "--noheader", "--all", "--array", f"--states={states}", f"--format={fmt}").stdout
        return [line.split("|") for line in lines.splitlines()]

    def state(self, job: str) -> tuple[str, str]:
        """State and reason."""
        line = self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r").stdout.strip()
        state, _, reason = line.splitlines()[0].partition("|")
        return state, reason

    def wait(self, what: Callable[[], object], seconds: float = PATIENCE) -> Any:
        """Until `what` gives something true. Fails after `seconds`."""
        return until(what, timeout=seconds, shows=self.jobs)

    def clear(self) -> None:
        """End all jobs."""
        self.run("scancel", "--quiet", *(f"--user={name}" for name in USERS[:1]), check=False)
        for name in USERS:
            self.run("scancel", "--quiet", f"--user={name}", check=False)
        self.wait(lambda: not self.jobs(states="PENDING,RUNNING,COMPLETING,SUSPENDED"), 120)


class OtherSystemSite(PolicySite):
    """A cluster of another system's tree: Slurm's commands run in it, Sluice outside of it."""

    def __init__(self, cluster: DevCluster) -> None:
        super().__init__(cluster)
        prefix = self.scratch / "prefix"
        (prefix / "bin").mkdir(parents=True)
        for name in ("sacctmgr", "scontrol", "squeue", "sinfo", "sacct", "scancel"):
            line = cluster.command(["env", "LC_ALL=C", "SLURM_TIME_FORMAT=%s", "SLURM_BITSTR_LEN=0", name])
            quoted = " ".join(f"'{word}'" for word in line)
            (prefix / "bin" / name).write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
            (prefix / "bin" / name).chmod(0o755)
        self.prefix = prefix
        self.site = Site(prefix=prefix, state=self.scratch / "state")

    def live(self) -> Live:
        """The cluster as it is; its /etc/slurm is a folder of this machine."""
        live = read_live(self.site.cluster)
        live.folder = self.cluster.layout.slurm
        return live

    def compare(self) -> Comparison:
        """What the policy that was written last would change."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("policy.site.read_live", lambda _: self.live())
            return self.site.compare(load_source(self.file))

    def apply(self, text: str | None = None, *words: str) -> str:
        if text is not None:
            self.write(text)
        self.site.apply(
            self.compare(),
            who=self.site.caller(),
            force="--force" in words,
            drain_s=0 if "--drain-time=0s" in words else 300,
        )
        return ""
