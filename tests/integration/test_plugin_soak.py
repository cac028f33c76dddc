"""Sluice's plugins under churn, with the address sanitizer: nothing leaks, hangs or gets lost, nor when killed."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.control import ask
from sluice_base.errors import SluiceError
from sluice_base.run import CommandError
from tests.integration.settled import let_it_save, status, until
from tests.integration.slurm_features import POLICY, wait_until

pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., DevCluster]
NODES = ["n1", "n2", "n3", "n4"]
CONTROLLERS = ["slurmctld@ctl1", "slurmctld@ctl2"]
BATCH = 5  # submissions of one shell
QUEUE = 500  # pending jobs, beyond which submissions pause
SHAPES = [
    ["--gres=gpu:1"],
    ["--gres=gpu:4", "-n2"],
    ["--gpus-per-node=8", "-N1", "-n8"],
    ["--gpus-per-node=2", "-N2"],
    ["--gres=shard:10240"],
    ["-n1"],
]
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "REQUEUED"}


def description(*, sanitize: bool, stock: bool = False) -> dict[str, object]:
    plugins = {"sluice": {"level": "place", "policy": POLICY, "sanitize": sanitize, **_built()}}
    return {
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "slurm_conf": "SchedulerParameters=bf_interval=2,sched_interval=2\nMaxJobCount=100000\nMinJobAge=5\n",
        **({} if stock else plugins),
    }


def _built() -> dict[str, str]:
    """SLUICE_SOAK_PLUGINS names a folder of plugins with the sanitizer; without it they are built."""
    return {"plugins": folder} if (folder := os.environ.get("SLUICE_SOAK_PLUGINS")) else {}


def restart(cluster: DevCluster, environment: dict[str, str] | None = None) -> None:
    """The first slurmctld; with this environment in place of its own."""
    cluster.stop_daemon(CONTROLLERS[0], timeout=60)
    command = cluster.facts["daemons"][CONTROLLERS[0]]
    ask(cluster.layout, "spawn", name=CONTROLLERS[0], **{**command, "env": environment or command["env"]})


class Churn:
    """Submits jobs while nodes, controller and jobs are pushed around; knows every job that was acknowledged."""

    def __init__(self, cluster: DevCluster, *, jobs: int, seed: int, environment: dict[str, str] | None = None) -> None:
        self.cluster = cluster
        self.environment = environment  # slurmctld's, where it is not the cluster's
        self.left = jobs
        self.seed = seed
        self.acknowledged: list[str] = []
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.memory_kib: list[int] = []
        self.pending = 0
        self.pause = 0.7 if jobs < 1000 else 2  # seconds between acts: jobs have to get on, too

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
        while count := self._take():
            left = [self._command(choose) for _ in range(count)]
            for _ in range(60):
                script = "\n".join(f"{command} || echo refused" for command in left)
                done = self.cluster.run(["bash", "-c", script], user="alice", check=False, timeout=300)
                answers = done.stdout.split()
                with self.lock:
                    self.acknowledged += [answer for answer in answers if answer != "refused"]
                left = [command for command, answer in zip(left, answers, strict=True) if answer == "refused"]
                if not left:
                    break
                time.sleep(1)
            else:
                pytest.fail(f"no submission went through for a minute: {done.stderr}")

    def _take(self) -> int:
        while self.pending > QUEUE:
            time.sleep(0.2)
        with self.lock:
            count = min(BATCH, self.left)
            self.left -= count
            return count

    def _command(self, choose: random.Random) -> str:
        options = [*choose.choice(SHAPES), f"--time={choose.randint(1, 9)}", "--mem=200M", "--requeue"]
        wrap = f"--wrap=sleep 0.{choose.randint(1, 4)}"
        return shlex.join(["sbatch", "--parsable", *options, "-o", "/dev/null", wrap])

    def _disturb(self) -> None:
        choose = random.Random(self.seed)
        acts = [self._cancel, self._cancel, self._requeue, self._requeue, self._drain, self._reconfigure, self._restart]
        round_of_acts = 0
        while not self.done.wait(self.pause):
            act = acts[round_of_acts % len(acts)] if round_of_acts < len(acts) else choose.choice(acts)
            round_of_acts += 1
            act(choose)
            self._look_at_memory()
            self.pending = len(self.cluster.run(["squeue", "-h", "-r", "-t", "PD"], check=False).stdout.splitlines())

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
        restart(self.cluster, self.environment)

    def _look_at_memory(self) -> None:
        pid = next(daemon.pid for daemon in self.cluster.daemons() if daemon.name == CONTROLLERS[0])
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
            cluster.run(["scontrol", "release", *held], check=False) if (held := waiting(cluster, "held")) else None
            if late := waiting(cluster, "begintime"):  # Slurm delays requeued jobs by two minutes
                cluster.run(["scontrol", "update", f"JobId={','.join(late)}", "StartTime=now"], check=False)
            return cluster.run(["squeue", "-h", "-o", "%i %T %r"]).stdout
        except (CommandError, SluiceError) as error:
            return str(error)

    wait_until(left, lambda text: text == "", timeout=timeout)


def waiting(cluster: DevCluster, why: str) -> list[str]:
    """Pending jobs with this in their reason: Slurm holds jobs after a failed launch."""
    lines = cluster.run(["squeue", "-h", "-t", "PD", "-o", "%i %r"]).stdout.splitlines()
    return [line.split()[0] for line in lines if why in line.lower()]


def accounted(cluster: DevCluster) -> dict[str, str]:
    """The last state of every job in the database."""
    lines = cluster.run(["sacct", "-nXP", "-S", "now-2days", "-o", "JobID,State"], timeout=300).stdout.splitlines()
    return {job: state.split()[0] for job, _, state in (line.partition("|") for line in lines)}


def complaints(log: str) -> set[str]:
    """What the sanitizer, but for leaks, or slurmctld's own checks said, without numbers."""
    wrong = re.compile(
        r"AddressSanitizer|runtime error:|underflow|under-count|negative|fatal:|inconsisten", re.IGNORECASE
    )
    leaked = re.compile(r"SUMMARY: AddressSanitizer: \d+ byte\(s\) leaked in ")
    lines = [line for line in log.splitlines() if wrong.search(line) and not leaked.match(line)]
    return {re.sub(r"\d+", "#", line) for line in lines}


# A leak: bytes of each object, and the calls that led to it, the inner ones first, with their places in Slurm's files.
# Those further out are who starts a job, be it restored or new, main or a thread.
FRAMES = 6
Leak = tuple[int, tuple[str, ...]]


def leaks(text: str) -> list[Counter[Leak]]:
    """What the sanitizer says that each process has leaked, and of how many objects. Where our select plugin handed a
    call on to Slurm's own function of the same name, it is left out: on stock Slurm there is nothing between."""
    *reports, _ = re.split(r"^SUMMARY: AddressSanitizer: (\d+) byte\(s\) leaked in .*\n", text, flags=re.M)
    processes = []
    for report, said in zip(reports[::2], reports[1::2], strict=True):
        found: Counter[Leak] = Counter()
        total = 0
        for size, count, stack in LEAK.findall(report):
            frames = re.findall(r"^ +#\d+ 0x[0-9a-f]*([0-9a-f]{3}) (?:in (.*)| .*)$", stack, re.M)
            # A plugin that Slurm has unloaded has no name, or another's stands there: its place in the page is left.
            led = [name or f"...{place}" for place, name in frames if not HANDED_ON.match(name)]
            found[int(size) // int(count), tuple(led[:FRAMES])] += int(count)
            total += int(size)
        assert total == int(said), f"a report that is not understood: {report[-20000:]}"
        processes.append(found)
    return processes


def most(processes: list[Counter[Leak]]) -> Counter[Leak]:
    """Of each leak the most that one process has."""
    found: Counter[Leak] = Counter()
    for process in processes:
        found |= process
    return found


LEAK = re.compile(
    r"^(?:Direct|Indirect) leak of (\d+) byte\(s\) in (\d+) object\(s\) allocated from:\n((?: +#.*\n)+)", re.M
)
HANDED_ON = re.compile(r"select_p_\w+ \S*/slurm_plugin/select/select_cons_tres\.c:\d+$")


def stop_controllers(cluster: DevCluster) -> str:
    """All that they have said; leaks are found when a process ends."""
    for name in reversed(CONTROLLERS):
        cluster.stop_daemon(name, timeout=120)
    return "".join(cluster.log(name).read_text(errors="replace") for name in CONTROLLERS)


def words_of_stock(cluster: DevCluster, environment: dict[str, str], *, jobs: int) -> str:
    """What slurmctld says without any plugin of ours, under the same sanitizer: after as much churn as `jobs` make,
    jobs run while it is restarted and reconfigured, as it leaks when it loads its state."""
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    if jobs:
        Churn(cluster, jobs=jobs, seed=20, environment=environment).run()
        drain_queue(cluster, timeout=600)
    for node in NODES:
        for gres in ("gpu:1", "shard:10240"):
            batch = ["sbatch", "-o/dev/null", "--mem=200M", "-t9", f"-w{node}", f"--gres={gres}", "--wrap=sleep 600"]
            cluster.run(batch, user="alice")
    running = ["squeue", "-h", "-t", "R", "-o", "%i"]
    wait_until(lambda: len(cluster.run(running).stdout.split()), lambda jobs: jobs == 2 * len(NODES), timeout=120)
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    cluster.run(["scontrol", "reconfigure"])
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    return stop_controllers(cluster)


def test_churn_loses_no_job_and_leaks_nothing(make_cluster: MakeCluster, full_scale: bool) -> None:
    cluster = make_cluster(description(sanitize=True), timeout=300)
    assert until(lambda: status(cluster)["level"]) == "place"
    jobs = int(os.environ.get("SLUICE_SOAK_JOBS", "20000")) if full_scale else 150
    churn = Churn(cluster, jobs=jobs, seed=20)
    churn.run()
    drain_queue(cluster, timeout=3000 if full_scale else 300)
    wait_until(
        lambda: {job for job in churn.acknowledged if accounted(cluster).get(job) not in ENDED},
        lambda lost: not lost,
        timeout=120,
    )
    assert len(set(churn.acknowledged)) == len(churn.acknowledged)
    if full_scale:
        half = len(churn.memory_kib) // 2
        early, late = sorted(churn.memory_kib[:half])[half // 2], sorted(churn.memory_kib[half:])[half // 2]
        assert late < early * 1.25 + 65536, f"slurmctld grew from {early} to {late} KiB"
    environment = cluster.facts["daemons"][CONTROLLERS[0]]["env"]
    said = stop_controllers(cluster)
    cluster.down()
    # In a long run slurmctld's own checks complain without us, too: about the same, and no more.
    words = words_of_stock(
        make_cluster(description(sanitize=True, stock=True)), environment, jobs=jobs // 10 if full_scale else 0
    )
    assert complaints(said) - complaints(words) == set()
    found, stock = most(leaks(said)), most(leaks(words))
    assert not found - stock, f"leaks that stock Slurm does not have: {found - stock}"
    print(f"leaks of slurmctld's own: {found}; without plugins: {stock}")


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb stops slurmctld inside a hook")
@pytest.mark.parametrize("hook", ["sluice_hook_test", "sluice_hook_begin", "site_factor_p_set", "job_submit"])
def test_killed_inside_a_hook_it_comes_back_with_its_jobs(make_shared: DevCluster, hook: str) -> None:
    cluster = make_shared
    ask = ["sbatch", "--parsable", "--gres=gpu:1", "-o/dev/null", "--wrap=sleep 600"]
    before = [cluster.run(ask, user="alice").stdout.strip() for _ in range(4)]
    running = ["squeue", "-h", "-t", "R", "-o", "%i", "-j", ",".join(before)]
    wait_until(lambda: cluster.run(running, check=False).stdout.split(), lambda jobs: len(jobs) == 4, timeout=120)
    before.append(let_it_save(cluster))  # Slurm forgets a start that it has not saved
    pid = next(daemon.pid for daemon in cluster.daemons() if daemon.name == "slurmctld@ctl1")
    gdb = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", f"break {hook}", "-ex", "continue", "-ex", "kill"]
    asks = cluster.command(ask, user="alice")
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killer = subprocess.Popen(cluster.command(gdb), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    asking = []
    deadline = time.monotonic() + 180
    while killer.poll() is None and time.monotonic() < deadline:  # gdb takes a moment to attach
        asking.append(subprocess.Popen(asks, **quiet))
        time.sleep(1)
    killer.kill()
    said = killer.communicate()[0]
    for asked in asking:
        asked.kill()
        asked.wait()
    assert "hit Breakpoint" in said, said
    wait_until(lambda: status_of(cluster, "slurmctld@ctl1"), lambda status: status is not None)
    cluster.start_daemon("slurmctld@ctl1")
    wait_until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda text: "UP" in text, timeout=120)
    states = wait_until(
        lambda: cluster.run(["squeue", "-h", "-o", "%i %T", "-j", ",".join(before)], check=False).stdout.split(),
        lambda words: len(words) == 2 * len(before),
        timeout=120,
    )
    assert sorted(states[1::2]) == ["PENDING", *["RUNNING"] * 4]
    cluster.run(["scancel", *before])
    cluster.run(["scancel", "-u", "alice"])
    wait_until(lambda: cluster.run(["squeue", "-h"]).stdout, lambda text: text == "", timeout=120)


def status_of(cluster: DevCluster, name: str) -> int | None:
    """A daemon's exit status; None while it runs."""
    return next(daemon.status for daemon in cluster.daemons() if daemon.name == name)


@pytest.fixture(scope="module")
def make_shared(make_shared_cluster: MakeCluster) -> DevCluster:
    one = {**description(sanitize=False), "controllers": 1}
    return make_shared_cluster(one)
