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
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.base.run import CommandError
from tests.integration.jobs import submit
from tests.integration.sanitizer import START, complaints, is_stocks_own, leaks, most, sanitizer_ends
from tests.integration.settled import let_it_save, status, until
from tests.integration.slurm_features import POLICY, gpu_indices

pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., DevCluster]
NODES = ["n1", "n2", "n3", "n4"]
SLURMCTLD = "slurmctld@ctl1"
BATCH = 5  # submissions of one shell
SEED = 20
QUEUE = 200  # pending jobs, beyond which submissions pause
SHAPES = [
    ["--gres=gpu:1"],
    ["--gres=gpu:4", "-n2"],
    ["--gpus-per-node=8", "-N1", "-n8"],
    ["--gpus-per-node=2", "-N2"],
    ["--gres=shard:10240"],
    ["-n1"],
]
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "REQUEUED"}


def description(*, sanitize: bool, stock: bool = False, long: bool = False) -> dict[str, object]:
    """Of a cluster that is churned. A long run keeps the journal, as it is to lose no job by faults of slurmctld's own,
    and has no backup: with one, each command that meets a restart sleeps for half of SlurmctldTimeout."""
    sluice = {"level": "place", "policy": POLICY, "sanitize": sanitize, "journal": long}
    interval = 10 if long else 2
    return {
        "controllers": 1 if long else 2,
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "slurm_conf": f"SchedulerParameters=bf_interval={interval},sched_interval=2\n"
        # At a reconfiguration 22.05 takes the next job id from the saved state, so that ids of jobs that were submitted
        # and purged since are given again: no job is purged before it has been saved.
        "MaxJobCount=100000\nMinJobAge=60\nPriorityCalcPeriod=1\n",
        **({} if stock else {"sluice": sluice}),
    }


def restart(cluster: DevCluster, environment: dict[str, str] | None = None) -> None:
    """The first slurmctld; with this environment in place of its own."""
    cluster.stop_daemon(SLURMCTLD, timeout=120)
    start(cluster, environment)


def start(cluster: DevCluster, environment: dict[str, str] | None) -> None:
    command = cluster.facts["daemons"][SLURMCTLD]
    ask(cluster.layout, "spawn", name=SLURMCTLD, **{**command, "env": environment or command["env"]})


def controllers(cluster: DevCluster) -> list[str]:
    return [name for name in cluster.facts["daemons"] if name.startswith("slurmctld@")]


class Churn:
    """Submits jobs while nodes, controller and jobs are pushed around; knows every job that was acknowledged."""

    def __init__(
        self, cluster: DevCluster, *, jobs: int, pause: float, environment: dict[str, str] | None = None
    ) -> None:
        self.cluster = cluster
        self.environment = environment  # slurmctld's, where it is not the cluster's
        self.left = jobs
        self.acknowledged: list[str] = []
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.memory_kib: list[int] = []
        self.pending = 0
        self.pause = pause  # seconds between acts: jobs have to get on, too
        self.acts: Counter[str] = Counter()
        self.ends: list[str] = []  # what the sanitizer said of each slurmctld that ended by itself

    def run(self) -> None:
        """All jobs are submitted when this returns."""
        with ThreadPoolExecutor(5) as pool:
            disturber = pool.submit(self._disturb)
            try:
                for worker in [pool.submit(self._submit, number) for number in range(4)]:
                    worker.result()
            finally:
                self.done.set()
            disturber.result()

    def revive(self) -> bool:
        """Start slurmctld again where it has ended by itself, as systemd would; whether it had."""
        if status_of(self.cluster, SLURMCTLD) is None:
            return False
        log = self.cluster.log(SLURMCTLD).read_text(errors="replace")
        self.ends += sanitizer_ends(log[log.rindex(START) :])[0] or [f"no word of the sanitizer's: {log[-2000:]}"]
        start(self.cluster, self.environment)
        return True

    def _submit(self, number: int) -> None:
        choose = random.Random(SEED * 1000 + number)
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
        choose = random.Random(SEED)
        acts = [self._cancel, self._cancel, self._requeue, self._requeue, self._drain, self._reconfigure, self._restart]
        while not self._pause() or self.acts.total() < len(acts):  # each once at least, however fast jobs are submitted
            done = self.acts.total()
            act = acts[done] if done < len(acts) else choose.choice(acts)
            self.acts[act.__name__.strip("_")] += 1
            act(choose)
            self._look_at_memory()

    def _pause(self) -> bool:
        """The time between two acts, in which queue and slurmctld are looked after; whether all is submitted."""
        over = time.monotonic() + self.pause
        while not (done := self.done.wait(min(self.pause, 2))) and time.monotonic() < over:
            self._look_at_queue()
        self._look_at_queue()
        return done

    def _look_at_queue(self) -> None:
        self.revive()
        queue = self.cluster.run(["squeue", "-h", "-r", "-t", "PD"], check=False)
        if queue.returncode == 0:
            self.pending = len(queue.stdout.splitlines())

    def _some_job(self, choose: random.Random) -> str | None:
        """One of those that wait, run or have just ended."""
        with self.lock:
            return choose.choice(self.acknowledged[-60 - self.pending :]) if self.acknowledged else None

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
        try:
            restart(self.cluster, self.environment)
        except SluiceError:  # it may have ended by itself in this moment
            if not self.revive():
                raise

    def _look_at_memory(self) -> None:
        pid = next(daemon.pid for daemon in self.cluster.daemons() if daemon.name == SLURMCTLD)
        status = self.cluster.run(["cat", f"/proc/{pid}/status"], check=False).stdout
        if found := re.search(r"VmRSS:\s+(\d+)", status):
            self.memory_kib.append(int(found[1]))


def drain_queue(churn: Churn, *, timeout: float) -> None:
    """Wait until every job has ended, with all nodes in service."""
    cluster = churn.cluster
    next_registration = time.monotonic() + 30

    def left() -> str:
        churn.revive()
        nonlocal next_registration
        try:
            if time.monotonic() > next_registration:  # at which Slurm misses a job that it never sent to its node
                next_registration += 30
                cluster.run(["scontrol", "reconfigure"])
            for node in cluster.node_states():
                if node.state.startswith(("drain", "down")):
                    cluster.run(["scontrol", "update", f"NodeName={node.name}", "State=RESUME"], check=False)
            cluster.run(["scontrol", "release", *held], check=False) if (held := waiting(cluster, "held")) else None
            if late := waiting(cluster, "begintime"):  # Slurm delays requeued jobs by two minutes
                cluster.run(["scontrol", "update", f"JobId={','.join(late)}", "StartTime=now"], check=False)
            return cluster.run(["squeue", "-h", "-o", "%i %T %r"]).stdout
        except (CommandError, SluiceError) as error:
            return str(error)

    until(left, lambda text: text == "", timeout=timeout)


def waiting(cluster: DevCluster, why: str) -> list[str]:
    """Pending jobs with this in their reason: Slurm holds jobs after a failed launch."""
    lines = cluster.run(["squeue", "-h", "-t", "PD", "-o", "%i %r"]).stdout.splitlines()
    return [line.split()[0] for line in lines if why in line.lower()]


def accounted(cluster: DevCluster) -> dict[str, str]:
    """The last state of every job in the database."""
    lines = cluster.run(["sacct", "-nXP", "-S", "now-2days", "-o", "JobID,State"], timeout=300).stdout.splitlines()
    return {job: state.split()[0] for job, _, state in (line.partition("|") for line in lines)}


def stop_controllers(cluster: DevCluster) -> str:
    """All that they have said; leaks are found when a process ends."""
    names = controllers(cluster)
    for name in reversed(names):
        cluster.stop_daemon(name, timeout=120)
    return "".join(cluster.log(name).read_text(errors="replace") for name in names)


UNDERFLOW = "grp_used_tres_run_secs underflow"
# The thread that takes off what running jobs have run has done so for all of them, and not yet noted until when.
HOLD_DECAY = """\
set pagination off
set breakpoint pending on
break fair_tree_decay
continue
python gdb.execute("tbreak unlock_slurmctld thread %d" % gdb.selected_thread().num)
continue
finish
shell touch {held}
print ((unsigned int(*)(unsigned int))sleep)(15)
detach
"""


def end_jobs_while_decay_is_held(cluster: DevCluster) -> None:
    """slurmctld takes twice off what such jobs had run, and says so: docs/scheduling-in-slurm.md."""
    batch = ["sbatch", "--parsable", "-t10", "--mem=200M", "-o/dev/null", "--wrap=exec sleep 600"]
    jobs = [cluster.run([*batch, f"--gres={gres}"], user="alice").stdout.strip() for gres in ("gpu:1", "shard:10240")]
    running = ["squeue", "-h", "-t", "R", "-j", ",".join(jobs), "-o", "%i"]
    until(lambda: len(cluster.run(running).stdout.split()), lambda count: count == len(jobs), timeout=120)
    time.sleep(5)  # that much is taken off, at least
    held, commands = cluster.folder / "decay_held", cluster.folder / "hold_decay.gdb"
    commands.write_text(HOLD_DECAY.format(held=shlex.quote(str(held))))
    pid = next(daemon.pid for daemon in cluster.daemons() if daemon.name == SLURMCTLD)
    gdb = cluster.command(["gdb", "-nx", "-batch", "-p", str(pid), "-x", str(commands)])
    with subprocess.Popen(gdb, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as holder:
        try:
            until(lambda: held.exists() or holder.poll() is not None, bool, timeout=180)
            cluster.run(["scancel", *jobs])
            said = holder.communicate(timeout=120)[0]
        finally:
            holder.kill()
    assert held.exists(), said
    until(lambda: UNDERFLOW in cluster.log(SLURMCTLD).read_text(errors="replace"), bool, timeout=60)


def words_of_stock(cluster: DevCluster, environment: dict[str, str], *, jobs: int, underflow: bool) -> str:
    """What slurmctld says without any plugin of ours, under the same sanitizer: after a churn of so many jobs, denser
    than ours, as its own checks complain of jobs that run through restarts; of jobs that end at a certain moment,
    where `underflow`; then jobs run while it is restarted and reconfigured, as it leaks when it loads its state."""
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    if underflow:
        end_jobs_while_decay_is_held(cluster)
    if jobs:
        churn = Churn(cluster, jobs=jobs, pause=1.5, environment=environment)
        churn.run()
        cluster.run(["scancel", "-u", "alice"])
        drain_queue(churn, timeout=600)
        cluster.run(["scontrol", "reconfigure"])  # since a restart it may have GPUs in use by nobody
    for node in NODES:
        for gres in ("gpu:1", "shard:10240"):
            submit(cluster, "--mem=200M", "-t9", f"-w{node}", f"--gres={gres}")
    running = ["squeue", "-h", "-t", "R", "-o", "%i"]
    until(lambda: len(cluster.run(running).stdout.split()), lambda jobs: jobs == 2 * len(NODES), timeout=120)
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    cluster.run(["scontrol", "reconfigure"])
    restart(cluster, environment)
    cluster.wait_registered(timeout=120)
    return stop_controllers(cluster)


def test_churn_loses_no_job_and_leaks_nothing(make_cluster: MakeCluster, full_scale: bool) -> None:
    cluster = make_cluster(description(sanitize=True, long=full_scale), timeout=300)
    assert until(lambda: status(cluster)["level"]) == "place"
    jobs = int(os.environ.get("SLUICE_SOAK_JOBS", "20000")) if full_scale else 100
    churn = Churn(cluster, jobs=jobs, pause=6 if full_scale else 0.7)
    churn.run()
    drain_queue(churn, timeout=3000 if full_scale else 300)

    def without_an_end() -> set[str]:
        states = accounted(cluster)
        return {job for job in churn.acknowledged if states.get(job) not in ENDED}

    until(without_an_end, lambda lost: not lost, timeout=120)
    assert len(set(churn.acknowledged)) == len(churn.acknowledged)
    if full_scale:
        half = len(churn.memory_kib) // 2
        early, late = sorted(churn.memory_kib[:half])[half // 2], sorted(churn.memory_kib[half:])[half // 2]
        assert late < early * 1.25 + 65536, f"slurmctld grew from {early} to {late} KiB"
    environment = cluster.facts["daemons"][SLURMCTLD]["env"]
    reports, said = sanitizer_ends(stop_controllers(cluster))
    cluster.down()
    assert [report for report in churn.ends + reports if not is_stocks_own(report)] == []
    # In a long run slurmctld's own checks complain without us, too: about the same, and no more.
    stocks = make_cluster(description(sanitize=True, stock=True, long=full_scale))
    underflow = full_scale or any(UNDERFLOW in line for line in complaints(said))
    asked = words_of_stock(stocks, environment, jobs=jobs // 4 if full_scale else 0, underflow=underflow)
    ends_of_stock, words = sanitizer_ends(asked)
    assert complaints(said) - complaints(words) == set()
    found, stock = most(leaks(said)), most(leaks(words))
    assert not found - stock, f"leaks that stock Slurm does not have: {found - stock}"
    print(f"{len(churn.acknowledged)} jobs, {dict(churn.acts)}; leaks: {found}; without plugins: {stock}")
    print(f"slurmctld ended by its own fault {len(reports)} times, without plugins {len(ends_of_stock)} times")


# In the placement, the order, the submission, before Sluice starts a job itself, and before a job's prolog.
HOOKS = [
    "sluice_hook_test",
    "sluice_hook_begin",
    "site_factor_p_set",
    "job_submit",
    "sluice_start_job",
    "prep_p_prolog_slurmctld",
]


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb stops slurmctld inside a hook")
@pytest.mark.parametrize("hook", HOOKS)
def test_killed_inside_a_hook_it_comes_back_with_its_jobs(make_shared: DevCluster, hook: str) -> None:
    cluster = make_shared
    ask = ["sbatch", "--parsable", "--gres=gpu:1", "-t9", "-o/dev/null", "--wrap=exec sleep 600"]
    before = [cluster.run(ask, user="alice").stdout.strip() for _ in range(4)]
    running = ["squeue", "-h", "-t", "R", "-o", "%i", "-j", ",".join(before)]
    until(lambda: cluster.run(running, check=False).stdout.split(), lambda jobs: len(jobs) == 4, timeout=120)
    before.append(let_it_save(cluster))  # Slurm forgets a start that it has not saved
    pid = next(daemon.pid for daemon in cluster.daemons() if daemon.name == "slurmctld@ctl1")
    gdb = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", f"break {hook}", "-ex", "continue", "-ex", "kill"]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killer = subprocess.Popen(cluster.command(gdb), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    asking: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + 180
    while killer.poll() is None and time.monotonic() < deadline:  # gdb takes a moment to attach
        gang = [f"--gang=killed{len(asking)}:2"]  # whose members Sluice starts itself
        for more in [gang, gang] if hook == "sluice_start_job" else [[]]:
            asking.append(subprocess.Popen(cluster.command([*ask, *more], user="alice"), **quiet))
        time.sleep(1)
    killer.kill()
    said = killer.communicate()[0]
    for asked in asking:
        asked.kill()
        asked.wait()
    assert "hit Breakpoint" in said, said
    until(lambda: status_of(cluster, "slurmctld@ctl1"), lambda status: status is not None)
    cluster.start_daemon("slurmctld@ctl1")
    until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda text: "UP" in text, timeout=120)
    states = until(
        lambda: cluster.run(["squeue", "-h", "-o", "%i %T", "-j", ",".join(before)], check=False).stdout.split(),
        lambda words: len(words) == 2 * len(before),
        timeout=120,
    )
    assert sorted(states[1::2]) == ["PENDING", *["RUNNING"] * 4]
    # Jobs start while one looks: the two agree once nothing happens any more.
    until(lambda: gpus_in_use(cluster), lambda seen: seen[0] == seen[1] and len(seen[0]) >= 4, timeout=120)
    cluster.run(["scancel", *before])
    cluster.run(["scancel", "-u", "alice"])
    until(lambda: cluster.run(["squeue", "-h"]).stdout, lambda text: text == "", timeout=120)
    until(lambda: gpus_in_use(cluster), lambda seen: seen == ([], []), timeout=120)
    # Jobs that it had not saved are forgotten, and their ids given out again: none of theirs is left on a node then,
    # and no job that is to run gets such an id, as a late word about the other one would be taken for one about it.
    steps = ["pgrep", "-x", "slurmstepd"]
    until(lambda: cluster.run(steps, check=False).stdout, lambda pids: pids == "", timeout=120)
    for _ in asking:
        cluster.run([*ask, "--hold"], user="alice")
    cluster.run(["scancel", "-u", "alice"])


# slurmctld notices that it is to end between a job's allocation and its prolog.
STAY_IN_PROLOG = """\
set pagination off
handle SIGUSR1 nostop noprint pass
break prep_p_prolog_slurmctld
shell touch {attached}
continue
printf "stays at %lu instead of %u\\n", (unsigned long)$pc, *(unsigned short *)$pc
delete
set var *(unsigned short *)$pc = 0xfeeb
detach
"""
"""The thread jumps to where it is: gdb 13 cannot let it call sleep where the processor has AMX."""
END_AND_GO_ON = """\
import os, signal, sys, time
pid, place, instruction = map(int, sys.argv[1:])
os.kill(pid, signal.SIGTERM)
time.sleep(0.02)
os.pwrite(os.open(f"/proc/{pid}/mem", os.O_WRONLY), instruction.to_bytes(2, "little"), place)
"""


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb stops slurmctld inside a hook")
def test_a_job_that_slurmctld_starts_as_it_ends_is_launched_by_the_next(make_shared: DevCluster) -> None:
    cluster = make_shared
    pid = next(daemon.pid for daemon in cluster.daemons() if daemon.name == SLURMCTLD)
    attached, commands = cluster.folder / "attached", cluster.folder / "stay_in_prolog.gdb"
    commands.write_text(STAY_IN_PROLOG.format(attached=shlex.quote(str(attached))))
    command = cluster.command(["gdb", "-nx", "-batch", "-p", str(pid), "-x", str(commands)])
    begun = cluster.folder / "home" / "alice" / "begun"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as gdb:
        until(attached.exists)
        job = submit(cluster, "--gres=gpu:1", "-t9", wrap=f"touch {INSIDE}/home/alice/begun; exec sleep 600")
        said = gdb.communicate(timeout=120)[0]
    stays = re.search(r"stays at (\d+) instead of (\d+)", said)
    assert stays, said
    cluster.run(["python3", "-c", END_AND_GO_ON, str(pid), *stays.groups()])
    until(lambda: status_of(cluster, SLURMCTLD), lambda status: status is not None)
    assert not begun.exists()
    cluster.start_daemon(SLURMCTLD)
    until(begun.exists, timeout=90)  # Slurm itself misses it after 100 s at the least
    cluster.run(["scancel", job])


def gpus_in_use(cluster: DevCluster) -> tuple[list[str], list[str]]:
    """``NODE:INDEX`` of each GPU that the nodes' records have in use, and of each that a job holds, as often as one
    does. Of no other GRES."""
    nodes = cluster.run(["scontrol", "show", "node", "-d", "-o"]).stdout
    used = [
        f"{node}:{gpu}"
        for node, gres in re.findall(r"NodeName=(\S+) .*? GresUsed=(\S+)", nodes)
        for gpu in gpu_indices(gres.partition(",shard")[0])
    ]
    jobs = cluster.run(["scontrol", "show", "job", "-d", "-o"]).stdout.splitlines()
    alive = [job for job in jobs if re.search(r"JobState=(RUNNING|COMPLETING|CONFIGURING|SUSPENDED)", job)]
    held = [
        f"{node}:{gpu}"
        for job in alive
        for nodes, gres in re.findall(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", job)
        for node in expand(nodes)
        for gpu in gpu_indices(gres)
    ]
    return sorted(used), sorted(held)


def status_of(cluster: DevCluster, name: str) -> int | None:
    """A daemon's exit status; None while it runs."""
    return next(daemon.status for daemon in cluster.daemons() if daemon.name == name)


@pytest.fixture(scope="module")
def make_shared(make_shared_cluster: MakeCluster) -> DevCluster:
    one = {**description(sanitize=False), "controllers": 1}
    return make_shared_cluster(one)
