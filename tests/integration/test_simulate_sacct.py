"""A real site's own accounting, as the guide says to take it, replayed under other policies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dev_cluster.cluster import DevCluster
from sluice.cli.simulate import command
from sluice.simulate.cluster_file import read_nodes
from sluice.simulate.traces import MICROSECOND, read_trace
from tests.integration.jobs import sbatch, state
from tests.integration.settled import until

pytestmark = pytest.mark.cluster

SITE = {
    "nodes": [{"names": "n[1-2]", "platform": "rtx4090x4"}],
    "controllers": 1,
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "slurm_conf": "SchedulerParameters=bf_interval=2,sched_interval=2\n",
}
FIELDS = "JobIDRaw,Account,User,QOS,Submit,Start,End,ElapsedRaw,State,Timelimit,NNodes,ReqTRES,AllocTRES"
HOSTILE_NAME = "a|b\n9|physics|$(reboot)"


def sacct(site: DevCluster, fields: str) -> str:
    return site.run(
        ["sacct", "--allusers", "--duplicates", "--parsable2", "--starttime", "now-1hour", "--format", fields]
    ).stdout


def test_a_month_of_a_real_site(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    site = make_cluster(SITE)

    def submit(*options: str) -> str:
        return sbatch(site, "-A", "physics", "-t", "5", *options)

    submit("--gres=gpu:2", "-J", HOSTILE_NAME, "--wrap", "sleep 1")
    submit("--array=1-3", "--gres=gpu:1", "--wrap", "sleep 1")
    submit("-N2", "--gres=gpu:4", "--wrap", "srun true; sleep 1")
    submit("--gres=gpu:1", ":", "-n1", "--wrap", "sleep 1")  # heterogeneous
    held = submit("--hold", "--gres=gpu:1", "--wrap", "true")
    site.run(["scancel", held], user="alice")
    requeued = submit("--requeue", "--gres=gpu:1", "--wrap", "exec sleep 600")
    until(lambda: state(site, requeued), lambda seen: seen == "RUNNING")
    site.run(["scontrol", "requeuehold", requeued])
    running = submit("--gres=gpu:1", "--wrap", "exec sleep 600")
    words = ["sacct", "-a", "-X", "-n", "-P", "-o", "State"]
    until(lambda: Counter(site.run(words).stdout.split()), lambda seen: seen["COMPLETED"] >= 7 and seen["RUNNING"] >= 1)
    month, nodes = tmp_path / "month.txt", tmp_path / "nodes.txt"
    month.write_text(sacct(site, FIELDS))
    nodes.write_text(site.run(["scontrol", "show", "node"]).stdout)
    site.run(["scancel", running], user="alice")

    trace, cluster = read_trace(month), read_nodes(str(nodes))
    assert [(node.name, node.gpus) for node in cluster] == [("n1", 4), ("n2", 4)]
    assert {(job.tenant, job.user) for job in trace.jobs} == {("physics", "alice")}
    # one of two GPUs, three tasks, one of eight GPUs, two components, the running one, and the first run of the
    # requeued one
    assert sorted(job.gpus for job in trace.jobs) == [0, 1, 1, 1, 1, 1, 1, 2, 8]
    assert trace.left_out["(counted with the time so far) running"] == 1
    assert all(job.estimate == 300 * MICROSECOND for job in trace.jobs)

    named = tmp_path / "named.txt"
    named.write_text(sacct(site, "JobName," + FIELDS))
    assert [job.gpus for job in read_trace(named).jobs] == [job.gpus for job in trace.jobs]

    result = CliRunner().invoke(command, ["--trace", str(month), "--nodes", str(nodes), "--json"])
    assert result.exit_code == 0, result.output
    policies = json.loads(result.stdout)["policies"]
    assert [one["figures"]["jobs"] for one in policies] == [9, 9, 9]
