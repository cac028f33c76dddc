"""Jobs with GPUs that are saved as they run: CRIU itself, the driver's calls, and a simulated driver behind them.

`SLUICE_CRIU` as in test_system_checkpoint.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter as Counted
from collections.abc import Callable

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.gpu_saved_jobs import ONE, goes_on_on_another_gpu, gpu_site, processes
from tests.integration.jobs import shown
from tests.integration.saved_jobs import GPU_COUNTER, NODE, Counter, images, storm
from tests.integration.settled import let_it_save, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> DevCluster:
    return gpu_site(make_shared_cluster, tmp_path_factory.mktemp("platform"))


def test_a_job_goes_on_on_another_gpu(cluster: DevCluster) -> None:
    goes_on_on_another_gpu(cluster)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("import socket; server = socket.create_server(('127.0.0.1', 0))\n"
         "client = socket.create_connection(server.getsockname()); server.accept()", "it has a TCP connection"),
        ("ok(cu.cuMemAllocManaged(c.byref(c.c_uint64()), c.c_size_t(1 << 20), 1))", "cannot save what it has on its"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_saved_has_its_gpu_again(cluster: DevCluster, more: str, why: str) -> None:
    name = "tcp" if "TCP" in why else "managed"
    job = Counter(cluster, name, *ONE, script=GPU_COUNTER.replace("{more}", more), last=60)
    job.counts(5)
    job.save()
    until(lambda: cluster.log_tail(f"agent@{NODE}", 5), lambda said: f"job={job.id}" in said and why in said)
    assert shown(cluster, job.id)["JobState"] == "RUNNING"
    assert job.ended()["ExitCode"] == "7:0", job.all_said()
    assert job.is_exact(), job.all_said()


FULL = pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="long: SLUICE_TEST_SCALE=full")
# Waits until a job is off its GPU, and CRIU is at work, which gets a signal.
SIGNAL_CRIU = """
import glob, os, sys, time
def named(word):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if word in open(path).read().split(chr(0)):
                yield int(path.split("/")[2])
        except (OSError, UnicodeDecodeError):
            pass
print(flush=True)
while not (found := list(named("--leave-stopped"))):
    time.sleep(0.002)
for pid in found:
    os.kill(pid, int(sys.argv[1]))
"""


@FULL
def test_a_job_has_its_gpu_again_when_the_agent_comes_back_late(cluster: DevCluster) -> None:
    job = Counter(cluster, "late", *ONE, script=GPU_COUNTER, last=60)
    job.counts(5)
    stop = cluster.command(["/usr/bin/python3", "-c", SIGNAL_CRIU, str(int(signal.SIGSTOP))], node=NODE)
    with subprocess.Popen(stop, stdout=subprocess.PIPE) as stopping:
        assert stopping.stdout is not None and stopping.stdout.readline()
        job.save()
        assert stopping.wait(60) == 0
    cluster.stop_daemon(f"agent@{NODE}", number=signal.SIGKILL)
    cluster.run(["/usr/bin/python3", "-c", SIGNAL_CRIU, str(int(signal.SIGCONT))], node=NODE)
    until(lambda: cluster.run(["pgrep", "-f", "sluice-checkpoint save"], check=False).returncode)
    seen = job.words()
    assert shown(cluster, job.id)["JobState"] == "RUNNING" and processes(cluster) == [0, 0]
    cluster.start_daemon(f"agent@{NODE}")
    until(lambda: len(job.words()) > len(seen), shows=job.all_said)
    assert job.ended()["ExitCode"] == "7:0" and job.is_exact(), job.all_said()


KINDS = ("agent", "dump", "restore", "driver", "helper")
KILLS = 1000
STORM_S = 12.0


def check_last_run(job: Counter) -> None:
    """Complete and in order, whether it went on or began again from its start: nothing is lost in it, or done twice."""
    words = job.words()
    begin = len(words) - 1 - words[::-1].index("0")
    numbers = [int(word) for word in words[begin:] if word.isdecimal()]
    assert numbers[:-1] == [*range(job.last)], job.all_said()


def give_back(cluster: DevCluster) -> None:
    """A node whose agent dies again and again is drained, as it should be."""
    if "drain" in cluster.run(["sinfo", "-hNo", "%T"]).stdout:
        cluster.run(["scontrol", "update", f"NodeName={NODE}", "State=RESUME"])


@FULL
def test_whatever_is_killed_while_jobs_are_saved_and_resumed(cluster: DevCluster) -> None:
    """The node agent, CRIU, the process that asks the driver, the launcher's helper, and slurmctld."""
    killed: Counted[str] = Counted()
    rounds = went_on = 0
    while killed.total() < KILLS:
        rounds += 1
        jobs = [Counter(cluster, f"storm-{rounds}-{one}", *ONE, script=GPU_COUNTER, last=120) for one in range(2)]
        for job in jobs:
            job.counts(5)
        if rounds % 3 == 2:
            let_it_save(cluster)  # stock Slurm forgets a job that it has just accepted
        for job in jobs:
            job.save()
        if rounds % 3 == 2:
            cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
            cluster.start_daemon("slurmctld@ctl1")
            killed["slurmctld"] += 1
        killed.update(storm(cluster, STORM_S, KINDS))
        until(lambda: cluster.run(["sinfo", "-h"], check=False).returncode == 0)
        for job in jobs:
            job.goes_on(lambda: give_back(cluster))
            assert job.ended()["ExitCode"] == "7:0", job.all_said()
            check_last_run(job)
            went_on += job.is_exact()
        assert list(images(cluster).iterdir()) == [] and processes(cluster) == [0, 0]
        print(f"{killed.total()} killed {dict(killed)} in {rounds} rounds; {went_on} of {2 * rounds} jobs went on")
