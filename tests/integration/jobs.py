"""Jobs that tests submit, and what slurmctld shows of them."""

from __future__ import annotations

import re
from typing import Any

from dev_cluster.handle import ClusterHandle

LASTS = "exec sleep 600"
"""A job that lasts until it is cancelled. With a shell that waits for another process, its end takes slurmd 1.8 s."""


def sbatch(cluster: ClusterHandle, *words: str, user: str = "alice", **options: Any) -> str:
    """The id of a new job. It writes its output nowhere, unless `-o` is among the words."""
    command = ["sbatch", "--parsable", "-o", "/dev/null", *words]
    return cluster.run(command, user=user, **options).stdout.strip()


def submit(cluster: ClusterHandle, *words: str, wrap: str = LASTS, user: str = "alice", **options: Any) -> str:
    """The same, of a shell command."""
    return sbatch(cluster, *words, f"--wrap={wrap}", user=user, **options)


def shown(cluster: ClusterHandle, job: str | int, **options: Any) -> dict[str, str]:
    """The fields that `scontrol show job` has; of several records those of the first."""
    text = cluster.run(["scontrol", "show", "job", "-d", "-o", str(job)], **options).stdout.splitlines()[0]
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def state(cluster: ClusterHandle, job: str | int, **options: Any) -> str:
    """In Slurm's words, e.g. ``RUNNING``."""
    return shown(cluster, job, **options)["JobState"]
