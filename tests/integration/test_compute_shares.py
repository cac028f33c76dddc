"""Shares of a GPU's compute on real daemons, with agents that refuse what a GPU has not left: none is ever asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from sluice.explain.decisions import check_file, list_files
from sluice.explain.explanation import explain_job, parse_job
from tests.integration.platforms import PAIR
from tests.integration.settled import until
from tests.integration.test_placement_hook import Jobs

pytestmark = pytest.mark.cluster

NODE = "duo"
POLICY = CompiledPolicy(settings=Global(placement="sluice", planner_interval_ms=500, gpu_shares=True)).render()


@pytest.fixture(scope="module")
def shared(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    platform = tmp_path_factory.mktemp("platform") / "duo.yaml"
    platform.write_text(PAIR)
    described: dict[str, Any] = {
        "nodes": [{"names": NODE, "platform": str(platform)}],
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "users": [{"name": "alice"}],
        "slurm_conf": "DefMemPerCPU=200\n"
        "SchedulerParameters=bf_interval=3,sched_interval=2,sched_min_interval=0,batch_sched_delay=0\n",
        "sluice": {
            "level": "place",
            "policy": POLICY,
            "environment": {"SLUICE_CROSS_CHECK_PERMILLE": "1000", "SLUICE_MIRROR_CHECK_EVERY": "1"},
        },
    }
    made = Jobs(make_shared_cluster(described))
    node_policy = made.cluster.slurm_conf_dir() / "sluice.node.json"
    node_policy.write_text(NodePolicy(limits=NodeLimits(ladder=("mps", "limiter", "watchdog"))).render())
    return made


@pytest.fixture
def jobs(shared: Jobs) -> Iterator[Jobs]:
    yield shared
    shared.clear()
    assert "drain" not in shared.run("sinfo", "-h", "-o", "%T")
    shared.assert_sound()


def claim(percent: int, *more: str) -> list[str]:
    return ["-N1", "--gpu-mem=1G", f"--gpu-share={percent}", *more]


def test_two_jobs_of_60_percent_get_two_gpus_and_a_third_waits(jobs: Jobs) -> None:
    first, on_first = jobs.start(*claim(60))
    _, on_second = jobs.start(*claim(60))
    assert on_first[NODE] | on_second[NODE] == {0, 1}
    before = jobs.counters()["refused"]
    third = jobs.submit(*claim(60))
    until(jobs.counters, lambda now: now["refused"] > before)
    _, fitting = jobs.start(*claim(40))  # behind it in the queue, and delays nobody
    assert len(fitting[NODE]) == 1
    assert jobs.state(third) == "PENDING"
    _, unbounded = jobs.start("-N1", "--gpu-mem=1G")  # claims no compute
    assert len(unbounded[NODE]) == 1
    jobs.run("scancel", first)
    jobs.wait(first, "CANCELLED")
    assert jobs.placed(third) == on_first


def test_claims_are_counted_after_a_restart(jobs: Jobs) -> None:
    first, on_first = jobs.start(*claim(60))
    jobs.start(*claim(70))
    jobs.cluster.restart_slurmctld()
    test = ["sbatch", "--test-only", *claim(1), "--wrap=true"]  # refused until the node has registered its GPUs
    until(lambda: jobs.cluster.run(test, check=False).returncode == 0)
    waiting = jobs.submit(*claim(41))
    _, fitting = jobs.start(*claim(40))
    assert fitting == on_first
    assert jobs.state(waiting) == "PENDING"
    jobs.run("scancel", first)
    assert jobs.placed(waiting) == on_first


def test_a_node_that_is_asked_by_name_is_left_to_stock_but_not_its_compute(jobs: Jobs) -> None:
    _, on_first = jobs.start(*claim(60, "-w", NODE))
    _, on_second = jobs.start(*claim(60, "-w", NODE))
    assert on_first[NODE] | on_second[NODE] == {0, 1}
    before = jobs.counters()["overlaps_refused"]
    third = jobs.submit(*claim(60, "-w", NODE))
    until(jobs.counters, lambda now: now["overlaps_refused"] > before)
    assert jobs.state(third) == "PENDING"
    jobs.run("scancel", third)  # Slurm's backfill keeps the node for it
    jobs.start(*claim(40, "-w", NODE))


def test_a_requeued_and_a_suspended_job_keep_no_more_than_they_claim(jobs: Jobs) -> None:
    kept, on_first = jobs.start(*claim(60))
    gone, on_second = jobs.start(*claim(60))
    jobs.run("scontrol", "suspend", kept)
    jobs.run("scontrol", "requeue", gone)
    jobs.wait(gone, "PENDING")  # for two minutes
    _, on_freed = jobs.start(*claim(60))
    assert on_freed == on_second != on_first
    jobs.run("scontrol", "resume", kept)
    jobs.start(*claim(40))
    jobs.start(*claim(40))
    last = jobs.submit(*claim(1))
    until(lambda: jobs.run("squeue", "-h", "-j", last, "-o", "%r").strip(), lambda reason: reason not in ("", "None"))
    assert jobs.state(last) == "PENDING"


def test_a_whole_gpu_that_is_held_to_half_is_nobody_elses(jobs: Jobs) -> None:
    _, whole = jobs.start("-N1", "--gpus=1", "--gpu-share=50")
    _, other = jobs.start(*claim(50))
    _, fitting = jobs.start(*claim(50))
    assert other == fitting != whole
    assert jobs.state(jobs.submit(*claim(10))) == "PENDING"


def test_why_a_job_waits_for_compute(jobs: Jobs) -> None:
    jobs.start("-N1", "--gpus=1")
    jobs.start(*claim(60))
    waiting = jobs.submit(*claim(60))

    def reasons() -> list[str]:
        said = explain_job(jobs.cluster.layout.state / "sluice.records", parse_job(waiting)) or {}
        return [entry["reason"] for entry in said.get("waiting", {}).get("nodes_by_reason", [])]

    assert until(reasons) == ["too few GPUs with 60 % of their compute free"]
    checks = [check_file(path) for path in list_files(jobs.cluster.layout.state / "sluice.records")]
    assert sum(check.replayed for check in checks) > 0
    assert [check.different for check in checks] == [()] * len(checks)
