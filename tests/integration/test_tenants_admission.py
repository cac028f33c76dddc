"""Limits that Slurm has no word for, kept by job_submit from level admit on, by what `sluice apply` writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.policy_site import INSIDE, PolicySite, description

pytestmark = pytest.mark.cluster

POLICY = """\
level: admit
classes:
  h100: {types: [h100]}
  l40s: {types: [l40s]}
tenants:
  small: {members: [alice], gpu_memory_per_gpu: 20G}
  classy: {members: [alice], classes: [l40s]}
  night: {members: [alice], per_job: {classes: {h100: {gpus: 2, time: 1h}}}}
  parts: {members: [alice], per_job: {gpu_memory: 10G}}
  plain: {members: [alice], features: [h100]}
  slow: {members: [alice], submissions_per_minute: 6}
  late: {members: [alice], expires: 2020-01-01}
  fixed: {members: [alice], partitions: [main]}
"""
# tenant: what it may ask for, what it may not, a change of a waiting job that would break it, what the refusal says
CASES = {
    "small": (["--gres=shard:20480"], ["--gres=shard:40000"], "TresPerNode=gres:shard:40000", "20|GPU memory"),
    "classy": (["--gres=gpu:l40s:1"], ["--gres=gpu:h100:1"], "TresPerNode=gres:gpu:h100:1", "h100"),
    "night": (
        ["--gres=gpu:h100:2", "--time=30"],
        ["--gres=gpu:h100:3", "--time=30"],
        "TresPerNode=gres:gpu:h100:3",
        "h100|GPUs",
    ),
    "parts": (["--gres=shard:10240"], ["--gres=shard:10241"], "TresPerNode=gres:shard:10241", "GPU memory|10"),
    "fixed": (["--partition=main"], ["--partition=other"], "Partition=other", "other"),
}


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> PolicySite:
    more = {
        "partitions": [{"name": "main"}, {"name": "other"}],
        "sluice": {"level": "admit", "policy": ""},
    }
    base = description(**more)
    base["slurm_conf"] += f"SlurmctldLogFile={INSIDE}/slurmctld.log\n"
    site = PolicySite(make_shared_cluster(base, timeout=400))
    site.apply(POLICY)
    site.in_force("admit")
    return site


@pytest.mark.parametrize("tenant", list(CASES))
def test_within_and_over_by_any_way(site: PolicySite, tenant: str) -> None:
    within, over, change, said = CASES[tenant]
    account = ("-A", tenant, "-n1", "--mem=10M")
    try:
        fine = site.sbatch("alice", *account, *within)
        site.wait(lambda: site.state(fine)[0] == "RUNNING")

        def refused(*words: str) -> None:
            done = site.run(*words, user="alice", check=False, cwd="/", timeout=120)
            assert done.returncode != 0, words
            assert re.search(said, done.stderr), (words, done.stderr)

        refused("sbatch", *account, *over, "--wrap=true")
        refused("sbatch", *account, *over, "--array=0-3", "--wrap=true")
        refused("srun", *account, *over, "true")
        refused("salloc", *account, *over, "true")
        refused("sbatch", *account, *within, ":", *account, *over, "--wrap=true")
        waiting = site.sbatch("alice", *account, *within, "--hold")
        before = site.run("scontrol", "show", "job", waiting).stdout
        done = site.run("scontrol", "update", f"JobId={waiting}", change, user="alice", check=False)
        after = site.run("scontrol", "show", "job", waiting).stdout
        assert done.returncode != 0, after
        for field in ("TresPerNode", "Features", "Partition"):
            assert re.findall(rf"{field}=\S+", after) == re.findall(rf"{field}=\S+", before)
        with ThreadPoolExecutor(20) as clients:
            tried = list(clients.map(lambda _: site.sbatch("alice", *account, *over, check=False), range(20)))
        assert not [one for one in tried if one.isdecimal()]
    finally:
        site.clear()


def test_whole_gpus_count_against_the_memory_cap(site: PolicySite) -> None:
    said = site.sbatch("alice", "-A", "small", "--gres=gpu:h100:1", check=False)
    assert not said.isdecimal()
    assert re.search("memory", said), said


def test_run_time_by_class(site: PolicySite) -> None:
    try:
        assert site.sbatch("alice", "-A", "night", "--gres=gpu:h100:1", "--time=60").isdecimal()
        said = site.sbatch("alice", "-A", "night", "--gres=gpu:h100:1", "--time=61", check=False)
        assert not said.isdecimal()
        assert site.sbatch("alice", "-A", "night", "--gres=gpu:l40s:1", "--time=600").isdecimal()
    finally:
        site.clear()


def test_jobs_stay_on_nodes_with_the_tenants_features(site: PolicySite) -> None:
    account = ("-A", "plain", "-n1", "--mem=10M")
    try:
        jobs = [site.sbatch("alice", *account) for _ in range(5)]
        site.wait(lambda: all(site.state(job)[0] == "RUNNING" for job in jobs))
        nodes = site.run("squeue", "--noheader", "--format=%N").stdout.split()
        assert all(node.startswith("g-") for node in nodes), nodes
        for word in ("--constraint=l40s", "--nodelist=l-1"):
            assert not site.sbatch("alice", *account, word, check=False).isdecimal()
        held = site.sbatch("alice", *account, "--hold")
        site.run("scontrol", "update", f"JobId={held}", "Features=l40s", user="alice", check=False)
        site.run("scontrol", "release", held, user="alice", check=False)
        time.sleep(3)
        assert "l-1" not in site.run("squeue", "--noheader", "--format=%N").stdout.split()
    finally:
        site.clear()


def test_who_is_no_member_uses_up_no_submissions_of_an_account(site: PolicySite) -> None:
    try:
        for _ in range(8):
            assert "ccount" in site.sbatch("bob", "-A", "slow", "--hold", check=False)
        assert site.sbatch("alice", "-A", "slow", "--hold", check=False).isdecimal()
    finally:
        site.clear()


def test_submissions_per_minute_hold_for_twenty_clients(site: PolicySite) -> None:
    try:
        begin = time.monotonic()
        with ThreadPoolExecutor(20) as clients:
            tried = list(clients.map(lambda _: site.sbatch("alice", "-A", "slow", "--hold", check=False), range(20)))
        accepted = [one for one in tried if one.isdecimal()]
        assert 1 <= len(accepted) <= 7 + (time.monotonic() - begin) // 10, tried  # six a minute are added
        assert any("minute" in one for one in tried if not one.isdecimal()), tried
    finally:
        site.clear()


def test_refusals_are_in_the_audit_log_once(site: PolicySite) -> None:
    said = site.sbatch("alice", "-A", "classy", "--gres=gpu:h100:1", check=False)
    assert not said.isdecimal()
    counts = []
    for _ in range(2):
        time.sleep(1.1)  # events are collected by whole seconds
        site.sluice("audit", "collect", "--delay", "0s", "--slurmctld-log", f"{INSIDE}/slurmctld.log")
        lines = site.sluice("audit", "export", "--action", "refuse", "--subject", "classy").stdout.splitlines()
        counts.append(len(lines))
    assert counts[0] == counts[1] >= 1
    last = json.loads(lines[-1])
    assert last["user"] == "alice"
    assert last["detail"]["why"] in said


def test_an_expired_tenant_submits_nothing(site: PolicySite) -> None:
    said = site.sbatch("alice", "-A", "late", check=False)
    assert not said.isdecimal()
    assert re.search("expired|Assoc", said), said


def test_level_off_switches_all_of_it_off_and_no_more(site: PolicySite) -> None:
    site.apply(POLICY.replace("level: admit", "level: off"))
    site.in_force("off")
    try:
        assert site.sbatch("alice", "-A", "small", "--gres=gpu:h100:1").isdecimal()
        assert not site.sbatch("alice", "-A", "late", check=False).isdecimal()  # Slurm's own GrpSubmitJobs
    finally:
        site.clear()
        site.apply(POLICY)
        site.in_force("admit")
