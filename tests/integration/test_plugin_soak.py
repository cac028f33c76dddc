"""Sluice's plugins under churn, with the address sanitizer: nothing leaks, hangs or gets lost, nor when killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from sluice_base.errors import SluiceError
from sluice_base.run import CommandError
from tests.integration.slurm_features import POLICY, status_in_force, wait_until

pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., DevCluster]
NODES = ["n1", "n2", "n3", "n4"]
SHAPES = [
    ["--gres=gpu:1"],
    ["--gres=gpu:4", "-n2"],
    ["--gpus-per-node=8", "-N1", "-n8"],
    ["--gpus-per-node=2", "-N2"],
    ["--gres=shard:10240"],
    ["-n1"],
]
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "REQUEUED"}


def description(*, sanitize: bool) -> dict[str, object]:
    return {
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "slurm_conf": "SchedulerParameters=bf_interval=2,sched_interval=2\nMaxJobCount=100000\nMinJobAge=5\n",
        "sluice": {"level": "place", "policy": POLICY, "sanitize": sanitize},
    }


class Churn:
    """Submits jobs while nodes, controller and jobs are pushed around; knows every job that was acknowledged."""

    def __init__(self, cluster: DevCluster, *, jobs: int, seed: int) -> None:
        self.cluster = cluster
        self.left = jobs
        self.seed = seed
        self.acknowledged: list[str] = []
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.memory_kib: list[int] = []

    def run(self) -> None:
        """All jobs are submitted when this returns."""
        disturber = threading.Thread(target=self._disturb)
        disturber.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                for worker in [pool.submit(self._submit, number) for number in range(4)]:
                    worker.result()
        finally:
            self.done.set()
            disturber.join()

    def _submit(self, number: int) -> None:
        choose = random.Random(self.seed * 1000 + number)
        while True:
            with self.lock:
                if self.left <= 0:
                    return
                self.left -= 1
            options = [
                *choose.choice(SHAPES),
                f"--time={choose.randint(1, 9)}",
                "--mem=200M",
                "--requeue",
                "-o",
                "/dev/null",
            ]
            wrap = f"--wrap=sleep 0.{choose.randint(1, 4)}"
            for _ in range(60):
                done = self.cluster.run(["sbatch", "--parsable", *options, wrap], user="alice", check=False)
                if done.returncode == 0:
                    with self.lock:
                        self.acknowledged.append(done.stdout.strip())
                    break
                time.sleep(1)
            else:
                pytest.fail(f"no submission went through for a minute: {done.stderr}")

    def _disturb(self) -> None:
        choose = random.Random(self.seed)
        acts = [self._cancel, self._cancel, self._requeue, self._requeue, self._drain, self._reconfigure, self._restart]
        round_of_acts = 0
        while not self.done.wait(0.7):
            act = acts[round_of_acts % len(acts)] if round_of_acts < len(acts) else choose.choice(acts)
            round_of_acts += 1
            act(choose)
            self._look_at_memory()

    def _some_job(self, choose: random.Random) -> str | None:
        with self.lock:
            return choose.choice(self.acknowledged[-60:]) if self.acknowledged else None

    def _cancel(self, choose: random.Random) -> None:
        if job := self._some_job(choose):
            self.cluster.run(["scancel", job], check=False)

    def _requeue(self, choose: random.Random) -> None:
        if job := self._some_job(choose):
            self.cluster.run(["scontrol", "requeue", job], check=False)

    def _drain(self, choose: random.Random) -> None:
        node = choose.choice(NODES)
        self.cluster.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=churn"], check=False)
        time.sleep(0.5)
        self.cluster.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)

    def _reconfigure(self, choose: random.Random) -> None:
        self.cluster.run(["scontrol", "reconfigure"], check=False)

    def _restart(self, choose: random.Random) -> None:
        self.cluster.stop_daemon("slurmctld@ctl1", timeout=60)
        self.cluster.start_daemon("slurmctld@ctl1")

    def _look_at_memory(self) -> None:
        pid = next(daemon.pid for daemon in self.cluster.daemons() if daemon.name == "slurmctld@ctl1")
        status = self.cluster.run(["cat", f"/proc/{pid}/status"], check=False).stdout
        if found := re.search(r"VmRSS:\s+(\d+)", status):
            self.memory_kib.append(int(found[1]))


def drain_queue(cluster: DevCluster, *, timeout: float) -> None:
    """Wait until every job has ended, with all nodes in service."""

    def left() -> str:
        try:
            for node in cluster.node_states():
                if node.state.startswith(("drain", "down")):
                    cluster.run(["scontrol", "update", f"NodeName={node.name}", "State=RESUME"], check=False)
            cluster.run(["scontrol", "release", *held], check=False) if (held := held_jobs(cluster)) else None
            return cluster.run(["squeue", "-h", "-o", "%i %T %r"]).stdout
        except (CommandError, SluiceError) as error:
            return str(error)

    wait_until(left, lambda text: text == "", timeout=timeout)


def held_jobs(cluster: DevCluster) -> list[str]:
    """Jobs that Slurm holds after a failed launch."""
    lines = cluster.run(["squeue", "-h", "-t", "PD", "-o", "%i %r"]).stdout.splitlines()
    return [line.split()[0] for line in lines if "held" in line.lower()]


def accounted(cluster: DevCluster) -> dict[str, str]:
    """The last state of every job in the database."""
    lines = cluster.run(["sacct", "-nXP", "-S", "now-2days", "-o", "JobID,State"], timeout=300).stdout.splitlines()
    return {job: state.split()[0] for job, _, state in (line.partition("|") for line in lines)}


def complaints(cluster: DevCluster) -> list[str]:
    """What the sanitizer or slurmctld's own checks said."""
    wrong = re.compile(
        r"AddressSanitizer|runtime error:|underflow|under-count|negative|fatal:|inconsisten", re.IGNORECASE
    )
    text = cluster.log("slurmctld@ctl1").read_text(errors="replace")
    return [line for line in text.splitlines() if wrong.search(line)]


def test_churn_loses_no_job_and_leaks_nothing(make_cluster: MakeCluster, full_scale: bool) -> None:
    cluster = make_cluster(description(sanitize=True), timeout=300)
    assert status_in_force(cluster)["level"] == "place"
    jobs = int(os.environ.get("SLUICE_SOAK_JOBS", "20000")) if full_scale else 150
    churn = Churn(cluster, jobs=jobs, seed=20)
    churn.run()
    drain_queue(cluster, timeout=3000 if full_scale else 120)
    wait_until(
        lambda: {job for job in churn.acknowledged if accounted(cluster).get(job) not in ENDED},
        lambda lost: not lost,
        timeout=60,
    )
    assert len(set(churn.acknowledged)) == len(churn.acknowledged)
    assert complaints(cluster) == []
    if full_scale:
        half = len(churn.memory_kib) // 2
        early, late = sorted(churn.memory_kib[:half])[half // 2], sorted(churn.memory_kib[half:])[half // 2]
        assert late < early * 1.25 + 65536, f"slurmctld grew from {early} to {late} KiB"


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb stops slurmctld inside a hook")
@pytest.mark.parametrize("hook", ["sluice_hook_test", "sluice_hook_begin", "site_factor_p_set", "job_submit"])
def test_killed_inside_a_hook_it_comes_back_with_its_jobs(make_shared: DevCluster, hook: str) -> None:
    cluster = make_shared
    before = [
        cluster.run(
            ["sbatch", "--parsable", "--gres=gpu:1", "-o/dev/null", "--wrap=sleep 600"], user="alice"
        ).stdout.strip()
        for _ in range(4)
    ]
    time.sleep(6)  # slurmctld has written its state
    pid = next(daemon.pid for daemon in cluster.daemons() if daemon.name == "slurmctld@ctl1")
    gdb = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", f"break {hook}", "-ex", "continue", "-ex", "kill"]
    ask = cluster.command(["sbatch", "--gres=gpu:1", "-o/dev/null", "--wrap=sleep 600"], user="alice")
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killer = subprocess.Popen(cluster.command(gdb), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    asking = []
    deadline = time.monotonic() + 60
    while killer.poll() is None and time.monotonic() < deadline:  # gdb takes a moment to attach
        asking.append(subprocess.Popen(ask, **quiet))
        time.sleep(1)
    killer.kill()
    said = killer.communicate()[0]
    for asked in asking:
        asked.kill()
        asked.wait()
    assert "hit Breakpoint" in said, said
    wait_until(lambda: status_of(cluster, "slurmctld@ctl1"), lambda status: status is not None)
    cluster.start_daemon("slurmctld@ctl1")
    wait_until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda text: "UP" in text, timeout=60)
    states = wait_until(
        lambda: cluster.run(["squeue", "-h", "-o", "%i %T", "-j", ",".join(before)], check=False).stdout.split(),
        lambda words: len(words) == 8,
        timeout=60,
    )
    assert set(states[1::2]) <= {"RUNNING", "PENDING", "CONFIGURING"}
    cluster.run(["scancel", *before])
    cluster.run(["scancel", "-u", "alice"])
    wait_until(lambda: cluster.run(["squeue", "-h"]).stdout, lambda text: text == "", timeout=60)


def status_of(cluster: DevCluster, name: str) -> int | None:
    """A daemon's exit status; None while it runs."""
    return next(daemon.status for daemon in cluster.daemons() if daemon.name == name)


@pytest.fixture(scope="module")
def make_shared(make_shared_cluster: MakeCluster) -> DevCluster:
    one = {**description(sanitize=False), "controllers": 1}
    return make_shared_cluster(one)
