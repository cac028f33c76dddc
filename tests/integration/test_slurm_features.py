"""Preemption, reservations, heterogeneous jobs and all else that Slurm can do work under Sluice's plugins, too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.slurm_version import parse_slurm_version
from tests.integration.settled import until
from tests.integration.slurm_features import (
    POLICY,
    Jobs,
    description,
    gpu_indices,
    set_up,
    status_in_force,
)

pytestmark = pytest.mark.cluster

# A word of SLUICE_LEVELS: a level, or stock for no plugins; with @24.11 on the newer Slurm.
_ALL = "stock off admit shadow place stock@24.11 off@24.11 admit@24.11 shadow@24.11 place@24.11"
_SHORT = "place place@24.11" if os.environ.get("SLUICE_TRIXIE") == "require" else "place"
_DEFAULT = _ALL if os.environ.get("SLUICE_TEST_SCALE") == "full" else _SHORT
LEVELS = [
    pytest.param(word, marks=pytest.mark.trixie) if "@" in word else word
    for word in os.environ.get("SLUICE_LEVELS", _DEFAULT).split()
]


@pytest.fixture(scope="module", params=LEVELS)
def cluster(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    level, _, newer = str(request.param).partition("@")
    root = {"root": request.getfixturevalue("trixie_root")} if newer else {}
    made = make_shared_cluster(description(None if level == "stock" else {"level": level, "policy": POLICY}), **root)
    set_up(made)
    if level != "stock":
        assert status_in_force(made)["level"] == level
    return made


@pytest.fixture
def jobs(cluster: DevCluster) -> Iterator[Jobs]:
    made = Jobs(cluster)
    yield made
    made.cancel_all()


def test_preemption_requeues_the_lower_qos(jobs: Jobs) -> None:
    low = [jobs.submit("--qos=low", "--gpus-per-node=8", "-N1", "--requeue") for _ in range(6)]
    for job in low:
        jobs.wait(job, "RUNNING")
    high = jobs.submit("--qos=high", "--gpus-per-node=8", "-N2", user="bob")
    jobs.wait(high, "RUNNING")
    until(lambda: [jobs.state(job) for job in low], lambda states: "COMPLETING" not in states)
    waiting = [job for job in low if jobs.state(job) == "PENDING"]
    assert len(waiting) == 2
    assert all(jobs.shown(job)["Restarts"] == "1" for job in waiting)


def test_reservation_keeps_others_out_and_lets_its_own_in(cluster: DevCluster, jobs: Jobs) -> None:
    made = "ReservationName=mine StartTime=now Duration=30 Nodes=n[1-5] Users=bob"
    cluster.run(["scontrol", "create", *made.split()])
    try:
        outside = [jobs.submit("--gpus=8", "-N1", "--gres-flags=disable-binding") for _ in range(2)]
        inside = jobs.submit("--gpus=8", "-N1", "--reservation=mine", user="bob")
        assert jobs.wait(inside, "RUNNING")["NodeList"] != "n6"
        assert jobs.wait(outside[0], "RUNNING")["NodeList"] == "n6"
        assert jobs.state(outside[1]) == "PENDING"
    finally:
        jobs.cancel_all()
        cluster.run(["scontrol", "delete", "ReservationName=mine"])


def test_reserved_gpus_stay_those_of_the_reservation(cluster: DevCluster, jobs: Jobs) -> None:
    """Which GPUs of a node are reserved only stock Slurm knows: its choice of them is kept."""
    if parse_slurm_version(cluster.run(["sinfo", "--version"]).stdout) < (24, 11, 0):
        pytest.skip("GPUs are reserved since 24.11")
    first = jobs.submit("--gpus=4", "-N1", "-w", "n2")
    jobs.wait(first, "RUNNING")
    (held,) = re.findall(r" GRES=(\S+)", cluster.run(["scontrol", "show", "job", "-d", first]).stdout)
    made = "ReservationName=some StartTime=now Duration=30 Nodes=n2 Users=bob TRES=cpu=8,gres/gpu=4"
    cluster.run(["scontrol", "create", *made.split()])
    try:
        jobs.cancel_all()
        inside = jobs.submit("--gpus-per-node=4", "-N1", "--reservation=some", user="bob")
        jobs.wait(inside, "RUNNING")
        (own,) = re.findall(r" GRES=(\S+)", cluster.run(["scontrol", "show", "job", "-d", inside]).stdout)
        assert gpu_indices(own) == set(range(8)) - gpu_indices(held)
    finally:
        jobs.cancel_all()
        cluster.run(["scontrol", "delete", "ReservationName=some"])


def test_reservation_to_come_is_not_delayed(cluster: DevCluster, jobs: Jobs) -> None:
    cluster.run(
        ["scontrol", "create", *"ReservationName=soon StartTime=now+10minutes Duration=30 Nodes=ALL Users=bob".split()]
    )
    try:
        long = jobs.submit("--gpus=1", "--time=30")
        short = jobs.submit("--gpus=1", "--time=5")
        jobs.wait(short, "RUNNING")
        assert jobs.state(long) == "PENDING"
    finally:
        jobs.cancel_all()
        cluster.run(["scontrol", "delete", "ReservationName=soon"])


def test_heterogeneous_job_gets_all_its_components(jobs: Jobs) -> None:
    job = jobs.submit("--gres=gpu:h100:8", "-N1", ":", "--gres=gpu:h100:2", "-N2", ":", "-n1")
    jobs.wait(job, "RUNNING")
    parts = jobs.cluster.run(["squeue", "-h", "-j", job, "-o", "%i %T %D %b"]).stdout.split("\n")[:-1]
    assert [line.split()[1] for line in parts] == ["RUNNING"] * 3


def test_array_runs_every_task_within_its_throttle(jobs: Jobs) -> None:
    job = jobs.submit("--array=0-19%8", "--gpus=1", wrap="sleep 1")
    seen: list[int] = []

    def running() -> int:
        lines = jobs.cluster.run(["squeue", "-h", "-r", "-j", job, "-o", "%T"], check=False).stdout.split()
        seen.append(lines.count("RUNNING"))
        return len(lines)

    until(running, lambda left: left == 0)
    assert 0 < max(seen) <= 8
    until(
        lambda: jobs.cluster.run(["sacct", "-nX", "-j", job, "-o", "State"]).stdout.split(),
        lambda states: states == ["COMPLETED"] * 20,
    )


def test_exclusive_node_is_shared_with_nobody(jobs: Jobs) -> None:
    alone = jobs.submit("--exclusive", "-N1", "--gpus=1")
    node = jobs.wait(alone, "RUNNING")["NodeList"]
    others = [jobs.submit("--gpus=1", "-n1") for _ in range(12)]
    assert all(jobs.wait(job, "RUNNING")["NodeList"] != node for job in others)


def test_gpus_per_task(jobs: Jobs) -> None:
    job = jobs.submit("-n4", "-N2", "--ntasks-per-node=2", "--gpus-per-task=2", wrap="srun --gpus-per-task=2 sleep 600")
    shown = jobs.wait(job, "RUNNING")
    assert shown["NumNodes"] == "2"
    assert "gres/gpu=8" in jobs.cluster.run(["squeue", "-h", "-j", job, "-O", "tres-alloc:200"]).stdout


def test_mps_percentages_share_one_gpu(jobs: Jobs) -> None:
    half = [jobs.submit("--gres=mps:50") for _ in range(2)]
    shown = [jobs.wait(job, "RUNNING") for job in half]
    assert {one["NodeList"] for one in shown} == {"n6"}
    assert "mps" in jobs.gres(half[0])
    first, second = (gpu_indices(jobs.gres(job)) for job in half)
    assert len(first) == 1
    assert first == second


def test_whole_gpus_stay_clear_of_shards(jobs: Jobs) -> None:
    small = [jobs.submit("--gres=shard:40000", "-w", "n1") for _ in range(2)]
    for job in small:
        jobs.wait(job, "RUNNING")
    whole = jobs.submit("--gres=gpu:6", "-w", "n1", "-n2")
    jobs.wait(whole, "RUNNING")
    shared = gpu_indices(jobs.gres(small[0])) | gpu_indices(jobs.gres(small[1]))
    assert len(gpu_indices(jobs.gres(whole))) == 6
    assert not shared & gpu_indices(jobs.gres(whole))


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [
        ("fast", {"n1", "n2"}),
        ("slow&rack2", {"n3", "n4", "n5", "n6"}),
        ("fast|slow", {"n1", "n2", "n3", "n4", "n5", "n6"}),
    ],
)
def test_features(jobs: Jobs, constraint: str, nodes: set[str]) -> None:
    job = jobs.submit("--gpus=1", f"--constraint={constraint}")
    assert jobs.wait(job, "RUNNING")["NodeList"] in nodes


def test_exclusive_or_of_features_takes_one_rack(jobs: Jobs) -> None:
    blocker = jobs.submit("--gpus=1", "--exclusive", "-w", "n1")
    jobs.wait(blocker, "RUNNING")
    job = jobs.submit("-N2", "--gpus-per-node=8", "--constraint=[rack1|rack2]")
    assert jobs.wait(job, "RUNNING")["NodeList"] in {"n[3-4]", "n[3,5]", "n[3,6]", "n[4-5]", "n[4,6]", "n[5-6]"}


def test_licences_are_counted(jobs: Jobs) -> None:
    first, second, third = (jobs.submit("--gpus=1", "-L", "solver:1") for _ in range(3))
    jobs.wait(first, "RUNNING")
    jobs.wait(second, "RUNNING")
    until(lambda: jobs.shown(third)["Reason"], lambda reason: reason == "Licenses")
    others = jobs.submit("--gpus=1")
    jobs.wait(others, "RUNNING")
    jobs.cluster.run(["scancel", first])
    jobs.wait(third, "RUNNING")


def test_topology_packs_under_one_switch(jobs: Jobs) -> None:
    half = jobs.submit("--gpus=4", "-w", "n1")
    jobs.wait(half, "RUNNING")
    job = jobs.submit("-N2", "--gpus-per-node=8", "--switches=1")
    assert jobs.wait(job, "RUNNING")["NodeList"] in {"n[3-4]", "n[5-6]"}


def test_dependencies_and_required_and_excluded_nodes(jobs: Jobs) -> None:
    first = jobs.submit("--gpus=1", "-w", "n3", wrap="sleep 2")
    after = jobs.submit("--gpus=1", f"--dependency=afterok:{first}", "--exclude=n[1-5]", wrap="exec sleep 600")
    assert jobs.wait(first, ["RUNNING", "COMPLETED"])["NodeList"] == "n3"
    assert jobs.wait(after, "RUNNING")["NodeList"] == "n6"


def test_backfill_starts_small_jobs_that_delay_nobody(jobs: Jobs) -> None:
    held = jobs.submit("--gpus-per-node=8", "-N5", "--time=4")
    jobs.wait(held, "RUNNING")
    wide = jobs.submit("--gpus-per-node=8", "-N6", "--time=4", "--nice=-10", user="root")
    until(lambda: jobs.shown(wide)["Reason"], lambda reason: reason in ("Resources", "Priority"))
    short = jobs.submit("--gpus=2", "--time=2", user="bob")
    jobs.wait(short, "RUNNING")
    long = jobs.submit("--gpus=2", "--time=60", user="bob")
    until(lambda: jobs.shown(long)["Reason"], lambda reason: reason in ("Resources", "Priority"))
    assert jobs.state(wide) == "PENDING"
    jobs.cluster.run(["scancel", wide])


def test_steps_get_their_gpus_within_the_job(jobs: Jobs) -> None:
    step = "srun -n1 --gpus=1 --exact --mem=100M printenv CUDA_VISIBLE_DEVICES > step.out"
    job = jobs.submit("-n4", "--gpus=4", wrap=step)
    jobs.wait(job, "COMPLETED")
    assert jobs.cluster.run(["cat", "step.out"], user="alice").stdout == "0\n"


def test_job_on_nodes_in_power_saving_wakes_them_and_others_go_elsewhere(cluster: DevCluster, jobs: Jobs) -> None:
    """Last: no machine wakes up here, so the node stays out."""
    cluster.run(["scontrol", "update", "NodeName=n5", "State=POWER_DOWN"])
    try:
        until(
            lambda: cluster.run(["sinfo", "-h", "-n", "n5", "-o", "%T"]).stdout.strip(),
            lambda state: state.endswith("~") or "powered_down" in state,
            timeout=90,
        )
        job = jobs.submit("--gpus=1", "-w", "n5")
        assert jobs.wait(job, ["CONFIGURING", "RUNNING"])["NodeList"] == "n5"
        away = jobs.submit("--gpus=1")
        assert jobs.wait(away, "RUNNING")["NodeList"] != "n5"
    finally:
        jobs.cancel_all()
