"""The planner on real daemons: reserved starts are kept, and who waits for one holds nobody up who need not wait."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from policy.compiled import Budget, CompiledPolicy, Global, GpuClass, Tenant
from sluice.base.files import write_atomic
from sluice.base.hostlist import expand
from sluice.exchange.plugin_list import checksummed
from sluice.exchange.saves import PLUGINS_FILE, JobSaves, Saves, write_for_plugins
from sluice.explain.explanation import explain_job, parse_job
from sluice.explain.moves import leaving, sentences, site_emptying, site_moves
from tests.integration.jobs import submit
from tests.integration.settled import (
    await_policy,
    block_saving,
    lasts_until,
    let_it_save,
    looping,
    set_level,
    status,
    until,
)
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

_GATES = itertools.count(1)

POLICY = CompiledPolicy(
    settings=Global(
        planner_interval_ms=500,
        journal=True,
        compaction_wait_s=1,  # only jobs that have saved are moved: those of the tests below
        compaction_factor_permille=1,
        compaction_move_cost_s=1,
        compaction_save_s=10,
        compaction_moves_per_hour=64,
        compaction_empty_within_s=3600,
    ),
    tenants=[Tenant(account="physics"), Tenant(account="narrow")],
).render()


def _description() -> dict[str, Any]:
    return {
        "nodes": [{"names": "n[1-3]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}, {"name": "narrow"}],
        "users": [
            {"name": "alice", "accounts": ["physics"]},
            {"name": "bob", "accounts": ["physics"]},
            {"name": "carol", "accounts": ["narrow"]},
        ],
        "controllers": 1,
        "sluice": {"level": "place", "policy": POLICY},
        # so rarely that whatever starts was started by the planner, or by the pass that follows a submission or an end
        "slurm_conf": "DefMemPerCPU=100\nLicenses=solver:1\nSchedulerParameters=bf_interval=300,sched_interval=300\n"
        "AuthInfo=cred_expire=40\nKillWait=30\n"
        "PriorityWeightPartition=1000\n",  # every job's priority is 1000, less what --nice takes
    }


class Cluster:
    """Submits jobs and looks at them."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster

    def submit(
        self, gpus: int, minutes: int, seconds: float, *options: str, user: str = "alice", first: str = ""
    ) -> str:
        """A job; with what it does `first` it ends so many seconds after that."""
        script = f"{first or ':'}; exec sleep {seconds}"
        return submit(self.cluster, f"--gres=gpu:{gpus}", f"-t{minutes}", *options, wrap=script, user=user)

    def gate(self) -> tuple[str, Path]:
        """What jobs do first that wait for a file, and the file, so that all of them run however long that takes."""
        name = f"gate{next(_GATES)}"
        return lasts_until(INSIDE / name), self.cluster.folder / name

    def states(self, jobs: list[str]) -> list[str]:
        lines = self.cluster.run(["squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", "%i|%T"]).stdout.split()
        known = dict(line.split("|") for line in lines)
        return [known.get(job, "GONE") for job in jobs]

    def start(self, job: str) -> float | None:
        """When it starts or is expected to, in seconds since 1970."""
        words = self.cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%S"]).stdout.split()
        return datetime.datetime.fromisoformat(words[0]).timestamp() if words and words[0] != "N/A" else None

    def counter(self, name: str) -> int:
        return int(until(lambda: status(self.cluster))["counters"][name])

    def planned(self) -> None:
        """Wait for plans of which one was begun after this call. Counters are written once a second only."""
        called, made = time.time(), self.counter("plan.plans")
        until(
            lambda: (self.counter("plan.last_s"), self.counter("plan.plans")),
            lambda seen: seen[0] > called and seen[1] >= made + 3,
        )

    def is_planned(self, job: str) -> bool:
        """Does the plan have a start for it?"""
        told = explain_job(self.cluster.layout.state / "sluice.records", parse_job(job)) or {}
        return told.get("waiting", {}).get("plan", {}).get("expected_start") is not None

    def backfill_passes(self) -> int:
        """Since the daemon's start."""
        figures = self.cluster.run(["sdiag"]).stdout.partition("Backfilling stats")[2]
        return int(figures.partition("Total cycles:")[2].split()[0])

    def await_backfill(self, count: int) -> None:
        """So many more passes of sched/backfill, which makes none while nothing waits that may start."""
        before = self.backfill_passes()
        until(self.backfill_passes, lambda seen: seen >= before + count)

    def queue(self) -> str:
        """For an error: what waits and runs, how often a start was refused, and what slurmctld logged last."""
        jobs = self.cluster.run(["squeue", "-h", "-r", "-o", "%i %u %T %r %N %S"]).stdout
        return f"{jobs}not started: {self.counter('plan.not_started')}\n{self.cluster.log_tail('slurmctld@ctl1', 60)}"

    def wait(self, jobs: list[str]) -> None:
        until(lambda: self.states(jobs), lambda seen: seen == ["RUNNING"] * len(jobs), shows=self.queue)

    def node(self, job: str) -> str:
        return self.cluster.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()

    def said(self) -> str:
        return self.cluster.log_tail("slurmctld@ctl1", 400)

    def runs(self, job: str) -> list[list[str]]:
        """Start and end of each run, in seconds."""
        rows = self.cluster.run(["sacct", "-nPXD", "-j", job, "-o", "Start,End"]).stdout.split()
        return sorted(row.split("|") for row in rows)

    def clear(self) -> None:
        for user in ("alice", "bob", "carol"):
            self.cluster.run(["scancel", "-u", user])
        until(lambda: self.cluster.run(["squeue", "-h"]).stdout.strip(), lambda left: left == "")


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def slurm(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Cluster]:
    options: dict[str, Path] = {}
    if request.param == "trixie":
        options["root"] = request.getfixturevalue("trixie_root")
    cluster = make_shared_cluster(_description(), **options)
    cluster.run(["sacctmgr", "-i", "modify", "account", "narrow", "set", "GrpJobs=1"])
    cluster.restart_slurmctld()  # which reads the limit
    cluster.wait_idle()
    yield Cluster(cluster)
    cluster.down()


@pytest.fixture(autouse=True)
def _clear(slurm: Cluster) -> Iterator[None]:
    yield
    slurm.clear()


def test_a_reserved_start_is_kept_under_a_stream_of_small_jobs(slurm: Cluster) -> None:
    first, gate = slurm.gate()
    busy = [slurm.submit(1, 2, number / 3, first=first) for number in range(24)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 24)
    big = slurm.submit(8, 1, 2, "--nice=500")
    until(lambda: slurm.start(big), bool)  # what it was promised while it was the first
    latest = max(slurm.start(job) or 0 for job in busy) + 120  # when the last of them must have ended
    gate.touch()
    small: list[str] = []
    deadline = time.monotonic() + 60
    while slurm.states([big]) == ["PENDING"]:
        small.append(slurm.submit(1, 10, 20, user="bob"))
        assert time.monotonic() < deadline
    started = slurm.start(big)
    assert started is not None
    assert started <= latest
    assert "RUNNING" in until(lambda: slurm.states(small), lambda seen: "RUNNING" in seen)  # those who came after it


def test_without_the_planner_the_same_stream_starves_the_large_job(slurm: Cluster) -> None:
    set_level(slurm.cluster, "admit")
    try:
        first, gate = slurm.gate()
        busy = [slurm.submit(1, 5, number / 3, first=first) for number in range(24)]
        until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 24)
        big = slurm.submit(8, 1, 2, "--nice=500")
        small = [slurm.submit(1, 10, 300, user="bob") for _ in range(24)]
        gate.touch()
        until(lambda: slurm.states(small), lambda seen: seen == ["RUNNING"] * 24)
        assert slurm.states([big]) == ["PENDING"]
    finally:
        set_level(slurm.cluster, "place")


def test_a_waiting_job_at_the_head_stops_nobody_who_delays_nobody(slurm: Cluster) -> None:
    busy = slurm.submit(8, 5, 280)
    until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
    wide = slurm.submit(8, 5, 280, "-N3")
    until(lambda: slurm.start(wide), lambda start: start is not None and start > time.time() + 200)
    # Of earlier tests: Slurm gives a job back the time that it was CONFIGURING, and who waits for its end waits longer.
    slurm.planned()
    before = slurm.counter("plan.slipped")
    short = [slurm.submit(4, 1, 2, user="bob") for _ in range(4)]
    until(lambda: slurm.states(short), lambda seen: "PENDING" not in seen)
    long = slurm.submit(1, 30, 2, user="bob")
    slurm.planned()
    assert slurm.states([wide, long]) == ["PENDING", "PENDING"]
    slurm.planned()
    assert slurm.counter("plan.slipped") == before
    slurm.cluster.run(["scancel", wide])  # its reservation goes with it
    until(lambda: slurm.states([long]), lambda seen: seen != ["PENDING"])


def test_a_job_at_its_limit_keeps_no_gpu_idle(slurm: Cluster) -> None:
    first = slurm.submit(1, 5, 280, user="carol")
    until(lambda: slurm.states([first]), lambda seen: seen == ["RUNNING"])
    limited = [slurm.submit(8, 5, 280, user="carol") for _ in range(3)]
    others = [slurm.submit(8, 5, 280) for _ in range(2)]
    until(lambda: slurm.states(others), lambda seen: seen == ["RUNNING"] * 2)
    assert slurm.states(limited) == ["PENDING"] * 3


def test_nothing_is_planned_where_nothing_may_start(slurm: Cluster) -> None:
    first, gate = slurm.gate()
    busy = [slurm.submit(8, 3, 1, f"-wn{number}", first=first) for number in (1, 2)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 2)
    slurm.cluster.run(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test"])
    try:
        job = slurm.submit(8, 1, 2)
        expected = until(lambda: slurm.start(job), lambda start: start is not None)
        assert expected > time.time() + 20  # when n1 or n2 is free at the latest, not now on n3
        gate.touch()
        until(lambda: slurm.states([job]), lambda seen: seen != ["PENDING"])
    finally:
        slurm.cluster.run(["scontrol", "update", "NodeName=n3", "State=RESUME"])


def test_a_request_that_the_core_does_not_take_costs_nobody_the_plan(slurm: Cluster) -> None:
    busy = [slurm.submit(8, 5, 280) for _ in range(3)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 3)
    failures = slurm.counter("plan.failures")
    for wanted, nodes in (("--gpus=2", 3), ("-n448", "1-1")):  # fewer GPUs than nodes; more CPUs than the nodes have
        odd = submit(slurm.cluster, wanted, "-t5", wrap="exec sleep 280", user="alice")
        slurm.cluster.run(["scontrol", "update", f"JobId={odd}", f"NumNodes={nodes}"], user="alice")
    plans = slurm.counter("plan.plans")
    job = slurm.submit(8, 5, 280, "--nice=10")
    until(lambda: slurm.counter("plan.plans"), lambda now: now >= plans + 3)
    until(lambda: slurm.start(job), lambda start: start is not None and start > time.time() + 60)
    assert slurm.counter("plan.failures") == failures


def test_features_in_parentheses_are_planned_as_slurm_reads_them(slurm: Cluster) -> None:
    for node, features in (("n1", "left,middle"), ("n2", "middle"), ("n3", "right")):
        slurm.cluster.run(
            ["scontrol", "update", f"NodeName={node}", f"AvailableFeatures={features}", f"ActiveFeatures={features}"]
        )
    try:
        busy = slurm.submit(8, 5, 280, "-Cleft")
        until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
        refused = slurm.counter("plan.not_started")
        job = slurm.submit(1, 1, 2, "-Cleft&(middle|right)")  # (left&middle)|right would have it on n3 now
        until(lambda: slurm.start(job), lambda start: start is not None and start > time.time() + 200)
        assert slurm.counter("plan.not_started") == refused
    finally:
        slurm.cluster.run(["scontrol", "update", "NodeName=n[1-3]", "ActiveFeatures=", "AvailableFeatures="])


def test_nodes_that_are_kept_for_one_user_are_not_planned_for_others(slurm: Cluster) -> None:
    kept = [
        slurm.submit(1, 5, 280, "-w", node, *mode) for node, *mode in (("n1", "--exclusive=user"), ("n2",), ("n3",))
    ]
    until(lambda: slurm.states(kept), lambda seen: seen == ["RUNNING"] * 3)
    failed = slurm.counter("plan.not_started")
    # alice is on all nodes
    wait = [slurm.submit(1, 1, 2, mode, user="bob") for mode in ("-N3", "--exclusive=user")]
    other = slurm.submit(1, 1, 280, user="bob")
    until(lambda: slurm.states([other]), lambda seen: seen == ["RUNNING"])
    slurm.planned()
    assert slurm.counter("plan.not_started") == failed
    assert slurm.states(wait) == ["PENDING"] * 2
    assert slurm.cluster.run(["squeue", "-h", "-j", other, "-o", "%N"]).stdout.strip() != "n1"


def test_an_array_keeps_no_room_for_tasks_that_its_user_holds_back(slurm: Cluster) -> None:
    array = slurm.submit(8, 5, 280, "--array=0-9%1")
    words = ["squeue", "-h", "-r", "-t", "R", "-j", array, "-o", "%T"]
    until(lambda: slurm.cluster.run(words, check=False).stdout.split(), lambda running: len(running) == 1)
    others = [slurm.submit(8, 5, 280, user="bob") for _ in range(2)]
    until(lambda: slurm.states(others), lambda seen: seen == ["RUNNING"] * 2)
    assert len(slurm.cluster.run(words).stdout.split()) == 1


def test_tasks_of_an_array_start_as_room_comes(slurm: Cluster) -> None:
    array = slurm.submit(8, 1, 1, "--array=0-6")
    words = ["squeue", "-h", "-r", "-t", "PD,R,CF,CG", "-j", array, "-o", "%T"]
    until(lambda: slurm.cluster.run(words, check=False).stdout.split(), lambda left: not left)


@pytest.mark.parametrize(
    "asked",
    [["-N3", "--exclusive"], ["-wn2", "--exclusive"], ["-n448"], ["--gpus=20"]],
    ids=["whole-nodes", "nodelist", "many-cpus", "many-gpus"],
)
def test_what_slurm_alone_finds_nodes_for_is_not_overtaken(slurm: Cluster, asked: list[str]) -> None:
    """Its room is reserved, and small jobs after it fill the nodes only where it needs none of them."""
    first, gate = slurm.gate()
    busy = [slurm.submit(8, 3, 1, "--exclusive", first=first) for _ in range(3)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 3)
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-t1", *asked, "--wrap=exec sleep 30"]
    job = slurm.cluster.run(words, user="alice").stdout.strip()
    slurm.submit(1, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    until(lambda: slurm.start(job), lambda start: start is not None and start > time.time() + 20, shows=slurm.queue)
    gate.touch()
    until(lambda: slurm.states([job]), lambda seen: seen == ["RUNNING"], shows=slurm.queue)


def test_a_deadline_bounds_a_job_without_a_time_limit(slurm: Cluster) -> None:
    busy = slurm.submit(8, 5, 280)
    until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
    wide = slurm.submit(8, 5, 280, "-N3")  # the head of the partition, so that the planner starts what comes after it
    until(lambda: slurm.start(wide), lambda start: start is not None and start > time.time() + 200)
    words = ["sbatch", "--parsable", "-o", "/dev/null", "--gres=gpu:1", "--deadline=now+3minutes", "--wrap=sleep 150"]
    job = slurm.cluster.run(words, user="bob").stdout.strip()
    until(lambda: slurm.states([job]), lambda seen: seen == ["RUNNING"])
    assert slurm.cluster.run(["squeue", "-h", "-j", job, "-o", "%l"]).stdout.strip() in ("2:00", "3:00")


IDLE_W, FULL_W = 100, 700  # of a GPU; budgets count the 24 idle ones
ALL_IDLE_W = 24 * IDLE_W


@pytest.fixture
def budgets(slurm: Cluster) -> Iterator[Callable[..., None]]:
    """A function that puts power budgets in force, and what is known of jobs' power (lines of sluice.power)."""
    folder, draws = slurm.cluster.layout.slurm, slurm.cluster.layout.state / "sluice.power"

    def put(*wanted: Budget, least: int = 0, known: str = "") -> None:
        write_atomic(draws, checksummed(f"sluice-power 1\n{known}"))
        h100 = GpuClass(
            name="big", gpu_types=["h100"], power_default_w=FULL_W, power_idle_w=IDLE_W, power_start_least_w=least
        )
        tenants = [Tenant(account="physics"), Tenant(account="narrow")]
        policy = CompiledPolicy(
            settings=Global(planner_interval_ms=500), classes=[h100], tenants=tenants, budgets=list(wanted)
        )
        policy.write(folder / "sluice.policy")
        await_policy(slurm.cluster)
        time.sleep(1.5)  # the planner's next passes have it, and sluice.power, which is looked at each half second

    yield put
    draws.unlink()
    write_atomic(folder / "sluice.policy", POLICY)
    await_policy(slurm.cluster)


def _explained(slurm: Cluster, job: str) -> str:
    return str(explain_job(slurm.cluster.layout.state / "sluice.records", parse_job(job)))


def test_jobs_wait_for_watts(slurm: Cluster, budgets: Callable[..., None]) -> None:
    """Eight GPUs draw the whole budget: two more wait on idle nodes, by whichever way they would start, until there are
    watts; then they start. A budget that is lowered stops no job, and starts none."""
    hall = Budget(name="hall", watts=ALL_IDLE_W + 8 * (FULL_W - IDLE_W))
    budgets(hall)
    running = slurm.submit(8, 5, 280)
    until(lambda: slurm.states([running]), lambda seen: seen == ["RUNNING"])
    waiting = [slurm.submit(2, 1, 30), slurm.submit(2, 1, 30, "-wn3")]  # the second is left to Slurm's own scheduler
    until(lambda: _explained(slurm, waiting[0]), lambda said: f"power budget hall, which has {hall.watts} W" in said)
    time.sleep(3)
    assert slurm.states([running, *waiting]) == ["RUNNING", "PENDING", "PENDING"]
    budgets(hall, known=f"estimate - big 400\njob {running} 300\n")  # they draw less than they may
    until(lambda: slurm.states(waiting), lambda seen: seen == ["RUNNING", "RUNNING"])
    budgets(hall, known=f"estimate - big 400\njob {running} 300\nbudget hall {ALL_IDLE_W} 0\n")
    late = slurm.submit(1, 1, 30)
    time.sleep(3)
    assert slurm.states([running, *waiting, late]) == ["RUNNING", "RUNNING", "RUNNING", "PENDING"]
    budgets()
    until(lambda: slurm.states([late]), lambda seen: seen == ["RUNNING"])


def test_rows_tenants_and_lower_caps(slurm: Cluster, budgets: Callable[..., None]) -> None:
    """A row without watts is passed over for another, a tenant's budget holds up only that tenant, and where the policy
    lets a job start with a cap it starts with what is left."""
    row = Budget(name="row", nodes="n[1-2]", watts=16 * IDLE_W)
    budgets(row, Budget(name="narrow", tenant="narrow", watts=FULL_W))
    on_n3, other = slurm.submit(2, 1, 60), slurm.submit(2, 1, 60, user="carol")
    until(lambda: slurm.states([on_n3]), lambda seen: seen == ["RUNNING"])
    assert slurm.cluster.run(["squeue", "-h", "-j", on_n3, "-o", "%N"]).stdout.strip() == "n3"
    until(lambda: _explained(slurm, other), lambda said: "power budget narrow" in said)
    assert slurm.states([other]) == ["PENDING"]
    slurm.clear()
    budgets(Budget(name="hall", watts=ALL_IDLE_W + 8 * 300), least=300)
    capped = slurm.submit(8, 1, 60)
    until(lambda: slurm.states([capped]), lambda seen: seen == ["RUNNING"])
    log = slurm.cluster.log("slurmctld@ctl1").read_text()
    assert f"JobId={capped} starts with a cap of 400 W on each GPU" in log


# ---- with a sched/backfill that looks every second: once for all of them, as slurmctld starts again ----


@pytest.fixture(scope="module")
def eager_backfill(slurm: Cluster) -> None:
    """From here on: tests that need it come last."""
    file = slurm.cluster.slurm_conf_dir() / "slurm.conf"
    file.write_text(file.read_text().replace("bf_interval=300", "bf_interval=1"))
    slurm.cluster.restart_slurmctld()


@pytest.mark.usefixtures("eager_backfill")
def test_a_heterogeneous_job_that_would_delay_a_reserved_start_is_not_tried(slurm: Cluster) -> None:
    busy = slurm.submit(4, 5, 280, "-wn1")
    until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
    # Its start is reserved by the planner alone: Slurm sees held jobs.
    gang = [slurm.submit(8, 5, 280, "-N1", "--gang=whole:3") for _ in range(3)]
    until(lambda: slurm.start(gang[0]), lambda start: start is not None and start > time.time() + 200)
    words = ["sbatch", "--parsable", "-o/dev/null", "-t30", "-N1", "--gres=gpu:1", ":", "-N1", "--gres=gpu:1"]
    het = slurm.cluster.run([*words, "--wrap=exec sleep 280"], user="bob").stdout.strip()
    slurm.await_backfill(2)  # sched/backfill has looked at it
    assert slurm.states([f"{het}+0", f"{het}+1"]) == ["PENDING"] * 2
    slurm.cluster.run(["scontrol", "hold", het])
    log = slurm.cluster.log("slurmctld@ctl1").read_text()
    assert "accrue_cnt underflow" not in log  # of components that were counted as started, and were not
    slurm.cluster.run(["scancel", *gang])
    slurm.cluster.run(["scontrol", "release", het])
    until(lambda: slurm.states([f"{het}+0", f"{het}+1"]), lambda seen: seen == ["RUNNING"] * 2)


@pytest.mark.usefixtures("eager_backfill")
def test_components_whose_limits_were_tried_in_vain_are_counted_again(slurm: Cluster) -> None:
    """carol may run one job: sched/backfill lets the first component begin and end on trial, and then refuses."""
    words = ["sbatch", "--parsable", "-o/dev/null", "-t30", "-N1", "--gres=gpu:1", ":", "-N1", "--gres=gpu:1"]
    het = slurm.cluster.run([*words, "--wrap=exec sleep 280"], user="carol").stdout.strip()
    for _ in range(3):
        slurm.await_backfill(2)
        assert slurm.states([f"{het}+0", f"{het}+1"]) == ["PENDING"] * 2
        slurm.cluster.run(["scontrol", "hold", het])
        slurm.cluster.run(["scontrol", "release", het])
    assert "accrue_cnt underflow" not in slurm.cluster.log("slurmctld@ctl1").read_text()


@pytest.mark.usefixtures("eager_backfill")
@pytest.mark.parametrize(
    "asked",
    [
        ["-N1", "--exclusive", ":", "-N2", "--exclusive"],
        ["-N3", "--exclusive", "--licenses=solver"],
        ["-N3", "--exclusive", "--contiguous"],
    ],
    ids=["heterogeneous", "licence", "contiguous"],
)
def test_what_is_left_to_backfill_is_not_overtaken(slurm: Cluster, asked: list[str]) -> None:
    """Its start is reserved by sched/backfill, not by the plan: the planner starts nothing that would delay it."""
    first, gate = slurm.gate()
    busy = [slurm.submit(8, 3, 1, "--exclusive", first=first) for _ in range(3)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 3)
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-t1", *asked, "--wrap=exec sleep 30"]
    job = slurm.cluster.run(words, user="alice").stdout.strip()
    slurm.submit(1, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    slurm.submit(0, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    slurm.await_backfill(2)
    slurm.planned()
    gate.touch()
    parts = [f"{job}+0", f"{job}+1"] if ":" in asked else [job]
    until(lambda: slurm.states(parts), lambda seen: seen == ["RUNNING"] * len(parts), timeout=60, shows=slurm.queue)


@pytest.mark.usefixtures("eager_backfill")
@pytest.mark.parametrize("looked", [True, False], ids=["one by one", "one at once"])
def test_a_heterogeneous_job_is_not_overtaken_where_its_nodes_come_free_one_after_the_other(
    slurm: Cluster, looked: bool
) -> None:
    """The second component is expected on the first one's node as well: a third node is kept for none of them.
    `looked`: sched/backfill has looked again before the next one comes free."""
    gates = {f"n{number}": slurm.gate() for number in (1, 2, 3)}
    busy = {node: slurm.submit(8, 3, 0, "--exclusive", f"-w{node}", first=gates[node][0]) for node in gates}
    until(lambda: slurm.states(list(busy.values())), lambda seen: seen == ["RUNNING"] * 3)
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-t1", "-N1", "--exclusive", ":", "-N2", "--exclusive"]
    job = slurm.cluster.run([*words, "--wrap=exec sleep 30"], user="alice").stdout.strip()
    parts = [f"{job}+0", f"{job}+1"]
    slurm.submit(1, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    slurm.await_backfill(2)
    slurm.planned()
    left = set(gates)
    while left:
        kept = slurm.cluster.run(["squeue", "-h", "-j", job, "-O", "SchedNodes:64"]).stdout.split()
        known = {node for one in kept for node in expand(one) if one.startswith("n")}
        node = min(left - known or left)  # one that is kept for no component, if there is one
        left.discard(node)
        gates[node][1].touch()
        if left:
            until(lambda node=node: slurm.states([busy[node]]), lambda seen: seen[0] not in ("RUNNING", "COMPLETING"))
            if looked or len(left) == 2:
                slurm.await_backfill(2)
            slurm.planned()
            bob = slurm.cluster.run(["squeue", "-h", "-t", "running", "-u", "bob"]).stdout
            assert bob == "", slurm.queue()
    until(lambda: slurm.states(parts), lambda seen: seen == ["RUNNING"] * 2, timeout=60, shows=slurm.queue)


@pytest.mark.usefixtures("eager_backfill")
def test_what_the_planner_starts_is_not_on_nodes_that_are_kept_for_others(slurm: Cluster) -> None:
    """n1 is free, and kept: small jobs are planned on n3, and the hook does not choose n1 for them."""
    first, gate = slurm.gate()
    busy = slurm.submit(8, 3, 1, "--exclusive", "-wn2", first=first)
    until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-t1", "-N2", "-wn[1-2]", "--exclusive", "--contiguous"]
    job = slurm.cluster.run([*words, "--wrap=exec sleep 30"], user="alice").stdout.strip()
    slurm.await_backfill(2)
    slurm.planned()
    small = [slurm.submit(1, 10, 280, "--nice=500", user="bob") for _ in range(3)]
    array = slurm.submit(1, 10, 280, "--array=0-8", "--nice=500", user="bob")
    slurm.wait(small)
    slurm.await_backfill(2)
    slurm.planned()
    running = ["squeue", "-h", "-t", "running", "-u", "bob", "-o", "%N"]
    assert slurm.cluster.run(running).stdout.split() == ["n3"] * 8, slurm.queue()
    gate.touch()
    until(lambda: slurm.states([job]), lambda seen: seen == ["RUNNING"], timeout=60, shows=slurm.queue)
    slurm.cluster.run(["scancel", *small])  # tasks that wait may start on n1 and n2 when the job has ended
    pending = ["squeue", "-h", "-r", "-t", "pending", "-j", array, "-o", "%i"]
    until(lambda: slurm.cluster.run(pending).stdout.split(), lambda left: len(left) <= 1, timeout=120)


@pytest.mark.usefixtures("eager_backfill")
def test_many_jobs_late_in_the_order_leave_a_place_for_the_first(slurm: Cluster) -> None:
    """Nodes are kept for 64 jobs that are left to sched/backfill: for the first ones, not for whoever came first."""
    first, gate = slurm.gate()
    busy = [slurm.submit(8, 3, 1, "--exclusive", first=first) for _ in range(3)]
    until(lambda: slurm.states(busy), lambda seen: seen == ["RUNNING"] * 3)
    asked = "sbatch --parsable -o /dev/null -t1 -N3 --exclusive --contiguous"
    many = f"for i in $(seq 64); do {asked} --nice=900 --wrap='exec sleep 30'; done"
    slurm.cluster.run(["sh", "-c", many], user="bob")
    slurm.await_backfill(2)
    slurm.planned()
    job = slurm.cluster.run([*asked.split(), "--wrap=exec sleep 30"], user="alice").stdout.strip()
    slurm.submit(1, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    slurm.submit(0, 10, 280, "-c28", "--array=0-23", "--nice=500", user="bob")
    slurm.await_backfill(2)
    slurm.planned()
    gate.touch()
    until(lambda: slurm.states([job]), lambda seen: seen == ["RUNNING"], timeout=60)


@pytest.mark.usefixtures("eager_backfill")
@pytest.mark.parametrize(
    "asked",
    [["-N1", "--gres=gpu:1", ":", "-N1", "--gres=gpu:1"], ["-N1", "--exclusive", "--contiguous"]],
    ids=["heterogeneous", "contiguous"],
)
def test_a_start_that_is_reserved_for_a_later_job_keeps_no_job_left_to_backfill_waiting(
    slurm: Cluster, asked: list[str]
) -> None:
    """n1 and n3 are free, and reserved for a job of lower priority, which waits for n2."""
    first, gate = slurm.gate()
    busy = slurm.submit(8, 5, 1, "--exclusive", "-wn2", first=first)
    until(lambda: slurm.states([busy]), lambda seen: seen == ["RUNNING"])
    reserved = slurm.submit(8, 2, 2, "-N3", "--nice=500")
    until(lambda: slurm.start(reserved), bool)
    slurm.planned()
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-t10", *asked, "--wrap=sleep 1"]
    job = slurm.cluster.run(words, user="alice").stdout.strip()
    parts = [f"{job}+0", f"{job}+1"] if ":" in asked else [job]
    until(lambda: slurm.states(parts), lambda seen: seen == ["COMPLETED"] * len(parts), timeout=60)
    assert slurm.states([reserved]) == ["PENDING"]
    gate.touch()
    until(lambda: slurm.states([reserved]), lambda seen: seen == ["COMPLETED"], timeout=90)


@pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="takes four minutes")
@pytest.mark.usefixtures("eager_backfill")
def test_a_job_that_never_starts_does_not_keep_its_nodes(slurm: Cluster) -> None:
    """Its components have room one at a time only: sched/backfill expects its start again and again."""
    words = "sbatch --parsable -o /dev/null -t1 -N3 --exclusive : -N1 --exclusive --wrap=true"
    job = slurm.cluster.run(words.split(), user="alice").stdout.strip()
    slurm.await_backfill(2)
    slurm.planned()
    late = slurm.submit(8, 10, 5, "--nice=500", user="bob")
    slurm.await_backfill(2)
    assert slurm.states([late]) == ["PENDING"]
    until(lambda: slurm.states([late]), lambda seen: seen == ["RUNNING"], timeout=400)
    assert slurm.states([f"{job}+0"]) == ["PENDING"]


# ---- jobs that are moved ----

COUNTS = """f={file}; n=$(cat $f 2>/dev/null || echo 0); trap 'echo $n > $f.new; mv $f.new $f' USR1
echo $n >> $f.starts; while :; do n=$((n+1)); pause 0.1; done"""


class Savers:
    """Programs that count, and say so when they are signalled; in place of the controllers' daemon, what they saved."""

    def __init__(self, slurm: Cluster) -> None:
        self.slurm = slurm
        self.files: dict[str, Path] = {}
        (slurm.cluster.folder / "counts").mkdir(exist_ok=True)
        (slurm.cluster.folder / "counts").chmod(0o777)

    def submit(self, gpus: int, script: str = COUNTS) -> str:
        name = f"counter{next(_GATES)}"
        script = looping(script.format(file=INSIDE / "counts" / name))
        job = self.slurm.submit(gpus, 60, 0, first=f"exec {script}")
        self.files[job] = self.slurm.cluster.folder / "counts" / name
        self.slurm.wait([job])
        return job

    def report(self) -> None:
        saved = {int(job): JobSaves(saved=file.stat().st_mtime) for job, file in self.files.items() if file.exists()}
        write_for_plugins(self.slurm.cluster.layout.state / PLUGINS_FILE, Saves(jobs=saved))

    def save(self, *jobs: str) -> None:
        """As their interval has it, so that they are known to."""
        for job in jobs:
            until(lambda job=job: Path(f"{self.files[job]}.starts").exists(), timeout=20)
            self.slurm.cluster.run(["scancel", "--signal=USR1", "--full", job])
            until(lambda job=job: self.files[job].exists())
        self.report()

    def until(self, what: Callable[[], Any]) -> None:
        def look() -> Any:
            self.report()
            return what()

        until(look, shows=self.slurm.queue)

    def starts(self, job: str) -> list[int]:
        """At what each run of it began to count."""
        return [int(line) for line in Path(f"{self.files[job]}.starts").read_text().split()]

    def moves(self) -> dict[str, tuple[str, str]]:
        """Of each job the last one: its stage, and why it stayed."""
        file = self.slurm.cluster.layout.state / "sluice.moves"
        lines = file.read_text().splitlines()[1:-1] if file.exists() else []
        return {line.split()[0]: (line.split()[2], line.split()[-1]) for line in lines}


@pytest.fixture
def savers(slurm: Cluster) -> Iterator[Savers]:
    yield Savers(slurm)
    (slurm.cluster.layout.state / PLUGINS_FILE).unlink(missing_ok=True)


def spread(slurm: Cluster, savers: Savers, script: str = COUNTS) -> list[str]:
    """Two jobs that save on one node, and on each of the other two one that does not: none has room for eight GPUs."""
    small = [savers.submit(1, script), savers.submit(1)]
    fill = []
    for _ in range(3):
        fill.append(slurm.submit(6, 60, 600))
        slurm.wait(fill[-1:])
        if len(fill) < 3:
            slurm.wait([slurm.submit(2, 60, 600)])
    slurm.cluster.run(["scancel", *fill])
    assert len({slurm.node(job) for job in small}) == 1
    savers.save(*small)
    return small


def told_of(slurm: Cluster, job: str) -> list[str]:
    """What `sluice explain` says of moves."""
    return sentences(site_moves({"StateSaveLocation": str(slurm.cluster.layout.state)}), int(job), others=True)


def apart(slurm: Cluster, savers: Savers, script: str = COUNTS) -> list[str]:
    """One job that saves on each of two nodes, and one that does not on the third, which has room for both."""
    small, fill = [], []
    for _ in range(2):
        small.append(savers.submit(1, script if not small else COUNTS))
        fill.append(slurm.submit(7, 60, 600))
        slurm.wait(fill[-1:])
    slurm.wait([slurm.submit(6, 60, 600)])
    slurm.cluster.run(["scancel", *fill])
    assert len({slurm.node(job) for job in small}) == 2
    savers.save(*small)
    return small


def test_small_jobs_are_moved_to_make_room_and_go_on_where_they_were(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers)
    before = slurm.node(small[0])
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: slurm.states([big, *small]) == ["RUNNING"] * 3)
    assert slurm.node(big) == before
    assert before not in {slurm.node(job) for job in small}
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("back", "-")})
    for job in small:
        until(lambda job=job: len(savers.starts(job)) > 1)
        first, again = savers.starts(job)
        assert first == 0 < again == int(savers.files[job].read_text())
        assert slurm.said().count(f"job {job} is asked to save") == 1
    assert "moves from" in slurm.said()
    assert_begun_in_another_second(slurm, small)


def assert_begun_in_another_second(slurm: Cluster, moved: list[str]) -> None:
    """slurmd fails a job that begins again on its node in the second in which its first run there was ended."""
    for job in moved:
        (_, end), (start, _) = until(lambda job=job: slurm.runs(job), lambda runs: len(runs) == 2)
        assert end < start


def test_a_job_whose_nodes_failed_it_goes_first_and_its_place_is_kept(slurm: Cluster) -> None:
    full = [slurm.submit(8, 60, 600) for _ in range(2)]
    failed = slurm.submit(8, 60, 600, "--nice=100", "--begin=now+2minutes")  # as by Slurm's pause after a requeue
    put_off = slurm.submit(8, 60, 600, "--begin=now+1hour")  # by its user: no place is kept for it
    listed = slurm.cluster.layout.state / "sluice.first"
    until_s = int(time.time()) + 300
    try:
        slurm.wait(full)
        lines = f"sluice-first 1\n{failed} {until_s}\n{put_off} {until_s}\n"
        write_atomic(listed, checksummed(lines), mode=0o644)
        until(lambda: slurm.is_planned(failed))  # slurmctld looks at the file twice a second
        others = [slurm.submit(8, 60, 600), slurm.submit(1, 600, 600)]
        slurm.planned()
        assert slurm.states([failed, *others]) == ["PENDING"] * 3  # though a node is free
        slurm.cluster.run(["scontrol", "update", f"JobId={failed}", "StartTime=now"])
        slurm.wait([failed])
        assert slurm.states(others) == ["PENDING"] * 2
        slurm.cluster.run(["scancel", failed])
        slurm.wait(others[:1])
    finally:
        listed.unlink()


IGNORES = "f={file}; trap '' USR1; echo 0 > $f; echo 0 >> $f.starts; while :; do pause 0.1; done"
TAKES_5_S = COUNTS.replace("trap 'echo", "trap 'sleep 5; echo")


def test_a_job_that_ignores_the_signal_is_not_moved_nor_asked_again(slurm: Cluster, savers: Savers) -> None:
    small = apart(slurm, savers, IGNORES)
    big = slurm.submit(8, 60, 600, "-N2")  # both nodes, or neither
    savers.until(lambda: savers.moves().get(small[0]) == ("stayed", "unsaved"))
    assert savers.moves()[small[1]] == ("stayed", "other")
    other = slurm.submit(8, 60, 600, "-N2")  # of which it was not asked before
    time.sleep(8)  # slurmctld looks for moves every five seconds
    assert slurm.states([big, other, *small]) == ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    assert slurm.said().count(f"job {small[0]} is asked to save") == 1
    assert [len(savers.starts(job)) for job in small] == [1, 1]


def test_nothing_moves_for_a_job_that_is_cancelled_meanwhile(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, TAKES_5_S)
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: savers.moves().get(small[0]) == ("asked", "-"))
    slurm.cluster.run(["scancel", big])
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("stayed", "waits")})
    time.sleep(6)
    assert slurm.states(small) == ["RUNNING", "RUNNING"]
    assert [len(savers.starts(job)) for job in small] == [1, 1]


def test_a_job_of_two_nodes_gets_both_though_slurmctld_is_killed_meanwhile(slurm: Cluster, savers: Savers) -> None:
    small = apart(slurm, savers, TAKES_5_S)
    nodes = sorted(slurm.node(job) for job in small)
    big = slurm.submit(8, 60, 600, "-N2", "--begin=now+10")
    let_it_save(slurm.cluster)
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("asked", "-")})
    slurm.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    slurm.cluster.start_daemon("slurmctld@ctl1")
    savers.until(lambda: slurm.states([big, *small]) == ["RUNNING"] * 3)
    listed = slurm.node(big)
    assert slurm.cluster.run(["scontrol", "show", "hostnames", listed]).stdout.split() == nodes
    assert not {slurm.node(job) for job in small} & set(nodes)
    assert told_of(slurm, big)[0].startswith(f"2 smaller jobs were moved to make room on {listed}; ")
    for job in small:
        until(lambda job=job: len(savers.starts(job)) > 1)
        assert savers.starts(job)[-1] == int(savers.files[job].read_text()) > 0


def assert_left(slurm: Cluster, savers: Savers, small: list[str], node: str) -> None:
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("back", "-")})
    assert slurm.states(small) == ["RUNNING"] * 2
    assert node not in {slurm.node(job) for job in small}
    for job in small:
        until(lambda job=job: len(savers.starts(job)) > 1)
        assert savers.starts(job) == [0, int(savers.files[job].read_text())]


def assert_left_over_a_kill(slurm: Cluster, savers: Savers, small: list[str], node: str, wait: Path) -> None:
    """They have been asked to save, and can when `wait` is gone: after a SIGKILL of slurmctld."""
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("asked", "-")})
    slurm.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    wait.unlink()
    slurm.cluster.start_daemon("slurmctld@ctl1")
    assert_left(slurm, savers, small, node)


def test_jobs_leave_a_node_that_drains_if_that_empties_it_earlier(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers)
    node = slurm.node(small[0])
    longer = slurm.submit(1, 120, 600, f"--nodelist={node}")
    slurm.wait([longer])
    slurm.cluster.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"])
    try:
        time.sleep(7)  # slurmctld looks for moves every five seconds
        assert not set(small) & set(savers.moves()), "the node was not emptied earlier by that"
        slurm.cluster.run(["scancel", longer])
        assert_left(slurm, savers, small, node)
        assert f"to empty {node}; saved" in told_of(slurm, small[0])[0]
        shown = ["scontrol", "-o", "show", "node", node]
        until(
            lambda: re.findall(r" State=(\S+)", slurm.cluster.run(shown).stdout),
            lambda seen: seen == ["IDLE+DRAIN"],
            shows=slurm.queue,
        )
    finally:
        slurm.cluster.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])


# Saves when nothing tells it to wait with that.
SAVES_LATER = COUNTS.replace("trap 'echo", "trap 'while [ -e $f.wait ]; do pause 0.1; done; echo")


def test_jobs_leave_a_node_before_its_maintenance_though_slurmctld_is_killed(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, SAVES_LATER)
    node, wait = slurm.node(small[0]), Path(f"{savers.files[small[0]]}.wait")
    wait.touch()
    let_it_save(slurm.cluster)
    asked = ["StartTime=now+30minutes", "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS", f"Nodes={node}"]
    slurm.cluster.run(["scontrol", "create", "reservation", "ReservationName=repair", *asked])
    try:
        until((slurm.cluster.layout.state / "resv_state").read_bytes, lambda saved: b"repair" in saved)
        assert_left_over_a_kill(slurm, savers, small, node, wait)
        moves = (slurm.cluster.layout.state / "sluice.moves").read_text()
        assert all(len(re.findall(rf"^{job} 0 ", moves, re.MULTILINE)) == 1 for job in small), "a plan was given up"
    finally:
        slurm.cluster.run(["scontrol", "delete", "ReservationName=repair"])


def empty(slurm: Cluster, *words: str, check: bool = True, user: str = "root") -> subprocess.CompletedProcess[str]:
    return slurm.cluster.run(["sluice", "node", "empty", *words], user=user, cwd="/", timeout=60, check=check)


def drained(slurm: Cluster, node: str) -> str:
    """The reason; empty where it does not drain."""
    shown = slurm.cluster.run(["scontrol", "show", "node", node]).stdout
    return shown.partition("Reason=")[2].partition(" [")[0] if "DRAIN" in shown else ""


def test_an_administrator_empties_a_node_though_slurmctld_is_killed(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, SAVES_LATER)
    node, wait = slurm.node(small[0]), Path(f"{savers.files[small[0]]}.wait")
    others = [slurm.submit(1, minutes, 600, f"--nodelist={node}") for minutes in (120, 10)]
    slurm.wait(others)
    decisions = {**dict.fromkeys(small, "moves"), others[0]: "stays", others[1]: "ends"}

    # Asked, refused, and nothing done.
    words = (node, "--deadline", "now+30minutes")
    found = json.loads(empty(slurm, *words, "--dry-run", "--json").stdout)
    assert {str(job["job"]): job["decision"] for job in found["jobs"]} == decisions
    assert {job["to"] for job in found["jobs"]} <= {None, "n1", "n2", "n3"} - {node}
    assert "root or SlurmUser" in empty(slurm, *words, user="alice", check=False).stderr
    assert drained(slurm, node) == "" and not set(small) & set(savers.moves())

    slurm.cluster.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=hot"])
    wait.touch()
    let_it_save(slurm.cluster)
    table = empty(slurm, *words, "--reason", "new fan", "-Pn", "-o", "job,decision,reason").stdout
    assert f"{others[0]}|stays|it has not saved since it started" in table
    assert f"{others[1]}|ends|ends by the deadline" in table
    assert re.fullmatch(
        r"sluice empty by 2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\dZ: new fan; drained before: hot", drained(slurm, node)
    )
    until((slurm.cluster.layout.state / "node_state").read_bytes, lambda saved: b": new fan" in saved)
    assert_left_over_a_kill(slurm, savers, small, node, wait)
    assert slurm.states(others) == ["RUNNING"] * 2
    state = {"StateSaveLocation": str(slurm.cluster.layout.state)}
    said = until(lambda: leaving(site_emptying(state), int(others[0])), bool)
    assert said[0].startswith(f"is on {node}, which an administrator empties by 2") and "or cancel it" in said[0]
    slurm.cluster.run(["sluice", "node", "resume", node], cwd="/", timeout=60)
    assert drained(slurm, node) == "hot"
    slurm.cluster.run(["scontrol", "update", f"NodeName={node}", "State=UNDRAIN"])
    until((slurm.cluster.layout.state / "sluice.emptying").exists, lambda there: not there)


def test_all_stay_if_the_journal_is_switched_off_meanwhile(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, TAKES_5_S)
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: savers.moves().get(small[0]) == ("asked", "-"))
    folder = slurm.cluster.layout.slurm
    without = POLICY.partition("checksum =")[0].replace("journal = yes\n", "")
    write_atomic(folder / "sluice.policy", checksummed(without))
    savers.until(lambda: {savers.moves().get(job) for job in small} == {("stayed", "waits")})
    asked = slurm.said().count("is asked to save")
    time.sleep(8)  # slurmctld looks for moves every five seconds
    assert slurm.states([big, *small]) == ["PENDING", "RUNNING", "RUNNING"]
    assert slurm.said().count("is asked to save") == asked
    write_atomic(folder / "sluice.policy", POLICY)
    await_policy(slurm.cluster)


# It takes its time to end, up to KillWait, and says until when it ran.
HOLDS_ON = f"f={{file}}; trap 'until [ -e $f.done ]; do touch $f.lives; pause 0.1; done; exit' TERM\n{COUNTS}"


def test_jobs_that_have_just_left_are_not_lost_when_slurmctld_is_killed(slurm: Cluster, savers: Savers) -> None:
    """Slurm has not saved the requeues: the journal has. The first one still ends, on a node that is not heard of."""
    small = spread(slurm, savers, HOLDS_ON)
    lives, before = Path(f"{savers.files[small[0]]}.lives"), slurm.node(small[0])
    let_it_save(slurm.cluster)
    until(lambda: block_saving(slurm.cluster), bool)
    time.sleep(1.1)  # the state's time has whole seconds
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: {savers.moves().get(job, ("",))[0] for job in small} == {"left"})
    until(slurm.said, lambda said: all(f"job {job}, saved" in said for job in small))
    slurm.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    until(lives.exists)
    slurm.cluster.stop_daemon(f"slurmd@{before}", number=signal.SIGKILL)
    (slurm.cluster.layout.state / "job_state.new").rmdir()
    slurm.cluster.start_daemon("slurmctld@ctl1")
    until(lambda: slurm.states(small), lambda seen: seen == ["PENDING"] * 2, shows=slurm.queue)
    time.sleep(10)  # twenty plans
    assert slurm.states(small) == ["PENDING"] * 2
    assert time.time() - lives.stat().st_mtime < 2
    slurm.cluster.start_daemon(f"slurmd@{before}")
    lives.with_suffix(".done").touch()
    savers.until(lambda: slurm.states([big, *small]) == ["RUNNING"] * 3)
    for job in small:
        until(lambda job=job: len(savers.starts(job)) > 1)
        assert savers.starts(job) == [0, int(savers.files[job].read_text())]
    assert lives.stat().st_mtime < (slurm.start(small[0]) or 0) + 1, "it ran twice at a time"


def test_a_moved_job_starts_elsewhere_if_its_destination_drains(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, HOLDS_ON)
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: savers.moves().get(small[0], ("",))[0] == "left")
    lines = (slurm.cluster.layout.state / "sluice.moves").read_text().splitlines()
    to = next(line.split()[9] for line in lines if line.startswith(f"{small[0]} ") and " left " in line)
    slurm.cluster.run(["scontrol", "update", f"NodeName={to}", "State=DRAIN", "Reason=test"])
    Path(f"{savers.files[small[0]]}.done").touch()
    try:
        since = time.monotonic()
        savers.until(lambda: slurm.states([big, *small]) == ["RUNNING"] * 3)
        assert time.monotonic() - since < 60, "it waited for its place"
        assert to not in {slurm.node(job) for job in small}
    finally:
        slurm.cluster.run(["scontrol", "update", f"NodeName={to}", "State=RESUME"])


LINGERS = f"f={{file}}; trap 'touch $f.leaves; until [ -e $f.done ]; do pause 0.02; done; exit' TERM\n{COUNTS}"


def test_a_moved_job_that_has_no_other_place_begins_again_where_it_was(slurm: Cluster, savers: Savers) -> None:
    small = spread(slurm, savers, LINGERS)
    before = slurm.node(small[0])
    others = "NodeName=" + ",".join(sorted({"n1", "n2", "n3"} - {before}))
    big = slurm.submit(8, 60, 600)
    savers.until(lambda: Path(f"{savers.files[small[0]]}.leaves").exists())
    try:
        slurm.cluster.run(["scontrol", "update", others, "State=DRAIN", "Reason=test"])
        slurm.cluster.run(["scancel", big])
        Path(f"{savers.files[small[0]]}.done").touch()
        savers.until(lambda: slurm.states(small) == ["RUNNING"] * 2)
        assert slurm.node(small[0]) == before
        assert_begun_in_another_second(slurm, small)
        until(lambda: len(savers.starts(small[0])) > 1)
    finally:
        slurm.cluster.run(["scontrol", "update", others, "State=RESUME"])
