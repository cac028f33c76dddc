"""The placement hook on real daemons: which nodes and GPUs jobs get, and that its picture of Slurm is never wrong."""

from __future__ import annotations

import os
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global, GpuClass
from sluice.base.files import write_atomic
from tests.integration.jobs import sbatch, state
from tests.integration.settled import PATIENCE, await_policy, fresh_status, lasts_until, set_level, until
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

POLICY = CompiledPolicy(settings=Global(placement="sluice", planner_interval_ms=500, gpu_shares=True)).render()
FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
SCRIPT = "#!/bin/sh\nexec sleep ${1:-600}\n"
GO = "/run/sluice-cluster/scratch/go"
NEWER = pytest.param("trixie", marks=pytest.mark.trixie)
on_both_versions = pytest.mark.parametrize("root", ["native", NEWER], indirect=True, scope="module")

Placed = dict[str, set[int]]  # node -> its GPUs


def _description(level: str | None = "place") -> dict[str, Any]:
    """Four nodes of two sockets with four GPUs each, two to a switch. All that the core proves or remembers is asked of
    stock Slurm, too, and the whole mirror is compared before every decision."""
    sluice = {
        "level": level,
        "policy": POLICY,
        "environment": {"SLUICE_CROSS_CHECK_PERMILLE": "1000", "SLUICE_MIRROR_CHECK_EVERY": "1"},
    }
    return {
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "controllers": 1,
        "accounting": False,
        "users": [{"name": "alice"}],
        "partitions": [
            {"name": "main", "options": "PriorityTier=1 DefaultTime=60"},
            {"name": "high", "options": "PriorityTier=10 DefaultTime=60"},
            {"name": "urgent", "options": "PriorityTier=10 DefaultTime=60"},
            {"name": "share", "options": "PriorityTier=1 DefaultTime=60 OverSubscribe=YES:2"},
        ],
        "topology_conf": "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n",
        "slurm_conf": "TopologyPlugin=topology/tree\nDefMemPerCPU=200\n"
        "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        "SchedulerParameters=bf_interval=3,sched_interval=2,sched_min_interval=0,batch_sched_delay=0\n",
        **({"sluice": sluice} if level else {}),
    }


class Jobs:
    """Submits jobs and looks up what they got."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        script = cluster.folder / "scratch/job"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        self.script = "/run/sluice-cluster/scratch/job"

    def run(self, *command: str) -> str:
        return self.cluster.run(list(command)).stdout

    def shell(self, script: str) -> str:
        return self.run("bash", "-c", script)

    def submit(self, *options: str, seconds: int = 600) -> str:
        return sbatch(self.cluster, "-n1", "-c2", *options, self.script, str(seconds), user="root")

    def state(self, job: str) -> str:
        return state(self.cluster, job)

    def wait(self, job: str, state: str = "RUNNING", patience: float = PATIENCE) -> None:
        until(lambda: self.state(job), lambda seen: seen == state, patience, shows=lambda: self.shown(job))

    def shown(self, job: str) -> str:
        return self.run("scontrol", "-d", "show", "job", job)

    def placed(self, job: str) -> Placed:
        """Nodes and GPUs of a running job."""
        self.wait(job)
        found: Placed = {}
        for nodes, gres in re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", self.shown(job)):
            indices: set[int] = set()
            for ranges in re.findall(r"(?:IDX:|\()([0-9,-]+)(?:\(\d+/\d+\))?\)", gres):
                for part in ranges.split(","):
                    first, _, last = part.partition("-")
                    indices |= set(range(int(first), int(last or first) + 1))
            for node in self.run("scontrol", "show", "hostnames", nodes).split():
                found[node] = indices
        return found

    def start(self, *options: str) -> tuple[str, Placed]:
        job = self.submit(*options)
        return job, self.placed(job)

    def clear(self) -> None:
        self.shell("squeue -h -r -o %i | xargs -r scancel")  # 22.05 takes no element of an array by its own JobId
        nodes = ("sinfo", "-h", "-N", "-o", "%T")
        until(
            lambda: (self.run("squeue", "-h").strip(), set(self.run(*nodes).split())),
            lambda seen: seen == ("", {"idle"}),
        )

    def level(self, word: str) -> None:
        set_level(self.cluster, word)

    def backfill_passes(self) -> int:
        """Since slurmctld's start."""
        return int(re.findall(r"Total cycles: (\d+)", self.run("sdiag"))[-1])

    def counters(self) -> Counter[str]:
        """The hook's counters, with all that was counted before."""
        shown = fresh_status(self.cluster)["counters"]
        return Counter({name.removeprefix("select."): n for name, n in shown.items() if name.startswith("select.")})

    def assert_sound(self) -> Counter[str]:
        """The mirror was never wrong, nor was anything that the core said without stock Slurm."""
        counters = self.counters()
        log = [line for line in self.cluster.log("slurmctld@ctl1").read_text().splitlines() if "select/sluice" in line]
        assert (counters["check_failures"], counters["cross_wrong"]) == (0, 0), "\n".join(log)
        return counters


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def root(request: pytest.FixtureRequest) -> dict[str, Path]:
    return {} if request.param == "native" else {"root": request.getfixturevalue("trixie_root")}


@pytest.fixture(scope="module")
def shared(make_shared_cluster: Callable[..., DevCluster], root: dict[str, Path]) -> Jobs:
    return Jobs(make_shared_cluster(_description(), **root))


@pytest.fixture
def jobs(shared: Jobs) -> Iterator[Jobs]:
    yield shared
    shared.clear()


# ---- which nodes and GPUs ----


@on_both_versions
def test_packs_tighter_than_stock(jobs: Jobs) -> None:
    """Four GPUs are left on one node, two on another: two go where they leave nothing behind, not to the first node."""
    _, four = jobs.start("-N1", "--gres=gpu:4")
    _, six = jobs.start("-N1", "--gres=gpu:6")
    jobs.level("off")
    stock, first = jobs.start("-N1", "--gres=gpu:2")
    jobs.run("scancel", stock)
    jobs.level("place")
    jobs.wait(stock, "CANCELLED")
    _, packed = jobs.start("-N1", "--gres=gpu:2")
    assert first.keys() == four.keys()
    assert packed.keys() == six.keys()


@on_both_versions
def test_gpu_indices_are_the_cores_choice(jobs: Jobs) -> None:
    before = jobs.counters()
    rng = random.Random(7)
    kinds = [
        "--gres=gpu:1",
        "--gres=gpu:2",
        "--gres=gpu:3",
        "--gpus=2",
        "--gres=gpu:h100:1",
        "--gres=shard:20000",
        "--gres=shard:5000",
    ]
    for _ in range(6 if not FULL else 60):
        jobs.shell(
            "; ".join(
                f"sbatch -n1 -c1 -o /dev/null {rng.choice(kinds)} {jobs.script} {rng.choice([1, 2, 3])}"
                for _ in range(10)
            )
        )
    until(lambda: not jobs.run("squeue", "-h").strip(), timeout=180 if not FULL else 600)
    counters = jobs.assert_sound()
    counters.subtract(before)
    assert counters["index_asked"] >= 50
    assert counters["index_kept"] >= 0.99 * counters["index_asked"], counters


@pytest.mark.parametrize("affinity", ["numa", "link"])
def test_affinity_keeps_gpus_on_one_socket(jobs: Jobs, affinity: str) -> None:
    """One GPU is left on a node's first socket, four on its second, all linked: two are not one of each."""
    _, three = jobs.start("-N1", "--gres=gpu:3")
    assert len({gpu // 4 for gpus in three.values() for gpu in gpus}) == 1
    _, two = jobs.start("-N1", "--gres=gpu:2", f"--gpu-affinity={affinity}")
    assert two.keys() == three.keys()
    assert len({gpu // 4 for gpus in two.values() for gpu in gpus}) == 1


def test_cores_are_near_the_gpus(jobs: Jobs) -> None:
    """Stock Slurm takes cores before it chooses GPUs: the hook gives it the cores."""
    for _ in range(6):
        jobs.start("-N1", "--gres=gpu:1", "-c4")
    half = int(re.search(r"CPUTot=(\d+)", jobs.run("scontrol", "show", "node", "n1")).group(1)) // 2  # type: ignore[union-attr]
    shown = jobs.run("bash", "-c", "squeue -h -o %A | xargs -n1 scontrol -d show job")
    found = re.findall(r"CPU_IDs=(\d+)\S* Mem=\S+ GRES=gpu:h100:1\(IDX:(\d)\)", shown)
    assert len(found) == 6
    assert all(int(cpu) // half == int(gpu) // 4 for cpu, gpu in found), found
    assert {int(gpu) // 4 for _, gpu in found} == {0, 1}


def test_spread_takes_as_many_nodes_as_it_may(jobs: Jobs) -> None:
    _, together = jobs.start("-n4", "-N1-4", "--gpus=4")
    _, apart = jobs.start("-n4", "-N1-4", "--gpus=4", "--gpu-spread")
    assert len(apart) > len(together)


def test_cpus_of_all_gpus_are_those_of_the_tasks(jobs: Jobs) -> None:
    """A job that takes all CPUs of a node by its GPUs, which are counted for all nodes, still has room on one."""
    cpus = int(re.search(r"CPUTot=(\d+)", jobs.run("scontrol", "show", "node", "n1")).group(1))  # type: ignore[union-attr]
    before = jobs.counters()
    options = ["--parsable", "-n1", "-o", "/dev/null", "--gpus=8", f"--cpus-per-gpu={cpus // 8}", "--mem=1G"]
    assert list(jobs.placed(jobs.run("sbatch", *options, jobs.script).strip()).values()) == [set(range(8))]
    counters = jobs.assert_sound()
    assert counters["narrowed"] > before["narrowed"]
    assert counters["fell_back"] == before["fell_back"]


def test_exclusive_is_alone(jobs: Jobs) -> None:
    _, one = jobs.start("-N1", "--gres=gpu:1")
    _, alone = jobs.start("-N1", "--exclusive")
    _, other = jobs.start("-N1", "--gres=gpu:1")
    assert alone.keys().isdisjoint(one.keys() | other.keys())


def test_several_nodes_are_below_one_switch(jobs: Jobs) -> None:
    jobs.start("-N1", "--gres=gpu:1")
    _, pair = jobs.start("-N2", "-n2", "--gres=gpu:8")
    assert pair.keys() in ({"n1", "n2"}, {"n3", "n4"})


def test_nodes_are_spread_over_switches_by_the_policy_and_by_the_job(jobs: Jobs) -> None:
    """Without either they are near; the job's own word goes before the policy's, of all jobs and of a class."""
    near, apart = ({"n1", "n2"}, {"n3", "n4"}), [{a, b} for a in ("n1", "n2") for b in ("n3", "n4")]

    def pair(*options: str) -> set[str]:
        job, placed = jobs.start("-N2", "-n2", *options)
        jobs.run("scancel", job)
        jobs.wait(job, "CANCELLED")
        return set(placed)

    assert pair("--gres=gpu:2") in near
    assert pair("--gres=gpu:2", "--fabric=spread") in apart
    policy = jobs.cluster.slurm_conf_dir() / "sluice.policy"
    try:
        near_class = GpuClass(name="h100", gpu_types=["h100"])
        spread = Global(placement="sluice", planner_interval_ms=500, gpu_shares=True, spread_nodes=True)
        CompiledPolicy(settings=spread, classes=[near_class]).write(policy)
        await_policy(jobs.cluster)
        assert pair("--gres=gpu:2") in apart
        assert pair("--gres=gpu:2", "--fabric=any") in near
        assert pair("--gres=gpu:h100:2") in near
    finally:
        write_atomic(policy, POLICY)
        await_policy(jobs.cluster)
    assert pair("--gres=gpu:2") in near
    jobs.assert_sound()


@on_both_versions
def test_fabric_block_waits_for_one_switch_and_then_takes_any(jobs: Jobs) -> None:
    """With a node below each switch in use, two nodes are free, but not below one."""
    first, _ = jobs.start("-w", "n1", "--gres=gpu:8")
    jobs.start("-w", "n3", "--gres=gpu:8")
    waits = jobs.submit("-N2", "-n2", "--gres=gpu:8", "--fabric=block@4:00")
    assert "Switches=1@00:04:00" in jobs.shown(waits)
    soon = jobs.submit("-N2", "-n2", "--gres=gpu:8", "--fabric=rail@0:03", "-t", "5")
    assert jobs.placed(soon).keys() == {"n2", "n4"}
    assert jobs.state(waits) == "PENDING"
    jobs.run("scancel", soon, first)
    assert jobs.placed(waits).keys() == {"n1", "n2"}
    jobs.assert_sound()


@on_both_versions
def test_segments_are_kept_whole(jobs: Jobs) -> None:
    """Slurm's own --segment where it has one, Sluice's where not: stock Slurm would take n2 and n4."""
    first, _ = jobs.start("-w", "n1", "--gres=gpu:8")
    jobs.start("-w", "n3", "--gres=gpu:8")
    before = jobs.counters()
    waits = jobs.submit("-N2", "-n2", "--gres=gpu:8", "--segment=2")
    until(lambda: jobs.counters()["refused"], lambda refused: refused > before["refused"] + 1)
    assert jobs.state(waits) == "PENDING"
    jobs.run("scancel", first)
    assert jobs.placed(waits).keys() == {"n1", "n2"}
    jobs.assert_sound()


@on_both_versions
def test_stock_slurms_choice_is_refused_that_splits_a_segment(jobs: Jobs, root: dict[str, Path]) -> None:
    """Nodes by name are chosen by stock Slurm. Only Slurm's own --segment comes that far."""
    if not root:  # 22.05
        refused = jobs.cluster.run(
            ["sbatch", "-N2", "-w", "n[1,3]", "--gpus-per-node=8", "--segment=2", jobs.script], check=False
        )
        assert "--segment=2: not in a heterogeneous job, with --nodelist" in refused.stderr
        return
    before = jobs.counters()["layout_refused"]
    waits = jobs.submit("-N2", "-n2", "-w", "n[1,3]", "--gres=gpu:8", "--segment=2")
    until(lambda: jobs.counters()["layout_refused"], lambda refused: refused > before)
    assert jobs.state(waits) == "PENDING"


@on_both_versions
@pytest.mark.parametrize("test_only", [["--test-only"], []])
def test_segments_that_never_fit_are_refused_at_submission(jobs: Jobs, test_only: list[str]) -> None:
    def refusal(*options: str) -> str:
        return jobs.cluster.run(["sbatch", *test_only, *options, "--gpus-per-node=8", jobs.script], check=False).stderr

    assert "--segment=2: 3 nodes are not whole segments; ask for -N 4" in refusal("-N3", "--segment=2")
    assert "--segment=2: say of how many nodes the job is" in refusal("-n4", "--segment=2")
    assert "configuration is not available" in refusal("-N4", "-n4", "--segment=4")  # two nodes are below each switch
    assert jobs.run("squeue", "-h") == ""


@pytest.fixture
def blocks(jobs: Jobs) -> Iterator[Jobs]:
    """The same cluster with its switches as blocks."""
    folder = jobs.cluster.folder / "slurm"
    before = {folder / name: (folder / name).read_text() for name in ("slurm.conf", "topology.conf")}
    (folder / "slurm.conf").write_text(before[folder / "slurm.conf"].replace("topology/tree", "topology/block"))
    (folder / "topology.conf").write_text("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n")
    jobs.cluster.restart_slurmctld()
    yield jobs
    for path, text in before.items():
        path.write_text(text)
    jobs.clear()
    jobs.cluster.restart_slurmctld()


@pytest.mark.parametrize("root", [NEWER], indirect=True, scope="module")
def test_a_job_that_fits_into_one_block_is_planned_in_one(blocks: Jobs) -> None:
    """Stock Slurm starts it nowhere else: it would refuse each start on n2 and n4."""
    first, _ = blocks.start("-w", "n1", "--gres=gpu:8", "-t60")
    blocks.start("-w", "n3", "--gres=gpu:8", "-t60")
    before = blocks.counters()
    waits = blocks.submit("-N2", "-n2", "--gres=gpu:8", "-t10")
    until(lambda: blocks.counters()["asked"], lambda asked: asked > before["asked"] + 5)
    until(lambda: fresh_status(blocks.cluster)["counters"]["plan.reserved"], lambda reserved: reserved == 1)
    assert blocks.counters()["fell_back"] == before["fell_back"]
    blocks.run("scancel", first)
    assert blocks.placed(waits).keys() == {"n1", "n2"}
    blocks.assert_sound()


@on_both_versions
def test_nobody_is_preempted_for_a_segment_that_would_be_split(jobs: Jobs) -> None:
    """What may be preempted is one node below each switch: stock Slurm would end both jobs, each time it is asked."""
    for node in ("n1", "n3"):
        jobs.start("-p", "high", "-w", node, "--gres=gpu:8")
    low = [jobs.start("-w", node, "--gres=gpu:8", "--requeue")[0] for node in ("n2", "n4")]
    before = jobs.counters()
    waits = jobs.submit("-p", "high", "-N2", "-n2", "--gres=gpu:8", "--segment=2")
    until(lambda: jobs.counters()["asked"], lambda asked: asked > before["asked"] + 5)
    assert [jobs.state(job) for job in (waits, *low)] == ["PENDING", "RUNNING", "RUNNING"]
    assert jobs.counters()["preempted"] == before["preempted"]
    assert "Requeue=1 Restarts=0" in jobs.shown(low[0])


@on_both_versions
def test_preempts_as_few_as_it_can(jobs: Jobs) -> None:
    """Small jobs fill one node, large ones the others: one large job goes, and none of the small ones."""
    small = [jobs.submit("-N1", "--gres=gpu:1", "--requeue") for _ in range(8)]
    for job in small:
        jobs.wait(job)
    large = [jobs.submit("-N1", "--gres=gpu:8", "--requeue") for _ in range(3)]
    for job in large:
        jobs.wait(job)
    high, placed = jobs.start("-p", "high", "-N1", "--gres=gpu:8")
    until(lambda: "COMPLETING" not in [jobs.state(job) for job in small + large])
    waiting = [job for job in small + large if jobs.state(job) == "PENDING"]
    assert len(waiting) == 1
    assert waiting[0] in large
    assert placed.keys() & {"n1", "n2", "n3", "n4"}


def test_who_may_preempt_delays_no_reserved_start_of_its_own_rank(jobs: Jobs) -> None:
    """With one preemptable job anywhere, Slurm asks about each job of a high partition as about one that preempts."""
    busy = [jobs.start("-p", "high", "-N1", "--gres=gpu:8", limit)[0] for limit in ("-t10", "-t60", "-t60")]
    low, placed = jobs.start("-N1", "--gres=gpu:1", "-t5", "--requeue")
    large = jobs.submit("-p", "high", "-N2", "-n2", "--gres=gpu:8", "-t10")
    plans = fresh_status(jobs.cluster)["counters"]["plan.plans"]
    until(lambda: fresh_status(jobs.cluster)["counters"]["plan.plans"] >= plans + 3)  # it has its reserved start
    # Nobody of its own partition waits: Slurm asks about an allocation at once, whatever else waits.
    at_once = ["salloc", "--immediate=1", "--no-shell", "-p", "urgent", "-N1", "--gres=gpu:1"]
    assert "Unable to allocate" in jobs.cluster.run([*at_once, "-t60"], check=False).stderr
    short, beside = jobs.start("-p", "urgent", "-N1", "--gres=gpu:1", "-t1")
    assert beside.keys() == placed.keys()
    assert [jobs.state(job) for job in (large, low)] == ["PENDING", "RUNNING"]
    jobs.run("scancel", busy[0], short)
    jobs.wait(large)  # with what the low one had
    jobs.assert_sound()


@on_both_versions
def test_nobody_starts_with_nothing_allocated(jobs: Jobs) -> None:
    """A job names a node that still completes another. Stock Slurm, looking for whom to preempt, takes that node for
    free: it would have the job start without nodes, and log an error."""
    began = len(jobs.cluster.log("slurmctld@ctl1").read_text())
    preemptable, _ = jobs.start("-w", "n1", "--gres=gpu:1", "--requeue")
    before, trapped = jobs.counters()["nothing_allocated"], jobs.cluster.folder / "scratch/trapped"
    for _ in range(5):  # the moment passes
        trapped.unlink(missing_ok=True)
        wrap = "--wrap=trap '' TERM; touch /run/sluice-cluster/scratch/trapped; sleep 600"
        stubborn = jobs.run("sbatch", "--parsable", "-o/dev/null", "-wn2", wrap).strip()
        until(trapped.exists)
        named = ["sbatch", "--parsable", "-o/dev/null", "-phigh", "-wn2", "--gres=gpu:8", "--wrap=true"]
        high = jobs.shell(f"scancel {stubborn}; {shlex.join(named)}").strip()
        jobs.wait(high, "COMPLETED", patience=60)
        if jobs.counters()["nothing_allocated"] > before:
            break
    else:
        raise AssertionError("the job was never looked at while the node was completing")
    assert jobs.state(preemptable) == "RUNNING"
    assert "failed to set job resources" not in jobs.cluster.log("slurmctld@ctl1").read_text()[began:]
    jobs.assert_sound()


# ---- what the hook leaves to stock Slurm ----


def test_required_nodes_pass_through(jobs: Jobs) -> None:
    jobs.start("-N1", "--gres=gpu:1")
    before = jobs.counters()
    _, there = jobs.start("-w", "n3", "--gres=gpu:1")
    counters = jobs.assert_sound()
    assert there.keys() == {"n3"}
    assert counters["stock_alone.required_nodes"] > before["stock_alone.required_nodes"]


def test_spread_jobs_with_gpus_for_all_nodes_do_not_end_slurmctld(jobs: Jobs) -> None:
    """They end slurmctld 24.11 without Sluice: it writes through a null pointer. There they are not spread."""
    request = ("-N1-2", "-n2", "--gpus=3", "--spread-job")
    _, placed = jobs.start(*request)
    assert sum(map(len, placed.values())) == 3
    assert "is UP" in jobs.run("scontrol", "ping")
    jobs.level("admit")
    try:
        job = jobs.submit(*request)
        jobs.wait(job)
        assert sum(map(len, jobs.placed(job).values())) == 3
    finally:
        jobs.level("place")
    assert "is UP" in jobs.run("scontrol", "ping")


def test_heterogeneous_jobs_pass_through(jobs: Jobs) -> None:
    before = jobs.counters()
    job = jobs.submit("-N1", "--gres=gpu:2", ":", "-N1", "--gres=gpu:3")
    jobs.wait(job)
    assert jobs.shown(job).count("JobState=RUNNING") == 2
    counters = jobs.assert_sound()
    assert counters["stock_alone.heterogeneous"] > before["stock_alone.heterogeneous"]


def test_full_cluster_refuses_without_stock(jobs: Jobs) -> None:
    """With all GPUs taken the core says so alone, and stock Slurm, asked as well, agrees each time."""
    jobs.start("-N4", "-n4", "--gres=gpu:8")
    before = jobs.counters()
    waiting = [jobs.submit("-N1", f"--gres=gpu:{1 + n % 4}") for n in range(10)]
    waiting.append(jobs.submit("-N1", "--gres=shard:1000"))
    both = ("refused", "cross_checked")
    until(jobs.counters, lambda now: all(now[name] > before[name] for name in both))
    jobs.assert_sound()
    assert {jobs.state(job) for job in waiting} == {"PENDING"}


# ---- levels ----


def test_shadow_records_and_leaves_the_choice_to_stock(jobs: Jobs) -> None:
    _, four = jobs.start("-N1", "--gres=gpu:4")
    jobs.start("-N1", "--gres=gpu:6")
    jobs.level("shadow")
    try:
        before = jobs.counters()
        _, two = jobs.start("-N1", "--gres=gpu:2")
        counters = jobs.assert_sound()
    finally:
        jobs.level("place")
    assert two.keys() == four.keys()
    assert counters["shadowed"] > before["shadowed"]
    assert counters["narrowed"] == before["narrowed"]
    assert counters["index_asked"] == before["index_asked"]


def test_off_is_stock(jobs: Jobs, make_cluster: Callable[..., DevCluster], root: dict[str, Path]) -> None:
    """The same jobs one after the other: with the plugins at level off, and without any plugin."""
    requests = [
        "-N1 --gres=gpu:3",
        "-N1 --gres=gpu:2",
        "-N1 --gres=shard:30000",
        "-N1 --gres=gpu:4",
        "-N2 --gres=gpu:1 -n2",
        "-N1 --gres=gpu:2",
        "-N1 --gres=shard:9000",
        "--gpus=3 -n1",
    ]
    stock = Jobs(make_cluster(_description(None), **root))
    expected = [stock.placed(stock.submit(*request.split())) for request in requests]
    jobs.level("off")
    try:
        before = jobs.counters()
        found = [jobs.placed(jobs.submit(*request.split())) for request in requests]
        after = jobs.counters()
    finally:
        jobs.level("place")
    assert found == expected
    assert before == after


# ---- 22.05's choice of shares ----


def test_shares_stay_off_gpus_that_are_held_whole(jobs: Jobs) -> None:
    """Slurm 22.05 may give shares of a GPU that is held whole, when the job's cores are on the other socket."""
    half = int(re.search(r"CPUTot=(\d+)", jobs.run("scontrol", "show", "node", "n1")).group(1)) // 2  # type: ignore[union-attr]
    whole, gpus = jobs.start("-w", "n1", "--gres=gpu:4", f"-c{half}")
    (socket,) = {gpu // 4 for gpu in gpus["n1"]}
    jobs.run("scontrol", "update", f"job={whole}", "timelimit=50")
    share, shared = jobs.start("-w", "n1", "--gres=shard:1000", "-c2")
    assert shared["n1"].isdisjoint(gpus["n1"]), (socket, share)
    _, others = jobs.start("-w", "n1", "--gres=gpu:3", "-c2")
    assert others["n1"].isdisjoint(gpus["n1"] | shared["n1"])
    assert jobs.assert_sound()["mirror_mismatches"] == 0


# ---- the mirror ----


@on_both_versions
def test_mirror_follows_whatever_happens(jobs: Jobs) -> None:
    """Churn, suspend, requeue, resize, drain, reconfigure, restart: at every decision it equals Slurm's records."""
    rng = random.Random(11)
    rounds = 200 if FULL else 12
    kinds = ["-N1 --gres=gpu:1", "-N1 --gres=gpu:4", "-N1 --gres=gpu:8", "-N1 --gres=shard:20000",
             "-N2 -n2 --gres=gpu:2", "--gpus=3", "-N1 --exclusive", "-N1 -c8",
             "-N1 --gres=gpu:2 --cpus-per-gpu=4", "-N1 --gres=gpu:1 --mem=50000",
             "--array=1-3 --gres=gpu:1", "-N1-2 --gres=gpu:1",
             "-N1 --gpu-mem=1G --gpu-share=60", "-N1 --gpus=1 --gpu-share=50"]  # fmt: skip
    running = "$(squeue -h -t R -o %A | sort -R | head -1)"
    events = [
        "squeue -h -o %A | sort -R | head -3 | xargs -r scancel",
        f"j={running}; scontrol suspend $j && sleep 0.5 && scontrol resume $j; true",
        f"j={running}; scontrol requeue $j; true",
        "scontrol update nodename=n2 state=drain reason=test; sleep 0.5; scontrol update nodename=n2 state=resume",
        "scontrol reconfigure",
        "j=$(sbatch --parsable -N2 -n2 --gres=gpu:1 -o /dev/null SCRIPT 3); sleep 1; "
        "scontrol update job=$j numnodes=1; true",
    ]
    earlier = Counter[str]()  # of slurmctlds that ended: a reconfiguration of 24.11 starts another
    last = Counter[str]()

    def counted() -> Counter[str]:
        """The counters, with those of slurmctlds that ended, as they were read last."""
        nonlocal earlier, last
        now = jobs.counters()
        earlier, last = earlier + (last if now["asked"] < last["asked"] else Counter()), now
        return earlier + last

    def counted_enough() -> bool:
        """Jobs go on being submitted until then: without any, there is nothing to decide and to count."""
        now = counted()
        enough = now["checks"] > 50 and now["cross_checked"] > 0
        if not enough:
            jobs.shell(f"sbatch -Q -o /dev/null --array=1-9 -N1 --gres=gpu:4 {jobs.script} 1")
        return enough

    for number in range(rounds):
        batch = [
            f"sbatch -Q -o /dev/null {rng.choice(kinds)} {jobs.script} {rng.choice([1, 2, 4])} || true"
            for _ in range(6)
        ]
        event = events[number % len(events)].replace("SCRIPT", jobs.script)
        if "state=resume" in event:  # of which 24.11 makes an error before the node has registered
            jobs.cluster.wait_registered()
        jobs.shell("; ".join([*batch, event]))
        if number == rounds // 2:
            jobs.assert_sound()
            jobs.cluster.restart_slurmctld()
        counted()
    until(counted_enough)
    jobs.assert_sound()
    counters = counted()
    assert (counters["check_failures"], counters["cross_wrong"]) == (0, 0)
    assert counters["index_kept"] >= 0.99 * counters["index_asked"]


def test_mirror_holds_no_cores_that_slurm_lost_with_a_suspended_job(jobs: Jobs) -> None:
    """At a reconfiguration Slurm 22.05 enters jobs' cores again: those of a job that got a suspended one's are free."""
    suspended, _ = jobs.start("-w", "n1", "-c2")
    jobs.run("scontrol", "suspend", suspended)
    jobs.start("-w", "n1", "--exclusive")
    jobs.run("scontrol", "resume", suspended)
    jobs.run("scontrol", "reconfigure")
    for _ in range(3):
        jobs.start("-N1", "--gres=gpu:1")
    jobs.assert_sound()
    jobs.clear()
    jobs.run("scontrol", "reconfigure")  # stock Slurm lets nobody share the node's cores before


def test_mirror_counts_cores_once_that_several_jobs_have(jobs: Jobs) -> None:
    """Jobs that oversubscribe come and go, each with other cores: the mirror is compared before every question."""
    total = int(re.search(r"CPUTot=(\d+)", jobs.run("scontrol", "show", "node", "n1")).group(1))  # type: ignore[union-attr]
    share = ["-p", "share", "--oversubscribe", "-w", "n1"]
    large, _ = jobs.start(*share, f"-c{total - 8}", "-t50")
    small, _ = jobs.start(*share, "-c16", "-t20")  # more than the first one leaves
    several = [jobs.start(*share, "-c4", f"-t{minutes}")[0] for minutes in (10, 30)]
    jobs.start("-w", "n2")
    jobs.run("scancel", large)
    jobs.wait(large, "CANCELLED")
    jobs.start("-w", "n2")
    jobs.run("scontrol", "suspend", small)
    jobs.start("-w", "n2")
    jobs.assert_sound()  # 24.11 counts again
    jobs.run("scontrol", "reconfigure")
    jobs.start("-w", "n2")
    jobs.run("scancel", several[0])
    jobs.wait(several[0], "CANCELLED")
    jobs.start("-w", "n2")
    assert jobs.assert_sound()["checks"] > 0


def test_claims_on_compute_that_stock_slurm_let_exceed_a_gpu_are_counted_as_others_end(jobs: Jobs) -> None:
    def claim(percent: int) -> list[str]:
        return ["-N1", "--gpu-mem=1G", f"--gpu-share={percent}"]

    jobs.start("-w", "n[2-4]", "-N3", "-n3", "--gres=gpu:8")
    jobs.start("-w", "n1", "--gres=gpu:7")
    jobs.level("shadow")
    try:
        first, one = jobs.start(*claim(60))
        _, other = jobs.start(*claim(60))
    finally:
        jobs.level("place")
    assert one == other
    before = jobs.counters()["refused"]
    waiting = jobs.submit(*claim(41))
    until(jobs.counters, lambda now: now["refused"] > before)
    jobs.run("scancel", first)
    jobs.wait(first, "CANCELLED")
    _, beside = jobs.start(*claim(40))
    assert beside == one
    assert jobs.state(waiting) == "PENDING"
    assert jobs.assert_sound()["checks"] > 0


def test_gpus_in_use_by_type_are_right_after_a_restart(jobs: Jobs) -> None:
    """Stock Slurm 22.05 forgets them: later jobs' ends, simulated ones too, then count below nothing."""
    began = len(jobs.cluster.log("slurmctld@ctl1").read_text())
    old = [jobs.submit("-w", "n1", "--gres=gpu:1") for _ in range(3)]
    for job in old:
        jobs.wait(job)
    jobs.cluster.restart_slurmctld()
    new = [jobs.submit("-w", "n1", "--gres=gpu:1") for _ in range(2)]
    for job in new:
        jobs.wait(job)
    jobs.shell("sbatch --test-only -w n1 --gres=gpu:8 --wrap=true")  # ends of all are simulated
    jobs.run("scancel", *old)
    for job in old:
        jobs.wait(job, "CANCELLED")
    jobs.clear()
    assert "underflow" not in jobs.cluster.log("slurmctld@ctl1").read_text()[began:]
    jobs.assert_sound()


def test_a_heterogeneous_job_waits_as_a_whole_for_a_node_that_has_not_registered(jobs: Jobs) -> None:
    """sched/backfill would start one component, be refused the other, and put off the first for two minutes."""
    for job in [jobs.submit("-w", node, "--gres=gpu:1") for node in ("n1", "n2")]:
        jobs.wait(job)
    log = jobs.cluster.log("slurmctld@ctl1")
    began = len(log.read_text())
    slurmd = str(next(one.pid for one in jobs.cluster.daemons() if one.name == "slurmd@n2"))
    jobs.cluster.stop_daemon("slurmctld@ctl1")
    jobs.cluster.start_daemon("slurmctld@ctl1")
    try:
        jobs.shell("squeue -h -o %i | xargs scancel -s USR1")  # which both nodes answer: they may have jobs
        states = ("sinfo", "-h", "-N", "-n", "n[1-2]", "-o", "%t")
        until(lambda: set(jobs.run(*states).split()), lambda seen: seen == {"mix"})
        jobs.run("kill", "-STOP", slurmd)  # before it is asked to register, where this machine is quick
        words = ["sbatch", "--parsable", "-o/dev/null", "-wn1", ":", "-wn2", "--gres=gpu:1"]
        het = jobs.run(*words, "--wrap=exec sleep 600").strip()
        passes = jobs.backfill_passes()
        # It makes none when both have started: on a slow machine the node has registered.
        until(lambda: jobs.state(f"{het}+1") == "RUNNING" or jobs.backfill_passes() >= passes + 2)
    finally:
        jobs.run("kill", "-CONT", slurmd)
    for component in (f"{het}+0", f"{het}+1"):
        jobs.wait(component)
    assert "hetjob start failure" not in log.read_text()[began:]


def test_gpus_are_free_that_jobs_held_while_no_node_had_registered(jobs: Jobs) -> None:
    """After a restart stock Slurm 22.05 uses a node on which a job runs before it has registered: it starts
    jobs on no GPU in particular, and some stay in use when those have ended, until the next reconfigure."""
    kinds = (["-w", "n1", "--gres=gpu:8"], ["-w", "n2", "--gres=gpu:8"], ["-w", "n3", "--gres=gpu:8"])
    (jobs.cluster.folder / "scratch/go").unlink(missing_ok=True)
    batch = ["sbatch", "--parsable", "-n1", "-c2", "-o", "/dev/null", f"--wrap={lasts_until(GO)}"]
    for job in [jobs.run(*batch, *kind).strip() for kind in (*kinds, ["-w", "n4", "--gres=gpu:3"])]:
        jobs.wait(job)
    several = (["-w", "n4", "--gres=gpu:3"], ["--gpus=3"], ["-N2", "-n2", "--gres=gpu:2"])
    waiting = [jobs.submit(*kind, seconds=1) for kind in (*kinds, *several)]
    jobs.cluster.stop_daemon("slurmctld@ctl1")
    (jobs.cluster.folder / "scratch/go").touch()  # they end, and are the first that it hears of
    jobs.cluster.start_daemon("slurmctld@ctl1")
    jobs.cluster.wait_registered()
    for job in waiting:
        jobs.wait(job, "COMPLETED")
    whole = [jobs.submit("-w", node, "--gres=gpu:8") for node in ("n1", "n2", "n3", "n4")]
    for job in whole:
        jobs.wait(job)
    jobs.clear()
    shown = jobs.run("scontrol", "-d", "show", "node")
    assert re.findall(r"GresUsed=gpu:h100:(\d+)", shown) == ["0"] * 4, shown
    jobs.assert_sound()
