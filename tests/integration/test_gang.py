"""Gang groups on real daemons: members start together or not at all, whatever happens in between."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from policy.compiled import CompiledPolicy, Global, Tenant
from sluice.base.files import write_atomic
from tests.integration.jobs import submit
from tests.integration.settled import (
    PATIENCE,
    await_policy,
    fresh_status,
    lasts_until,
    let_it_save,
    set_level,
    until,
)
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

GANG_LIMIT = 8
_GATES = itertools.count(1)


def policy(limit_s: int = GANG_LIMIT, **more: Any) -> CompiledPolicy:
    return CompiledPolicy(
        settings=Global(planner_interval_ms=500, gang_limit_s=limit_s, **more),
        tenants=[Tenant(account="physics"), Tenant(account="narrow")],
    )


SCRIPTS = "/run/sluice-cluster/scripts"
TRACE = "/run/sluice-cluster/trace"


def description() -> dict[str, Any]:
    return {
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}, {"name": "narrow"}],
        # carol's account may run three jobs at once: the way to a gang of which only a part gets nodes
        "users": [
            {"name": "alice", "accounts": ["physics"]},
            {"name": "bob", "accounts": ["physics"]},
            {"name": "carol", "accounts": ["narrow"]},
        ],
        "controllers": 1,
        "sluice": {"level": "place", "policy": policy().render()},
        "slurm_conf": f"DefMemPerCPU=100\nProlog={SCRIPTS}/prolog\n",
    }


class Gangs:
    """Submits jobs that leave a trace, and looks at what became of them."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.trace = cluster.folder / "trace"

    def submit(self, *options: str, user: str = "alice", rest: str = "exec sleep 280") -> str:
        script = f"date +%s.%N > {TRACE}/job.$SLURM_JOB_ID; {rest}"
        return submit(self.cluster, "-t5", *options, wrap=script, user=user)

    def member(self, gang: str, *options: str, gpus: int = 8, **more: Any) -> str:
        return self.submit(f"--gang={gang}", "-N1", f"--gres=gpu:{gpus}", *options, **more)

    def shown(self, job: str) -> list[str]:
        """State, and what squeue gives as the reason."""
        words = ["squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%T|%r"]
        return self.cluster.run(words, check=False).stdout.strip().split("\n")[0].split("|")

    def states(self, jobs: list[str]) -> list[str]:
        words = ["squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", "%A|%T"]
        known = dict(line.split("|") for line in self.cluster.run(words, check=False).stdout.split())
        return [known.get(job, "") for job in jobs]

    def ran(self, kind: str, job: str) -> bool:
        return (self.trace / f"{kind}.{job}").exists()

    def started(self, job: str) -> float:
        """The shell makes the file before `date` writes into it."""
        return float(until((self.trace / f"job.{job}").read_text))

    def counter(self, name: str) -> int:
        """With all that was counted before."""
        return int(fresh_status(self.cluster)["counters"][name])

    def set_policy(self, wanted: CompiledPolicy) -> None:
        wanted.write(self.cluster.slurm_conf_dir() / "sluice.policy")
        await_policy(self.cluster)

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.cluster.stop_daemon("slurmctld@ctl1", number=number)
        self.cluster.start_daemon("slurmctld@ctl1")
        until(lambda: "UP" in self.cluster.run(["scontrol", "ping"], check=False).stdout, lambda up: bool(up))

    def clear(self) -> None:
        for user in ("alice", "bob", "carol"):
            self.cluster.run(["scancel", "-u", user])
        until(lambda: self.cluster.run(["squeue", "-h"]).stdout.strip(), lambda left: left == "")
        for file in self.trace.iterdir():
            file.unlink()


def shows(gangs: Gangs, job: str, state: str, reason: str) -> None:
    until(lambda: gangs.shown(job), lambda seen: bool(seen == [state, reason]))


def _set_up(cluster: DevCluster) -> None:
    scripts, trace = cluster.folder / "scripts", cluster.folder / "trace"
    scripts.mkdir()
    trace.mkdir()
    trace.chmod(0o777)
    for kind in ("prolog", "prolog_slurmctld"):
        script = scripts / kind
        script.write_text(f"#!/bin/sh\nmkdir -p {TRACE} && date +%s.%N > {TRACE}/{kind}.$SLURM_JOB_ID\n")
        script.chmod(0o755)
    with (cluster.slurm_conf_dir() / "slurm.conf").open("a") as file:  # at boot there is no such program yet
        file.write(f"PrologSlurmctld={SCRIPTS}/prolog_slurmctld\n")
    cluster.run(["sacctmgr", "-i", "modify", "account", "narrow", "set", "GrpJobs=3"])


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def gangs(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Gangs]:
    options: dict[str, Path] = {}
    if request.param == "trixie":
        options["root"] = request.getfixturevalue("trixie_root")
    cluster = make_shared_cluster(description(), **options)
    _set_up(cluster)
    made = Gangs(cluster)
    made.restart()  # with the limit, and with the PrologSlurmctld that is there now
    cluster.wait_idle()
    yield made
    cluster.down()


@pytest.fixture(autouse=True)
def _clear(gangs: Gangs) -> Iterator[None]:
    yield
    gangs.clear()


def test_members_wait_with_a_reason_until_all_are_there(gangs: Gangs) -> None:
    jobs = [gangs.member("train:4") for _ in range(3)]
    for job in jobs:
        shows(gangs, job, "PENDING", "Gang train: 3 of 4 members submitted")
    assert not any(gangs.ran(kind, job) for job in jobs for kind in ("job", "prolog", "prolog_slurmctld"))
    jobs.append(gangs.member("train:4"))
    until(lambda: [gangs.ran("job", job) for job in jobs], all)
    assert all(gangs.ran("prolog", job) and gangs.ran("prolog_slurmctld", job) for job in jobs)
    starts = [gangs.started(job) for job in jobs]
    assert max(starts) - min(starts) < 5


def test_neither_user_nor_administrator_can_release_a_member(gangs: Gangs) -> None:
    job = gangs.member("lone:2")
    until(lambda: gangs.shown(job), lambda seen: seen[1].startswith("Gang lone"))
    refused = gangs.cluster.run(["scontrol", "release", job], user="alice", check=False)
    assert refused.returncode != 0
    assert "denied" in refused.stderr
    gangs.cluster.run(["scontrol", "release", job])
    gangs.cluster.run(["scontrol", "update", f"JobId={job}", "Priority=4000000000"], check=False)
    time.sleep(2.5)  # two cycles of the scheduler
    shows(gangs, job, "PENDING", "Gang lone: 1 of 2 members submitted")
    assert not gangs.ran("job", job)


def test_a_gang_waits_for_room_for_all_and_blocks_nobody_who_ends_in_time(gangs: Gangs) -> None:
    gate = f"gate{next(_GATES)}"
    busy = [gangs.submit("-N1", "--gres=gpu:8", rest=lasts_until(INSIDE / gate)) for _ in range(2)]
    until(lambda: gangs.states(busy), lambda seen: bool(seen == ["RUNNING"] * 2))
    jobs = [gangs.member("big:4") for _ in range(4)]
    until(lambda: gangs.shown(jobs[0]), lambda seen: seen[1] == "Gang big: waits for room for 4 members")
    short = gangs.submit("-N1", "--gres=gpu:1", "-t1", user="bob", rest="sleep 1")
    long = gangs.submit("-N1", "--gres=gpu:1", "-t10", user="bob", rest="sleep 1")
    until(lambda: gangs.ran("job", short), bool)
    assert gangs.states(jobs) == ["PENDING"] * 4
    (gangs.cluster.folder / gate).touch()
    until(lambda: gangs.states(jobs), lambda seen: seen == ["RUNNING"] * 4)
    assert not gangs.ran("job", long)  # it would have delayed the gang


def test_no_member_runs_while_one_has_no_nodes_and_all_are_requeued_in_time(gangs: Gangs) -> None:
    before = {name: gangs.counter(name) for name in ("gang.requeued", "gang.gpu_seconds_held", "gang.started")}
    jobs = [
        gangs.member("part:4", "--no-requeue" if number == 0 else "--requeue", gpus=2, user="carol")
        for number in range(4)
    ]
    until(lambda: gangs.states(jobs), lambda seen: sorted(seen) == ["CONFIGURING"] * 3 + ["PENDING"])
    until(lambda: gangs.shown(jobs[0])[1], "Gang part: 3 of 4 members have nodes".__eq__)
    until(lambda: gangs.states(jobs), lambda seen: seen == ["PENDING"] * 4, timeout=GANG_LIMIT + PATIENCE)
    assert not any(gangs.ran(kind, job) for job in jobs for kind in ("job", "prolog", "prolog_slurmctld"))
    until(lambda: gangs.counter("gang.requeued") - before["gang.requeued"], lambda more: more == 1)
    held = gangs.counter("gang.gpu_seconds_held") - before["gang.gpu_seconds_held"]
    assert 6 * (GANG_LIMIT - 2) <= held <= 6 * (GANG_LIMIT + 6)
    assert gangs.counter("gang.started") == before["gang.started"]


def test_the_missing_member_gets_nodes_within_the_limit(gangs: Gangs) -> None:
    other = gangs.submit("-N1", "--gres=gpu:1", user="carol")
    until(lambda: gangs.states([other]), lambda seen: seen == ["RUNNING"])
    jobs = [gangs.member("late:3", gpus=1, user="carol") for _ in range(3)]
    until(lambda: gangs.states(jobs), lambda seen: seen.count("CONFIGURING") == 2)
    gangs.cluster.run(["scancel", other])
    until(lambda: [gangs.ran("job", job) for job in jobs], all)
    assert all(gangs.ran("prolog_slurmctld", job) for job in jobs)


def test_a_killed_controller_in_the_middle_starts_no_part(gangs: Gangs) -> None:
    gangs.set_policy(policy(600))  # however long Slurm takes to save its state and to come back
    try:
        jobs = [gangs.member("crash:4", gpus=1, user="carol") for _ in range(4)]
        until(lambda: gangs.states(jobs), lambda seen: seen.count("CONFIGURING") == 3)
        let_it_save(gangs.cluster)  # what Slurm has not saved is lost anyway
        gangs.restart(signal.SIGKILL)
        assert gangs.states(jobs).count("CONFIGURING") == 3
    finally:
        gangs.set_policy(policy())
    until(lambda: gangs.states(jobs), lambda seen: seen == ["PENDING"] * 4, timeout=GANG_LIMIT + PATIENCE)
    assert not any(gangs.ran(kind, job) for job in jobs for kind in ("job", "prolog"))


def test_a_member_that_is_cancelled_while_others_have_nodes_gives_all_back(gangs: Gangs) -> None:
    jobs = [gangs.member("gone:4", gpus=1, user="carol") for _ in range(4)]
    until(lambda: gangs.states(jobs), lambda seen: seen.count("CONFIGURING") == 3)
    gangs.cluster.run(["scancel", jobs[0]])
    until(lambda: gangs.states(jobs[1:]), lambda seen: seen == ["PENDING"] * 3, timeout=GANG_LIMIT + PATIENCE)
    assert not any(gangs.ran("job", job) for job in jobs)


def test_a_cancelled_member_may_be_replaced(gangs: Gangs) -> None:
    jobs = [gangs.member("swap:3", gpus=1) for _ in range(2)]
    gangs.cluster.run(["scancel", jobs.pop(0)])
    jobs += [gangs.member("swap:3", gpus=1) for _ in range(2)]
    until(lambda: [gangs.ran("job", job) for job in jobs], all)


def test_arrays_are_members_task_by_task_and_names_are_used_again(gangs: Gangs) -> None:
    array = gangs.member("array:4", "--array=0-5", gpus=1)
    tasks = ["squeue", "-h", "-r", "-t", "R", "-j", array, "-o", "%K"]
    until(lambda: len(gangs.cluster.run(tasks, check=False).stdout.split()), lambda running: running == 4)
    reasons = ["squeue", "-h", "-t", "PD", "-j", array, "-o", "%r"]
    until(
        lambda: gangs.cluster.run(reasons).stdout.strip(), lambda seen: seen == "Gang array: 2 of 4 members submitted"
    )
    more = [gangs.member("array:4", gpus=1) for _ in range(2)]
    until(lambda: [gangs.ran("job", job) for job in more], all)
    assert len(gangs.cluster.run(tasks).stdout.split()) == 6


def test_an_incomplete_gang_says_that_it_is_given_up_and_goes_on_when_the_rest_comes(gangs: Gangs) -> None:
    gangs.set_policy(policy(gang_incomplete_s=2))
    try:
        jobs = [gangs.member("few:3", gpus=1) for _ in range(2)]
        given_up = r"Gang few: only 2 of 3 members submitted, none since 20\S+; submit the rest or cancel"
        until(lambda: [re.fullmatch(given_up, gangs.shown(job)[1]) for job in jobs], all)
        assert gangs.states(jobs) == ["PENDING"] * 2
        jobs.append(gangs.member("few:3", gpus=1))
        until(lambda: [gangs.ran("job", job) for job in jobs], all)
    finally:
        gangs.set_policy(policy())


def test_an_incomplete_gang_is_cancelled_where_the_policy_says_so(gangs: Gangs) -> None:
    before = gangs.counter("gang.cancelled")
    array = gangs.member("more:4", "--array=0-5", gpus=1)
    tasks = ["squeue", "-h", "-r", "-t", "R", "-j", array, "-o", "%K"]
    until(lambda: len(gangs.cluster.run(tasks, check=False).stdout.split()), lambda running: running == 4)
    try:
        gangs.set_policy(policy(gang_incomplete_s=2, gang_incomplete_cancel=True))
        with ThreadPoolExecutor(1) as pool:
            words = ["srun", "--gang=lone:2", "--gres=gpu:1", "-t1", "true"]
            lone = pool.submit(gangs.cluster.run, words, user="alice", check=False, timeout=2 * PATIENCE)
            waiting = ["squeue", "-h", "-t", "PD", "-j", array, "-o", "%K"]
            until(lambda: gangs.cluster.run(waiting, check=False).stdout.strip(), lambda left: left == "")
            assert "Gang lone: only 1 of 2 members submitted in 2 s; cancelled" in lone.result().stderr
        assert len(gangs.cluster.run(tasks).stdout.split()) == 4  # what runs of the array goes on
        until(lambda: gangs.counter("gang.cancelled"), lambda now: now == before + 2)
    finally:
        gangs.set_policy(policy())


def test_members_may_differ_and_users_do_not_mix(gangs: Gangs) -> None:
    mine = [gangs.member("mix:2", gpus=8), gangs.submit("--gang=mix:2", "-N2", "--gres=gpu:4")]
    theirs = gangs.member("mix:2", gpus=1, user="bob")
    until(lambda: [gangs.ran("job", job) for job in mine], all)
    shows(gangs, theirs, "PENDING", "Gang mix: 1 of 2 members submitted")


def test_members_of_srun_start_together_or_are_cancelled_with_a_message(gangs: Gangs) -> None:
    def srun(gang: str, user: str) -> Future[subprocess.CompletedProcess[str]]:
        words = ["srun", f"--gang={gang}", "--gres=gpu:1", "-t1", "date", "+%s.%N"]
        return pool.submit(gangs.cluster.run, words, user=user, check=False, timeout=2 * PATIENCE)

    with ThreadPoolExecutor(4) as pool:
        both = [srun("live:2", "alice") for _ in range(2)]
        starts = [float(run.result().stdout) for run in both]
        assert abs(starts[0] - starts[1]) < 5
        busy = [gangs.submit("-N1", "--gres=gpu:1", user="carol") for _ in range(2)]
        until(lambda: gangs.states(busy), lambda seen: bool(seen == ["RUNNING"] * 2))
        both = [srun("stuck:2", "carol") for _ in range(2)]
        done, waiting = wait(both, timeout=GANG_LIMIT + PATIENCE, return_when=FIRST_COMPLETED)
        assert "Gang stuck: not all members got nodes in time; cancelled" in done.pop().result().stderr
        gangs.cluster.run(["scancel", "-u", "carol"])
        assert all(run.result().stdout == "" for run in waiting)


def test_a_held_member_holds_its_gang(gangs: Gangs) -> None:
    jobs = [gangs.member("held:2", "--hold", gpus=1), gangs.member("held:2", gpus=1)]
    until(lambda: gangs.shown(jobs[1])[1], lambda reason: "1 of 2 members held" in reason)
    assert gangs.shown(jobs[0])[1] == "JobHeldUser"
    gangs.cluster.run(["scontrol", "release", jobs[0]], user="alice")
    until(lambda: [gangs.ran("job", job) for job in jobs], all)


def test_a_member_that_cannot_be_planned_says_so(gangs: Gangs) -> None:
    jobs = [gangs.member("odd:2", gpus=1), gangs.member("odd:2", "-w", "n1", gpus=1)]
    wanted = "1 of 2 members ask for what gangs cannot have"
    until(lambda: [wanted in gangs.shown(job)[1] for job in jobs], all)
    gangs.cluster.run(["scancel", jobs[1]])
    jobs[1] = gangs.member("odd:2", gpus=1)
    until(lambda: [gangs.ran("job", job) for job in jobs], all)


def test_a_member_past_its_deadline_ends(gangs: Gangs) -> None:
    job = gangs.submit("--gang=due:2", "-N1", "--gres=gpu:1", "-t1", "--deadline=now+66", user="alice")
    until(lambda: gangs.shown(job)[0], lambda state: state == "DEADLINE")


def test_a_deadline_that_the_queue_endangers_is_reported_and_only_an_impossible_one_refused(gangs: Gangs) -> None:
    def asked(deadline: str) -> str:
        words = ["sbatch", "--test-only", "-N1", "--gres=gpu:8", "-t30", f"--deadline=now+{deadline}", "--wrap=true"]
        return gangs.cluster.run(words, user="alice", check=False, cwd="/tmp").stderr

    busy = [gangs.submit("-N1", "--gres=gpu:8", "-t60") for _ in range(4)]
    until(lambda: gangs.states(busy), lambda seen: seen == ["RUNNING"] * 4)
    said = until(lambda: asked("45minutes"), lambda said: "may be missed" in said)  # the outlook is made every 5 s
    stamp = r"(20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d)"
    found = re.search(rf"after all that is planned \(at {stamp}, .*job of 00:30:00 starts by {stamp} and ends", said)
    assert found, said
    made, start = (datetime.fromisoformat(text).timestamp() for text in found.groups())
    assert 3600 - 120 <= start - made <= 3600
    assert "to start at" in said  # a question; a submission is taken in likewise
    late = gangs.submit("-N1", "--gres=gpu:8", "-t30", "--deadline=now+45minutes")
    assert gangs.states([late]) == ["PENDING"]
    refused = re.compile(rf"cannot be met: started now, .* it ends at {stamp}; ask for --deadline=\1 or later")
    until(lambda: asked("29minutes"), lambda said: bool(refused.search(said)))
    assert "may be missed" not in asked("95minutes")


def test_below_level_place_nobody_is_held(gangs: Gangs) -> None:
    job = gangs.member("off:2", gpus=1)
    until(lambda: gangs.shown(job)[1], lambda reason: reason.startswith("Gang off"))
    set_level(gangs.cluster, "shadow")
    try:
        until(lambda: gangs.shown(job)[1], lambda reason: not reason.startswith("Gang off"))
        gangs.submit("-N1")  # at which Slurm looks at its queue, and not half a minute later
        until(lambda: gangs.ran("job", job), bool)
    finally:
        set_level(gangs.cluster, "place")


def test_who_was_held_when_slurmctld_stopped_is_released_when_it_starts_below_level_place(gangs: Gangs) -> None:
    job = gangs.member("late:2", gpus=1)
    shows(gangs, job, "PENDING", "Gang late: 1 of 2 members submitted")
    gangs.cluster.stop_daemon("slurmctld@ctl1")
    try:
        write_atomic(gangs.cluster.slurm_conf_dir() / "sluice.level", "admit\n")
        gangs.cluster.start_daemon("slurmctld@ctl1")
        until(lambda: gangs.ran("job", job), bool)
    finally:
        set_level(gangs.cluster, "place")


def test_disable_ends_when_the_members_are_released(gangs: Gangs) -> None:
    job = gangs.member("gone:2", gpus=1)
    shows(gangs, job, "PENDING", "Gang gone: 1 of 2 members submitted")
    nothing_installed = ["--search-dir", "/nowhere", "--systemd-dir", "/nowhere"]
    command = [sys.executable, "-m", "sluice.main", "plugin", "disable", *nothing_installed]
    try:
        gangs.cluster.run(command, node="ctl1")
        assert not gangs.shown(job)[-1].startswith("Gang")
        until(lambda: gangs.ran("job", job), bool)
    finally:
        set_level(gangs.cluster, "place")


def test_every_started_gang_is_counted(gangs: Gangs) -> None:
    before = gangs.counter("gang.started")
    jobs = [gangs.member("count:2", gpus=1) for _ in range(2)]
    until(lambda: [gangs.ran("job", job) for job in jobs], all)
    until(lambda: gangs.counter("gang.started"), lambda now: now == before + 1)
    log = gangs.cluster.log("slurmctld@ctl1").read_text()
    assert re.search(r"gang count of uid \d+: all 2 members have nodes and start", log)
