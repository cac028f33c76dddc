"""Jobs that are saved as they run, by CRIU itself: resumed exactly, whatever dies meanwhile, and by nobody else.

`SLUICE_CRIU` names CRIU, default build/criu/criu, which tools/criu fetches; without it there is nothing to test.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from policy.checkpoint import NodeCheckpoint, NodeSystem
from policy.compiled import CompiledPolicy, Global
from policy.node import NodePolicy
from sluice.slurm.control import SAVE_WORDS
from tests.integration.jobs import sbatch, shown
from tests.integration.platforms import SINGLE
from tests.integration.settled import start_again, until

pytestmark = pytest.mark.cluster

NODE = "n1"
POLICY = CompiledPolicy(generated_s=0, source="test", settings=Global(checkpoint_system=True))
ROUNDS = 40 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 2
CRIU = Path(os.environ.get("SLUICE_CRIU") or Path(__file__).parents[2] / "build/criu/criu")
# Counts, with a file that is written, a lock, and a child.
COUNTER = """#!/bin/bash
exec 5>>kept
exec 6>lock; flock -n 6 || echo lock is taken
trap 'echo got USR1' USR1
for ((i = 0; i < {last}; i++)); do echo $i; echo $i >&5; sleep 0.1; done
wc -l <kept
exit 7
"""


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> DevCluster:
    if not CRIU.exists():
        pytest.skip(f"{CRIU}: no CRIU; fetch it with: tools/criu build/criu")
    platform = tmp_path_factory.mktemp("platform") / "single.yaml"
    platform.write_text(SINGLE)
    made = make_shared_cluster(
        {
            "nodes": [{"names": NODE, "platform": str(platform)}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "sluice": {"level": "admit", "policy": POLICY.render()},
            "users": [{"name": "alice"}, {"name": "bob"}],
        }
    )
    set_policy(made, {})
    until(lambda: can_save(made), timeout=60)
    return made


def set_policy(cluster: DevCluster, system: dict[str, Any] | None) -> None:
    """`system`: what is not as by default; None: the site does not save jobs."""
    of_node = None if system is None else NodeSystem(criu=str(CRIU), **system)
    policy = NodePolicy(checkpoint=NodeCheckpoint(system=of_node))
    (cluster.slurm_conf_dir() / "sluice.node.json").write_text(policy.render())


def can_save(cluster: DevCluster) -> bool:
    return cluster.run(["test", "-e", "/run/sluice/checkpoint"], node=NODE, check=False).returncode == 0


class Counter:
    """A job that counts, and what it has written."""

    def __init__(self, cluster: DevCluster, name: str, *words: str, last: int = 90, user: str = "alice") -> None:
        self.cluster = cluster
        self.last = last
        self.folder = cluster.folder / "home" / user / name
        self.folder.mkdir()
        self.folder.chmod(0o777)
        (self.folder / "job").write_text(COUNTER.format(last=last))
        self.output = self.folder / "out"
        inside = INSIDE / "home" / user / name
        command = ["--checkpoint=system", "-D", str(inside), "-o", f"{inside}/out", *words, f"{inside}/job"]
        self.id = sbatch(cluster, *command, user=user)

    def words(self) -> list[str]:
        return self.output.read_text().split("\n")[:-1] if self.output.exists() else []

    def counts(self, least: int) -> None:
        """Wait until it has."""
        until(lambda: str(least) in self.words(), timeout=60, shows=self.all_said)

    def all_said(self) -> object:
        """What helps when it is not as it should be."""
        return self.words(), shown(self.cluster, self.id), self.cluster.log_tail(f"agent@{NODE}", 12)

    def save(self) -> None:
        self.cluster.run(["scancel", *SAVE_WORDS, self.id])

    def start_again(self) -> None:
        until(
            lambda: shown(self.cluster, self.id),
            lambda now: now["JobState"] == "PENDING" and now["Restarts"] == "1",
            timeout=30,
            shows=self.all_said,
        )
        start_again(self.cluster, self.id)

    def goes_on(self) -> None:
        """Until it runs again, or on, whatever was killed."""

        moved: set[str] = set()

        def settled() -> bool:
            now = shown(self.cluster, self.id)
            if now["JobState"] == "PENDING" and now["Restarts"] not in moved:
                moved.add(now["Restarts"])
                self.cluster.run(["scontrol", "update", f"JobId={self.id}", "StartTime=now+2"])
            return str(self.last - 1) in self.words()

        until(settled, timeout=90, shows=self.all_said)

    def ended(self) -> dict[str, str]:
        return dict(until(lambda: shown(self.cluster, self.id), lambda now: now["JobState"] in ("COMPLETED", "FAILED")))

    def is_exact(self) -> bool:
        numbers = [int(word) for word in self.words() if word.isdecimal()]
        return numbers == [*range(self.last), self.last]


def images(cluster: DevCluster) -> Path:
    return cluster.folder / "nodes" / NODE / "checkpoints/images"


def test_a_job_goes_on_where_it_was(cluster: DevCluster) -> None:
    job = Counter(cluster, "exact")
    job.counts(15)
    job.save()
    job.start_again()
    job.counts(40)
    cluster.run(["scancel", "--signal=USR1", "--batch", job.id])
    ended = job.ended()
    assert ended["ExitCode"] == "7:0"
    assert job.is_exact(), job.all_said()
    assert "got USR1" in job.words() and "lock is taken" not in job.words()
    assert list(images(cluster).iterdir()) == []


# In the node, as its root: the process that listens for slurmd's programs, or what it has started.
KILL = """
import glob, os, socket, struct, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect("/run/sluice/agent.sock")
agent = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
children = [int(pid) for name in glob.glob(f"/proc/{agent}/task/*/children") for pid in open(name).read().split()]
for pid in [agent] if sys.argv[1] == "agent" else children:
    if pid == agent or b"dump" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(pid, 9)
"""


def kill(cluster: DevCluster, what: str) -> None:
    """With SIGKILL; the guard starts the next agent."""
    cluster.run(["/usr/bin/python3", "-c", KILL, what], node=NODE, check=False)


def test_agent_and_criu_may_die_at_any_moment(cluster: DevCluster) -> None:
    """The job ends with all numbers in order, in one piece or from its start again: never with some lost or twice."""
    for round_ in range(ROUNDS):
        job = Counter(cluster, f"killed-{round_}")
        job.counts(5)
        job.save()
        time.sleep(random.uniform(0, 0.5))
        kill(cluster, "criu" if round_ % 2 else "agent")
        job.goes_on()
        assert job.ended()["ExitCode"] == "7:0", job.all_said()
        words = job.words()
        # Where CRIU was killed the job may have begun again from its start: then its last run is complete.
        last_run = len(words) - 1 - words[::-1].index("0")
        numbers = [int(word) for word in words[last_run:] if word.isdecimal()]
        assert numbers[:-1] == [*range(job.last)], job.all_said()
        assert job.is_exact() or round_ % 2, job.all_said()


def test_a_file_that_was_exchanged_is_not_opened(cluster: DevCluster) -> None:
    """Root opens a job's files by their names: a link in the place of one leads to nothing,
    not even to a file that the job had open itself, but to read it alone. The job begins again from its start.
    """
    shared = cluster.folder / "home/shared"
    shared.write_text("of root's\n")
    shared.chmod(0o644)
    folder = cluster.folder / "home/bob/exchange"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "mine").write_text("of bob's!\n")
    os.chown(folder / "mine", 2002, -1)
    (folder / "mine").chmod(0o644)
    (folder / "job").write_text(
        f"#!/bin/bash\nexec 7<>mine 8<{INSIDE}/home/shared\ntouch opened\n"
        "for i in {1..100}; do sleep 0.1; done\necho mine >&7\n"
    )
    inside = INSIDE / "home/bob/exchange"
    words = ["--checkpoint=system", "-D", str(inside), "-o", f"{inside}/out", f"{inside}/job"]
    job = sbatch(cluster, *words, user="bob")
    until((folder / "opened").exists)
    cluster.run(["scancel", *SAVE_WORDS, job])
    until(lambda: shown(cluster, job), lambda now: now["JobState"] == "PENDING")
    (folder / "mine").unlink()
    (folder / "mine").symlink_to(INSIDE / "home/shared")
    start_again(cluster, job)
    until(lambda: cluster.log_tail(f"agent@{NODE}", 5), lambda said: "is another file than it was" in said, timeout=60)
    cluster.run(["scancel", job])
    until(lambda: shown(cluster, job)["JobState"], lambda state: state not in ("RUNNING", "COMPLETING"))
    assert shared.read_text() == "of root's\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec 9<>/dev/tcp/127.0.1.1/{port} && sleep 600", "it has a TCP connection"),
        ("sleep 600", "its memory, "),
    ],
)
def test_a_job_that_cannot_be_saved_goes_on_and_says_why(cluster: DevCluster, script: str, why: str) -> None:
    port = re.search(r"SlurmctldPort\s*=\s*(\d+)", cluster.run(["scontrol", "show", "config"]).stdout)
    assert port
    set_policy(cluster, {"most_bytes": 1 << 10} if "memory" in why else {})
    job = sbatch(cluster, "--checkpoint=system", "--wrap", f"exec bash -c '{script.format(port=port[1])}'")
    until(lambda: cluster.run(["pgrep", "-fx", "sleep 600"], node=NODE, check=False).stdout)  # what it does at last
    cluster.run(["scancel", *SAVE_WORDS, job])
    until(lambda: cluster.log_tail(f"agent@{NODE}", 5), lambda said: f"job={job}" in said and why in said, timeout=60)
    assert shown(cluster, job)["JobState"] == "RUNNING"
    set_policy(cluster, {})
    cluster.run(["scancel", job])


def test_a_job_that_its_node_cannot_save_is_not_ended_by_the_signal(cluster: DevCluster) -> None:
    set_policy(cluster, None)
    until(lambda: not can_save(cluster), timeout=60)
    job = Counter(cluster, "plain", last=30)
    job.counts(5)
    job.save()
    assert job.ended()["ExitCode"] == "7:0" and job.is_exact(), job.all_said()
    set_policy(cluster, {})
    until(lambda: can_save(cluster), timeout=60)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-N2"], "several nodes"),
        (["--gres=shard:1024"], "the state of GPUs"),
        (["--no-requeue"], "--no-requeue"),
        (["--open-mode=truncate"], "--open-mode=truncate"),
        (["--checkpoint-interval=20m"], "--checkpoint-interval"),
    ],
)
def test_what_cannot_be_saved_is_refused(cluster: DevCluster, words: list[str], why: str) -> None:
    done = cluster.run(["sbatch", "--checkpoint=system", *words, "--wrap=true"], user="alice", check=False)
    assert done.returncode != 0 and why in done.stderr
